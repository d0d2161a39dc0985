"""Calls of the launchers that quantise, of meta tensors of real shapes; and a step of all of them on small ones."""

import quantize_cases as cases
import torch
from compiled_launches import meta

from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import quantize, scale_tiles, wire
from symmoe.kernels.tensor_table import ScaleTable, TensorTable
from symmoe.kernels.triton import bias

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ("float8_block", "mxfp8", "nvfp4")
N, C, G = 65536, 7168, 32


def operand(lines, length, block_format, *, columns=False, groups=()):
    """Data and scales for lines of so many numbers."""
    data = meta(*groups, lines, block_format.data_width(length), dtype=block_format.data_dtype)
    shape = (-(-lines // block_format.block_lines), block_format.num_blocks(length))
    if columns and block_format.scale_dtype == FP32:
        return data, meta(*shape[::-1], dtype=FP32).t()
    return data, meta(*groups, *shape, dtype=block_format.scale_dtype)


def options_of(block_format, *, indexed, **more):
    """What is optional, of all that the format has."""
    options = {"amax": meta(G, dtype=FP32), "seeds": meta(G, dtype=torch.int64), **more}
    return (options if block_format.has_global_scale else {}) | (
        {"row_index": meta(N)} if indexed else {}
    )


def launch_rows(name, dtype, *, indexed=False, **sums):
    block_format = cases.FORMATS[name]
    options = {**options_of(block_format, indexed=indexed), **sums}
    quantize.quantize_rows(
        meta(N, C, dtype=dtype), meta(2, G), operand(N, C, block_format), block_format, **options
    )


def launch_columns(name, dtype, *, indexed=False):
    block_format = cases.FORMATS[name]
    out = operand(C, TILE * max_tiles(N, G), block_format, columns=True)
    options = options_of(block_format, indexed=indexed, signs=0x1234)
    quantize.quantize_columns(meta(N, C, dtype=dtype), meta(2, G), out, block_format, **options)


def launch_weights(name, dtype, *, transposed=False):
    weight, block_format = meta(G, 4096, C, dtype=dtype), cases.weight_format(name)
    weight = weight.mT if transposed else weight
    amax = meta(G, dtype=FP32) if block_format.has_global_scale else None
    quantize.quantize_weights(
        weight, operand(*weight.shape[1:], block_format, groups=(G,)), block_format, amax=amax
    )


def launch_weight_pairs(name, dtype, *, is_table=False):
    weight, block_format = meta(G, 4096, C, dtype=dtype), cases.weight_format(name)
    buffers = (
        operand(*lines.shape[1:], block_format, groups=(G,)) for lines in (weight, weight.mT)
    )
    amax = meta(G, dtype=FP32) if block_format.has_global_scale else None
    source = (
        TensorTable(meta(G, dtype=torch.int64), tuple(weight.shape), dtype) if is_table else weight
    )
    quantize.quantize_weight_pairs(source, *buffers, block_format, amax=amax)


def row_bytes(name, width):
    """Of a row of the wire."""
    scales = cases.FORMATS[name].num_blocks(width) * cases.FORMATS[name].scale_dtype.itemsize
    return -(-(width + scales) // 16) * 16


def launch_sent(name, dtype, *, width=C):
    sent = meta(N, row_bytes(name, width), dtype=torch.uint8)
    wire.encode_rows(meta(N, width, dtype=dtype), sent, cases.FORMATS[name])


LAUNCHES = launch_rows, launch_columns, launch_weights, launch_weight_pairs


def table_of_scales(*shapes, device="meta"):
    """A table with one matrix of zeros of every shape."""
    extents = [(rows, blocks, blocks, 1) for rows, blocks in shapes]
    matrices = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]
    addresses = torch.tensor([matrix.data_ptr() for matrix in matrices]).to(device)
    numbers = torch.arange(len(shapes), dtype=torch.int32, device=device)
    most = max(-(-rows // 128) for rows, _ in shapes), max(-(-blocks // 4) for _, blocks in shapes)
    return ScaleTable(
        addresses, addresses.clone(), numbers, torch.tensor(extents, device=device).int(), most
    )


def step(num_rows, signs, width=32):
    """Launches every kernel that quantises."""
    rows, row_range = (
        torch.zeros(num_rows, width, dtype=torch.bfloat16),
        cases.row_range_of((num_rows, 0)),
    )
    for name in ("mxfp8", "nvfp4"):
        cases.quantize_all(quantize, rows, row_range, name)
    cases.quantize_weights(quantize, torch.zeros(1, width, width), "mxfp8")
    cases.quantize_weights(quantize, torch.zeros(1, width, width), "mxfp8", in_pairs=True)
    cases.encode_rows(wire, rows, "mxfp8")
    quantize.group_amax(rows, row_range, torch.zeros(2), signs=signs)
    quantize.weight_amax(torch.zeros(1, width, width), torch.zeros(1))
    blocks = width // 32
    scale = torch.zeros(num_rows, blocks, dtype=torch.uint8)
    swizzled = torch.zeros(9, -(-blocks // 4), 512, dtype=torch.uint8)
    scale_tiles.swizzle_scales(scale, row_range, swizzled)
    scale_tiles.unswizzle_scales(swizzled, row_range, scale)
    table = table_of_scales(
        *[(num_rows, 16 * i + 1) for i in range(num_rows % 7 + 1)], device="cpu"
    )
    scale_tiles.swizzle_scales(table, None, swizzled)
    sent = torch.zeros(num_rows, -(-(width + blocks) // 16) * 16, dtype=torch.uint8)
    data = torch.zeros(num_rows, width, dtype=torch.uint8)
    wire.unpack_rows(sent, row_range, (data, scale))
    part = torch.tensor([[0, 1], [1, num_rows]], dtype=torch.int32)
    wire.unpack_rows(sent, part, (data, scale))
    row_format, out = cases.FORMATS["mxfp8"], (data.view(torch.float8_e4m3fn), scale)
    quantize.quantize_rows(rows, part, out, row_format)
    sums = torch.zeros(bias_slots(num_rows, 2, SLOT_ROWS), width)
    quantize.quantize_rows(rows, part, out, row_format, sums=(sums, torch.zeros(num_rows)))
    bias.sum_dbias(sums, row_range, torch.zeros(2, width))
    wire.decode_rows(sent, torch.empty(num_rows, width), cases.FORMATS["mxfp8"])
    cases.requantize_columns(wire, sent, row_range, width, "mxfp8", torch.bfloat16)
