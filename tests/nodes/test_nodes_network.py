"""Networks that break between two virtual nodes, in every phase: connections of a rail are cut while both ends live. A
rank without messages of a peer cannot distinguish a lost peer from a broken network: the two ends of a broken rail name
each other. Ranks that get their reports name one of the two. test_nodes_faults.py has stopped peers, whose connections
stay open."""

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest
from limits import HANG_S, PROMPT_S
from node_calls import Overlapping, Ready

from symmoe import SymmetricHeap
from symmoe.kernels import control

# (what makes steps, phase of a rendezvous, which one of a step, whether it happens after the headers, so that tensors
# are on their way)
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
LINK = (0, 1)  # ranks of node 0 whose connections break
RAIL = (1,)


def open_nodes() -> SymmetricHeap:
    bounds = {"timeout_s": HANG_S / 2, "start_timeout_s": HANG_S / 2}
    return SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, **bounds)


def sockets() -> dict[str, int]:
    """Sockets of this process, and their files."""
    results = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the file of this listing is closed
            name = os.readlink(file)
            if name.startswith("socket:"):
                results[name] = int(file.name)
    return results


def cut(names: set[str]) -> None:
    """Shuts the connections of these files down, for both sides."""
    for name, file in sockets().items():
        if name in names:
            with socket.socket(fileno=os.dup(file)) as end, contextlib.suppress(OSError):
                if (
                    end.family == socket.AF_INET and end.getpeername()
                ):  # no listener, which has none
                    end.shutdown(socket.SHUT_RDWR)


def broken(rank: int, num_ranks: int, where: tuple, ranks: tuple[int, ...]) -> dict[str, object]:
    """The error of a rank whose network breaks, its time, the time of close, and open sockets; then a heap works."""
    with open_nodes() as first:  # resources that torch keeps afterwards do not count
        Ready(first, rank).step()
    further_sockets = set(sockets())
    kind, *point = where
    heap = open_nodes()
    ready = kind(heap, rank)
    ready.step()
    if rank in ranks:
        cut_at(heap, set(sockets()) - further_sockets, *point)
    start = time.monotonic()
    result: dict[str, object] = {"name": "", "text": ""}
    try:
        ready.step()
        ready.step()
    except Exception as error:  # noqa: BLE001
        result = {name: getattr(error, name, None) for name in ("rank", "node", "is_lost")}
        result |= {"name": type(error).__name__, "text": str(error)}
    raised = time.monotonic()
    heap.close()
    result |= {"raised_s": raised - start, "closed_s": time.monotonic() - raised}
    result["left"] = len(sockets()) - len(further_sockets)  # though the heap still is there
    with open_nodes() as another:
        Ready(another, rank).step()
    return result


def cut_at(heap: SymmetricHeap, names: set[str], phase: int, number: int, is_after: bool) -> None:
    """At a rendezvous of a step."""
    original = heap.nodes.rendezvous
    remaining = number

    def rendezvous(its_phase: int, **agreed: int) -> None:
        nonlocal remaining
        remaining -= its_phase == phase
        if is_after:
            original(its_phase, **agreed)
        if remaining == 0:
            cut(names)
        if not is_after:
            original(its_phase, **agreed)

    heap.nodes.rendezvous = rendezvous  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[pytest.mark.slow] * (p != "rows of combine")) for p in POINTS]
)
@pytest.mark.parametrize("ranks", [pytest.param(LINK, id="link"), pytest.param(RAIL, id="rail")])
def test_a_broken_network_raises_on_every_rank(cluster, ranks: tuple[int, ...], point: str):
    """Every rank raises at once, with any bound; closing waits for no rank."""
    actual = cluster(4).run(broken, POINTS[point], ranks)
    ends = {end for rank in ranks for end in (rank, rank + 2)}
    for rank, result in enumerate(actual):
        assert result["name"] == "PeerTimeout", actual
        assert result["rank"] in ends - {rank}, actual
        assert result["node"] == result["rank"] // 2, actual
        assert f"rank {result['rank']} on node {result['node']} did not reach" in result["text"], (
            actual
        )
        if ranks == RAIL and rank in ends:
            assert result["rank"] == (rank + 2) % 4, actual
        assert result["is_lost"], actual
        assert result["raised_s"] < PROMPT_S, actual
        assert result["closed_s"] < PROMPT_S, actual
        assert result["left"] <= 0, actual  # fewer: connections of the heap before may end late
