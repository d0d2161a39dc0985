"""Twins of the quantisers of contract/quantize.py."""

from __future__ import annotations

import torch

from symmoe.kernels import formats
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.formats import TILE, BlockFormat
from symmoe.kernels.operands import check_column_scale, given
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.activation import block_sums
from symmoe.kernels.twin.gemm import filled_groups, groups, matrix, packed, take_rows
from symmoe.kernels.twin.hadamard import hadamard
from symmoe.kernels.twin.philox import random_words


def quantize_rows(
    rows: torch.Tensor,
    row_range: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    block_format: BlockFormat,
    *,
    row_index: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    bias_sums: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
) -> None:
    width = rows.shape[1]
    for g, span in filled_groups(row_range):
        lines = take_rows(rows, row_index, span).float()
        codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
        _bytes(data)[span] = _pack(codes[:, :width], block_format)
        _bytes(scale)[span] = scales
        if bias_sums is not None:
            sums = block_sums((lines if bias_scale is None else lines * bias_scale[span, None]).t(), SLOT_ROWS)
            first = span.start // SLOT_ROWS + g
            bias_sums[first : first + sums.shape[1]] = sums.t()


def quantize_columns(
    rows: torch.Tensor,
    row_range: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    block_format: BlockFormat,
    *,
    row_index: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    signs: int | None = None,
    seeds: torch.Tensor | None = None,
) -> None:
    check_column_scale("scale", scale)
    first = 0
    for g, span in groups(row_range):
        if span.start == span.stop:
            continue
        lines = _padded_columns(take_rows(rows, row_index, span), signs)
        codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
        _place(data, block_format.data_width(first), _pack(codes, block_format))
        _place(scale, first // block_format.block, scales)
        first += lines.shape[1]


def quantize_weights(
    weight: torch.Tensor | TensorTable,
    data: torch.Tensor,
    scale: torch.Tensor,
    block_format: BlockFormat,
    *,
    amax: torch.Tensor | None = None,
) -> None:
    num_groups, num_lines, num_columns = weight.shape
    for g in range(num_groups):
        codes, scales = _quantize_lines(matrix(weight, g).float(), block_format, g, amax, None)
        _bytes(data)[g] = _pack(codes[:num_lines, :num_columns], block_format)
        _bytes(scale)[g] = scales


def quantize_weight_pairs(
    weight: torch.Tensor | TensorTable,
    data: torch.Tensor,
    scale: torch.Tensor,
    transposed_data: torch.Tensor,
    transposed_scale: torch.Tensor,
    block_format: BlockFormat,
    *,
    amax: torch.Tensor | None = None,
) -> None:
    quantize_weights(weight, data, scale, block_format, amax=amax)
    quantize_weights(packed(weight).mT, transposed_data, transposed_scale, block_format, amax=amax)


def weight_amax(weight: torch.Tensor | TensorTable, amax: torch.Tensor) -> None:
    for g in range(weight.shape[0]):
        amax[g] = _largest_finite(matrix(weight, g).float())


def group_amax(
    rows: torch.Tensor,
    row_range: torch.Tensor,
    amax: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    signs: int | None = None,
) -> None:
    for g, span in groups(row_range):
        values = take_rows(rows, row_index, span).float()
        values = values if signs is None else _padded_columns(values, signs)
        amax[g] = _largest_finite(values)


def _largest_finite(values: torch.Tensor) -> torch.Tensor | float:
    finite = values.abs()[torch.isfinite(values)]
    return finite.max() if finite.numel() else 0.0


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale of groups whose largest |x| is amax, fp32."""
    return (amax / formats.GLOBAL_MAX).clamp(min=formats.MIN_GLOBAL_SCALE)


def _padded_columns(rows: torch.Tensor, signs: int | None) -> torch.Tensor:
    """The columns of one group as lines [C, tokens], zeros up to a multiple of TILE tokens; transformed with signs."""
    lines = torch.nn.functional.pad(rows.float(), (0, 0, 0, -rows.shape[0] % TILE)).T
    return lines if signs is None else hadamard(lines, signs)


def _quantize_lines(
    lines: torch.Tensor, block_format: BlockFormat, group: int, amax: torch.Tensor | None, seeds: torch.Tensor | None
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
        codes = to_e4m3(scaled).view(torch.uint8).masked_fill(~fits.reshape(padded.shape), formats.E4M3_NAN)
    else:
        codes = to_e2m1(scaled, None if seeds is None else random_words(int(seeds[group]), *padded.shape))
    nan = _NAN_BYTES.get(block_format.scale, torch.nan)
    return codes, _bytes(scale).masked_fill(~is_finite, nan)


_NAN_BYTES = {"e8m0": formats.E8M0_NAN, "e4m3": formats.E4M3_NAN}


def _scales(
    amax: torch.Tensor, block_format: BlockFormat, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored scales of blocks, and the multipliers of their elements."""
    if block_format.scale == "e4m3":
        global_scale = given("amax", global_scale)
        relative = (amax / formats.E2M1_MAX / global_scale).clamp(formats.MIN_BLOCK_SCALE, formats.E4M3_MAX)
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


def _pack(codes: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """Codes as they are stored."""
    return codes if block_format.elements_per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed and copied to, whatever the format of the numbers."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _place(tensor: torch.Tensor, column: int, values: torch.Tensor) -> None:
    """tensor[:, column:] = values, as many columns as there are."""
    _bytes(tensor)[:, column : column + values.shape[1]] = values
