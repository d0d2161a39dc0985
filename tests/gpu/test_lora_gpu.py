"""Adapters on GPUs: low-rank GEMMs of every rank against dense weights W + s B A in float64."""

import lora_cases as cases
import pytest
import torch

DEVICE = "cuda"
HIDDEN = 520  # wide enough for Hopper's own kernels, and no multiple of a tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora_rank", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_experts(bias: bool, lora_rank: int, dtype: torch.dtype):
    parameters = cases.random_parameters(len(cases.SPLITS), HIDDEN, cases.FFN, lora_rank, dtype, bias=bias)
    mlp = cases.make_experts(parameters, slice(None)).to(DEVICE)
    x, probs, dy = cases.rows_of_experts(dtype, HIDDEN)
    want_y, want, _ = cases.oracle_of_rows(parameters, x, probs, dy)
    rows, row_probs = x.to(DEVICE).requires_grad_(), probs.to(DEVICE).requires_grad_()
    y = mlp(rows, torch.tensor(cases.SPLITS, device=DEVICE), row_probs)
    y.backward(dy.to(DEVICE))
    got = {"x": rows.grad[: cases.ROWS], "probs": row_probs.grad[: cases.ROWS, None]}
    got |= {name: mlp.get_parameter(name).grad for name in cases.NAMES[2:]}
    assert cases.is_near(y.detach()[: cases.ROWS].cpu(), want_y, dtype)
    for name, gradient in got.items():
        assert cases.is_near(gradient.cpu(), want[name], dtype), name
    assert not y[cases.ROWS :].any()
    assert not row_probs.grad[cases.ROWS :].any()
