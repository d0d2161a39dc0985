"""Calls of the launchers of activations that quantise, of meta tensors of real shapes."""

import torch
from act_quantize_cases import ACTIVATIONS
from compiled_launches import meta
from quantize_cases import FORMATS

from symmoe.kernels.act_quantized import DactOperands, dact_quantize_workspace_numel
from symmoe.kernels.activation import GELU
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import act_quantized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

N, G = 65536, 32

CASES = [  # activation, FFN width, format
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
    block_format = FORMATS[name]
    lines, length = (width, TILE * max_tiles(N, G)) if columns else (N, width)
    scales = meta(lines, block_format.num_blocks(length), dtype=block_format.scale_dtype)
    if columns and scales.dtype == FP32:
        scales = scales.view(scales.shape[::-1]).t()  # block-major
    return meta(lines, length, dtype=block_format.data_dtype), scales


def launch_act(name, ffn, block_format, dtype=BF16):
    activation = ACTIVATIONS[name]
    h, row_scale = meta(N, activation.hidden_width(ffn), dtype=dtype), meta(N, dtype=FP32)
    out, row_range = buffers(ffn, block_format), meta(2, G, dtype=torch.int32)
    act_quantized.act_quantize(h, row_scale, row_range, out, activation, FORMATS[block_format])


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
    act_quantized.dact_quantize(*inputs, ACTIVATIONS[name], FORMATS[block_format])


def flushing(activation):
    """Instructions that may take subnormal numbers for zeros: of the sigmoid, and of libdevice's erf."""
    return {"ex2.approx.ftz.f32"} | (
        {"abs.ftz.f32", "fma.rn.ftz.f32"} if activation.function == GELU else set()
    )
