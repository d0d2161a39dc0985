"""Errors, and what a run has. docs/benchmarking.md has the protocol."""

from __future__ import annotations

from typing import NamedTuple

import torch

from symmoe.errors import WrongResult
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.ranks import Ranks

WARM_UP = 3
MAX_ERROR = 3e-2  # of bf16 steps, relative; the layers measured so far have up to 1e-2


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| (Euclidean); 0 for two zeros, infinite if only `expected` is zero."""
    return row_error(got.reshape(1, -1), expected.reshape(1, -1))


def row_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any row of [., .]; 0 without rows."""
    if not expected.numel():
        return 0.0
    got, expected = got.detach().float(), expected.detach().float()
    difference = (got - expected).norm(dim=1)
    size = expected.norm(dim=1)
    return float(torch.where((difference == 0) & (size == 0), 0.0, difference / size).max())


def largest_error(name: str, error: float, max_error: float, ranks: Ranks) -> float:
    """The largest relative error of any rank. Collective. Raises WrongResult on every rank if it is more than
    `max_error`."""
    error = ranks.largest(error)
    if not error <= max_error:  # NaN is wrong too
        raise WrongResult(f"{name} is wrong: relative error {error:.3g}, allowed {max_error:.3g}")
    return error


class Run(NamedTuple):
    """One run of the benchmark: the ranks, their heap, and how often everything is timed."""

    ranks: Ranks
    heap: SymmetricHeap
    repetitions: int
