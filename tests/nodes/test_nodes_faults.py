"""Errors in groups that span nodes: every rank of every node raises the same error, in the same call. After a wrong
argument or a full heap on one rank the next calls work. A rank, or a whole node, that is killed or stopped is named
within the bound of the rails, and closing waits for no rank."""

import os
import signal
import time
from collections.abc import Callable

import node_calls as nodes
import pytest
import torch
from cluster import Cluster, run_on
from limits import HANG_S, PROMPT_S
from worker import free_bytes, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens
from symmoe.kernels import control
from symmoe.symm_mem import several_nodes

LAYOUTS = [pytest.param(4, 2, id="2 x 2"), pytest.param(3, 1, id="3 x 1", marks=pytest.mark.slow)]


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
@pytest.mark.parametrize("culprit", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_calls_raise_on_every_rank(
    cluster, num_ranks: int, ranks_per_node: int, culprit: int
):
    by_rank = cluster(num_ranks).run(nodes.wrong_calls, ranks_per_node, culprit)
    for (expected, first), *further_errors in zip(*by_rank, strict=True):
        assert first[0] == expected, first
        assert [error for _, error in further_errors] == [first] * (num_ranks - 1)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
@run_on()
def test_full_heaps_raise_on_every_rank(rank: int, num_ranks: int, ranks_per_node: int) -> None:
    """Classes of errors where a heap has no room left, in dispatch, combine, backward and in a layer."""
    results = []
    sizes = {
        "hidden": nodes.HIDDEN,
        "ffn": 8,
        "num_experts": nodes.NUM_EXPERTS,
        "top_k": nodes.TOP_K,
    }
    config = MoEConfig(**sizes, schedule="always-overlapped")
    with open_heap("cpu", num_bytes=1 << 20, ranks_per_node=ranks_per_node) as heap:
        ready = nodes.Ready(heap, rank)
        layer = MoELayer(config, heap)
        for call in ("dispatch", "combine", "backward", "layer", "backward of the layer"):
            plan = ready.plan()
            rows, _, handle = dispatch_tokens(ready.x.clone().requires_grad_(), plan)
            y = combine_tokens(rows, handle)
            z, _ = layer(ready.x.clone().requires_grad_())
            calls: dict[str, Callable[[], object]] = {
                "dispatch": lambda plan=plan: dispatch_tokens(ready.x, plan),
                "combine": lambda rows=rows, handle=handle: combine_tokens(rows.detach(), handle),
                "backward": lambda y=y: y.sum().backward(),
                "layer": lambda: layer(ready.x),
                "backward of the layer": lambda z=z: z.sum().backward(),
            }
            hog = heap.lease((free_bytes(heap),), torch.uint8) if rank == 2 else None
            results.append(nodes.outcome(calls[call])[0])
            if hog is not None:
                hog.release()
            del plan, rows, y, z, calls
            ready.step()
        layer(ready.x)[0].sum().backward()
    assert results == ["HeapExhausted"] * 5


def test_unforeseen_errors_raise_on_every_rank(cluster):
    by_rank = cluster(4).run(nodes.unforeseen, 2)
    nodes.check_unforeseen(by_rank, 2)
    assert all(
        [is_back for *_, is_back in errors] == [is_back for *_, is_back in by_rank[-1]]
        for errors in by_rank
    )


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
def test_an_error_at_the_end_of_a_plan_raises_on_every_rank(
    cluster, num_ranks: int, ranks_per_node: int
):
    cluster(num_ranks).run(nodes.fail_plans, ranks_per_node)


def fail_across(rank: int, num_ranks: int) -> tuple[str, str]:
    """The error of a dispatch that ranks 1 and 2 fail, on two nodes and two rails. Rank 0 is at the rendezvous before
    the first barrier and waits for rank 2, and rank 3 for rank 1, while ranks 1 and 2 wait for them in barriers."""
    with open_heap("cpu", ranks_per_node=2, timeout_s=PROMPT_S) as heap:
        ready = nodes.Ready(heap, rank)
        ready.step()
        plan = ready.plan()
        actual = nodes.outcome(
            lambda: dispatch_tokens(ready.x[1:] if rank in (1, 2) else ready.x, plan)
        )
        if actual[0] == "ArgumentError":  # else the heap is poisoned
            ready.step()
        return actual


def test_a_failing_rank_reports_to_its_rail_first(cluster):
    first, *further_errors = cluster(4).run(fail_across)
    assert (first[0], further_errors) == ("ArgumentError", [first] * 3)


def lost_at_the_start(rank: int, num_ranks: int) -> tuple[str, float]:
    """A rank ends while the rails are made."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(
                several_nodes, "start_rail", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
            )
        start = time.monotonic()
        name, _ = nodes.outcome(
            lambda: SymmetricHeap(
                num_bytes=1 << 20, backend="host", ranks_per_node=2, start_timeout_s=nodes.TIMEOUT_S
            )
        )
        return name, time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_ends_at_the_start_is_named():
    survivors = Cluster(4).run_without((3,), lost_at_the_start)
    assert len(survivors) == 3
    for name, seconds in survivors.values():
        assert name in ("PeerLost", "PeerTimeout"), survivors
        assert seconds < 3 * nodes.TIMEOUT_S + PROMPT_S


# -- lost ranks -------------------------------------------------------------------------------------------------------
POINTS = {
    "plan: barrier": (nodes.Ready, "barrier", control.PHASE_PLAN),
    "plan: rail": (nodes.Ready, "rendezvous", control.PHASE_NODES_PLAN),
    "dispatch: rail": (nodes.Ready, "rendezvous", control.PHASE_NODES_OUT),
    "dispatch: barrier": (nodes.Ready, "barrier", control.PHASE_DISPATCH_DONE),
    "combine: barrier": (nodes.Ready, "barrier", control.PHASE_COMBINE_READY),
    "combine: rail": (nodes.Ready, "rendezvous", control.PHASE_NODES_HOME),
    "overlapped: own rows": (nodes.Overlapping, "wait_for_signal", control.PHASE_DISPATCH_DONE),
    "overlapped: rows on the rail": (nodes.Overlapping, "end", None, 2),  # one is of the plan
    "overlapped: rows of other nodes": (nodes.Overlapping, "barrier", control.PHASE_DISPATCH_DONE),
    "overlapped: gradients": (nodes.Overlapping, "rendezvous", control.PHASE_NODES_OUT, 2),
    "overlapped: own sums": (nodes.Overlapping, "barrier", control.PHASE_COMBINE_READY, 2),
    "overlapped: sums on the rail": (nodes.Overlapping, "end", None, 3),
    "overlapped: end of combine": (nodes.Overlapping, "rendezvous", control.PHASE_NODES_HOME, 2),
    "overlapped: weight gradients": (nodes.Overlapping, "end", None, 5),
}
SHORT = [
    ((1,), "stop", "plan: rail"),  # a rank of the other node waits for what its peer finds out
    ((1,), "stop", "overlapped: rows on the rail"),
    ((2, 3), "kill", "combine: rail"),
]
# Victims are one rank or a whole node of two, and one rank of three nodes.
LOSSES = [
    pytest.param(
        num_nodes,
        victims,
        fault,
        point,
        marks=[pytest.mark.slow] * ((victims, fault, point) not in SHORT),
    )
    for num_nodes, victims in ((2, (1,)), (2, (2, 3)), (3, (2,)))
    for fault in ("kill", "stop")
    for point in POINTS
]


@pytest.mark.parametrize(("num_nodes", "victims", "signal", "point"), LOSSES)
def test_a_lost_rank_or_node_is_named_everywhere(
    num_nodes: int, victims: tuple[int, ...], signal: str, point: str
):
    survivors = Cluster(2 * num_nodes).run_without(
        victims, nodes.lose, 2, victims, signal, POINTS[point], timeout_s=HANG_S
    )
    assert len(survivors) == 2 * num_nodes - len(victims)
    nodes.check_survivors(survivors, victims, 2)


HALF_WAY = {
    "counts": (nodes.Ready, 1),
    "maps and rows": (nodes.Ready, 2),
    "tokens": (nodes.Overlapping, 2),
    "sums": (nodes.Overlapping, 3),
}


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(3, 1), pytest.param(6, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[pytest.mark.slow] * (p != "tokens")) for p in HALF_WAY]
)
def test_a_rank_stopped_in_an_exchange_is_named_on_every_rank(
    num_ranks: int, ranks_per_node: int, point: str
):
    """One node has all rows, and waits for a node without them: all ranks name the stopped rank."""
    victims = (ranks_per_node,)
    signal = "stop half way", HALF_WAY[point]
    survivors = Cluster(num_ranks).run_without(
        victims, nodes.lose, ranks_per_node, victims, *signal, timeout_s=HANG_S
    )
    assert len(survivors) == num_ranks - 1
    nodes.check_survivors(survivors, victims, ranks_per_node)


def test_an_aborting_rank_reports_to_all_nodes(cluster):
    actual = cluster(4).run(nodes.give_up)
    assert actual[1][0] == "KeyError"
    for rank in (0, 2, 3):
        assert actual[rank][:2] == ("PeerAborted", 1), actual
        assert actual[rank][2] == 'rank 1 gave up: KeyError: "a user\'s error"'
        assert actual[rank][3] < 30.0


def close_early(rank: int, num_ranks: int) -> tuple[str, str]:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, timeout_s=60.0)
    ready = nodes.Ready(heap, rank)
    ready.step()
    return nodes.outcome(heap.close if rank < 2 else ready.step)[0], nodes.outcome(heap.close)[0]


def test_a_node_that_closes_early_aborts_the_other(cluster):
    """The other node raises the error in its call, and in close, at any time, the report that the node has left."""
    closed = ("ConfigMismatch", "")
    open = ("ConfigMismatch", "PeerAborted")
    for _ in range(4):
        assert cluster(4).run(close_early) == [closed, closed, open, open]
