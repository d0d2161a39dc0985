"""The grouped GEMMs of E4M3 numbers on Hopper: exact where sums are, near float64 elsewhere, the rows they own only."""

import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from biases import check_biases
from fp8_problem import SENTINEL, Numbers, Problem, WgradProblem, relative_error
from quantize_cases import Scattered
from row_ranges import random_ranges, rows_of, whole_groups

from symmoe.kernels import hopper_choice
from symmoe.kernels.low_precision import fp8

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
if hopper_choice.hopper_kernels(torch.device("cuda", 0), BF16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

from symmoe.kernels.hopper import launchers  # noqa: E402

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40, method="thread")]

SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
WIDTHS = [(512, 1024), (1040, 720), (712, 1040), (264, 48)]  # O, C: whole tiles and blocks; parts of them
VARIANTS = [{}, {"group_m": 2}]
LESS = {"stages": 3, "batch": 4}  # stages, and more memory for results of two bytes
BF16_ERROR = 2**-8  # half a unit in the last place of the largest value is 2^-9
# Of sums in fp32: WGMMA adds E4M3 products with 14 bits or so, of the largest of them.
FP32_ERROR = 2e-3


def problem(kind, splits, widths, *, exact, seed=0):
    return kind(splits, widths, Numbers(exact=exact, seed=seed, device="cuda"))


def on_hopper(p, dtype=BF16, num_sms=None, **options):
    """By the kernel for Hopper."""
    out = p.blank(dtype)
    launchers.launch_fp8_gemm(*p.operands, out, num_sms=num_sms, **options)
    return out


def general(p, dtype=BF16):
    """By Triton's kernel."""
    out = p.blank(dtype)
    fp8.grouped_gemm_fp8(*p.operands, out, config=fp8.CONFIG)
    return out


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_products_of_whole_numbers_are_exact(widths, dtype):
    for splits in SPLITS:
        p = problem(Problem, splits, widths, exact=True)
        expected = p.expected().to(dtype)
        assert torch.equal(general(p, dtype), expected)
        for options, num_sms in itertools.product(VARIANTS, (None, 7, 1)):
            assert torch.equal(on_hopper(p, dtype, num_sms, **options), expected), (splits, options, num_sms)


def packed(p, out, row_range=None, **options):
    """By the kernel for Hopper."""
    *operands, groups = p.operands
    launchers.launch_fp8_gemm(*operands, groups if row_range is None else row_range, out, num_sms=7, **options)


def scattered(p, out, row_range=None, **options):
    """By the kernel for Hopper, with tables of weights."""
    weight, scale = Scattered(p.weight), Scattered(p.weight_scale)
    ranges = p.row_range if row_range is None else row_range
    launchers.launch_fp8_gemm(p.rows, p.row_scale, weight.table, scale.table, ranges, out, **options)


def by_triton(p, out, row_range=None, **options):
    """By Triton's kernel."""
    *operands, groups = p.operands
    ranges = groups if row_range is None else row_range
    fp8.grouped_gemm_fp8(*operands, ranges, out, config=fp8.CONFIG, **options)


@pytest.mark.timeout(120, method="thread")  # of every kernel there are eight variants
@pytest.mark.parametrize(("run", "dtype"), [(packed, BF16), (packed, FP16), (scattered, BF16), (by_triton, FP32)])
def test_biases_are_added_before_the_one_rounding(run, dtype):
    for splits in SPLITS:
        check_biases(run, problem(Problem, splits, WIDTHS[2], exact=True), (dtype,))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_products_are_near_float64(widths):
    for splits in SPLITS:
        p = problem(Problem, splits, widths, exact=False)
        n, expected = p.num_rows, p.expected()
        outs = [on_hopper(p, **options) for options in VARIANTS]
        for out in [*outs, general(p)]:
            assert relative_error(out[:n], expected[:n]) <= BF16_ERROR
            assert (out[n:] == SENTINEL).all()
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert relative_error(general(p, FP32)[:n], expected[:n]) <= FP32_ERROR


@pytest.mark.parametrize("what", ["row_scale", "weight_scale"])
def test_the_oracle_notices_a_scale_of_another_block(what):
    p = problem(Problem, SPLITS[0], WIDTHS[0], exact=False)
    expected = p.expected()
    setattr(p, what, getattr(p, what).roll(1, -1))
    assert relative_error(on_hopper(p)[: p.num_rows], expected[: p.num_rows]) > 0.05


def test_the_input_gradient():
    """The product with the transposed weight, against the product in float64 with the weight as it is."""
    p = problem(Problem, SPLITS[0], (528, 656), exact=True)
    q = problem(Problem, SPLITS[0], (656, 528), exact=True, seed=1)
    q.weight, q.weight_scale = p.transposed_weight()
    assert torch.equal(on_hopper(q), q.expected().to(BF16))


@pytest.mark.parametrize("widths", WIDTHS[:3], ids=str)
def test_parts_have_the_bits_of_the_whole(widths):
    """Ranges of rows (what has not come is NaN), and zeros in the tail."""
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = problem(Problem, splits, widths, exact=False)
        whole, union = on_hopper(p), p.blank(BF16)
        for ranges in random_ranges(splits, 3, step=step):
            ranges, out = ranges.cuda(), p.blank(BF16)
            come = rows_of(ranges, p.capacity)
            scale = torch.where(come[:, None], p.row_scale, torch.nan)
            operands = (p.rows, scale, p.weight, p.weight_scale, ranges)
            launchers.launch_fp8_gemm(*operands, out, num_sms=7)
            assert torch.equal(out, torch.where(come[:, None], whole, SENTINEL))
            launchers.launch_fp8_gemm(*operands, union)
        assert torch.equal(union, whole)
        out, whole[p.num_rows :] = p.blank(BF16), 0
        launchers.launch_fp8_gemm(*p.operands, out, zero_tail=True, num_sms=5)
        assert torch.equal(out, whole)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_scattered_matrices_give_the_bits_of_packed_ones(widths):
    """Weights and scales, and gradients, at addresses below and above those of the other operands."""
    for splits in SPLITS:
        p, q = problem(Problem, splits, widths, exact=False), problem(WgradProblem, splits, widths, exact=False)
        weight, scale = Scattered(p.weight), Scattered(p.weight_scale)
        operands = p.rows, p.row_scale, weight.table, scale.table, p.row_range
        for run, options in ((launchers.launch_fp8_gemm, {}), (fp8.grouped_gemm_fp8, {"config": fp8.CONFIG})):
            packed, found = p.blank(BF16), p.blank(BF16)
            run(*p.operands, packed, **options)
            run(*operands, found, **options)
            assert torch.equal(found, packed), (splits, options)
        for accumulate in (False, True):
            start = torch.randn(q.shape, device="cuda")
            scattered, packed = Scattered(start), start.clone()
            for out in (scattered.table, packed):
                fp8.grouped_gemm_wgrad_fp8(*q.operands, out, accumulate=accumulate)
            assert torch.equal(scattered.packed(), packed), (splits, accumulate)


def test_nan_stays_in_its_row():
    """Tiles begin at a group's first row and read on into the next group."""
    p = problem(Problem, SPLITS[0], WIDTHS[1], exact=False)
    clean = on_hopper(p)
    row = p.spans[3].start
    p.rows.view(torch.uint8)[row, 3] = 0x7F
    dirty = on_hopper(p)
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert torch.equal(dirty, clean)


def test_many_groups():
    for num_groups in (1, 33, 256):
        splits = tuple(i % 5 * (i % 7) for i in range(1, num_groups + 1))
        p = problem(Problem, splits, (264, 144), exact=True)
        assert torch.equal(on_hopper(p), p.expected().to(BF16))
        q = problem(WgradProblem, splits, (72, 264), exact=True)
        assert torch.equal(gradient(q).double(), q.expected())


def gradient(p, dtype=FP32, *, accumulate=False, start=torch.nan, num_sms=None, **options):
    """By the kernel for Hopper; there is NaN before and after the result, and stays."""
    size = torch.Size(p.shape).numel()
    around = torch.full((size + 2048,), torch.nan, dtype=dtype, device="cuda")
    out = around[1024 : 1024 + size].view(p.shape).fill_(start)
    launchers.launch_fp8_wgrad(*p.operands, out, accumulate=accumulate, num_sms=num_sms, **options)
    assert around[:1024].isnan().all()
    assert around[1024 + size :].isnan().all()
    return out


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_weight_gradients_of_whole_numbers_are_exact(widths, dtype):
    for splits in SPLITS:
        p = problem(WgradProblem, splits, widths, exact=True)
        expected = p.expected()
        variants = VARIANTS if dtype == FP32 else [*VARIANTS, LESS]
        for options, num_sms in itertools.product(variants, (None, 7, 1)):
            assert torch.equal(gradient(p, dtype, num_sms=num_sms, **options), expected.to(dtype))
        for options in VARIANTS:
            added = gradient(p, dtype, accumulate=True, start=3.0, **options)
            assert torch.equal(added, (3.0 + expected).to(dtype))
        out = torch.full(p.shape, torch.nan, dtype=dtype, device="cuda")
        fp8.grouped_gemm_wgrad_fp8(*p.operands, out, config=fp8.CONFIG)
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_weight_gradients_are_near_float64(widths):
    for splits in SPLITS:
        p = problem(WgradProblem, splits, widths, exact=False)
        expected = p.expected()
        assert relative_error(gradient(p), expected) <= FP32_ERROR
        assert relative_error(gradient(p, BF16), expected) <= BF16_ERROR
        for accumulate in (False, True):
            start = 1.0 if accumulate else torch.nan
            same = [gradient(p, accumulate=accumulate, start=start, **options) for options in VARIANTS]
            assert all(torch.equal(each, same[0]) for each in same)
        if sum(splits):
            p.rows_scale = p.rows_scale.t().roll(1, 1).t()
            assert relative_error(gradient(p), expected) > 0.05


def test_groups_without_tokens_leave_an_accumulated_gradient_alone():
    p = problem(WgradProblem, SPLITS[0], (264, 272), exact=False)
    out = gradient(p, accumulate=True, start=torch.nan)
    assert out.isnan().all()
    out = gradient(p, accumulate=True, start=-0.0)
    for g, size in enumerate(SPLITS[0]):  # with zeros added it would be 0.0
        assert (torch.signbit(out[g]) & (out[g] == 0)).all() == (size == 0)


def test_nan_stays_in_its_group():
    p = problem(WgradProblem, SPLITS[0], (264, 272), exact=False)
    clean = gradient(p)
    for g, span in enumerate(p.spans):
        if span.start == span.stop:
            continue
        q = problem(WgradProblem, SPLITS[0], (264, 272), exact=False)
        q.dout.view(torch.uint8)[:, span] = 0x7F
        dirty = gradient(q)
        assert dirty[g].isnan().all()
        dirty[g] = clean[g]
        assert torch.equal(dirty, clean)


def test_calls_repeat():
    """A launch that skips the JIT, and rows whose bounds and number change between calls."""
    for splits in SPLITS * 3:
        p = problem(Problem, splits, (520, 272), exact=True)
        assert torch.equal(on_hopper(p), p.expected().to(BF16))
        q = problem(WgradProblem, splits, (264, 272), exact=True)
        assert torch.equal(gradient(q).double(), q.expected())


def test_a_long_sum_does_not_lose_what_the_tensor_core_would():
    """With every block's sum added in fp32, 65536 terms of one sign are as near as 128 of them."""
    numbers = Numbers(exact=False, device="cuda")
    p = Problem((256,), (256, 65536), numbers)
    for data in (p.rows[: p.num_rows], p.weight):
        data.copy_((torch.rand(data.shape, device="cuda") + 1).to(data.dtype))
    p.row_scale.fill_(1.0)
    p.weight_scale.fill_(1.0)
    p.row_scale[p.num_rows :] = torch.nan
    assert relative_error(general(p, FP32)[:256], p.expected()[:256]) <= FP32_ERROR
    q = WgradProblem((65536,), (256, 256), numbers, tail_blocks=0)
    for data, scale in ((q.dout, q.dout_scale), (q.rows, q.rows_scale)):
        data.copy_((torch.rand(data.shape, device="cuda") + 1).to(data.dtype))
        scale.fill_(1.0)
    assert relative_error(gradient(q), q.expected()) <= FP32_ERROR


def test_more_than_two_to_the_31_elements():
    """Results of that many, and operands; the last rows are right."""
    splits = (1_400_000, 55_555)
    numbers = Numbers(exact=True, device="cuda")
    p = Problem((9, 8), (1536, 256), numbers)
    rows = p.rows[:1].expand(sum(splits), 256).contiguous()
    scale = torch.ones(sum(splits), 2, device="cuda")
    row_range = whole_groups(splits, device="cuda")
    out = torch.full((sum(splits), 1536), SENTINEL, dtype=BF16, device="cuda")
    launchers.launch_fp8_gemm(rows, scale, p.weight, p.weight_scale, row_range, out)
    small = Problem((1, 1), (1536, 256), numbers)
    small.rows[:2], small.weight, small.weight_scale = p.rows[:1], p.weight, p.weight_scale
    small.row_scale[:2] = 1.0
    right = small.expected().to(BF16)
    assert torch.equal(out[: splits[0]], right[0].expand(splits[0], -1))
    assert torch.equal(out[splits[0] :], right[1].expand(splits[1], -1))


def test_public_functions_choose_these_kernels(monkeypatch):
    called = []
    for name in ("launch_fp8_gemm", "launch_fp8_wgrad"):
        kernel = getattr(launchers, name)

        def recorded(*args, _kernel=kernel, _name=name, **options):
            called.append(_name)
            return _kernel(*args, **options)

        monkeypatch.setattr(launchers, name, recorded)
    p = problem(Problem, SPLITS[0], (512, 256), exact=True)
    out = p.blank(BF16)
    fp8.grouped_gemm_fp8(*p.operands, out)
    assert torch.equal(out, p.expected().to(BF16))
    q = problem(WgradProblem, SPLITS[0], (256, 512), exact=True)
    gradient_out = torch.zeros(q.shape, device="cuda")
    fp8.grouped_gemm_wgrad_fp8(*q.operands, gradient_out, accumulate=True)
    assert torch.equal(gradient_out.double(), q.expected())
    assert called == ["launch_fp8_gemm", "launch_fp8_wgrad"]
