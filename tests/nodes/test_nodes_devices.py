"""GPUs on several nodes, imitated on CPUs: hosts that find errors late, and a rail without bounds. A host looks for
errors now and then, not after every barrier, so ranks may have begun exchanges whose payload is unusable. The rail is
gloo, which waits without a bound and reports no lost rank, like NCCL."""

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import node_calls as calls
import pytest
import torch
from cluster import Cluster, run_on
from limits import HANG_S
from torch.utils._python_dispatch import TorchDispatchMode
from worker import open_heap

from symmoe import SymmetricHeap
from symmoe.kernels import control
from symmoe.nodes.rail import BEGUN, ENDED, GlooRail, Pairs, Payload, RailBroken, Started
from symmoe.program.builder import noted
from symmoe.symm_mem import several_nodes
from symmoe.symm_mem.reports import Report, end_waits, read_report
from symmoe.symm_mem.streams import NoStreams


class DeviceRail(GlooRail):
    """A rail that moves tensors as NcclRail does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.progress = torch.zeros(2, dtype=torch.int64)
        self._ended = threading.Event()
        self._last = threading.Event()
        self._last.set()
        self._has_begun = False

    @noted()
    def count(self, which: int) -> None:
        self._has_begun = (
            which == BEGUN and self._last.is_set()
        )  # the device has come here before the host goes on
        self.progress[BEGUN] += self._has_begun

    def begin(self, sends: Pairs, receives: Pairs, stream: Any = None) -> Started:
        if self._ended.is_set():
            return []
        before, has_begun, self.num_launched = self._last, self._has_begun, self.num_launched + 1
        self._last = ended = threading.Event()

        def travel() -> None:  # gloo's wait goes on when its group is aborted
            before.wait()  # as on a stream
            self.progress[BEGUN] += not has_begun
            with contextlib.suppress(RailBroken):
                GlooRail.wait(self, GlooRail.begin(self, sends, receives), math.inf)
                self.progress[ENDED] += 1
                ended.set()

        threading.Thread(target=travel, daemon=True).start()
        return [(0, ended)]

    def wait(self, started: Started, timeout_s: float) -> None:
        for _, ended in started:
            while not (ended.wait(1e-3) or self._ended.is_set()):
                pass

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        self.end()
        super().close()


@contextlib.contextmanager
def as_on_gpus(seed: int) -> Iterator[None]:
    """Heaps of this process behave as on GPUs; their hosts notice an error at a random time."""
    check = SymmetricHeap.check
    chance = random.Random(seed)

    def look(heap: SymmetricHeap, phase: int | None = None, *, waits: bool = False) -> None:
        late = control.STATUS_FAULT, control.STATUS_PLAN, control.STATUS_MISMATCH
        if (
            waits
            or heap._closed
            or heap._status_words[control.STATUS_KIND] not in late
            or chance.random() < 0.3
        ):
            check(heap, phase, waits=waits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoStreams, "raises_at_once", False)
        patch.setattr(
            several_nodes,
            "_make_payload",
            lambda bootstrap, _, __, store, options, unused: DeviceRail(store, **options),
        )
        patch.setattr(SymmetricHeap, "check", look)
        patch.setattr(SymmetricHeap, "synchronize", lambda heap: check(heap))
        yield


def on_gpus(
    rank: int, num_ranks: int, seed: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    with as_on_gpus(1000 * seed + rank):
        return function(rank, num_ranks, *arguments)


@pytest.mark.parametrize(
    "options", [calls.EXACT, calls.STATIC, calls.ON_RAILS], ids=["exact", "static", "rail"]
)
def test_steps_have_the_bits_of_one_node(cluster, options: dict[str, Any]):
    options = {**options, **calls.EAGERLY, "order": "slot"}
    want = cluster(4).run(calls.train, 2, {**options, "schedule": "serial"}, torch.bfloat16)
    got = cluster(4).run(on_gpus, 0, calls.train, 2, options, torch.bfloat16)
    for expected, tensor in zip(want, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, tensor, strict=True))


def test_rails_drop_the_last_tokens(cluster):
    assert cluster(4).findings(on_gpus, 0, calls.drop_on_rails, 2) == []


LAYOUTS = [pytest.param(4, 2, id="2 x 2"), pytest.param(2, 1, id="2 x 1")]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [*LAYOUTS, pytest.param(6, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_calls_raise_on_every_rank(cluster, num_ranks: int, ranks_per_node: int, seed: int):
    """Every rank raises an error of the same class, and the next calls work."""
    for actual in cluster(num_ranks).run(
        on_gpus, seed, calls.wrong_calls, ranks_per_node, num_ranks - 1 - seed % 2
    ):
        assert [error[0] for _, error in actual] == [name for name, _ in actual]


@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_unforeseen_errors_raise_on_every_rank(cluster, ranks_per_node: int, seed: int):
    """All ranks raise the error by the end of the step, at any time of their looks, and the next step works."""
    calls.check_unforeseen(
        cluster(2 * ranks_per_node).run(on_gpus, seed, calls.unforeseen, ranks_per_node),
        ranks_per_node,
    )


def test_an_error_at_the_end_of_a_plan_raises_on_every_rank(cluster):
    cluster(2).run(on_gpus, 0, calls.fail_plans, 1)


@run_on(2)
def test_no_thread_writes_to_a_gpu_while_hosts_wait_in_a_capture(rank: int, num_ranks: int) -> None:
    """The thread that watches the rail gets the host's wait outside of a capture, and not in one."""
    is_reported: list[bool] = []
    with (
        as_on_gpus(rank),
        open_heap("cpu", ranks_per_node=1) as heap,
        pytest.MonkeyPatch.context() as patch,
    ):
        rail = heap.nodes
        receive = rail.channel.receive
        patch.setattr(
            rail.channel,
            "receive",
            lambda bound: (is_reported.append(rail._waits_since < math.inf), receive(bound))[1],
        )
        for capture in (0, 1):
            patch.setattr(several_nodes, "capture_id", lambda device, capture=capture: capture)
            heap.nodes.rendezvous(control.PHASE_START)
    assert is_reported[:2] == [True, False]


def test_an_exchange_has_a_separate_bound():
    """The bounds of earlier and later exchanges do not apply, although the host is ahead and an exchange always
    moves."""
    rail = Payload()
    rail.progress, bounds = torch.zeros(2, dtype=torch.int64), []
    # The bound of the next one, whether there are graphs, and what host and device have begun, and ended, since.
    for timeout_s, rail.is_captured, num_launched, *progress in (
        *(
            (60.0, 0, 1, 1, 0),
            (4.0, 0, 2, 1, 0),
            (4.0, 0, 3, 2, 1),
            (60.0, 0, 4, 3, 2),
            (4.0, 0, 5, 4, 3),
        ),
        *(
            (4.0, 0, 6, 5, 4),
            (4.0, 1, 7, 9, 8),
            (4.0, 1, 7, 10, 10),
            (4.0, 1, 8, 11, 10),
            (60.0, 1, 9, 12, 11),
        ),
    ):
        rail.bound(timeout_s)
        rail.num_launched = num_launched
        rail.progress.copy_(torch.tensor(progress))
        bounds.append(rail.bound_s)
    assert bounds == [60, 60, 4, 4, 60, 4, 60, 60, 4, 60]


@pytest.mark.parametrize(
    ("num_nodes", "victims", "signal", "kind"),
    [
        (2, (1,), "stop", calls.Overlapping),
        pytest.param(2, (2, 3), "kill", calls.Ready, marks=pytest.mark.slow),
        pytest.param(2, (2,), "kill, deaf", calls.Ready, marks=pytest.mark.slow),
        (3, (2,), "hang", calls.Ready),
        pytest.param(3, (2,), "stop", calls.Overlapping, marks=pytest.mark.slow),
        pytest.param(3, (2,), "kill", calls.Ready, marks=pytest.mark.slow),
        pytest.param(3, (1,), "hang", calls.Overlapping, marks=pytest.mark.slow),
    ],
)
def test_a_rank_lost_during_a_transfer_is_named_on_every_rank(
    num_nodes: int, victims: tuple[int, ...], signal: str, kind: type[calls.Ready]
):
    where, (num_ranks, ranks_per_node) = (
        (kind, "begin", None),
        ((4, 2) if num_nodes == 2 else (3, 1)),
    )
    arguments = calls.lose, ranks_per_node, victims, signal, where
    survivors = Cluster(num_ranks).run_without(victims, on_gpus, 0, *arguments, timeout_s=HANG_S)
    assert len(survivors) == num_ranks - len(victims)
    calls.check_survivors(survivors, victims, ranks_per_node)


def test_an_aborting_rank_is_named_on_every_rank(cluster):
    actual = cluster(4).run(on_gpus, 0, calls.give_up)
    aborted = ("PeerAborted", 1)
    assert [error[:2] for error in actual] == [aborted, ("KeyError", -1), aborted, aborted]


class OpNames(TorchDispatchMode):
    """Records the operations of its context, and copies into memory with gaps, which need a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_" and not (args[0].is_contiguous() and args[1].is_contiguous()):
            name = "copy_ with gaps"
        self.names.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_aborting_rank_launches_no_kernel(num_ranks: int):
    """A GPU that is busy with an exchange may not load a kernel."""
    layout = control.ControlLayout(num_ranks)
    views = tuple(torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(num_ranks))
    bases = torch.zeros(num_ranks, dtype=torch.int64)
    peers = control.Peers(
        rank=num_ranks - 1, num_ranks=num_ranks, bases=bases, views=views, layout=layout
    )
    for rank in range(num_ranks):
        peers.mailbox(rank).fill_(5 + rank)
    with OpNames() as ops:
        end_waits(peers, Report("enough", missing=2), turn=1, kept_bits=control.EPOCH_MASK)
    assert ops.names <= {"slice", "select", "view", "copy_", "unbind", "lift_fresh", "detach"}, (
        ops.names
    )
    word = control.ABORT + (peers.rank << control.ABORT_RANK_SHIFT)
    for rank in range(num_ranks):
        words = peers.mailbox(rank)
        assert (words[:, :, 0] == word + 5 + rank).all()
        assert (words[:, :, 1:] == 5 + rank).all()
    assert read_report(peers, peers.rank).reason == "enough"
