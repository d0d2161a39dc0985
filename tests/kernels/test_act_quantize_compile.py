"""Compiles the activations that quantise without a GPU, for Hopper and Blackwell, as their launchers would. What is
checked is what the generated code must have: the arithmetic of the kernels that are fused (quantising divides exactly,
converts with saturation and flushes nothing), wide accesses, registers that do not spill."""

import re

import pytest

pytest.importorskip("triton")

from act_quantize_cases import ACTIVATIONS
from ahead_of_time import since
from compiled_launches import HOPPER, MAX_SHARED, REGISTERS, access_bits, atomics
from low_precision_launches import (
    ACTIVATION_CASES,
    BF16,
    FP16,
    FP32,
    dact_inputs,
    flushing,
    launch_act,
    launch_dact,
)
from quantize_cases import FORMATS

from symmoe.kernels import hopper_choice
from symmoe.kernels import hopper_launchers as launchers
from symmoe.kernels.activation import GELU, Activation
from symmoe.kernels.low_precision import act_quantized, hopper_dact_quantize
from symmoe.kernels.triton import bias, gemm_act, tiles

# Bytes, of a strip: MXFP8 has four times the blocks.
MAX_SPILLED = {"mxfp8": 64, "float8_block": since(("3.6", 8), ("3.9", 224))}
MAX_SPILLED_BY_SUMS = since(("3.6", 252), ("3.7", 136), ("3.9", 336))
cases = pytest.mark.parametrize(
    ("name", "ffn", "block_format", "arch"),
    [*((*case, 90) for case in ACTIVATION_CASES), *((*case, 100) for case in ACTIVATION_CASES[:2])],
)
MODULES = act_quantized, hopper_dact_quantize, gemm_act, bias


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


# -- dact_quantize for Hopper ------------------------------------------------------------------------------------------
FLOAT8_BLOCK, POWERS = FORMATS["float8_block"], FORMATS["float8_block_powers"]
LIMITED = Activation(alpha=1.702, limit=7.0, offset=1.0)
PLAIN, TANH = since(("3.6", ((0, 4), (16, 16))), ("3.9", ((64, 64), (76, 76))))
LIMITS, GEGLU = since(("3.6", (16, 92)), ("3.7", (16, 84)), ("3.9", (64, 128)))
ON_HOPPER = {  # activation, FFN width, dtype, format, most spilled bytes without dbias and with it
    "deepseek-like": (Activation(), 2048, BF16, FLOAT8_BLOCK, PLAIN),
    "mixtral-8x7b": (Activation(), 14336, BF16, FLOAT8_BLOCK, PLAIN),
    "powers": (
        Activation(),
        768,
        BF16,
        POWERS,
        (since(("3.6", 16), ("3.7", 44), ("3.9", 72)), 120),
    ),
    "fp16": (Activation(), 768, FP16, FLOAT8_BLOCK, PLAIN),
    "limited": (LIMITED, 2944, BF16, FLOAT8_BLOCK, (LIMITS, LIMITS)),
    "geglu": (Activation(function="gelu"), 2048, BF16, FLOAT8_BLOCK, (GEGLU, GEGLU)),
    "tanh geglu": (Activation(function="gelu_tanh"), 2048, BF16, FLOAT8_BLOCK, TANH),
}


@pytest.mark.parametrize("with_dbias", [False, True])
@pytest.mark.parametrize("case", ON_HOPPER)
def test_every_number_is_computed_once(launches, case, with_dbias):
    activation, ffn, dtype, block_format, most_spilled = ON_HOPPER[case]
    inputs = dact_inputs(
        2 * ffn, ffn, "float8_block", dtype, dbias_dtype=dtype if with_dbias else None
    )
    launchers.launch_dact_quantize(
        act_quantized.dact_arguments(*inputs), activation, block_format, num_sms=132
    )
    code = launches.compile()
    ptx = code.ptx
    programs = hopper_dact_quantize.PROGRAMS_PER_SM
    assert (
        programs * (code.shared + 1024) <= MAX_SHARED[HOPPER] + 1024
    )  # an SM keeps 1 KB for each program
    assert programs * code.registers * 32 * hopper_dact_quantize.NUM_WARPS <= REGISTERS
    assert code.spilled <= most_spilled[with_dbias]
    numbers = hopper_dact_quantize.TILE.value**2 // (
        32 * hopper_dact_quantize.NUM_WARPS
    )  # of a thread and a matrix
    exponentials = (
        2 if activation.function == GELU else 1
    )  # of erf and the density, or of the sigmoid
    assert ptx.count("ex2.approx.ftz.f32") == exponentials * numbers
    assert set(re.findall(r"\S+\.ftz\S*", ptx)) == flushing(activation)
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 5 * numbers // 2  # dh in both ways, a in one
    assert ("div.rn.f32" in ptx) == (block_format.scale == "fp32")  # powers of two need no division
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10, %r\d+;", ptx)
    assert (
        len(copies) == 2 * 3 * numbers // 8
    )  # of 16 bytes, zeros past a group's end: the first tile, the next one
    assert set(access_bits(ptx, r"st\.global")) == {
        32,
        64,
        128,
    }  # scales and sums, codes of rows, codes of columns
    if dtype == BF16:
        assert not re.search(r"\bF2F\b", code.sass)  # a quarter as fast as conversions in pairs
    assert not atomics(ptx)


def test_what_is_launched(launches, monkeypatch):
    """The kernel for Hopper where it fits, and Triton's elsewhere."""
    monkeypatch.setattr(tiles, "device_num_sms", lambda _: 132)
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: launchers)

    def launched_for(activation, block_format=FLOAT8_BLOCK, dbias_dtype=None):
        launches.clear()
        name = "float8_block" if block_format.block == 128 else "mxfp8"
        inputs = dact_inputs(512, 256, name, dbias_dtype=dbias_dtype)
        act_quantized.dact_quantize(*inputs, activation, block_format)
        first, *sums = (launch.name for launch in launches)
        assert sums == ["sum_dscale_kernel", "sum_dbias_kernel"][: 1 if dbias_dtype is None else 2]
        return first

    for activation, options, has_its_own in (
        (Activation(), {}, True),
        (LIMITED, {"block_format": POWERS}, True),
        (LIMITED, {"dbias_dtype": BF16}, True),
        (Activation(interleave=32), {"dbias_dtype": FP32}, False),
        (Activation(interleave=32), {}, False),
        (Activation(), {"block_format": FORMATS["mxfp8"]}, False),
    ):
        name = "hopper_dact_quantize_kernel" if has_its_own else "dact_quantize_kernel"
        assert launched_for(activation, **options) == name
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: None)
    assert launched_for(Activation()) == "dact_quantize_kernel"
