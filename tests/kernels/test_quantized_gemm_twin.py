"""The twins of the grouped GEMMs of E4M3 numbers with fp32 scales ("fp8"), MXFP8 and NVFP4 against float64."""

import itertools

import pytest
import torch
from quantized_problem import (
    E4M3,
    SENTINEL,
    Numbers,
    Problem,
    WgradProblem,
    check_nan_stays_in_its_row,
    dequantised,
    relative_error,
)
from row_ranges import random_ranges, rows_of, spans_of, whole_groups

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.operands import Operand
from symmoe.kernels.twin import grouped_gemm_quantized, grouped_gemm_wgrad_quantized
from symmoe.precision import MXFP8, NVFP4, Float8Block

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLITS = [(30, 0, 1, 140, 0), (0, 0, 0), (0, 129, 0, 7)]
# O, C: whole tiles; parts of tiles; less than one.
PARTS = [(256, 384), (264, 288), (72, 32)]
WIDTHS = {"fp8": [(256, 384), (264, 272), (72, 48)], "mxfp8": PARTS, "nvfp4": PARTS}
TOLERANCES = {BF16: 2**-8, FP16: 2**-10, FP32: 2e-6}

names = pytest.mark.parametrize("name", WIDTHS)
all_widths = pytest.mark.parametrize(
    ("name", "widths"), [(name, pair) for name, pairs in WIDTHS.items() for pair in pairs], ids=str
)


def problem(name, splits, widths, *tail, exact=False, kind=Problem):
    return kind(splits, widths, Numbers(name, exact=exact), *tail)


def wgrad_problem(name, splits, widths, *tail, exact=False):
    return problem(name, splits, widths, *tail, exact=exact, kind=WgradProblem)


def product(p, dtype, row_range=None, **options):
    out = p.blank(dtype)
    p.run(twin, out, row_range, **options)
    return out


def gradient(p, out, **options):
    p.run(twin, out, **options)
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


@names
@pytest.mark.parametrize("scaled", [False, True])
def test_biases_are_added_before_the_one_rounding(name, scaled):
    """A call adds biases to the rows of its ranges; NaN stays in its group."""
    widths = WIDTHS[name][1]
    for splits, dtype in itertools.product(SPLITS, (BF16, FP16, FP32)):
        p = problem(name, splits, widths, exact=True)
        generator = torch.Generator().manual_seed(0)
        n, groups = p.num_rows, torch.arange(len(splits)).repeat_interleave(torch.tensor(splits))
        eighths = torch.randint(-96, 97, (len(splits), widths[0]), generator=generator)
        bias = (eighths / 8).to(dtype)
        scale = torch.full((p.capacity,), torch.nan)
        scale[:n] = torch.exp2(torch.randint(-2, 3, (n,), generator=generator).float())
        addend = bias.double()[groups] * (scale[:n, None].double() if scaled else 1.0)
        exact = p.expected()[:n]
        biases = (bias, scale if scaled else None)
        once = (exact + addend).to(dtype)
        if dtype != FP32 and n and widths[1] > 128:  # sums have more bits than the dtype
            assert not torch.equal((exact.to(dtype).double() + addend).to(dtype), once)
        out = product(p, dtype, zero_tail=True, bias=biases)
        union = p.blank(dtype)
        assert torch.equal(out[:n], once)
        assert not out[n:].any()
        for ranges in random_ranges(splits, 2):
            p.run(twin, union, ranges, bias=biases)
        assert torch.equal(union[:n], once)
        assert (union[n:] == SENTINEL).all()
        group = int(groups[:1].sum())
        bias[group] = torch.nan
        dirty = product(p, dtype, bias=biases)[:n]
        assert torch.equal(dirty.isnan().all(1), groups == group)
        assert torch.equal(dirty[groups != group], once[groups != group])


@pytest.mark.parametrize(
    ("name", "field", "dim"),
    [
        *itertools.product(WIDTHS, ("row_scale",), (0, 1)),
        *itertools.product(WIDTHS, ("weight_scale",), (0, 1, 2)),
        ("nvfp4", "row_global_scale", 0),
        ("nvfp4", "weight_global_scale", 0),
    ],
)
def test_the_oracle_notices_a_scale_of_another_line_or_block_or_group(field, dim, name):
    p = problem(name, SPLITS[0], WIDTHS[name][0], 0)
    expected = p.expected()
    setattr(p, field, getattr(p, field).roll(1, dim))
    assert relative_error(product(p, FP32), expected) > 0.05


@names
def test_ranges_have_the_bits_of_the_whole(name):
    for splits, step in itertools.product(SPLITS, (1, 16 if name == "fp8" else 128)):
        p = problem(name, splits, WIDTHS[name][1])
        all_rows = product(p, BF16)
        union = p.blank(BF16)
        for ranges in random_ranges(splits, 3, step=step):
            assert torch.equal(
                product(p, BF16, ranges),
                torch.where(
                    rows_of(ranges, p.capacity)[:, None],
                    all_rows,
                    torch.tensor(SENTINEL, dtype=BF16),
                ),
            )
            p.run(twin, union, ranges)
        assert torch.equal(union, all_rows)


@names
def test_nan_stays_in_its_row(name):
    check_nan_stays_in_its_row(
        problem(name, SPLITS[0], WIDTHS[name][1]), 7, lambda p: product(p, BF16)
    )


@all_widths
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_of_small_numbers_are_exact(widths, accumulate, name):
    for splits in SPLITS:
        p = wgrad_problem(name, splits, widths, exact=True)
        out = gradient(
            p, torch.full(p.shape, 3.0 if accumulate else torch.nan), accumulate=accumulate
        )
        assert torch.equal(out.double(), p.expected() + (3.0 if accumulate else 0.0))


@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(WIDTHS, (BF16, FP32)), ("fp8", FP16)], ids=str
)
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
def test_products_without_rows_are_empty(name):
    assert product(problem(name, (0, 0), WIDTHS[name][2], 0), BF16).shape == (0, 72)
    q = wgrad_problem(name, (0, 0), WIDTHS[name][2], 0)
    assert not gradient(q, torch.full(q.shape, torch.nan)).any()


# The formats' own errors: E4M3 has steps of 2^-3 of a number, E2M1 of up to 1/2 of it.
@pytest.mark.parametrize(
    ("name", "recipe", "min_error", "max_error"),
    [
        ("fp8", Float8Block(), 0.005, 0.05),
        ("mxfp8", MXFP8(), 0.005, 0.05),
        ("nvfp4", NVFP4(), 0.03, 0.25),
    ],
)
def test_products_take_the_operands_of_recipes(name, recipe, min_error, max_error):
    """All three products of a layer, against float64 of the dequantised operands, and of the numbers themselves."""
    generator = torch.Generator().manual_seed(0)
    row_range = whole_groups((50, 0, 151))
    rows, dout = (torch.randn(201, width, generator=generator, dtype=BF16) for width in (160, 96))
    weight = torch.randn(3, 96, 160, generator=generator, dtype=BF16)
    forward = recipe.quantize(rows, row_range), recipe.quantize_weight(weight)
    dgrad = recipe.quantize(dout, row_range), recipe.quantize_weight_transposed(weight)
    wgrad = dout_columns, rows_columns = (
        recipe.quantize_columns(dout, row_range),
        recipe.quantize_columns(rows, row_range),
    )
    rows = rows.double()
    dout = dout.double()
    weight = weight.double()
    spans = spans_of(row_range)

    def check(out, expected, true):
        assert relative_error(out, expected) <= 1e-6
        assert min_error <= (out.double() - true).norm() / true.norm() <= max_error

    for (numbers, matrices), plain in ((forward, (rows, weight.mT)), (dgrad, (dout, weight))):
        out = torch.empty(201, plain[1].shape[2])
        grouped_gemm_quantized(numbers.operand(), matrices.operand(), row_range, out)
        turned = matrices.dequantize().double()
        turned = turned.mT if matrices.layout == "weight" else turned
        exact = numbers.dequantize().double()
        check(
            out,
            torch.cat([exact[span] @ turned[g] for g, span in enumerate(spans)]),
            torch.cat([plain[0][span] @ plain[1][g] for g, span in enumerate(spans)]),
        )
    out = torch.full((3, 96, 160), torch.nan)
    grouped_gemm_wgrad_quantized(dout_columns.operand(), rows_columns.operand(), row_range, out)
    # The padding of a group's last tile is summed as well: the Hadamard transform mixes it with the last tokens.
    padded = [slice(0, 128), slice(128, 128), slice(128, 384)]
    scales = [side.scale if name == "fp8" else side.scale.view(torch.uint8) for side in wgrad]
    numbers = [
        dequantised(name, side.data, scale) for side, scale in zip(wgrad, scales, strict=True)
    ]
    expected = torch.stack([numbers[0][:, span] @ numbers[1][:, span].T for span in padded])
    for side in wgrad if recipe.column_signs else ():
        expected *= side.global_scale.double()[:, None, None]
    check(out, expected, torch.stack([dout[span].T @ rows[span] for span in spans]))


PLACES = {  # operand, and field
    "rows": (0, "data"),
    "row_scale": (0, "scale"),
    "row_global_scale": (0, "global_scale"),
    "weight": (1, "data"),
    "weight_scale": (1, "scale"),
}


@pytest.mark.parametrize(
    ("name", "operand", "change", "text"),
    [
        (
            "fp8",
            "rows",
            lambda t: t.to(torch.float8_e5m2),
            r"rows must be of torch.float8_e4m3fn, got .*e5m2",
        ),
        ("fp8", "row_scale", lambda t: t[:, :-1], r"row_scale must be \[176, 3\], got \[176, 2\]"),
        (
            "fp8",
            "row_scale",
            lambda t: t.double(),
            r"row_scale must be of torch.float32, got torch.float64",
        ),
        (
            "fp8",
            "row_scale",
            lambda t: t.t().contiguous().t(),
            r"row_scale must be contiguous, got strides",
        ),
        (
            "fp8",
            "weight",
            lambda t: t[:, :, :256],
            r"weight must be \[5, 256, 384\], got \[5, 256, 256\]",
        ),
        (
            "fp8",
            "weight_scale",
            lambda t: t[:1],
            r"weight_scale must be \[5, 2, 3\], got \[1, 2, 3\]",
        ),
        ("fp8", "bias", lambda _: torch.zeros(5, 384), r"bias must be \[5, 256\], got \[5, 384\]"),
        (
            "fp8",
            "bias",
            lambda _: torch.zeros(5, 256).double(),
            r"bias must be of .*float32, got torch.float64",
        ),
        (
            "fp8",
            "bias_scale",
            lambda _: torch.ones(175),
            r"bias_scale must be \[176\], got \[175\]",
        ),
        (
            "fp8",
            "bias_scale",
            lambda _: torch.ones(176).bfloat16(),
            "bias_scale must be of .*float32, got",
        ),
        (
            "mxfp8",
            "rows",
            lambda t: t.to(torch.float8_e5m2),
            r"rows must be of .*e4m3fn or torch.uint8, got .*e5",
        ),
        (
            "mxfp8",
            "row_scale",
            lambda t: t[:3],
            r"row_scale must be \[6 or more, 3, 512\], got \[3, 3, 512\]",
        ),
        (
            "mxfp8",
            "row_scale",
            lambda t: t[:, :2],
            r"row_scale must be \[6 or more, 3, 512\], got \[6, 2, 512\]",
        ),
        (
            "mxfp8",
            "row_scale",
            lambda t: t.view(torch.int8),
            "row_scale must be of torch.uint8, got torch.int8",
        ),
        (
            "mxfp8",
            "weight",
            lambda t: t[..., :256],
            r"weight must be \[5, 256, 384\], got \[5, 256, 256\]",
        ),
        (
            "mxfp8",
            "weight_scale",
            lambda t: t[:9],
            r"weight_scale must be \[10 or more, 3, 512\], got \[9, 3, 512\]",
        ),
        (
            "mxfp8",
            "row_global_scale",
            lambda _: torch.ones(5),
            "row_global_scale must be None where numbers are e4m3",
        ),
        ("mxfp8", "row_range", lambda t: t[0], r"row_range must be \[2, 5\], got \[5\]"),
        ("mxfp8", "bias", lambda _: torch.ones(5, 384), r"bias must be \[5, 256\], got \[5, 384\]"),
        (
            "mxfp8",
            "group_range",
            lambda _: torch.ones(5).int(),
            r"group_range must be \[2, 5\], got \[5\]",
        ),
        (
            "nvfp4",
            "row_global_scale",
            lambda _: None,
            r"row_global_scale must be \[5\] where numbers are e2m1, got",
        ),
        (
            "nvfp4",
            "row_scale",
            lambda t: t[:, :0],
            r"row_scale \(of data with two elements in a byte\) must be \[6 or",
        ),
        (
            "nvfp4",
            "weight",
            lambda t: t[..., :64],
            r"weight \(of data with two elements in a byte\) must be \[5, 256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_operands_of_products_are_named(name, operand, change, text):
    p = problem(name, SPLITS[0], WIDTHS[name][0])
    arguments = [*p.operands, p.blank(BF16)]
    options = {}
    if operand in PLACES:
        position, field = PLACES[operand]
        arguments[position] = arguments[position]._replace(
            **{field: change(getattr(arguments[position], field))}
        )
    elif operand == "row_range":
        arguments[2] = change(arguments[2])
    elif operand == "group_range":
        options[operand] = change(None)
    else:
        options["bias"] = (change(None), None) if operand == "bias" else (None, change(None))
    with pytest.raises(ArgumentError, match=text):
        grouped_gemm_quantized(*arguments, **options)


def product_of(name, widths):
    return product(problem(name, (3,), widths), BF16)


def gradient_of_tokens(scale):
    """The gradient of 120 tokens, with scales of this kind."""
    side = Operand(torch.zeros(64, 120, dtype=E4M3), scale)
    return grouped_gemm_wgrad_quantized(side, side, torch.tensor([0, 3]), torch.zeros(1, 64, 64))


def gradient_of(name, splits, widths, **changes):
    q = wgrad_problem(name, splits, widths)
    vars(q).update(changes)
    return gradient(q, torch.zeros(q.shape))


NARROW = problem("fp8", (3,), (64, 48))
TOKENS = "tokens of dout and rows must be a multiple of 128, got 120"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: product_of("fp8", (64, 40)),
            "contracted features must be a multiple of 16, got 40",
        ),
        (
            lambda: product_of("mxfp8", (64, 48)),
            "contracted features must be a multiple of 32, got 48",
        ),
        (lambda: product_of("fp8", (60, 64)), "features of out must be a multiple of 8, got 60"),
        (lambda: product_of("mxfp8", (60, 64)), "features of out must be a multiple of 8, got 60"),
        (
            lambda: grouped_gemm_quantized(*NARROW.operands, NARROW.blank(BF16)[:, :32]),
            r"out must be \[8, 64\], got \[8, 32\]",
        ),
        (lambda: gradient_of_tokens(torch.ones(1, 64).t()), TOKENS),
        (lambda: gradient_of_tokens(torch.zeros(1, 1, 512, dtype=torch.uint8)), TOKENS),
        (
            lambda: gradient_of("fp8", (9,), (62, 48)),
            "features of dout must be a multiple of 4, got 62",
        ),
        (
            lambda: gradient_of("nvfp4", (3, 4), (64, 64), rows_global_scale=torch.ones(3)),
            r"rows_global_scale .*must be \[2\], got \[3\]",
        ),
    ],
)
def test_widths_that_do_not_fit_are_refused(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


@pytest.mark.parametrize("name", ["dout_scale", "rows_scale"])
def test_scales_of_columns_must_be_block_major(name):
    p = wgrad_problem("fp8", SPLITS[0], WIDTHS["fp8"][1])
    scale = getattr(p, name)
    width, num_blocks = scale.shape
    out = torch.full(p.shape, torch.nan)
    for wrong, text in (
        (scale.contiguous(), rf"{name} .* strides \[1, {width}\], got \[{num_blocks}, 1\]"),
        (
            torch.cat([scale.t()] * 2, 1)[:, :width].t(),
            rf"{name} .* strides \[1, {width}\], got \[1, {2 * width}\]",
        ),
        (scale[:, :-1], rf"{name} must be \[{width}, {num_blocks}\], got"),
        (scale.double(), f"{name} must be of torch.float32, got torch.float64"),
    ):
        setattr(p, name, wrong)
        with pytest.raises(ArgumentError, match=text):
            gradient(p, out)
    assert out.isnan().all()
    setattr(p, name, scale)
    assert relative_error(gradient(p, out), p.expected()) <= 2e-6
    q = wgrad_problem("fp8", (9,), (64, 48), 0, exact=True)  # scales of a single block may be both
    q.dout_scale = q.dout_scale.contiguous()
    q.rows_scale = q.rows_scale.contiguous()
    assert torch.equal(gradient(q, torch.empty(q.shape)).double(), q.expected())
