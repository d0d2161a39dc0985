"""What goes wrong in groups that span nodes: every rank of every node raises the same error, in the same call.

A wrong argument or a full heap on one rank is followed by calls that work. A rank, or a whole node, that is killed or
stopped is named within the bound of the rails, and closing waits for nobody.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cluster import Cluster
from limits import HANG_S, PROMPT_S
from worker import free_bytes, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.combine import trip as combine_trip
from symmoe.combine.nodes import FromNodes
from symmoe.dispatch import trip
from symmoe.dispatch.nodes import RailPlan
from symmoe.kernels import control
from symmoe.moe import ep_step
from symmoe.nodes.rail import Messages, Started

NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN = 8, 3, 12, 8
LAYOUTS = [pytest.param(4, 2, id="2 x 2"), pytest.param(3, 1, id="3 x 1", marks=pytest.mark.slow)]


def outcome(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of what a call raises; the text without the rank that is put before it on others."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error).split(": ", 1)[-1] if str(error).startswith("on rank ") else str(error)
    return "", ""


class Ready:
    """Inputs of this rank."""

    def __init__(self, heap: SymmetricHeap, rank: int) -> None:
        self.heap = heap
        generator = torch.Generator().manual_seed(rank)
        chosen = [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(NUM_TOKENS)]
        self.ids = torch.stack(chosen).to(heap.device)
        self.x = torch.randn((NUM_TOKENS, HIDDEN), generator=generator).to(heap.device)

    def plan(self, **options: Any):
        """A plan."""
        return make_plan(self.ids, num_experts=NUM_EXPERTS, heap=self.heap, **options)

    def step(self) -> torch.Tensor:
        """Forward and backward; raises if a result is wrong."""
        x, plan = self.x.clone().requires_grad_(), self.plan()
        rows, _ = dispatch_tokens(x, plan)
        y = combine_tokens(rows, plan)
        y.sum().backward()
        torch.testing.assert_close(y, TOP_K * self.x)
        torch.testing.assert_close(x.grad, torch.full_like(self.x, TOP_K))
        return y


class Overlapping(Ready):
    """Its steps are those of a layer whose GEMMs run while rows travel. `is_back`: whether it has come to backward."""

    def __init__(self, heap: SymmetricHeap, rank: int) -> None:
        super().__init__(heap, rank)
        sizes = {"hidden": HIDDEN, "ffn": 8, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
        self._layer = MoELayer(MoEConfig(**sizes, router="none", schedule="always-overlapped"), heap)
        self._probs = torch.full(self.ids.shape, 0.5, device=heap.device)
        self._wanted: list[torch.Tensor] = []
        self.is_back = False

    def step(self) -> torch.Tensor:
        self.is_back = False
        x = self.x.clone().requires_grad_()
        y, _ = self._layer(x, topk_idx=self.ids, probs=self._probs)
        self.is_back = True
        y.sum().backward()
        self.heap.synchronize()  # what a call that has failed has computed is nothing to compare
        found = [y.detach(), x.grad]
        self._wanted = self._wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, self._wanted, strict=True))
        return y


# -- errors -----------------------------------------------------------------------------------------------------------


def wrong_calls(
    rank: int, num_ranks: int, ranks_per_node: int, culprit: int, device: str = "cpu"
) -> list[tuple[str, tuple[str, str]]]:
    """What calls raise in which the culprit, or its node, brings something wrong; each is followed by a right one."""
    found: list[tuple[str, tuple[str, str]]] = []
    is_culprit, on_its_node = rank == culprit, rank // ranks_per_node == culprit // ranks_per_node
    # A rank of the next node on another rail: its peers and mates do not wait for those of the culprit.
    across = (culprit // ranks_per_node + 1) * ranks_per_node % num_ranks + (culprit + 1) % ranks_per_node
    with open_heap(device, num_bytes=1 << 20, ranks_per_node=ranks_per_node) as heap:
        ready = Ready(heap, rank)
        x = ready.x
        wide = torch.cat([x, x], 1)

        def expect(name: str, call: Callable[[], object]) -> None:
            found.append((name, outcome(lambda: (call(), heap.synchronize()))))
            ready.step()

        bad_ids = ready.ids.clone()
        bad_ids[0, 0] = NUM_EXPERTS if is_culprit else bad_ids[0, 0]
        for capacity in (None, 100):
            options = {"num_experts": NUM_EXPERTS, "heap": heap, "capacity": capacity}
            expect("ArgumentError", lambda o=options: make_plan(ready.ids.float() if is_culprit else ready.ids, **o))
            expect("ExpertIdError", lambda o=options: make_plan(bad_ids, **o))
        more = NUM_EXPERTS * (2 if is_culprit else 1)
        expect("ConfigMismatch", lambda: make_plan(ready.ids, num_experts=more, heap=heap))
        for differs in (is_culprit, on_its_node):
            sizes = {"hidden": HIDDEN, "ffn": 8, "num_experts": NUM_EXPERTS, "top_k": 1}
            layer = MoELayer(MoEConfig(**sizes, stash="none" if differs else "all"), heap)
            expect("ConfigMismatch", lambda its=layer: its(x))
            assert found[-1][1][1].startswith("stash differs: rank ")
        rail_capacity = 50 if on_its_node else 40
        expect("ConfigMismatch", lambda: ready.plan(capacity=100, max_tokens=50, rail_capacity=rail_capacity))
        for has_capacity in (is_culprit, not is_culprit, on_its_node):  # the others' hosts read the plan
            expect("ConfigMismatch", lambda static=has_capacity: ready.plan(capacity=100 if static else None))
        expect("CapacityError", lambda: ready.plan(capacity=1))
        expect("CapacityError", lambda: ready.plan(capacity=100, rail_capacity=1))
        plan = ready.plan()
        expect("ArgumentError", lambda: dispatch_tokens(x[1:] if is_culprit else x, plan))
        expect("ArgumentError", lambda: dispatch_tokens(x[1:] if rank in (culprit, across) else x, plan))
        expect("ConfigMismatch", lambda: dispatch_tokens(wide if is_culprit else x, plan))
        expect("ConfigMismatch", lambda: dispatch_tokens(wide if on_its_node else x, plan))
        rows, _ = dispatch_tokens(x, plan)
        expect("ArgumentError", lambda: combine_tokens(rows[1:] if is_culprit else rows, plan))
        expect("ConfigMismatch", lambda: combine_tokens(rows, plan, order="slot" if on_its_node else "rank"))
        other_plan = ready.plan()
        other_rows, _ = dispatch_tokens(x, other_plan)
        expect("ConfigMismatch", lambda: dispatch_tokens(x, plan if on_its_node else other_plan))
        its = (rows, plan) if on_its_node else (other_rows, other_plan)
        expect("ConfigMismatch", lambda: combine_tokens(*its))
        expect("ConfigMismatch", lambda: dispatch_tokens(x, plan) if on_its_node else combine_tokens(rows, plan))
        expect("ConfigMismatch", lambda: ready.plan() if on_its_node else combine_tokens(rows, plan))
    return found


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
@pytest.mark.parametrize("culprit", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_calls(cluster, num_ranks: int, ranks_per_node: int, culprit: int):
    by_rank = cluster(num_ranks).run(wrong_calls, ranks_per_node, culprit)
    for (wanted, first), *others in zip(*by_rank, strict=True):
        assert first[0] == wanted, first
        assert [error for _, error in others] == [first] * (num_ranks - 1)


def full_heaps(rank: int, num_ranks: int, ranks_per_node: int, culprit: int) -> list[str]:
    """Classes of errors where a heap has no room left, in dispatch, combine, backward and in a layer."""
    found = []
    sizes = {"hidden": HIDDEN, "ffn": 8, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    config = MoEConfig(**sizes, schedule="always-overlapped")
    with open_heap("cpu", num_bytes=1 << 20, ranks_per_node=ranks_per_node) as heap:
        ready, layer = Ready(heap, rank), MoELayer(config, heap)
        for call in ("dispatch", "combine", "backward", "layer", "backward of the layer"):
            plan = ready.plan()
            rows, _ = dispatch_tokens(ready.x.clone().requires_grad_(), plan)
            y = combine_tokens(rows, plan)
            z, _ = layer(ready.x.clone().requires_grad_())
            calls: dict[str, Callable[[], object]] = {
                "dispatch": lambda plan=plan: dispatch_tokens(ready.x, plan),
                "combine": lambda plan=plan, rows=rows: combine_tokens(rows.detach(), plan),
                "backward": lambda y=y: y.sum().backward(),
                "layer": lambda: layer(ready.x),
                "backward of the layer": lambda z=z: z.sum().backward(),
            }
            hog = heap.lease((free_bytes(heap),), torch.uint8) if rank == culprit else None
            found.append(outcome(calls[call])[0])
            if hog is not None:
                hog.release()
            del plan, rows, y, z, calls
            ready.step()
        layer(ready.x)[0].sum().backward()
    return found


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
def test_full_heaps(cluster, num_ranks: int, ranks_per_node: int):
    assert cluster(num_ranks).run(full_heaps, ranks_per_node, 2) == [["HeapExhausted"] * 5] * num_ranks


def middle(ranks_per_node: int) -> dict[str, tuple[Any, str, int, bool]]:
    """In the middle of what code: a function, which of its calls in a step on two nodes, and whether in backward."""
    parts = ranks_per_node + 1  # of a dispatch: the ranks of this node, and the other node
    return {
        "sending": (RailPlan, "sent_rows", 1, False),
        "own rows": (trip, "Part", 0, False),
        "rows of a peer": (trip, "Part", 1, False),
        "rows of other nodes": (trip, "Part", parts - 1, False),
        "FC2 of other nodes": (combine_trip, "Part", 0, False),
        "FC2 of own rows": (combine_trip, "Part", 1, False),
        "summing": (FromNodes, "add", 0, False),
        "sending gradients": (RailPlan, "sent_rows", 3, True),  # after those of maps, tokens and probs
        "own gradients": (trip, "Part", parts, True),
        "gradients of other nodes": (trip, "Part", 2 * parts - 1, True),
        "weight gradients": (ep_step._EPStep, "weight_gradients", 0, True),
        "summing in backward": (FromNodes, "add", 1, True),
    }


def unforeseen(rank: int, num_ranks: int, ranks_per_node: int) -> list[tuple[str, str, bool]]:
    """Class and text of exceptions on the last rank, and whether the step has come to backward. The steps that follow
    are right."""
    found = []
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        ready = Overlapping(heap, rank)
        ready.step()
        for owner, name, number, _ in middle(ranks_per_node).values():
            left, original = number, getattr(owner, name)

            def fail(*arguments: Any, original: Callable[..., Any] = original, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    raise RuntimeError("out of memory, say")
                return original(*arguments, **options)

            with pytest.MonkeyPatch.context() as patch:
                if rank == num_ranks - 1:
                    patch.setattr(owner, name, fail)
                found.append((*outcome(ready.step), ready.is_back))
            ready.step()
    return found


def check_unforeseen(by_rank: list[list[tuple[str, str, bool]]], ranks_per_node: int) -> None:
    """All ranks raise the error in the same step."""
    text, *others, victim = "out of memory, say", *by_rank
    assert [error[:2] for error in victim] == [("RuntimeError", text)] * len(victim)
    for found in others:
        assert [error[:2] for error in found] == [("SymmoeError", f"RuntimeError: {text}")] * len(victim)
    assert [is_back for *_, is_back in victim] == [is_back for *_, is_back in middle(ranks_per_node).values()]


def test_unforeseen_errors(cluster):
    by_rank = cluster(4).run(unforeseen, 2)
    check_unforeseen(by_rank, 2)
    assert all([is_back for *_, is_back in found] == [is_back for *_, is_back in by_rank[-1]] for found in by_rank)


def fail_across(rank: int, num_ranks: int) -> tuple[str, str]:
    """What a dispatch raises that ranks 1 and 2 fail, on two nodes and two rails. Rank 0 is at the meeting before the
    first barrier and waits for rank 2, and rank 3 for rank 1, while these wait for them in barriers."""
    with open_heap("cpu", ranks_per_node=2, timeout_s=PROMPT_S) as heap:
        ready = Ready(heap, rank)
        ready.step()
        plan = ready.plan()
        found = outcome(lambda: dispatch_tokens(ready.x[1:] if rank in (1, 2) else ready.x, plan))
        if found[0] == "ArgumentError":  # else the heap is poisoned
            ready.step()
        return found


def test_who_fails_says_so_to_its_rail_first(cluster):
    first, *others = cluster(4).run(fail_across)
    assert first[0] == "ArgumentError"
    assert others == [first] * 3


def lost_at_the_start(rank: int, num_ranks: int) -> tuple[str, float]:
    """A rank ends while the rails are made."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(SymmetricHeap, "_make_mates", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        start = time.monotonic()
        name, _ = outcome(
            lambda: SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, start_timeout_s=TIMEOUT_S)
        )
        return name, time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_ends_at_the_start():
    survivors = Cluster(4).run_without((3,), lost_at_the_start)
    assert len(survivors) == 3
    for name, seconds in survivors.values():
        assert name in ("PeerLost", "PeerTimeout"), survivors
        assert seconds < 3 * TIMEOUT_S + PROMPT_S


# -- lost ranks -------------------------------------------------------------------------------------------------------

TIMEOUT_S = 4.0
BOUND_S = 1.25 * TIMEOUT_S + PROMPT_S  # the machine may be busy


def lose(rank: int, num_ranks: int, ranks_per_node: int, victims: tuple[int, ...], how: str, where: tuple[Any, ...]):
    """What a survivor raises, when, and how long closing takes."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=ranks_per_node, timeout_s=HANG_S / 2)
    kind, *point = where
    ready = kind(heap, rank)
    for _ in range(2):
        ready.step()
    heap.timeout_s, heap.start_timeout_s = TIMEOUT_S, 30.0
    if rank in victims:
        _stop_half_way(heap, *point) if how == "stop half way" else _end_at(heap, how, *point)
    start = time.monotonic()
    try:
        for _ in range(3):
            ready.step()
        found: tuple[Any, ...] = ("nothing", -1, -1)
    except Exception as error:  # noqa: BLE001
        found = type(error).__name__, getattr(error, "rank", -1), getattr(error, "node", -1)
    raised = time.monotonic()
    heap.close()
    return *found, raised - start, time.monotonic() - raised


def _end_at(heap: SymmetricHeap, how: str, method: str, phase: int | None = None, number: int = 1) -> None:
    """This process ends, or stops, when it comes to that of its barriers or meetings of that phase, or to the end of
    that exchange."""
    owner = heap._faults if phase is None else heap
    original, left = getattr(owner, method), number

    def end(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= phase is None or phase in arguments
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return original(*arguments, **options)

    setattr(owner, method, end)


def _stop_half_way(heap: SymmetricHeap, number: int) -> None:
    """This process stops when it has sent the tensors of that exchange to the last node, and to no other."""
    payload = heap._faults._mates._payload
    original, left = payload.begin, number

    def begin(sends: Messages, receives: Messages, timeout_s: float) -> Started:
        nonlocal left
        left -= 1
        if left:
            return original(sends, receives, timeout_s)
        last = heap.topology.num_nodes - 1
        to_last = [[each if node == last else each[:0] for node, each in enumerate(by_node)] for by_node in sends]
        original(to_last, receives, timeout_s)
        os.kill(os.getpid(), signal.SIGSTOP)
        return []

    payload.begin = begin


POINTS = {
    "plan: barrier": (Ready, "barrier", control.PHASE_PLAN),
    "plan: rail": (Ready, "meet", control.PHASE_NODES_PLAN),
    "dispatch: rail": (Ready, "meet", control.PHASE_NODES_OUT),
    "dispatch: barrier": (Ready, "barrier", control.PHASE_DISPATCH_DONE),
    "combine: barrier": (Ready, "barrier", control.PHASE_COMBINE_READY),
    "combine: rail": (Ready, "meet", control.PHASE_NODES_HOME),
    "overlapped: own rows": (Overlapping, "wait_for_signal", control.PHASE_DISPATCH_DONE),
    "overlapped: rows on the rail": (Overlapping, "end_to_move", None, 3),  # two are of the plan
    "overlapped: rows of other nodes": (Overlapping, "barrier", control.PHASE_DISPATCH_DONE),
    "overlapped: end of dispatch": (Overlapping, "meet", control.PHASE_NODES_OUT, 2),
    "overlapped: own sums": (Overlapping, "barrier", control.PHASE_COMBINE_READY, 2),
    "overlapped: sums on the rail": (Overlapping, "end_to_move", None, 4),
    "overlapped: end of combine": (Overlapping, "meet", control.PHASE_NODES_HOME, 2),
    "overlapped: weight gradients": (Overlapping, "end_to_move", None, 6),
}
SHORT = [((1,), "stop", "overlapped: rows on the rail"), ((2, 3), "kill", "combine: rail")]
ALL = [((victims), how, point) for victims in ((1,), (2, 3)) for how in ("kill", "stop") for point in POINTS]


def _check_loss(num_ranks: int, ranks_per_node: int, victims: tuple[int, ...], how: str, point: str) -> None:
    ranks = Cluster(num_ranks)
    survivors = ranks.run_without(victims, lose, ranks_per_node, victims, how, POINTS[point], timeout_s=HANG_S)
    assert len(survivors) == num_ranks - len(victims)
    for name, missing, node, raised_s, closed_s in survivors.values():
        assert (name, node) == ("PeerTimeout", missing // ranks_per_node), survivors
        assert missing in victims, survivors
        assert raised_s < BOUND_S, survivors
        assert closed_s < PROMPT_S, survivors


@pytest.mark.parametrize(("victims", "how", "point"), SHORT)
def test_a_lost_rank_or_node_is_named_everywhere(victims: tuple[int, ...], how: str, point: str):
    _check_loss(4, 2, victims, how, point)


@pytest.mark.slow
@pytest.mark.parametrize(("victims", "how", "point"), ALL)
def test_lost_in_every_phase(victims: tuple[int, ...], how: str, point: str):
    _check_loss(4, 2, victims, how, point)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("point", POINTS)
def test_lost_among_three_nodes(how: str, point: str):
    _check_loss(6, 2, (2,), how, point)


HALF_WAY = {"plan: counts": (Ready, 1), "plan: maps": (Ready, 2), "tokens": (Overlapping, 3), "sums": (Overlapping, 4)}


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(3, 1), pytest.param(6, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", [pytest.param(p, marks=[pytest.mark.slow] * (p != "tokens")) for p in HALF_WAY])
def test_stopped_half_way_through_an_exchange(num_ranks: int, ranks_per_node: int, point: str):
    """One node has all rows, and waits for one that has not: all name the rank that stopped."""
    victim, arguments = ranks_per_node, (ranks_per_node, (ranks_per_node,), "stop half way", HALF_WAY[point])
    survivors = Cluster(num_ranks).run_without((victim,), lose, *arguments, timeout_s=HANG_S)
    assert len(survivors) == num_ranks - 1
    for name, missing, node, raised_s, closed_s in survivors.values():
        assert (name, missing, node) == ("PeerTimeout", victim, 1), survivors
        assert raised_s < BOUND_S, survivors
        assert closed_s < PROMPT_S, survivors


def give_up(rank: int, num_ranks: int) -> tuple[str, int, str, float]:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, timeout_s=60.0)
    ready = Ready(heap, rank)
    ready.step()
    start = time.monotonic()
    try:
        with heap:
            if rank == 1:
                raise KeyError("a user's error")
            ready.step()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, getattr(error, "rank", -1), str(error), time.monotonic() - start
    return "", -1, "", 0.0


def test_a_rank_that_gives_up_tells_all_nodes(cluster):
    found = cluster(4).run(give_up)
    assert found[1][0] == "KeyError"
    for rank in (0, 2, 3):
        assert found[rank][:2] == ("PeerAborted", 1), found
        assert found[rank][2] == 'rank 1 gave up: KeyError: "a user\'s error"'
        assert found[rank][3] < 30.0


def close_early(rank: int, num_ranks: int) -> tuple[str, str]:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, timeout_s=60.0)
    ready = Ready(heap, rank)
    ready.step()
    return outcome(heap.close if rank < 2 else ready.step)[0], outcome(heap.close)[0]


def test_a_node_that_closes_while_others_go_on(cluster):
    """The others learn of it in their call, and that the node has left when they close, whenever they come to that."""
    left, stayed = ("ConfigMismatch", ""), ("ConfigMismatch", "PeerAborted")
    for _ in range(10):
        assert cluster(4).run(close_early) == [left, left, stayed, stayed]
