"""Compiles the weight gradient's kernel for Hopper without a GPU. See test_hopper_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from combinations import every_combination
from compiled_launches import catch_launches, meta
from test_hopper_compile import DTYPES, SHAPES, compiled

from symmoe.kernels.hopper import wgrad


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, wgrad)


@every_combination(fc=[1, 2], dtype=DTYPES, shape=list(SHAPES))
def test_wgrad(launches, fc, dtype, shape):
    G, H, I, N = SHAPES[shape]
    out_rows, columns = (2 * I, H) if fc == 1 else (H, I)
    dout, rows = meta(N, out_rows, dtype=dtype), meta(N, columns, dtype=dtype)
    out, row_range = meta(G, out_rows, columns, dtype=dtype), meta(2, G, dtype=torch.int32)
    wgrad.launch_wgrad(dout, rows, row_range, out, num_sms=132)
    code = compiled(launches)
    assert code.spilled == 0
    kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) [^;]*;", code.ptx)
    assert products == [f"m64n256k16.f32.{kind}"] * 8  # 4 to a stage, of 2 warpgroups
    assert code.ptx.count("cp.async.bulk.tensor.4d.shared") == 6  # 2 boxes of dout, 4 of rows
    assert code.ptx.count("cp.async.bulk.tensor.3d.global") == 8


def test_no_rows_need_no_kernel(launches):
    empty, out = torch.empty(0, 64), torch.full((2, 64, 64), torch.nan)
    wgrad.launch_wgrad(empty, empty, torch.zeros(2, 2, dtype=torch.int32), out)
    assert not launches
    assert not out.any()
