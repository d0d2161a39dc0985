"""The grouped GEMMs of quantised numbers on a GPU: near float64, exact where sums are, the rows they own only. E4M3
numbers with fp32 scales ("fp8") on Hopper, by its own kernels and by Triton's; MXFP8 and NVFP4 on Blackwell by products
with block scales, on Hopper by 16-bit products of dequantised numbers."""

import functools
import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper or Blackwell GPU", allow_module_level=True)

from biases import check_biases
from gemm_problem import launched_by
from graphs import captured
from quantize_cases import Scattered
from quantized_problem import (
    SENTINEL,
    Numbers,
    Problem,
    WgradProblem,
    check_nan_stays_in_its_row,
    relative_error,
)
from row_ranges import random_ranges, rows_of, whole_groups

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
DTYPES = {"fp8": (BF16, FP16), "mxfp8": (BF16, FP32), "nvfp4": (BF16, FP32)}  # of products
LESS = {"stages": 3, "batch": 4}  # stages, and more memory for fp8's results of two bytes
BF16_ERROR = 2**-8  # half a unit in the last place of the largest value is 2^-9
FP32_ERROR = 2e-3  # tensor cores keep fewer bits than fp32 of what they add: of E4M3 products 14 or so of the largest

names = pytest.mark.parametrize("name", WIDTHS)
all_widths = pytest.mark.parametrize(
    ("name", "widths"), [(n, w) for n, each in WIDTHS.items() for w in each], ids=str
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


@all_widths
def test_products_of_small_numbers_are_exact(widths, name):
    for splits, dtype in itertools.product(SPLITS, DTYPES[name]):
        p = problem(name, splits, widths, exact=True)
        expected = p.expected().to(dtype)
        assert torch.equal(product(p, dtype, kernels=general), expected)
        for options, num_sms in itertools.product(VARIANTS[name], (None, 7, 1)):
            assert torch.equal(product(p, dtype, num_sms=num_sms, **options), expected), (
                splits,
                options,
                num_sms,
            )


BIASED = [*itertools.product(("mxfp8", "nvfp4"), (best,), ((False, BF16), (True, FP32)))]
if HOPPER is not None:
    BIASED += [("fp8", best, way) for way in ((False, BF16), (False, FP16), (True, BF16))]
    BIASED += [("fp8", general, (False, FP32))]


@pytest.mark.parametrize(("name", "kernels", "way"), BIASED, ids=str)
def test_biases_are_added_before_the_one_rounding(name, kernels, way):
    scattered, dtype = way

    def run(p, out, row_range=None, **options):
        p.run(
            kernels,
            out,
            row_range,
            scattered=scattered,
            num_sms=None if scattered else 7,
            **options,
        )

    for splits in SPLITS:
        check_biases(run, problem(name, splits, WIDTHS[name][2], exact=True), (dtype,))


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
@pytest.mark.parametrize("what", ["row_scale", "weight_scale"])
def test_the_oracle_notices_a_scale_of_another_block(what, name):
    p = problem(name, SPLITS[0], WIDTHS[name][0], exact=False)
    expected = p.expected()
    setattr(p, what, getattr(p, what).roll(1, -1))
    assert relative_error(product(p)[: p.num_rows], expected[: p.num_rows]) > 0.05


@pytest.mark.parametrize(
    ("name", "widths"), [(n, w) for n, each in WIDTHS.items() for w in each[:3]], ids=str
)
def test_parts_have_the_bits_of_the_whole(widths, name):
    """Ranges of rows (of E4M3 numbers, what has not come is NaN), and zeros in the tail."""
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = problem(name, splits, widths, exact=False)
        whole, union, scale = product(p), p.blank(BF16), p.row_scale
        for ranges in random_ranges(splits, 3, step=step):
            ranges = ranges.to(DEVICE)
            come = rows_of(ranges, p.capacity)[:, None]
            if name == "fp8":
                p.row_scale = torch.where(come, scale, torch.nan)
            assert torch.equal(
                product(p, row_range=ranges, num_sms=7), torch.where(come, whole, SENTINEL)
            )
            p.run(best, union, ranges)
        assert torch.equal(union, whole)
        whole[p.num_rows :], p.row_scale = 0, scale
        assert torch.equal(product(p, zero_tail=True, num_sms=5), whole)


@all_widths
def test_scattered_matrices_give_the_bits_of_packed_ones(widths, name):
    """Weights and scales, and gradients, at addresses below and above those of the other operands."""
    for splits in SPLITS:
        p, q = (
            problem(name, splits, widths, exact=False, kind=kind)
            for kind in (Problem, WgradProblem)
        )
        for kernels in (best, general):
            found = product(p, kernels=kernels, scattered=True)
            assert torch.equal(found, product(p, kernels=kernels)), (splits, kernels)
        for accumulate in (False, True):
            start = torch.randn(q.shape, device=DEVICE)
            scattered, packed = Scattered(start), start.clone()
            for out in (scattered.table, packed):
                q.run(kernels_of_device(), out, accumulate=accumulate)
            assert torch.equal(scattered.packed(), packed), (splits, accumulate)


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
def test_weight_gradients_of_small_numbers_are_exact(widths, name):
    for splits, dtype in itertools.product(
        SPLITS, (BF16, FP16, FP32) if name == "fp8" else (BF16, FP32)
    ):
        p = problem(name, splits, widths, exact=True, kind=WgradProblem)
        expected = p.expected()
        variants = [*VARIANTS[name], LESS] if name == "fp8" and dtype != FP32 else VARIANTS[name]
        for options, num_sms in itertools.product(variants, (None, 7, 1)):
            assert torch.equal(gradient(p, dtype, num_sms=num_sms, **options), expected.to(dtype))
        for options in VARIANTS[name]:
            added = gradient(p, dtype, accumulate=True, start=3.0, **options)
            assert torch.equal(added, (3.0 + expected).to(dtype))
        out = torch.full(p.shape, torch.nan, dtype=dtype, device=DEVICE)
        p.run(general, out)
        assert torch.equal(out, expected.to(dtype))


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
            assert all(torch.equal(each, same[0]) for each in same)
        if sum(splits):
            p.rows_scale = p.rows_scale.t().roll(1, 1).t()
            assert relative_error(gradient(p), expected) > 0.05


@names
def test_groups_without_tokens_leave_an_accumulated_gradient_alone(name):
    p = problem(name, SPLITS[0], (264, 288), exact=False, kind=WgradProblem)
    out = gradient(p, accumulate=True, start=torch.nan)
    assert out.isnan().all()
    out = gradient(p, accumulate=True, start=-0.0)
    for g, size in enumerate(SPLITS[0]):  # with zeros added it would be 0.0
        assert (torch.signbit(out[g]) & (out[g] == 0)).all() == (size == 0)


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
    p, q = Problem((256,), (256, 65536), numbers), WgradProblem((65536,), (256, 256), numbers, 0)
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
            Operand(*(None if part is None else part.cpu() for part in each)) for each in operands
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
    for mine, other in zip(
        itertools.chain(*operands[:2]), itertools.chain(*q.operands[:2]), strict=True
    ):
        if mine is not None:
            mine.copy_(other)
    p.row_range.copy_(q.row_range)
    out.fill_(SENTINEL)
    graph.replay()
    assert torch.equal(out, q.expected().to(BF16))
