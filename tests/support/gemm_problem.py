"""Operands of the grouped GEMMs and of those fused with activations, oracles in float64, and what all kernels must do.
`kernels` is a namespace of kernels: the twins, or Triton's, in the interpreter or on a GPU."""

from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from activation_formula import formula, scaled
from quantize_cases import Scattered
from row_ranges import rows_of, spans_of, whole_groups

from symmoe.kernels import twin
from symmoe.kernels.activation import Activation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENTINEL = -77.0
TAIL = 37
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}  # one rounding
BOTH = (False, True)
BIASES = ("none", "bias", "scaled")


def triton_kernels() -> SimpleNamespace:
    """Triton's kernels: those of symmoe.kernels.gpu, and what only tests call. GEMMs take `config` as well."""
    from symmoe.kernels.triton import activation, bias, gemm, gemm_act, plan

    members = {k: v for m in (activation, bias, gemm, gemm_act, plan) for k, v in vars(m).items()}
    tiled = {
        name: partial(_in_tiles, function)
        for name, function in members.items()
        if name.startswith("grouped_gemm")
    }
    return SimpleNamespace(**members | tiled)


def _in_tiles(function, *args, config=None, **options):
    """By Triton and not by a kernel for Hopper, in tiles of this config; None: by what the function chooses."""
    if config is None:
        return function(*args, **options)
    with tiles(config):
        return function(*args, **options)


def launched_by(monkeypatch, launchers, *names) -> list[str]:
    """Grows by the name of each of these launchers for Hopper that is called from now on."""
    called = []

    def recorded(name, launch, *args, **options):
        called.append(name)
        return launch(*args, **options)

    for name in names:
        launch, takes = launchers.LAUNCHERS[name]
        monkeypatch.setitem(launchers.LAUNCHERS, name, (partial(recorded, name, launch), takes))
    return called


@contextmanager
def tiles(config):
    """GEMMs are Triton's, and have these tiles."""
    from symmoe.kernels import hopper_choice
    from symmoe.kernels.triton import gemm, gemm_act

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_choice, "hopper_kernels", lambda *args: None)
        for module, name in (
            (gemm, "gemm_config"),
            (gemm_act, "act_config"),
            (gemm_act, "dact_config"),
        ):
            patch.setattr(module, name, lambda *args: config)
        plans = gemm._gemm_plan, gemm._wgrad_plan, gemm_act._plan
        for module, plan in zip((gemm, gemm, gemm_act), plans, strict=True):
            patch.setattr(module, plan.__name__, plan.__wrapped__)
        yield


class Problem:
    """Rows of groups [N, H], gradients [N, W] and weights [G, W, H], with results around 1. Tail rows are NaN, tail
    indices out of range, packed rows are shared."""

    def __init__(self, splits, widths, dtype, *, seed=0, device="cpu", capacity=None):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.splits, self.dtype, self.device = tuple(splits), dtype, device
        self.hidden, self.width = widths
        self.num_groups = len(splits)
        self.num_rows = sum(splits)
        self.capacity = self.num_rows + TAIL if capacity is None else capacity
        self.num_packed = self.num_rows // 2 + 1
        self.row_range = whole_groups(splits, device=device)
        self.spans = spans_of(self.row_range)
        self.row_index = torch.randint(
            self.num_packed,
            (self.capacity,),
            dtype=torch.int32,
            device=device,
            generator=self.generator,
        )
        self.row_index[self.num_rows :] = 2**31 - 1
        self.packed = self.normal(self.num_packed, self.hidden)
        self.rows = self.with_tail(self.hidden)
        self.packed_dout = self.normal(self.num_packed, self.width)
        self.dout = self.with_tail(self.width)
        self.weight = self.normal(self.num_groups, self.width, self.hidden, scale=self.hidden**-0.5)
        self.bias = self.normal(self.num_groups, self.width)
        self.scale = self.with_tail().float()

    def normal(self, *shape, scale=1.0, dtype=None):
        numbers = torch.randn(*shape, device=self.device, generator=self.generator)
        return (numbers * scale).to(dtype or self.dtype)

    def with_tail(self, *shape):
        tensor = self.normal(self.capacity, *shape)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full(
            (self.capacity, *shape), SENTINEL, dtype=dtype or self.dtype, device=self.device
        )

    def blanks(self, *widths):
        """A function that makes blank outputs of these widths."""
        return lambda: [self.blank(width) for width in widths]

    def source(self, gather):
        """(rows, or rows and their index; the rows themselves in float64)."""
        return self._choose(self.rows, self.packed, gather)

    def dout_source(self, gather):
        return self._choose(self.dout, self.packed_dout, gather)

    def _choose(self, rows, packed, gather):
        if not gather:
            return rows, rows.double()
        gathered = torch.full(
            (self.capacity, packed.shape[1]), torch.nan, dtype=torch.float64, device=self.device
        )
        gathered[: self.num_rows] = packed[self.row_index[: self.num_rows].long()].double()
        return (packed, self.row_index), gathered

    def biases(self, kind):
        return {"none": None, "bias": self.bias, "scaled": (self.bias, self.scale)}[kind]

    def before(self, width, accumulate):
        """The contents of an output before a call; numbers of groups where these are added to."""
        out = self.blank(width)
        if accumulate:
            out[: self.num_rows] = self.normal(self.num_rows, width)
        return out

    def per_group(self, function):
        """function(g, span) of every group, in float64, as the rows of one tensor."""
        return torch.cat([function(g, span) for g, span in enumerate(self.spans)])

    def check(self, out, expected, tail=SENTINEL, dtype=None):
        """Every row of a group is as expected, and the tail is all `tail`."""
        assert_near(out[: self.num_rows], expected, dtype)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], tail))


def assert_near(out, expected, dtype=None):
    """Relative to the largest value, as far as `dtype` goes, out's by default."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    tolerance = TOLERANCE[dtype or out.dtype]
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=tolerance * scale)


def assert_same(results, expected):
    for result, reference in zip(results, expected, strict=True):
        assert result is reference or torch.equal(result, reference)


# -- grouped GEMMs ----------------------------------------------------------------------------------------------------
def check_gemm(kernels, p, gather, table, biased, zero_tail, accumulate=False, **options):
    source, rows = p.source(gather)
    options |= {"zero_tail": zero_tail, "accumulate": accumulate, "bias": p.biases(biased)}

    def expected(g, span):
        addend = p.bias[g].double() * (
            p.scale[span].double()[:, None] if biased == "scaled" else 1.0
        )
        return rows[span] @ p.weight[g].double().t() + (0.0 if biased == "none" else addend)

    _check_product(p, kernels.grouped_gemm, source, expected, p.width, table, options)


def check_dgrad(kernels, p, gather, table, zero_tail, accumulate=False, **options):
    source, rows = p.dout_source(gather)
    options |= {"zero_tail": zero_tail, "accumulate": accumulate}
    expected = lambda g, span: rows[span] @ p.weight[g].double()  # noqa: E731
    _check_product(p, kernels.grouped_gemm_dgrad, source, expected, p.hidden, table, options)


def _check_product(p, function, source, expected, width, table, options):
    """Against float64; with a table in addition that it gives the bits of packed weights."""
    before = p.before(width, options["accumulate"])
    weights = [p.weight]
    if table:
        scattered = Scattered(p.weight)
        weights.append(scattered.table)
    outs = [before.clone() for _ in weights]
    for out, weight in zip(outs, weights, strict=True):
        function(source, weight, p.row_range, out, **options)
    reference = p.per_group(expected)
    if options["accumulate"]:
        reference = reference + before[: p.num_rows].double()
    p.check(outs[0], reference, 0.0 if options["zero_tail"] else SENTINEL)
    assert torch.equal(outs[-1], outs[0])


def check_wgrad(kernels, p, gather_dout, gather_rows, table, accumulate, out_dtype, **options):
    (dout, dout_rows), (source, rows) = p.dout_source(gather_dout), p.source(gather_rows)
    before = p.normal(p.num_groups, p.width, p.hidden, dtype=out_dtype)
    if accumulate:
        before[p.row_range[0] == p.row_range[1]] = torch.nan  # not touched
    else:
        before.fill_(torch.nan)
    options |= {"accumulate": accumulate}
    out = before.clone()
    scattered = Scattered(before)
    kernels.grouped_gemm_wgrad(dout, source, p.row_range, out, **options)
    if table:
        kernels.grouped_gemm_wgrad(dout, source, p.row_range, scattered.table, **options)
        assert torch.equal(scattered.packed().nan_to_num(7), out.nan_to_num(7))
    for g, span in enumerate(p.spans):
        if span.start < span.stop:
            expected = dout_rows[span].t() @ rows[span]
            assert_near(out[g], expected + before[g].double() if accumulate else expected)
        else:
            assert out[g].isnan().all() if accumulate else not out[g].any()


def check_biases(kernels, p, gather, scaled, accumulate):
    dout, rows = p.dout_source(gather)
    for out_dtype in {p.dtype, torch.float32}:
        dbias = torch.full((p.num_groups, p.width), torch.nan, dtype=out_dtype, device=p.device)
        scale = p.scale if scaled else None
        kernels.grouped_bias_grad(dout, p.row_range, dbias, scale=scale)
        for g, span in enumerate(p.spans):
            addends = rows[span] * (p.scale[span].double()[:, None] if scaled else 1.0)
            assert_near(dbias[g], addends.sum(dim=0))
        if out_dtype == torch.float32:  # the order of a sum is the twin's
            expected = torch.full_like(dbias, torch.nan)
            twin.grouped_bias_grad(dout, p.row_range, expected, scale=scale)
            assert torch.equal(dbias, expected)
    dscale = p.blank(dtype=torch.float32)
    kernels.grouped_bias_dot(dout, p.bias, p.row_range, dscale, accumulate=accumulate)
    start = SENTINEL if accumulate else 0.0
    p.check(dscale, p.per_group(lambda g, span: rows[span] @ p.bias[g].double() + start))


def check_products(kernels, p, **options):
    """Every combination of what the two products take."""
    for gather in BOTH:
        for biased, zero_tail in product(BIASES, BOTH):
            check_gemm(kernels, p, gather, True, biased, zero_tail, **options)
        for zero_tail in BOTH:
            check_dgrad(kernels, p, gather, True, zero_tail, **options)
        for biased in BIASES:
            check_gemm(kernels, p, gather, False, biased, False, accumulate=True, **options)
        check_dgrad(kernels, p, gather, False, False, accumulate=True, **options)


def check_gradients(kernels, p, **options):
    """Every combination of what the gradients of weights and biases take."""
    for case in product(BOTH, BOTH, BOTH):
        for out_dtype in {p.dtype, torch.float32}:
            check_wgrad(kernels, p, *case[:2], True, case[2], out_dtype, **options)
        check_biases(kernels, p, *case)


# -- parts of them ----------------------------------------------------------------------------------------------------
def part_calls(kernels, p, **fixed):
    """{name: (makes outputs, call(row_range, outs, come, **options))}; rows that have not come are NaN."""
    table = Scattered(p.weight)

    def only(rows, arrived):
        return torch.where(arrived[:, None], rows, torch.nan)

    def plain(row_range, outs, arrived, **options):
        kernels.grouped_gemm(only(p.rows, arrived), p.weight, row_range, *outs, **fixed, **options)

    def biased(row_range, outs, arrived, **options):
        options |= {**fixed, "bias": (p.bias, p.scale)}
        kernels.grouped_gemm(only(p.rows, arrived), p.weight, row_range, *outs, **options)

    def gathered(row_range, outs, arrived, **options):
        options |= {**fixed, "bias": p.bias}
        kernels.grouped_gemm((p.packed, p.row_index), table.table, row_range, *outs, **options)

    def dgrad(row_range, outs, arrived, **options):
        kernels.grouped_gemm_dgrad(
            only(p.dout, arrived), p.weight, row_range, *outs, **fixed, **options
        )

    calls = {call.__name__: (p.blanks(p.width), call) for call in (plain, biased, gathered)}
    return calls | {"dgrad": (p.blanks(p.hidden), dgrad)}


def all_rows(p):
    return torch.arange(p.capacity, device=p.device) < p.num_rows


def check_ranges(p, blanks, call, parts, **options):
    """A range's rows are written, no others, and none are read that have not come; all ranges are the whole. Of outputs
    that are matrices. Returns all of the whole, and of all ranges."""
    full = blanks()
    union = blanks()
    call(p.row_range, full, all_rows(p))
    for ranges in parts:
        ranges = ranges.to(p.device)
        outs = blanks()
        arrived = rows_of(ranges, p.capacity)
        call(ranges, outs, arrived, **options)
        for out, expected in zip(outs, full, strict=True):
            if out.ndim == 2:
                assert torch.equal(out, torch.where(arrived[:, None], expected, SENTINEL)), (
                    call,
                    ranges,
                )
        call(ranges, union, arrived)
    for out, expected in zip(union, full, strict=True):
        if out.ndim == 2:
            assert not expected.isnan().any()
            assert torch.equal(out, expected), call
    return full, union


# -- GEMMs that are fused with activations ----------------------------------------------------------------------------
class ActProblem(Problem):
    """Inputs of both passes: in addition FC2's weight [G, H, I], and an h of the forward pass."""

    def __init__(self, splits, widths, dtype, activation: Activation, **options):
        hidden, self.ffn = widths
        super().__init__(splits, (hidden, activation.hidden_width(self.ffn)), dtype, **options)
        self.activation, self.h, self.weight1 = activation, self.dout, self.weight
        self.weight2 = self.normal(self.num_groups, hidden, self.ffn, scale=hidden**-0.5)

    def workspace(self, kernels):
        """Poisoned, and as large as the layer makes it."""
        numel = kernels.dact_workspace_numel(
            self.capacity, self.num_groups, self.ffn, self.activation
        )
        return torch.full((numel,), torch.nan, device=self.device)


def forward(kernels, p, source, *, weight=None, **options):
    """(h, a) of grouped_gemm_act."""
    results = p.blank(p.width), p.blank(p.ffn)
    weight = p.weight1 if weight is None else weight
    kernels.grouped_gemm_act(source, weight, p.row_range, p.scale, results, p.activation, **options)
    return results


def backward(kernels, p, source, h, *, weight=None, with_dbias=True, **options):
    """(dh, a, dscale, dbias) of grouped_gemm_dact."""
    weight = p.weight2 if weight is None else weight
    dbias = torch.full((p.num_groups, p.width), torch.nan, device=p.device) if with_dbias else None
    gradients = p.blank(p.width), p.blank(p.ffn), p.blank(dtype=torch.float32), dbias
    workspace = p.workspace(kernels)
    kernels.grouped_gemm_dact(
        source, weight, p.row_range, (h, p.scale), gradients, workspace, p.activation, **options
    )
    return gradients


def check_act(
    kernels,
    p,
    act_options=None,
    dact_options=None,
    *,
    table=False,
    cases=((False, True), (True, False)),
):
    """Both passes against float64; with a table in addition that it gives the bits of packed weights. cases: (gather,
    with a bias)."""
    n = p.num_rows
    act_options = act_options or {}
    dact_options = dact_options or {}
    tables = [Scattered(weight) for weight in (p.weight1, p.weight2)] if table else []
    for gather, with_bias in cases:
        source, rows = p.source(gather)
        bias = p.bias if with_bias else None
        h, a = results = forward(kernels, p, source, bias=bias, **act_options)
        if table:
            assert_same(
                results,
                forward(kernels, p, source, bias=bias, weight=tables[0].table, **act_options),
            )
        addend = p.bias.double() if with_bias else torch.zeros_like(p.bias, dtype=torch.float64)
        p.check(
            h,
            p.per_group(
                lambda g, s, rows=rows, b=addend: rows[s] @ p.weight1[g].double().t() + b[g]
            ),
        )
        # From the rounded h, so only the rounding of a itself is left.
        p.check(a, formula(h[:n].double(), p.activation) * p.scale[:n, None].double())

        options = {"with_dbias": with_bias, **dact_options}
        dh, a, dscale, dbias = results = backward(kernels, p, source, p.h, **options)
        if table:
            assert_same(
                results, backward(kernels, p, source, p.h, weight=tables[1].table, **options)
            )
        da = p.per_group(lambda g, s, rows=rows: rows[s] @ p.weight2[g].double())
        value, by_h, by_scale = scaled(p.h[:n], p.scale[:n], da, p.activation)
        p.check(a, value)
        p.check(dh, by_h)
        p.check(dscale, by_scale, tail=0.0, dtype=p.dtype)  # the rounding of da is in every term
        if with_bias:
            for g, span in enumerate(p.spans):
                assert_near(dbias[g], dh[span].double().sum(0))


def check_activation(kernels, p, *, dscale_dtype=torch.float32):
    """The activation by itself and its gradient against float64, of all rows but the tail."""
    n = p.num_rows
    h = p.h[:n]
    scale = p.scale[:n]
    dout = p.normal(n, p.ffn)
    out = torch.empty_like(dout)
    dh = torch.empty_like(h)
    dscale = torch.empty_like(scale)
    kernels.scaled_activation(h, scale, out, p.activation)
    kernels.scaled_activation_grad(dout, h, scale, dh, dscale, p.activation)
    expected = scaled(h, scale, dout, p.activation)
    dtypes = (None, None, dscale_dtype)
    for actual, reference, dtype in zip((out, dh, dscale), expected, dtypes, strict=True):
        assert_near(actual, reference, dtype)


def check_nan_goes_through(kernels, activation, device="cpu"):
    h = torch.randn(2, activation.hidden_width(64), device=device)
    h[1] = torch.nan
    ones = torch.ones(2, device=device)
    out = h.new_empty(2, 64)
    dh = torch.empty_like(h)
    dscale = h.new_empty(2)
    kernels.scaled_activation(h, ones, out, activation)
    kernels.scaled_activation_grad(torch.ones_like(out), h, ones, dh, dscale, activation)
    for tensor in (out, dh, dscale):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


def check_fused(kernels, p):
    """GEMM, activation, GEMM by themselves give the same h, a, dh and dscale."""
    n = p.num_rows
    h, a = forward(kernels, p, p.rows, bias=p.bias)
    dh, a_again, dscale, dbias = backward(kernels, p, p.rows, h)
    h3 = p.blank(p.width)
    a3 = p.blank(p.ffn)
    da3 = p.blank(p.ffn)
    dh3 = p.blank(p.width)
    dscale3 = p.blank(dtype=torch.float32)
    kernels.grouped_gemm(p.rows, p.weight1, p.row_range, h3, bias=p.bias)
    kernels.scaled_activation(h3, p.scale, a3, p.activation)
    kernels.grouped_gemm_dgrad(p.rows, p.weight2, p.row_range, da3)
    kernels.scaled_activation_grad(da3, h3, p.scale, dh3, dscale3, p.activation)
    for fused, apart in ((h, h3), (a, a3), (a_again, a3), (dh, dh3), (dscale, dscale3)):
        assert torch.equal(fused[:n], apart[:n])
    for g, span in enumerate(p.spans):
        assert_near(dbias[g], dh3[span].double().sum(0))


def check_act_ranges(
    kernels, p, parts, *, gather=False, bias=None, act_options=None, dact_options=None, **options
):
    """Both functions in parts; what parts must not read is NaN, and what they must not write stays as it is."""
    (source, _), act_options, dact_options = p.source(gather), act_options or {}, dact_options or {}
    numbers = set()

    def blanks():
        return [*p.blanks(p.width, p.ffn, p.width, p.ffn)(), p.workspace(kernels)]

    def both(row_range, outs, arrived, **call_options):
        rows = source if gather else torch.where(arrived[:, None], source, torch.nan)
        hidden, (h, a, *gradients, workspace) = torch.where(arrived[:, None], p.h, torch.nan), outs
        act_kwargs = {"bias": bias, **act_options, **call_options}
        kernels.grouped_gemm_act(
            rows, p.weight1, row_range, p.scale, (h, a), p.activation, **act_kwargs
        )
        arguments = row_range, (hidden, p.scale), (*gradients, None, None), workspace, p.activation
        numbers.add(
            kernels.grouped_gemm_dact(rows, p.weight2, *arguments, **dact_options, **call_options)
        )

    *_, dscale, _ = backward(kernels, p, source, p.h, with_dbias=False, **dact_options)
    for outs in check_ranges(p, blanks, both, parts, **options):
        (num_partials,), actual = numbers, p.blank(dtype=torch.float32)
        kernels.sum_dact_partials(outs[-1], p.row_range, actual, num_partials)
        assert torch.equal(actual, dscale)


def check_a_forgotten_range(kernels, p, group, num_forgotten):
    """Rows of a group that no part of dact had are NaN in dscale, and no others."""
    ranges = p.row_range.clone()
    ranges[1, group] -= num_forgotten
    workspace = p.workspace(kernels)
    dh = p.blank(p.width)
    a = p.blank(p.ffn)
    dscale = p.blank(dtype=torch.float32)
    arguments = ranges, (p.h, p.scale), (dh, a, None, None), workspace, p.activation
    num_partials = kernels.grouped_gemm_dact(p.rows, p.weight2, *arguments)
    kernels.sum_dact_partials(workspace, p.row_range, dscale, num_partials)
    forgotten = slice(p.spans[group].stop - num_forgotten, p.spans[group].stop)
    assert dscale[forgotten].isnan().all()
    assert dscale.isnan().sum() == num_forgotten


# -- splits -----------------------------------------------------------------------------------------------------------
# Splits, the number of rows, and where groups begin, with the end of the last.
SPLITS_CASES = [
    ([3, 0, 4], 10, [0, 3, 3, 7]),
    ([3, 0, 4], 7, [0, 3, 3, 7]),
    ([3, 0, 4], 5, [0, 3, 3, 5]),
    ([3, 0, 4], 0, [0, 0, 0, 0]),
    ([-3, 2, -(2**31), 4], 10, [0, 0, 2, 2, 6]),
    ([2**31 - 1] * 5, 9, [0, 9, 9, 9, 9, 9]),
    ([1, 2**31 - 1, 1], 2**31 - 1, [0, 1, 2**31 - 1, 2**31 - 1]),
    ([6], 8, [0, 6]),
    ([3], 0, [0, 0]),
    ([1] * 70, 64, [*range(65), *[64] * 6]),
    ([1] * 70, 1, [0, *[1] * 70]),
]
SPLITS_OF_64_BITS = (
    [-(2**63), 5, 2**63 - 1, 2**63 - 1],
    100,
    [0, 0, 5, 100, 100],
)  # no sum overflows


def check_splits(kernels, device="cpu"):
    cases = [(case, dtype) for case in SPLITS_CASES for dtype in (torch.int32, torch.int64)]
    for (splits, num_rows, expected), dtype in [*cases, (SPLITS_OF_64_BITS, torch.int64)]:
        row_range = torch.full((2, len(splits)), -1, dtype=torch.int32, device=device)
        kernels.splits_to_row_range(
            torch.tensor(splits, dtype=dtype, device=device), row_range, num_rows
        )
        assert row_range.tolist() == [expected[:-1], expected[1:]], (splits, num_rows, dtype)
