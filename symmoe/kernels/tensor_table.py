"""Matrices anywhere in memory, passed to a kernel as a table of their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorTable:
    """G contiguous matrices of one shape, for kernels that take a packed [G, rows, columns] tensor.

    Attributes:
        pointers: addresses of the matrices, int64 [G] on their device (16-byte aligned).
        shape: (G, rows, columns).
        dtype: dtype of the matrices.

    The table does not keep the matrices alive.
    """

    pointers: torch.Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of the matrices."""
        return self.pointers.device


def packed_and_table(matrices: torch.Tensor | TensorTable) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The packed tensor and the addresses in the table, of which one is None: arguments of a kernel."""
    return (matrices, None) if isinstance(matrices, torch.Tensor) else (None, matrices.pointers)
