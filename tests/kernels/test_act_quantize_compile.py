"""Compiles the activations that quantise without a GPU, for Hopper and Blackwell, as their launchers would.

What is checked is what the generated code must have: the arithmetic of the kernels that are fused (quantising divides
exactly, converts with saturation and flushes nothing), wide accesses, registers that do not spill.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from act_quantize_cases import ACTIVATIONS
from ahead_of_time import since
from compiled_launches import access_bits, atomics, catch_launches, meta
from quantize_cases import FORMATS

from symmoe.kernels.act_quantized import dact_quantize_workspace_numel
from symmoe.kernels.activation import GELU
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import act_quantized
from symmoe.kernels.triton import bias, gemm_act

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, G = 65536, 32
# Bytes, of a strip: MXFP8 has four times the blocks.
MAX_SPILLED = {"mxfp8": 64, "float8_block": since(("3.6", 8), ("3.9", 224))}
MAX_SPILLED_BY_SUMS = since(("3.6", 136), ("3.9", 336))
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
cases = pytest.mark.parametrize(
    ("name", "ffn", "block_format", "arch"),
    [*((*case, 90) for case in CASES), *((*case, 100) for case in CASES[:2])],
    ids=str,
)


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, act_quantized, gemm_act, bias)


def buffers(width, name, *, columns=False):
    block_format = FORMATS[name]
    lines, length = (width, TILE * max_tiles(N, G)) if columns else (N, width)
    scales = meta(lines, block_format.num_blocks(length), dtype=block_format.scale_dtype)
    if columns and scales.dtype == FP32:
        scales = scales.view(scales.shape[::-1]).t()  # block-major
    return meta(lines, length, dtype=block_format.data_dtype), scales


def launch_act(name, ffn, block_format, operand, dtype=BF16):
    activation = ACTIVATIONS[name]
    h, row_scale = meta(N, activation.hidden_width(ffn), dtype=dtype), meta(N, dtype=FP32)
    options = {operand: buffers(ffn, block_format, columns=operand == "columns")}
    row_range = meta(2, G, dtype=torch.int32)
    act_quantized.act_quantize(h, row_scale, row_range, activation, FORMATS[block_format], **options)


def launch_dact(name, ffn, block_format, dtype=BF16, *, with_dbias=False):
    activation = ACTIVATIONS[name]
    hidden = activation.hidden_width(ffn)
    dbias = meta(G, hidden, dtype=dtype) if with_dbias else None
    workspace = meta(dact_quantize_workspace_numel(N, ffn, dbias), dtype=FP32)
    act_quantized.dact_quantize(
        meta(N, ffn, dtype=dtype),
        meta(N, hidden, dtype=dtype),
        meta(N, dtype=FP32),
        meta(2, G, dtype=torch.int32),
        meta(N, dtype=FP32),
        workspace,
        activation,
        FORMATS[block_format],
        rows=buffers(hidden, block_format),
        columns=buffers(hidden, block_format, columns=True),
        a_columns=buffers(ffn, block_format, columns=True),
        dbias=dbias,
    )


def flushing(activation):
    """Instructions that may take subnormal numbers for zeros: of the sigmoid, and of libdevice's erf."""
    return {"ex2.approx.ftz.f32"} | ({"abs.ftz.f32", "fma.rn.ftz.f32"} if activation.function == GELU else set())


def check(code, name, block_format, most_spilled=None):
    ptx = code.ptx
    assert code.spilled <= (MAX_SPILLED.get(block_format, 0) if most_spilled is None else most_spilled)
    assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= flushing(ACTIVATIONS[name])
    if FORMATS[block_format].scale == "fp32":  # powers of two need no division
        assert "div.rn.f32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert not atomics(ptx)
    assert max(access_bits(ptx, r"st\.global")) >= 32
    assert max(access_bits(ptx, r"ld\.global")) >= 128


@cases
@pytest.mark.parametrize("operand", ["rows", "columns"])
def test_act(launches, name, ffn, block_format, arch, operand):
    launch_act(name, ffn, block_format, operand)
    check(launches.compile(arch=arch), name, block_format)


@pytest.mark.parametrize("operand", ["rows", "columns"])
def test_every_number_is_converted_once(launches, operand):
    launch_act("swiglu", 2048, "float8_block", operand, FP16)
    code = launches.compile()
    check(code, "swiglu", "float8_block")
    if operand == "rows":
        numbers, threads = act_quantized.FEATURES * act_quantized.ROWS, 32 * act_quantized.ROW_WARPS
        assert code.registers <= 64  # eight programs to an SM
    else:
        numbers, threads = TILE * act_quantized.STRIP, 32 * act_quantized.NUM_WARPS
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", code.ptx)) == numbers // threads // 2


@cases
@pytest.mark.parametrize("with_dbias", [False, True])
def test_dact(launches, name, ffn, block_format, arch, with_dbias):
    launch_dact(name, ffn, block_format, with_dbias=with_dbias)
    code = launches.compile("dact_quantize_kernel", arch)
    check(code, name, block_format, MAX_SPILLED_BY_SUMS if with_dbias else None)
    if with_dbias:
        assert not atomics(launches.compile("sum_dbias_kernel", arch).ptx)
