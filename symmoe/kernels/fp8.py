"""Rules of the grouped GEMMs of E4M3 numbers on all devices: the length of a block, and checks of operands."""

from __future__ import annotations

import torch

from symmoe.kernels.operands import FLOATS, check_column_scale, check_multiple, check_numbers, check_operand, check_out
from symmoe.kernels.tensor_table import TensorTable

BLOCK = 128
ALIGNMENT = 16  # bytes: rows of operands and results begin at multiples
DATA, SCALE = (torch.float8_e4m3fn,), (torch.float32,)


def check_fp8_gemm(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    weight_scale: torch.Tensor | TensorTable,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_fp8."""
    num_rows, in_width = rows.shape
    num_groups, out_width, _ = weight.shape
    check_operand("rows", rows, (num_rows, in_width), DATA)
    check_operand("weight", weight, (num_groups, out_width, in_width), DATA)
    check_operand("row_scale", row_scale, (num_rows, num_blocks(in_width)), SCALE)
    check_operand("weight_scale", weight_scale, (num_groups, num_blocks(out_width), num_blocks(in_width)), SCALE)
    check_out(out, (num_rows, out_width), num_groups, bias, bias_scale)
    check_multiple("contracted features", in_width, ALIGNMENT)
    check_multiple("features of out", out_width, ALIGNMENT // out.element_size())


def check_fp8_wgrad(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    out: torch.Tensor | TensorTable,
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_wgrad_fp8."""
    out_rows, num_tokens = dout.shape
    columns = rows.shape[0]
    check_operand("dout", dout, (out_rows, num_tokens), DATA)
    check_numbers("dout_scale", dout_scale, (out_rows, num_blocks(num_tokens)), SCALE)
    check_column_scale("dout_scale", dout_scale)
    check_operand("rows", rows, (columns, num_tokens), DATA)
    check_numbers("rows_scale", rows_scale, (columns, num_blocks(num_tokens)), SCALE)
    check_column_scale("rows_scale", rows_scale)
    check_operand("out", out, (out.shape[0], out_rows, columns), FLOATS)
    check_multiple("tokens of dout and rows", num_tokens, BLOCK)
    check_multiple("features of dout", out_rows, ALIGNMENT // dout_scale.element_size())
    check_multiple("features of rows", columns, ALIGNMENT // out.dtype.itemsize)


def num_blocks(length: int) -> int:
    """Number of scales of `length` numbers."""
    return -(-length // BLOCK)
