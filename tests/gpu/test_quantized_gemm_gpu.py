"""The grouped GEMMs of quantised numbers on a GPU: near float64, exact where sums are, the rows they own only. E4M3
numbers with fp32 scales ("fp8") on Hopper, by its own kernels and by Triton's; MXFP8 and NVFP4 on Blackwell by products
with block scales, on Hopper by 16-bit products of dequantised numbers."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper or Blackwell GPU", allow_module_level=True)

from compared_launches import differences
from gemm_problem import launched_by
from graphs import captured
from launch_table import Launch
from quantized_problem import (
    SENTINEL,
    Numbers,
    Problem,
    WgradProblem,
    check_nan_stays_in_its_row,
    relative_error,
)
from row_ranges import random_ranges, whole_groups

from symmoe.kernels import hopper_choice
from symmoe.kernels.low_precision import products
from symmoe.kernels.operands import Operand
from symmoe.kernels.select import for_device
from symmoe.precision import MXFP8, NVFP4, Float8Block

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
HOPPER = hopper_choice.hopper_kernels(torch.device(DEVICE, 0), BF16, 256)

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = pytest.mark.timeout(240, method="thread")

SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
# O, C: whole tiles, blocks and steps; parts of them.
SCALED_WIDTHS = [(512, 1024), (1040, 736), (712, 1056), (264, 96), (384, 128)]
WIDTHS = {
    "fp8": [(512, 1024), (1040, 720), (712, 1040), (264, 48)],
    "mxfp8": SCALED_WIDTHS,
    "nvfp4": SCALED_WIDTHS,
}
if HOPPER is None:
    del WIDTHS["fp8"]
VARIANTS = {"fp8": [{}, {"group_m": 2}], "mxfp8": [{}], "nvfp4": [{}]}
LESS = {"stages": 3, "batch": 4}  # stages, and more memory for fp8's results of two bytes
BF16_ERROR = 2**-8  # half a unit in the last place of the largest value is 2^-9
FP32_ERROR = 2e-3  # tensor cores keep fewer bits than fp32 of what they add: of E4M3 products 14 or so of the largest

names = pytest.mark.parametrize("name", WIDTHS)
all_widths = pytest.mark.parametrize(
    ("name", "widths"), [(n, w) for n, pairs in WIDTHS.items() for w in pairs], ids=str
)
on_hopper = pytest.mark.skipif(
    HOPPER is None, reason="needs Hopper, and a Triton that has the kernels"
)


class general:
    """Triton's kernels."""

    grouped_gemm_quantized = functools.partial(products.grouped_gemm_quantized, block_m=128)
    grouped_gemm_wgrad_quantized = functools.partial(
        products.grouped_gemm_wgrad_quantized, block_m=128
    )


class best:
    """The kernels for Hopper where there are any, with their options."""

    @staticmethod
    def grouped_gemm_quantized(rows, *args, **options):
        is_compact = HOPPER is not None and rows.scale.ndim == 2
        (HOPPER.launch_fp8_gemm if is_compact else products.grouped_gemm_quantized)(
            rows, *args, **options
        )

    @staticmethod
    def grouped_gemm_wgrad_quantized(dout, *args, **options):
        is_compact = HOPPER is not None and dout.scale.ndim == 2
        (HOPPER.launch_fp8_wgrad if is_compact else products.grouped_gemm_wgrad_quantized)(
            dout, *args, **options
        )


def problem(name, splits, widths, *, exact, kind=Problem, seed=0):
    return kind(splits, widths, Numbers(name, exact=exact, seed=seed, device=DEVICE))


def product(p, dtype=BF16, row_range=None, kernels=best, **options):
    out = p.blank(dtype)
    p.run(kernels, out, row_range, **options)
    return out


def gradient(p, dtype=FP32, *, start=torch.nan, **options):
    """There is NaN before and after the result, and stays."""
    size = torch.Size(p.shape).numel()
    around = torch.full((size + 2048,), torch.nan, dtype=dtype, device=DEVICE)
    out = around[1024 : 1024 + size].view(p.shape).fill_(start)
    p.run(best, out, **options)
    assert around[:1024].isnan().all()
    assert around[1024 + size :].isnan().all()
    return out


# Of the contract's kernels, as the device chooses them; of Triton's; and of those for Hopper.
PRODUCT_WAYS = ("", "zero-tail", "scattered", "bias zero-tail", "biased", "biased scattered")
GRADIENT_WAYS = ("", "accumulate", "table", "accumulate table")
OPTIONS = [{}, {"num_sms": 7}, {"num_sms": 1}, {"block_m": 128}]
OF_HOPPER = {"launch_fp8_gemm": [{"group_m": 2}], "launch_fp8_wgrad": [{"group_m": 2}, LESS]}


def launches_of(name, widths, dtypes, hopper=False):
    """Of both kernels in all ways."""
    formats = {"fp8": "float8_block"}
    sizes = dict(zip("WH", widths, strict=True))
    for like, kernel, ways in (
        ("grouped_gemm_quantized", "launch_fp8_gemm", PRODUCT_WAYS),
        ("grouped_gemm_wgrad_quantized", "launch_fp8_wgrad", GRADIENT_WAYS),
    ):
        for dtype, variant in itertools.product(dtypes, ways):
            launched = kernel if hopper else like
            yield like, Launch(launched, sizes, dtype, formats.get(name, name), ways=variant)


@all_widths
def test_bits_are_those_of_the_twin(name, widths):
    for (_, launch), splits in itertools.product(launches_of(name, widths, (BF16, FP32)), SPLITS):
        for tuning in OPTIONS:
            options = {"splits": splits, "tuning": tuning}
            assert differences(launch, products, DEVICE, **options) == []


@on_hopper
@pytest.mark.parametrize("widths", WIDTHS.get("fp8", []), ids=str)
def test_bits_of_kernels_for_hopper_are_those_of_the_twin(widths):
    for (like, launch), splits in itertools.product(
        launches_of("fp8", widths, (BF16, FP16), hopper=True), SPLITS
    ):
        if launch.ways.endswith("table"):
            launch = replace(launch, dtype=FP32)
        for tuning in OF_HOPPER[launch.kernel]:
            if tuning is LESS and launch.dtype == FP32:
                continue  # it does not fit
            assert differences(launch, device=DEVICE, like=like, splits=splits, tuning=tuning) == []


@all_widths
@pytest.mark.parametrize("step", [1, 128])
def test_bits_of_parts_are_those_of_the_twin(name, widths, step):
    """What has not come is NaN."""
    ways = ("", "biased") if name == "fp8" else ("parts", "parts biased")
    formats = {"fp8": "float8_block"}
    sizes = dict(zip("WH", widths, strict=True))
    for splits, variant in itertools.product(SPLITS, ways):
        launch = Launch(
            "grouped_gemm_quantized", sizes, BF16, formats.get(name, name), ways=variant
        )
        for part in random_ranges(splits, 3, step=step):
            options = {"splits": splits, "part": part, "tuning": {"num_sms": 7}}
            assert differences(launch, products, DEVICE, **options) == []


@all_widths
def test_products_are_near_float64(widths, name):
    for splits in SPLITS:
        p = problem(name, splits, widths, exact=False)
        n, expected = p.num_rows, p.expected()
        outs = [product(p, **options) for options in VARIANTS[name]]
        for out in [*outs, product(p, kernels=general)]:
            assert relative_error(out[:n], expected[:n]) <= BF16_ERROR
            assert (out[n:] == SENTINEL).all()
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert relative_error(product(p, FP32, kernels=general)[:n], expected[:n]) <= FP32_ERROR


@names
@pytest.mark.parametrize("scale", ["row_scale", "weight_scale"])
def test_the_oracle_notices_a_scale_of_another_block(scale, name):
    p = problem(name, SPLITS[0], WIDTHS[name][0], exact=False)
    expected = p.expected()
    setattr(p, scale, getattr(p, scale).roll(1, -1))
    assert relative_error(product(p)[: p.num_rows], expected[: p.num_rows]) > 0.05


def kernels_of_device():
    """The public functions."""
    return for_device(torch.device(DEVICE))


@names
def test_nan_stays_in_its_row(name):
    """Tiles begin at a group's first row and read on into the next group."""
    p = problem(name, SPLITS[0], WIDTHS[name][1], exact=False)
    check_nan_stays_in_its_row(p, p.spans[3].start, product)


@names
def test_many_groups(name):
    for num_groups in (1, 33, 256):
        splits = tuple(i % 5 * (i % 7) for i in range(1, num_groups + 1))
        p = problem(name, splits, (264, 160), exact=True)
        assert torch.equal(product(p), p.expected().to(BF16))
        q = problem(name, splits, (72, 264), exact=True, kind=WgradProblem)
        assert torch.equal(gradient(q).double(), q.expected())


@all_widths
def test_weight_gradients_are_near_float64(widths, name):
    for splits in SPLITS:
        p = problem(name, splits, widths, exact=False, kind=WgradProblem)
        expected = p.expected()
        assert relative_error(gradient(p), expected) <= FP32_ERROR
        assert relative_error(gradient(p, BF16), expected) <= BF16_ERROR
        for accumulate, start in ((False, torch.nan), (True, 1.0)):
            same = [
                gradient(p, accumulate=accumulate, start=start, **options)
                for options in VARIANTS[name]
            ]
            assert all(torch.equal(result, same[0]) for result in same)
        if sum(splits):
            p.rows_scale = p.rows_scale.t().roll(1, 1).t()
            assert relative_error(gradient(p), expected) > 0.05


@on_hopper
def test_nan_stays_in_its_group():
    p = problem("fp8", SPLITS[0], (264, 272), exact=False, kind=WgradProblem)
    clean = gradient(p)
    for g, span in enumerate(p.spans):
        if span.start == span.stop:
            continue
        q = problem("fp8", SPLITS[0], (264, 272), exact=False, kind=WgradProblem)
        q.dout.view(torch.uint8)[:, span] = 0x7F
        dirty = gradient(q)
        assert dirty[g].isnan().all()
        dirty[g] = clean[g]
        assert torch.equal(dirty, clean)


@on_hopper
def test_a_long_sum_does_not_lose_what_the_tensor_core_would():
    """With every block's sum added in fp32, 65536 terms of one sign are as near as 128 of them."""
    numbers = Numbers(exact=False, device=DEVICE)
    p = Problem((256,), (256, 65536), numbers)
    q = WgradProblem((65536,), (256, 256), numbers, 0)
    for data in (p.rows[: p.num_rows], p.weight, q.dout, q.rows):
        data.copy_((torch.rand(data.shape, device=DEVICE) + 1).to(data.dtype))
    for scale in (p.row_scale[: p.num_rows], p.weight_scale, q.dout_scale, q.rows_scale):
        scale.fill_(1.0)
    assert relative_error(product(p, FP32, kernels=general)[:256], p.expected()[:256]) <= FP32_ERROR
    assert relative_error(gradient(q), q.expected()) <= FP32_ERROR


@on_hopper
def test_more_than_two_to_the_31_elements():
    """Results of that many, and operands; the last rows are right."""
    splits = (1_400_000, 55_555)
    numbers = Numbers(exact=True, device=DEVICE)
    p = Problem((9, 8), (1536, 256), numbers)
    rows = p.rows[:1].expand(sum(splits), 256).contiguous()
    scale = torch.ones(sum(splits), 2, device=DEVICE)
    out = torch.full((sum(splits), 1536), SENTINEL, dtype=BF16, device=DEVICE)
    groups = whole_groups(splits, device=DEVICE)
    best.grouped_gemm_quantized(
        Operand(rows, scale), Operand(p.weight, p.weight_scale), groups, out
    )
    small = Problem((1, 1), (1536, 256), numbers)
    small.rows[:2], small.weight, small.weight_scale = p.rows[:1], p.weight, p.weight_scale
    small.row_scale[:2] = 1.0
    right = small.expected().to(BF16)
    assert torch.equal(out[: splits[0]], right[0].expand(splits[0], -1))
    assert torch.equal(out[splits[0] :], right[1].expand(splits[1], -1))


@on_hopper
def test_public_functions_choose_the_kernels_for_hopper(monkeypatch):
    called = launched_by(monkeypatch, HOPPER, "grouped_gemm_fp8", "grouped_gemm_wgrad_fp8")
    p, q = (
        problem("fp8", SPLITS[0], (512, 256), exact=True, kind=kind)
        for kind in (Problem, WgradProblem)
    )
    assert torch.equal(product(p, kernels=kernels_of_device()), p.expected().to(BF16))
    out = torch.zeros(q.shape, device=DEVICE)
    q.run(kernels_of_device(), out, accumulate=True)
    assert torch.equal(out.double(), q.expected())
    assert called == ["grouped_gemm_fp8", "grouped_gemm_wgrad_fp8"]


@pytest.mark.parametrize(
    "recipe", [MXFP8(), NVFP4(), *[Float8Block()] * (HOPPER is not None)], ids=str
)
def test_what_recipes_make(recipe):
    """The bytes of the quantisers of GPUs and their tiles of scales, against the twin with the same operands."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    row_range = whole_groups((500, 0, 401), device=DEVICE)
    rows, dout = (
        torch.randn(901, width, generator=generator, dtype=BF16, device=DEVICE)
        for width in (1056, 704)
    )
    weight = torch.randn(3, dout.shape[1], 1056, generator=generator, dtype=BF16, device=DEVICE)
    twin = for_device(torch.device("cpu"))

    def both(name, left, right, out):
        operands = left.operand(), right.operand()
        getattr(products, name)(*operands, row_range, out)
        expected = torch.empty_like(out, device="cpu")
        on_cpu = (
            Operand(*(None if part is None else part.cpu() for part in operand))
            for operand in operands
        )
        getattr(twin, name)(*on_cpu, row_range.cpu(), expected)
        assert relative_error(out.cpu(), expected.double()) <= FP32_ERROR

    forward = recipe.quantize(rows, row_range), recipe.quantize_weight(weight)
    both("grouped_gemm_quantized", *forward, torch.empty(901, dout.shape[1], device=DEVICE))
    dgrad = recipe.quantize(dout, row_range), recipe.quantize_weight_transposed(weight)
    both("grouped_gemm_quantized", *dgrad, torch.empty(901, 1056, device=DEVICE))
    columns = recipe.quantize_columns(dout, row_range), recipe.quantize_columns(rows, row_range)
    both("grouped_gemm_wgrad_quantized", *columns, torch.empty(weight.shape, device=DEVICE))


@names
def test_a_call_in_a_graph_reads_bounds_on_the_device(name):
    """Replayed with other rows and bounds."""
    p = problem(name, SPLITS[0], WIDTHS[name][2], exact=True)
    operands, out = p.operands, p.blank(BF16)
    graph, _ = captured(lambda: best.grouped_gemm_quantized(*operands, out))
    q = problem(name, (1, 500, 300, 0, 20, 0, 514), WIDTHS[name][2], exact=True, seed=1)
    assert q.capacity == p.capacity
    for captured_tensor, new_tensor in zip(
        itertools.chain(*operands[:2]), itertools.chain(*q.operands[:2]), strict=True
    ):
        if captured_tensor is not None:
            captured_tensor.copy_(new_tensor)
    p.row_range.copy_(q.row_range)
    out.fill_(SENTINEL)
    graph.replay()
    assert torch.equal(out, q.expected().to(BF16))
