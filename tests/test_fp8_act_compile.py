"""Compiles the E4M3 GEMM with an activation for Hopper without a GPU. See test_fp8_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from test_fp8_compile import BF16, FP16, FP32, check_products, gemm_operands
from test_gemm_compile import TYPE_NAMES, meta
from test_hopper_compile import compiled

from symmoe.errors import ArgumentError
from symmoe.kernels.act_quantized import FEATURES, FLOAT8_BLOCK
from symmoe.kernels.activation import Activation
from symmoe.kernels.gpu import act_quantized, fp8_act, hopper
from symmoe.kernels.gpu import fp8 as gpu_fp8
from symmoe.kernels.gpu.hopper import fp8_act as hopper_fp8_act
from symmoe.kernels.gpu.hopper import launchers

SHAPES = {  # G, H, I, N
    "deepseek-like": (32, 7168, 2048, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "odd": (3, 1040, 384, 999),  # contractions that no step divides
}
MAX_SPILLED = 64  # bytes: of a tile, none of its stages


def operands(shape, dtype=BF16):
    G, H, I, N = SHAPES[shape]
    products = gemm_operands((G, 2 * I, H, N), dtype)
    data, scale = meta(N, I, dtype=torch.float8_e4m3fn), meta(N, I // FEATURES, dtype=FP32)
    return *products[:5], meta(N, dtype=FP32), products[5], data, scale


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The (kernel, constants, arguments) of launches, which do not happen; nothing comes from a cache."""
    calls = []
    monkeypatch.setattr(hopper_fp8_act, "launch", lambda kernel, grid, *rest: calls.append((kernel.kernel, *rest)))
    monkeypatch.setitem(TYPE_NAMES, torch.float8_e4m3fn, "fp8e4nv")
    monkeypatch.setitem(TYPE_NAMES, torch.uint8, "u8")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return calls


@pytest.mark.parametrize(("shape", "dtype"), [*((shape, BF16) for shape in SHAPES), ("odd", FP16)], ids=str)
def test_it_fits_into_registers(launched, tmp_path, shape, dtype):
    launchers.launch_fp8_act(*operands(shape, dtype), Activation(), num_sms=132)
    ptx, spilled = compiled(launched, tmp_path)
    print(shape, dtype, spilled, "bytes spilled")
    assert spilled <= MAX_SPILLED
    check_products(ptx)
    assert ptx.count("cp.async.bulk.tensor.4d.shared") == 1  # gates and ups
    assert ptx.count("cp.async.bulk.tensor.4d.global") == 2 * (4 + 2)  # chunks of h, and of codes
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx


def test_nothing_is_spilled_between_products(launched, tmp_path):
    """In the machine code, from the first product of a stage to its last."""
    import subprocess
    from pathlib import Path

    import triton

    launchers.launch_fp8_act(*operands("deepseek-like"), Activation(), num_sms=132)
    compiled(launched, tmp_path)
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run(
        [disassembler, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    operations = re.findall(r"\b(QGMMA|STL|LDL)\b", code)
    first = [i for i, name in enumerate(operations) if name == "QGMMA"]
    assert len(first) == 16
    for warpgroup in (first[:8], first[8:]):
        assert operations[warpgroup[0] : warpgroup[-1] + 1] == ["QGMMA"] * 8


def test_what_is_launched(monkeypatch):
    """The one kernel where it fits, and two elsewhere."""
    launches = []
    for module in (hopper_fp8_act, gpu_fp8, act_quantized):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: launches.append(kernel.kernel.__name__))
    monkeypatch.setattr(hopper.launchers, "launch_fp8_gemm", lambda *_, **__: launches.append("product"))
    taken = [True]
    monkeypatch.setattr(hopper, "kernels", lambda *_: launchers if taken[0] else None)
    arguments = operands("odd")
    fp8_act.grouped_gemm_fp8_act(*arguments, Activation(), num_sms=5)
    assert launches == ["hopper_fp8_act_kernel"]
    launches.clear()
    fp8_act.grouped_gemm_fp8_act(*arguments, Activation(limit=7.0), num_sms=5)
    taken[0] = False
    fp8_act.grouped_gemm_fp8_act(*arguments, Activation(), num_sms=5)
    assert launches[1::2] == ["act_quantize_rows_kernel"] * 2
    assert launches[2] == "grouped_gemm_fp8_kernel"
    with pytest.raises(ArgumentError, match="scale must be"):
        fp8_act.grouped_gemm_fp8_act(*arguments[:-1], meta(999, 4, dtype=FP32), Activation())
    ranges = (*arguments[:4], meta(2, 3, dtype=torch.int32), *arguments[5:])
    with pytest.raises(ArgumentError, match="a quantised activation"):
        fp8_act.grouped_gemm_fp8_act(*ranges, Activation())
    assert FLOAT8_BLOCK.block == FEATURES
