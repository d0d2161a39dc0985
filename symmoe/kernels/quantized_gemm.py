"""Rules of the grouped GEMMs of quantised numbers on all devices: formats, sizes of scales, and checks of operands.

    Float8Block  data E4M3, a scale fp32 for BLOCK numbers along the contraction (of weights, for BLOCK x BLOCK)
    MXFP8        data E4M3 (torch.float8_e4m3fn), a scale E8M0 for 32 of them
    NVFP4        data E2M1 (torch.uint8, two in a byte), a scale E4M3 for 16 of them, a global scale fp32 for a group

Where scales are bytes, the dtype of the data is the format, and they lie in 128x4 tiles, uint8 [tiles, ceil(scales of a
line / 4), 512] (contract/quantize.py). There may be more tiles than are needed, as swizzle_scales makes them.
"""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import FLOATS, check_column_scale, check_multiple, check_numbers, check_operand, check_out
from symmoe.kernels.tensor_table import TensorTable

BLOCK = 128
ALIGNMENT = 16  # bytes: rows of data and of results begin at multiples
TILE_BLOCKS, TILE_BYTES = 4, 512
E4M3, SCALE = (torch.float8_e4m3fn,), (torch.float32,)
# Parameters of grouped_gemm_fp8's kernels that need not be aligned to ALIGNMENT.
ANY_ADDRESS = "row_scale weight_table weight_scale weight_scale_table row_range bias bias_scale".split()
FORMATS = {
    torch.float8_e4m3fn: BlockFormat(element="e4m3", scale="e8m0", block=32),
    torch.uint8: BlockFormat(element="e2m1", scale="e4m3", block=16),
}

Matrices = torch.Tensor | TensorTable
MaybeTensor = torch.Tensor | None


def num_blocks(length: int) -> int:
    """Number of fp32 scales of `length` numbers."""
    return -(-length // BLOCK)


def tiles_across(block_format: BlockFormat, width: int) -> int:
    """Number of tiles for the scales of `width` numbers of a line."""
    return -(-block_format.num_blocks(width) // TILE_BLOCKS)


def tiles_down(num_lines: int) -> int:
    """Number of tiles that the lines of one matrix need."""
    return -(-num_lines // TILE)


def check_fp8_gemm(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: Matrices,
    weight_scale: Matrices,
    out: torch.Tensor,
    bias: MaybeTensor,
    bias_scale: MaybeTensor,
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_fp8."""
    num_rows, in_width = rows.shape
    num_groups, out_width, _ = weight.shape
    check_operand("rows", rows, (num_rows, in_width), E4M3)
    check_operand("weight", weight, (num_groups, out_width, in_width), E4M3)
    check_operand("row_scale", row_scale, (num_rows, num_blocks(in_width)), SCALE)
    check_operand("weight_scale", weight_scale, (num_groups, num_blocks(out_width), num_blocks(in_width)), SCALE)
    check_out(out, (num_rows, out_width), num_groups, bias, bias_scale)
    _check_widths(in_width, ALIGNMENT, out)


def check_fp8_wgrad(
    dout: torch.Tensor, dout_scale: torch.Tensor, rows: torch.Tensor, rows_scale: torch.Tensor, out: Matrices
) -> None:
    """ArgumentError unless these are operands and result of grouped_gemm_wgrad_fp8."""
    num_tokens = dout.shape[1]
    for name, data, scale in (("dout", dout, dout_scale), ("rows", rows, rows_scale)):
        check_operand(name, data, (data.shape[0], num_tokens), E4M3)
        check_numbers(f"{name}_scale", scale, (data.shape[0], num_blocks(num_tokens)), SCALE)
        check_column_scale(f"{name}_scale", scale)
    check_multiple("features of dout", dout.shape[0], ALIGNMENT // dout_scale.element_size())
    _check_gradient(out, dout.shape[0], rows.shape[0], num_tokens)


def check_scaled_gemm(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: Matrices,
    weight_scale: Matrices,
    row_range: torch.Tensor,
    out: torch.Tensor,
    row_global_scale: MaybeTensor,
    weight_global_scale: MaybeTensor,
    group_range: MaybeTensor,
    bias: MaybeTensor,
    bias_scale: MaybeTensor,
) -> BlockFormat:
    """The format of operands of grouped_gemm_scaled; ArgumentError if these do not fit."""
    block_format = _format_of("rows", rows)
    num_rows, num_bytes = rows.shape
    num_groups, out_width, _ = weight.shape
    in_width = num_bytes * block_format.elements_per_byte
    check_operand("rows", rows, (num_rows, num_bytes), (rows.dtype,))
    check_operand(_packed("weight", block_format), weight, (num_groups, out_width, num_bytes), (rows.dtype,))
    check_out(out, (num_rows, out_width), num_groups, bias, bias_scale)
    across = tiles_across(block_format, in_width)
    # The most that rows of any bounds need: the host does not know them.
    _check_scale(_packed("row_scale", block_format), row_scale, max_tiles(num_rows, num_groups), across)
    name = _packed("weight_scale", block_format)
    if isinstance(weight_scale, TensorTable):
        check_operand(name, weight_scale, (num_groups, tiles_down(out_width), across * TILE_BYTES), (torch.uint8,))
    else:
        _check_scale(name, weight_scale, num_groups * tiles_down(out_width), across)
    _check_global_scale("row_global_scale", row_global_scale, block_format, num_groups)
    _check_global_scale("weight_global_scale", weight_global_scale, block_format, num_groups)
    _check_widths(in_width, 32, out)
    for name, ranges in (("row_range", row_range), ("group_range", group_range)):
        if ranges is not None:
            check_operand(name, ranges, (2, num_groups), (torch.int32,))
    return block_format


def check_scaled_wgrad(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    out: Matrices,
    dout_global_scale: MaybeTensor,
    rows_global_scale: MaybeTensor,
) -> BlockFormat:
    """The format of operands of grouped_gemm_wgrad_scaled; ArgumentError if these do not fit."""
    block_format = _format_of("dout", dout)
    num_tokens = dout.shape[1] * block_format.elements_per_byte
    for name, data, scale, global_scale in (
        ("dout", dout, dout_scale, dout_global_scale),
        ("rows", rows, rows_scale, rows_global_scale),
    ):
        check_operand(_packed(name, block_format), data, (data.shape[0], dout.shape[1]), (dout.dtype,))
        tiles = tiles_down(data.shape[0]), tiles_across(block_format, num_tokens)
        _check_scale(_packed(f"{name}_scale", block_format), scale, *tiles)
        _check_global_scale(f"{name}_global_scale", global_scale, block_format, out.shape[0])
    _check_gradient(out, dout.shape[0], rows.shape[0], num_tokens)
    return block_format


def _check_widths(in_width: int, unit: int, out: torch.Tensor) -> None:
    check_multiple("contracted features", in_width, unit)
    check_multiple("features of out", out.shape[1], ALIGNMENT // out.element_size())


def _check_gradient(out: Matrices, out_rows: int, columns: int, num_tokens: int) -> None:
    check_operand("out", out, (out.shape[0], out_rows, columns), FLOATS)
    check_multiple("tokens of dout and rows", num_tokens, TILE)
    check_multiple("features of rows", columns, ALIGNMENT // out.dtype.itemsize)


def _format_of(name: str, data: torch.Tensor) -> BlockFormat:
    if data.dtype not in FORMATS:
        raise ArgumentError(f"{name} must be of {' or '.join(map(str, FORMATS))}, got {data.dtype}")
    return FORMATS[data.dtype]


def _packed(name: str, block_format: BlockFormat) -> str:
    """The name of an operand for texts, with what NVFP4's shapes follow from."""
    return name if block_format.elements_per_byte == 1 else f"{name} (of data with two elements in a byte)"


def _check_scale(name: str, scale: torch.Tensor, num_tiles: int, across: int) -> None:
    if scale.ndim != 3 or scale.shape[0] < num_tiles or scale.shape[1:] != (across, TILE_BYTES):
        raise ArgumentError(f"{name} must be [{num_tiles} or more, {across}, {TILE_BYTES}], got {list(scale.shape)}")
    check_operand(name, scale, scale.shape, (torch.uint8,))


def _check_global_scale(name: str, scale: MaybeTensor, block_format: BlockFormat, num_groups: int) -> None:
    if (scale is not None) != block_format.has_global_scale:
        given = "None" if scale is None else list(scale.shape)
        wanted = f"[{num_groups}]" if block_format.has_global_scale else "None"
        raise ArgumentError(f"{name} must be {wanted} where numbers are {block_format.element}, got {given}")
    if scale is not None:
        check_operand(name, scale, (num_groups,), SCALE)
