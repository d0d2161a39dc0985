"""Networks that misbehave: a TCP relay on each rail between two virtual nodes delays, stalls or cuts, in every phase. A
rank that no longer hears of another cannot know whether that one has gone or the network between them: the two ends of
a rail that breaks name each other. Ranks that hear of it from them name one of the two."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from limits import HANG_S, PROMPT_S
from node_calls import Overlapping, Ready, connections
from relay import Relay, relayed

from symmoe import SymmetricHeap
from symmoe.kernels import control

TIMEOUT_S = 4.0
BOUND_S = 1.25 * TIMEOUT_S + PROMPT_S  # the machine may be busy

# (what makes steps, phase of a meeting, which one of a step, whether it happens after the headers, so that tensors are
# on their way)
POINTS = {
    "plan": (Ready, control.PHASE_NODES_PLAN, 1, False),
    "dispatch": (Ready, control.PHASE_NODES_OUT, 1, False),
    "rows of dispatch": (Ready, control.PHASE_NODES_OUT, 1, True),
    "end of dispatch": (Ready, control.PHASE_NODES_OUT, 2, False),
    "combine": (Ready, control.PHASE_NODES_HOME, 1, False),
    "rows of combine": (Ready, control.PHASE_NODES_HOME, 1, True),
    "end of combine": (Ready, control.PHASE_NODES_HOME, 2, False),
    "backward of combine": (Ready, control.PHASE_NODES_OUT, 3, False),
    "backward of dispatch": (Ready, control.PHASE_NODES_HOME, 3, False),
    "rows that travel under FC1": (Overlapping, control.PHASE_NODES_OUT, 1, True),
    "sums that travel under FC2": (Overlapping, control.PHASE_NODES_HOME, 1, True),
    "gradients that travel under weight gradients": (
        Overlapping,
        control.PHASE_NODES_HOME,
        3,
        True,
    ),
}
LINK, RAIL = (0, 1), (1,)  # ranks of node 0 whose relays fail


def open_nodes() -> SymmetricHeap:
    bounds = {"timeout_s": HANG_S / 2, "start_timeout_s": HANG_S / 2}
    return SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, **bounds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Ready, Overlapping])
@run_on(4)
def test_a_slow_network(rank: int, num_ranks: int, kind: type[Ready]) -> None:
    """It gives the same bits, later, and bytes go through the relay."""
    with relayed(rank // 2) as relay:
        with open_nodes() as heap:
            ready = kind(heap, rank)
            expected = ready.step()
            if relay is not None:
                relay.delay_s = 0.1
            start = time.monotonic()
            found = ready.step()
            seconds = time.monotonic() - start
        dist.barrier()  # the relays have passed on what ranks say when they close
        assert torch.equal(found, expected)
        assert seconds > 0.5  # five exchanges or more
        assert rank > 1 or relay.num_bytes > 2000


def broken(
    rank: int,
    num_ranks: int,
    how: str,
    where: tuple[Any, ...],
    relays: tuple[int, ...],
    timeout_s: float,
):
    """What a rank raises when its network breaks, when, how long closing takes, and what is left; then a heap works."""
    with open_nodes() as first:  # what torch keeps from then on is none of it
        Ready(first, rank).step()
    before, (kind, *point) = connections(), where
    with relayed(rank // 2) as relay:
        heap = open_nodes()
        ready = kind(heap, rank)
        ready.step()
        dist.barrier()  # the relays have passed on all of this step
        heap.timeout_s = timeout_s
        if rank in relays:
            _break_at(heap, relay, how, *point)
        start = time.monotonic()
        found: dict[str, Any] = {"name": "", "text": ""}
        try:
            ready.step()
            ready.step()
        except Exception as error:  # noqa: BLE001
            found = {
                **{name: getattr(error, name, None) for name in ("rank", "node", "is_lost")},
                "name": type(error).__name__,
                "text": str(error),
            }
        raised = time.monotonic()
        heap.close()
        found |= {"raised_s": raised - start, "closed_s": time.monotonic() - raised}
    found["left"] = connections() - before  # though the heap still is there
    with open_nodes() as another:
        Ready(another, rank).step()
    return found


def _break_at(
    heap: SymmetricHeap, relay: Relay, how: str, phase: int, number: int, is_after: bool
) -> None:
    """The network breaks at a meeting of a step."""
    original, left = heap.nodes.meet, number

    def meet(its_phase: int, **agreed: int) -> list[int]:
        nonlocal left
        left -= its_phase == phase
        found = original(its_phase, **agreed) if is_after else []
        if left == 0:
            getattr(relay, how)()
        return found if is_after else original(its_phase, **agreed)

    heap.nodes.meet = meet  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("relays", [pytest.param(LINK, id="link"), pytest.param(RAIL, id="rail")])
@pytest.mark.parametrize("how", ["stall", "cut"])
def test_a_network_that_breaks(cluster, how: str, relays: tuple[int, ...], point: str):
    """Every rank raises within the bound, of a cut at once, whatever the bound; closing waits for nobody."""
    timeout_s, bound_s = (TIMEOUT_S, BOUND_S) if how == "stall" else (HANG_S / 2, PROMPT_S)
    found = cluster(4).run(broken, how, POINTS[point], relays, timeout_s)
    ends = {end for rank in relays for end in (rank, rank + 2)}
    for rank, each in enumerate(found):
        assert each["name"] == "PeerTimeout", found
        assert each["rank"] in ends - {rank}, found
        assert each["node"] == each["rank"] // 2, found
        assert f"rank {each['rank']} on node {each['node']} did not reach" in each["text"], found
        if relays == RAIL and rank in ends:
            assert each["rank"] == (rank + 2) % 4, found
        if how == "cut":
            assert each["is_lost"], found
        assert each["raised_s"] < bound_s, found
        assert each["closed_s"] < PROMPT_S, found
        assert each["left"] <= 0, (
            found
        )  # fewer, where connections of the heap before have ended late
