"""Twins of contract/quantized_gemm.py.

With fp32 scales a block's sum, the multiplication by its scales from left to right, and the addition to the blocks
before it are fp32. (On GPUs a multiplication and an addition may be one operation.)
"""

from __future__ import annotations

import torch

from symmoe.kernels.formats import TILE, BlockFormat
from symmoe.kernels.gemm_parts import equal_groups
from symmoe.kernels.quantized_gemm import (
    BLOCK,
    TILE_BYTES,
    check_fp8_gemm,
    check_fp8_wgrad,
    check_scaled_gemm,
    check_scaled_wgrad,
    num_blocks,
    tiles_down,
)
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.gemm import (
    bias_rows,
    filled_groups,
    groups,
    matrix,
    multiply,
    multiply_rows,
    packed,
    store_sum,
    zero_rows,
)
from symmoe.kernels.twin.quantize import numbers_of, unswizzle_scales


def grouped_gemm_fp8(
    rows, row_scale, weight, weight_scale, row_range, out, *, bias=None, bias_scale=None, zero_tail=False, num_sms=None
):
    check_fp8_gemm(rows, row_scale, weight, weight_scale, out, bias, bias_scale)
    for g, span in filled_groups(row_range):
        total = torch.zeros((span.stop - span.start, out.shape[1]), dtype=torch.float32, device=out.device)
        partial = torch.empty_like(total)
        for b in range(num_blocks(rows.shape[1])):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            multiply_rows(partial, rows[span, block].float(), matrix(weight, g)[:, block].float().t())
            features = matrix(weight_scale, g)[:, b].repeat_interleave(BLOCK)[: out.shape[1]]
            total += partial * (row_scale[span, b, None] * features)
        addend = bias_rows((bias, bias_scale), g, span)
        total = total if addend is None else total + addend
        out[span] = total.to(out.dtype)
    if zero_tail:
        zero_rows(out, row_range)


def grouped_gemm_wgrad_fp8(dout, dout_scale, rows, rows_scale, row_range, out, *, accumulate=False, num_sms=None):
    check_fp8_wgrad(dout, dout_scale, rows, rows_scale, out)
    first = 0
    for g, span in groups(row_range):
        end = first + num_blocks(span.stop - span.start)
        total = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
        for b in range(first, end):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            partial = multiply(dout[:, block].float(), rows[:, block].float().t())
            total += partial * rows_scale[:, b] * dout_scale[:, b, None]
        if first < end or not accumulate:
            store_sum(out, g, total, accumulate=accumulate)
        first = end


def grouped_gemm_scaled(
    rows,
    row_scale,
    weight,
    weight_scale,
    row_range,
    out,
    *,
    row_global_scale=None,
    weight_global_scale=None,
    group_range=None,
    bias=None,
    bias_scale=None,
    zero_tail=False,
    num_sms=None,
):
    block_format = check_scaled_gemm(
        *(rows, row_scale, weight, weight_scale, row_range, out),
        *(row_global_scale, weight_global_scale, group_range, bias, bias_scale),
    )
    num_groups, out_width, _ = weight.shape
    left = _numbers(rows, row_scale, row_range if group_range is None else group_range, block_format)
    lines = equal_groups(num_groups, out_width, row_range.device)
    tiles = packed(weight_scale)
    if isinstance(weight_scale, TensorTable):
        tiles = tiles.view(-1, tiles.shape[2] // TILE_BYTES, TILE_BYTES)
    right = _numbers(packed(weight).flatten(0, 1), tiles, lines, block_format).view(num_groups, out_width, -1)
    for g, span in filled_groups(row_range):
        total = torch.zeros((span.stop - span.start, out_width), dtype=torch.float32, device=out.device)
        multiply_rows(total, left[span], right[g].t())
        if row_global_scale is not None and weight_global_scale is not None:
            total = total * row_global_scale[g] * weight_global_scale[g]
        addend = bias_rows((bias, bias_scale), g, span)
        total = total if addend is None else total + addend
        out[span] = total.to(out.dtype)
    if zero_tail:
        zero_rows(out, row_range)


def grouped_gemm_wgrad_scaled(
    dout,
    dout_scale,
    rows,
    rows_scale,
    row_range,
    out,
    *,
    dout_global_scale=None,
    rows_global_scale=None,
    accumulate=False,
    num_sms=None,
):
    block_format = check_scaled_wgrad(dout, dout_scale, rows, rows_scale, out, dout_global_scale, rows_global_scale)
    left, right = (
        _numbers(data, scale, equal_groups(1, data.shape[0], data.device), block_format)
        for data, scale in ((dout, dout_scale), (rows, rows_scale))
    )
    first = 0
    for g, span in groups(row_range):
        end = first + tiles_down(span.stop - span.start)
        if first < end:
            tokens = slice(first * TILE, end * TILE)
            total = multiply(left[:, tokens], right[:, tokens].t())
            if dout_global_scale is not None and rows_global_scale is not None:
                total = total * dout_global_scale[g] * rows_global_scale[g]
            store_sum(out, g, total, accumulate=accumulate)
        elif not accumulate:
            matrix(out, g).zero_()
        first = end


def _numbers(
    data: torch.Tensor, scale: torch.Tensor, line_range: torch.Tensor, block_format: BlockFormat
) -> torch.Tensor:
    """data * scale in fp32, of lines in groups that begin at new tiles; lines of no group may be anything."""
    values = numbers_of(data, block_format)
    compact = torch.zeros(
        (data.shape[0], block_format.num_blocks(values.shape[1])), dtype=torch.uint8, device=data.device
    )
    unswizzle_scales(scale, line_range, compact)
    scales = compact.view(block_format.scale_dtype).float()
    return values * scales.repeat_interleave(block_format.block, dim=1)
