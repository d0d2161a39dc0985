"""The activation kernels, alone and fused with GEMMs, on a GPU: against float64, the twins, and each other."""

import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from row_ranges import random_ranges, rows_of, spans_of, whole_groups

from symmoe.kernels.activation import Activation
from symmoe.kernels.table import TensorTable
from symmoe.kernels.triton import activation as gpu_activation
from symmoe.kernels.triton import gemm, gemm_act
from symmoe.kernels.twin import activation as twin_activation
from symmoe.kernels.twin import gemm_act as twin_gemm_act

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# H, I: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile.
WIDTHS = [(1024, 768), (1032, 712), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
TAIL = 37
SENTINEL = -77.0
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}
ACTIVATIONS = {
    "swiglu": Activation(),
    "gpt-oss": Activation(alpha=1.702, limit=1.0, offset=1.0, interleave=1),
    "blocks": Activation(interleave=8),
    "srelu": Activation(kind="srelu"),
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def gate_columns(ffn, activation):
    """Where the gates and the ups of h stand."""
    block = activation.interleave or ffn
    column = torch.arange(ffn, device="cuda")
    gate = column // block * 2 * block + column % block
    return gate, gate + block


def formula(h, activation):
    """act(h) of float64 h, with autograd."""
    if activation.kind == "srelu":
        return torch.relu(h) ** 2
    gate, up = gate_columns(h.shape[1] // 2, activation)
    g = h[:, gate].clamp(max=activation.limit)
    u = h[:, up].clamp(min=-activation.limit, max=activation.limit)
    return (u + activation.offset) * g * torch.sigmoid(activation.alpha * g)


class Problem:
    """Inputs of both passes, results around 1; tail rows are NaN, tail indices out of range."""

    def __init__(self, splits, widths, dtype, activation, seed=0):
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        self.splits, self.dtype, self.activation = splits, dtype, activation
        self.hidden, self.ffn = widths
        self.width = activation.hidden_width(self.ffn)
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.capacity = self.num_rows + TAIL
        self.num_packed = self.num_rows // 2 + 1
        self.row_range = whole_groups(splits, device="cuda")
        self.spans = spans_of(self.row_range)
        self.row_index = torch.randint(
            0, self.num_packed, (self.capacity,), dtype=torch.int32, device="cuda", generator=self.generator
        )
        self.row_index[self.num_rows :] = 2**31 - 1
        self.packed, self.rows = self.normal(self.num_packed, self.hidden), self.with_tail(self.hidden)
        self.weight1 = self.normal(self.num_groups, self.width, self.hidden, scale=self.hidden**-0.5)
        self.weight2 = self.normal(self.num_groups, self.hidden, self.ffn, scale=self.hidden**-0.5)
        self.bias = self.normal(self.num_groups, self.width)
        self.h, self.scale = self.with_tail(self.width), self.with_tail().float()

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=self.generator) * scale).to(self.dtype)

    def with_tail(self, *shape):
        tensor = self.normal(self.capacity, *shape)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((self.capacity, *shape), SENTINEL, dtype=dtype or self.dtype, device="cuda")

    def sources(self):
        """(rows tensor, index, the groups' rows in float64), contiguous and gathered."""
        yield self.rows, None, self.rows[: self.num_rows].double()
        yield self.packed, self.row_index, self.packed[self.row_index[: self.num_rows].long()].double()

    def multiply(self, rows, weight, transpose):
        """Group by group in float64."""
        products = [rows[s] @ (w.t() if transpose else w) for s, w in zip(self.spans, weight.double(), strict=True)]
        return torch.cat(products)

    def assert_near(self, out, expected, tolerance=None):
        """Relative to the largest value."""
        tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=tolerance * scale)

    def check(self, out, expected, tolerance=None):
        """Every row of a group is as expected, and the tail is untouched."""
        self.assert_near(out[: self.num_rows], expected, tolerance)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], SENTINEL))

    def workspace(self, config=None):
        """Poisoned, and as large as the layer makes it; for tiles smaller than any that is chosen, larger."""
        numel = gemm_act.dact_workspace_numel(self.capacity, self.num_groups, self.ffn, self.activation)
        if config is not None:
            slots = gemm_act.bias_slots(self.capacity, self.num_groups, config.block_m)
            tiles = -(-self.ffn // config.block_n)
            numel = max(numel, tiles * self.capacity + slots * self.width)
        return torch.full((numel,), torch.nan, device="cuda")


def forward(p, source, index, module=gemm_act, weight=None, bias=None, **options):
    h, a = p.blank(p.width), p.blank(p.ffn)
    weight = p.weight1 if weight is None else weight
    module.grouped_gemm_act(
        source, weight, p.row_range, p.scale, h, a, p.activation, row_index=index, bias=bias, **options
    )
    return h, a


def backward(p, source, index, h, module=gemm_act, weight=None, with_dbias=True, **options):
    dh, a, dscale = p.blank(p.width), p.blank(p.ffn), p.blank(dtype=torch.float32)
    dbias = torch.full((p.num_groups, p.width), torch.nan, device="cuda") if with_dbias else None
    weight = p.weight2 if weight is None else weight
    module.grouped_gemm_dact(
        source,
        weight,
        p.row_range,
        h,
        p.scale,
        dh,
        a,
        dscale,
        p.workspace(options.get("config")),
        p.activation,
        row_index=index,
        dbias=dbias,
        **options,
    )
    return dh, a, dscale, dbias


def check_against_float64_and_twins(p, act_options=None, dact_options=None):
    n = p.num_rows
    for (source, index, rows), bias in itertools.product(p.sources(), (None, p.bias)):
        h, a = forward(p, source, index, bias=bias, **(act_options or {}))
        expected = p.multiply(rows, p.weight1, transpose=True)
        if bias is not None:
            expected = expected + torch.cat(
                [b.expand(len(expected[s]), -1) for b, s in zip(bias, p.spans, strict=True)]
            )
        p.check(h, expected)
        p.check(a, formula(h[:n].double(), p.activation) * p.scale[:n, None].double())
        for out, twin_out in zip((h, a), forward(p, source, index, twin_gemm_act, bias=bias), strict=True):
            p.assert_near(out[:n], twin_out[:n])

        results = backward(p, source, index, p.h, with_dbias=bias is not None, **(dact_options or {}))
        dh, a, dscale, dbias = results
        kept, scale = p.h[:n].double().requires_grad_(), p.scale[:n].double().requires_grad_()
        value = formula(kept, p.activation) * scale[:, None]
        value.backward(p.multiply(rows, p.weight2, transpose=False))
        p.check(a, value.detach())
        p.check(dh, kept.grad)
        p.assert_near(dscale[:n], scale.grad)
        assert not dscale[n:].any()
        twin_results = backward(p, source, index, p.h, twin_gemm_act)
        for out, twin_out in zip(results[:3], twin_results[:3], strict=True):
            p.assert_near(out[:n], twin_out[:n])
        if bias is not None:
            for g, span in enumerate(p.spans):
                p.assert_near(dbias[g], dh[span].double().sum(0), tolerance=1e-5)


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64_and_twins(widths, activation, dtype):
    for splits in SPLITS:
        check_against_float64_and_twins(Problem(splits, widths, dtype, activation))


BASE = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "parts 4": {"parts": 4},
    "lead 1": {"parts": 4, "lead": 1, "flatten": True},
    "lead 2": {"parts": 4, "lead": 2, "load_policy": "evict_first", "store_policy": "evict_last"},
    "prefetch": {"parts": 4, "prefetch": True},
    "prefetch flatten": {"block_n": 256, "parts": 8, "lead": 2, "prefetch": True, "flatten": True},
    "two programs": {"num_warps": 4, "programs_per_sm": 2, "max_registers": 255, "parts": 4, "lead": 1},
    "narrow": {"block_m": 64, "block_n": 64, "parts": 2},
}


@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["blocks"]], ids=["halves", "blocks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant, activation):
    """What a sweep may choose must be right before it is fast."""
    config = gemm_act.DactConfig(**{**BASE, **VARIANTS[variant]})
    act_config = replace(gemm_act.ACT_CONFIG, flatten=config.flatten, parts=config.parts)
    p = Problem(SPLITS[0], WIDTHS[1], torch.bfloat16, activation)
    check_against_float64_and_twins(p, {"config": act_config}, {"config": config})


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_fused_is_bitwise_the_three_modules(widths, activation, dtype):
    """GEMM, activation, GEMM by themselves give the same h, a, dh and dscale."""
    p = Problem(SPLITS[0], widths, dtype, activation)
    n = p.num_rows
    h, a = forward(p, p.rows, None, bias=p.bias)
    dh, a_again, dscale, _ = backward(p, p.rows, None, h)

    h3, a3, da3, dh3 = p.blank(p.width), p.blank(p.ffn), p.blank(p.ffn), p.blank(p.width)
    dscale3 = p.blank(dtype=torch.float32)
    gemm.grouped_gemm(p.rows, p.weight1, p.row_range, h3, bias=p.bias)
    gpu_activation.scaled_activation(h3, p.scale, a3, activation)
    gemm.grouped_gemm_dgrad(p.rows, p.weight2, p.row_range, da3)
    gpu_activation.scaled_activation_grad(da3, h3, p.scale, dh3, dscale3, activation)
    for fused, alone in ((h, h3), (a, a3), (a_again, a3), (dh, dh3), (dscale, dscale3)):
        assert torch.equal(fused[:n], alone[:n])


@dtypes
@activations
def test_elementwise_kernels_against_the_twins(activation, dtype):
    for (_, ffn), num_rows in itertools.product(WIDTHS, (0, 1, 8, 1001)):
        p = Problem((num_rows,), (64, ffn), dtype, activation)
        h, scale, dout = p.h[:num_rows], p.scale[:num_rows], p.normal(num_rows, ffn)
        outs, twin_outs = [], []
        for module, results in ((gpu_activation, outs), (twin_activation, twin_outs)):
            out, dh, dscale = torch.empty_like(dout), torch.empty_like(h), torch.empty_like(scale)
            module.scaled_activation(h, scale, out, activation)
            module.scaled_activation_grad(dout, h, scale, dh, dscale, activation)
            results += [out, dh, dscale]
        for out, twin_out in zip(outs, twin_outs, strict=True):
            p.assert_near(out, twin_out)


@activations
def test_nan_goes_through(activation):
    h = torch.randn(2, activation.hidden_width(64), device="cuda")
    h[1] = torch.nan
    ones, out, dh, dscale = torch.ones(2, device="cuda"), h.new_empty(2, 64), torch.empty_like(h), h.new_empty(2)
    gpu_activation.scaled_activation(h, ones, out, activation)
    gpu_activation.scaled_activation_grad(torch.ones_like(out), h, ones, dh, dscale, activation)
    for tensor in (out, dh, dscale):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


@dtypes
@pytest.mark.parametrize("interleave", [1, 2, 4, 8, 16, 32])
def test_interleaved_features_give_the_bits_of_two_halves(interleave, dtype):
    """The same features in another order: a, dscale and (in that order) h, dh and dbias are the same."""
    halves, blocks = Activation(), Activation(interleave=interleave)
    p = Problem(SPLITS[0], (136, 416), dtype, halves)
    q = Problem(SPLITS[0], (136, 416), dtype, blocks)
    order = torch.cat(gate_columns(p.ffn, blocks))
    for name in ("packed", "row_index", "scale", "weight2"):
        setattr(q, name, getattr(p, name))
    q.weight1[:, order], q.bias[:, order] = p.weight1, p.bias
    h, a = forward(p, p.packed, p.row_index, bias=p.bias)
    h_q, a_q = forward(q, q.packed, q.row_index, bias=q.bias)
    dh, a_again, dscale, dbias = backward(p, p.packed, p.row_index, h)
    dh_q, a_again_q, dscale_q, dbias_q = backward(q, q.packed, q.row_index, h_q)
    n = p.num_rows
    pairs = ((h, h_q[:, order]), (a, a_q), (dh, dh_q[:, order]), (a_again, a_again_q))
    for left, right in pairs:
        assert torch.equal(left[:n], right[:n])
    p.assert_near(dscale, dscale_q, tolerance=1e-5)
    p.assert_near(dbias, dbias_q[:, order], tolerance=1e-5)


def table(weight):
    """The same matrices, each somewhere else, known by their addresses; and what keeps them alive."""
    memory = [matrix.clone() for matrix in weight.flip(0)][::-1]
    pointers = torch.tensor([matrix.data_ptr() for matrix in memory], device="cuda")
    return TensorTable(pointers, tuple(weight.shape), weight.dtype), memory


def same_bits(p, left, right):
    """Rows of groups, and whatever is not rows."""
    for a, b in zip(left, right, strict=True):
        rows = slice(p.num_rows) if a.shape[0] == p.capacity else slice(None)
        assert torch.equal(a[rows], b[rows])


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS[:2], ids=str)
def test_tables_of_weights_give_the_bits_of_packed_weights(widths, activation, dtype):
    p = Problem(SPLITS[0], widths, dtype, activation)
    (table1, _keep1), (table2, _keep2) = table(p.weight1), table(p.weight2)
    for source, index, _ in p.sources():
        packed = forward(p, source, index, bias=p.bias)
        same_bits(p, packed, forward(p, source, index, weight=table1, bias=p.bias))
        same_bits(p, backward(p, source, index, packed[0]), backward(p, source, index, packed[0], weight=table2))


@dtypes
@activations
def test_repeated_runs_and_other_grids_give_the_same_bits(activation, dtype):
    p = Problem(SPLITS[0], WIDTHS[1], dtype, activation)
    h, a = forward(p, p.packed, p.row_index)
    gradients = backward(p, p.packed, p.row_index, h)
    assert torch.equal(a, gradients[1])
    for num_sms in (None, 100, 1):
        same_bits(p, (h, a), forward(p, p.packed, p.row_index, num_sms=num_sms))
        same_bits(p, gradients, backward(p, p.packed, p.row_index, h, num_sms=num_sms))


def check_ranges(p, source, index, bias, step, act_options, dact_options):
    """Both functions in parts; what parts must not read is NaN, and what they must not write stays as it is."""

    def forward_and_backward(row_range, rows, hidden, outputs, dscale, workspace):
        h, a, dh, a_again = outputs
        gemm_act.grouped_gemm_act(
            rows, p.weight1, row_range, p.scale, h, a, p.activation, row_index=index, bias=bias, **act_options
        )
        arguments = (row_range, hidden, p.scale, dh, a_again, dscale, workspace, p.activation)
        return gemm_act.grouped_gemm_dact(rows, p.weight2, *arguments, row_index=index, **dact_options)

    def blanks():
        return [p.blank(width) for width in (p.width, p.ffn, p.width, p.ffn)]

    workspace = p.workspace(dact_options.get("config"))
    whole, union, (dscale, in_parts) = blanks(), blanks(), (p.blank(dtype=torch.float32) for _ in range(2))
    num_partials = forward_and_backward(p.row_range, source, p.h, whole, dscale, workspace.clone())
    for ranges in random_ranges(p.splits, 3, step=step):
        ranges, outputs = ranges.cuda(), blanks()
        come = rows_of(ranges, p.capacity)
        rows = source if index is not None else torch.where(come[:, None], source, torch.nan)
        hidden = torch.where(come[:, None], p.h, torch.nan)
        forward_and_backward(ranges, rows, hidden, outputs, None, workspace.clone())
        for out, expected in zip(outputs, whole, strict=True):
            assert torch.equal(out, torch.where(come[:, None], expected, SENTINEL))
        assert forward_and_backward(ranges, rows, hidden, union, None, workspace) == num_partials
    for out, expected in zip(union, whole, strict=True):
        assert torch.equal(out, expected)
    gemm_act.sum_dact_partials(workspace, p.row_range, in_parts, num_partials)
    assert not dscale.isnan().any()
    assert torch.equal(in_parts, dscale)


@dtypes
@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["blocks"]], ids=["halves", "blocks"])
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows_give_the_bits_of_the_whole(step, activation, dtype):
    """By the kernels that the functions choose, and by Triton's; with fewer SMs."""
    for splits, widths in ((SPLITS[0], WIDTHS[1]), (SPLITS[2], WIDTHS[0])):
        p = Problem(splits, widths, dtype, activation)
        config = {"config": gemm_act.act_config(p.ffn, dtype, activation)}
        dact_config = {"config": gemm_act.dact_config(p.ffn, dtype), "num_sms": 7}
        check_ranges(p, p.rows, None, None, step, {}, {})
        check_ranges(p, p.packed, p.row_index, p.bias, step, config, dact_config)


def test_a_forgotten_range_is_seen():
    p = Problem(SPLITS[0], WIDTHS[0], torch.bfloat16, ACTIVATIONS["swiglu"])
    ranges = p.row_range.clone()
    ranges[1, 3] -= 100
    workspace, dh, a, dscale = p.workspace(), p.blank(p.width), p.blank(p.ffn), p.blank(dtype=torch.float32)
    arguments = (ranges, p.h, p.scale, dh, a, None, workspace, p.activation)
    num_partials = gemm_act.grouped_gemm_dact(p.rows, p.weight2, *arguments)
    gemm_act.sum_dact_partials(workspace, p.row_range, dscale, num_partials)
    forgotten = slice(p.spans[3].stop - 100, p.spans[3].stop)
    assert dscale[forgotten].isnan().all()
    assert dscale.isnan().sum() == 100


@dtypes
@pytest.mark.parametrize("before", [1, 63, 128, 500])
def test_an_experts_bits_do_not_depend_on_the_others(before, dtype):
    """777 rows alone, and the same rows between others."""
    size, activation = 777, Activation()
    alone = Problem((size,), WIDTHS[1], dtype, activation)
    among = Problem((before, size, 0, 65), WIDTHS[1], dtype, activation, seed=1)
    span = slice(before, before + size)
    for name in ("rows", "h", "scale"):
        getattr(among, name)[span] = getattr(alone, name)[:size]
    for name in ("weight1", "weight2", "bias"):
        getattr(among, name)[1] = getattr(alone, name)[0]
    results = [(*forward(p, p.rows, None, bias=p.bias), *backward(p, p.rows, None, p.h)) for p in (alone, among)]
    for left, right in zip(*(r[:-1] for r in results), strict=True):
        assert torch.equal(left[:size], right[span])
    assert torch.equal(results[0][-1][0], results[1][-1][1])


def test_graph_replay_with_other_splits():
    """One capture serves every routing that fits the capacity; what was a row is zero in dscale as tail."""
    first, second = (300, 0, 1, 777, 128, 0, 0), (0, 900, 200, 3, 0, 0, 3)
    p = Problem(first, WIDTHS[0], torch.bfloat16, Activation())
    backward(p, p.packed, p.row_index, p.h)  # compile outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(p, p.packed, p.row_index, p.h)
    for splits in (first, second, first):
        p.row_range.copy_(whole_groups(splits))
        graph.replay()
        p.num_rows = sum(splits)
        same_bits(p, captured, backward(p, p.packed, p.row_index, p.h))
        assert not captured[2][p.num_rows :].any()


def test_no_rows():
    """Nothing is launched; the gradient of the bias is zero."""
    p = Problem((0, 0), (64, 96), torch.bfloat16, Activation())
    p.capacity = 0
    p.h, p.rows, p.scale = p.h[:0], p.rows[:0], p.scale[:0]
    forward(p, p.rows, None, bias=p.bias)
    *_, dbias = backward(p, p.rows, None, p.h)
    assert not dbias.any()
