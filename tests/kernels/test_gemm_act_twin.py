"""The twins of the activations and of the GEMMs fused with them, against float64 formulas and autograd."""

import math

import pytest
import torch
from gemm_problem import (
    BOTH,
    DTYPES,
    ActProblem,
    check_act,
    check_activation,
    check_fused,
    check_nan_goes_through,
    formula,
)

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.activation import Activation

WIDTHS, CAPACITY = (24, 40), 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,)]
ACTIVATIONS = {
    "swiglu": Activation(),
    "limits": Activation(alpha=1.702, limit=0.75, offset=1.0),
    "interleave": Activation(interleave=4),
    "interleaved limits": Activation(alpha=1.702, limit=0.75, offset=1.0, interleave=1),
    "srelu": Activation(function="relu2", is_gated=False),
    "silu": Activation(is_gated=False),
    "gelu": Activation(function="gelu", is_gated=False),
    "interleaved geglu": Activation(function="gelu", interleave=4),
    "tanh geglu, limits": Activation(function="gelu_tanh", limit=0.75, offset=1.0),
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


@dtypes
@activations
def test_activation_and_its_gradient(activation, dtype):
    check_activation(twin, ActProblem((CAPACITY,), WIDTHS, dtype, activation, capacity=CAPACITY))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_derivatives_at_the_limits_are_those_of_clamp(offset):
    """Exactly at a limit the gradient goes through; beyond it stops, from below only for up."""
    limit = 2.0
    activation = Activation(limit=limit, offset=offset)
    gate = torch.tensor([[limit, limit + 1, -limit - 1, 1.0, 1.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, 1.0, 1.0, limit, -limit, limit + 1, -limit - 1]])
    h = torch.cat([gate, up], dim=1)
    one, dh, dscale = torch.ones(1), torch.empty_like(h), torch.empty(1)
    twin.scaled_activation_grad(torch.ones_like(gate), h, one, dh, dscale, activation)
    h64 = h.double().requires_grad_()
    formula(h64, activation).sum().backward()
    torch.testing.assert_close(dh.double(), h64.grad, rtol=1e-5, atol=1e-6)
    assert (dh != 0).tolist() == [[True, False, True, True, True, True, True] + [True] * 5 + [False] * 2]


@activations
def test_nan_goes_through(activation):
    check_nan_goes_through(twin, activation)


def test_infinite_features_do_not_become_nan():
    """A gate of minus infinity closes; a large one does not overflow the sigmoid."""
    h = torch.tensor([[-1e30, 100.0, 1.0, 1.0]])
    out = torch.empty(1, 2)
    twin.scaled_activation(h, torch.ones(1), out, Activation())
    assert out.tolist() == [[0.0, 100.0]]
    assert math.isinf(Activation().limit)


@dtypes
@activations
@pytest.mark.parametrize("splits", SPLITS)
def test_both_passes(splits, dtype, activation):
    p = ActProblem(splits, WIDTHS, dtype, activation, capacity=CAPACITY)
    check_act(twin, p, cases=[(gather, with_bias) for gather in BOTH for with_bias in BOTH])


@dtypes
@activations
def test_fused_is_bitwise_the_three_modules(activation, dtype):
    """The gradient in between is rounded to the dtype."""
    check_fused(twin, ActProblem(SPLITS[0], WIDTHS, dtype, activation))


def test_interleave_has_to_divide_the_width():
    h = torch.zeros(1, 80)
    with pytest.raises(ArgumentError, match=r"interleave \(16\) must divide the FFN width \(40\)"):
        twin.scaled_activation(h, torch.ones(1), torch.empty(1, 40), Activation(interleave=16))
