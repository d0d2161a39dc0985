"""Scaled activations against float64 autograd, and the helpers that interleave gate and up features."""

import math

import grouped_cases as cases
import pytest
import torch
from activation_formula import gate_columns, scaled

import symmoe
from symmoe.errors import ArgumentError
from symmoe.kernels.activation import Activation

I = 12


CLAMPS = {"alpha": 0.5, "limit": 0.75, "offset": -0.5}
ACTIVATIONS = {
    **{
        name: case for name, case in cases.ACTIVATIONS.items() if case.activation.interleave is None
    },
    "clamped": symmoe.grouped.ScaledClampedSwiGLU(**CLAMPS),
    "silu": cases.scaled("silu", is_gated=False),
    "quick gelu": cases.scaled("silu", is_gated=False, alpha=1.702),
    "gated srelu": cases.scaled("relu2"),
}


def operands(
    activation: symmoe.grouped.ScaledActivation,
    lead: tuple[int, ...],
    dtype: torch.dtype,
    seed: int = 0,
):
    """h with values inside and outside of the limits, scale, and the gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(*lead, activation.activation.hidden_width(I), generator=generator) * 3
    return (
        h.to(dtype),
        torch.randn(lead, generator=generator),
        torch.randn(*lead, I, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(37,), (3, 5), (2, 1, 4)], ids=str)
def test_against_float64(name, dtype, lead):
    activation = ACTIVATIONS[name]
    h, scale, d_out = operands(activation, lead, dtype)
    scale[-1] = 0  # which has a gradient, too
    h.requires_grad_()
    scale.requires_grad_()
    out = activation(h, scale)
    assert out.dtype == dtype
    out.backward(d_out)
    assert (h.grad.dtype, scale.grad.dtype) == (dtype, torch.float32)
    want_out, want_h, want_scale = scaled(h, scale, d_out, activation.activation)
    cases.assert_near(out.detach(), want_out, dtype, "out")
    cases.assert_near(h.grad, want_h, dtype, "d_h")
    cases.assert_near(
        scale.grad, want_scale, torch.float32 if dtype is torch.float32 else dtype, "d_scale"
    )


def test_torch_knows_swiglu_and_gpt_oss():
    """The formulas again, as model code writes them: F.silu, and the experts of gpt-oss."""
    h, scale, _ = operands(symmoe.grouped.ScaledSwiGLU(), (40,), torch.float32)
    gate, up = h.chunk(2, dim=1)
    torch.testing.assert_close(
        symmoe.grouped.ScaledSwiGLU()(h, scale),
        torch.nn.functional.silu(gate) * up * scale[:, None],
    )
    gate = gate.clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    want = (up + 1) * (gate * torch.sigmoid(gate * 1.702)) * scale[:, None]
    torch.testing.assert_close(symmoe.grouped.ScaledClampedSwiGLU()(h, scale), want)


def test_defaults_are_plain_swiglu_without_clamps():
    h, scale, _ = operands(symmoe.grouped.ScaledSwiGLU(), (20,), torch.float32)
    plain = symmoe.grouped.ScaledSwiGLU()
    clamped = symmoe.grouped.ScaledClampedSwiGLU(alpha=1.0, limit=math.inf, offset=0.0)
    cases.assert_same_bits(clamped(h, scale), plain(h, scale))
    assert symmoe.grouped.ScaledClampedSwiGLU().activation == Activation(
        alpha=1.702, limit=7.0, offset=1.0
    )
    assert list(plain.parameters()) == []


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_derivatives_at_the_limits(dtype, offset):
    """torch.clamp's: 1 at equality, 0 outside; relu's: 0 at 0."""
    values = torch.tensor([-2.5, -2.0, -1.0, 0.0, 1.0, 2.0, 2.5])
    grid = torch.cartesian_prod(values, values).to(dtype)
    h = grid.clone().requires_grad_()
    ones = torch.ones(len(grid))
    activation = symmoe.grouped.ScaledClampedSwiGLU(alpha=1.5, limit=2.0, offset=offset)
    activation(h, ones).sum().backward()
    _, want, _ = scaled(grid, ones, ones[:, None], activation.activation)
    cases.assert_near(h.grad, want, dtype)
    assert ((h.grad == 0) >= (want == 0)).all()
    x = torch.tensor([[-1.0], [0.0], [2.0]], dtype=dtype, requires_grad=True)
    symmoe.grouped.ScaledSReLU()(x, torch.ones(3)).sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 4]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_go_through(name):
    activation = ACTIVATIONS[name]
    width = activation.activation.hidden_width(1)
    h = torch.ones(3, width)
    h[1] = torch.nan
    out = activation(h, torch.ones(3))
    assert out[1].isnan().all()
    assert out[::2].isfinite().all()
    assert activation(
        torch.ones(2, width), torch.tensor([torch.nan, 1.0])
    ).isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_values_do_not_make_nan(name):
    """exp overflows where sigmoid is 0 or 1."""
    activation = ACTIVATIONS[name]
    width = activation.activation.hidden_width(1)
    h = torch.tensor([[-1e4] * width, [1e4] * width, [-300.0] * width]).requires_grad_()
    scale = torch.ones(3, requires_grad=True)
    out = activation(h, scale)
    out.sum().backward()
    want_out, want_h, want_scale = scaled(h, scale, torch.ones(3, 1), activation.activation)
    torch.testing.assert_close(out.double(), want_out)
    torch.testing.assert_close(h.grad.double(), want_h)
    torch.testing.assert_close(scale.grad.double(), want_scale)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_scale_of_any_floating_dtype(scale_dtype):
    activation = symmoe.grouped.ScaledSwiGLU()
    h, scale, d_out = operands(activation, (20,), torch.bfloat16)
    scale = scale.to(scale_dtype).requires_grad_()
    out = activation(h, scale)
    out.backward(d_out)
    assert (out.dtype, scale.grad.dtype) == (torch.bfloat16, scale_dtype)
    cases.assert_near(scale.grad, scaled(h, scale, d_out, activation.activation)[2], torch.bfloat16)


@pytest.mark.parametrize("only", ["h", "scale"])
def test_one_argument_takes_a_gradient(only):
    activation = symmoe.grouped.ScaledSwiGLU()
    h, scale, d_out = operands(activation, (9,), torch.float32)
    _, want_h, want_scale = scaled(h, scale, d_out, activation.activation)
    {"h": h, "scale": scale}[only].requires_grad_()
    activation(h, scale).backward(d_out)
    actual, expected = (h.grad, want_h) if only == "h" else (scale.grad, want_scale)
    cases.assert_near(actual, expected, torch.float32)


def test_strided_arguments():
    activation = symmoe.grouped.ScaledSwiGLU()
    h, scale, d_out = operands(activation, (8,), torch.float32)
    want = activation(h, scale)
    strided_h = torch.empty(8, 4 * I)[:, ::2].copy_(h).requires_grad_()
    out = activation(strided_h, torch.empty(8, 3)[:, 1].copy_(scale))
    out.backward(d_out.t().contiguous().t())
    cases.assert_same_bits(out, want)
    cases.assert_near(
        strided_h.grad, scaled(h, scale, d_out, activation.activation)[1], torch.float32
    )


@pytest.mark.parametrize("lead", [(0,), (0, 3), (3, 0)], ids=str)
def test_no_rows(lead):
    h = torch.empty(*lead, 2 * I, requires_grad=True)
    scale = torch.empty(lead, requires_grad=True)
    out = symmoe.grouped.ScaledSwiGLU()(h, scale)
    assert out.shape == (*lead, I)
    out.sum().backward()
    assert (h.grad.shape, scale.grad.shape) == (h.shape, scale.shape)


@pytest.mark.parametrize(
    ("activation", "h", "scale", "parts"),
    [
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 5),
            torch.ones(3),
            ["h has 5 columns", "multiple of 2"],
        ),
        (
            symmoe.grouped.ScaledSwiGLU(interleave=4),
            torch.ones(3, 12),
            torch.ones(3),
            ["h has 12 columns", "multiple of 8"],
        ),
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 4).double(),
            torch.ones(3),
            ["h has dtype torch.float64", "torch.bfloat16"],
        ),
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 4).int(),
            torch.ones(3),
            ["h has dtype torch.int32"],
        ),
        (symmoe.grouped.ScaledSwiGLU(), torch.ones(3, 4), torch.ones(4), ["scale", "[4]", "[3]"]),
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 4),
            torch.ones(3, 1),
            ["scale", "[3, 1]", "[3]"],
        ),
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 4),
            torch.ones(3).int(),
            ["scale", "torch.int32", "floating point"],
        ),
        (symmoe.grouped.ScaledSwiGLU(), torch.ones(3, 4), [1.0] * 3, ["scale (list)", "tensor"]),
        (
            symmoe.grouped.ScaledSwiGLU(),
            torch.ones(3, 4),
            torch.ones(3, device="meta"),
            ["scale", "meta", "cpu"],
        ),
        (symmoe.grouped.ScaledSwiGLU(), [[1.0, 2.0]], torch.ones(1), ["h (list)"]),
    ],
    ids=str,
)
def test_wrong_arguments(activation, h, scale, parts):
    with cases.refused(*parts):
        activation(h, scale)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Activation(function="tanh"),
            r"function \('tanh'\) must be one of 'silu', 'gelu', 'gelu_tanh', 're",
        ),
        (
            lambda: Activation(function="gelu", alpha=1.702),
            r"alpha \(1.702\) needs function 'silu', not 'gelu'",
        ),
        (
            lambda: Activation(is_gated=False, limit=7.0),
            r"limit \(7.0\) and offset \(0.0\) need a gated activation",
        ),
        (lambda: Activation(is_gated=False, offset=1.0), r"offset \(1.0\) need a gated activation"),
        (
            lambda: symmoe.grouped.ScaledClampedSwiGLU(limit=0.0),
            r"limit \(0.0\) must be greater than 0",
        ),
        (lambda: symmoe.grouped.ScaledClampedSwiGLU(limit=-1.0), r"limit \(-1.0\)"),
        (lambda: symmoe.grouped.ScaledClampedSwiGLU(limit=math.nan), r"limit \(nan\)"),
        (lambda: symmoe.grouped.ScaledSwiGLU(interleave=0), r"interleave \(0\)"),
        (lambda: Activation(is_gated=False, interleave=2), r"interleave \(2\)"),
    ],
)
def test_wrong_constructors(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()


# -- interleaving -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [1, 2, 3, 4, 12])
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 24, 5), -2), ((3, 24, 5), 1), ((3, 24), -1), ((24,), 0)], ids=str
)
def test_conversion(block, shape, dim):
    tensor = torch.randn(shape)
    interleaved = symmoe.grouped.interleave_gate_up(tensor, block, dim=dim)
    cases.assert_same_bits(
        interleaved, tensor.index_select(dim, torch.cat(gate_columns(12, block)).argsort())
    )
    cases.assert_same_bits(symmoe.grouped.deinterleave_gate_up(interleaved, block, dim=dim), tensor)
    cases.assert_same_bits(
        symmoe.grouped.interleave_gate_up(
            symmoe.grouped.deinterleave_gate_up(tensor, block, dim=dim), block, dim=dim
        ),
        tensor,
    )


@pytest.mark.parametrize(
    "convert", [symmoe.grouped.interleave_gate_up, symmoe.grouped.deinterleave_gate_up]
)
@pytest.mark.parametrize("block", [0, -1, 5, 24])
def test_wrong_block(convert, block):
    with pytest.raises(ArgumentError, match=r"dimension 1 \(24\) must be a multiple of 2 \* block"):
        convert(torch.ones(2, 24), block, dim=1)


@pytest.mark.parametrize("block", [1, 2, 4, 12])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("make", [symmoe.grouped.ScaledSwiGLU, symmoe.grouped.ScaledClampedSwiGLU])
def test_interleaved_is_the_same_function(block, dtype, make):
    plain = make()
    interleaved = make(interleave=block)
    h, scale, d_out = operands(plain, (11,), dtype)
    h.requires_grad_()
    scale.requires_grad_()
    mixed = symmoe.grouped.interleave_gate_up(h.detach(), block, dim=-1).requires_grad_()
    other_scale = scale.detach().clone().requires_grad_()
    out = plain(h, scale)
    shuffled = interleaved(mixed, other_scale)
    out.backward(d_out)
    shuffled.backward(d_out)
    cases.assert_same_bits(shuffled, out)
    cases.assert_same_bits(symmoe.grouped.deinterleave_gate_up(mixed.grad, block, dim=-1), h.grad)
    cases.assert_same_bits(other_scale.grad, scale.grad)
