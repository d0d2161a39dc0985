"""Rows that travel quantised: encoding to bytes and decoding. The bytes: precision/wire.py.

A row of `wire` uint8 [P, W], W a multiple of 16, is E4M3 data of C features, their compact scales, and padding.
"""

from typing import Protocol

import torch
from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.operands import Buffers


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
