"""What is measured of a step besides its time: what it asks of the host, which is its time and what torch.profiler sees
it launch, wait for and copy; bytes that travel, and memory at the peak."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from suites.problem import Problem
from suites.records import Record, rounded
from suites.timing import host_times_ms
from symmoe.dispatch.plan import Plan
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import Ranks, Step

_HOST_STEPS = 10  # steps whose launches are timed
_TRACED = "traced step"
# CUDA runtime and driver calls that return only when the GPU has got somewhere.
_WAITING_CALLS = {
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *(
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
    ),
}
_COPYING_OPERATORS = {"aten::copy_", "aten::clone", "aten::contiguous"}


def of_step(step: Step, problem: Problem, ranks: Ranks) -> Record:
    """`host_us`: the median time until a step's call returns, with an idle GPU before it. On GPUs also its kernels,
    calls that wait for the GPU, copies from device to device and allocations. Collective."""
    host_ms = statistics.median(host_times_ms(step, ranks, _HOST_STEPS))
    figures: Record = {"host_us": rounded(host_ms * 1e3)}
    if ranks.device.type != "cuda":
        return figures | dict.fromkeys(("launches", "waits", "copies", "allocations"))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    trace = trace_step(step, row_numel=problem.case.num_slots * problem.case.shape.hidden)
    return figures | {
        "launches": trace.kernels.total(),
        "waits": trace.waits.total(),
        "copies": trace.copies_on_device.total(),
        "allocations": allocations,
    }


@dataclass(frozen=True)
class StepTrace:
    """The counts of one step in torch.profiler, by name: kernels; copies by the driver ("Memcpy DtoD (Device ->
    Device)", "Memset (Device)", ...); calls that wait for the GPU; copies of large tensors by torch's operators."""

    kernels: Counter[str]
    copies: Counter[str]
    waits: Counter[str]
    row_copies: Counter[str]

    @property
    def copies_on_device(self) -> Counter[str]:
        """The number of copies from device to device, by the driver or by torch."""
        return (
            Counter({k: n for k, n in self.copies.items() if "DtoD" in k or "PtoP" in k})
            + self.row_copies
        )

    @property
    def findings(self) -> list[str]:
        """Events that a zero-copy step with static capacity must not have."""
        return [f"{count} x {name}" for name, count in (self.copies_on_device + self.waits).items()]


def trace_step(step: Step, *, row_numel: int) -> StepTrace:
    """Profiles one call of `step`, which has run before. Synchronises.

    Args:
        row_numel: elements from which a copy by a torch operator counts.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(record_shapes=True) as profiler:
        with torch.profiler.record_function(_TRACED):
            step()
        torch.cuda.synchronize()  # outside of the step: everything it launched is in the trace
    events = profiler.events()
    span = next(e.time_range for e in events if e.name == _TRACED and e.device_type.name == "CPU")
    trace = StepTrace(*(Counter[str]() for _ in range(4)))
    for event in events:
        if event.device_type.name == "CUDA":
            if event.name != _TRACED:
                (trace.copies if event.name.startswith(("Memcpy", "Memset")) else trace.kernels)[
                    event.name
                ] += 1
        elif span.start <= event.time_range.start <= span.end:
            shape = event.input_shapes[0] if event.input_shapes else None
            if event.name in _WAITING_CALLS:
                trace.waits[event.name] += 1
            elif event.name in _COPYING_OPERATORS and shape and math.prod(shape) >= row_numel:
                trace.row_copies[f"{event.name} {shape}"] += 1
    return trace


def dispatch_bytes(plan: Plan, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that this rank sends to each rank, itself included."""
    return (plan.token_to_packed_row >= 0).sum(0).cpu().numpy().astype(np.int64) * row_bytes


def combine_bytes(plan: Plan, order: str, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that this rank receives from each rank in a combine, itself included."""
    if order == "rank":
        count = (plan.token_to_primary_row >= 0).sum(0)
    else:
        ranks = plan.slot_to_rank[plan.slot_to_row >= 0].long()
        count = torch.bincount(ranks, minlength=plan.heap.num_ranks)
    return count.cpu().numpy().astype(np.int64) * row_bytes


def wire_bytes(moved: npt.NDArray[np.int64], ranks: Ranks) -> int:
    """The bytes that leave a rank, from the bytes of each pair of ranks: the largest of all ranks. Collective."""
    return int(ranks.largest(float(moved.sum() - moved[ranks.rank])))


class MemoryMeter:
    """Memory in use beyond that at construction: ordinary memory, which only GPUs count, and the heap's. Synchronises,
    also to read the peak."""

    def __init__(self, device: torch.device, heap: SymmetricHeap) -> None:
        self._on_gpu = device.type == "cuda"
        self._heap = heap
        self._leased = heap.memory.arena.high_water_bytes = heap.leased_bytes
        self._allocated = 0
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def held(self) -> dict[str, int | None]:
        """Now."""
        return {
            "held_ordinary_bytes": torch.cuda.memory_allocated() - self._allocated
            if self._on_gpu
            else None,
            "held_heap_bytes": self._heap.leased_bytes - self._leased,
        }

    def peak(self) -> dict[str, int | None]:
        """The largest number of bytes since construction."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return {
            "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - self._allocated
            if self._on_gpu
            else None,
            "peak_heap_bytes": self._heap.high_water_bytes - self._leased,
        }
