"""What is measured of a step besides its time: bytes that travel, and memory at the peak."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from symmoe.dispatch.plan import Plan
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import Ranks


def dispatch_bytes(plan: Plan, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that this rank sends to each rank, itself included."""
    return (plan.token_to_packed_row >= 0).sum(0).cpu().numpy().astype(np.int64) * row_bytes


def combine_bytes(plan: Plan, order: str, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that come to this rank from each rank in a combine, itself included."""
    if order == "rank":
        count = (plan.token_to_primary_row >= 0).sum(0)
    else:
        ranks = plan.slot_to_rank[plan.slot_to_row >= 0].long()
        count = torch.bincount(ranks, minlength=plan.heap.num_ranks)
    return count.cpu().numpy().astype(np.int64) * row_bytes


def wire_bytes(moved: npt.NDArray[np.int64], ranks: Ranks) -> int:
    """The bytes that leave a rank, from the bytes that move to or from each: the largest of all ranks. Collective."""
    return int(ranks.largest(float(moved.sum() - moved[ranks.rank])))


class MemoryMeter:
    """Bytes beyond what was there when the meter was made: ordinary memory, which only GPUs count, and the heap's.
    Synchronises, also to read the peak."""

    def __init__(self, device: torch.device, heap: SymmetricHeap | None) -> None:
        self._on_gpu, self._heap, self._allocated, self._leased = device.type == "cuda", heap, 0, 0
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
        if heap is not None:
            self._leased = heap.memory.arena.high_water_bytes = heap.leased_bytes

    def held(self) -> dict[str, int | None]:
        """Now."""
        return {
            "held_ordinary_bytes": torch.cuda.memory_allocated() - self._allocated
            if self._on_gpu
            else None,
            "held_heap_bytes": 0 if self._heap is None else self._heap.leased_bytes - self._leased,
        }

    def peak(self) -> dict[str, int | None]:
        """At most, since then."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return {
            "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - self._allocated
            if self._on_gpu
            else None,
            "peak_heap_bytes": 0
            if self._heap is None
            else self._heap.high_water_bytes - self._leased,
        }
