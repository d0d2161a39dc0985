"""Compiles the activations that quantise without a GPU, for Hopper and Blackwell, as their launchers would.

What is checked is what the generated code must have: the arithmetic of the kernels that are fused (quantising divides
exactly, converts with saturation and flushes nothing), wide accesses, registers that do not spill.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from act_quantize_cases import ACTIVATIONS
from ahead_of_time import compile_for
from launch_signature import described
from quantize_cases import FORMATS, row_range_of
from test_gpu_kernels_compile import HopperDriver, WarmedUp
from triton.compiler import ASTSource
from triton.runtime import driver

from symmoe.kernels.act_quantized import dact_quantize_workspace_numel
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import act_quantized
from symmoe.kernels.triton import gemm_act

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPE_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int32: "i32", torch.uint8: "u8"}
N, G = 65536, 32
MAX_SPILLED = {"mxfp8": 64, "float8_block": 8}  # bytes, of a strip: MXFP8 has four times the blocks
CASES = [  # activation, FFN width, format
    ("swiglu", 2048, "float8_block"),
    ("swiglu", 2048, "mxfp8"),
    ("clamped", 2880, "mxfp8"),
    ("interleaved", 2880, "float8_block"),
    ("interleaved 32", 2880, "mxfp8"),
    ("srelu", 2048, "float8_block_powers"),
]
cases = pytest.mark.parametrize(
    ("name", "ffn", "block_format", "arch"),
    [*((*case, 90) for case in CASES), *((*case, 100) for case in CASES[:2])],
    ids=str,
)


@pytest.fixture
def compile_launch(monkeypatch):
    """compile_launch(arch): PTX, registers and spilled bytes of the one launch since the last call."""
    launches = []
    monkeypatch.setattr(act_quantized, "launch", lambda kernel, grid, *rest: launches.append((kernel.kernel, *rest)))
    monkeypatch.setattr(gemm_act, "launch", lambda *_: None)  # the sum of dscale's partial sums

    def compile_one(arch):
        kernel, constants, *args = launches.pop()
        assert not launches
        description, options = described(kernel, constants, args, TYPE_NAMES)
        code = compile_for(arch, ASTSource(kernel, *description), options)
        print(kernel.__name__, arch, code.registers, "registers,", code.shared, "bytes shared")
        return code.ptx, code.registers, code.spilled

    return compile_one


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


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


def launch_dact(name, ffn, block_format, dtype=BF16):
    activation = ACTIVATIONS[name]
    hidden = activation.hidden_width(ffn)
    workspace = meta(dact_quantize_workspace_numel(N, ffn), dtype=FP32)
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
    )


def check(ptx, spilled, block_format):
    assert spilled <= MAX_SPILLED.get(block_format, 0)
    assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= {"ex2.approx.ftz.f32"}  # of the sigmoid
    if FORMATS[block_format].scale == "fp32":  # powers of two need no division
        assert "div.rn.f32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert not re.search(r"^\s*(@%p\d+ )?(red|atom)\.", ptx, re.MULTILINE)
    widths = [int(vector or 1) * int(bits) for vector, bits in re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", ptx)]
    assert max(widths) >= 32, widths
    loads = [int(vector or 1) * int(bits) for vector, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx)]
    assert max(loads) >= 128, loads


@cases
@pytest.mark.parametrize("operand", ["rows", "columns"])
def test_act(compile_launch, name, ffn, block_format, arch, operand):
    launch_act(name, ffn, block_format, operand)
    ptx, _, spilled = compile_launch(arch)
    check(ptx, spilled, block_format)


@pytest.mark.parametrize("operand", ["rows", "columns"])
def test_every_number_is_converted_once(compile_launch, operand):
    launch_act("swiglu", 2048, "float8_block", operand, FP16)
    ptx, registers, spilled = compile_launch(90)
    check(ptx, spilled, "float8_block")
    if operand == "rows":
        numbers, threads = act_quantized.FEATURES * act_quantized.ROWS, 32 * act_quantized.ROW_WARPS
        assert registers <= 64  # eight programs to an SM
    else:
        numbers, threads = TILE * act_quantized.STRIP, 32 * act_quantized.NUM_WARPS
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", ptx)) == numbers // threads // 2


@cases
def test_dact(compile_launch, name, ffn, block_format, arch):
    launch_dact(name, ffn, block_format)
    ptx, _, spilled = compile_launch(arch)
    check(ptx, spilled, block_format)


def test_steps_do_not_compile_again(monkeypatch):
    """The number of rows is not part of the compiled code: a rank that compiles lets its peers wait."""
    monkeypatch.setattr(driver, "_active", HopperDriver())
    warmed = []
    for module in (act_quantized, gemm_act):
        for name in [name for name in dir(module) if name.endswith("_kernel")]:
            warmed.append(WarmedUp(getattr(module, name)))
            monkeypatch.setattr(module, name, warmed[-1])
    from act_quantize_cases import Problem, backward, forward

    def step(num_rows):
        p = Problem(ACTIVATIONS["swiglu"], 128, splits=(num_rows, 0))
        assert torch.equal(p.row_range, row_range_of((num_rows, 0)))
        forward(act_quantized, p, "mxfp8")
        backward(act_quantized, p, "mxfp8")

    step(16)
    before = [kernel.num_variants for kernel in warmed]
    assert sum(before) == 4
    for num_rows in (1, 333, 500):
        step(num_rows)
    assert [kernel.num_variants for kernel in warmed] == before
