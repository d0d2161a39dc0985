"""The definition of the E4M3 GEMM with an activation, bit for bit where its numbers are exact."""

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

import quantize_reference as reference
from fp8_problem import SENTINEL, Numbers, Problem

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.activation import Activation

BF16, FILL = torch.bfloat16, 0xA5


def test_relu_squared_of_exact_products():
    """Products are whole numbers of few bits; the scales are powers of two, so h is exact in bf16, and its square."""
    p = Problem((140, 0, 1, 20), (272, 144), Numbers(exact=True))
    for data in (p.rows[: p.num_rows], p.weight):
        data.copy_((data.float() * (torch.rand(data.shape) < 0.02)).to(data.dtype))  # so few that sums are small
    p.row_scale[: p.num_rows], p.weight_scale[:] = 1.0, 0.5
    factor = torch.exp2(torch.randint(-2, 3, (p.capacity,)).float())
    h, data = p.blank(BF16), torch.full((p.capacity, 272), FILL, dtype=torch.uint8)
    scale = torch.full((p.capacity, 3), SENTINEL)
    arguments = (*p.operands, factor, h, data.view(torch.float8_e4m3fn), scale)
    twin.grouped_gemm_fp8_act(*arguments, Activation(kind="srelu"))
    expected = p.expected()
    assert torch.equal(h, expected.to(BF16))
    a = (expected[: p.num_rows].clamp(min=0) ** 2 * factor[: p.num_rows, None]).to(BF16).float().numpy()
    assert (a > 0).any()
    codes, scales = reference.quantize_lines(a, element="e4m3", kind="fp32", block=128, block_lines=1, amax=None)
    assert np.array_equal(data[: p.num_rows].numpy(), codes)
    assert np.array_equal(scale[: p.num_rows].numpy(), scales.view(np.float32))
    assert (data[p.num_rows :] == FILL).all()
    assert (scale[p.num_rows :] == SENTINEL).all()
    with pytest.raises(ArgumentError, match=rf"row_factor must be \[{p.capacity}\]"):
        twin.grouped_gemm_fp8_act(*p.operands, factor[1:], *arguments[6:], Activation(kind="srelu"))
