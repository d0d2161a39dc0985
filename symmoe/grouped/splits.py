"""Converts the number of rows of each group into where they begin and end, on the device of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from symmoe import kernels
from symmoe.checks.arguments import Problem, memory_problem
from symmoe.errors import ArgumentError

Splits = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]

_KERNEL_DTYPES = (torch.int32, torch.int64)
_DTYPES = (*_KERNEL_DTYPES, torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def splits_problem(splits: Splits, *, num_groups: int, device: torch.device | None, num_rows: int | None) -> Problem:
    """What is wrong with `splits` for `num_rows` rows on `device` (None: unknown), or None. Never waits for the device:
    the values of splits on a GPU are not checked, and kernels clamp them instead."""
    if not isinstance(splits, (torch.Tensor, np.ndarray, Sequence)):
        return ArgumentError(f"splits ({splits!r}) must be a tensor, an array or a list of {num_groups} counts")
    shape = (len(splits),) if isinstance(splits, Sequence) else tuple(splits.shape)
    if shape != (num_groups,):
        return ArgumentError(f"splits has shape {list(shape)}; it must be [{num_groups}] (num_groups)")
    problem = None if isinstance(splits, Sequence) else _array_problem(splits, device)
    if problem is not None or (isinstance(splits, torch.Tensor) and splits.is_cuda):
        return problem
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ArgumentError(
            f"splits ({type(splits).__name__} on the CPU) would be frozen into the CUDA graph that is being captured; "
            f"give an integer tensor on {device}"
        )
    counts = splits if isinstance(splits, Sequence) else splits.tolist()
    if not _are_counts(counts) or (num_rows is not None and sum(map(int, counts)) > num_rows):
        most = "" if num_rows is None else f" that add up to at most {num_rows} rows"
        return ArgumentError(f"splits ({list(counts)}) must be counts{most}")
    return None


def splits_to_row_range(splits: Splits, *, device: torch.device, num_rows: int) -> torch.Tensor:
    """int32 [2, G] on `device` of checked splits: group g has rows row_range[0, g]:row_range[1, g], none past num_rows,
    whatever device splits say. Does not synchronise the host."""
    ops = kernels.for_device(device)
    if isinstance(splits, torch.Tensor) and splits.device == device:
        on_device = splits if splits.dtype in _KERNEL_DTYPES else splits.long()
        row_range = torch.empty((2, splits.shape[0]), dtype=torch.int32, device=device)
        ops.splits_to_row_range(on_device.contiguous(), row_range, num_rows)
        return row_range
    counts = [int(n) for n in splits] if isinstance(splits, Sequence) else splits.tolist()
    bounds = [*itertools.accumulate(counts, initial=0)]
    on_host = torch.tensor([bounds[:-1], bounds[1:]], dtype=torch.int32, device="cpu")
    if on_host.device == device:
        return on_host
    row_range = torch.empty_like(on_host, device=device)
    ops.copy_host_to_device(on_host, row_range)
    return row_range


def same_splits(left: Splits, right: Splits) -> bool:
    """Whether two splits are certainly equal, as far as can be told without waiting for a device. Takes any objects."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.layout is right.layout is torch.strided and all(
            getter(left) == getter(right)
            for getter in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.type)
        )
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        return _are_counts(left) and _are_counts(right) and list(left) == list(right)
    return False


def _array_problem(splits: torch.Tensor | npt.NDArray[np.integer[Any]], device: torch.device | None) -> Problem:
    """What is wrong with splits that have a dtype, apart from their values, or None."""
    is_integer = splits.dtype.kind in "iu" if isinstance(splits, np.ndarray) else splits.dtype in _DTYPES
    if not is_integer:
        return ArgumentError(
            f"splits has dtype {splits.dtype}; it must be torch.int32, torch.int64 or another integer dtype"
        )
    if isinstance(splits, np.ndarray):
        return None
    if device is not None and splits.device not in (device, torch.device("cpu")):
        return ArgumentError(f"splits is on {splits.device}; rows is on {device}")
    return memory_problem("splits", splits)


def _are_counts(counts: Sequence[object]) -> TypeGuard[Sequence[int | np.integer[Any]]]:
    # isinstance takes a bool for an int, but a mask is no count.
    return all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0 for n in counts)
