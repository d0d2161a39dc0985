"""Matrices anywhere in memory, passed to a kernel as a table of their addresses. Tables do not keep them alive."""

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
    """

    pointers: torch.Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of the matrices."""
        return self.pointers.device


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """G matrices of one-byte scales, of any shapes, for swizzle_scales.

    Attributes:
        sources: addresses of the matrices, int64 [G] on their device.
        destinations: addresses of their first tiles, int64 [G], multiples of 16.
        shapes: which of `extents` a matrix has, int32 [G].
        extents: int32 [S, 4] of (rows, blocks, row stride, block stride): sizes without padding, strides in bytes.
        most_tiles: the most (rows of tiles, tiles of a row) that a matrix has.
    """

    sources: torch.Tensor
    destinations: torch.Tensor
    shapes: torch.Tensor
    extents: torch.Tensor
    most_tiles: tuple[int, int]


def packed_and_table(matrices: torch.Tensor | TensorTable) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The packed tensor and the addresses in the table, of which one is None: arguments of a kernel."""
    return (matrices, None) if isinstance(matrices, torch.Tensor) else (None, matrices.pointers)
