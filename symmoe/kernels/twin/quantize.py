"""Twins of contract/quantize.py: quantisers, and scales in tiles."""

import ctypes
from collections.abc import Iterator

import torch

from symmoe.kernels import formats
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.formats import TILE, BlockFormat
from symmoe.kernels.operands import check_column_scale, require_tensor
from symmoe.kernels.quantized_gemm import TILE_BLOCKS, TILE_BYTES, tiles_down
from symmoe.kernels.tensor_table import ScaleTable
from symmoe.kernels.twin.activation import activation_gradients, block_sums, scaled_activation
from symmoe.kernels.twin.gemm import (
    filled_groups,
    grouped_bias_grad,
    groups,
    matrix,
    packed,
    take_rows,
)
from symmoe.kernels.twin.philox import random_words


def quantize_rows(
    rows, row_range, out, block_format, *, row_index=None, amax=None, seeds=None, sums=None
):
    (data, scale), width = out, rows.shape[1]
    for g, span in filled_groups(row_range):
        lines = take_rows((rows, row_index), span).float()
        codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
        _bytes(data)[span] = _pack(codes[:, :width], block_format)
        _bytes(scale)[span] = scales
        if sums is not None:
            bias_sums, bias_scale = sums
            terms = block_sums(
                (lines if bias_scale is None else lines * bias_scale[span, None]).t(), SLOT_ROWS
            )
            first = span.start // SLOT_ROWS + g
            bias_sums[first : first + terms.shape[1]] = terms.t()


def quantize_columns(
    rows, row_range, out, block_format, *, row_index=None, amax=None, signs=None, seeds=None
):
    (data, scale), first = out, 0
    check_column_scale("scale", scale)
    for g, span in filled_groups(row_range):
        lines = _padded_columns(take_rows((rows, row_index), span), signs)
        codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
        _place(data, block_format.data_width(first), _pack(codes, block_format))
        _place(scale, first // block_format.block, scales)
        first += lines.shape[1]


def quantize_weights(weight, out, block_format, *, amax=None):
    (data, scale), (num_groups, num_lines, num_columns) = out, weight.shape
    for g in range(num_groups):
        codes, scales = _quantize_lines(matrix(weight, g).float(), block_format, g, amax, None)
        _bytes(data)[g] = _pack(codes[:num_lines, :num_columns], block_format)
        _bytes(scale)[g] = scales


def quantize_weight_pairs(weight, out, transposed_out, block_format, *, amax=None):
    quantize_weights(weight, out, block_format, amax=amax)
    quantize_weights(packed(weight).mT, transposed_out, block_format, amax=amax)


def weight_amax(weight, amax):
    for g in range(weight.shape[0]):
        amax[g] = _largest_finite(matrix(weight, g).float())


def group_amax(rows, row_range, amax, *, row_index=None, signs=None):
    for g, span in groups(row_range):
        values = take_rows((rows, row_index), span).float()
        values = values if signs is None else _padded_columns(values, signs)
        amax[g] = _largest_finite(values)


# The next two are compositions of what they fuse, which has the same bits: numbers are rounded to the dtype of h first.


def act_quantize(h, row_scale, row_range, out, activation, block_format):
    a = torch.empty(
        (h.shape[0], h.shape[1] // activation.hidden_width(1)), dtype=h.dtype, device=h.device
    )
    for _, span in filled_groups(row_range):
        scaled_activation(h[span], row_scale[span], a[span], activation)
    quantize_rows(a, row_range, out, block_format)


def dact_quantize(da, h, row_scale, row_range, out, workspace, activation, block_format):
    end = int(row_range[1, -1])
    dh, a, scale = torch.empty_like(h), torch.empty_like(da), row_scale[:end]
    value = activation_gradients(da[:end], h[:end], scale, dh[:end], out.dscale[:end], activation)
    torch.mul(value, scale[:, None], out=a[:end])
    out.dscale[end:] = 0
    quantize_rows(dh, row_range, out.rows, block_format)
    quantize_columns(dh, row_range, out.columns, block_format)
    quantize_columns(a, row_range, out.a_columns, block_format)
    if out.dbias is not None:
        grouped_bias_grad(dh, row_range, out.dbias)


def _largest_finite(values: torch.Tensor) -> torch.Tensor | float:
    finite = values.abs()[torch.isfinite(values)]
    return finite.max() if finite.numel() else 0.0


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale of groups whose largest |x| is amax, fp32."""
    # Not divided by a number: on GPUs torch multiplies by its reciprocal, which rounds differently.
    return (amax / torch.full_like(amax, formats.GLOBAL_MAX)).clamp(min=formats.MIN_GLOBAL_SCALE)


def _padded_columns(rows: torch.Tensor, signs: int | None) -> torch.Tensor:
    """The columns of one group as lines [C, tokens], zeros up to a multiple of TILE tokens; transformed with signs."""
    lines = torch.nn.functional.pad(rows.float(), (0, 0, 0, -rows.shape[0] % TILE)).T
    return lines if signs is None else hadamard(lines, signs)


def _quantize_lines(
    lines: torch.Tensor,
    block_format: BlockFormat,
    group: int,
    amax: torch.Tensor | None,
    seeds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 of a group's lines [L, K] fp32, with both padded to whole blocks, and the blocks' scales: bytes or
    fp32."""
    num_lines, width = lines.shape
    block, block_lines = block_format.block, block_format.block_lines
    padded = torch.nn.functional.pad(lines, (0, -width % block, 0, -num_lines % block_lines))
    x = padded.view(padded.shape[0] // block_lines, block_lines, padded.shape[1] // block, block)
    largest = x.abs().amax(dim=(1, 3))
    is_finite = torch.isfinite(largest)
    global_scale = None if amax is None else global_scale_of(amax[group])
    scale, multiplier = _scales(largest.where(is_finite, 0.0), block_format, global_scale)
    fits = is_finite[:, None, :, None].expand_as(x)
    scaled = (x.where(fits, 0.0) * multiplier[:, None, :, None]).reshape(padded.shape)
    if block_format.element == "e4m3":
        codes = (
            to_e4m3(scaled)
            .view(torch.uint8)
            .masked_fill(~fits.reshape(padded.shape), formats.E4M3_NAN)
        )
    else:
        codes = to_e2m1(
            scaled, None if seeds is None else random_words(int(seeds[group]), *padded.shape)
        )
    nan = _NAN_BYTES.get(block_format.scale, torch.nan)
    return codes, _bytes(scale).masked_fill(~is_finite, nan)


_NAN_BYTES = {"e8m0": formats.E8M0_NAN, "e4m3": formats.E4M3_NAN}


def _scales(
    amax: torch.Tensor, block_format: BlockFormat, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored scales of blocks, and the multipliers of their elements."""
    if block_format.scale == "e4m3":
        global_scale = require_tensor("amax", global_scale)
        relative = (amax / formats.E2M1_MAX / global_scale).clamp(
            formats.MIN_BLOCK_SCALE, formats.E4M3_MAX
        )
        scale = to_e4m3(relative)
        return scale, 1.0 / (scale.float() * global_scale)
    scale = (amax / formats.E4M3_MAX).clamp(min=formats.MIN_SCALE)
    if block_format.scale == "fp32":
        return scale, 1.0 / scale
    bits = (scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF
    scale = bits.view(torch.float32)
    if block_format.scale == "power_of_two":
        return scale, 1.0 / scale
    return (bits >> 23).to(torch.uint8).view(torch.float8_e8m0fnu), 1.0 / scale


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number of finite fp32 numbers, ties to even, saturating."""
    return x.clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """Codes uint8 of the E2M1 numbers of finite fp32 numbers, saturating: the nearest, ties to even; or, by 24 bits of
    random words, one of the two neighbours, so that the mean is the number itself."""
    size = x.abs().clamp(max=formats.E2M1_MAX)
    # Numbers of E2M1 are 1/2 apart below 2, 1 below 4, and then 2: in this unit, codes count up from `base`.
    per_unit = torch.where(size < 2, 2.0, torch.where(size < 4, 1.0, 0.5))
    base = torch.where(size < 2, 0, torch.where(size < 4, 2, 4))
    units = size * per_unit
    if words is None:
        magnitude = base + torch.round(units).int()  # ties to even: a unit is even if its code is
    else:
        lower = torch.floor(units)
        magnitude = base + lower.int() + ((words >> 8).float() * 2.0**-24 < units - lower)
    return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)


def numbers_of(data: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """The numbers that data holds, unscaled, in fp32."""
    if block_format.element == "e4m3":
        return data.float()
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).int()
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = torch.where(exponent == 0, 0.5 * mantissa, torch.ldexp(1 + 0.5 * mantissa, exponent - 1))
    return torch.where(codes >= 8, -size, size)


def _pack(codes: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """Codes as they are stored."""
    return codes if block_format.elements_per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed and copied to, whatever the format of the numbers."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _place(tensor: torch.Tensor, column: int, values: torch.Tensor) -> None:
    """tensor[:, column:] = values, as many columns as there are."""
    _bytes(tensor)[:, column : column + values.shape[1]] = values


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """y = H D x for every 16 elements of the last dimension, in fp32; bit i of `signs` changes the sign of element i.

    H is Sylvester's Hadamard matrix of size 16 over 4. H D is orthonormal, so a contraction of two matrices that are
    both transformed along it stays the same up to rounding; an outlier is spread over its block.
    """
    blocks = x.float().unflatten(-1, (-1, formats.HADAMARD_SIZE))
    return _butterflies(blocks * _sign_vector(signs, x.device)).flatten(-2)


def inverse_hadamard(y: torch.Tensor, signs: int) -> torch.Tensor:
    """D H y: the inverse of `hadamard`, up to the rounding of its sums."""
    blocks = y.float().unflatten(-1, (-1, formats.HADAMARD_SIZE))
    return (_butterflies(blocks) * _sign_vector(signs, y.device)).flatten(-2)


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """H x by sums and differences of elements at distances 1, 2, 4 and 8; then a quarter of it."""
    step = 1
    while step < formats.HADAMARD_SIZE:
        left, right = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        step *= 2
    return x * 0.25


def _sign_vector(signs: int, device: torch.device) -> torch.Tensor:
    return 1.0 - 2.0 * (signs >> torch.arange(formats.HADAMARD_SIZE, device=device) & 1)


def swizzle_scales(scale, row_range, swizzled):
    for scales, tiles in _matrices(scale, row_range, swizzled):
        padded = torch.nn.functional.pad(
            scales, (0, -scales.shape[1] % TILE_BLOCKS, 0, -scales.shape[0] % TILE)
        )
        # [tile, row / 32, row % 32, 4 blocks, block] -> [tile, 4 blocks, row % 32, row / 32, block]
        parts = padded.reshape(-1, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
        tiles.copy_(parts.permute(0, 3, 2, 1, 4).reshape(tiles.shape))


def unswizzle_scales(swizzled, row_range, scale):
    for scales, tiles in _matrices(scale, row_range, swizzled):
        parts = tiles.view(tiles.shape[0], tiles.shape[1], 32, 4, TILE_BLOCKS).permute(
            0, 3, 2, 1, 4
        )
        compact = parts.reshape(tiles.shape[0] * TILE, tiles.shape[1] * TILE_BLOCKS)
        scales.copy_(compact[: scales.shape[0], : scales.shape[1]])


def _matrices(
    scale: torch.Tensor | ScaleTable, row_range: torch.Tensor | None, swizzled: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the scales of every matrix that has rows [M, Q], and of its tiles [tiles down, tiles across, 512]."""
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
