"""The twins of grouped GEMMs, activations and gradients of biases against float64; ranges of rows against the whole."""

import itertools

import gemm_problem as problems
import numpy as np
import pytest
import torch
from row_ranges import random_ranges, whole_groups

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.activation import Activation

WIDTHS, CAPACITY = (24, 40), 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,), (1, 0) * 18]

dtypes = pytest.mark.parametrize("dtype", problems.DTYPES, ids=str)
of_all_splits = pytest.mark.parametrize(
    "splits", SPLITS, ids=lambda splits: f"{len(splits)} groups, {sum(splits)}"
)


@of_all_splits
@dtypes
@pytest.mark.parametrize("check", [problems.check_products, problems.check_gradients])
def test_products_and_gradients_against_float64(check, splits, dtype):
    check(twin, problems.Problem(splits, WIDTHS, dtype, capacity=CAPACITY))


@of_all_splits
@pytest.mark.parametrize("check", [problems.check_products, problems.check_gradients])
def test_autocast_does_not_change_products(check, splits):
    """Kernels know nothing of autocast, and neither do the twins."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(twin, problems.Problem(splits, WIDTHS, torch.float32, capacity=CAPACITY))


def test_bias_gradients_are_summed_in_a_fixed_order():
    """Halves of halves of tiles of 128 rows, then the tiles one after the other."""

    def total(rows):
        half = len(rows) // 2
        return rows[0] if half == 0 else total(rows[:half]) + total(rows[half:])

    splits = (1, 0, 300, 128, 77)
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(sum(splits), 5, generator=generator)
    scale = torch.rand(sum(splits), generator=generator)
    dbias = torch.full((len(splits), 5), torch.nan)
    twin.grouped_bias_grad(dout, whole_groups(splits), dbias, scale=scale)
    addends = (dout.numpy() * scale.numpy()[:, None]).astype(np.float32)
    for actual, rows in zip(dbias.numpy(), np.split(addends, np.cumsum(splits)[:-1]), strict=True):
        padded = np.zeros((-(-len(rows) // 128) * 128, 5), dtype=np.float32)
        padded[: len(rows)] = rows
        expected = np.zeros(5, dtype=np.float32)
        for first in range(0, len(padded), 128):
            expected = expected + total(padded[first : first + 128])
        assert np.array_equal(actual, expected)


def test_sums_with_a_bias_or_an_earlier_result_are_rounded_once():
    """256 + 1 is 256 in bf16, and so is a second 1 more; their sum of 2 is not lost."""
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    row_range = whole_groups([1])
    weight = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    weight[:, :, 0], weight[:, :, 1] = 256, 1
    out = torch.empty(1, 8, dtype=torch.bfloat16)
    twin.grouped_gemm(ones, weight, row_range, out, bias=(ones, torch.ones(1)))
    assert torch.equal(out, torch.full_like(out, 258.0))
    weight[:, :, 0] = 1
    for call, matrix in (
        (twin.grouped_gemm, weight),
        (twin.grouped_gemm_dgrad, weight.mT.contiguous()),
    ):
        out.fill_(256)
        call(ones, matrix, row_range, out, accumulate=True)
        assert torch.equal(out, torch.full_like(out, 258.0))


@dtypes
def test_accumulating_does_not_touch_groups_without_rows(dtype):
    """Not even -0 or the payload of a NaN may change."""
    p = problems.Problem((0, 3, 0), WIDTHS, dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    out = torch.full(p.weight.shape, -0.0, dtype=dtype)
    out[2].view(bits).fill_(torch.full((1,), -torch.nan, dtype=dtype).view(bits).item() ^ 1)
    before = out.clone()
    twin.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, out, accumulate=True)
    for g in (0, 2):
        assert torch.equal(out[g].view(bits), before[g].view(bits))
    assert out[1].any()


def test_splits_become_row_ranges():
    problems.check_splits(twin)


@dtypes
@pytest.mark.parametrize("width_bytes", [16, 48, 64, 144, 400])
def test_bits_do_not_depend_on_where_the_rows_lie(dtype, width_bytes):
    """The same 13 rows behind 0 to 16 rows of another group, so that they start at every 16-byte alignment."""
    width = width_bytes // dtype.itemsize
    p = problems.Problem((13,), (width, 2 * width), dtype, capacity=13)

    def run(shift):
        row_range, n = whole_groups([shift, 13]), shift + 13

        def placed(tensor):
            return torch.cat([torch.ones(shift, *tensor.shape[1:], dtype=tensor.dtype), tensor])

        both = torch.cat([torch.ones_like(p.weight), p.weight])
        both_bias = torch.cat([p.bias * 2, p.bias])
        x = placed(p.rows)
        d = placed(p.dout)
        out = torch.empty(n, 2 * width, dtype=dtype)
        dx = torch.empty(n, width, dtype=dtype)
        dw = torch.empty_like(both)
        db = torch.empty_like(both_bias)
        ds = torch.empty(n)
        twin.grouped_gemm(x, both, row_range, out, bias=(both_bias, placed(p.scale)))
        twin.grouped_gemm_dgrad(d, both, row_range, dx)
        twin.grouped_gemm_wgrad(d, x, row_range, dw)
        twin.grouped_bias_grad(d, row_range, db)
        twin.grouped_bias_dot(d, both_bias, row_range, ds)
        return [dw[1], db[1], *(t[shift:] for t in (out, dx, ds))]

    expected = run(0)
    for shift in range(1, 17):
        assert all(torch.equal(got, want) for got, want in zip(run(shift), expected, strict=True))


# -- activations, by themselves and fused with GEMMs -------------------------------------------------------------------
ACTIVATIONS = {
    "swiglu": Activation(),
    "limits": Activation(alpha=1.702, limit=0.75, offset=1.0),
    "interleave": Activation(interleave=4),
    "interleaved limits": Activation(alpha=1.702, limit=0.75, offset=1.0, interleave=1),
    "srelu": Activation(function="relu2", is_gated=False),
    "silu": Activation(is_gated=False),
    "gelu": Activation(function="gelu", is_gated=False),
    "interleaved geglu": Activation(function="gelu", interleave=4),
    "tanh geglu, limits": Activation(function="gelu_tanh", limit=0.75, offset=1.0),
}

activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


@pytest.mark.parametrize(
    ("splits", "dtype", "activation"),
    [
        *itertools.product(SPLITS[:1], problems.DTYPES, ACTIVATIONS.values()),
        *itertools.product(SPLITS[1:4], [torch.float32], [ACTIVATIONS["swiglu"]]),
    ],
    ids=str,
)
def test_both_passes_of_fused_gemms_are_near_float64(splits, dtype, activation):
    p = problems.ActProblem(splits, WIDTHS, dtype, activation, capacity=CAPACITY)
    problems.check_act(twin, p, table=True, cases=itertools.product(problems.BOTH, problems.BOTH))


@dtypes
@activations
def test_fused_gemms_have_the_bits_of_the_three_modules(activation, dtype):
    """The gradient in between is rounded to the dtype."""
    problems.check_fused(twin, problems.ActProblem(SPLITS[0], WIDTHS, dtype, activation))


def test_interleave_has_to_divide_the_width():
    h = torch.zeros(1, 80)
    with pytest.raises(ArgumentError, match=r"interleave \(16\) must divide the FFN width \(40\)"):
        twin.scaled_activation(h, torch.ones(1), torch.empty(1, 40), Activation(interleave=16))


# -- ranges of rows ----------------------------------------------------------------------------------------------------
IN_PARTS = ("swiglu", "interleaved limits", "srelu")
seeds = pytest.mark.parametrize("seed", range(2))


def random_splits(seed):
    """1 to 6 groups of up to 40 rows, about a third of them without rows."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = int(torch.randint(1, 7, (1,), generator=generator))
    sizes = torch.randint(0, 41, (num_groups,), generator=generator)
    return (sizes * (torch.rand(num_groups, generator=generator) > 0.33)).tolist()


@seeds
@dtypes
@pytest.mark.parametrize("name", ["plain", "biased", "gathered", "dgrad"])
def test_products_of_ranges_have_the_bits_of_the_whole(name, dtype, seed):
    """A range of rows has the bits of the same rows of the whole product."""
    p = problems.Problem(random_splits(seed), (24, 40), dtype, seed=seed)
    problems.check_ranges(
        p, *problems.part_calls(twin, p)[name], random_ranges(p.splits, 4, seed=seed)
    )


@pytest.fixture(params=[1, 2])
def threads(request):
    """That many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("widths", [(8, 16), (64, 256), (520, 24), (136, 300)], ids=str)
def test_a_rows_bits_do_not_depend_on_the_other_rows(widths):
    """MKL by itself would break this: its sums for few rows have another order."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(130, widths[0], generator=generator)
    weight = torch.randn(1, *widths[::-1], generator=generator)
    all_rows = torch.empty(130, widths[1])
    twin.grouped_gemm(rows, weight, whole_groups([130]), all_rows)
    for size, first in itertools.product((1, 2, 3, 4, 7, 12, 15, 16, 17, 33, 64), (0, 1, 5, 61)):
        out = torch.empty_like(all_rows)
        twin.grouped_gemm(
            rows, weight, torch.tensor([[first], [first + size]], dtype=torch.int32), out
        )
        assert torch.equal(out[first : first + size], all_rows[first : first + size]), (size, first)


@seeds
@dtypes
@pytest.mark.parametrize("activation", [ACTIVATIONS[name] for name in IN_PARTS], ids=IN_PARTS)
def test_fused_products_of_ranges_have_the_bits_of_the_whole(activation, dtype, seed):
    p = problems.ActProblem(random_splits(seed), (24, 40), dtype, activation, seed=seed)
    for gather, bias in itertools.product(problems.BOTH, (None, p.bias)):
        problems.check_act_ranges(
            twin, p, random_ranges(p.splits, 4, seed=seed), gather=gather, bias=bias
        )


def test_the_check_of_dact_notices_a_forgotten_range():
    p = problems.ActProblem((13, 0, 9), (24, 40), torch.float32, ACTIVATIONS["swiglu"])
    problems.check_a_forgotten_range(twin, p, 0, 3)
