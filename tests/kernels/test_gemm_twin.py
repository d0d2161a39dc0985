"""The twins of the grouped GEMMs, of the biases' gradients and of the splits against float64."""

import itertools

import numpy as np
import pytest
import torch
from gemm_problem import BIASES, BOTH, DTYPES, Problem, check_biases, check_dgrad, check_gemm, check_splits, check_wgrad
from row_ranges import whole_groups

from symmoe.kernels import twin

WIDTHS, CAPACITY = (24, 40), 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,), (1, 0) * 18]

of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
of_all_splits = pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: f"{len(splits)} groups, {sum(splits)}")


@of_all_splits
@of_every_dtype
def test_products(splits, dtype):
    p = Problem(splits, WIDTHS, dtype, capacity=CAPACITY)
    for gather, biased, zero_tail in itertools.product(BOTH, BIASES, BOTH):
        check_gemm(twin, p, gather, True, biased, zero_tail)
    for gather, zero_tail in itertools.product(BOTH, BOTH):
        check_dgrad(twin, p, gather, True, zero_tail)


@of_all_splits
@of_every_dtype
def test_results_are_added(splits, dtype):
    """To what out holds; the tail stays as it is."""
    p = Problem(splits, WIDTHS, dtype, capacity=CAPACITY)
    for gather, biased in itertools.product(BOTH, BIASES):
        check_gemm(twin, p, gather, False, biased, False, accumulate=True)
    for gather in BOTH:
        check_dgrad(twin, p, gather, False, False, accumulate=True)


@of_all_splits
@of_every_dtype
def test_gradients_of_weights_and_biases(splits, dtype):
    p = Problem(splits, WIDTHS, dtype, capacity=CAPACITY)
    for gather_dout, gather_rows, accumulate in itertools.product(BOTH, BOTH, BOTH):
        for out_dtype in {dtype, torch.float32}:
            check_wgrad(twin, p, gather_dout, gather_rows, True, accumulate, out_dtype)
    for case in itertools.product(BOTH, BOTH, BOTH):
        check_biases(twin, p, *case)


def test_the_order_of_a_bias_gradient():
    """Halves of halves of tiles of 128 rows, then the tiles one after the other."""

    def total(rows):
        half = len(rows) // 2
        return rows[0] if half == 0 else total(rows[:half]) + total(rows[half:])

    splits, generator = (1, 0, 300, 128, 77), torch.Generator().manual_seed(0)
    dout, scale = torch.randn(sum(splits), 5, generator=generator), torch.rand(sum(splits), generator=generator)
    dbias = torch.full((len(splits), 5), torch.nan)
    twin.grouped_bias_grad(dout, whole_groups(splits), dbias, scale=scale)
    addends = (dout.numpy() * scale.numpy()[:, None]).astype(np.float32)
    for found, rows in zip(dbias.numpy(), np.split(addends, np.cumsum(splits)[:-1]), strict=True):
        padded = np.zeros((-(-len(rows) // 128) * 128, 5), dtype=np.float32)
        padded[: len(rows)] = rows
        expected = np.zeros(5, dtype=np.float32)
        for first in range(0, len(padded), 128):
            expected = expected + total(padded[first : first + 128])
        assert np.array_equal(found, expected)


def test_the_result_is_rounded_once():
    """256 + 1 + 1 is 258 in bf16, but 256 + 1 alone is rounded to 256."""
    ones, row_range = torch.ones(1, 8, dtype=torch.bfloat16), whole_groups([1])
    weight = torch.tensor([256.0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bfloat16).expand(1, 8, 8).contiguous()
    out = torch.empty(1, 8, dtype=torch.bfloat16)
    twin.grouped_gemm(ones, weight, row_range, out, bias=ones, bias_scale=torch.ones(1))
    assert torch.equal(out, torch.full_like(out, 258.0))


def test_a_sum_is_rounded_once():
    """256 + 1 is 256 in bf16, and so is a second 1 more; their sum of 2 is not lost."""
    ones, row_range = torch.ones(1, 8, dtype=torch.bfloat16), whole_groups([1])
    weight = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    weight[:, :, :2] = 1
    for call in (twin.grouped_gemm, twin.grouped_gemm_dgrad):
        out = torch.full((1, 8), 256.0, dtype=torch.bfloat16)
        call(ones, weight if call is twin.grouped_gemm else weight.mT.contiguous(), row_range, out, accumulate=True)
        assert torch.equal(out, torch.full_like(out, 258.0))


@of_every_dtype
def test_accumulating_leaves_groups_without_rows_alone(dtype):
    """Not even -0 or the payload of a NaN may change."""
    p = Problem((0, 3, 0), WIDTHS, dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    out = torch.full(p.weight.shape, -0.0, dtype=dtype)
    out[2].view(bits).fill_(torch.full((1,), -torch.nan, dtype=dtype).view(bits).item() ^ 1)
    before = out.clone()
    twin.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, out, accumulate=True)
    for g in (0, 2):
        assert torch.equal(out[g].view(bits), before[g].view(bits))
    assert out[1].any()


def test_splits():
    check_splits(twin)


@of_every_dtype
@pytest.mark.parametrize("width_bytes", [16, 48, 64, 144, 400])
def test_bits_do_not_depend_on_where_the_rows_lie(dtype, width_bytes):
    """The same 13 rows behind 0 to 16 rows of another group, so that they start at every 16-byte alignment."""
    width = width_bytes // dtype.itemsize
    p = Problem((13,), (width, 2 * width), dtype, capacity=13)

    def run(shift):
        row_range = whole_groups([shift, 13])
        n = shift + 13

        def placed(tensor):
            return torch.cat([torch.ones(shift, *tensor.shape[1:], dtype=tensor.dtype), tensor])

        both = torch.cat([torch.ones_like(p.weight), p.weight])
        both_bias = torch.cat([p.bias * 2, p.bias])
        x, d, s = placed(p.rows), placed(p.dout), placed(p.scale)
        out, dx = torch.empty(n, 2 * width, dtype=dtype), torch.empty(n, width, dtype=dtype)
        dw, db, ds = torch.empty_like(both), torch.empty_like(both_bias), torch.empty(n)
        twin.grouped_gemm(x, both, row_range, out, bias=both_bias, bias_scale=s)
        twin.grouped_gemm_dgrad(d, both, row_range, dx)
        twin.grouped_gemm_wgrad(d, x, row_range, dw)
        twin.grouped_bias_grad(d, row_range, db)
        twin.grouped_bias_dot(d, both_bias, row_range, ds)
        return [dw[1], db[1], *(t[shift:] for t in (out, dx, ds))]

    expected = run(0)
    for shift in range(1, 17):
        for got, want in zip(run(shift), expected, strict=True):
            assert torch.equal(got, want)
