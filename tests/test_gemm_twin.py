"""The twins of the grouped GEMMs against float64 loops over single rows."""

import itertools

import pytest
import torch

from symmoe.kernels.twin import gemm, gemm_swiglu

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 40, 9, 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SENTINEL = -77.0
# Two roundings at most: of h, which the activation amplifies, and of the result.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Problem:
    """Inputs of all five functions: tail rows are NaN, tail indices out of range, packed rows are shared."""

    def __init__(self, splits, dtype, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.splits = dtype, splits
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.row_start = torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int32)
        self.row_group = [g for g, size in enumerate(splits) for _ in range(size)]
        self.row_index = torch.randint(0, NUM_PACKED, (CAPACITY,), dtype=torch.int32, generator=self.generator)
        self.row_index[self.num_rows :] = 2**30
        self.rows, self.dout = self.with_tail(HIDDEN), self.with_tail(FFN)
        self.packed, self.packed_dout = self.normal(NUM_PACKED, HIDDEN), self.normal(NUM_PACKED, FFN)
        self.weight = self.normal(self.num_groups, FFN, HIDDEN)
        self.weight1 = self.normal(self.num_groups, 2 * FFN, HIDDEN, scale=HIDDEN**-0.5)
        self.weight2 = self.normal(self.num_groups, HIDDEN, FFN)
        self.h, self.row_probs = self.with_tail(2 * FFN), self.with_tail(dtype=torch.float32)

    def normal(self, *shape, dtype=None, scale=1.0):
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def with_tail(self, *shape, dtype=None):
        tensor = self.normal(CAPACITY, *shape, dtype=dtype)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((CAPACITY, *shape), SENTINEL, dtype=dtype or self.dtype)

    def sources(self, rows, packed):
        """(tensor, index, function from a row to its float64 values), contiguous and gathered."""
        yield rows, None, lambda r: rows[r].double()
        yield packed, self.row_index, lambda r: packed[self.row_index[r]].double()

    def check(self, out, expected_row):
        """Every row is expected_row(r), and the tail still holds the sentinel."""
        expected = torch.full_like(out, SENTINEL, dtype=torch.float64)
        for r in range(self.num_rows):
            expected[r] = expected_row(r)
        assert_near(out, expected, self.dtype)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], SENTINEL))


def assert_near(out, expected, dtype):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("splits", SPLITS)
def test_grouped_gemm(splits, dtype):
    p = Problem(splits, dtype)
    for source, index, row in p.sources(p.rows, p.packed):
        out = p.blank(FFN)
        gemm.grouped_gemm(source, p.weight, p.row_start, out, row_index=index)
        p.check(out, lambda r, row=row: p.weight[p.row_group[r]].double() @ row(r))


@pytest.mark.parametrize("splits", SPLITS)
def test_dgrad(splits, dtype):
    p = Problem(splits, dtype)
    out = p.blank(HIDDEN)
    gemm.grouped_gemm_dgrad(p.dout, p.weight, p.row_start, out)
    p.check(out, lambda r: p.dout[r].double() @ p.weight[p.row_group[r]].double())


@pytest.mark.parametrize("splits", SPLITS)
def test_wgrad(splits, dtype):
    p = Problem(splits, dtype)
    for dout, dout_index, dout_row in p.sources(p.dout, p.packed_dout):
        for rows, rows_index, row in p.sources(p.rows, p.packed):
            out = torch.full((p.num_groups, FFN, HIDDEN), torch.nan, dtype=dtype)
            gemm.grouped_gemm_wgrad(dout, rows, p.row_start, out, dout_index=dout_index, rows_index=rows_index)
            expected = torch.zeros(out.shape, dtype=torch.float64)
            for r, g in enumerate(p.row_group):
                expected[g] += torch.outer(dout_row(r), row(r))
            assert_near(out, expected, dtype)


def silu(x):
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("splits", SPLITS)
def test_swiglu(splits, dtype):
    p = Problem(splits, dtype)
    for source, index, row in p.sources(p.rows, p.packed):
        h, a = p.blank(2 * FFN), p.blank(FFN)
        gemm_swiglu.grouped_gemm_swiglu(source, p.weight1, p.row_start, p.row_probs, h, a, row_index=index)
        p.check(h, lambda r, row=row: p.weight1[p.row_group[r]].double() @ row(r))
        # From the rounded h, so only the rounding of a itself is left.
        p.check(a, lambda r, h=h: silu(h[r, :FFN].double()) * h[r, FFN:].double() * p.row_probs[r].double())


@pytest.mark.parametrize("splits", SPLITS)
def test_dswiglu(splits, dtype):
    p = Problem(splits, dtype)
    for source, index, row in p.sources(p.rows, p.packed):
        dh, a, dprob = p.blank(2 * FFN), p.blank(FFN), p.blank(dtype=torch.float32)
        partials = torch.empty(gemm_swiglu.dswiglu_partials_shape(CAPACITY, FFN))
        gemm_swiglu.grouped_gemm_dswiglu(
            source, p.weight2, p.row_start, p.h, p.row_probs, dh, a, dprob, partials, row_index=index
        )

        def grads(r, row=row):
            """Autograd of prob * silu(gate) * up, in float64."""
            h = p.h[r].double().requires_grad_()
            prob = p.row_probs[r].double().requires_grad_()
            act = silu(h[:FFN]) * h[FFN:] * prob
            act.backward(row(r) @ p.weight2[p.row_group[r]].double())
            return act.detach(), h.grad, prob.grad

        p.check(a, lambda r, grads=grads: grads(r)[0])
        p.check(dh, lambda r, grads=grads: grads(r)[1])
        p.check(dprob, lambda r, grads=grads: grads(r)[2])


def test_recomputed_activation_has_the_same_bits(dtype):
    p = Problem((5, 0, 23), dtype)
    h, a = p.blank(2 * FFN), p.blank(FFN)
    gemm_swiglu.grouped_gemm_swiglu(p.rows, p.weight1, p.row_start, p.row_probs, h, a)
    dh, a_again, dprob = p.blank(2 * FFN), p.blank(FFN), p.blank(dtype=torch.float32)
    partials = torch.empty(gemm_swiglu.dswiglu_partials_shape(CAPACITY, FFN))
    gemm_swiglu.grouped_gemm_dswiglu(p.rows, p.weight2, p.row_start, h, p.row_probs, dh, a_again, dprob, partials)
    assert torch.equal(a, a_again)


@pytest.mark.parametrize("width_bytes", [16, 48, 64, 144, 400])
def test_bits_do_not_depend_on_where_the_rows_lie(dtype, width_bytes):
    """The same 13 rows behind 0 to 16 rows of another group, so that they start at every 16-byte alignment."""
    width = width_bytes // dtype.itemsize
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, dout, probs = normal(13, width), normal(13, 2 * width), normal(13).float()
    weight, weight2 = normal(2 * width, width), normal(2 * width, width)

    def run(shift):
        row_start = torch.tensor([0, shift, shift + 13], dtype=torch.int32)
        n = shift + 13

        def placed(tensor):
            return torch.cat([torch.ones(shift, *tensor.shape[1:], dtype=tensor.dtype), tensor])

        both = torch.stack([torch.ones_like(weight), weight])
        both2 = torch.stack([torch.ones_like(weight2), weight2])
        x, d, prob = placed(rows), placed(dout), placed(probs)
        out, dx = torch.empty(n, 2 * width, dtype=dtype), torch.empty(n, width, dtype=dtype)
        dw = torch.empty(2, 2 * width, width, dtype=dtype)
        h, a = torch.empty(n, 2 * width, dtype=dtype), torch.empty(n, width, dtype=dtype)
        dh, a_again, dprob = torch.empty_like(h), torch.empty_like(a), torch.empty(n)
        gemm.grouped_gemm(x, both, row_start, out)
        gemm.grouped_gemm_dgrad(d, both, row_start, dx)
        gemm.grouped_gemm_wgrad(d, x, row_start, dw)
        gemm_swiglu.grouped_gemm_swiglu(x, both, row_start, prob, h, a)
        partials = torch.empty(gemm_swiglu.dswiglu_partials_shape(n, width))
        gemm_swiglu.grouped_gemm_dswiglu(d, both2, row_start, h, prob, dh, a_again, dprob, partials)
        return [dw[1], *(t[shift:] for t in (out, dx, h, a, dh, a_again, dprob))]

    expected = run(0)
    for shift in range(1, 17):
        for got, want in zip(run(shift), expected, strict=True):
            assert torch.equal(got, want)
