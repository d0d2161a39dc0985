"""The GEMM kernels on a GPU against float64 and against the twins, which run on the same CUDA tensors."""

import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from symmoe.kernels.gpu import gemm, gemm_swiglu
from symmoe.kernels.twin import gemm as twin_gemm
from symmoe.kernels.twin import gemm_swiglu as twin_gemm_swiglu

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# H, I: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile.
WIDTHS = [(1024, 768), (1032, 712), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9), (0, 0, 0, 0, 0, 0, 1500)]
TAIL = 37
SENTINEL = -77.0
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}


class Problem:
    """Inputs of all five functions, results around 1; tail rows are NaN, tail indices out of range."""

    def __init__(self, splits, widths, dtype, seed=0):
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        self.splits, self.dtype = splits, dtype
        self.hidden, self.ffn = widths
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.capacity = self.num_rows + TAIL
        self.num_packed = self.num_rows // 2 + 1
        bounds = list(itertools.accumulate(splits, initial=0))
        self.spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.row_start = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        self.row_index = torch.randint(
            0, self.num_packed, (self.capacity,), dtype=torch.int32, device="cuda", generator=self.generator
        )
        self.row_index[self.num_rows :] = 2**31 - 1
        self.packed = self.normal(self.num_packed, self.hidden)
        self.rows = self.with_tail(self.hidden)
        self.weight1 = self.normal(self.num_groups, 2 * self.ffn, self.hidden, scale=self.hidden**-0.5)
        self.weight2 = self.normal(self.num_groups, self.hidden, self.ffn, scale=self.hidden**-0.5)
        self.h = self.with_tail(2 * self.ffn)
        self.row_probs = self.with_tail().float()

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=self.generator) * scale).to(self.dtype)

    def with_tail(self, *shape):
        tensor = self.normal(self.capacity, *shape)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((self.capacity, *shape), SENTINEL, dtype=dtype or self.dtype, device="cuda")

    def blank_weight(self, like):
        return torch.full_like(like, torch.nan)

    def sources(self):
        """(rows tensor, index, the rows themselves in float64), contiguous and gathered."""
        yield self.rows, None, self.rows.double()
        gathered = torch.full((self.capacity, self.hidden), torch.nan, dtype=torch.float64, device="cuda")
        gathered[: self.num_rows] = self.packed[self.row_index[: self.num_rows].long()].double()
        yield self.packed, self.row_index, gathered

    def assert_near(self, out, expected, tolerance=None):
        """Relative to the largest value; rounding of that value included."""
        tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=tolerance * scale)

    def check_rows(self, out, per_group, tolerance=None):
        """out's rows of group g are per_group(g, span), and its tail is untouched."""
        for g, span in enumerate(self.spans):
            if span.start < span.stop:
                self.assert_near(out[span], per_group(g, span), tolerance)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], SENTINEL))

    def check_twin(self, outs, twin_outs):
        for out, twin_out in zip(outs, twin_outs, strict=True):
            if out.shape[0] == self.capacity:
                out, twin_out = out[: self.num_rows], twin_out[: self.num_rows]
            self.assert_near(out, twin_out)


def activation(h, prob):
    gate, up = h.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up * prob[:, None]


def run_swiglu(p, source, index, module=gemm_swiglu, **options):
    h, a = p.blank(2 * p.ffn), p.blank(p.ffn)
    module.grouped_gemm_swiglu(source, p.weight1, p.row_start, p.row_probs, h, a, row_index=index, **options)
    return h, a


def run_dswiglu(p, source, index, h, module=gemm_swiglu, **options):
    dh, a, dprob = p.blank(2 * p.ffn), p.blank(p.ffn), p.blank(dtype=torch.float32)
    shape = module.dswiglu_partials_shape(p.capacity, p.ffn)
    if "config" in options:  # its tiles may be narrower than any that is chosen
        shape = (-(-p.ffn // options["config"].block_n), p.capacity)
    partials = torch.full(shape, torch.nan, device="cuda")
    module.grouped_gemm_dswiglu(
        source, p.weight2, p.row_start, h, p.row_probs, dh, a, dprob, partials, row_index=index, **options
    )
    return dh, a, dprob


def check_all(p, gemm_options=None, wgrad_options=None, swiglu_options=None, dswiglu_options=None):
    """All five functions, contiguous and gathered, against float64 and the twins."""
    gemm_options, wgrad_options = gemm_options or {}, wgrad_options or {}
    swiglu_options, dswiglu_options = swiglu_options or {}, dswiglu_options or {}
    for source, index, rows in p.sources():
        out, twin_out = p.blank(2 * p.ffn), p.blank(2 * p.ffn)
        gemm.grouped_gemm(source, p.weight1, p.row_start, out, row_index=index, **gemm_options)
        p.check_rows(out, lambda g, span, rows=rows: rows[span] @ p.weight1[g].double().t())
        twin_gemm.grouped_gemm(source, p.weight1, p.row_start, twin_out, row_index=index)
        p.check_twin([out], [twin_out])

        h, a = run_swiglu(p, source, index, **swiglu_options)
        p.check_rows(h, lambda g, span, rows=rows: rows[span] @ p.weight1[g].double().t())
        p.check_rows(a, lambda g, span, h=h: activation(h[span].double(), p.row_probs[span].double()))
        p.check_twin([h, a], run_swiglu(p, source, index, twin_gemm_swiglu))

        dh, a, dprob = run_dswiglu(p, source, index, p.h, **dswiglu_options)
        for g, span in enumerate(p.spans):
            h = p.h[span].double().requires_grad_()
            prob = p.row_probs[span].double().requires_grad_()
            act = activation(h, prob)
            act.backward(rows[span] @ p.weight2[g].double())
            p.assert_near(a[span], act.detach())
            p.assert_near(dh[span], h.grad)
            p.assert_near(dprob[span], prob.grad, tolerance=1e-5)
        for out in (dh, a, dprob):
            p.check_rows(out, lambda g, span, out=out: out[span])
        p.check_twin([dh, a, dprob], run_dswiglu(p, source, index, p.h, twin_gemm_swiglu))

        dw1, dw2 = p.blank_weight(p.weight1), p.blank_weight(p.weight2)
        gemm.grouped_gemm_wgrad(p.h, source, p.row_start, dw1, rows_index=index, **wgrad_options)
        a = p.h[:, : p.ffn].contiguous()
        gemm.grouped_gemm_wgrad(source, a, p.row_start, dw2, dout_index=index, **wgrad_options)
        for g, span in enumerate(p.spans):
            p.assert_near(dw1[g], p.h[span].double().t() @ rows[span])
            p.assert_near(dw2[g], rows[span].t() @ a[span].double())
            if span.start == span.stop:
                assert not dw1[g].any()
        twin_dw1, twin_dw2 = p.blank_weight(p.weight1), p.blank_weight(p.weight2)
        twin_gemm.grouped_gemm_wgrad(p.h, source, p.row_start, twin_dw1, rows_index=index)
        twin_gemm.grouped_gemm_wgrad(source, a, p.row_start, twin_dw2, dout_index=index)
        p.check_twin([dw1, dw2], [twin_dw1, twin_dw2])

    dx, twin_dx = p.blank(p.hidden), p.blank(p.hidden)
    gemm.grouped_gemm_dgrad(p.h, p.weight1, p.row_start, dx, **gemm_options)
    p.check_rows(dx, lambda g, span: p.h[span].double() @ p.weight1[g].double())
    twin_gemm.grouped_gemm_dgrad(p.h, p.weight1, p.row_start, twin_dx)
    p.check_twin([dx], [twin_dx])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64_and_twins(widths, dtype):
    for splits in SPLITS:
        check_all(Problem(splits, widths, dtype))


BASE = {"block_m": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "flatten": {"flatten": True, "block_n": 128, "parts": 4},
    "wide": {"block_n": 256, "parts": 8},
    "flatten parts": {"flatten": True, "block_n": 128, "parts": 8, "group_m": 16},
    "two programs": {"programs_per_sm": 2, "block_n": 64, "parts": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant):
    """What a sweep may choose must be right before it is fast."""
    config = gemm.TileConfig(**BASE, **VARIANTS[variant])
    options = {"config": config}
    fused = {"config": replace(config, block_n=min(config.block_n, 128))}
    check_all(Problem(SPLITS[0], WIDTHS[1], torch.bfloat16), options, options, fused, options)


def all_results(p, num_sms=None):
    """Every output of every function, gathered where there is a choice."""
    options = {"num_sms": num_sms}
    h, a = run_swiglu(p, p.packed, p.row_index, **options)
    dh, a_again, dprob = run_dswiglu(p, p.packed, p.row_index, h, **options)
    out, dx = p.blank(p.hidden), p.blank(p.hidden)
    gemm.grouped_gemm(a, p.weight2, p.row_start, out, **options)
    gemm.grouped_gemm_dgrad(dh, p.weight1, p.row_start, dx, **options)
    dw1, dw2 = p.blank_weight(p.weight1), p.blank_weight(p.weight2)
    gemm.grouped_gemm_wgrad(dh, p.packed, p.row_start, dw1, rows_index=p.row_index, **options)
    gemm.grouped_gemm_wgrad(p.packed, a, p.row_start, dw2, dout_index=p.row_index, **options)
    return {"h": h, "a": a, "dh": dh, "a_again": a_again, "dprob": dprob, "out": out, "dx": dx}, (dw1, dw2)


def assert_same_bits(left, right):
    for (rows, weights), (other_rows, other_weights) in [(left, right)]:
        for name, tensor in rows.items():
            assert torch.equal(tensor, other_rows[name]), name
        for tensor, other in zip(weights, other_weights, strict=True):
            assert torch.equal(tensor, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_runs_and_other_grids_give_the_same_bits(dtype):
    p = Problem(SPLITS[0], WIDTHS[1], dtype)
    first = all_results(p)
    for num_sms in (None, None, 100, 1):
        assert_same_bits(first, all_results(p, num_sms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputed_activation_has_the_same_bits(dtype):
    for widths in WIDTHS:
        rows, _ = all_results(Problem(SPLITS[0], widths, dtype))
        assert torch.equal(rows["a"], rows["a_again"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    among.row_probs[span] = alone.row_probs[:size]
    among.weight1[1], among.weight2[1] = alone.weight1[0], alone.weight2[0]
    alone_rows, alone_weights = all_results(alone)
    among_rows, among_weights = all_results(among)
    for name, tensor in alone_rows.items():
        assert torch.equal(tensor[:size], among_rows[name][span]), name
    for tensor, other in zip(alone_weights, among_weights, strict=True):
        assert torch.equal(tensor[0], other[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_its_place(dtype):
    """Reversing the rows of a group reverses the results (weight gradients, sums over rows, left out)."""
    p = Problem((777,), WIDTHS[1], dtype)
    rows, _ = all_results(p)
    p.row_index[:777] = p.row_index[:777].flip(0)
    p.row_probs[:777] = p.row_probs[:777].flip(0)
    for name, tensor in all_results(p)[0].items():
        assert torch.equal(tensor[:777].flip(0), rows[name][:777]), name


def test_graph_replay_with_other_splits():
    """One capture serves every routing that fits the capacity."""
    first, second = (300, 0, 1, 777, 128, 0, 0), (0, 900, 300, 3, 0, 0, 3)
    assert sum(first) == sum(second)
    p = Problem(first, WIDTHS[0], torch.bfloat16)
    all_results(p)  # compile outside of the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_results(p)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_results(p)
    for splits in (first, second, first):
        p.row_start.copy_(torch.tensor(list(itertools.accumulate(splits, initial=0)), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, all_results(p))


def test_no_rows():
    """A capacity of zero: nothing to launch but the zeros of the weight gradients."""
    empty = {n: torch.empty(0, n, dtype=torch.bfloat16, device="cuda") for n in (64, 96, 192)}
    row_start = torch.zeros(4, dtype=torch.int32, device="cuda")
    weight1 = torch.ones(3, 192, 64, dtype=torch.bfloat16, device="cuda")
    weight2 = torch.ones(3, 64, 96, dtype=torch.bfloat16, device="cuda")
    probs = torch.empty(0, device="cuda")
    partials = torch.empty(gemm_swiglu.dswiglu_partials_shape(0, 96), device="cuda")
    gemm_swiglu.grouped_gemm_swiglu(empty[64], weight1, row_start, probs, empty[192], empty[96])
    gemm.grouped_gemm(empty[96], weight2, row_start, empty[64])
    gemm.grouped_gemm_dgrad(empty[192], weight1, row_start, empty[64])
    gemm_swiglu.grouped_gemm_dswiglu(
        empty[64], weight2, row_start, empty[192], probs, empty[192], empty[96], probs, partials
    )
    gemm.grouped_gemm_wgrad(empty[192], empty[64], row_start, weight1)
    assert not weight1.any()


def test_offsets_beyond_32_bits():
    """Outputs of more than 2^31 elements: the last rows, which a 32-bit offset would miss."""
    num_rows, width, inner = 70_000, 32_768, 64
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(num_rows, inner, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(2, width, inner, device="cuda", generator=generator).bfloat16()
    row_start = torch.tensor([0, 69_000, num_rows], dtype=torch.int32, device="cuda")
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda")
    gemm.grouped_gemm(rows, weight, row_start, out)
    expected = rows[-500:].float() @ weight[1].float().t()
    torch.testing.assert_close(out[-500:].float(), expected, rtol=1e-2, atol=5e-2)
    # The same rows read by a gather and by the transposed products.
    index = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    narrow = torch.empty(num_rows, inner, dtype=torch.bfloat16, device="cuda")
    weight_t = weight.transpose(1, 2).contiguous()
    gemm.grouped_gemm(out, weight_t, row_start, narrow, row_index=index)
    again = torch.empty_like(narrow)
    gemm.grouped_gemm_dgrad(out, weight, row_start, again)
    expected = out[-500:].double() @ weight[1].double()
    for got in (narrow, again):
        error = (got[-500:].double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
    dw = torch.empty_like(weight)
    gemm.grouped_gemm_wgrad(out, rows, row_start, dw, dout_index=index)
    expected = out[69_000:].double().t() @ rows[69_000:].double()
    assert (dw[1].double() - expected).abs().max() / expected.abs().max() < 1e-2
