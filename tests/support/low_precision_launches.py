"""Calls of the launchers in low precision, of meta tensors of real shapes: those that quantise, activations that
quantise, operands of products; and a step of all that quantise on small tensors."""

import quantize_cases as cases
import torch
from act_quantize_cases import ACTIVATIONS
from compiled_launches import meta

from symmoe.kernels.act_quantized import DactOperands, dact_quantize_workspace_numel
from symmoe.kernels.activation import GELU
from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import act_quantized, quantize, wire
from symmoe.kernels.low_precision.block_scaled import scale_tiles
from symmoe.kernels.operands import Operand, ScaleTable, TensorTable
from symmoe.kernels.quantized_gemm import num_blocks
from symmoe.kernels.triton import bias

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
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


# -- activations that quantise -----------------------------------------------------------------------------------------
ACTIVATION_CASES = [  # activation, FFN width, format
    ("swiglu", 2048, "float8_block"),
    ("swiglu", 2048, "mxfp8"),
    ("clamped", 2880, "mxfp8"),
    ("interleaved", 2880, "float8_block"),
    ("interleaved 32", 2880, "mxfp8"),
    ("srelu", 2048, "float8_block_powers"),
    ("geglu", 2048, "float8_block"),
    ("tanh gelu", 2048, "mxfp8"),
]


def buffers(width, name, *, columns=False):
    """Data and scales of N rows of this width, or of its columns."""
    lines, length = (width, TILE * max_tiles(N, G)) if columns else (N, width)
    return operand(lines, length, cases.FORMATS[name], columns=columns)


def launch_act(name, ffn, block_format, dtype=BF16):
    activation = ACTIVATIONS[name]
    h, row_scale = meta(N, activation.hidden_width(ffn), dtype=dtype), meta(N, dtype=FP32)
    out, row_range = buffers(ffn, block_format), meta(2, G, dtype=torch.int32)
    act_quantized.act_quantize(
        h, row_scale, row_range, out, activation, cases.FORMATS[block_format]
    )


def dact_inputs(hidden, ffn, block_format, dtype=BF16, *, dbias_dtype=None):
    """da, h, row_scale, row_range, out and workspace of dact_quantize."""
    dbias = None if dbias_dtype is None else meta(G, hidden, dtype=dbias_dtype)
    rows, columns = buffers(hidden, block_format), buffers(hidden, block_format, columns=True)
    out = DactOperands(
        meta(N, dtype=FP32), rows, columns, buffers(ffn, block_format, columns=True), dbias
    )
    da, h, row_scale = meta(N, ffn, dtype=dtype), meta(N, hidden, dtype=dtype), meta(N, dtype=FP32)
    workspace = meta(dact_quantize_workspace_numel(N, ffn, dbias), dtype=FP32)
    return da, h, row_scale, meta(2, G, dtype=torch.int32), out, workspace


def launch_dact(name, ffn, block_format, dtype=BF16, *, with_dbias=False):
    hidden = ACTIVATIONS[name].hidden_width(ffn)
    inputs = dact_inputs(
        hidden, ffn, block_format, dtype, dbias_dtype=dtype if with_dbias else None
    )
    act_quantized.dact_quantize(*inputs, ACTIVATIONS[name], cases.FORMATS[block_format])


def flushing(activation):
    """Instructions that may take subnormal numbers for zeros: of the sigmoid, and of libdevice's erf."""
    return {"ex2.approx.ftz.f32"} | (
        {"abs.ftz.f32", "fma.rn.ftz.f32"} if activation.function == GELU else set()
    )


# -- products ----------------------------------------------------------------------------------------------------------
ELEMENTS = {
    "fp8": (E4M3, 1, 128),
    "mxfp8": (E4M3, 1, 32),
    "nvfp4": (U8, 2, 16),
}  # data, in a byte, to a scale
PRODUCT_SHAPES = {  # G, O, C, N of a product; functions take other tuples as well
    "deepseek-like FC1": (32, 4096, 7168, 65536),
    "odd": (3, 712, 1056, 999),  # parts of tiles, of steps and of blocks
    "narrow": (65, 136, 96, 999),
}


def scale_tiles_of(num_tiles, width, block):
    return meta(num_tiles, -(-width // (4 * block)), 512, dtype=U8)


def _operand(name, data, scale, num_groups):
    return Operand(data, scale, meta(num_groups, dtype=FP32) if name == "nvfp4" else None)


def gemm_operands(name, shape, dtype=BF16):
    """Arguments of the product."""
    (G, O, C, N), (data, per_byte, block) = PRODUCT_SHAPES.get(shape, shape), ELEMENTS[name]
    rows, weight = meta(N, C // per_byte, dtype=data), meta(G, O, C // per_byte, dtype=data)
    if name == "fp8":
        row_scale, weight_scale = (
            meta(N, num_blocks(C), dtype=FP32),
            meta(G, num_blocks(O), num_blocks(C), dtype=FP32),
        )
    else:
        row_scale, weight_scale = (
            scale_tiles_of(max_tiles(N, G), C, block),
            scale_tiles_of(max_tiles(G * O, G), C, block),
        )
    operands = _operand(name, rows, row_scale, G), _operand(name, weight, weight_scale, G)
    return *operands, meta(2, G), meta(N, O, dtype=dtype)


def wgrad_operands(name, shape, dtype=BF16):
    """Arguments of the weight gradient."""
    (G, O, C, N), (data, per_byte, block) = PRODUCT_SHAPES.get(shape, shape), ELEMENTS[name]
    tokens, operands = TILE * max_tiles(N, G), []
    for width in (O, C):
        block_major = meta(tokens // TILE, width, dtype=FP32).t()
        scale = block_major if name == "fp8" else scale_tiles_of(-(-width // TILE), tokens, block)
        operands.append(_operand(name, meta(width, tokens // per_byte, dtype=data), scale, G))
    return *operands, meta(2, G), meta(G, O, C, dtype=dtype)
