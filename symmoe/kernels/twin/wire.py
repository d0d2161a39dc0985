"""Twins of contract/quantize.py."""

import torch

from symmoe.kernels.gemm_parts import equal_groups
from symmoe.kernels.twin.gemm import filled_groups, take_rows
from symmoe.kernels.twin.quantize import quantize_columns, quantize_rows


def encode_rows(rows, wire, block_format):
    num_rows, width = rows.shape
    data = rows.new_empty((num_rows, width), dtype=block_format.data_dtype)
    scale = rows.new_empty(
        (num_rows, block_format.num_blocks(width)), dtype=block_format.scale_dtype
    )
    quantize_rows(rows, equal_groups(1, num_rows, rows.device), (data, scale), block_format)
    end = width + scale.shape[1] * scale.element_size()
    wire[:, :width], wire[:, width:end], wire[:, end:] = (
        data.view(torch.uint8),
        scale.view(torch.uint8),
        0,
    )


def unpack_rows(wire, row_range, out, *, row_index=None):
    (data, scale), width = out, out[0].shape[1]
    for _, span in filled_groups(row_range):
        rows = take_rows((wire, row_index), span)
        data[span] = rows[:, :width]
        scale[span] = rows[:, width : width + scale.shape[1]]


def decode_rows(wire, out, block_format):
    num_rows, width = out.shape
    num_blocks = block_format.num_blocks(width)
    scale_bytes = num_blocks * block_format.scale_dtype.itemsize
    data = wire[:, :width].contiguous().view(block_format.data_dtype).float()
    scale = wire[:, width : width + scale_bytes].contiguous().view(block_format.scale_dtype).float()
    spread = scale.repeat_interleave(block_format.block, dim=1)[:, :width]
    out.copy_(data * spread.view(num_rows, width))


def requantize_columns(wire, row_range, out, block_format, dtype, *, row_index=None):
    end = int(row_range[1, -1])
    rows = wire[:end] if row_index is None else wire.index_select(0, row_index[:end])
    decoded = torch.empty((end, out[0].shape[0]), dtype=dtype, device=wire.device)
    decode_rows(rows, decoded, block_format)
    quantize_columns(decoded, row_range, out, block_format)
