"""Parts of the grouped GEMMs, for overlap with communication.

A part is a row_range with only some rows of every group (twin/__init__.py).
"""

from dataclasses import dataclass

import torch

# Ranges that begin and end at multiples of PART_ROWS, counted from the group's first row, cut no tile. Ranges may begin
# and end anywhere, but cut tiles cost time.
PART_ROWS = 128


@dataclass(frozen=True, slots=True)
class Division:
    """Programs of the kernels that move rows (each fills an SM), and SMs of the concurrent GEMMs."""

    num_ctas: int
    num_sms: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one launch of a grouped GEMM."""

    rows: torch.Tensor  # the row_range of the launch
    num_sms: int | None = None  # the most SMs that the launch uses; None: all
    is_of_replicas: bool = (
        False  # whether the groups are the rank's replica slots; False: its experts
    )
