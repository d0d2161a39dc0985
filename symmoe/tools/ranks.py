"""The ranks of a run (of torchrun, or one process), and the wall time of their steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from symmoe.symm_mem.bootstrap import Bootstrap

STEPS = 20  # in a row
WARM_UP = 3
Step = Callable[[], object]
_Scalar = TypeVar("_Scalar", bound=np.generic)
_GROUP_TIMEOUT = timedelta(minutes=10)  # of the process group: a rank may compile for minutes


class Ranks:
    """This process among the ranks of the default process group; without one, rank 0 of 1. Methods are collective."""

    def __init__(self, device: torch.device) -> None:
        self._messages = Bootstrap(None)
        self.rank = self._messages.rank
        self.num_ranks = self._messages.num_ranks
        self.device = device

    def synchronize(self) -> None:
        """Waits until this rank's device is idle. Local."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits until every rank's host arrives and its device is idle."""
        self.synchronize()
        self._messages.barrier()

    def gather(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Every rank's array of the same shape and dtype, stacked in rank order."""
        gathered = self._messages.gather_bytes(values.tobytes())
        return np.stack(
            [np.frombuffer(data, values.dtype).reshape(values.shape) for data in gathered]
        )

    def largest(self, value: float) -> float:
        """The largest of all ranks' values; NaN if any is NaN."""
        return float(np.max(self.gather(np.array([value], dtype=np.float64))))


@contextmanager
def join(init_method: str | None = None, rank: int = -1, num_ranks: int = -1) -> Iterator[Ranks]:
    """The ranks of torchrun, or of `init_method`; else only this process. Uses an existing default process group, or
    creates one and ends it."""
    launched = init_method is not None or dist.is_torchelastic_launched()
    makes_group, device = launched and not dist.is_initialized(), torch.device("cpu")
    if torch.cuda.is_available():
        local_rank = rank if init_method is not None else dist.get_node_local_rank(fallback_rank=0)
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    if makes_group:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            timeout=_GROUP_TIMEOUT,
            world_size=num_ranks,
            rank=rank,
        )
    try:
        yield Ranks(device)
    finally:
        if makes_group:
            dist.destroy_process_group()


def times_in_a_row_ms(
    steps: Mapping[str, Step], ranks: Ranks, repetitions: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds [repetitions] of a step, by name: mean of STEPS in a row, as in a training loop, on the slowest
    rank. Collective."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions):
        for name in random.Random(repetition).sample(sorted(steps), len(steps)):
            ranks.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            ranks.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3 / STEPS)
    ranks.barrier()
    return {name: ranks.gather(np.array(times_ms)).max(axis=0) for name, times_ms in times.items()}
