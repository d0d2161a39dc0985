"""Launches of the GEMMs of E4M3 numbers: after the first one they skip the JIT. See test_fast_launch.py."""

import pytest
import torch

pytest.importorskip("triton")

from fake_cuda import assert_only_the_first_compiles, fake_cuda, fake_jits  # noqa: F401

from symmoe.kernels.act_quantized import dact_quantize_workspace_numel
from symmoe.kernels.activation import Activation
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.fp8 import BLOCK, num_blocks
from symmoe.kernels.low_precision import act_quantized, hopper_dact_quantize, hopper_fp8, hopper_fp8_wgrad, quantize
from symmoe.kernels.low_precision import fp8 as gpu_fp8
from symmoe.kernels.triton import bias, gemm_act

E4M3 = torch.float8_e4m3fn
FLOAT8_BLOCK = BlockFormat(element="e4m3", scale="fp32", block=128)


def test_launches_are_understood(fake_cuda, monkeypatch):  # noqa: F811
    """Whatever the tensors' addresses and the number of rows and tokens."""
    jits = fake_jits(monkeypatch, fake_cuda, hopper_fp8, hopper_fp8_wgrad, gpu_fp8)

    def step(num_rows, G=4, C=144, O=520):
        empty, tokens = torch.empty, num_blocks(num_rows + G * (BLOCK - 1)) * BLOCK
        rows, weight = empty(num_rows, C, dtype=E4M3), empty(G, O, C, dtype=E4M3)
        row_scale, weight_scale = empty(num_rows, num_blocks(C)), empty(G, num_blocks(O), num_blocks(C))
        row_range = empty(2, G, dtype=torch.int32)
        out = empty(num_rows, O, dtype=torch.bfloat16)
        operands = (rows, row_scale, weight, weight_scale)
        addend = {"bias": empty(G, O, dtype=torch.bfloat16), "bias_scale": empty(num_rows)}
        for launch in (hopper_fp8.launch_fp8_gemm, gpu_fp8.grouped_gemm_fp8):
            launch(*operands, row_range, out, num_sms=8, **addend)
            launch(*operands, row_range, out, zero_tail=True, num_sms=8)
        dout, columns = empty(O, tokens, dtype=E4M3), empty(C, tokens, dtype=E4M3)
        dout_scale, columns_scale = empty(tokens // BLOCK, O).t(), empty(tokens // BLOCK, C).t()
        for launch in (hopper_fp8_wgrad.launch_fp8_wgrad, gpu_fp8.grouped_gemm_wgrad_fp8):
            for accumulate in (False, True):
                out = empty(G, O, C)
                launch(dout, dout_scale, columns, columns_scale, row_range, out, accumulate=accumulate, num_sms=8)

    assert len(jits) == 4
    assert_only_the_first_compiles(jits, step, (64, 1, 64, 65, 4096))


def test_launches_of_activations_are_understood(fake_cuda, monkeypatch):  # noqa: F811
    """Whatever the tensors' addresses and the number of rows and tokens."""
    jits = fake_jits(monkeypatch, fake_cuda, act_quantized, hopper_dact_quantize, gemm_act, bias)

    def step(num_rows, G=4, I=256):
        empty, tokens = torch.empty, TILE * max_tiles(num_rows, G)
        row_range = empty(2, G, dtype=torch.int32)
        factor = empty(num_rows)
        h, da = empty(num_rows, 2 * I, dtype=torch.bfloat16), empty(num_rows, I, dtype=torch.bfloat16)
        data, scale = empty(num_rows, I, dtype=E4M3), empty(num_rows, num_blocks(I))
        activation = Activation()
        columns = empty(I, tokens, dtype=E4M3), empty(num_blocks(tokens), I).t()
        arguments = (h, factor, row_range, activation, FLOAT8_BLOCK)
        act_quantized.act_quantize(*arguments, rows=(data, scale), columns=columns)
        act_quantized.act_quantize(*arguments, rows=(data, scale))
        dbias = empty(G, 2 * I, dtype=torch.bfloat16)
        workspace = empty(dact_quantize_workspace_numel(num_rows, I, dbias))
        for sums in ({}, {"dbias": dbias}):
            inputs = da, *arguments[:3], factor, workspace, *arguments[3:]
            act_quantized.dact_quantize(*inputs, a_columns=columns, **sums)
        dh_rows = empty(num_rows, 2 * I, dtype=E4M3), empty(num_rows, num_blocks(2 * I))
        dh_columns = empty(2 * I, tokens, dtype=E4M3), empty(num_blocks(tokens), 2 * I).t()
        for bias_sums in (None, workspace[num_rows * 4 :]):
            results = dh_rows, dh_columns, columns, bias_sums
            hopper_dact_quantize.launch_dact_quantize(
                da, *arguments[:3], workspace, *arguments[3:], *results, num_sms=8
            )

    used = {"hopper_dact_quantize_kernel", "act_quantize_rows_kernel", "act_quantize_columns_kernel"}
    used |= {"dact_quantize_kernel", "sum_dbias_kernel"}
    assert_only_the_first_compiles({name: jits[name] for name in used}, step, (64, 1, 64, 65, 4096))


def test_launches_that_quantise_rows_are_understood(fake_cuda, monkeypatch):  # noqa: F811
    """With sums for a bias gradient and without."""
    jits = fake_jits(monkeypatch, fake_cuda, quantize, bias)

    def step(num_rows, G=4, C=144):
        empty, row_range = torch.empty, torch.empty(2, G, dtype=torch.int32)
        rows, dbias = empty(num_rows, C, dtype=torch.bfloat16), empty(G, C, dtype=torch.bfloat16)
        operand = rows, row_range, empty(num_rows, C, dtype=E4M3), empty(num_rows, num_blocks(C)), FLOAT8_BLOCK
        sums = empty_row_sums(num_rows, dbias)
        quantize.quantize_rows(*operand)
        quantize.quantize_rows(*operand, bias_sums=sums, bias_scale=empty(num_rows))
        bias.sum_dbias(sums, row_range, dbias)

    used = {name: jit for name, jit in jits.items() if name in ("quantize_rows_kernel", "sum_dbias_kernel")}
    assert_only_the_first_compiles(used, step, (64, 1, 64, 65, 4096))
