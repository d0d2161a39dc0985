"""What only MXFP8 and NVFP4 need: 128x4 tiles of scales, and the randomised Hadamard transform.

In a tile, as Blackwell's block-scaled matrix units read it, the scale of row m and block q is byte
m % 32 * 16 + m // 32 * 4 + q; tiles lie row by row. Swizzled scales are not for the wire: a group's padding depends on
where it lies.
"""

from __future__ import annotations

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels.formats import HADAMARD_SIZE, max_tiles
from symmoe.kernels.gemm_parts import range_of
from symmoe.kernels.operands import check_operand
from symmoe.kernels.quantized_gemm import TILE_BLOCKS, TILE_BYTES
from symmoe.kernels.twin import quantize as twin


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
        ArgumentError: swizzled is not what num_rows rows of num_blocks blocks in these groups have.
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


def checked_row_range(row_start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The row_range int32[2, G] of groups of `rows`, from their bounds int32[G + 1] or their row_range itself;
    ArgumentError if it is neither. Values are not looked at."""
    is_range = row_start.dim() == 2
    shape = (2, max(1, row_start.shape[1])) if is_range else (max(2, row_start.numel()),)
    check_operand("row_start", row_start, shape, (torch.int32,), rows.device)
    return row_start if is_range else range_of(row_start)


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """H D x of every 16 elements of the last dimension, as the quantising kernels transform tokens.

    D changes signs, H is Sylvester's Hadamard matrix of size 16 over 4: orthonormal.

    Args:
        x: floating point [..., K], K a multiple of 16.
        signs: 16 bits; bit i set: the sign of element i of every 16 is changed.

    Returns:
        fp32 [..., K].

    Raises:
        ArgumentError: K is not a multiple of 16, or signs has other bits.
    """
    _check(x, signs)
    return twin.hadamard(x, signs)


def inverse_hadamard(y: torch.Tensor, signs: int) -> torch.Tensor:
    """D H y: the inverse of :func:`hadamard` up to rounding, with its arguments, result and errors."""
    _check(y, signs)
    return twin.inverse_hadamard(y, signs)


def draw_signs(generator: torch.Generator | None = None) -> int:
    """16 random signs for :func:`hadamard`, from a generator on the CPU."""
    return int(torch.randint(1 << HADAMARD_SIZE, (), generator=generator, device="cpu"))


def check_signs(signs: int) -> None:
    """ArgumentError if signs is not 16 bits."""
    if not 0 <= signs < 1 << HADAMARD_SIZE:
        raise ArgumentError(
            f"signs ({signs}) must have {HADAMARD_SIZE} bits: 0 to {(1 << HADAMARD_SIZE) - 1}"
        )


def _check(x: torch.Tensor, signs: int) -> None:
    check_signs(signs)
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % HADAMARD_SIZE:
        raise ArgumentError(
            f"x is {x.dtype} {list(x.shape)}; it must be floating point [..., K], K a multiple of {HADAMARD_SIZE}"
        )
