"""Quantisation, and rows that travel quantised.

QuantizeKernels
---------------
Quantisation of rows, of their columns per group, and of weights; scales in tiles. Formats: kernels/formats.py.

    C features of a row, I and W as in contract/gemm.py
    P tokens, at least TILE * max_tiles(N, G): every group begins at the first multiple of TILE after the group before

out: data and scale to fill, written only for groups; the tokens that fill a group's last tile are zeros. fp32
scales of columns [C, blocks] are block-major: strides (1, C), so that those of one block are neighbours; otherwise
ArgumentError.

* amax: fp32[G] of group_amax or weight_amax, where the format has a global scale.
* seeds: int64[G]; E2M1 is rounded stochastically, by random words of the group's seed and of a position.

Scales in tiles of 128 rows by 4 blocks, as block-scaled matrix units read them: M rows of a scale matrix, padded to a
multiple of 128; Q blocks along the reduction, padded to Qp, a multiple of 4; padding is 0. The scale of row m and block
q is byte

    (m // 128) * 128 * Qp + (q // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + q % 4

WireKernels
-----------
Rows that travel quantised: encoding to bytes and decoding. The bytes: precision/wire.py.

A row of `wire` uint8 [P, W], W a multiple of 16, is E4M3 data of C features, their compact scales, and padding.
"""

from typing import Protocol

import torch
from torch import Tensor

from symmoe.kernels.act_quantized import DactOperands
from symmoe.kernels.activation import Activation
from symmoe.kernels.contract.operands import Matrices, MaybeTensor, writes
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.operands import Buffers
from symmoe.kernels.tensor_table import ScaleTable


class QuantizeKernels(Protocol):
    @writes("out", "sums.0")
    def quantize_rows(
        self,
        rows: Tensor,
        row_range: Tensor,
        out: Buffers,
        block_format: BlockFormat,
        *,
        row_index: MaybeTensor = None,
        amax: MaybeTensor = None,
        seeds: MaybeTensor = None,
        sums: tuple[Tensor, MaybeTensor] | None = None,
    ) -> None:
        """Quantises every row of every group, with scales along the features; and sums rows for a bias gradient.

        rows bf16, fp16 or fp32 [N, C], or [., C] with row_index; data [N, C or C / 2]; scale [N, num_blocks(C)].
        Positions of seeds: (feature, row in the group). Seeds need whole groups.

        sums: fp32 [bias_slots(N, G, SLOT_ROWS), C], gets sums of tiles of SLOT_ROWS rows in their slots
        (kernels/bias_sums.py); and bias_scale fp32[N], by which rows are multiplied first, or None. They need ranges
        that begin at multiples of SLOT_ROWS, counted from the group's first row, and end there or where the group does.
        """

    @writes("dbias")
    def sum_dbias(self, bias_sums: Tensor, row_range: Tensor, dbias: Tensor) -> None:
        """What grouped_bias_grad makes of the rows, bit for bit, from the sums of quantize_rows; whole groups.

        dbias [G, C] in any dtype.
        """

    @writes("out")
    def quantize_columns(
        self,
        rows: Tensor,
        row_range: Tensor,
        out: Buffers,
        block_format: BlockFormat,
        *,
        row_index: MaybeTensor = None,
        amax: MaybeTensor = None,
        signs: int | None = None,
        seeds: MaybeTensor = None,
    ) -> None:
        """Quantises every feature of every group, with scales along the tokens; data is transposed. Whole groups.

        rows [N, C], or [., C] with row_index; data [C, P or P / 2]; scale [C, P / block]. signs: 16 neighbouring
        tokens go through a Hadamard transform first, with these signs (twin/quantize.py). Positions of seeds: (token in
        the group, feature).
        """

    @writes("amax")
    def group_amax(
        self,
        rows: Tensor,
        row_range: Tensor,
        amax: Tensor,
        *,
        row_index: MaybeTensor = None,
        signs: int | None = None,
    ) -> None:
        """amax[g] = the largest finite |x| of the group's rows, 0 if there is none; fp32[G]. Whole groups.

        rows and row_index as in quantize_columns; with signs, x is the transformed row.
        """

    @writes("amax")
    def weight_amax(self, weight: Matrices, amax: Tensor) -> None:
        """amax[g] = the largest finite |x| of matrix g, 0 if there is none; fp32[G]. weight [G, M, K], contiguous."""

    @writes("out")
    def quantize_weights(
        self, weight: Matrices, out: Buffers, block_format: BlockFormat, *, amax: MaybeTensor = None
    ) -> None:
        """Quantises G matrices, with scales along the last dimension.

        weight [G, M, K], contiguous or the transpose of contiguous matrices, or a table; data [G, M, K or K / 2]; scale
        [G, M / block_lines, num_blocks(K)], quotients rounded up.
        """

    @writes("out", "transposed_out")
    def quantize_weight_pairs(
        self,
        weight: Matrices,
        out: Buffers,
        transposed_out: Buffers,
        block_format: BlockFormat,
        *,
        amax: MaybeTensor = None,
    ) -> None:
        """Both operands of G contiguous matrices [G, M, K]: the results of quantize_weights for `weight`, and for
        `weight.mT` (transposed_out). M and K are even where E2M1 is packed."""

    @writes("out")
    def act_quantize(
        self,
        h: Tensor,
        row_scale: Tensor,
        row_range: Tensor,
        out: Buffers,
        activation: Activation,
        block_format: BlockFormat,
    ) -> None:
        """scaled_activation of h, rounded to the dtype of h and quantised by quantize_rows: rows of the second GEMM.

        h bf16 or fp16 [N, W]; row_scale fp32[N]; data [N, I]. block_format: takes_act_quantize.
        """

    @writes("out", "workspace")
    def dact_quantize(
        self,
        da: Tensor,
        h: Tensor,
        row_scale: Tensor,
        row_range: Tensor,
        out: DactOperands,
        workspace: Tensor,
        activation: Activation,
        block_format: BlockFormat,
    ) -> None:
        """scaled_activation_grad, dh rounded to the dtype of h and quantised; dscale; columns of the activation again,
        so that a forward pass need not keep them; and the first GEMM's dbias, of the rounded dh. Whole groups.

        da [N, I] of the dtype of h; workspace: fp32, of dact_quantize_workspace_numel(...) elements. The others as in
        act_quantize; block_format: takes_dact_quantize.
        """

    @writes("swizzled")
    def swizzle_scales(
        self, scale: Tensor | ScaleTable, row_range: Tensor | None, swizzled: Tensor
    ) -> None:
        """Compact scales into tiles: those of grouped rows, each group's padded to whole tiles, or of any matrices.

        Args:
            scale: [N, Q], one byte each, of whole groups; or a table, of whose matrices nothing but the sizes without
                padding is read.
            row_range: where the rows of groups are; None for a table.
            swizzled: uint8, from a multiple of 16 on: [at least max_tiles(N, G), ceil(Q / 4), 512], of which tiles of
                no group are not written; for a table, all the memory in which its destinations are.
        """

    @writes("scale")
    def unswizzle_scales(self, swizzled: Tensor, row_range: Tensor, scale: Tensor) -> None:
        """The inverse of swizzle_scales for grouped rows; scales of rows that belong to no group are not written."""


class WireKernels(Protocol):
    @writes("wire")
    def encode_rows(self, rows: Tensor, wire: Tensor, block_format: BlockFormat) -> None:
        """wire [P, W] = the result of quantize_rows for rows [P, C] bf16, fp16 or fp32, padded with zeros."""

    @writes("out")
    def unpack_rows(
        self, wire: Tensor, row_range: Tensor, out: Buffers, *, row_index: Tensor | None = None
    ) -> None:
        """out = data[r], scale[r] = data and scales of row row_index[r] of the wire, for every row r of every group.

        data uint8 [N, C]; scale uint8 [N, S], the bytes of scales. Other rows are neither read nor written.
        """

    @writes("out")
    def decode_rows(self, wire: Tensor, out: Tensor, block_format: BlockFormat) -> None:
        """out [P, C] = data * scale of every row of the wire, rounded to out's dtype: bf16, fp16 or fp32."""

    @writes("out")
    def requantize_columns(
        self,
        wire: Tensor,
        row_range: Tensor,
        out: Buffers,
        block_format: BlockFormat,
        dtype: torch.dtype,
        *,
        row_index: Tensor | None = None,
    ) -> None:
        """The result of quantize_columns for decode_rows' result in `dtype` (bf16, fp16 or fp32), which is not stored.

        out as in quantize_columns; block_format: format of rows and columns, E4M3 in blocks. Rows of no
        group are not read.
        """
