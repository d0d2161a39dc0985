"""The twins of the activations and of the GEMMs fused with them, against float64 formulas and autograd."""

import math

import pytest
import torch
from row_ranges import spans_of, whole_groups

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import Activation
from symmoe.kernels.twin import activation as twin_activation
from symmoe.kernels.twin import bias as twin_bias
from symmoe.kernels.twin import gemm as twin_gemm
from symmoe.kernels.twin import gemm_act

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 40, 9, 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SENTINEL = -77.0
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACTIVATIONS = {
    "swiglu": Activation(),
    "limits": Activation(alpha=1.702, limit=0.75, offset=1.0),
    "interleave": Activation(interleave=4),
    "interleaved limits": Activation(alpha=1.702, limit=0.75, offset=1.0, interleave=1),
    "srelu": Activation(kind="srelu"),
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def formula(h, activation):
    """act(h) of float64 h [N, W], with autograd, column by column."""
    if activation.kind == "srelu":
        return torch.relu(h) ** 2
    ffn = h.shape[1] // 2
    block = activation.interleave or ffn
    gates = torch.tensor([c // block * 2 * block + c % block for c in range(ffn)])
    gate = h[:, gates].clamp(max=activation.limit)
    up = h[:, gates + block].clamp(min=-activation.limit, max=activation.limit)
    return (up + activation.offset) * gate * torch.sigmoid(activation.alpha * gate)


class Problem:
    """Inputs of both passes: tail rows are NaN, tail indices out of range, packed rows are shared."""

    def __init__(self, splits, dtype, activation, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.splits, self.width = dtype, splits, activation.hidden_width(FFN)
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.row_range = whole_groups(splits)
        self.spans = spans_of(self.row_range)
        self.row_index = torch.randint(0, NUM_PACKED, (CAPACITY,), dtype=torch.int32, generator=self.generator)
        self.row_index[self.num_rows :] = 2**30
        self.rows, self.packed = self.with_tail(HIDDEN), self.normal(NUM_PACKED, HIDDEN)
        self.weight1 = self.normal(self.num_groups, self.width, HIDDEN, scale=HIDDEN**-0.5)
        self.weight2 = self.normal(self.num_groups, HIDDEN, FFN, scale=HIDDEN**-0.5)
        self.bias = self.normal(self.num_groups, self.width)
        self.h, self.scale = self.with_tail(self.width), self.with_tail().float()

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def with_tail(self, *shape):
        tensor = self.normal(CAPACITY, *shape)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((CAPACITY, *shape), SENTINEL, dtype=dtype or self.dtype)

    def sources(self):
        """(tensor, index, float64 rows of the groups), contiguous and gathered."""
        yield self.rows, None, self.rows[: self.num_rows].double()
        yield self.packed, self.row_index, self.packed[self.row_index[: self.num_rows].long()].double()

    def multiply(self, rows, weight, transpose):
        """Group by group in float64."""
        product = [rows[s] @ (w.t() if transpose else w) for s, w in zip(self.spans, weight.double(), strict=True)]
        return torch.cat(product)

    def check(self, out, expected):
        """Every row of a group is as expected, and the tail still holds the sentinel."""
        assert_near(out[: self.num_rows], expected, self.dtype)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], SENTINEL))


def assert_near(out, expected, dtype):
    """Relative to the largest value."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


@dtypes
@activations
def test_activation_and_its_gradient(activation, dtype):
    p = Problem((CAPACITY,), dtype, activation)
    out, dh, dscale = p.blank(FFN), p.blank(p.width), p.blank(dtype=torch.float32)
    twin_activation.scaled_activation(p.h, p.scale, out, activation)
    dout = p.normal(CAPACITY, FFN)
    twin_activation.scaled_activation_grad(dout, p.h, p.scale, dh, dscale, activation)
    h, scale = p.h.double().requires_grad_(), p.scale.double().requires_grad_()
    expected = formula(h, activation) * scale[:, None]
    expected.backward(dout.double())
    assert_near(out, expected.detach(), dtype)
    assert_near(dh, h.grad, dtype)
    assert_near(dscale, scale.grad, torch.float32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_derivatives_at_the_limits_are_those_of_clamp(offset):
    """Exactly at a limit the gradient goes through; beyond it stops, from below only for up."""
    limit = 2.0
    activation = Activation(limit=limit, offset=offset)
    gate = torch.tensor([[limit, limit + 1, -limit - 1, 1.0, 1.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, 1.0, 1.0, limit, -limit, limit + 1, -limit - 1]])
    h = torch.cat([gate, up], dim=1)
    one, dh, dscale = torch.ones(1), torch.empty_like(h), torch.empty(1)
    twin_activation.scaled_activation_grad(torch.ones_like(gate), h, one, dh, dscale, activation)
    h64 = h.double().requires_grad_()
    formula(h64, activation).sum().backward()
    torch.testing.assert_close(dh.double(), h64.grad, rtol=1e-5, atol=1e-6)
    assert (dh != 0).tolist() == [[True, False, True, True, True, True, True] + [True] * 5 + [False] * 2]


@activations
def test_nan_goes_through(activation):
    h = torch.randn(2, activation.hidden_width(FFN))
    h[1] = torch.nan
    out, dh, dscale = torch.empty(2, FFN), torch.empty_like(h), torch.empty(2)
    twin_activation.scaled_activation(h, torch.ones(2), out, activation)
    twin_activation.scaled_activation_grad(torch.ones(2, FFN), h, torch.ones(2), dh, dscale, activation)
    for tensor in (out, dh, dscale):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


def test_infinite_features_do_not_become_nan():
    """A gate of minus infinity closes; a large one does not overflow the sigmoid."""
    h = torch.tensor([[-1e30, 100.0, 1.0, 1.0]])
    out = torch.empty(1, 2)
    twin_activation.scaled_activation(h, torch.ones(1), out, Activation())
    assert out.tolist() == [[0.0, 100.0]]
    assert math.isinf(Activation().limit)


@dtypes
@activations
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("biased", [False, True])
def test_forward(splits, dtype, activation, biased):
    p = Problem(splits, dtype, activation)
    for source, index, rows in p.sources():
        h, a = p.blank(p.width), p.blank(FFN)
        bias = p.bias if biased else None
        gemm_act.grouped_gemm_act(source, p.weight1, p.row_range, p.scale, h, a, activation, row_index=index, bias=bias)
        expected = p.multiply(rows, p.weight1, transpose=True)
        if biased:
            expected = expected + torch.cat([p.bias[g : g + 1].expand(n, -1) for g, n in enumerate(splits)])
        p.check(h, expected)
        # From the rounded h, so only the rounding of a itself is left.
        kept = h[: p.num_rows].double()
        p.check(a, formula(kept, activation) * p.scale[: p.num_rows, None].double())


@dtypes
@activations
@pytest.mark.parametrize("splits", SPLITS)
def test_backward(splits, dtype, activation):
    p = Problem(splits, dtype, activation)
    workspace = torch.empty(gemm_act.dact_workspace_numel(CAPACITY, p.num_groups, FFN, activation))
    for source, index, rows in p.sources():
        dh, a, dscale = p.blank(p.width), p.blank(FFN), p.blank(dtype=torch.float32)
        dbias = torch.full((p.num_groups, p.width), torch.nan)
        gemm_act.grouped_gemm_dact(
            source,
            p.weight2,
            p.row_range,
            p.h,
            p.scale,
            dh,
            a,
            dscale,
            workspace,
            activation,
            row_index=index,
            dbias=dbias,
        )
        da = p.multiply(rows, p.weight2, transpose=False)
        h = p.h[: p.num_rows].double().requires_grad_()
        scale = p.scale[: p.num_rows].double().requires_grad_()
        expected = formula(h, activation) * scale[:, None]
        expected.backward(da)
        p.check(a, expected.detach())
        p.check(dh, h.grad)
        assert_near(dscale[: p.num_rows], scale.grad, dtype)  # the rounding of da is in every term
        assert not dscale[p.num_rows :].any()
        for g, span in enumerate(p.spans):
            assert_near(dbias[g], dh[span].double().sum(0), torch.float32)


@dtypes
@activations
def test_fused_is_bitwise_the_three_modules(activation, dtype):
    """GEMM, activation, GEMM by themselves, with the gradient in between rounded to the dtype."""
    p = Problem(SPLITS[0], dtype, activation)
    rows, n = p.rows, p.num_rows
    h, a = p.blank(p.width), p.blank(FFN)
    gemm_act.grouped_gemm_act(rows, p.weight1, p.row_range, p.scale, h, a, activation, bias=p.bias)
    dh, a_again, dscale = p.blank(p.width), p.blank(FFN), p.blank(dtype=torch.float32)
    dbias, workspace = torch.full_like(p.bias, torch.nan), torch.empty(CAPACITY)
    gemm_act.grouped_gemm_dact(
        rows, p.weight2, p.row_range, h, p.scale, dh, a_again, dscale, workspace, activation, dbias=dbias
    )

    h3, a3, da3, dh3 = p.blank(p.width), p.blank(FFN), p.blank(FFN), p.blank(p.width)
    dscale3, dbias3 = p.blank(dtype=torch.float32), torch.full_like(p.bias, torch.nan)
    twin_gemm.grouped_gemm(rows, p.weight1, p.row_range, h3, bias=p.bias)
    twin_activation.scaled_activation(h3, p.scale, a3, activation)
    twin_gemm.grouped_gemm_dgrad(rows, p.weight2, p.row_range, da3)
    twin_activation.scaled_activation_grad(da3, h3, p.scale, dh3, dscale3, activation)
    twin_bias.grouped_bias_grad(dh3, p.row_range, dbias3)

    for fused, alone in ((h, h3), (a, a3), (a_again, a3), (dh, dh3), (dscale, dscale3)):
        assert torch.equal(fused[:n], alone[:n])
    assert_near(dbias, dbias3, dtype)


def test_interleave_has_to_divide_the_width():
    h = torch.zeros(1, 2 * FFN)
    with pytest.raises(ArgumentError, match=r"interleave \(16\) must divide the FFN width \(40\)"):
        twin_activation.scaled_activation(h, torch.ones(1), torch.empty(1, FFN), Activation(interleave=16))
