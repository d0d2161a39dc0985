"""The twins of the grouped GEMMs of E4M3, MXFP8 and NVFP4 numbers against float64.

What is said of E4M3 numbers with scales of 128 x 128 ("fp8") alone is in test_fp8_twin.py.
"""

import itertools

import fp8_problem
import pytest
import torch
from biases import check_biases
from fp8_problem import SENTINEL, relative_error
from row_ranges import random_ranges, rows_of, spans_of, whole_groups
from scaled_problem import NAN, Numbers, Problem, WgradProblem, dequantised

from symmoe.errors import ArgumentError
from symmoe.kernels.twin.fp8 import grouped_gemm_fp8, grouped_gemm_wgrad_fp8
from symmoe.kernels.twin.scaled import grouped_gemm_scaled, grouped_gemm_wgrad_scaled
from symmoe.precision import MXFP8, NVFP4

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLITS = [(30, 0, 1, 140, 0), (0, 0, 0), (0, 129, 0, 7)]
# O, C: whole tiles; parts of tiles; less than one.
PARTS = [(256, 384), (264, 288), (72, 32)]
WIDTHS = {"fp8": [(256, 384), (264, 272), (72, 48)], "mxfp8": PARTS, "nvfp4": PARTS}
TOLERANCES = {BF16: 2**-8, FP16: 2**-10, FP32: 2e-6}

names = pytest.mark.parametrize("name", WIDTHS)
all_widths = pytest.mark.parametrize(("name", "widths"), [(n, w) for n, each in WIDTHS.items() for w in each], ids=str)


def problem(name, splits, widths, *tail, exact=False):
    if name == "fp8":
        return fp8_problem.Problem(splits, widths, fp8_problem.Numbers(exact=exact), *tail)
    return Problem(splits, widths, Numbers(name, exact=exact), *tail)


def wgrad_problem(name, splits, widths, *tail, exact=False):
    if name == "fp8":
        return fp8_problem.WgradProblem(splits, widths, fp8_problem.Numbers(exact=exact), *tail)
    return WgradProblem(splits, widths, Numbers(name, exact=exact), *tail)


def run(p, out, row_range=None, **options):
    *operands, groups = p.operands
    ranges = groups if row_range is None else row_range
    if isinstance(p, fp8_problem.Problem):
        grouped_gemm_fp8(*operands, ranges, out, **options)
    else:
        grouped_gemm_scaled(*operands, ranges, out, group_range=groups, **p.options, **options)


def product(p, dtype, **options):
    out = p.blank(dtype)
    if isinstance(p, fp8_problem.Problem):
        grouped_gemm_fp8(*p.operands, out, **options)
    else:
        grouped_gemm_scaled(*p.operands, out, **p.options, **options)
    return out


def gradient(p, out, **options):
    if isinstance(p, fp8_problem.WgradProblem):
        grouped_gemm_wgrad_fp8(*p.operands, out, **options)
    else:
        grouped_gemm_wgrad_scaled(*p.operands, out, **p.options, **options)
    return out


@all_widths
def test_products_of_small_numbers_are_exact(widths, name):
    for splits in SPLITS:
        p = problem(name, splits, widths, exact=True)
        assert torch.equal(product(p, FP32).double(), p.expected())


@names
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products_are_as_near_as_the_dtype_of_the_result_allows(dtype, name):
    for splits, widths in itertools.product(SPLITS, WIDTHS[name]):
        p = problem(name, splits, widths)
        if dtype == FP16 and name == "nvfp4":  # within fp16's range
            p.row_global_scale = p.row_global_scale / 1024
        elif dtype == FP16 and name == "mxfp8":
            p.row_scale -= 10
        out, n = product(p, dtype), p.num_rows
        assert relative_error(out[:n], p.expected()[:n]) <= TOLERANCES[dtype]
        assert (out[n:] == SENTINEL).all()


@all_widths
def test_biases_are_added_before_the_one_rounding(widths, name):
    for splits in SPLITS:
        check_biases(run, problem(name, splits, widths, exact=True), *[(BF16, FP16, FP32)] * (name == "fp8"))


@names
@pytest.mark.parametrize(
    ("what", "dim"), [("row_scale", 0), ("row_scale", 1), ("weight_scale", 0), ("weight_scale", 1), ("weight_scale", 2)]
)
def test_the_oracle_notices_a_scale_of_another_line_or_block(what, dim, name):
    p = problem(name, SPLITS[0], WIDTHS[name][0], 0)
    expected = p.expected()
    setattr(p, what, getattr(p, what).roll(1, dim))
    assert relative_error(product(p, FP32), expected) > 0.05


@pytest.mark.parametrize("what", ["row_global_scale", "weight_global_scale"])
def test_the_oracle_notices_a_global_scale_of_another_group(what):
    p = Problem(SPLITS[0], WIDTHS["nvfp4"][0], Numbers("nvfp4", exact=False))
    expected = p.expected()
    setattr(p, what, getattr(p, what).roll(1))
    assert relative_error(product(p, FP32)[: p.num_rows], expected[: p.num_rows]) > 0.05


@names
def test_ranges_have_the_bits_of_the_whole(name):
    for splits, step in itertools.product(SPLITS, (1, 16 if name == "fp8" else 128)):
        p = problem(name, splits, WIDTHS[name][1])
        whole, union = product(p, BF16), p.blank(BF16)
        for ranges in random_ranges(splits, 3, step=step):
            come, out = rows_of(ranges, p.capacity), p.blank(BF16)
            run(p, out, ranges)
            assert torch.equal(out, torch.where(come[:, None], whole, torch.tensor(SENTINEL, dtype=BF16)))
            run(p, union, ranges)
        assert torch.equal(union, whole)


@names
def test_the_tail_becomes_zero_if_asked_for(name):
    p = problem(name, SPLITS[0], WIDTHS[name][1])
    expected = product(p, BF16)
    expected[p.num_rows :] = 0
    assert torch.equal(product(p, BF16, zero_tail=True), expected)


@names
def test_nan_stays_in_its_row(name):
    p = problem(name, SPLITS[0], WIDTHS[name][1])
    clean = product(p, BF16)
    if name == "fp8":
        p.rows.view(torch.uint8)[7, 3] = 0x7F
    else:
        p.row_scale[7, 3] = NAN[name]
    dirty = product(p, BF16)
    assert dirty[7].isnan().all()
    dirty[7] = clean[7]
    assert torch.equal(dirty, clean)


@all_widths
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_of_small_numbers_are_exact(widths, accumulate, name):
    for splits in SPLITS:
        p = wgrad_problem(name, splits, widths, exact=True)
        out = gradient(p, torch.full(p.shape, 3.0 if accumulate else torch.nan), accumulate=accumulate)
        assert torch.equal(out.double(), p.expected() + (3.0 if accumulate else 0.0))


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(WIDTHS, (BF16, FP32)), ("fp8", FP16)], ids=str)
def test_weight_gradients_are_as_near_as_the_dtype_of_the_result_allows(name, dtype):
    p = wgrad_problem(name, SPLITS[0], WIDTHS[name][1])
    out = gradient(p, torch.full(p.shape, torch.nan, dtype=dtype))
    assert relative_error(out, p.expected()) <= TOLERANCES[dtype]
    for dim in (0, 1):
        q = wgrad_problem(name, SPLITS[0], WIDTHS[name][1], 0)
        expected = q.expected()
        q.rows_scale = q.rows_scale.t().roll(1, 1 - dim).t()
        assert relative_error(gradient(q, torch.zeros(q.shape)), expected) > 0.05


@names
def test_groups_without_tokens_leave_an_accumulated_gradient_alone(name):
    p = wgrad_problem(name, SPLITS[0], WIDTHS[name][2])
    out = gradient(p, torch.full(p.shape, torch.nan), accumulate=True)
    assert out.isnan().all()
    gradient(p, out)
    assert not out[[1, 4]].any()
    assert not out.isnan().any()


@names
def test_no_rows_at_all(name):
    assert product(problem(name, (0, 0), WIDTHS[name][2], 0), BF16).shape == (0, 72)
    q = wgrad_problem(name, (0, 0), WIDTHS[name][2], 0)
    assert not gradient(q, torch.full(q.shape, torch.nan)).any()


def recipe_operands(recipe, seed=0):
    """Rows of 3 groups, gradients of their results, and weights; quantised, as the three products take them."""
    generator = torch.Generator().manual_seed(seed)
    row_range = whole_groups((50, 0, 151))
    rows, dout = (torch.randn(201, width, generator=generator, dtype=BF16) for width in (160, 96))
    weight = torch.randn(3, 96, 160, generator=generator, dtype=BF16)
    return (
        row_range,
        (recipe.quantize(rows, row_range), recipe.quantize_weight(weight)),
        (recipe.quantize(dout, row_range), recipe.quantize_weight_transposed(weight)),
        (recipe.quantize_columns(dout, row_range), recipe.quantize_columns(rows, row_range)),
        (rows.double(), dout.double(), weight.double()),
    )


def scales_of(left, right, names):
    """The global scales of two quantised tensors, as options; none for MXFP8."""
    return {} if left.amax is None else dict(zip(names, (left.global_scale, right.global_scale), strict=True))


# The formats' own errors: E4M3 has steps of 2^-3 of a number, E2M1 of up to 1/2 of it.
@pytest.mark.parametrize(
    ("name", "recipe", "least", "most"), [("mxfp8", MXFP8(), 0.005, 0.05), ("nvfp4", NVFP4(), 0.03, 0.25)]
)
def test_what_recipes_make_is_what_the_products_take(name, recipe, least, most):
    """All three products of a layer, against float64 of the dequantised operands, and of the numbers themselves."""
    row_range, forward, dgrad, wgrad, (rows, dout, weight) = recipe_operands(recipe)
    spans = spans_of(row_range)
    gemm_scales, wgrad_scales = ("row_global_scale", "weight_global_scale"), ("dout_global_scale", "rows_global_scale")
    for (left, right), plain in ((forward, (rows, weight.mT)), (dgrad, (dout, weight))):
        out = torch.empty(201, plain[1].shape[2])
        operands = (left.data, left.swizzled_scale(), right.data, right.swizzled_scale(), row_range)
        grouped_gemm_scaled(*operands, out, **scales_of(left, right, gemm_scales))
        matrices = right.dequantize().double()
        matrices = matrices.mT if right.layout == "weight" else matrices
        numbers = left.dequantize().double()
        expected = torch.cat([numbers[span] @ matrices[g] for g, span in enumerate(spans)])
        assert relative_error(out, expected) <= 1e-6
        true = torch.cat([plain[0][span] @ plain[1][g] for g, span in enumerate(spans)])
        assert least <= (out.double() - true).norm() / true.norm() <= most
    left, right = wgrad
    out = torch.full((3, 96, 160), torch.nan)
    operands = (left.data, left.swizzled_scale(), right.data, right.swizzled_scale(), row_range)
    grouped_gemm_wgrad_scaled(*operands, out, **scales_of(left, right, wgrad_scales))
    # What fills a group's last tile is summed as well: the Hadamard transform mixes it with the last tokens.
    padded = [slice(0, 128), slice(128, 128), slice(128, 384)]
    numbers = [dequantised(name, side.data, side.scale.view(torch.uint8)) for side in wgrad]
    expected = torch.stack([numbers[0][:, span] @ numbers[1][:, span].T for span in padded])
    for side in wgrad if recipe.column_signs else ():
        expected *= side.global_scale.double()[:, None, None]
    assert relative_error(out, expected) <= 1e-6
    true = torch.stack([dout[span].T @ rows[span] for span in spans])
    assert least <= (out.double() - true).norm() / true.norm() <= most


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda o, k: o.__setitem__(0, o[0].to(torch.float8_e5m2)),
            r"rows must be of .*e4m3fn or torch.uint8, got .*e5",
        ),
        (lambda o, k: o.__setitem__(1, o[1][:3]), r"row_scale must be \[6 or more, 3, 512\], got \[3, 3, 512\]"),
        (lambda o, k: o.__setitem__(1, o[1][:, :2]), r"row_scale must be \[6 or more, 3, 512\], got \[6, 2, 512\]"),
        (lambda o, k: o.__setitem__(1, o[1].view(torch.int8)), "row_scale must be of torch.uint8, got torch.int8"),
        (lambda o, k: o.__setitem__(2, o[2][..., :256]), r"weight must be \[5, 256, 384\], got \[5, 256, 256\]"),
        (lambda o, k: o.__setitem__(3, o[3][:9]), r"weight_scale must be \[10 or more, 3, 512\], got \[9, 3, 512\]"),
        (
            lambda o, k: k.update(row_global_scale=torch.ones(5)),
            r"row_global_scale must be None where numbers are e4m3",
        ),
        (lambda o, k: o.__setitem__(4, o[4][0]), r"row_range must be \[2, 5\], got \[5\]"),
        (lambda o, k: k.update(bias=torch.ones(5, 384)), r"bias must be \[5, 256\], got \[5, 384\]"),
        (lambda o, k: k.update(group_range=o[4][1]), r"group_range must be \[2, 5\], got \[5\]"),
    ],
)
def test_wrong_operands_of_products_are_named(change, text):
    p = Problem(SPLITS[0], WIDTHS["mxfp8"][0], Numbers("mxfp8", exact=False))
    operands, options = list(p.operands), {}
    change(operands, options)
    with pytest.raises(ArgumentError, match=text):
        grouped_gemm_scaled(*operands, p.blank(BF16), **options)


def test_global_scales_that_are_missing():
    p = Problem((3, 4), (64, 64), Numbers("nvfp4", exact=False))
    with pytest.raises(ArgumentError, match=r"row_global_scale must be \[2\] where numbers are e2m1, got None"):
        grouped_gemm_scaled(*p.operands, p.blank(BF16))
    q = WgradProblem((3, 4), (64, 64), Numbers("nvfp4", exact=False))
    q.rows_global_scale = torch.ones(3)
    with pytest.raises(ArgumentError, match=r"rows_global_scale must be \[2\], got \[3\]"):
        gradient(q, torch.zeros(q.shape))


def test_the_packing_of_nvfp4_is_named():
    p = Problem((3, 4), (64, 64), Numbers("nvfp4", exact=False))
    rows, row_scale, weight, weight_scale, row_range = p.operands
    packed = r"\(of data with two elements in a byte\)"
    for operands, text in (
        ((rows, row_scale[:, :0], weight, weight_scale), rf"row_scale {packed} must be \[.* or more, 1, 512\], got"),
        (
            (rows, row_scale, weight[..., :16], weight_scale),
            rf"weight {packed} must be \[2, 64, 32\], got \[2, 64, 16\]",
        ),
    ):
        with pytest.raises(ArgumentError, match=text):
            grouped_gemm_scaled(*operands, row_range, p.blank(BF16))


def test_widths_that_do_not_fit():
    numbers = Numbers("mxfp8", exact=False)
    with pytest.raises(ArgumentError, match="contracted features must be a multiple of 32, got 48"):
        product(Problem((3,), (64, 48), numbers), BF16)
    with pytest.raises(ArgumentError, match="features of out must be a multiple of 8, got 60"):
        product(Problem((3,), (60, 64), numbers), BF16)
    data, scale = torch.zeros(64, 96, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 512, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="tokens of dout and rows must be a multiple of 128, got 96"):
        grouped_gemm_wgrad_scaled(data, scale, data, scale, torch.tensor([0, 3]), torch.zeros(1, 64, 64))
