"""Cases that the grouped-linear suites share, how to run them, and an oracle that shares no code with the package. G
groups, N rows (with a tail that belongs to no group), H hidden, I ffn, W columns of FC1's output (2I if gated). The
oracle is float64, loops over rows, and stock autograd. Slow on purpose: nobody should have to doubt it."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
from activation_formula import formula
from torch import nn

import symmoe
from symmoe.kernels.activation import Activation

SENTINEL = -77.0
MAIN_GRAD_START = 0.5  # what a main_grad holds before the first accumulation


# -- the matrix -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One combination of what a caller can ask for."""

    dtype: torch.dtype = torch.float32
    is_nd: bool = False  # x is [A, B, H] and not [N, H]
    bias: bool = True
    buffers: tuple[str, ...] = ("out", "grad_input_out")  # which of them the caller brings
    main_grad: bool = False  # gradients accumulate in fp32 `main_grad`, not in `.grad`
    delayed: bool = False  # weight gradients come from backward_dw

    @property
    def options(self) -> dict:
        """Of a grouped layer."""
        flags = {"accumulate_into_main_grad": self.main_grad, "delay_wgrad": self.delayed}
        return {"bias": self.bias, "dtype": self.dtype, **flags}

    def __str__(self) -> str:
        words = [
            str(self.dtype).removeprefix("torch."),
            "ND" if self.is_nd else "2D",
            "bias" if self.bias else "none",
            "+".join(self.buffers) or "internal",
            "main_grad" if self.main_grad else "grad",
        ]
        return "-".join([*words, "delayed" if self.delayed else "immediate"])


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUFFERS = (("out",), ("grad_input_out",), ("out", "grad_input_out"))


def matrix() -> list[Case]:
    """Every combination: 3 dtypes x {2D, N-D} x {bias, none} x 3 x {main_grad, .grad} x {delayed, immediate}."""
    flags = (False, True)
    return [
        Case(*values) for values in itertools.product(DTYPES, flags, flags, BUFFERS, flags, flags)
    ]


@dataclass(frozen=True)
class Sizes:
    """Shapes of a problem; the N-D form of the N = A * B rows is [A, B]."""

    splits: tuple[int, ...] = (3, 0, 2, 4)
    lead: tuple[int, int] = (3, 4)
    hidden: int = 16
    ffn: int = 8

    @property
    def num_groups(self) -> int:
        return len(self.splits)

    @property
    def num_rows(self) -> int:
        """Tail included."""
        return self.lead[0] * self.lead[1]

    @property
    def num_used(self) -> int:
        return sum(self.splits)

    @property
    def groups(self) -> list[int]:
        """The group of every row that is not in the tail."""
        return [group for group, count in enumerate(self.splits) for _ in range(count)]


TINY = Sizes()
# One shape on GPUs, since kernels are compiled by shape; neither tiles nor contraction steps fit. 4 rows of tail.
ODD = Sizes(splits=(70, 0, 3, 55), lead=(12, 11), hidden=72, ffn=40)
everywhere = pytest.mark.parametrize(
    ("sizes", "device"),
    [
        pytest.param(TINY, "cpu", id="cpu"),
        pytest.param(ODD, "cuda", id="gpu", marks=pytest.mark.gpu),
    ],
)


@dataclass
class Inputs:
    """The inputs of a call: leaves without history. Rows of the tail hold NaN."""

    sizes: Sizes
    x: torch.Tensor  # [.., H]
    scale: torch.Tensor  # fp32 [..]
    d_y: torch.Tensor  # the gradient of the result
    w1: torch.Tensor  # [G, W, H]
    b1: torch.Tensor  # [G, W]
    w2: torch.Tensor  # [G, H, I]
    b2: torch.Tensor  # [G, H]

    @property
    def splits(self) -> torch.Tensor:
        """int64 [G] on the device of x."""
        return torch.tensor(self.sizes.splits, device=self.x.device)


def make_inputs(
    case: Case, *, sizes: Sizes = TINY, width=None, out_features=None, device="cpu", seed=0
) -> Inputs:
    """Inputs with results around 1. `width` is W (2I by default), `out_features` the columns of d_y (H by default)."""
    generator = torch.Generator().manual_seed(seed)
    groups, hidden, ffn = sizes.num_groups, sizes.hidden, sizes.ffn
    width = 2 * ffn if width is None else width
    lead = sizes.lead if case.is_nd else (sizes.num_rows,)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def rows(*columns: int) -> torch.Tensor:
        tensor = normal(sizes.num_rows, *columns)
        tensor[sizes.num_used :] = torch.nan
        return tensor.view(*lead, *columns)

    def on_device(tensor: torch.Tensor, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype)

    return Inputs(
        sizes,
        x=on_device(rows(hidden)),
        scale=on_device(rows(), torch.float32),
        d_y=on_device(rows(hidden if out_features is None else out_features)),
        w1=on_device(normal(groups, width, hidden, std=hidden**-0.5)),
        b1=on_device(normal(groups, width)),
        w2=on_device(normal(groups, hidden, ffn, std=ffn**-0.5)),
        b2=on_device(normal(groups, hidden)),
    )


def fill(linear: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, case: Case) -> None:
    """Puts values into a grouped linear layer, and gives its weights the main_grad that the case wants."""
    with torch.no_grad():
        if linear.is_packed:
            linear.weight.copy_(weight)
        else:
            for g in range(weight.shape[0]):
                getattr(linear, f"weight{g}").copy_(weight[g])
        if linear.bias is not None:
            linear.bias.copy_(bias)
    if case.main_grad:
        for parameter in linear.weight_parameters():
            parameter.main_grad = torch.full(
                parameter.shape, MAIN_GRAD_START, device=parameter.device
            )
            parameter.grad_added_to_main_grad = False


# -- running one call -------------------------------------------------------------------------------------------------
@dataclass
class Buffers:
    """The buffers of the caller, prefilled with SENTINEL. None where the case has none."""

    out: torch.Tensor | None = None
    grad_input_out: torch.Tensor | None = None

    @classmethod
    def of(cls, case: Case, inputs: Inputs, *, out_features: int) -> "Buffers":
        shapes = {
            "out": (*inputs.x.shape[:-1], out_features),
            "grad_input_out": tuple(inputs.x.shape),
        }
        return cls(**{name: inputs.d_y.new_full(shapes[name], SENTINEL) for name in case.buffers})


@dataclass
class Ran:
    """The results of one forward and backward, and their addresses."""

    tensors: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # y, d_x, d_scale, gradients of parameters
    y_ptr: int = 0  # address of the result
    d_x_ptr: int = 0  # of the gradient that autograd handed on


def run(
    call: Callable,
    layers: dict[str, nn.Module],
    inputs: Inputs,
    case: Case,
    *,
    finish: Callable = tuple,
    around=None,
) -> Ran:
    """Forward by `call(x, scale)` in the context `around`, backward from d_y, `finish()` for delayed weight gradients;
    everything collected. x has a producer, as in a network: so the gradient that `call` returns is seen before autograd
    copies it."""
    leaf = inputs.x.clone().requires_grad_()
    scale = inputs.scale.clone().requires_grad_()
    ran = Ran()
    x = leaf.clone()
    pointers: list[int] = []
    x.register_hook(lambda gradient: pointers.append(gradient.data_ptr()))
    with around or nullcontext():
        y = call(x, scale)
    ran.y_ptr = y.data_ptr()
    assert y.requires_grad
    y.backward(inputs.d_y.to(y.dtype))
    ran.d_x_ptr = pointers[0]
    if case.delayed:
        biases = [layer.bias.grad.clone() for layer in layers.values() if layer.bias is not None]
        for layer in layers.values():
            for parameter in layer.weight_parameters():
                assert parameter.grad is None, "a delayed gradient is nowhere before backward_dw"
                if case.main_grad:
                    assert (parameter.main_grad == MAIN_GRAD_START).all()
    finish()
    if case.delayed:
        assert all(
            map(
                torch.equal,
                biases,
                (layer.bias.grad for layer in layers.values() if layer.bias is not None),
            )
        )
    ran.tensors = {"y": y.detach().clone(), "d_x": leaf.grad}
    if scale.grad is not None:
        ran.tensors["d_scale"] = scale.grad
    for name, layer in layers.items():
        ran.tensors[f"d_{name}.weight"] = weight_gradient(layer, case)
        if layer.bias is not None:
            ran.tensors[f"d_{name}.bias"] = layer.bias.grad
    return ran


def weight_gradient(layer: nn.Module, case: Case) -> torch.Tensor:
    """[G, O, C] in whatever form the layer has it; checks that it is nowhere else."""
    parameters = layer.weight_parameters()
    if case.main_grad:
        for parameter in parameters:
            assert parameter.grad_added_to_main_grad
            assert parameter.grad is None or not parameter.grad.any()
        gradients = [parameter.main_grad for parameter in parameters]
    else:
        gradients = [parameter.grad for parameter in parameters]
    assert not any(tensor.requires_grad for tensor in gradients), (
        "a gradient drags its history along"
    )
    return gradients[0] if layer.is_packed else torch.stack(gradients)


LINEAR_OUT = 24  # columns of the result of a single linear layer


def linear_inputs(case: Case, **options) -> Inputs:
    """Inputs of one linear layer H -> LINEAR_OUT: its weight and bias are w1 and b1."""
    return make_inputs(case, width=LINEAR_OUT, out_features=LINEAR_OUT, **options)


def make_linear(
    case: Case, weight: torch.Tensor, bias: torch.Tensor, **options
) -> symmoe.GroupedLinear:
    """A layer with these values, as the case wants it."""
    groups, out_features, in_features = weight.shape
    layer = symmoe.GroupedLinear(
        groups, in_features, out_features, device=weight.device, **case.options, **options
    )
    fill(layer, weight, bias, case)
    return layer


PATHS = (
    "modules",
    "sequential",
    "mlp",
)  # the first is the three modules one by one, the others are fused
WAYS = ("linear", *PATHS)


def make_way(
    path: str,
    case: Case,
    inputs: Inputs,
    *,
    activation: symmoe.grouped.ScaledActivation | None = None,
    **options,
) -> tuple[Callable[..., torch.Tensor], dict[str, symmoe.GroupedLinear]]:
    """call(x, scale, splits, out=, grad_input_out=, is_first_microbatch=) and its layers: "linear" is one of w1 and b1;
    the others are FC1, activation, FC2 along one of PATHS, whose scale multiplies FC2's bias as in GroupedMLP."""
    fc1 = make_linear(case, inputs.w1, inputs.b1, **options)
    if path == "linear":
        return lambda x, scale, splits, **kwargs: fc1(x, splits, **kwargs), {"fc": fc1}
    fc2 = make_linear(case, inputs.w2, inputs.b2, **options)
    activation = activation or symmoe.grouped.ScaledSwiGLU()
    model = symmoe.grouped.Sequential(fc1, activation, fc2)
    experts = symmoe.GroupedMLP(
        fc1.num_groups,
        fc1.in_features,
        fc2.in_features,
        activation=activation,
        device=inputs.x.device,
    )
    experts.fc1, experts.fc2 = fc1, fc2

    def keywords(scale, *, out=None, grad_input_out=None, **both):
        last = {"bias_scale": scale} if case.bias else {}
        return {"grad_input_out": grad_input_out, **both}, {"out": out, **last, **both}

    def modules(x, scale, splits, **kwargs):
        first, last = keywords(scale, **kwargs)
        return fc2(activation(fc1(x, splits, **first), scale), splits, **last)

    def sequential(x, scale, splits, **kwargs):
        first, last = keywords(scale, **kwargs)
        return model(x, splits, scale, splits, op_kwargs={0: first, fc2: last})

    def mlp(x, scale, splits, **kwargs):
        return experts(x, splits, scale, **kwargs)

    return {"modules": modules, "sequential": sequential, "mlp": mlp}[path], {
        "fc1": fc1,
        "fc2": fc2,
    }


def run_way(
    path: str, case: Case, inputs: Inputs, buffers=None, *, splits=None, around=None, **options
) -> Ran:
    """One call of make_way's layers."""
    call, layers = make_way(path, case, inputs, **options)
    buffer_kwargs = vars(buffers or Buffers())
    splits = inputs.splits if splits is None else splits

    def finish():
        for layer in reversed(layers.values()):
            layer.backward_dw()

    return run(
        lambda x, scale: call(x, scale, splits, **buffer_kwargs),
        layers,
        inputs,
        case,
        finish=finish,
        around=around,
    )


run_linear = functools.partial(run_way, "linear")
run_experts = run_way


def inputs_of(path: str, case: Case, **options) -> Inputs:
    """The inputs of run_way."""
    return linear_inputs(case, **options) if path == "linear" else make_inputs(case, **options)


def oracle_of(path: str, case: Case, inputs: Inputs, **options) -> dict[str, torch.Tensor]:
    """The expected results of run_way for these inputs."""
    return linear_oracle(inputs, case) if path == "linear" else mlp_oracle(inputs, case, **options)


@functools.cache
def _oracle_of_case(
    is_linear: bool, case: Case, sizes: Sizes, device: str
) -> dict[str, torch.Tensor]:
    path = "linear" if is_linear else "mlp"
    return oracle_of(path, case, inputs_of(path, case, sizes=sizes, device=device))


# -- checks -----------------------------------------------------------------------------------------------------------
@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """The body raises an ArgumentError whose text has all parts."""
    with pytest.raises(symmoe.errors.ArgumentError) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


def assert_like_modules(ran: Ran, modules: Ran, sizes: Sizes, device: str = "cpu") -> None:
    """The bits of three modules, but where fused kernels sum in an order of their own."""
    close = ("d_fc1.bias",) if device == "cuda" else ("d_scale", "d_fc1.bias")
    assert_same_results(ran, modules, sizes, close=close)


def check_case(path: str, case: Case, sizes: Sizes = TINY, device: str = "cpu") -> None:
    """In buffers and without, along any path: the same bits, where they belong, near the oracle."""
    inputs = inputs_of(path, case, sizes=sizes, device=device)
    internal = run_way(path, case, inputs)
    buffers = Buffers.of(case, inputs, out_features=inputs.d_y.shape[-1])
    with_buffers = run_way(path, case, inputs, buffers)
    assert_same_results(with_buffers, internal, sizes)
    assert_buffers_used(with_buffers, buffers, sizes)
    plain = Case(
        dtype=case.dtype, is_nd=case.is_nd, bias=case.bias
    )  # results do not depend on the rest
    assert_near_oracle(
        with_buffers, _oracle_of_case(path == "linear", plain, sizes, device), case, sizes
    )
    for name in ("y", "d_x"):
        assert (internal.tensors[name].flatten(0, -2)[sizes.num_used :] == 0).all(), (
            "a tail allocated here is zero"
        )
    if path != "linear":
        assert not internal.tensors["d_scale"].flatten()[sizes.num_used :].any()
        assert_like_modules(internal, run_experts("modules", case, inputs), sizes, device)


def check_discrete_weights(path: str, case: Case, sizes: Sizes = TINY, device: str = "cpu") -> None:
    """Discrete weights give the bits of packed ones, in the buffers of the caller."""
    inputs = inputs_of(path, case, sizes=sizes, device=device)
    buffers = Buffers.of(case, inputs, out_features=inputs.d_y.shape[-1])
    discrete = run_way(path, case, inputs, buffers, weights="discrete")
    assert_same_results(discrete, run_way(path, case, inputs), inputs.sizes)
    assert_buffers_used(discrete, buffers, inputs.sizes)


def check_splits(path: str, splits, sizes: Sizes, device: str = "cpu") -> None:
    """Splits in any form are those of `sizes`."""
    case = Case(buffers=())
    inputs = inputs_of(path, case, sizes=sizes, device=device)
    ran = run_way(path, case, inputs, splits=splits)
    if sizes.num_used:
        assert_near_oracle(ran, oracle_of(path, case, inputs), case, sizes)
    for name, tensor in ran.tensors.items():
        assert sizes.num_used or not tensor.any(), name


def check_autocast(
    path: str, case: Case, weights: str, sizes: Sizes = TINY, device: str = "cpu"
) -> None:
    """fp32 inputs and parameters, bf16 results in bf16 buffers, fp32 gradients."""
    inputs = inputs_of(path, case, sizes=sizes, device=device)
    half = replace(case, dtype=torch.bfloat16)
    as_half = replace(inputs, x=inputs.x.bfloat16(), d_y=inputs.d_y.bfloat16())
    buffers = Buffers.of(case, as_half, out_features=inputs.d_y.shape[-1])
    ran = run_way(
        path,
        case,
        inputs,
        buffers,
        weights=weights,
        around=torch.autocast(device, dtype=torch.bfloat16),
    )
    assert (ran.tensors["y"].dtype, ran.y_ptr) == (torch.bfloat16, buffers.out.data_ptr())
    assert (buffers.out.flatten(0, -2)[sizes.num_used :] == SENTINEL).all()
    for name, tensor in ran.tensors.items():
        assert name == "y" or tensor.dtype == torch.float32, name
    assert_near_oracle(ran, oracle_of(path, case, inputs), half, sizes)


def check_activation(
    path: str, name: str, dtype: torch.dtype, sizes: Sizes = TINY, device: str = "cpu"
) -> None:
    """One of ACTIVATIONS against the oracle, and against three modules."""
    activation = ACTIVATIONS[name]
    case = Case(dtype=dtype)
    inputs = make_inputs(
        case, sizes=sizes, width=activation.activation.hidden_width(sizes.ffn), device=device
    )
    buffers = Buffers.of(case, inputs, out_features=sizes.hidden)
    ran = run_experts(path, case, inputs, buffers, activation=activation)
    assert_buffers_used(ran, buffers, sizes)
    assert_like_modules(
        ran, run_experts("modules", case, inputs, activation=activation), sizes, device
    )
    # A rounded h may fall on the other side of a limit, where the derivative jumps.
    if name != "tight" or dtype is torch.float32:
        expected = mlp_oracle(inputs, case, activation=activation.activation)
        assert_near_oracle(ran, expected, case, sizes)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    """Same shape, dtype and bytes."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    as_bytes = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (got, want)]
    assert torch.equal(*as_bytes), f"{name}: largest difference {(got - want).abs().max()}"


def assert_buffers_used(ran: Ran, buffers: Buffers, sizes: Sizes) -> None:
    """Results lie in the buffers, whose tails are untouched and which are still plain tensors."""
    for name, buffer, address, result in (
        ("out", buffers.out, ran.y_ptr, "y"),
        ("grad_input_out", buffers.grad_input_out, ran.d_x_ptr, "d_x"),
    ):
        if buffer is None:
            continue
        assert address == buffer.data_ptr(), f"{name}: the result lies elsewhere"
        assert not buffer.requires_grad, name
        assert buffer.grad_fn is None, name
        flat = buffer.flatten(0, -2)
        assert (flat[sizes.num_used :] == SENTINEL).all(), f"{name}: the tail was written"
        assert_same_bits(flat[: sizes.num_used], used(ran.tensors[result], sizes), name)


def used(tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The rows [., columns] of a [.., columns] result that belong to a group."""
    return tensor.flatten(0, -2)[: sizes.num_used]


def used_values(tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The used rows of a tensor with one value per row."""
    return tensor.flatten()[: sizes.num_used]


def of_groups(name: str, tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """What belongs to a group of a result of this name: its used rows; of parameters' gradients all."""
    if name in ("y", "d_x"):
        return used(tensor, sizes)
    return used_values(tensor, sizes) if name == "d_scale" else tensor


def assert_same_results(got: Ran, want: Ran, sizes: Sizes, *, close: tuple[str, ...] = ()) -> None:
    """Bit for bit, where rows belong to a group. Those named in `close`: nearly."""
    assert got.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        pair = [of_groups(name, result, sizes) for result in (got.tensors[name], tensor)]
        if name in close:
            assert_near(*pair, tensor.dtype, name)
        else:
            assert_same_bits(*pair, name)


TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Relative to the largest value, as far as the working dtype goes; NaN nowhere."""
    assert got.shape == want.shape, name
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    options = {"rtol": 0, "atol": TOLERANCE[dtype] * scale, "msg": lambda text: f"{name}: {text}"}
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), **options)


def assert_near_oracle(ran: Ran, oracle: dict[str, torch.Tensor], case: Case, sizes: Sizes) -> None:
    """`oracle` holds what :func:`linear_oracle` or :func:`mlp_oracle` gave."""
    for name, want in oracle.items():
        got = ran.tensors[name]
        assert not got.isnan().any(), f"{name}: the tail leaked"
        start = MAIN_GRAD_START if name.endswith("weight") and case.main_grad else 0.0
        assert_near(of_groups(name, got, sizes), want + start, case.dtype, name)


# -- oracle -----------------------------------------------------------------------------------------------------------
def scaled(function: str, **fields: object) -> symmoe.grouped.ScaledActivation:
    """With this function of kernels/activation.py."""
    return symmoe.grouped.ScaledActivation(Activation(function=function, **fields))


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in float64 on the CPU, as a leaf."""
    return tensor.detach().cpu().double().requires_grad_()


def linear_oracle(
    inputs: Inputs, case: Case, *, scale_bias: bool = False
) -> dict[str, torch.Tensor]:
    """y and gradients of y_r = W1_g x_r + b1_g (* scale_r); only rows that belong to a group."""

    def layer(x, scale, w1, b1, w2, b2):
        return w1 @ x + (b1 * scale if scale_bias else b1)

    tensors = _oracle(inputs, case, layer)
    names = {"y": "y", "d_x": "d_x", "d_fc1.weight": "d_fc.weight", "d_fc1.bias": "d_fc.bias"}
    names |= {"d_scale": "d_scale"} if scale_bias and case.bias else {}
    return {names[name]: tensor for name, tensor in tensors.items() if name in names}


def mlp_oracle(
    inputs: Inputs,
    case: Case,
    *,
    activation: Activation = Activation(),  # noqa: B008 - which nobody can change
    scale_bias: bool = True,
) -> dict[str, torch.Tensor]:
    """y and gradients of y_r = W2_g (act(W1_g x_r + b1_g) * scale_r) + b2_g (* scale_r)."""

    def layers(x, scale, w1, b1, w2, b2):
        return w2 @ (formula(w1 @ x + b1, activation) * scale) + (b2 * scale if scale_bias else b2)

    return _oracle(inputs, case, layers)


def _oracle(
    inputs: Inputs, case: Case, of_row: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """y and all gradients of y_r = of_row(x_r, scale_r, w1_g, b1_g, w2_g, b2_g); biases are zero in a case without."""
    x = leaf(inputs.x.flatten(0, -2))
    scale = leaf(inputs.scale.flatten())
    names = ("d_fc1.weight", "d_fc1.bias", "d_fc2.weight", "d_fc2.bias")
    parameters = {
        name: leaf(p)
        for name, p in zip(names, (inputs.w1, inputs.b1, inputs.w2, inputs.b2), strict=True)
    }
    if not case.bias:
        for name in names[1::2]:
            parameters[name] = torch.zeros_like(parameters[name])
    rows = [
        of_row(x[r], scale[r], *(p[g] for p in parameters.values()))
        for r, g in enumerate(inputs.sizes.groups)
    ]
    y = torch.stack(rows)
    y.backward(used(inputs.d_y, inputs.sizes).cpu().double())
    return {
        "y": y.detach(),
        "d_x": x.grad[: len(y)],
        "d_scale": None if scale.grad is None else scale.grad[: len(y)],
        **{
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.requires_grad
        },
    }


ACTIVATIONS = {
    "swiglu": symmoe.grouped.ScaledSwiGLU(),
    "gpt-oss": symmoe.grouped.ScaledClampedSwiGLU(),
    "tight": symmoe.grouped.ScaledClampedSwiGLU(alpha=2.0, limit=0.5, offset=0.25),
    "srelu": symmoe.grouped.ScaledSReLU(),
    "gelu": scaled("gelu", is_gated=False),
    "geglu": scaled("gelu"),
    "tanh gelu": scaled("gelu_tanh", is_gated=False),
    "tanh geglu": scaled("gelu_tanh"),
    "interleaved by 1": symmoe.grouped.ScaledClampedSwiGLU(interleave=1),
    "interleaved by 4": symmoe.grouped.ScaledSwiGLU(interleave=4),
    "interleaved by 8": symmoe.grouped.ScaledClampedSwiGLU(interleave=8),
}
