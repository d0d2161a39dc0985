"""Grouped GEMMs of quantised numbers (kernels/quantized_gemm.py has the formats): E4M3 with fp32 scales, MXFP8, NVFP4.

C, O, accumulate and zero_tail are those of contract/gemm.py, P is that of contract/quantize.py; BLOCK is 128
and B(n) = ceil(n / BLOCK). Operands are data and scales of quantize_rows, quantize_columns and quantize_weights; an
NVFP4 operand also has a global scale, fp32[G], by which sums are multiplied, others have none. out is bf16, fp16 or
fp32, its rows multiples of 16 bytes. The input gradient is the forward product, with gradients for rows and the
transposed weight [G, C, O], quantised along O, with its scales. ArgumentError if an operand does not fit.

A product of two E4M3 or E2M1 numbers is exact, sums are fp32, the bias is added in fp32, the result is rounded once,
and a row's bits do not depend on parts. (Tensor cores add in another order, and keep fewer bits than fp32 of terms that
are much smaller than the largest one: about 14 bits in sums of E4M3 products.)
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import Bias, Matrices, writes
from symmoe.kernels.operands import Operand, ScatteredWeight


class QuantizedGemmKernels(Protocol):
    @writes("out")
    def grouped_gemm_quantized(
        self,
        rows: Operand,
        weight: Operand | ScatteredWeight,
        row_range: Tensor,
        out: Tensor,
        *,
        group_range: Tensor | None = None,
        bias: Bias = None,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T + bias for every row r of every group g.

        out [N, O]; bias [G, O] in bf16, fp16 or fp32.

        fp32 scales: rows E4M3 [N, C], C a multiple of 16, row_scale [N, B(C)]: a scale for BLOCK features of a row;
        weight E4M3 [G, O, C], weight_scale [G, B(O), B(C)]: a scale for BLOCK x BLOCK features. A block's sum is
        multiplied by its scales and added to the blocks before it.

        Scales in tiles: rows E4M3 [N, C] (MXFP8) or uint8 [N, C / 2] (NVFP4), C a multiple of 32; row_scale: every
        group from a new tile on (swizzle_scales), of whole groups. group_range: theirs, if row_range has only some of
        their rows; else None. weight E4M3 [G, O, C] or uint8 [G, O, C / 2]; weight_scale: tiles of one matrix after the
        other, or a table of matrices [tiles down, tiles across * 512]. The rows' global scale is multiplied by first.
        """

    @writes("out")
    def grouped_gemm_wgrad_quantized(
        self,
        dout: Operand,
        rows: Operand,
        row_range: Tensor,
        out: Matrices,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

        out [G, O, C]. Whole groups. Numbers after the last group may be anything.

        fp32 scales: dout E4M3 [O, P], O a multiple of 4, rows E4M3 [C, P]; the tokens that fill a group's last BLOCK
        are zeros; dout_scale [O, P / BLOCK], rows_scale [C, P / BLOCK]: a scale for BLOCK tokens of a feature,
        block-major. On Hopper TMA adds to an fp32 out, and subnormal terms and sums count as zeros of their sign.

        Scales in tiles, as one matrix: dout [O, P] and rows [C, P] in E4M3 (MXFP8), or [O, P / 2] and [C, P / 2] in
        uint8 (NVFP4): the padding of a group's last tile is summed, too (zeros, or a Hadamard transform of tokens and
        zeros).
        """
