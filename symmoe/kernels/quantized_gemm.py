"""Rules of the grouped GEMMs of quantised numbers, for all devices: formats, sizes of scales, checks of operands.

    Float8Block  data E4M3, a scale fp32 for BLOCK numbers along the contraction (of weights, for BLOCK x BLOCK)
    MXFP8        data E4M3 (torch.float8_e4m3fn), a scale E8M0 for 32 of them
    NVFP4        data E2M1 (torch.uint8, two in a byte), a scale E4M3 for 16 of them, a global scale fp32 for a group

Scales in fp32 are compact. Scales in bytes are in 128x4 tiles: uint8 [tiles, ceil(scales of a line / 4), 512]
(twin/quantize.py), possibly with unused tiles; then the dtype of the data determines the format.
"""

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import (
    FLOATS,
    Bias,
    Matrices,
    MaybeTensor,
    Operand,
    ScatteredWeight,
    TensorTable,
    as_pair,
    check_column_scale,
    check_multiple,
    check_operand,
)

BLOCK = 128
ALIGNMENT = 16  # bytes: rows of data and of results begin at multiples
TILE_BLOCKS, TILE_BYTES = 4, 512
SCALE = (torch.float32,)
FLOAT8_BLOCK = BlockFormat(element="e4m3", scale="fp32", block=BLOCK, block_lines=BLOCK)
num_blocks = FLOAT8_BLOCK.num_blocks
FORMATS = {  # with scales in tiles
    torch.float8_e4m3fn: BlockFormat(element="e4m3", scale="e8m0", block=32),
    torch.uint8: BlockFormat(element="e2m1", scale="e4m3", block=16),
}


def tiles_across(block_format: BlockFormat, width: int) -> int:
    """Number of tiles for the scales of `width` numbers of a line."""
    return -(-block_format.num_blocks(width) // TILE_BLOCKS)


def tiles_down(num_lines: int) -> int:
    """Number of tiles for the lines of one matrix."""
    return -(-num_lines // TILE)


def check_gemm(
    rows: Operand,
    weight: Operand | ScatteredWeight,
    row_range: torch.Tensor,
    out: torch.Tensor,
    bias: Bias,
    group_range: MaybeTensor,
) -> BlockFormat:
    """The format of operands of grouped_gemm_quantized; ArgumentError if they do not match."""
    block_format = _format_of("rows", rows)
    (num_rows, line_bytes), (num_groups, out_width, _) = rows.data.shape, weight.data.shape
    in_width, dtypes = line_bytes * block_format.elements_per_byte, (rows.data.dtype,)
    weight_name, (features, bias_scale) = _packed("weight", block_format), as_pair(bias)
    for name, tensor, shape, allowed in (
        ("rows", rows.data, (num_rows, line_bytes), dtypes),
        (weight_name, weight.data, (num_groups, out_width, line_bytes), dtypes),
        ("out", out, (num_rows, out_width), FLOATS),
        ("bias", features, (num_groups, out_width), FLOATS),
        ("bias_scale", bias_scale, (num_rows,), SCALE),
        ("row_range", row_range, (2, num_groups), (torch.int32,)),
        ("group_range", group_range, (2, num_groups), (torch.int32,)),
    ):
        if tensor is not None:
            check_operand(name, tensor, shape, allowed)
    row_name, name = _packed("row_scale", block_format), _packed("weight_scale", block_format)
    if block_format is FLOAT8_BLOCK:
        check_operand(row_name, rows.scale, (num_rows, num_blocks(in_width)), SCALE)
        check_operand(
            name, weight.scale, (num_groups, num_blocks(out_width), num_blocks(in_width)), SCALE
        )
    else:
        across, down = tiles_across(block_format, in_width), tiles_down(out_width)
        # The most tiles for any bounds of groups: the host does not have the bounds.
        _check_tiles(row_name, rows.scale, max_tiles(num_rows, num_groups), across)
        if isinstance(weight.scale, TensorTable):
            check_operand(
                name, weight.scale, (num_groups, down, across * TILE_BYTES), (torch.uint8,)
            )
        else:
            _check_tiles(name, weight.scale, num_groups * down, across)
    _check_global_scale("row_global_scale", rows.global_scale, block_format, num_groups)
    _check_global_scale("weight_global_scale", weight.global_scale, block_format, num_groups)
    check_multiple(
        "contracted features", in_width, ALIGNMENT if block_format is FLOAT8_BLOCK else 32
    )
    check_multiple("features of out", out_width, ALIGNMENT // out.element_size())
    return block_format


def check_wgrad(dout: Operand, rows: Operand, out: Matrices) -> BlockFormat:
    """The format of operands of grouped_gemm_wgrad_quantized; ArgumentError if they do not match."""
    block_format, (out_rows, token_bytes) = _format_of("dout", dout), dout.data.shape
    num_tokens, columns = token_bytes * block_format.elements_per_byte, rows.data.shape[0]
    for name, (data, scale, global_scale) in (("dout", dout), ("rows", rows)):
        check_operand(
            _packed(name, block_format), data, (data.shape[0], token_bytes), (dout.data.dtype,)
        )
        scale_name = _packed(f"{name}_scale", block_format)
        if block_format is FLOAT8_BLOCK:
            check_operand(
                scale_name, scale, (data.shape[0], num_blocks(num_tokens)), SCALE, any_strides=True
            )
            check_column_scale(scale_name, scale)
        else:
            _check_tiles(
                scale_name, scale, tiles_down(data.shape[0]), tiles_across(block_format, num_tokens)
            )
        _check_global_scale(f"{name}_global_scale", global_scale, block_format, out.shape[0])
    if block_format is FLOAT8_BLOCK:
        check_multiple("features of dout", out_rows, ALIGNMENT // dout.scale.element_size())
    check_operand("out", out, (out.shape[0], out_rows, columns), FLOATS)
    check_multiple("tokens of dout and rows", num_tokens, TILE)
    check_multiple("features of rows", columns, ALIGNMENT // out.dtype.itemsize)
    return block_format


def _format_of(name: str, operand: Operand) -> BlockFormat:
    """The format: compact scales are a matrix, scales in tiles have three dimensions."""
    formats, dtype = (
        {torch.float8_e4m3fn: FLOAT8_BLOCK} if operand.scale.ndim == 2 else FORMATS,
        operand.data.dtype,
    )
    if dtype not in formats:
        raise ArgumentError(f"{name} must be of {' or '.join(map(str, formats))}, got {dtype}")
    return formats[dtype]


def _packed(name: str, block_format: BlockFormat) -> str:
    """The operand's name for messages; for NVFP4 with the packing that explains its shapes."""
    return (
        name
        if block_format.elements_per_byte == 1
        else f"{name} (of data with two elements in a byte)"
    )


def _check_tiles(name: str, scale: torch.Tensor, num_tiles: int, across: int) -> None:
    if scale.ndim != 3 or scale.shape[0] < num_tiles or scale.shape[1:] != (across, TILE_BYTES):
        raise ArgumentError(
            f"{name} must be [{num_tiles} or more, {across}, {TILE_BYTES}], got {list(scale.shape)}"
        )
    check_operand(name, scale, scale.shape, (torch.uint8,))


def _check_global_scale(
    name: str, scale: MaybeTensor, block_format: BlockFormat, num_groups: int
) -> None:
    if (scale is not None) != block_format.has_global_scale:
        actual = "None" if scale is None else list(scale.shape)
        expected = f"[{num_groups}]" if block_format.has_global_scale else "None"
        raise ArgumentError(
            f"{name} must be {expected} where numbers are {block_format.element}, got {actual}"
        )
    if scale is not None:
        check_operand(name, scale, (num_groups,), SCALE)
