"""The GEMM kernels on a GPU against float64."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import gemm_problem
from gemm_problem import (
    BIASES,
    BOTH,
    SENTINEL,
    Scattered,
    all_rows,
    assert_near,
    check_biases,
    check_dgrad,
    check_gemm,
    check_ranges,
    check_splits,
    check_wgrad,
    part_calls,
)
from row_ranges import random_ranges, rows_of, whole_groups

from symmoe.kernels.triton import bias, gemm, tiles

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# H, O: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile.
WIDTHS = [(1024, 1536), (1032, 1424), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9), (0, 0, 0, 0, 0, 0, 1500)]

Problem = functools.partial(gemm_problem.Problem, device="cuda")
kernels = gemm_problem.triton_kernels()
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# gather, table, bias, zero_tail
GEMM_CASES = [(False, False, "none", False), (True, True, "scaled", True), (True, False, "bias", False),
              (False, True, "none", True)]  # fmt: skip
DGRAD_CASES = [(False, False), (True, True)]  # table, zero_tail
# gather dout, gather rows, table, accumulate, whether out is fp32
WGRAD_CASES = [(False, False, False, False, False), (True, False, True, True, True), (False, True, True, False, True),
               (False, True, False, True, False), (True, True, False, False, False)]  # fmt: skip
BIAS_CASES = [(False, False, False), (True, True, True)]  # gather, scaled, accumulate


def check_all(p, **options):
    """Every option of every function at least once."""
    for case in GEMM_CASES:
        check_gemm(kernels, p, *case, **options)
    for case in DGRAD_CASES:
        check_dgrad(kernels, p, False, *case, **options)
    for *case, is_fp32 in WGRAD_CASES:
        check_wgrad(kernels, p, *case, torch.float32 if is_fp32 else p.dtype, **options)


@of_every_dtype
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64(widths, dtype):
    for splits in SPLITS:
        p = Problem(splits, widths, dtype)
        check_all(p)
        for case in BIAS_CASES:
            check_biases(kernels, p, *case)


@of_every_dtype
def test_every_combination_of_options(dtype):
    """The products that the lists above leave out, on widths that nothing divides."""
    p = Problem(SPLITS[0], WIDTHS[1], dtype)
    for gather, biased, zero_tail in itertools.product(BOTH, BIASES, BOTH):
        check_gemm(kernels, p, gather, True, biased, zero_tail)
    for zero_tail in BOTH:
        check_dgrad(kernels, p, False, True, zero_tail)
    for gathers, accumulate in itertools.product(itertools.product(BOTH, BOTH), BOTH):
        for out_dtype in {p.dtype, torch.float32}:
            check_wgrad(kernels, p, *gathers, True, accumulate, out_dtype)
    for case in itertools.product(BOTH, BOTH, BOTH):
        check_biases(kernels, p, *case)


def test_stages_that_do_not_fit_and_narrow_tiles_change_no_bit():
    """As on GPUs with less shared memory: six stages of 48 KiB are more than any has."""
    rows, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((512, 1024), (2, 1536, 1024)))
    row_range = torch.tensor([[0, 200], [200, 512]], dtype=torch.int32, device="cuda")
    wide, narrow = (gemm.gemm_config(1536, torch.bfloat16, columns) for columns in (256, 128))
    results = []
    deep, shallow = (replace(wide, num_stages=stages) for stages in (6, 1))
    for config in (None, wide, deep, deep, shallow, narrow):
        results.append(torch.empty(512, 1536, dtype=torch.bfloat16, device="cuda"))
        kernels.grouped_gemm(rows, weight, row_range, results[-1], config=config)
    assert all(torch.equal(result, results[0]) for result in results)


def calls_of(p):
    """Those by the kernels that the functions choose, and dgrad by Triton's: (width of the output, call)."""
    by_triton = part_calls(kernels, p, config=gemm.gemm_config(p.hidden, p.dtype))["dgrad"]
    return {**part_calls(kernels, p), "dgrad_by_triton": by_triton}


@of_every_dtype
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows(step, dtype):
    for splits in SPLITS:
        p = Problem(splits, WIDTHS[1], dtype)
        for width, call in calls_of(p).values():
            check_ranges(p, width, call, random_ranges(splits, 3, step=step), num_sms=7)


@of_every_dtype
def test_ranges_of_a_single_group(dtype):
    """Rows in the middle of it, none at the end, and an end far before the begin."""
    p = Problem((500,), WIDTHS[1], dtype)
    for name, (width, call) in calls_of(p).items():
        whole = p.blank(width)
        call(p.row_range, whole, all_rows(p))
        for begin, end in ((131, 402), (500, 500), (499, 3), (0, 1)):
            ranges = torch.tensor([[begin], [end]], dtype=torch.int32, device="cuda")
            come, out = rows_of(ranges, p.capacity), p.blank(width)
            call(ranges, out, come)
            assert torch.equal(out, torch.where(come[:, None], whole, SENTINEL)), (name, begin, end)


BASE = {"block_m": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "flatten": {"flatten": True, "block_n": 128},
    "wide": {"block_n": 256},
    "flatten groups": {"flatten": True, "block_n": 128, "group_m": 16},
    "narrow": {"block_n": 64},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant):
    """What a sweep may choose must be right before it is fast."""
    check_all(Problem(SPLITS[0], WIDTHS[1], torch.bfloat16), config=tiles.TileConfig(**BASE, **VARIANTS[variant]))


def test_many_groups():
    """More groups than fit a power of two, most of them without rows."""
    p = Problem((3, 0, 0, 130, 0) * 14, (64, 48), torch.bfloat16)
    check_all(p)
    for case in BIAS_CASES:
        check_biases(kernels, p, *case)


def all_results(p, num_sms=None, *, table=False):
    """Every output of every function, gathered where there is a choice: ({name: rows}, {name: per group})."""
    options = {"num_sms": num_sms}
    weight = Scattered(p.weight) if table else None
    out, dx, dscale = p.blank(p.width), p.blank(p.hidden), p.blank(dtype=torch.float32)
    operand = weight.table if table else p.weight
    gathered, biased = (p.packed, p.row_index), {"bias": (p.bias, p.scale), "zero_tail": True}
    gemm.grouped_gemm(gathered, operand, p.row_range, out, **biased, **options)
    gemm.grouped_gemm_dgrad(p.dout, operand, p.row_range, dx, **options)
    dw = torch.full_like(p.weight, 0.5)
    gemm.grouped_gemm_wgrad(p.dout, gathered, p.row_range, dw, accumulate=True, **options)
    dw_fp32 = torch.empty_like(p.weight, dtype=torch.float32)
    gemm.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, dw_fp32, **options)
    dbias = torch.empty_like(p.bias)
    bias.grouped_bias_grad(p.dout, p.row_range, dbias, scale=p.scale)
    bias.grouped_bias_dot(p.dout, p.bias, p.row_range, dscale)
    return {"out": out, "dx": dx, "dscale": dscale}, {"dw": dw, "dw_fp32": dw_fp32, "dbias": dbias}


def assert_same_bits(left, right):
    for tensors, others in zip(left, right, strict=True):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), name


@of_every_dtype
def test_repeated_runs_other_grids_and_tables_give_the_same_bits(dtype):
    p = Problem(SPLITS[0], WIDTHS[1], dtype)
    first = all_results(p)
    for num_sms in (None, None, 100, 1):
        assert_same_bits(first, all_results(p, num_sms))
        assert_same_bits(first, all_results(p, num_sms, table=True))


@of_every_dtype
@pytest.mark.parametrize("before", [1, 63, 128, 500])
def test_an_experts_bits_do_not_depend_on_the_others(before, dtype):
    """777 rows alone, and the same rows behind, between and before others."""
    size = 777
    alone = Problem((size,), WIDTHS[1], dtype)
    among = Problem((before, size, 0, 65), WIDTHS[1], dtype, seed=1)
    span = slice(before, before + size)
    among.row_index[span] = torch.arange(size, dtype=torch.int32, device="cuda")
    alone.row_index[:size] = torch.arange(size, dtype=torch.int32, device="cuda")
    shared = alone.normal(size, alone.hidden)
    for p, rows in ((alone, slice(0, size)), (among, span)):
        p.packed = torch.cat([shared, p.packed])
        p.row_index[: p.num_rows] += size
        p.row_index[rows] -= size
    for name in ("rows", "dout", "scale"):
        getattr(among, name)[span] = getattr(alone, name)[:size]
    among.weight[1], among.bias[1] = alone.weight[0], alone.bias[0]
    alone_rows, alone_groups = all_results(alone)
    for table in (False, True):
        among_rows, among_groups = all_results(among, table=table)
        for name, tensor in alone_rows.items():
            assert torch.equal(tensor[:size], among_rows[name][span]), name
        for name, tensor in alone_groups.items():
            assert torch.equal(tensor[0], among_groups[name][1]), name


@of_every_dtype
def test_a_rows_bits_do_not_depend_on_its_place(dtype):
    """Reversing the rows of a group reverses the results (gradients of groups, sums over rows, left out)."""
    p = Problem((777,), WIDTHS[1], dtype)
    rows, _ = all_results(p)
    for tensor in (p.row_index, p.dout, p.scale):
        tensor[:777] = tensor[:777].flip(0)
    for name, tensor in all_results(p)[0].items():
        assert torch.equal(tensor[:777].flip(0), rows[name][:777]), name


def test_splits():
    check_splits(kernels, "cuda")


def test_no_rows():
    """A capacity of zero: nothing to launch but the zeros of the gradients."""
    p = Problem((0, 0, 0), (64, 192), torch.bfloat16, capacity=0)
    check_gemm(kernels, p, False, False, "none", True)
    check_dgrad(kernels, p, False, False, True)
    for accumulate in BOTH:
        check_wgrad(kernels, p, False, False, True, accumulate, torch.bfloat16)
    check_biases(kernels, p, False, False, False)


def test_offsets_beyond_32_bits():
    """Outputs of more than 2^31 elements: the last rows, which a 32-bit offset would miss."""
    num_rows, width, inner, tail = 70_000, 32_768, 64, 100
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(num_rows + tail, inner, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(2, width, inner, device="cuda", generator=generator).bfloat16()
    row_range = whole_groups((69_000, num_rows - 69_000), device="cuda")
    out = torch.full((num_rows + tail, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    gemm.grouped_gemm(rows, weight, row_range, out, zero_tail=True)
    last = slice(num_rows - 500, num_rows)
    expected = rows[last].float() @ weight[1].float().t()
    torch.testing.assert_close(out[last].float(), expected, rtol=1e-2, atol=5e-2)
    assert not out[num_rows:].any()
    # The same rows read by a gather and by the transposed products.
    index = torch.arange(num_rows + tail, dtype=torch.int32, device="cuda")
    narrow = torch.empty(num_rows + tail, inner, dtype=torch.bfloat16, device="cuda")
    weight_t = weight.transpose(1, 2).contiguous()
    gemm.grouped_gemm((out, index), weight_t, row_range, narrow)
    again = torch.empty_like(narrow)
    gemm.grouped_gemm_dgrad(out, Scattered(weight).table, row_range, again)
    expected = out[last].double() @ weight[1].double()
    for got in (narrow, again):
        error = (got[last].double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
    group = out[69_000:num_rows].double()
    expected = group.t() @ rows[69_000:num_rows].double()
    for dout_index in (index, None):
        dw = torch.empty_like(weight)
        gemm.grouped_gemm_wgrad((out, dout_index), rows, row_range, dw)
        assert (dw[1].double() - expected).abs().max() / expected.abs().max() < 1e-2
    dbias, dscale = torch.empty(2, width, device="cuda"), torch.empty(num_rows + tail, device="cuda")
    bias.grouped_bias_grad(out, row_range, dbias)
    assert_near(dbias[1], group.sum(dim=0))
    bias_of_groups = torch.ones(2, width, dtype=torch.bfloat16, device="cuda")
    bias.grouped_bias_dot(out, bias_of_groups, row_range, dscale)
    error = (dscale[69_000:num_rows].double() - group.sum(dim=1)).abs().max()
    assert error < 1e-4 * group.abs().sum(dim=1).max()
