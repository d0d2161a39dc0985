"""Checks of arguments before anything is computed: those of grouped layers, and words, by the names of arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, Protocol, get_args

import torch

from symmoe.autograd import GradientBuffer
from symmoe.checks.buffers import Buffer, buffer_problem, memory_problem, overlap_problem, stale_problem
from symmoe.errors import ArgumentError, StaleLease, raise_for
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem

Overflow = Literal["raise", "drop"]
Order = Literal["rank", "slot", "node"]
Score = Literal["softmax", "sigmoid"]
Stash = Literal["all", "rows", "hidden", "none"]
Layout = Literal["auto", "packed", "expert-major"]
RouterKind = Literal["linear", "none"]
Schedule = Literal["serial", "overlapped", "always-overlapped"]
QuantizedWire = Literal["none", "forward", "backward", "both"]
AuxLoss = Literal["micro_batch", "sequence", "global"]
DropPolicy = Literal["probs", "position"]

# Words by the name of the argument that takes them. A name means the same everywhere.
CHOICES: dict[str, tuple[str, ...]] = {
    "overflow": get_args(Overflow),
    "order": get_args(Order),
    "score": get_args(Score),
    "stash": get_args(Stash),
    "layout": get_args(Layout),
    "router": get_args(RouterKind),
    "schedule": get_args(Schedule),
    "quantized_wire": get_args(QuantizedWire),
    "aux_loss": get_args(AuxLoss),
    "drop_policy": get_args(DropPolicy),
}

_GPU_MULTIPLE = 8  # TMA needs rows of a multiple of 16 bytes, also when fp32 weights are used in 16 bits


class Linear(Protocol):
    """The attributes of a linear layer that these checks read."""

    in_features: int
    out_features: int

    @property
    def _parameters(self) -> Mapping[str, torch.Tensor | None]: ...

    @property
    def precision(self) -> object:
        """The recipe of what is multiplied; None: numbers of the working dtype."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Parameters, the weights first."""


def is_choice(name: str, word: object) -> bool:
    """Whether `word` is one of the words that argument `name` takes."""
    # Only strings are compared: an array would compare with each element.
    return isinstance(word, str) and word in CHOICES[name]


def words_problem(**words: object) -> ArgumentError | None:
    """The error for the first argument whose word it does not take, or None."""
    for name, word in words.items():
        if not is_choice(name, word):
            return ArgumentError(f"{name} ({word!r}) must be one of {CHOICES[name]}")
    return None


def size_problem(**sizes: object) -> ArgumentError | None:
    """What keeps one of the named values from being a size, an int of at least 1, or None."""
    for name, value in sizes.items():
        # isinstance takes a bool for an int, but top_k=True is a mistake.
        if not isinstance(value, int) or isinstance(value, bool):
            return ArgumentError(f"{name} ({value!r}) must be an int, not {type(value).__name__}")
        if value < 1:
            return ArgumentError(f"{name} ({value}) must be at least 1")
    return None


def parameter_dtype_problem(dtype: object) -> ArgumentError | None:
    """What keeps `dtype` from being that of parameters, or None."""
    if dtype in control.DTYPES:
        return None
    return ArgumentError(f"dtype ({dtype!r}) must be one of {', '.join(map(str, control.DTYPES))}")


def rows_problem(name: str, x: object, linear: Linear) -> ArgumentError | StaleLease | None:
    """What keeps `x` from being the rows of a linear layer, or None."""
    if (error := memory_problem(name, x)) is not None:
        return error
    assert isinstance(x, torch.Tensor)
    if x.dim() < 2 or x.shape[-1] != linear.in_features:
        return ArgumentError(f"{name} has shape {list(x.shape)}; it must be [..., {linear.in_features}]")
    weight = next(linear.parameters())
    if x.device != weight.device:
        return ArgumentError(f"{name} is on {x.device}; the weights are on {weight.device}")
    if x.device.type not in ("cpu", "cuda"):
        return ArgumentError(f"{name} and the weights are on {x.device}; they must be on a CUDA device or the CPU")
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
    if dtype not in control.DTYPES or (not autocast and x.dtype != dtype) or not x.dtype.is_floating_point:
        return ArgumentError(f"{name} is {x.dtype}; the weights are {dtype}, and both must be one of {control.DTYPES}")
    return width_problem(linear, x)


def width_problem(linear: Linear, x: torch.Tensor) -> ArgumentError | None:
    """What keeps a linear layer from running on the device of x, or None: the dtype of its weights, or a width."""
    weight = next(iter(linear._parameters.values()), None)  # three times as fast as `parameters()`
    if weight is not None and weight.dtype not in control.DTYPES:
        return ArgumentError(f"the weights are {weight.dtype}; they must be one of {control.DTYPES}")
    for feature in ("in_features", "out_features"):
        width = getattr(linear, feature)
        if x.is_cuda and width % _GPU_MULTIPLE:
            return ArgumentError(f"{feature} ({width}) must be a multiple of {_GPU_MULTIPLE} on GPUs")
    return None if linear.precision is None else e4m3_problem(linear.precision, x.device)


def wrapped_problem(name: str, module: object, attribute: str) -> ArgumentError | None:
    """The error if something is around a module whose call kernels replace, and hides its attributes, or None."""
    if module is None or hasattr(module, attribute):
        return None
    return ArgumentError(
        f"{name} is in a {type(module).__name__}, which would be left out: kernels take the place of its call. Call "
        "symmoe.add_lora in place of peft's target_parameters, or symmoe.integrations.peft.get_peft_model of a model "
        "whose experts are swapped"
    )


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute with x in: autocast's where it is enabled, else that of x."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


class RowsLike(NamedTuple):
    """What is known of rows, which another module may still have to make; None for what is unknown.

    Attributes:
        shape: shape of the rows without their features.
        dtype: dtype to compute in.
        device: device of the rows.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    device: torch.device | None

    @classmethod
    def of(cls, x: torch.Tensor) -> RowsLike:
        """The properties of existing rows."""
        return cls(x.shape[:-1], working_dtype(x), x.device)

    @property
    def num_rows(self) -> int | None:
        """Number of rows."""
        return None if self.shape is None else math.prod(self.shape)

    def with_features(self, num_features: int) -> tuple[int, ...] | None:
        """The shape of a tensor with so many features for each row."""
        return None if self.shape is None else (*self.shape, num_features)


def result_buffers_problem(
    rows: RowsLike, in_features: int, out_features: int, out: object, grad_input_out: object
) -> ArgumentError | StaleLease | None:
    """What keeps the two buffers of a caller from taking the result [..., O] and the gradient of x, or None.

    :func:`shared_memory_problem` checks with what they share memory.
    """
    for name, buffer, features in (("out", out, out_features), ("grad_input_out", grad_input_out, in_features)):
        if buffer is None:
            continue
        error = buffer_problem(name, buffer, shape=rows.with_features(features), dtype=rows.dtype, device=rows.device)
        if error is not None:
            return error
    return None


def shared_memory_problem(
    out: torch.Tensor | None, grad_input_out: torch.Tensor | None, inputs: Iterable[object]
) -> ArgumentError | None:
    """The error if one of the two buffers of a call shares memory with the other or with an input, or None."""
    named = (("out", out), ("grad_input_out", grad_input_out))
    buffers = [Buffer(name, tensor) for name, tensor in named if tensor is not None]
    return overlap_problem(buffers, (tensor for tensor in inputs if isinstance(tensor, torch.Tensor)))


def scale_problem(name: str, scale: object, rows: RowsLike) -> ArgumentError | StaleLease | None:
    """What is wrong with a factor per row of `rows`, or None."""
    if not isinstance(scale, torch.Tensor) or scale.layout is not torch.strided:
        return memory_problem(name, scale)
    shape = scale.shape if rows.shape is None else rows.shape
    device = scale.device if rows.device is None else rows.device
    if scale.shape != shape or scale.device != device or not scale.dtype.is_floating_point:
        given = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        return ArgumentError(
            f"{name} is {given}; it must be floating point {list(shape)} on {device}: one for each row"
        )
    return stale_problem(name, scale)


def kernel_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if it is not contiguous or where kernels cannot read it in full accesses."""
    x = x.contiguous()
    return x if x.data_ptr() % control.ACCESS_BYTES == 0 else x.clone()


def check_gradient(d_y: torch.Tensor) -> None:
    """Checks the gradient that autograd brings to a backward pass.

    Raises:
        ArgumentError, StaleLease: the gradient given to the pass cannot be read as rows.
    """
    raise_for(memory_problem("d_y", d_y))


def gradient_rows(given: GradientBuffer, x: torch.Tensor, d_y: torch.Tensor) -> torch.Tensor:
    """The caller's buffer for the gradient of x, or a new tensor. The kernel reads d_y while it writes.

    Raises:
        ArgumentError, StaleLease: the buffer cannot take the gradient, or is in use.
    """
    raise_for(given.problem())
    if given.tensor is None:
        return torch.empty_like(x)
    shape = tuple(x.shape)
    raise_for(
        buffer_problem("grad_input_out", given.tensor, shape=shape, dtype=x.dtype, device=x.device, inputs=(d_y,))
    )
    return given.tensor
