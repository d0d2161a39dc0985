"""Parts of the grouped GEMMs, for overlap with communication.

A part is a row_range that has only some rows of every group (twin/__init__.py).
"""

from dataclasses import dataclass

import torch

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
