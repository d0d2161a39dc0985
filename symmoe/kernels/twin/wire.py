"""Rows that travel quantised: encoding to bytes, and decoding. Format: precision/wire.py.

A row of `wire` uint8 [P, W], W a multiple of 16, is E4M3 data of C features, their compact scales, and padding.
"""

import torch

from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.operands import Buffers, equal_groups, writes
from symmoe.kernels.twin.gemm import rows_of, take_rows
from symmoe.kernels.twin.quantize import QuantizeKernels


class WireKernels:
    @staticmethod
    @writes("wire")
    def encode_rows(rows: torch.Tensor, wire: torch.Tensor, block_format: BlockFormat) -> None:
        """wire [P, W] = the result of quantize_rows for rows [P, C] bf16, fp16 or fp32, padded with zeros."""
        num_rows, width = rows.shape
        wire[:, width:] = 0  # the padding too
        QuantizeKernels.quantize_rows(
            rows,
            equal_groups(1, num_rows, rows.device),
            _data_and_scale(wire, width, block_format),
            block_format,
        )

    @staticmethod
    @writes("out")
    def unpack_rows(
        wire: torch.Tensor,
        row_range: torch.Tensor,
        out: Buffers,
        *,
        row_index: torch.Tensor | None = None,
    ) -> None:
        """out = data[r], scale[r] = data and scales of row row_index[r] of the wire, for every row r of every group.

        data uint8 [N, C]; scale uint8 [N, S], the bytes of scales. Other rows are neither read nor written.
        """
        (data, scale), width = out, out[0].shape[1]
        row = rows_of(row_range)
        rows = wire[row if row_index is None else row_index[row]]
        data[row] = rows[:, :width]
        scale[row] = rows[:, width : width + scale.shape[1]]

    @staticmethod
    @writes("out")
    def decode_rows(wire: torch.Tensor, out: torch.Tensor, block_format: BlockFormat) -> None:
        """out [P, C] = data * scale of every row of the wire, rounded to out's dtype: bf16, fp16 or fp32."""
        width = out.shape[1]
        data, scale = _data_and_scale(wire, width, block_format)
        spread = scale.float().repeat_interleave(block_format.block, dim=1)[:, :width]
        out.copy_(data.float() * spread)

    @staticmethod
    @writes("out")
    def requantize_columns(
        wire: torch.Tensor,
        row_range: torch.Tensor,
        out: Buffers,
        block_format: BlockFormat,
        dtype: torch.dtype,
        *,
        row_index: torch.Tensor | None = None,
    ) -> None:
        """The result of quantize_columns for decode_rows' result in `dtype` (bf16, fp16 or fp32), which is not stored.

        out as in quantize_columns; block_format: format of rows and columns, E4M3 in blocks. Rows of no
        group are not read.
        """
        end = int(row_range[1, -1])
        rows = take_rows((wire, row_index), slice(end))
        decoded = torch.empty((end, out[0].shape[0]), dtype=dtype, device=wire.device)
        WireKernels.decode_rows(rows, decoded, block_format)
        QuantizeKernels.quantize_columns(decoded, row_range, out, block_format)


def _data_and_scale(wire: torch.Tensor, width: int, block_format: BlockFormat) -> Buffers:
    """Views of the data and the scales in rows of the wire."""
    end = width + block_format.num_blocks(width) * block_format.scale_dtype.itemsize
    scale = wire[:, width:end].view(block_format.scale_dtype)
    return wire[:, :width].view(block_format.data_dtype), scale
