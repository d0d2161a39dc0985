"""128x4 tiles of scales.

Blackwell's block-scaled matrix units read such tiles. In a tile, the scale of row m and block q is byte m % 32 * 16 + m
// 32 * 4 + q; tiles are stored row by row. Swizzled scales do not travel: a group's padding depends on the group's
place.
"""

from __future__ import annotations

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels.formats import max_tiles
from symmoe.kernels.operands import check_operand, checked_row_range
from symmoe.kernels.quantized_gemm import TILE_BLOCKS, TILE_BYTES


def swizzle_scales(scale: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    """Scales of grouped rows in 128x4 tiles; every group begins at a new tile. No host synchronisation.

    Args:
        scale: float8_e8m0fnu, float8_e4m3fn or uint8 [N, Q], contiguous.
        row_start: int32[G + 1] on its device, the groups' bounds; or int32[2, G], their begins and ends.

    Returns:
        uint8 [max_tiles(N, G), ceil(Q / 4), 512]. A group's first tile follows the previous group's last tile. The
        padding of rows and blocks is 0, and so are tiles past the last group.

    Raises:
        ArgumentError: an argument is not as described.
    """
    row_range, shape = _tiles_of(scale, row_start)
    swizzled = torch.zeros(shape, dtype=torch.uint8, device=scale.device)
    if swizzled.numel():
        kernels.for_device(scale.device).swizzle_scales(scale, row_range, swizzled)
    return swizzled


def unswizzle_scales(
    swizzled: torch.Tensor, row_start: torch.Tensor, *, num_rows: int, num_blocks: int
) -> torch.Tensor:
    """The inverse of :func:`swizzle_scales`: uint8 [num_rows, num_blocks]; scales of rows in no group are 0.

    Raises:
        ArgumentError: swizzled does not have the shape for num_rows rows of num_blocks blocks in these groups.
    """
    scale = torch.zeros(num_rows, num_blocks, dtype=torch.uint8, device=swizzled.device)
    row_range, shape = _tiles_of(scale, row_start)
    check_operand("swizzled", swizzled, shape, (torch.uint8,))
    if swizzled.numel():
        kernels.for_device(scale.device).unswizzle_scales(swizzled, row_range, scale)
    return scale


def _tiles_of(
    scale: torch.Tensor, row_start: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """The row_range of groups of scales, and the shape of their tiles."""
    if scale.dim() != 2 or scale.element_size() != 1 or not scale.is_contiguous():
        raise ArgumentError(
            f"scale is {scale.dtype} {list(scale.shape)}; it must be a contiguous matrix of one-byte scales"
        )
    row_range = checked_row_range(row_start, scale)
    return row_range, (
        max_tiles(len(scale), row_range.shape[1]),
        -(-scale.shape[1] // TILE_BLOCKS),
        TILE_BYTES,
    )
