"""Grouped GEMMs of quantised numbers (kernels/quantized_gemm.py has the formats): E4M3 with fp32 scales, MXFP8, NVFP4.

C, O, accumulate and zero_tail are defined in twin/gemm.py, P in twin/quantize.py; BLOCK is 128 and B(n) = ceil(n /
BLOCK). Operands are data and scales of quantize_rows, quantize_columns and quantize_weights; only NVFP4 operands also
have a global scale, fp32[G], which multiplies sums. out is bf16, fp16 or fp32, its rows multiples of 16 bytes. The
input gradient is the forward product of gradients as rows and the transposed weight [G, C, O], quantised along O, with
its scales. ArgumentError if an operand does not match.

A product of two E4M3 or E2M1 numbers is exact, sums and the addition of the bias are fp32, the result is rounded once,
and a row's bits do not depend on parts. (Tensor cores add in another order, and keep fewer bits than fp32 of terms that
are much smaller than the largest term: about 14 bits in sums of E4M3 products.)

With fp32 scales, fp32 operations sum a block, multiply the sum by its scales from left to right, and add it to the
earlier blocks. (On GPUs a multiplication and an addition may be one operation.)
"""

import torch

from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.operands import (
    Bias,
    Matrices,
    Operand,
    ScatteredWeight,
    TensorTable,
    as_pair,
    equal_groups,
    writes,
)
from symmoe.kernels.quantized_gemm import (
    BLOCK,
    FLOAT8_BLOCK,
    TILE_BYTES,
    check_gemm,
    check_wgrad,
    num_blocks,
)
from symmoe.kernels.twin import gemm
from symmoe.kernels.twin.quantize import QuantizeKernels, numbers_of


class QuantizedGemmKernels:
    @staticmethod
    @writes("out")
    def grouped_gemm_quantized(
        rows: Operand,
        weight: Operand | ScatteredWeight,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        group_range: torch.Tensor | None = None,
        bias: Bias = None,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T + bias for every row r of every group g.

        out [N, O]; bias [G, O] in bf16, fp16 or fp32.

        fp32 scales: rows E4M3 [N, C], C a multiple of 16, row_scale [N, B(C)]: a scale for BLOCK features of a row;
        weight E4M3 [G, O, C], weight_scale [G, B(O), B(C)]: a scale for BLOCK x BLOCK features. A block's sum is
        multiplied by its scales and added to the earlier blocks.

        Scales in tiles: rows E4M3 [N, C] (MXFP8) or uint8 [N, C / 2] (NVFP4), C a multiple of 32; row_scale: of whole
        groups, every group from a new tile on (swizzle_scales). group_range: the whole groups' range, if row_range has
        only some rows; else None. weight E4M3 [G, O, C] or uint8 [G, O, C / 2]; weight_scale: the matrices' tiles one
        after the other, or a table of matrices [tiles down, tiles across * 512]. The rows' global scale is first.
        """
        block_format = check_gemm(rows, weight, row_range, out, bias, group_range)
        num_groups, out_width, _ = weight.data.shape
        features, bias_scale = as_pair(bias)
        if block_format is not FLOAT8_BLOCK:
            lines = row_range if group_range is None else group_range
            lhs = _numbers(rows.data, rows.scale, lines, block_format)
            tiles = gemm.packed(weight.scale)
            if isinstance(weight.scale, TensorTable):
                tiles = tiles.view(-1, tiles.shape[2] // TILE_BYTES, TILE_BYTES)
            lines = equal_groups(num_groups, out_width, row_range.device)
            rhs = _numbers(gemm.packed(weight.data).flatten(0, 1), tiles, lines, block_format)
            rhs = rhs.view(num_groups, out_width, -1)
        for g, span in gemm.groups(row_range):
            if block_format is FLOAT8_BLOCK:
                total = _sum_of_blocks(rows, weight, g, span)
            else:
                total = gemm.multiply_rows(lhs[span], rhs[g].t())
            if rows.global_scale is not None and weight.global_scale is not None:
                total = total * rows.global_scale[g] * weight.global_scale[g]
            if features is not None:
                total = total + gemm.bias_rows(features, bias_scale, g, span)
            out[span] = total.to(out.dtype)
        if zero_tail:
            out[int(row_range[1, -1]) :] = 0

    @staticmethod
    @writes("out")
    def grouped_gemm_wgrad_quantized(
        dout: Operand,
        rows: Operand,
        row_range: torch.Tensor,
        out: Matrices,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

        out [G, O, C]. Whole groups. Numbers after the last group are arbitrary.

        fp32 scales: dout E4M3 [O, P], O a multiple of 4, rows E4M3 [C, P]; the padding of a group's last BLOCK is
        zeros; dout_scale [O, P / BLOCK], rows_scale [C, P / BLOCK]: a scale for BLOCK tokens of a feature, block-major.
        On Hopper TMA adds to an fp32 out, and subnormal terms and sums count as zeros of their sign.

        Scales in tiles, as one matrix: dout [O, P] and rows [C, P] in E4M3 (MXFP8), or [O, P / 2] and [C, P / 2] in
        uint8 (NVFP4). Sums include the padding of a group's last tile (zeros, or a Hadamard transform of tokens and
        zeros).
        """
        block_format = check_wgrad(dout, rows, out)
        if block_format is not FLOAT8_BLOCK:
            lhs, rhs = (
                _numbers(data, scale, equal_groups(1, len(data), out.device), block_format)
                for data, scale, _ in (dout, rows)
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
            else:
                tokens = slice(first * BLOCK, end * BLOCK)
                total = gemm.multiply(lhs[:, tokens], rhs[:, tokens].t())
            # A group without tokens may have any global scale.
            if first < end and dout.global_scale is not None and rows.global_scale is not None:
                total = total * dout.global_scale[g] * rows.global_scale[g]
            if first < end or not accumulate:
                gemm.store_sum(out, g, total, accumulate=accumulate)
            first = end


def _sum_of_blocks(
    rows: Operand, weight: Operand | ScatteredWeight, g: int, span: slice
) -> torch.Tensor:
    """The scaled block sums of a group's rows, added in order, from zeros."""
    matrix_OC = gemm.matrix(weight.data, g)
    scales_OB = gemm.matrix(weight.scale, g).repeat_interleave(BLOCK, dim=0)[: len(matrix_OC)]
    total = rows.scale.new_zeros((span.stop - span.start, len(matrix_OC)))
    for b in range(num_blocks(rows.data.shape[1])):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        sums = gemm.multiply_rows(rows.data[span, block].float(), matrix_OC[:, block].float().t())
        total += sums * (rows.scale[span, b, None] * scales_OB[:, b])
    return total


def _numbers(
    data: torch.Tensor, scale: torch.Tensor, line_range: torch.Tensor, block_format: BlockFormat
) -> torch.Tensor:
    """data * scale in fp32, for lines in groups that begin at new tiles; lines of no group are arbitrary."""
    values = numbers_of(data, block_format)
    shape = data.shape[0], block_format.num_blocks(values.shape[1])
    compact = torch.zeros(shape, dtype=torch.uint8, device=data.device)
    QuantizeKernels.unswizzle_scales(scale, line_range, compact)
    scales = compact.view(block_format.scale_dtype).float()
    return values * scales.repeat_interleave(block_format.block, dim=1)
