"""What the grouped GEMMs of E4M3 numbers have in common on all devices: how long a block is, and what operands fit.

A number is q * scale: q in E4M3 (torch.float8_e4m3fn), and a scale in fp32 for BLOCK numbers along what is contracted.
B(n) = ceil(n / BLOCK) scales belong to n numbers.
"""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError

BLOCK = 128
ALIGNMENT = 16  # bytes: where rows of operands and results begin
DATA, SCALE, OUT = (torch.float8_e4m3fn,), (torch.float32,), (torch.bfloat16, torch.float16, torch.float32)


def check_fp8_gemm(
    rows: torch.Tensor, row_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_fp8."""
    num_rows, in_width = rows.shape
    num_groups, out_width, _ = weight.shape
    _check("rows", rows, (num_rows, in_width), DATA)
    _check("row_scale", row_scale, (num_rows, num_blocks(in_width)), SCALE)
    _check("weight", weight, (num_groups, out_width, in_width), DATA)
    _check("weight_scale", weight_scale, (num_groups, num_blocks(out_width), num_blocks(in_width)), SCALE)
    _check("out", out, (num_rows, out_width), OUT)
    _check_multiple("contracted features", in_width, ALIGNMENT)
    _check_multiple("features of out", out_width, ALIGNMENT // out.element_size())


def check_fp8_wgrad(
    dout: torch.Tensor, dout_scale: torch.Tensor, rows: torch.Tensor, rows_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_wgrad_fp8."""
    out_rows, num_tokens = dout.shape
    columns = rows.shape[0]
    _check("dout", dout, (out_rows, num_tokens), DATA)
    _check("dout_scale", dout_scale, (out_rows, num_blocks(num_tokens)), SCALE)
    _check("rows", rows, (columns, num_tokens), DATA)
    _check("rows_scale", rows_scale, (columns, num_blocks(num_tokens)), SCALE)
    _check("out", out, (out.shape[0], out_rows, columns), OUT)
    _check_multiple("tokens of dout and rows", num_tokens, BLOCK)
    _check_multiple("features of rows", columns, ALIGNMENT // out.element_size())


def num_blocks(length: int) -> int:
    """Scales of `length` numbers."""
    return -(-length // BLOCK)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != shape:
        raise ArgumentError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ArgumentError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def _check_multiple(what: str, number: int, unit: int) -> None:
    if number % unit:
        raise ArgumentError(f"the number of {what} must be a multiple of {unit}, got {number}")
