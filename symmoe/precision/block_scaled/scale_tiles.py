"""One-byte scales into the 128x4 tiles that Blackwell's block-scaled matrix units read, and back.

In a tile, the scale of row m and block q is byte m % 32 * 16 + m // 32 * 4 + q; tiles lie row by row. Swizzled scales
are not for the wire: a group's padding depends on where it lies.
"""

from __future__ import annotations

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels.formats import max_tiles
from symmoe.kernels.gemm_parts import range_of
from symmoe.kernels.scaled import TILE_BLOCKS, TILE_BYTES


def swizzle_scales(scale: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    """Scales of grouped rows in 128x4 tiles; every group begins at a new tile. No host synchronisation.

    Args:
        scale: float8_e8m0fnu, float8_e4m3fn or uint8 [N, Q], contiguous.
        row_start: int32[G + 1] on its device, the groups' bounds; or int32[2, G], their begins and ends.

    Returns:
        uint8 [max_tiles(N, G), ceil(Q / 4), 512]. The first tile of a group is the one after the last of the group
        before. The padding of rows and blocks is 0; tiles past those of the last group are 0.

    Raises:
        ArgumentError: an argument is not as described.
    """
    row_range = _row_range(scale, row_start)
    num_rows, num_blocks = scale.shape
    shape = (max_tiles(num_rows, row_range.shape[1]), -(-num_blocks // TILE_BLOCKS), TILE_BYTES)
    swizzled = torch.zeros(shape, dtype=torch.uint8, device=scale.device)
    if swizzled.numel():
        kernels.for_device(scale.device).swizzle_scales(scale, row_range, swizzled)
    return swizzled


def unswizzle_scales(
    swizzled: torch.Tensor, row_start: torch.Tensor, *, num_rows: int, num_blocks: int
) -> torch.Tensor:
    """The inverse of :func:`swizzle_scales`: uint8 [num_rows, num_blocks]; scales of rows in no group are 0.

    Raises:
        ArgumentError: swizzled is not what num_rows rows of num_blocks blocks in these groups have.
    """
    scale = torch.zeros(num_rows, num_blocks, dtype=torch.uint8, device=swizzled.device)
    row_range = _row_range(scale, row_start)
    shape = (max_tiles(num_rows, row_range.shape[1]), -(-num_blocks // TILE_BLOCKS), TILE_BYTES)
    if swizzled.dtype != torch.uint8 or swizzled.shape != shape or not swizzled.is_contiguous():
        raise ArgumentError(
            f"swizzled is {swizzled.dtype} {list(swizzled.shape)}; it must be contiguous torch.uint8 {list(shape)}"
        )
    if swizzled.numel():
        kernels.for_device(scale.device).unswizzle_scales(swizzled, row_range, scale)
    return scale


def _row_range(scale: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    """Where the rows of every group begin and end; ArgumentError if an argument is not what it must be."""
    if scale.dim() != 2 or scale.element_size() != 1 or not scale.is_contiguous():
        raise ArgumentError(
            f"scale is {scale.dtype} {list(scale.shape)}; it must be a contiguous matrix of one-byte scales"
        )
    return checked_row_range(row_start, scale)


def checked_row_range(row_start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The row_range int32[2, G] of groups of `rows`, from their bounds int32[G + 1] or their row_range itself.

    Raises:
        ArgumentError: it is neither. Values are not looked at.
    """
    is_range = row_start.dim() == 2 and row_start.shape[0] == 2 and row_start.shape[1] >= 1
    is_bounds = row_start.dim() == 1 and row_start.shape[0] >= 2
    if row_start.dtype != torch.int32 or not (is_range or is_bounds):
        raise ArgumentError(
            f"row_start is {row_start.dtype} {list(row_start.shape)}; it must be torch.int32 [groups + 1]"
        )
    if row_start.device != rows.device or not row_start.is_contiguous():
        raise ArgumentError(f"row_start is on {row_start.device}; it must be contiguous on {rows.device}")
    return row_start if is_range else range_of(row_start)
