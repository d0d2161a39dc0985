"""Parts of the grouped GEMMs, for overlap with communication.

A part is a row_range that has only some rows of every group (twin/__init__.py).
"""

from dataclasses import dataclass

import torch

from symmoe.kernels.operands import check_operand

# Ranges cut no tile if they begin and end at multiples of this, counted from the group's first row. They may begin and
# end anywhere, but tiles that are cut cost time.
PART_ROWS = 128


@dataclass(frozen=True, slots=True)
class Division:
    """Programs of the kernels that move rows, each of which fills an SM, and SMs of the GEMMs at the same time."""

    num_ctas: int
    num_sms: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one launch of a grouped GEMM computes."""

    rows: torch.Tensor  # the row_range of the launch
    num_sms: int | None = None  # most SMs that it uses; None: all
    is_of_replicas: bool = (
        False  # whether the groups are a rank's places for replicas; else its experts
    )


def range_of(bounds: torch.Tensor) -> torch.Tensor:
    """The row_range of groups that lie one after the other: int32[2, G] from int32[G + 1], the row where each begins
    and the row where the last one ends."""
    return torch.stack((bounds[:-1], bounds[1:]))


def bounds_of(row_range: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`range_of`."""
    return torch.cat((row_range[0], row_range[1, -1:]))


def equal_groups(num_groups: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """The row_range of groups that have num_rows rows each."""
    begin = torch.arange(num_groups, dtype=torch.int32, device=device) * num_rows
    return torch.stack((begin, begin + num_rows))


def checked_row_range(row_start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The row_range int32[2, G] of groups of `rows`, from their bounds int32[G + 1] or their row_range itself;
    ArgumentError if it is neither. Values are not looked at."""
    is_range = row_start.dim() == 2
    shape = (2, max(1, row_start.shape[1])) if is_range else (max(2, row_start.numel()),)
    check_operand("row_start", row_start, shape, (torch.int32,), rows.device)
    return row_start if is_range else range_of(row_start)
