"""Compiles the activations that quantise without a GPU, for Hopper and Blackwell, as their launchers would. What is
checked is what the generated code must have: the arithmetic of the kernels that are fused (quantising divides exactly,
converts with saturation and flushes nothing), wide accesses, registers that do not spill."""

import re

import pytest

pytest.importorskip("triton")

from act_quantize_cases import ACTIVATIONS
from act_quantize_launches import CASES, FP16, flushing, launch_act, launch_dact
from ahead_of_time import since
from compiled_launches import access_bits, atomics
from quantize_cases import FORMATS

from symmoe.kernels.low_precision import act_quantized
from symmoe.kernels.triton import bias, gemm_act

# Bytes, of a strip: MXFP8 has four times the blocks.
MAX_SPILLED = {"mxfp8": 64, "float8_block": since(("3.6", 8), ("3.9", 224))}
MAX_SPILLED_BY_SUMS = since(("3.6", 252), ("3.7", 136), ("3.9", 336))
cases = pytest.mark.parametrize(
    ("name", "ffn", "block_format", "arch"),
    [*((*case, 90) for case in CASES), *((*case, 100) for case in CASES[:2])],
)
MODULES = act_quantized, gemm_act, bias


def check(code, name, block_format, most_spilled=None):
    ptx = code.ptx
    assert code.spilled <= (
        MAX_SPILLED.get(block_format, 0) if most_spilled is None else most_spilled
    )
    assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= flushing(ACTIVATIONS[name])
    if FORMATS[block_format].scale == "fp32":  # powers of two need no division
        assert "div.rn.f32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert not atomics(ptx)
    assert max(access_bits(ptx, r"st\.global")) >= 32
    assert max(access_bits(ptx, r"ld\.global")) >= 128


@cases
def test_act(launches, name, ffn, block_format, arch):
    launch_act(name, ffn, block_format)
    check(launches.compile(arch=arch), name, block_format)


def test_every_number_is_converted_once(launches):
    launch_act("swiglu", 2048, "float8_block", FP16)
    code = launches.compile()
    check(code, "swiglu", "float8_block")
    numbers, threads = act_quantized.FEATURES * act_quantized.ROWS, 32 * act_quantized.ROW_WARPS
    assert code.registers <= 64  # eight programs to an SM
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", code.ptx)) == numbers // threads // 2


@cases
@pytest.mark.parametrize("with_dbias", [False, True])
def test_dact(launches, name, ffn, block_format, arch, with_dbias):
    launch_dact(name, ffn, block_format, with_dbias=with_dbias)
    code = launches.compile("dact_quantize_kernel", arch)
    check(code, name, block_format, MAX_SPILLED_BY_SUMS if with_dbias else None)
    if with_dbias:
        assert not atomics(launches.compile("sum_dbias_kernel", arch).ptx)
