"""The twins of the grouped GEMMs of E4M3 numbers: input gradients, and what is refused. More: test_scaled_twin.py."""

import pytest
import torch
from fp8_problem import BLOCK, E4M3, Numbers, Problem, WgradProblem, relative_error
from test_scaled_twin import SPLITS, product

from symmoe.errors import ArgumentError
from symmoe.kernels.twin.fp8 import grouped_gemm_fp8, grouped_gemm_wgrad_fp8

BF16, FP32 = torch.bfloat16, torch.float32
WIDTHS = [(256, 384), (264, 272), (72, 48)]  # O, C: whole blocks; parts of blocks; less than one


def test_the_input_gradient_is_the_product_with_the_transposed_weight():
    p = Problem(SPLITS[0], (288, 272), Numbers(exact=True))
    q = Problem(SPLITS[0], (272, 288), Numbers(exact=True, seed=1))  # gradients of p's output for its rows
    q.weight, q.weight_scale = p.transposed_weight()
    out = product(q, FP32)[: q.num_rows].double()
    for g, span in enumerate(p.spans):
        block_scale = p.weight_scale[g].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = p.weight[g].double() * block_scale[: p.widths[0], : p.widths[1]]
        scale = q.row_scale[span].repeat_interleave(BLOCK, 1)[:, : p.widths[0]]
        assert torch.equal(out[span], (q.rows[span].double() * scale) @ weight)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("rows", lambda p: p.rows.to(torch.float8_e5m2), r"rows must be of torch.float8_e4m3fn, got .*e5m2"),
        ("row_scale", lambda p: p.row_scale[:, :-1], r"row_scale must be \[176, 3\], got \[176, 2\]"),
        ("row_scale", lambda p: p.row_scale.double(), r"row_scale must be of torch.float32, got torch.float64"),
        ("row_scale", lambda p: p.row_scale.t().contiguous().t(), r"row_scale must be contiguous, got strides"),
        ("weight", lambda p: p.weight[:, :, :256], r"weight must be \[5, 256, 384\], got \[5, 256, 256\]"),
        ("weight_scale", lambda p: p.weight_scale[:1], r"weight_scale must be \[5, 2, 3\], got \[1, 2, 3\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_operands_of_products_are_named(name, change, text):
    p = Problem(SPLITS[0], WIDTHS[0], Numbers(exact=False))
    setattr(p, name, change(p))
    with pytest.raises(ArgumentError, match=text):
        product(p, BF16)


def test_wrong_biases_are_named():
    p = Problem(SPLITS[0], WIDTHS[0], Numbers(exact=False))
    for options, text in (
        ({"bias": torch.zeros(5, 384)}, r"bias must be \[5, 256\], got \[5, 384\]"),
        ({"bias": torch.zeros(5, 256).double()}, r"bias must be of .*float32, got torch.float64"),
        ({"bias": torch.zeros(5, 256), "bias_scale": torch.ones(175)}, r"bias_scale must be \[176\], got \[175\]"),
        (
            {"bias": torch.zeros(5, 256), "bias_scale": torch.ones(176).bfloat16()},
            "bias_scale must be of .*float32, got",
        ),
    ):
        with pytest.raises(ArgumentError, match=text):
            product(p, BF16, **options)


def test_widths_that_rows_of_16_bytes_do_not_fill():
    numbers = Numbers(exact=False)
    with pytest.raises(ArgumentError, match="contracted features must be a multiple of 16, got 40"):
        product(Problem((3,), (64, 40), numbers), BF16)
    with pytest.raises(ArgumentError, match="features of out must be a multiple of 8, got 60"):
        product(Problem((3,), (60, 48), numbers), BF16)
    p = Problem((3,), (64, 48), numbers)
    with pytest.raises(ArgumentError, match=r"out must be \[8, 64\], got \[8, 32\]"):
        grouped_gemm_fp8(*p.operands, p.blank(BF16)[:, :32])
    data, scale = torch.zeros(64, 120, dtype=E4M3), torch.ones(1, 64).t()
    with pytest.raises(ArgumentError, match="tokens of dout and rows must be a multiple of 128, got 120"):
        grouped_gemm_wgrad_fp8(data, scale, data, scale, torch.tensor([0, 3]), torch.zeros(1, 64, 64))


@pytest.mark.parametrize("name", ["dout_scale", "rows_scale"])
def test_scales_of_columns_lie_block_major(name):
    p = WgradProblem(SPLITS[0], WIDTHS[1], Numbers(exact=False))
    scale = getattr(p, name)
    width, num_blocks = scale.shape
    out = torch.full(p.shape, torch.nan)
    setattr(p, name, scale.contiguous())
    with pytest.raises(ArgumentError, match=rf"{name} .* strides \[1, {width}\], got \[{num_blocks}, 1\]"):
        grouped_gemm_wgrad_fp8(*p.operands, out)
    setattr(p, name, torch.cat([scale.t(), scale.t()], 1)[:, :width].t())
    with pytest.raises(ArgumentError, match=rf"{name} .* strides \[1, {width}\], got \[1, {2 * width}\]"):
        grouped_gemm_wgrad_fp8(*p.operands, out)
    setattr(p, name, scale[:, :-1])
    with pytest.raises(ArgumentError, match=rf"{name} must be \[{width}, {num_blocks}\], got"):
        grouped_gemm_wgrad_fp8(*p.operands, out)
    setattr(p, name, scale.double())
    with pytest.raises(ArgumentError, match=f"{name} must be of torch.float32, got torch.float64"):
        grouped_gemm_wgrad_fp8(*p.operands, out)
    assert out.isnan().all()
    setattr(p, name, scale)
    grouped_gemm_wgrad_fp8(*p.operands, out)
    assert relative_error(out, p.expected()) <= 2e-6


def test_the_scales_of_a_single_block_may_be_both():
    p = WgradProblem((9,), (64, 48), Numbers(exact=True), tail_blocks=0)
    p.dout_scale, p.rows_scale = p.dout_scale.contiguous(), p.rows_scale.contiguous()
    out = torch.empty(p.shape)
    grouped_gemm_wgrad_fp8(*p.operands, out)
    assert torch.equal(out.double(), p.expected())


def test_scales_of_columns_have_rows_of_16_bytes():
    p = WgradProblem((9,), (62, 48), Numbers(exact=True))
    with pytest.raises(ArgumentError, match="features of dout must be a multiple of 4, got 62"):
        grouped_gemm_wgrad_fp8(*p.operands, torch.zeros(p.shape))
