"""Parts of the grouped GEMMs, for overlap with communication: some rows of every group, some columns of the result.

Ranges of rows: int32[2, G] in the place of row_start, the begin and the end of the rows to compute in every group.
Panels of columns: (first, end) of the output's features, at multiples of PANEL_COLUMNS.
"""

from dataclasses import dataclass

import torch

from symmoe.errors import ArgumentError

# Ranges cut no tile if they begin and end at multiples of this, counted from the group's first row. They may begin and
# end anywhere, but tiles that are cut cost time.
PART_ROWS = 128
PANEL_COLUMNS = 256  # a multiple of every tile's columns: a panel's tiles are tiles of the whole


@dataclass(frozen=True, slots=True)
class Division:
    """Programs of the kernels that move rows, each of which fills an SM, and SMs of the GEMMs at the same time."""

    num_ctas: int
    num_sms: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one launch of a grouped GEMM computes.

    Attributes:
        rows: ranges of rows, or row_start.
        num_sms: most SMs that it uses; None: all.
    """

    rows: torch.Tensor
    num_sms: int | None = None


def are_ranges(row_start: torch.Tensor) -> bool:
    """Whether these are ranges [2, G], not the groups' bounds [G + 1]."""
    return row_start.ndim == 2


def num_groups_of(row_start: torch.Tensor) -> int:
    """G of ranges [2, G] or bounds [G + 1]."""
    return row_start.shape[1] if are_ranges(row_start) else row_start.shape[0] - 1


def refuse_ranges(row_start: torch.Tensor, what: str) -> None:
    """ArgumentError if these are ranges: `what` needs to know where the groups begin and end."""
    if row_start.ndim == 2:
        raise ArgumentError(f"{what} needs row_start [G + 1], got ranges of rows {list(row_start.shape)}")


def panel(columns: tuple[int, int] | None, width: int) -> tuple[int, int] | None:
    """The columns to compute of `width`; None: all. ArgumentError if they are not a panel."""
    if columns is None or tuple(columns) == (0, width):
        return None
    first, end = columns
    if not 0 <= first < end <= width or first % PANEL_COLUMNS or (end % PANEL_COLUMNS and end != width):
        raise ArgumentError(
            f"columns must be (first, end) with 0 <= first < end <= {width}, both multiples of {PANEL_COLUMNS} or the "
            f"width itself, got {columns}"
        )
    return first, end


# Shared memory of each of the three rings of kernels that sum rows while a GEMM runs (hopper/rows.py).
SUM_RING_BYTES = 72 << 10
SUM_STAGES = 2
MAX_SUM_PIECE_BYTES = 8 << 10  # 64 bytes to a thread
MAX_SUM_TOKENS = 4


def sum_stage(row_bytes: int, num_sources: int) -> tuple[int, int]:
    """(bytes of a piece, tokens) of a stage of a ring: the longest pieces of rows or panels of `row_bytes`, with up to
    `num_sources` rows to sum each, and as many tokens as there is room for."""
    most_bytes = SUM_RING_BYTES // (SUM_STAGES * num_sources)
    piece_bytes = min(1 << (row_bytes - 1).bit_length(), 1 << most_bytes.bit_length() - 1, MAX_SUM_PIECE_BYTES)
    return piece_bytes, max(1, min(MAX_SUM_TOKENS, most_bytes // piece_bytes))
