"""The grouped GEMMs of MXFP8 and NVFP4 numbers on a GPU: near float64, exact where sums are, the rows they own only.

On Blackwell by products with block scales, on Hopper by 16-bit products of dequantised numbers.
"""

import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper or Blackwell GPU", allow_module_level=True)

from biases import check_biases
from fp8_problem import SENTINEL, relative_error
from quantize_cases import Scattered
from row_ranges import random_ranges, rows_of, whole_groups
from scaled_problem import NAMES, NAN, Numbers, Problem, WgradProblem

from symmoe import kernels
from symmoe.kernels.low_precision import scaled
from symmoe.precision import MXFP8, NVFP4

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

BF16, FP32 = torch.bfloat16, torch.float32
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
WIDTHS = [(512, 1024), (1040, 736), (712, 1056), (264, 96), (384, 128)]  # O, C: whole tiles and steps; parts of them
BF16_ERROR = 2**-8  # half a unit in the last place of the largest value is 2^-9
FP32_ERROR = 2e-3  # tensor cores keep fewer bits than fp32 of what they add

names = pytest.mark.parametrize("name", NAMES)
all_widths = pytest.mark.parametrize("widths", WIDTHS, ids=str)


def problem(kind, name, splits, widths, *, exact, seed=0):
    return kind(splits, widths, Numbers(name, exact=exact, seed=seed, device="cuda"))


def product(p, dtype=BF16, num_sms=None, **options):
    out = p.blank(dtype)
    scaled.grouped_gemm_scaled(*p.operands, out, num_sms=num_sms, **p.options, **options)
    return out


def gradient(p, dtype=FP32, *, start=torch.nan, num_sms=None, **options):
    """There is NaN before and after the result, and stays."""
    size = torch.Size(p.shape).numel()
    around = torch.full((size + 2048,), torch.nan, dtype=dtype, device="cuda")
    out = around[1024 : 1024 + size].view(p.shape).fill_(start)
    scaled.grouped_gemm_wgrad_scaled(*p.operands, out, num_sms=num_sms, **p.options, **options)
    assert around[:1024].isnan().all()
    assert around[1024 + size :].isnan().all()
    return out


@names
@all_widths
def test_products_of_small_numbers_are_exact(widths, name):
    for splits in SPLITS:
        p = problem(Problem, name, splits, widths, exact=True)
        expected = p.expected()
        for dtype, num_sms in itertools.product((BF16, FP32), (None, 7, 1)):
            assert torch.equal(product(p, dtype, num_sms), expected.to(dtype)), (splits, dtype, num_sms)


def packed(p, out, row_range=None, **options):
    *operands, groups = p.operands
    ranges = groups if row_range is None else row_range
    scaled.grouped_gemm_scaled(*operands, ranges, out, group_range=groups, **p.options, **options)


def scattered(p, out, row_range=None, **options):
    (rows, row_scale, *_, groups), (weight, scale) = p.operands, p.scattered
    operands = rows, row_scale, weight.table, scale.table, groups if row_range is None else row_range
    scaled.grouped_gemm_scaled(*operands, out, group_range=groups, **p.options, **options)


@names
@pytest.mark.parametrize(("run", "dtype"), [(packed, BF16), (scattered, FP32)])
def test_biases_are_added_before_the_one_rounding(run, dtype, name):
    for splits in SPLITS:
        check_biases(run, problem(Problem, name, splits, WIDTHS[2], exact=True), (dtype,))


@names
@all_widths
def test_products_are_near_float64(widths, name):
    for splits in SPLITS:
        p = problem(Problem, name, splits, widths, exact=False)
        n, expected = p.num_rows, p.expected()
        for dtype, error in ((BF16, BF16_ERROR), (FP32, FP32_ERROR)):
            out = product(p, dtype)
            assert relative_error(out[:n], expected[:n]) <= error
            assert (out[n:] == SENTINEL).all()


@names
@all_widths
def test_scattered_matrices_give_the_bits_of_packed_ones(widths, name):
    p, q = (problem(kind, name, SPLITS[0], widths, exact=False) for kind in (Problem, WgradProblem))
    (rows, row_scale, *_), (weight, scale) = p.operands, p.scattered
    found = p.blank(BF16)
    scaled.grouped_gemm_scaled(rows, row_scale, weight.table, scale.table, p.row_range, found, **p.options)
    assert torch.equal(found, product(p))
    for accumulate in (False, True):
        scattered = Scattered(torch.full(q.shape, 3.0, device="cuda"))
        scaled.grouped_gemm_wgrad_scaled(*q.operands, scattered.table, accumulate=accumulate, **q.options)
        assert torch.equal(scattered.packed(), gradient(q, start=3.0, accumulate=accumulate))


@names
@pytest.mark.parametrize("what", ["row_scale", "weight_scale"])
def test_the_oracle_notices_a_scale_of_another_block(what, name):
    p = problem(Problem, name, SPLITS[0], WIDTHS[0], exact=False)
    expected = p.expected()
    setattr(p, what, getattr(p, what).roll(1, -1))
    assert relative_error(product(p)[: p.num_rows], expected[: p.num_rows]) > 0.05


@names
@pytest.mark.parametrize("widths", WIDTHS[:3], ids=str)
def test_parts_have_the_bits_of_the_whole(widths, name):
    """Ranges of rows, and zeros in the tail."""
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = problem(Problem, name, splits, widths, exact=False)
        whole, union = product(p), p.blank(BF16)
        *operands, row_range = p.operands
        options = {**p.options, "group_range": row_range}
        for ranges in random_ranges(splits, 3, step=step):
            ranges, out = ranges.cuda(), p.blank(BF16)
            scaled.grouped_gemm_scaled(*operands, ranges, out, num_sms=7, **options)
            assert torch.equal(out, torch.where(rows_of(ranges, p.capacity)[:, None], whole, SENTINEL))
            scaled.grouped_gemm_scaled(*operands, ranges, union, **options)
        assert torch.equal(union, whole)
        whole[p.num_rows :] = 0
        assert torch.equal(product(p, zero_tail=True, num_sms=5), whole)


@names
def test_nan_stays_in_its_row(name):
    p = problem(Problem, name, SPLITS[0], WIDTHS[1], exact=False)
    clean = product(p)
    row = p.spans[3].start
    p.row_scale[row, 3] = NAN[name]
    dirty = product(p)
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert torch.equal(dirty, clean)


@names
def test_many_groups(name):
    for num_groups in (1, 33, 256):
        splits = tuple(i % 5 * (i % 7) for i in range(1, num_groups + 1))
        p = problem(Problem, name, splits, (264, 160), exact=True)
        assert torch.equal(product(p), p.expected().to(BF16))
        q = problem(WgradProblem, name, splits, (72, 264), exact=True)
        assert torch.equal(gradient(q).double(), q.expected())


@names
@all_widths
def test_weight_gradients_of_small_numbers_are_exact(widths, name):
    for splits in SPLITS:
        p = problem(WgradProblem, name, splits, widths, exact=True)
        expected = p.expected()
        for dtype, num_sms in itertools.product((BF16, FP32), (None, 7, 1)):
            assert torch.equal(gradient(p, dtype, num_sms=num_sms), expected.to(dtype))
            added = gradient(p, dtype, accumulate=True, start=3.0, num_sms=num_sms)
            assert torch.equal(added, (3.0 + expected).to(dtype))


@names
@all_widths
def test_weight_gradients_are_near_float64(widths, name):
    for splits in SPLITS:
        p = problem(WgradProblem, name, splits, widths, exact=False)
        expected = p.expected()
        assert relative_error(gradient(p), expected) <= FP32_ERROR
        assert relative_error(gradient(p, BF16), expected) <= BF16_ERROR


@names
def test_groups_without_tokens_leave_an_accumulated_gradient_alone(name):
    p = problem(WgradProblem, name, SPLITS[0], (264, 288), exact=False)
    out = gradient(p, accumulate=True, start=-0.0)
    for g, size in enumerate(SPLITS[0]):  # with zeros added it would be 0.0
        assert (torch.signbit(out[g]) & (out[g] == 0)).all() == (size == 0)


@pytest.mark.parametrize("recipe", [MXFP8(), NVFP4()], ids=["mxfp8", "nvfp4"])
def test_what_recipes_make(recipe):
    """The bytes of the quantisers of GPUs and their tiles of scales, against the twin with the same operands."""
    generator = torch.Generator("cuda").manual_seed(0)
    row_range = whole_groups((500, 0, 401), device="cuda")
    rows, dout = (torch.randn(901, width, generator=generator, dtype=BF16, device="cuda") for width in (1056, 704))
    weight = torch.randn(3, dout.shape[1], 1056, generator=generator, dtype=BF16, device="cuda")
    twin = kernels.for_device(torch.device("cpu"))

    def both(name, left, right, scales, out):
        operands = (left.data, left.swizzled_scale(), right.data, right.swizzled_scale(), row_range)
        options = {} if left.amax is None else dict(zip(scales, (left.global_scale, right.global_scale), strict=True))
        getattr(scaled, name)(*operands, out, **options)
        expected = torch.empty_like(out, device="cpu")
        getattr(twin, name)(*(each.cpu() for each in operands), expected, **{k: v.cpu() for k, v in options.items()})
        assert relative_error(out.cpu(), expected.double()) <= FP32_ERROR

    gemm, wgrad = ("row_global_scale", "weight_global_scale"), ("dout_global_scale", "rows_global_scale")
    forward = recipe.quantize(rows, row_range), recipe.quantize_weight(weight)
    both("grouped_gemm_scaled", *forward, gemm, torch.empty(901, dout.shape[1], device="cuda"))
    dgrad = recipe.quantize(dout, row_range), recipe.quantize_weight_transposed(weight)
    both("grouped_gemm_scaled", *dgrad, gemm, torch.empty(901, 1056, device="cuda"))
    columns = recipe.quantize_columns(dout, row_range), recipe.quantize_columns(rows, row_range)
    both("grouped_gemm_wgrad_scaled", *columns, wgrad, torch.empty(weight.shape, device="cuda"))


@names
def test_a_call_in_a_graph_reads_bounds_on_the_device(name):
    """Replayed with other rows and bounds."""
    p = problem(Problem, name, SPLITS[0], WIDTHS[2], exact=True)
    operands, out = p.operands, p.blank(BF16)
    scaled.grouped_gemm_scaled(*operands, out, **p.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled.grouped_gemm_scaled(*operands, out, **p.options)
    q = problem(Problem, name, (1, 500, 300, 0, 20, 0, 514), WIDTHS[2], exact=True, seed=1)
    assert q.capacity == p.capacity
    for mine, other in zip((*operands, *p.options.values()), (*q.operands, *q.options.values()), strict=True):
        mine.copy_(other)
    out.fill_(SENTINEL)
    graph.replay()
    assert torch.equal(out, q.expected().to(BF16))
