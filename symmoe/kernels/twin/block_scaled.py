"""Twins for MXFP8 and NVFP4 only: scales in tiles, E2M1 numbers, random words, the Hadamard transform.

This module is imported on first use. Random numbers are a function of a seed and a position: Philox-4x32-10 (Salmon et
al. 2011), with the same words as Triton's tl.philox.
"""

import ctypes
from collections.abc import Iterator

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import formats
from symmoe.kernels.operands import ScaleTable, require_tensor
from symmoe.kernels.quantized_gemm import TILE_BLOCKS, TILE_BYTES, tiles_down
from symmoe.kernels.twin.gemm import groups

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(seed: int, counter: Words) -> Words:
    """Four random words for every counter of four words; words are int64 tensors of numbers below 2^32."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + _KEY_STEPS[0] & _MASK, key1 + _KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3


def random_words(seed: int, num_lines: int, width: int) -> torch.Tensor:
    """int64 [num_lines, width]: the word of element (line, k) is number k % 4 of counter (k // 4, line, 0, 0)."""
    quads = torch.arange(-(-width // 4), device="cpu").expand(num_lines, -1)
    lines = torch.arange(num_lines, device="cpu")[:, None].expand_as(quads)
    zeros = torch.zeros_like(quads)
    words = philox(seed, (quads, lines, zeros, zeros))
    return torch.stack(words, dim=2).flatten(1)[:, :width]


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a * b, in steps that fit into int64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _MASK


def to_e2m1(x: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """Codes uint8 of the E2M1 numbers of finite fp32 numbers, saturating: the nearest, ties to even; or, with random
    words (24 bits), one of the two neighbours, so that the mean is the number itself."""
    size = x.abs().clamp(max=formats.E2M1_MAX)
    # The distance between E2M1 numbers is 1/2 below 2, 1 below 4, then 2: in this unit, codes count up from `base`.
    per_unit = torch.where(size < 2, 2.0, torch.where(size < 4, 1.0, 0.5))
    base = torch.where(size < 2, 0, torch.where(size < 4, 2, 4))
    units = size * per_unit
    if words is None:
        magnitude = base + torch.round(units).int()  # ties to even: a unit is even if its code is
    else:
        lower = torch.floor(units)
        magnitude = base + lower.int() + ((words >> 8).float() * 2.0**-24 < units - lower)
    return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)


def numbers_of_e2m1(data: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of bytes with two codes each."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).int()
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = torch.where(exponent == 0, 0.5 * mantissa, torch.ldexp(1 + 0.5 * mantissa, exponent - 1))
    return torch.where(codes >= 8, -size, size)


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """y = H D x for every 16 elements of the last dimension: the transform of tokens before quantisation.

    D changes signs. H is Sylvester's Hadamard matrix of size 16 over 4. H D is orthonormal, so a contraction of two
    matrices, both transformed along it, keeps its result up to rounding; an outlier is spread over its block.

    Args:
        x: floating point [..., K], K a multiple of 16.
        signs: 16 bits; bit i changes the sign of element i of every 16.

    Returns:
        fp32 [..., K].

    Raises:
        ArgumentError: K is not a multiple of 16, or signs has other bits.
    """
    return _butterflies(_blocks_of(x, signs) * _sign_vector(signs, x.device)).flatten(-2)


def inverse_hadamard(y: torch.Tensor, signs: int) -> torch.Tensor:
    """D H y: the inverse of :func:`hadamard` up to rounding, with its arguments, result and errors."""
    return (_butterflies(_blocks_of(y, signs)) * _sign_vector(signs, y.device)).flatten(-2)


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """H x by sums and differences of elements at distances 1, 2, 4 and 8; then a quarter of it."""
    step = 1
    while step < formats.HADAMARD_SIZE:
        first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x * 0.25


def _sign_vector(signs: int, device: torch.device) -> torch.Tensor:
    return 1.0 - 2.0 * (signs >> torch.arange(formats.HADAMARD_SIZE, device=device) & 1)


def check_signs(signs: int) -> None:
    """ArgumentError if signs is not 16 bits."""
    if not 0 <= signs < 1 << formats.HADAMARD_SIZE:
        raise ArgumentError(
            f"signs ({signs}) must have {formats.HADAMARD_SIZE} bits: 0 to {(1 << formats.HADAMARD_SIZE) - 1}"
        )


def _blocks_of(x: torch.Tensor, signs: int) -> torch.Tensor:
    """fp32 [..., K / 16, 16]. The errors of :func:`hadamard`."""
    check_signs(signs)
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % formats.HADAMARD_SIZE:
        raise ArgumentError(
            f"x is {x.dtype} {list(x.shape)}; it must be floating point [..., K], "
            f"K a multiple of {formats.HADAMARD_SIZE}"
        )
    return x.float().reshape(
        *x.shape[:-1], x.shape[-1] // formats.HADAMARD_SIZE, formats.HADAMARD_SIZE
    )


def matrices_of(
    scale: torch.Tensor | ScaleTable, row_range: torch.Tensor | None, swizzled: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the scales [M, Q] of every matrix that has rows, and of its tiles [tiles down, tiles across, 512]."""
    if isinstance(scale, ScaleTable):
        yield from _matrices_of_table(scale, swizzled)
        return
    first = 0
    for _, span in groups(require_tensor("row_range", row_range)):
        last = first + tiles_down(span.stop - span.start)
        if last > first:
            yield scale.view(torch.uint8)[span], swizzled[first:last]
        first = last


def _matrices_of_table(
    table: ScaleTable, swizzled: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    extents, start = table.extents.tolist(), swizzled.data_ptr()
    columns = table.sources.tolist(), table.destinations.tolist(), table.shapes.tolist()
    for source, destination, shape in zip(*columns, strict=True):
        num_rows, num_blocks, *strides = extents[shape]
        num_bytes = (num_rows - 1) * strides[0] + (num_blocks - 1) * strides[1] + 1
        memory = torch.frombuffer(
            (ctypes.c_char * num_bytes).from_address(source), dtype=torch.uint8
        )
        down, across = tiles_down(num_rows), -(-num_blocks // TILE_BLOCKS)
        tiles = swizzled.flatten()[destination - start :][: down * across * TILE_BYTES]
        yield (
            memory.as_strided((num_rows, num_blocks), strides),
            tiles.view(down, across, TILE_BYTES),
        )
