"""Matrices that lie anywhere in memory, known to a kernel by a table of their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorTable:
    """G contiguous matrices of one shape; stands where a kernel takes a packed [G, rows, columns] tensor.

    Attributes:
        pointers: int64 [G] on the device of the matrices, their addresses (16-byte aligned).
        shape: (G, rows, columns).
        dtype: of the matrices.

    The table does not keep the matrices alive.
    """

    pointers: torch.Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self.pointers.device
