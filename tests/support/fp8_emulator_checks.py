"""Runs the sources of the E4M3 kernels for Hopper in gluon_emulator.py and compares every bit with an oracle. For
test_interpreted.py. Whole numbers with power-of-two scales: the sums are exact."""

from functools import partial

import gluon_emulator
import torch
from biases import check_biases
from quantize_cases import Scattered
from quantized_problem import SENTINEL, Numbers, Problem, WgradProblem
from row_ranges import random_ranges, rows_of

from symmoe.kernels.hopper import gemm
from symmoe.kernels.low_precision import hopper_fp8, hopper_fp8_wgrad
from symmoe.kernels.operands import ScatteredWeight

hopper_fp8.matrix_pointer = gluon_emulator.pointer_in_table
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD, EXACT = (528, 400), (256, 128)  # O, C: parts of tiles and blocks; whole ones
SPLITS = (140, 0, 1, 128, 0)
CASES = [(SPLITS, ODD), (SPLITS, EXACT), ((0, 0, 0), EXACT), ((0, 300, 9), ODD)]


def check_that_the_emulator_runs_kernels_that_hardware_has_run():
    p = Problem(SPLITS, (264, 72), Numbers(exact=True), tail=5)
    rows, weight, out = p.rows.float().bfloat16(), p.weight.float().bfloat16(), p.blank(BF16)
    gemm.launch_gemm(rows, weight, p.row_range, out, weight_k_first=False, num_sms=2)
    expected = p.blank(BF16)
    for g, span in enumerate(p.spans):
        expected[span] = (rows[span].float() @ weight[g].float().T).bfloat16()
    assert torch.equal(out, expected)


def run(p, out, row_range=None, *, scattered=False, num_sms=3, **options):
    rows, weight, groups = p.operands
    if scattered:
        weight, scale = p.scattered
        gluon_emulator.ELSEWHERE[:] = weight.matrices + scale.matrices
        weight = ScatteredWeight(weight.table, scale.table)
    groups = groups if row_range is None else row_range
    hopper_fp8.launch_fp8_gemm(rows, weight, groups, out, num_sms=num_sms, **options)


def check_products(splits, widths):
    p = Problem(splits, widths, Numbers(exact=True))
    expected = p.expected().to(BF16)
    for num_sms, options in ((3, {}), (1, {}), (2, {"stages": 2, "group_m": 1})):
        for scattered in (False, True):
            out = p.blank(BF16)
            run(p, out, scattered=scattered, num_sms=num_sms, **options)
            assert torch.equal(out, expected), (splits, widths, num_sms, options, scattered)


def check_parts_of_products():
    p = Problem(SPLITS, ODD, Numbers(exact=True))
    whole, union, row_scale = p.expected().to(FP16), p.blank(FP16), p.row_scale
    for ranges in random_ranges(SPLITS, 2, step=1):
        out, come = p.blank(FP16), rows_of(ranges, p.capacity)
        p.row_scale = torch.where(come[:, None], row_scale, torch.nan)
        run(p, out, ranges)
        assert torch.equal(
            out, torch.where(come[:, None], whole, torch.tensor(SENTINEL, dtype=FP16))
        )
        run(p, union, ranges, num_sms=2)
    assert torch.equal(union, whole)
    p.row_scale, out, right = row_scale, p.blank(FP16), whole.clone()
    right[p.num_rows :] = 0
    run(p, out, zero_tail=True)
    assert torch.equal(out, right)


def check_gradients(splits, widths):
    p = WgradProblem(splits, widths, Numbers(exact=True))
    expected = p.expected()
    cases = [
        (BF16, False, {}),
        (FP32, False, {}),
        (FP32, True, {"stages": 2}),
        (FP32, True, {"batch": 1}),
        (FP16, True, {}),
        (BF16, False, {"stages": 3, "batch": 4}),
    ]
    for number, (dtype, accumulate, options) in enumerate(cases):
        start = torch.full(p.shape, 3.0 if accumulate else torch.nan, dtype=dtype)
        empty = torch.tensor(splits) == 0
        if accumulate:
            start[empty] = -0.0  # left alone: with zeros added it would be 0.0
        out = start.clone()
        hopper_fp8_wgrad.launch_fp8_wgrad(
            *p.operands, out, accumulate=accumulate, num_sms=1 + number, **options
        )
        right = (expected + (3.0 if accumulate else 0.0)).to(dtype)
        if accumulate:
            right[empty] = 0
            assert torch.signbit(out[empty]).all()
        assert torch.equal(out, right), (splits, widths, dtype, accumulate)
        if dtype == FP32:
            scattered = Scattered(start)
            gluon_emulator.ELSEWHERE[:] = scattered.matrices
            options = {"accumulate": accumulate, "num_sms": 2, **options}
            hopper_fp8_wgrad.launch_fp8_wgrad(*p.operands, scattered.table, **options)
            assert torch.equal(scattered.packed(), right), (splits, widths, accumulate, "table")


def check_that_mistakes_are_noticed():
    """A ring that is said to be free too early; scales of another block, or feature."""
    p, q = (
        Problem((130,), (256, 1024), Numbers(exact=True)),
        WgradProblem((130,), (256, 256), Numbers(exact=True)),
    )
    product, gradient = p.expected().to(BF16), q.expected()

    def check_product():
        out = p.blank(BF16)
        run(p, out, num_sms=1)
        assert torch.equal(out, product)

    def check_gradient():
        out = torch.empty(q.shape)
        hopper_fp8_wgrad.launch_fp8_wgrad(*q.operands, out, num_sms=1)
        assert torch.equal(out.double(), gradient)

    def other_block(scale):
        return scale.t().roll(1, 0).t()

    def other_feature(scale):
        return scale.t().roll(1, 1).t()

    gluon_emulator.check_mistakes(check_product, (p, "row_scale", lambda scale: scale.roll(1, 1)))
    gluon_emulator.check_mistakes(
        check_product, (hopper_fp8, "product", frees_early), errors=(AssertionError, RuntimeError)
    )
    names = ("dout_scale", "rows_scale")
    gluon_emulator.check_mistakes(
        check_gradient,
        *((q, name, other) for name in names for other in (other_block, other_feature)),
    )


def frees_early(product):
    """product, with a first arrival at every stage's barrier before anything has been multiplied."""

    def wrong(scales, ring, *rest):
        for i in range(3):
            gluon_emulator.barrier_arrive(ring[3].index(i))
        return product(scales, ring, *rest)

    return wrong


def checks():
    """Names of what is right."""
    check_that_the_emulator_runs_kernels_that_hardware_has_run()
    for splits, widths in CASES:
        check_products(splits, widths)
        check_gradients(splits, widths)
        yield f"{splits}, {widths}", None
    check_parts_of_products()
    check_biases(run, Problem((140, 0, 1, 9), ODD, Numbers(exact=True)), (BF16, FP16))
    check_biases(
        partial(run, scattered=True), Problem((0, 3, 129), (264, 144), Numbers(exact=True)), (BF16,)
    )
    check_that_mistakes_are_noticed()
