"""Parts of the grouped GEMMs, for overlap with communication: some rows of every group, some columns of the result.

Ranges of rows: int32[2, G] in the place of row_start, the begin and the end of what is wanted of every group's rows.
Panels of columns: (first, end) of the output's features, at multiples of PANEL_COLUMNS.
"""

import torch

from symmoe.errors import ArgumentError

# Where a group's rows are cut so that no tile is: at multiples of this, counted from the group's first row. Ranges may
# begin and end anywhere, but tiles that are cut cost time.
PART_ROWS = 128
PANEL_COLUMNS = 256  # a multiple of every tile's columns: a panel's tiles are tiles of the whole


def are_ranges(row_start: torch.Tensor) -> bool:
    """Whether these are ranges [2, G], not the groups' bounds [G + 1]."""
    return row_start.ndim == 2


def refuse_ranges(row_start: torch.Tensor, what: str) -> None:
    """ArgumentError if these are ranges: `what` needs to know where the groups begin and end."""
    if row_start.ndim == 2:
        raise ArgumentError(f"{what} needs row_start [G + 1], got ranges of rows {list(row_start.shape)}")


def panel(columns: tuple[int, int] | None, width: int) -> tuple[int, int] | None:
    """The columns to compute of `width`, None if they are all. ArgumentError if no panel is like that."""
    if columns is None or tuple(columns) == (0, width):
        return None
    first, end = columns
    if not 0 <= first < end <= width or first % PANEL_COLUMNS or (end % PANEL_COLUMNS and end != width):
        raise ArgumentError(
            f"columns must be (first, end) with 0 <= first < end <= {width}, both multiples of {PANEL_COLUMNS} or the "
            f"width itself, got {columns}"
        )
    return first, end
