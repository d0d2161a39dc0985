"""Ranks that reach each other, in groups of all kinds; ranks that are missing, abort or fail in a call."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial, reduce
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, run_on
from heap_calls import outcome, round_trip
from limits import HANG_S, PROMPT_S
from worker import Findings, is_unwritten, open_heap, wait_for_arrivals

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, kernels, make_plan
from symmoe.dispatch.plan import ReceivedIndex
from symmoe.dispatch.trip import dispatch
from symmoe.errors import ArgumentError, HeapPoisoned, PeerAborted, PeerError, PeerLost, PeerTimeout
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division
from symmoe.symm_mem.bootstrap import Bootstrap

NUM_BYTES = 1 << 20


@run_on(1, 2, 4)
def test_peers_see_each_other(rank: int, num_ranks: int, findings: Findings) -> None:
    with (
        open_heap("cpu", num_bytes=NUM_BYTES) as heap,
        heap.lease((num_ranks, 4), torch.int32, name="a") as a,
    ):
        heap.barrier(control.PHASE_START)
        for peer in range(num_ranks):
            a.peer(peer)[rank] = 100 * rank + peer  # each rank writes its row everywhere
        heap.barrier(control.PHASE_START)
        want = [[100 * source + rank] * 4 for source in range(num_ranks)]
        findings.equal("what peers wrote", a.tensor.tolist(), want)
        for peer in range(num_ranks):
            want = [[100 * source + peer] * 4 for source in range(num_ranks)]
            findings.equal(f"what rank {peer} holds", a.peer(peer).tolist(), want)
        # Words that a barrier publishes arrive, in many rounds with slow ranks.
        generator = random.Random(rank)
        for turn in range(200):
            if generator.random() < 0.05:
                time.sleep(0.002)
            got = heap.barrier(
                control.PHASE_START, publish=(turn, 1000 * rank + turn)[: 1 + turn % 2]
            )
            first = [turn] * num_ranks
            second = [1000 * r + turn if turn % 2 else 0 for r in range(num_ranks)]
            findings.equal(
                "published",
                got.tolist(),
                [[u, v, 0, 0] for u, v in zip(first, second, strict=True)],
            )
        heap.barrier(control.PHASE_START)


@run_on(2, 4, 8)
def test_ranks_may_have_different_leases(rank: int, num_ranks: int, heap: SymmetricHeap) -> None:
    """Leases may have other offsets on every rank: ranks publish offsets."""
    with heap.lease((1000 * rank + 1,), torch.uint8, name="only here, so large"):
        first = round_trip(heap)
        with heap.lease((512 * (num_ranks - rank),), torch.uint8, name="and here"):
            second = round_trip(heap, seed=50)
    assert first
    assert second
    assert heap.leased_bytes == 0


@run_on(4, 8, on_gpus=(4, 8))
def test_disjoint_groups_at_once(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Two interleaved groups at once, even ranks and odd ones; on CPUs also the world and groups of one rank."""
    evens, odds = (list(range(first, num_ranks, 2)) for first in (0, 1))
    groups = [dist.new_group(ranks) for ranks in (evens, odds, *([r] for r in range(num_ranks)))]
    with contextlib.ExitStack() as stack:
        kinds = (groups[rank % 2], None, groups[2 + rank])[
            : 1 if device == "cuda" else 3
        ]  # NVSHMEM: one in a process
        heaps = [
            stack.enter_context(open_heap(device, group=group, num_bytes=NUM_BYTES))
            for group in kinds
        ]
        expected = [(rank // 2, num_ranks // 2), (rank, num_ranks), (0, 1)][: len(heaps)]
        findings.equal(
            "rank in each group", [(heap.rank, heap.num_ranks) for heap in heaps], expected
        )
        half, *further_heaps = heaps
        with half.lease((64,), torch.uint8, name="untouched") as lease:
            for turn in range(30):
                if turn % 3 == rank % 2:  # one half is ahead of the other now and then
                    time.sleep(0.001)
                findings.check(
                    round_trip(half, 1000 * (rank % 2) + 10 * turn), f"half, turn {turn}"
                )
                for heap in further_heaps if turn % 5 == 0 else further_heaps[1:]:
                    findings.check(
                        round_trip(heap, 7 * turn), f"group of {heap.num_ranks}, turn {turn}"
                    )
            findings.check(is_unwritten(lease.tensor), "another group wrote into this heap")
        # one half fails, the other does not notice
        bad = torch.full((1, 1), 0 if rank % 2 else 99, device=half.device)
        kind, _ = outcome(make_plan, bad, num_experts=half.num_ranks, heap=half)
        findings.equal("error of the half", kind, "" if rank % 2 else "ExpertIdError")
        findings.check(round_trip(half), "half, afterwards")
    with open_heap(device, num_bytes=NUM_BYTES) as heap:  # and again, all together
        findings.check(round_trip(heap), "the world, afterwards")
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("make_plan", "plan: counts"),
        ("dispatch_tokens", "dispatch: ready"),
        ("combine_tokens", "combine: ready"),
    ],
)
@run_on(2, 4)
def test_a_missing_peer_is_named_by_all_others(
    rank: int, num_ranks: int, findings: Findings, call: str, phase: str
) -> None:
    """The last rank misses `call` and arrives late: all others raise the same error, and a new heap works at once."""
    missing, timeout_s = num_ranks - 1, 0.5
    findings.where = f"rank {rank} of {num_ranks}"
    heap = SymmetricHeap(
        num_bytes=NUM_BYTES, backend="host", timeout_s=HANG_S, start_timeout_s=HANG_S
    )
    ids = torch.zeros(2, 1, dtype=torch.int64)
    calls: dict[str, Callable[..., object]] = {
        "make_plan": lambda plan: make_plan(ids, num_experts=num_ranks, heap=heap),
        "dispatch_tokens": lambda plan: dispatch_tokens(torch.ones(2, 8), plan),
        "combine_tokens": lambda dispatched: combine_tokens(dispatched[0], dispatched[2]),
    }
    first = list(calls).index(call)
    result = reduce(lambda result, name: calls[name](result), list(calls)[:first], None)
    dist.barrier()
    if rank == 0:  # only this rank has a short bound: the others already wait, with a long one
        wait_for_arrivals(heap, range(1, missing))
        heap.timeout_s = heap.start_timeout_s = timeout_s
    expected = f"rank {missing} did not reach '{phase}' within "
    start = time.monotonic()
    if rank != missing:
        with pytest.raises(PeerTimeout) as caught:
            calls[call](result)
        took_s = time.monotonic() - start
        error = caught.value
        findings.check(0.9 * timeout_s < took_s < PROMPT_S, f"it took {took_s} s")
        actual = (error.rank, error.phase, error.expected - error.seen)
        findings.equal("rank, phase and epochs too late", actual, (missing, phase, 1))
        exact = expected + (f"timeout_s={timeout_s}: expected epoch" if rank == 0 else "")
        findings.check(str(error).startswith(exact), str(error))
        heap.timeout_s = heap.start_timeout_s = HANG_S  # nobody waits any more
        name, text = outcome(make_plan, ids, num_experts=num_ranks, heap=heap)
        findings.check(name == "HeapPoisoned" and expected in text, f"{name}: {text}")
        # Kernels that were launched before the abort return at once, without offsets.
        offsets = heap.waits.wait(control.pack_call(phase=control.PHASE_START))
        findings.equal("offsets", offsets.tolist(), [[-1] * control.NUM_PUBLISHED] * num_ranks)
        findings.equal(
            "error of a lease", outcome(heap.lease, (1,), torch.uint8)[0], "HeapPoisoned"
        )
    dist.barrier()
    if rank == missing:  # finds that its peers have given it up
        name, text = outcome(
            reduce, lambda result, name: calls[name](result), list(calls)[first:], result
        )
        exact = f"rank 0 gave up: {expected}timeout_s={timeout_s}: expected epoch"
        findings.check(name == "PeerAborted" and text.startswith(exact), f"{name}: {text}")
    heap.close()
    findings.equal("after close", outcome(heap.check)[0], "HeapClosed")
    dist.barrier()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        findings.check(round_trip(heap), "a new heap does not work")


@run_on(3)
def test_a_late_rank_fails_in_a_call_that_peers_aborted(rank: int, num_ranks: int) -> None:
    """All ranks had reached the barrier of the call, but too late."""
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=0.5, start_timeout_s=0.5)
    if rank == 0:
        dist.barrier()
    with pytest.raises(PeerAborted if rank == 0 else PeerTimeout):
        heap.barrier(control.PHASE_DISPATCH_READY)
    if rank > 0:
        dist.barrier()  # all have given up: now the late rank comes
    with contextlib.suppress(PeerError):
        heap.close()


@run_on(2, 4, 8)
def test_a_fault_ends_barriers_that_peers_have_launched(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """One rank fails a call. Its peers have launched the barriers of this call and of later calls without a look at
    the status, as hosts of GPUs do: the fault is raised once, and all ranks continue from the same epoch."""
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=PROMPT_S) as heap:
        for turn in range(4 * num_ranks):
            findings.where = f"rank {rank} of {num_ranks}, turn {turn}"
            if rank == turn % num_ranks:
                actual = outcome(
                    heap._fail, ArgumentError(f"turn {turn}"), control.PHASE_DISPATCH_READY
                )
                findings.equal("error", actual, ("ArgumentError", f"turn {turn}"))
            else:
                phases = [
                    control.PHASE_DISPATCH_READY,
                    control.PHASE_DISPATCH_DONE,
                    control.PHASE_COMBINE_READY,
                ]
                for phase in phases[: 1 + turn % 3]:
                    words = heap.waits.wait(control.pack_call(phase=phase), publish=(512,))
                    findings.check(
                        bool((words == -1).all()), f"offsets in a failed call: {words.tolist()}"
                    )
                culprit = turn % num_ranks
                findings.equal(
                    "error",
                    outcome(heap.check),
                    ("ArgumentError", f"on rank {culprit}: turn {turn}"),
                )
            findings.equal("error afterwards", outcome(heap.check), ("", ""))
            if turn % 2:
                findings.check(round_trip(heap, turn), "the next correct call is wrong")


def _aborts_in_its_first_step(heap: SymmetricHeap, peer: int) -> None:
    """Aborts instead of the signal to the next rank, once the rank before has sent its signal: no other rank can have
    sent one."""
    signals = heap.peers.signals(heap.rank)[:, 0]
    while int(signals[heap.rank - 1]) != heap.epoch:
        time.sleep(0.01)
    heap.abort("on purpose")


def _gives_up(heap: SymmetricHeap, at: int):
    barrier = heap.barrier

    def gives_up(phase: int, **kwargs):
        if phase == at:
            wait_for_arrivals(heap, range(heap.rank))  # they have sent their rows
            heap.abort("on purpose")
            heap.check()
        return barrier(phase, **kwargs)

    return gives_up


@run_on(2, 3)
def test_rows_of_a_failed_dispatch_are_nan(rank: int, num_ranks: int, findings: Findings) -> None:
    """The last rank aborts between its rows and their arrival: the other ranks' buffers are NaN."""
    last = rank == num_ranks - 1
    for kind in ("dispatch_tokens", "gradient", "during GEMMs"):
        findings.where = f"{kind}, rank {rank} of {num_ranks}"
        heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0)
        x = torch.ones(5, 8, dtype=torch.bfloat16)
        probs = torch.rand(5, 2)
        ids = (torch.arange(5)[:, None] + torch.tensor([0, 1])) % num_ranks
        plan = make_plan(ids, num_experts=num_ranks, heap=heap)
        buffers = [heap.lease((plan.row_capacity, 8), torch.bfloat16) for _ in range(3)]
        below, out, above = (lease.tensor.fill_(7) for lease in buffers)
        dist.barrier()
        if last:
            heap.barrier = _gives_up(heap, control.PHASE_DISPATCH_DONE)
            heap._send_signal = partial(_aborts_in_its_first_step, heap)
        try:
            if kind == "dispatch_tokens":
                dispatch_tokens(x, plan, probs=probs, out=out)
            elif kind == "gradient":
                index = ReceivedIndex(
                    torch.zeros(plan.packed_row_capacity, 2, dtype=torch.int32),
                    torch.zeros(plan.row_capacity, dtype=torch.int32),
                )
                with dispatch(x, plan, out, layout="expert-major", index=index):
                    pass
            else:
                with dispatch(
                    x, plan, out, probs, layout="expert-major", division=Division(1, 1)
                ) as arrival:
                    for _ in arrival.parts:
                        pass
        except (PeerAborted, HeapPoisoned):
            # Where rows travel one rank at a time, some of the last rank's may come after the failure: right ones.
            spoiled = out.isnan() | ((out == 1) if kind == "during GEMMs" else False)
            fine = bool(spoiled.all() and out.isnan().any())
            findings.check(fine or last, f"rows of a failed call: {out.tolist()}")
            findings.check(
                bool((below == 7).all() and (above == 7).all()), "a neighbour was overwritten"
            )
        else:
            findings.check(last, "nothing was raised")
        dist.barrier()
        heap.close()


@run_on(3)
def test_rows_are_sent_once_when_the_trip_fails(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """An exception while the last rank copies a peer's rows: the rank has sent all its rows, none of them twice."""
    ids = (torch.arange(5)[:, None] + torch.tensor([0, num_ranks])) % (2 * num_ranks)
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0) as heap:
        plan = make_plan(ids, num_experts=2 * num_ranks, heap=heap)
        sent = []
        out = heap.lease((plan.row_capacity, 8), torch.bfloat16).tensor.fill_(7)
        send_signal = heap._send_signal
        heap._send_signal = lambda peer: (sent.append(peer), send_signal(peer))

        def fails(name: str, kernel, /, *args, **options) -> object:
            if name == "fan_out" and rank == num_ranks - 1 and options["source"] != rank:
                raise ZeroDivisionError("a bug of ours")
            return kernel(*args, **options)

        with (
            kernels.hooked(heap.device, fails),
            contextlib.suppress(ZeroDivisionError)
            if rank == num_ranks - 1
            else contextlib.nullcontext(),
            dispatch(
                torch.ones(5, 8, dtype=torch.bfloat16),
                plan,
                out,
                torch.rand(5, 2),
                layout="expert-major",
                division=Division(1, 1),
            ) as arrival,
        ):
            for _ in arrival.parts:
                pass
        findings.equal(
            "peers that were sent to",
            sent,
            [(rank + step) % num_ranks for step in range(1, num_ranks)],
        )
        findings.check(
            rank == num_ranks - 1 or bool((out[: plan.num_rows] == 1).all()),
            f"rows: {out.tolist()}",
        )
        findings.check(round_trip(heap), "the next correct call is wrong")


@pytest.mark.parametrize("end", ["close", "exception"])
@run_on(2)
def test_closed_arenas_contain_no_tokens(
    rank: int, num_ranks: int, findings: Findings, end: str
) -> None:
    """An arena that a process keeps mapped after its rank has closed it is zero behind the control block."""
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0)
    assert round_trip(heap)
    lease = heap.lease((1000, 8), torch.float32)
    lease.tensor.fill_(3.0)
    arenas = [arena() for arena in heap.memory.arenas]
    dist.barrier()
    findings.check(
        all(bool(arena[heap.peers.layout.num_bytes :].any()) for arena in arenas),
        "nothing to be zeroed",
    )
    dist.barrier()
    if end == "close":
        heap.close()
    else:
        with contextlib.suppress(ZeroDivisionError), heap:
            raise ZeroDivisionError
    dist.barrier()
    for peer, arena in enumerate(arenas):
        # The peers write into the control block that they abort.
        findings.check(
            not arena[heap.peers.layout.num_bytes :].any(), f"rank {peer}'s arena holds something"
        )
    dist.barrier()


def stay_away_from_construction(
    rank: int, num_ranks: int, kind: str
) -> tuple[str, int | None, str, float]:
    """Rank 0 stays away. The error of another rank, and its seconds."""
    if rank == 0 and kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(HANG_S)
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        SymmetricHeap(
            num_bytes=NUM_BYTES, backend="host", start_timeout_s=1.0 if kind == "late" else HANG_S
        )
    error = caught.value
    return type(error).__name__, error.rank, str(error), time.monotonic() - start


@pytest.mark.parametrize(("kind", "num_ranks"), [("killed", 3), ("late", 2)])
def test_construction_names_a_missing_rank(kind: str, num_ranks: int):
    actual = Cluster(num_ranks).run_without((0,), stay_away_from_construction, kind)
    assert sorted(actual) == [*range(1, num_ranks)]
    assert 0 in [missing for _, missing, *_ in actual.values()]
    for rank, (error, missing, text, took_s) in actual.items():
        # gloo closes all connections when it has lost one rank: a survivor may count as lost like the killed rank.
        assert missing == 0 or (kind == "killed" and missing == 3 - rank)
        assert took_s < PROMPT_S  # and not start_timeout_s
        if kind == "late":
            assert error == PeerTimeout.__name__
            assert text.startswith("rank 0 did not reach 'start-up' within start_timeout_s=1")
            assert took_s > 0.9
        else:
            assert error == PeerLost.__name__


@run_on(2)
def test_a_timeout_that_gloo_rounds_down_is_no_lost_peer(rank: int, num_ranks: int) -> None:
    """gloo ends the wait for a message a moment before the bound has passed on this process's clock."""
    ended = RuntimeError("Timed out waiting 4999ms for recv operation to complete")
    bootstrap = Bootstrap(None, timeout_s=5.0)
    with (
        mock.patch.object(dist, "isend", return_value=None),
        mock.patch.object(dist, "irecv", return_value=mock.Mock(**{"wait.side_effect": ended})),
        pytest.raises(PeerTimeout, match=f"rank {1 - rank} .* within start_timeout_s=5"),
    ):
        bootstrap.barrier()
    bootstrap.barrier()


@run_on(2)
def test_waits_may_have_no_bound(rank: int, num_ranks: int) -> None:
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=float("inf")) as heap:
        if rank:
            time.sleep(0.2)
        assert round_trip(heap)
