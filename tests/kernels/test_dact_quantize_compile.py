"""Compiles dact_quantize for Hopper without a GPU, with the arguments of its launcher. See test_fp8_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from act_quantize_launches import dact_inputs, flushing
from ahead_of_time import since
from compiled_launches import HOPPER, MAX_SHARED, REGISTERS, access_bits, atomics, catch_launches
from quantize_cases import FORMATS

from symmoe.kernels import hopper_choice
from symmoe.kernels.activation import GELU, Activation
from symmoe.kernels.hopper import launchers
from symmoe.kernels.low_precision import act_quantized, hopper_dact_quantize
from symmoe.kernels.triton import bias, gemm_act, tiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8_BLOCK, POWERS = FORMATS["float8_block"], FORMATS["float8_block_powers"]
LIMITED = Activation(alpha=1.702, limit=7.0, offset=1.0)
PLAIN, TANH = since(("3.6", ((0, 4), (16, 16))), ("3.9", ((64, 64), (76, 76))))
LIMITS, GEGLU = since(("3.6", (16, 92)), ("3.7", (16, 84)), ("3.9", (64, 128)))
CASES = {  # activation, FFN width, dtype, format, most spilled bytes without dbias and with it
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
@pytest.mark.parametrize("case", CASES)
def test_every_number_is_computed_once(monkeypatch, case, with_dbias):
    launches = catch_launches(monkeypatch, hopper_dact_quantize)
    activation, ffn, dtype, block_format, most_spilled = CASES[case]
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


def test_what_is_launched(monkeypatch):
    """This kernel where it fits, and Triton's elsewhere."""
    launches = catch_launches(monkeypatch, hopper_dact_quantize, act_quantized, gemm_act, bias)
    monkeypatch.setattr(tiles, "device_num_sms", lambda _: 132)
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: launchers)

    def launched_for(activation, ffn, block_format=FLOAT8_BLOCK, dbias_dtype=None):
        launches.clear()
        name = "float8_block" if block_format.block == 128 else "mxfp8"
        inputs = dact_inputs(2 * ffn, ffn, name, dbias_dtype=dbias_dtype)
        act_quantized.dact_quantize(*inputs, activation, block_format)
        first, *sums = (launch.name for launch in launches)
        assert sums == ["sum_dscale_kernel", "sum_dbias_kernel"][: 1 if dbias_dtype is None else 2]
        return first

    on_hopper, general = "hopper_dact_quantize_kernel", "dact_quantize_kernel"
    assert launched_for(Activation(), 256) == on_hopper
    assert launched_for(LIMITED, 256, POWERS) == on_hopper
    assert launched_for(LIMITED, 256, dbias_dtype=BF16) == on_hopper
    assert launched_for(Activation(interleave=32), 256, dbias_dtype=FP32) == general
    assert launched_for(Activation(interleave=32), 256) == general
    assert launched_for(Activation(), 256, FORMATS["mxfp8"]) == general
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: None)
    assert launched_for(Activation(), 256) == general
