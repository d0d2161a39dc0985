"""Adapters on GPUs: low-rank GEMMs of every rank against dense weights W + s B A in float64."""

from __future__ import annotations

import pytest
import torch
from lora_cases import (
    FFN,
    NAMES,
    ROWS,
    SPLITS,
    is_near,
    make_experts,
    oracle_of_rows,
    random_parameters,
    rows_of_experts,
)
from row_ranges import spans_of, whole_groups

from symmoe import kernels

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HIDDEN = 520  # wide enough for Hopper's own kernels, and no multiple of a tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora_rank", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_experts(bias: bool, lora_rank: int, dtype: torch.dtype):
    parameters = random_parameters(len(SPLITS), HIDDEN, FFN, lora_rank, dtype, bias=bias)
    mlp = make_experts(parameters, slice(None)).to(DEVICE)
    x, probs, dy = rows_of_experts(dtype, HIDDEN)
    want_y, want, _ = oracle_of_rows(parameters, x, probs, dy)
    rows, row_probs = x.to(DEVICE).requires_grad_(), probs.to(DEVICE).requires_grad_()
    y = mlp(rows, torch.tensor(SPLITS, device=DEVICE), row_probs)
    y.backward(dy.to(DEVICE))
    got = {"x": rows.grad[:ROWS], "probs": row_probs.grad[:ROWS, None]}
    got |= {name: mlp.get_parameter(name).grad for name in NAMES[2:]}
    assert is_near(y.detach()[:ROWS].cpu(), want_y, dtype)
    for name, gradient in got.items():
        assert is_near(gradient.cpu(), want[name], dtype), name
    assert not y[ROWS:].any()
    assert not row_probs.grad[ROWS:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("in_width", [8, 64, 520])
def test_results_are_added(in_width: int, dtype: torch.dtype):
    """To what is there, only in the rows of the groups; forward and backward, plain and gathered."""
    width, num_rows, sizes = 600, 700, (300, 0, 129, 171)
    row_range, end_row = whole_groups(sizes), sum(sizes)
    rows, before = torch.randn(num_rows, in_width).to(dtype), torch.randn(num_rows, width).to(dtype)
    rows[end_row:] = torch.nan
    weight = (torch.randn(len(sizes), width, in_width) * in_width**-0.5).to(dtype)
    index = torch.randint(0, 600, (num_rows,), dtype=torch.int32)
    ops = kernels.for_device(torch.device(DEVICE))
    for row_index, is_dgrad in ((None, False), (None, True), (index, False), (index, True)):
        source = rows if row_index is None else rows[row_index]
        want = before.double()
        for g, group in enumerate(spans_of(row_range)):
            want[group] += source[group].double() @ weight[g].double().T
        out = before.to(DEVICE)
        call, matrix = (ops.grouped_gemm_dgrad, weight.mT.contiguous()) if is_dgrad else (ops.grouped_gemm, weight)
        given = rows.to(DEVICE), None if row_index is None else row_index.to(DEVICE)
        call(given, matrix.to(DEVICE), row_range.to(DEVICE), out, accumulate=True)
        assert is_near(out.cpu(), want, torch.bfloat16 if dtype == torch.float16 else dtype)
        assert torch.equal(out.cpu()[end_row:], before[end_row:])
