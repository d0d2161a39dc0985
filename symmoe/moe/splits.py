"""From the rows each group has to where each group starts, on the device of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError

Splits = torch.Tensor | Sequence[int]


def splits_problem(splits: Splits, *, num_groups: int, rows: torch.Tensor, num_rows: int) -> ArgumentError | None:
    """What is wrong with `splits` for `num_rows` rows on the device of `rows`, or None. Never waits for the device.

    The values of splits on a GPU are not looked at: kernels clamp them instead.
    """
    if not isinstance(splits, (torch.Tensor, Sequence)):
        return ArgumentError(f"splits ({splits!r}) must be a tensor or a list of {num_groups} counts")
    shape = tuple(splits.shape) if isinstance(splits, torch.Tensor) else (len(splits),)
    if shape != (num_groups,):
        return ArgumentError(f"splits has shape {list(shape)}; it must be [{num_groups}] (num_groups)")
    if isinstance(splits, torch.Tensor) and splits.dtype not in (torch.int32, torch.int64):
        return ArgumentError(f"splits has dtype {splits.dtype}; it must be torch.int32 or torch.int64")
    if isinstance(splits, torch.Tensor) and splits.is_cuda:
        if splits.device == rows.device:
            return None
        return ArgumentError(f"splits is on {splits.device}; rows is on {rows.device}")
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        return ArgumentError(
            f"splits ({type(splits).__name__} on the CPU) would be frozen into the CUDA graph that is being captured; "
            f"give an integer tensor on {rows.device}"
        )
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    if any(not isinstance(n, int) or n < 0 for n in counts) or sum(counts) > num_rows:
        return ArgumentError(f"splits ({counts}) must be counts that add up to at most {num_rows} rows")
    return None


def splits_to_row_start(splits: Splits, *, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32 [G + 1]: group g has the rows row_start[g]:row_start[g + 1]. Does not synchronise the host.

    Args:
        splits: checked by :func:`splits_problem`.
        rows: gives the device.
        num_rows: no group reaches past it, whatever device splits say.
    """
    ops = kernels.for_device(rows.device)
    if isinstance(splits, torch.Tensor) and splits.device == rows.device:
        row_start = torch.empty(splits.shape[0] + 1, dtype=torch.int32, device=rows.device)
        ops.splits_to_row_start(splits.contiguous(), row_start, num_rows)
        return row_start
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    if bounds.device == rows.device:
        return bounds
    row_start = torch.empty_like(bounds, device=rows.device)
    ops.copy_host_to_device(bounds, row_start)
    return row_start


def same_splits(left: Splits, right: Splits) -> bool:
    """Whether two splits are certainly equal, as far as can be told without waiting for a device."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return all(
            getter(left) == getter(right)
            for getter in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.type)
        )
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return False
    return list(left) == list(right)
