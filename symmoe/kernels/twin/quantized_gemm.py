"""Twins of contract/gemm.py.

With fp32 scales a block's sum, the multiplication by its scales from left to right, and the addition to the blocks
before it are fp32. (On GPUs a multiplication and an addition may be one operation.)
"""

import torch

from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.gemm_parts import equal_groups
from symmoe.kernels.quantized_gemm import (
    BLOCK,
    FLOAT8_BLOCK,
    TILE_BYTES,
    check_gemm,
    check_wgrad,
    num_blocks,
)
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin import gemm
from symmoe.kernels.twin.quantize import numbers_of, unswizzle_scales


def grouped_gemm_quantized(
    rows, weight, row_range, out, *, group_range=None, bias=None, zero_tail=False, num_sms=None
):
    block_format = check_gemm(rows, weight, row_range, out, bias, group_range)
    num_groups, out_width, _ = weight.data.shape
    if block_format is not FLOAT8_BLOCK:
        left = _numbers(rows, row_range if group_range is None else group_range, block_format)
        tiles = gemm.packed(weight.scale)
        if isinstance(weight.scale, TensorTable):
            tiles = tiles.view(-1, tiles.shape[2] // TILE_BYTES, TILE_BYTES)
        lines = equal_groups(num_groups, out_width, row_range.device)
        right = _numbers((gemm.packed(weight.data).flatten(0, 1), tiles), lines, block_format)
        right = right.view(num_groups, out_width, -1)
    for g, span in gemm.filled_groups(row_range):
        total = torch.zeros(
            (span.stop - span.start, out_width), dtype=torch.float32, device=out.device
        )
        if block_format is FLOAT8_BLOCK:
            _add_blocks(total, rows, weight, g, span)
        else:
            gemm.multiply_rows(total, left[span], right[g].t())
        if rows.global_scale is not None and weight.global_scale is not None:
            total = total * rows.global_scale[g] * weight.global_scale[g]
        addend = gemm.bias_rows(bias, g, span)
        total = total if addend is None else total + addend
        out[span] = total.to(out.dtype)
    if zero_tail:
        gemm.zero_rows(out, row_range)


def _add_blocks(total, rows, weight, g, span):
    """Adds the scaled sums of the blocks of a group's rows to zeros, one after the other."""
    partial = torch.empty_like(total)
    for b in range(num_blocks(rows.data.shape[1])):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        gemm.multiply_rows(
            partial,
            rows.data[span, block].float(),
            gemm.matrix(weight.data, g)[:, block].float().t(),
        )
        features = gemm.matrix(weight.scale, g)[:, b].repeat_interleave(BLOCK)[: total.shape[1]]
        total += partial * (rows.scale[span, b, None] * features)


def grouped_gemm_wgrad_quantized(dout, rows, row_range, out, *, accumulate=False, num_sms=None):
    block_format = check_wgrad(dout, rows, out)
    if block_format is not FLOAT8_BLOCK:
        one_group = (equal_groups(1, each.data.shape[0], out.device) for each in (dout, rows))
        left, right = (
            _numbers(each, lines, block_format)
            for each, lines in zip((dout, rows), one_group, strict=True)
        )
    first = 0
    for g, span in gemm.groups(row_range):
        end = first + num_blocks(span.stop - span.start)
        if block_format is FLOAT8_BLOCK:
            total = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
            for b in range(first, end):
                tokens = slice(b * BLOCK, (b + 1) * BLOCK)
                partial = gemm.multiply(
                    dout.data[:, tokens].float(), rows.data[:, tokens].float().t()
                )
                total += partial * rows.scale[:, b] * dout.scale[:, b, None]
        elif first < end:
            tokens = slice(first * BLOCK, end * BLOCK)
            total = gemm.multiply(left[:, tokens], right[:, tokens].t())
            if dout.global_scale is not None and rows.global_scale is not None:
                total = total * dout.global_scale[g] * rows.global_scale[g]
        if first < end:
            gemm.store_sum(out, g, total, accumulate=accumulate)
        elif not accumulate:
            gemm.matrix(out, g).zero_()
        first = end


def _numbers(operand, line_range: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """data * scale in fp32, of lines in groups that begin at new tiles; lines of no group may be anything."""
    data, scale = operand[:2]
    values = numbers_of(data, block_format)
    shape = data.shape[0], block_format.num_blocks(values.shape[1])
    compact = torch.zeros(shape, dtype=torch.uint8, device=data.device)
    unswizzle_scales(scale, line_range, compact)
    scales = compact.view(block_format.scale_dtype).float()
    return values * scales.repeat_interleave(block_format.block, dim=1)
