"""Wall time of consecutive steps of one kind, as in a training loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from symmoe.tools.ranks import Ranks

STEPS = 20  # in a row
WARM_UP = 3
Step = Callable[[], object]


def times_in_a_row_ms(
    steps: Mapping[str, Step], ranks: Ranks, repetitions: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds [repetitions] of a step, by name: mean of STEPS in a row, on the slowest rank. Collective."""
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
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            times[name].append((time.perf_counter() - start) * 1e3 / STEPS)
    ranks.barrier()
    return {name: ranks.gather(np.array(taken)).max(axis=0) for name, taken in times.items()}
