"""The suite "rail": what a rank and those on its rail send each other between nodes, by the heap's own exchange.

Messages of several sizes, and those of a dispatch of the case with rails of fixed size: T tokens to every other node.
On GPUs it is the time of the stream, which the hosts' meeting does not hold up as long as they run ahead; "meeting" is
the time that the hosts spend in it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from suites.problem import DTYPE, Problem
from suites.records import Record, new_record
from suites.timing import Run, Variant, align_ahead, host_times_ms, in_steps, measure
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap, nodes_of

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
PHASE = control.PHASE_NODES_OUT


def exchange(name: str, heap: SymmetricHeap, num_bytes: int) -> Variant:
    """Messages of so many bytes to and from every other node, and the preceding part of a call."""
    nodes = range(heap.topology.num_nodes)
    sent = torch.full((num_bytes,), heap.rank % 251, dtype=torch.uint8, device=heap.device)
    all_received = [torch.empty_like(sent) for _ in nodes]

    begin = partial(heap.barrier, PHASE)

    def move() -> None:
        between = nodes_of(heap)
        between.rendezvous(PHASE)
        with between.transfer([(node, sent) for node in nodes], [*enumerate(all_received)]):
            pass

    def verify() -> float:
        """0 if the received bytes are the sent ones, else 1."""
        for received in all_received:
            received.fill_(255)
        begin()
        move()
        heap.synchronize()
        rail = [pair for pair in enumerate(heap.topology.rail) if pair[1] != heap.rank]
        return float(any(bool((all_received[node] != rank % 251).any()) for node, rank in rail))

    return Variant(name, ("barrier", "exchange"), in_steps(begin, move), verify)


def bench_rail(problem: Problem, run: Run) -> list[Record]:
    """Exchanges, and meetings, on a heap that spans nodes. Collective.

    Raises:
        ArgumentError: on every rank, if it does not.
    """
    heap, case = run.heap, problem.case
    if heap.nodes is None:
        raise ArgumentError("rail: all ranks are on one node; --ranks-per-node cuts it")
    fields = {
        "suite": "rail",
        "ep": heap.num_ranks,
        "nodes": heap.topology.num_nodes,
        "direction": "forward",
    }
    dispatched = f"{case.shape.name}, {case.num_tokens} tokens"
    sizes = SIZES | {dispatched: case.num_tokens * case.shape.hidden * DTYPE.itemsize}
    records = []
    for name, num_bytes in sizes.items():
        times, errors = measure(run, [exchange(name, heap, num_bytes)], align=align_ahead)
        figures = {
            "preset": case.shape.name if name == dispatched else None,
            "wire_bytes": num_bytes * (heap.topology.num_nodes - 1),
            "error": errors[name],
        }
        records.append(new_record(times[name][:, 1], variant=name, **figures, **fields))
    return [*records, new_record(_synchronisations_ms(run), variant="meeting", **fields)]


def _synchronisations_ms(run: Run) -> npt.NDArray[np.float64]:
    """Milliseconds of the hosts' synchronisations, on the slowest rank."""
    times_ms = list[float]()
    for _ in range(run.repetitions):
        run.heap.barrier(PHASE)
        times_ms += host_times_ms(lambda: nodes_of(run.heap).rendezvous(PHASE), run.ranks)
    run.heap.synchronize()
    return np.asarray(run.ranks.gather(np.array(times_ms)).max(0))
