"""The GEMMs, the activations, and the GEMMs that are fused with them, on a GPU: against float64, and each other."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import gemm_problem as problems
from activation_formula import gate_columns
from row_ranges import random_ranges, rows_of, whole_groups

from symmoe.kernels.activation import Activation
from symmoe.kernels.triton import bias, gemm, gemm_act
from symmoe.kernels.triton.tiles import TileConfig

# H, I: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile. Products are of gates and ups.
WIDTHS = [(1024, 768), (1032, 712), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [
    (300, 0, 1, 777, 128, 129, 0),
    (0,) * 7,
    (0, 64, 0, 1000, 0, 0, 9),
    (0, 0, 0, 0, 0, 0, 1500),
]
SWIGLU = Activation()
ACTIVATIONS = {
    "swiglu": SWIGLU,
    "gpt-oss": Activation(alpha=1.702, limit=1.0, offset=1.0, interleave=1),
    "blocks": Activation(interleave=8),
    "srelu": Activation(function="relu2", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh gelu": Activation(function="gelu_tanh", is_gated=False),
}

kernels = problems.triton_kernels()
forward, backward = (
    functools.partial(function, kernels) for function in (problems.forward, problems.backward)
)
dtypes = pytest.mark.parametrize("dtype", problems.DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
halves_and_blocks = pytest.mark.parametrize(
    "activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["blocks"]], ids=["halves", "blocks"]
)


def Problem(splits, widths, dtype, activation=SWIGLU, **options):
    return problems.ActProblem(splits, widths, dtype, activation, device="cuda", **options)


# gather, table, bias, zero_tail
GEMM_CASES = [(False, False, "none", False), (True, True, "scaled", True), (True, False, "bias", False),
              (False, True, "none", True)]  # fmt: skip
DGRAD_CASES = [(False, False), (True, True)]  # table, zero_tail
# gather dout, gather rows, table, accumulate, whether out is fp32
WGRAD_CASES = [(False, False, False, False, False), (True, False, True, True, True), (False, True, True, False, True),
               (False, True, False, True, False), (True, True, False, False, False)]  # fmt: skip
BIAS_CASES = [(False, False, False), (True, True, True)]  # gather, scaled, accumulate


def check_all(p, **options):
    """Every option of every product at least once."""
    for case in GEMM_CASES:
        problems.check_gemm(kernels, p, *case, **options)
    for case in DGRAD_CASES:
        problems.check_dgrad(kernels, p, False, *case, **options)
    for *case, is_fp32 in WGRAD_CASES:
        problems.check_wgrad(kernels, p, *case, torch.float32 if is_fp32 else p.dtype, **options)
    for case in BIAS_CASES:
        problems.check_biases(kernels, p, *case)


@dtypes
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_products_against_float64(widths, dtype):
    for splits in SPLITS:
        check_all(Problem(splits, widths, dtype))


@dtypes
@pytest.mark.parametrize("check", [problems.check_products, problems.check_gradients])
@pytest.mark.parametrize("widths", [WIDTHS[1], (8, 304)], ids=str)
def test_every_combination_of_options_against_float64(widths, check, dtype):
    """Also of one step of the contraction, as those of adapters are."""
    check(kernels, Problem(SPLITS[0], widths, dtype))


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_fused_activations_against_float64(widths, activation, dtype):
    for splits in SPLITS[:3]:
        table = splits == SPLITS[0]
        problems.check_act(
            kernels,
            Problem(splits, widths, dtype, activation),
            table=table,
            cases=itertools.product(problems.BOTH, problems.BOTH),
        )


@dtypes
@activations
def test_elementwise_kernels(activation, dtype):
    for (_, ffn), num_rows in itertools.product(WIDTHS, (0, 1, 8, 1001)):
        problems.check_activation(
            kernels, Problem((num_rows,), (64, ffn), dtype, activation), dscale_dtype=dtype
        )


@activations
def test_nan_goes_through(activation):
    problems.check_nan_goes_through(kernels, activation, "cuda")


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_fused_is_bitwise_the_three_modules(widths, activation, dtype):
    problems.check_fused(kernels, Problem(SPLITS[0], widths, dtype, activation))


@dtypes
@pytest.mark.parametrize("interleave", [1, 2, 4, 8, 16, 32])
def test_interleaved_features_give_the_bits_of_two_halves(interleave, dtype):
    """The same features in another order: a, dscale and (in that order) h, dh and dbias are the same."""
    halves = Activation()
    blocks = Activation(interleave=interleave)
    p = Problem(SPLITS[0], (136, 416), dtype, halves)
    q = Problem(SPLITS[0], (136, 416), dtype, blocks)
    order = torch.cat(gate_columns(p.ffn, interleave, "cuda"))
    for name in ("scale", "weight2"):
        setattr(q, name, getattr(p, name))
    q.weight1[:, order], q.bias[:, order] = p.weight1, p.bias
    rows = p.packed, p.row_index
    h, a = forward(p, rows, bias=p.bias)
    h_q, a_q = forward(q, rows, bias=q.bias)
    dh, a_again, dscale, dbias = backward(p, rows, h)
    dh_q, a_again_q, dscale_q, dbias_q = backward(q, rows, h_q)
    n = p.num_rows
    pairs = ((h, h_q[:, order]), (a, a_q), (dh, dh_q[:, order]), (a_again, a_again_q))
    for tensor, permuted in pairs:
        assert torch.equal(tensor[:n], permuted[:n])
    problems.assert_near(dscale, dscale_q)
    problems.assert_near(dbias, dbias_q[:, order])


# -- tiles ------------------------------------------------------------------------------------------------------------
def test_stages_that_do_not_fit_and_narrow_tiles_change_no_bit():
    """As on GPUs with less shared memory: six stages of 48 KiB are more than any has."""
    rows, weight = (
        torch.randn(size, device="cuda").bfloat16() for size in ((512, 1024), (2, 1536, 1024))
    )
    row_range = torch.tensor([[0, 200], [200, 512]], dtype=torch.int32, device="cuda")
    wide, narrow = (gemm.gemm_config(1536, torch.bfloat16, columns) for columns in (256, 128))
    results = []
    deep, shallow = (replace(wide, num_stages=stages) for stages in (6, 1))
    for config in (None, wide, deep, deep, shallow, narrow):
        results.append(torch.empty(512, 1536, dtype=torch.bfloat16, device="cuda"))
        kernels.grouped_gemm(rows, weight, row_range, results[-1], config=config)
    assert all(torch.equal(result, results[0]) for result in results)


BASE = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "flatten": {"flatten": True},
    "wide": {"block_n": 256},
    "flatten groups": {"flatten": True, "group_m": 16},
    "narrow": {"block_n": 64},
}
FUSED_VARIANTS = {
    "parts 4": {"parts": 4},
    "lead 1": {"parts": 4, "lead": 1, "flatten": True},
    "lead 2": {"parts": 4, "lead": 2},
    "wide": {"block_n": 256, "parts": 8, "lead": 2, "flatten": True},
    "narrow": {"block_m": 64, "block_n": 64, "parts": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant):
    """What a sweep may choose must be right before it is fast."""
    check_all(
        Problem(SPLITS[0], WIDTHS[1], torch.bfloat16),
        config=TileConfig(**{**BASE, **VARIANTS[variant]}),
    )


@halves_and_blocks
@pytest.mark.parametrize("variant", FUSED_VARIANTS)
def test_other_tile_configs_of_fused_activations(variant, activation):
    config = TileConfig(**{**BASE, **FUSED_VARIANTS[variant]})
    act_config = replace(gemm_act.ACT_CONFIG, flatten=config.flatten, parts=config.parts)
    p = Problem(SPLITS[0], WIDTHS[1], torch.bfloat16, activation)
    problems.check_act(
        kernels,
        p,
        {"config": act_config},
        {"config": config},
        cases=itertools.product(problems.BOTH, problems.BOTH),
    )


def test_many_groups():
    """More groups than fit a power of two, most of them without rows."""
    check_all(Problem((3, 0, 0, 130, 0) * 14, WIDTHS[2], torch.bfloat16))


# -- ranges of rows ---------------------------------------------------------------------------------------------------
def calls_of(p):
    """Those by the kernels that the functions choose, and dgrad by Triton's: (function that makes outputs, call)."""
    by_triton = problems.part_calls(kernels, p, config=gemm.gemm_config(p.hidden, p.dtype))["dgrad"]
    return {**problems.part_calls(kernels, p), "dgrad_by_triton": by_triton}


@dtypes
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows(step, dtype):
    for splits in SPLITS:
        p = Problem(splits, WIDTHS[1], dtype)
        for blanks, call in calls_of(p).values():
            problems.check_ranges(p, blanks, call, random_ranges(splits, 3, step=step), num_sms=7)


@dtypes
def test_ranges_of_a_single_group(dtype):
    """Rows in the middle of it, none at the end, and an end far before the begin."""
    p = Problem((500,), WIDTHS[1], dtype)
    for name, (blanks, call) in calls_of(p).items():
        (full,) = outs = blanks()
        call(p.row_range, outs, problems.all_rows(p))
        for begin, end in ((131, 402), (500, 500), (499, 3), (0, 1)):
            ranges = torch.tensor([[begin], [end]], dtype=torch.int32, device="cuda")
            arrived, (out,) = rows_of(ranges, p.capacity), (outs := blanks())
            call(ranges, outs, arrived)
            assert torch.equal(out, torch.where(arrived[:, None], full, problems.SENTINEL)), (
                name,
                begin,
                end,
            )


@dtypes
@halves_and_blocks
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows_of_fused_activations(step, activation, dtype):
    """By the kernels that the functions choose, and by Triton's; with fewer SMs."""
    for splits, widths in ((SPLITS[0], WIDTHS[1]), (SPLITS[2], WIDTHS[0])):
        p = Problem(splits, widths, dtype, activation)
        act_options = {"config": gemm_act.act_config(p.ffn, dtype, activation)}
        configs = {
            "act_options": act_options,
            "dact_options": {"config": gemm_act.dact_config(p.ffn, dtype)},
        }
        parts = random_ranges(splits, 3, step=step)
        problems.check_act_ranges(kernels, p, parts)
        problems.check_act_ranges(kernels, p, parts, gather=True, bias=p.bias, num_sms=7, **configs)


def test_a_forgotten_range_is_seen():
    problems.check_a_forgotten_range(kernels, Problem(SPLITS[0], WIDTHS[0], torch.bfloat16), 3, 100)


# -- what bits do not depend on ---------------------------------------------------------------------------------------
def of_products(p, num_sms=None, *, table=False):
    """Every output of every product, gathered where there is a choice: ({name: rows}, {name: per group})."""
    options = {"num_sms": num_sms}
    weight = problems.Scattered(p.weight) if table else None
    out = p.blank(p.width)
    dx = p.blank(p.hidden)
    dscale = p.blank(dtype=torch.float32)
    operand = weight.table if table else p.weight
    gathered = (p.packed, p.row_index)
    biased = {"bias": (p.bias, p.scale), "zero_tail": True}
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


def of_fused(p, num_sms=None, *, table=False):
    """The same of the functions that are fused with an activation, of gathered and of contiguous rows."""
    scattered = [problems.Scattered(weight) for weight in (p.weight1, p.weight2)] if table else []
    weights = [{"weight": weight.table, "num_sms": num_sms} for weight in scattered] or [
        {"num_sms": num_sms}
    ] * 2
    rows, dbias = {}, {}
    for form, source in (("gathered", (p.packed, p.row_index)), ("contiguous", p.rows)):
        h, rows[f"a {form}"] = forward(p, source, bias=p.bias, **weights[0])
        *gradients, dbias[form] = backward(p, source, h, **weights[1])
        rows |= {
            f"h {form}": h,
            **{f"{n} {form}": gradient for n, gradient in enumerate(gradients)},
        }
    return rows, dbias


RESULTS = {
    "products": (of_products, SWIGLU),
    **{name: (of_fused, activation) for name, activation in ACTIVATIONS.items()},
}
results = pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)


def assert_same_bits(p, first, second):
    """Rows of groups, and what is not rows."""
    for name, tensor in first[0].items():
        assert torch.equal(tensor[: p.num_rows], second[0][name][: p.num_rows]), name
    for name, tensor in first[1].items():
        assert torch.equal(tensor, second[1][name]), name


@dtypes
@results
def test_repeated_runs_other_grids_and_tables_give_the_same_bits(results, dtype):
    run, activation = results
    p = Problem(SPLITS[0], WIDTHS[1], dtype, activation)
    first = run(p)
    for num_sms in (None, None, 100, 1):
        assert_same_bits(p, first, run(p, num_sms))
        assert_same_bits(p, first, run(p, num_sms, table=True))


@dtypes
@results
@pytest.mark.parametrize("before", [1, 63, 128, 500])
def test_an_experts_bits_do_not_depend_on_the_others(before, results, dtype):
    """777 rows of one expert only, and the same rows behind, between and before others."""
    (run, activation), size = results, 777
    single = Problem((size,), WIDTHS[1], dtype, activation)
    among = Problem((before, size, 0, 65), WIDTHS[1], dtype, activation, seed=1)
    span = slice(before, before + size)
    among.row_index[span] = torch.arange(size, dtype=torch.int32, device="cuda")
    single.row_index[:size] = torch.arange(size, dtype=torch.int32, device="cuda")
    shared = single.normal(size, single.hidden)
    for p, rows in ((single, slice(0, size)), (among, span)):
        p.packed = torch.cat([shared, p.packed])
        p.row_index[: p.num_rows] += size
        p.row_index[rows] -= size
    for name in ("rows", "dout", "scale"):
        getattr(among, name)[span] = getattr(single, name)[:size]
    for name in ("weight1", "weight2", "bias"):
        getattr(among, name)[1] = getattr(single, name)[0]
    single_rows, single_groups = run(single)
    for table in problems.BOTH:
        among_rows, among_groups = run(among, table=table)
        for name, tensor in single_rows.items():
            assert torch.equal(tensor[:size], among_rows[name][span]), name
        for name, tensor in single_groups.items():
            assert torch.equal(tensor[0], among_groups[name][1]), name


@dtypes
@results
def test_a_rows_bits_do_not_depend_on_its_place(results, dtype):
    """Reversing the rows of a group reverses the results (gradients of groups, sums over rows, left out)."""
    run, activation = results
    p = Problem((777,), WIDTHS[1], dtype, activation)
    rows, _ = run(p)
    for tensor in (p.row_index, p.rows, p.dout, p.scale):
        tensor[:777] = tensor[:777].flip(0)
    for name, tensor in run(p)[0].items():
        assert torch.equal(tensor[:777].flip(0), rows[name][:777]), name


# -- sizes ------------------------------------------------------------------------------------------------------------
def test_splits():
    problems.check_splits(kernels, "cuda")


def test_no_rows():
    """A capacity of zero: nothing to launch but the zeros of the gradients."""
    p = Problem((0, 0, 0), (64, 96), torch.bfloat16, capacity=0)
    problems.check_gemm(kernels, p, False, False, "none", True)
    problems.check_dgrad(kernels, p, False, False, True)
    for accumulate in problems.BOTH:
        problems.check_wgrad(kernels, p, False, False, True, accumulate, torch.bfloat16)
    problems.check_biases(kernels, p, False, False, False)
    problems.check_act(kernels, p)


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
    gemm.grouped_gemm_dgrad(out, problems.Scattered(weight).table, row_range, again)
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
    dbias = torch.empty(2, width, device="cuda")
    dscale = torch.empty(num_rows + tail, device="cuda")
    bias.grouped_bias_grad(out, row_range, dbias)
    problems.assert_near(dbias[1], group.sum(dim=0))
    bias_of_groups = torch.ones(2, width, dtype=torch.bfloat16, device="cuda")
    bias.grouped_bias_dot(out, bias_of_groups, row_range, dscale)
    error = (dscale[69_000:num_rows].double() - group.sum(dim=1)).abs().max()
    assert error < 1e-4 * group.abs().sum(dim=1).max()
