"""Matrices anywhere in memory, passed to a kernel as a table of their addresses. Tables do not keep them alive."""

from typing import NamedTuple

import torch


class TensorTable(NamedTuple):
    """G contiguous matrices of one shape, for kernels that take a packed [G, rows, columns] tensor."""

    pointers: torch.Tensor  # addresses of the matrices, int64 [G] on their device (16-byte aligned)
    shape: tuple[int, int, int]  # (G, rows, columns)
    dtype: torch.dtype  # of the matrices

    @property
    def device(self) -> torch.device:
        """The device of the matrices."""
        return self.pointers.device


class ScaleTable(NamedTuple):
    """G matrices of one-byte scales, of any shapes, for swizzle_scales."""

    sources: torch.Tensor  # addresses of the matrices, int64 [G] on their device
    destinations: torch.Tensor  # addresses of their first tiles, int64 [G], multiples of 16
    shapes: torch.Tensor  # which of `extents` a matrix has, int32 [G]
    # int32 [S, 4] of (rows, blocks, row stride, block stride): sizes without padding, strides in bytes
    extents: torch.Tensor
    most_tiles: tuple[int, int]  # the most (rows of tiles, tiles of a row) that a matrix has


def packed_and_table(
    matrices: torch.Tensor | TensorTable,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The packed tensor and the addresses in the table, of which one is None: arguments of a kernel."""
    return (matrices, None) if isinstance(matrices, torch.Tensor) else (None, matrices.pointers)
