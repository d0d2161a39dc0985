"""Grouped GEMMs of quantised numbers: E4M3 with fp32 scales (kernels/quantized_gemm.py), and MXFP8 and NVFP4.

C, O, accumulate and zero_tail are those of contract/gemm.py, P is that of contract/quantize.py; BLOCK is 128
and B(n) = ceil(n / BLOCK). Operands are data and scales of quantize_rows, quantize_columns and quantize_weights;
out is bf16, fp16 or fp32, its rows multiples of 16 bytes; bias [G, O] bf16, fp16 or fp32, None: 0; bias_scale fp32[N],
None: 1. The input gradient is the forward product, with gradients for rows and the transposed weight [G, C, O],
quantised along O, with its scales. ArgumentError if an operand does not fit.

A product of two E4M3 or E2M1 numbers is exact, sums are fp32, the bias is added in fp32, the result is rounded once,
and a row's bits do not depend on parts. (Tensor cores add in another order, and keep fewer bits than fp32 of terms that
are much smaller than the largest one: about 14 bits in sums of E4M3 products.)
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from symmoe.kernels.tensor_table import TensorTable


class QuantizedGemmKernels(Protocol):
    def grouped_gemm_fp8(
        self,
        rows: Tensor,
        row_scale: Tensor,
        weight: Tensor | TensorTable,
        weight_scale: Tensor | TensorTable,
        row_range: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        bias_scale: Tensor | None = None,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T + bias[g] * bias_scale[r], r in group g.

        rows E4M3 [N, C], C a multiple of 16, with row_scale fp32 [N, B(C)]: a scale for BLOCK features of a row; weight
        E4M3 [G, O, C] with weight_scale fp32 [G, B(O), B(C)]: a scale for BLOCK x BLOCK features. A block's sum is
        multiplied by its scales and added to the blocks before it. out [N, O].
        """

    def grouped_gemm_wgrad_fp8(
        self,
        dout: Tensor,
        dout_scale: Tensor,
        rows: Tensor,
        rows_scale: Tensor,
        row_range: Tensor,
        out: Tensor | TensorTable,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

        dout E4M3 [O, P], O a multiple of 4, rows E4M3 [C, P]: the tokens between a group's last and the next multiple
        of BLOCK are zeros, those past the last group may be anything. dout_scale fp32 [O, P / BLOCK], rows_scale fp32
        [C, P / BLOCK]: a scale for BLOCK tokens of a feature, block-major. out [G, O, C]. Whole groups. On Hopper TMA
        adds to an fp32 out, and subnormal terms and sums count as zeros of their sign.
        """

    def grouped_gemm_scaled(
        self,
        rows: Tensor,
        row_scale: Tensor,
        weight: Tensor | TensorTable,
        weight_scale: Tensor | TensorTable,
        row_range: Tensor,
        out: Tensor,
        *,
        row_global_scale: Tensor | None = None,
        weight_global_scale: Tensor | None = None,
        group_range: Tensor | None = None,
        bias: Tensor | None = None,
        bias_scale: Tensor | None = None,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T + bias[g] * bias_scale[r], r in group g.

        rows E4M3 [N, C] (MXFP8) or uint8 [N, C / 2] (NVFP4), C a multiple of 32; row_scale: in tiles, every group from
        a new tile on (swizzle_scales). weight E4M3 [G, O, C] or uint8 [G, O, C / 2]; weight_scale: tiles of
        one matrix after the other, or a table of matrices [tiles down, tiles across * 512]. NVFP4 needs
        row_global_scale and weight_global_scale, fp32[G], by which the sum is multiplied, the rows' first; MXFP8 has
        none. out [N, O].

        row_scale is that of whole groups. group_range: theirs, if row_range has only some of their rows; else None.
        """

    def grouped_gemm_wgrad_scaled(
        self,
        dout: Tensor,
        dout_scale: Tensor,
        rows: Tensor,
        rows_scale: Tensor,
        row_range: Tensor,
        out: Tensor | TensorTable,
        *,
        dout_global_scale: Tensor | None = None,
        rows_global_scale: Tensor | None = None,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

        dout [O, P] and rows [C, P] in E4M3 (MXFP8), or [O, P / 2] and [C, P / 2] in uint8 (NVFP4): the padding
        of a group's last tile is summed, too (zeros, or a Hadamard transform of tokens and zeros); numbers after the
        last group may be anything. dout_scale, rows_scale: in tiles, as one matrix. NVFP4 needs
        dout_global_scale and rows_global_scale, fp32[G], of groups with tokens; MXFP8 has none. out [G, O, C].
        Whole groups.
        """
