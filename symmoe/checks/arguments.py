"""Checks of arguments before any computation: words, sizes, tensors to read, buffers for results, grouped layers.

Every function reports errors in a caller's arguments by their names. None reads device memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import nn

from symmoe.autograd import transform_problem
from symmoe.errors import ArgumentError, StaleLease, choice_problem
from symmoe.kernels import control
from symmoe.kernels.routing_rule import Score
from symmoe.symm_mem.memory import ended_lease
from symmoe.torch_internals import around_call, has_storage, is_transformed, num_dispatch_modes

if TYPE_CHECKING:
    from symmoe.symm_mem.heap import SymmetricHeap

Problem = ArgumentError | StaleLease | None
M = TypeVar("M", bound=nn.Module)

Overflow = Literal["raise", "drop"]
Order = Literal["rank", "slot", "node"]
Stash = Literal["all", "rows", "hidden", "none"]
Layout = Literal["auto", "packed", "expert-major"]
Schedule = Literal["serial", "overlapped", "always-overlapped"]
QuantizedWire = Literal["none", "forward", "backward", "both"]
AuxLoss = Literal["micro_batch", "sequence", "global"]
DropPolicy = Literal["probs", "position"]
Balance = Literal["none", "replicas"]
BiasUpdate = Literal["sign", "quantile"]

# Allowed words by argument name. A name has the same meaning everywhere.
CHOICES: dict[str, tuple[str, ...]] = {
    "overflow": get_args(Overflow),
    "order": get_args(Order),
    "score": get_args(Score),
    "stash": get_args(Stash),
    "layout": get_args(Layout),
    "schedule": get_args(Schedule),
    "quantized_wire": get_args(QuantizedWire),
    "aux_loss": get_args(AuxLoss),
    "drop_policy": get_args(DropPolicy),
    "balance": get_args(Balance),
    "bias_update": get_args(BiasUpdate),
}

_PLAIN = torch.Tensor.__torch_dispatch__  # of tensor classes that have their own memory


def check_kind(name: str, value: object, kind: Any, noun: str = "") -> None:
    """Raises an ArgumentError unless the argument `name` is of this class, or of one of several. noun: the kind in the
    error's text."""
    if not isinstance(value, kind):
        raise ArgumentError(
            f"{name} ({type(value).__name__}) must be {noun or f'a {kind.__name__}'}"
        )


def check_model(model: object, name: str = "model") -> None:
    """Raises an ArgumentError if the argument `name` is no module, e.g. a list of parameters."""
    check_kind(
        name,
        model,
        nn.Module,
        "an nn.Module, not its parameters: which of them are experts', modules say",
    )


def modules_of(model: nn.Module, kind: type[M], *, name: str = "model", needs: str = "") -> list[M]:
    """The modules of this kind in the model, in the model's order. Raises as :func:`check_model` does, and if the model
    `needs` such a module and has none. name: the argument."""
    check_model(model, name)
    modules = [module for module in model.modules() if isinstance(module, kind)]
    if needs and not modules:
        raise ArgumentError(f"{name} ({type(model).__name__}) has no {needs}")
    return modules


def check_factor(name: str, value: object, *, at_least: int = 0) -> None:
    """Raises an ArgumentError unless the argument `name` is a finite number of at least `at_least`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ArgumentError(f"{name} ({value!r}) must be a number, not {type(value).__name__}")
    if not math.isfinite(value) or value < at_least:
        raise ArgumentError(f"{name} ({value}) must be finite and at least {at_least}")


def choices_problem(**words: object) -> ArgumentError | None:
    """The error of the first argument whose value is not among its CHOICES, or None."""
    problems = (choice_problem(name, word, CHOICES[name]) for name, word in words.items())
    return next(filter(None, problems), None)


def size_problem(**sizes: object) -> ArgumentError | None:
    """The error of the first argument that is no integer (NumPy's, too) in [1, 2**31), or None."""
    for name, value in sizes.items():
        try:
            size = operator.index(value)  # type: ignore[arg-type]  # a TypeError if it is no integer
        except TypeError:
            size = None
        # A bool is an int for Python, but top_k=True is a mistake.
        if size is None or isinstance(value, bool):
            return ArgumentError(f"{name} ({value!r}) must be an int, not {type(value).__name__}")
        if not 1 <= size < 2**31:  # kernels take int32
            bounds = "at least 1" if size < 1 else "less than 2**31"
            return ArgumentError(f"{name} ({value}) must be {bounds}")
    return None


def parameter_dtype_problem(dtype: object) -> ArgumentError | None:
    """The error if `dtype` cannot be the dtype of parameters and transferred rows, or None."""
    if isinstance(dtype, torch.dtype) and dtype in control.DTYPES:
        return None
    return ArgumentError(f"dtype ({dtype!r}) must be one of {', '.join(map(str, control.DTYPES))}")


# -- tensors to read, and buffers for results --------------------------------------------------------------------------


def stale_problem(name: str, tensor: object) -> StaleLease | None:
    """The error if `tensor` is memory of a released lease or of a closed heap, or None. Takes any object."""
    lease = ended_lease(tensor) if isinstance(tensor, torch.Tensor) else None
    if lease is None:
        return None
    return StaleLease(
        f"{name} is memory of lease '{lease.name}' (generation {lease.generation}), {lease.end}"
    )


def memory_problem(name: str, tensor: object) -> Problem:
    """The error if kernels cannot read or write the memory of `tensor` by its strides, or None; on any device."""
    if not isinstance(tensor, torch.Tensor):
        return ArgumentError(f"{name} ({type(tensor).__name__}) must be a tensor")
    if torch.compiler.is_compiling():  # tensors have no memory then, and no kernels run
        return None
    if is_transformed():
        return transform_problem()
    kind = None
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout)
    elif type(tensor).__torch_dispatch__ is not _PLAIN and not (
        hasattr(tensor, "fake_mode") and num_dispatch_modes()
    ):
        kind = type(
            tensor
        ).__name__  # FakeTensors are valid under a mode: operators there need no memory
    elif not has_storage(tensor):  # of a backward pass with is_grads_batched
        kind = "a tensor of vmap"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        kind = "a tensor whose memory has been freed"
    if kind is not None:
        return ArgumentError(f"{name} ({kind}) must be a strided tensor with memory of its own")
    return None if ended_lease(tensor) is None else stale_problem(name, tensor)


def tensor_problem(
    name: str,
    tensor: object,
    *,
    shape: tuple[int | str, ...] | None,
    dtypes: tuple[torch.dtype, ...] | None,
    device: torch.device | None,
) -> Problem:
    """The error if the argument `name` is no tensor that kernels can read, or None. None of shape, dtypes, device:
    unknown.

    shape: a word stands for any size, and "..." in front for any dimensions.
    """
    if shape is not None and not isinstance(tensor, torch.Tensor):
        return ArgumentError(
            f"{name} ({type(tensor).__name__}) must be a tensor of shape {_shown(shape)}"
        )
    if (error := memory_problem(name, tensor)) is not None:
        return error
    assert isinstance(tensor, torch.Tensor)
    if shape is not None and not _fits(tensor.shape, shape):
        return ArgumentError(f"{name} has shape {list(tensor.shape)}; it must be {_shown(shape)}")
    if device is not None and tensor.device != device:
        return ArgumentError(f"{name} is on {tensor.device}; it must be on {device}")
    if dtypes is not None and tensor.dtype not in dtypes:
        return ArgumentError(
            f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}"
        )
    return None


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    if expected and expected[0] == "...":
        expected = expected[1:]
        shape = shape[-len(expected) :]
    if len(shape) != len(expected):
        return False
    for size, expected_size in zip(shape, expected, strict=True):
        if size != expected_size and not isinstance(expected_size, str):
            return False
    return True


def buffer_problem(
    name: str,
    buffer: object,
    *,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    device: torch.device | None,
    inputs: tuple[torch.Tensor, ...] = (),
    heap: SymmetricHeap | None = None,
) -> Problem:
    """The error if the argument `name` cannot take a result, or None. shape, dtype, device: as in tensor_problem.

    Args:
        inputs: tensors that the buffer must not overlap: inputs, tensors saved for backward, and other buffers.
        heap: the heap that must own the buffer, because peers access it; None: any memory.
    """
    if error := tensor_problem(
        name, buffer, shape=shape, dtypes=None if dtype is None else (dtype,), device=device
    ):
        return error
    assert isinstance(buffer, torch.Tensor)
    if not buffer.is_contiguous():
        return ArgumentError(f"{name} has strides {list(buffer.stride())}; it must be contiguous")
    if buffer.requires_grad:
        return ArgumentError(f"{name} requires a gradient; a buffer for results must not")
    start = buffer.data_ptr()
    if start % control.ACCESS_BYTES:
        return ArgumentError(
            f"{name} starts at address {start}; it must be aligned to {control.ACCESS_BYTES}"
        )
    if heap is not None and not heap.owns(buffer):
        return ArgumentError(f"{name} is not on this symmetric heap; make it with heap.lease")
    return overlap_problem([Buffer(name, buffer)], inputs)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory that a call writes, and the first and last time when its contents matter, both included, in any
    unit; a call of one step needs no times."""

    name: str
    tensor: torch.Tensor
    first: float = 0
    last: float = math.inf


def overlap_problem(buffers: Sequence[Buffer], inputs: Iterable[object]) -> ArgumentError | None:
    """The error if a buffer shares memory with an input, or with another buffer while both matter, or None. inputs:
    values that are read or saved for backward, at any time; values that are no dense tensors are skipped."""
    if not buffers:
        return None
    spans = [(_span(buffer.tensor), buffer) for buffer in buffers]
    lowest, highest = min(start for (start, _), _ in spans), max(end for (_, end), _ in spans)
    near = [
        (span, tensor)
        for tensor in inputs
        if isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and _overlap(span := _span(tensor), (lowest, highest))
    ]
    for index, (span, buffer) in enumerate(spans):
        earlier = [
            (earlier_span, earlier_buffer.tensor)
            for earlier_span, earlier_buffer in spans[:index]
            if buffer.first <= earlier_buffer.last and earlier_buffer.first <= buffer.last
        ]
        for used_span, tensor in (*near, *earlier):
            if _overlap(span, used_span) and tensor.device == buffer.tensor.device:
                return ArgumentError(
                    f"{buffer.name} {list(buffer.tensor.shape)} overlaps a tensor of shape {list(tensor.shape)} that "
                    "the call also uses"
                )
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first element's start and of the last element's end."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():  # or empty
        return start, start + tensor.numel() * tensor.element_size()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two ranges of addresses overlap. An empty range overlaps none."""
    return max(first[0], second[0]) < min(first[1], second[1])


# -- grouped layers ----------------------------------------------------------------------------------------------------


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of computations with x: autocast's if enabled, else the dtype of x."""
    device_type = x.device.type
    return (
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    )


class RowsLike(NamedTuple):
    """The properties of rows that may not exist yet: the shape without features, the dtype to compute in, and the
    device. None: unknown before another module has computed the rows."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    device: torch.device | None

    @classmethod
    def from_rows(cls, x: torch.Tensor) -> RowsLike:
        """The properties of existing rows."""
        return cls(x.shape[:-1], working_dtype(x), x.device)


def call_problem(**modules: torch.nn.Module) -> ArgumentError | None:
    """The error of the first module with hooks around its call or a replaced forward, or None: kernels replace the call
    and would omit them. Global hooks of torch still run."""
    for name, module in modules.items():
        if (hook := around_call(module, everywhere=False)) is not None:
            return ArgumentError(
                f"{name} has {hook}, which would be left out: kernels take the place of its call. Put hooks on the "
                "layer, its router or shared expert, or on parameters; other experts run by parts: see "
                "docs/own_experts.md. Call symmoe.lora.add_lora in place of peft's target_parameters, or "
                "symmoe.integrations.peft.get_peft_model of a model whose experts are swapped"
            )
    return None


def scale_problem(name: str, scale: object, rows: RowsLike) -> Problem:
    """The error of a factor per row of `rows`, or None."""
    if not isinstance(scale, torch.Tensor) or scale.layout is not torch.strided:
        return memory_problem(name, scale)
    shape = scale.shape if rows.shape is None else rows.shape
    device = scale.device if rows.device is None else rows.device
    if scale.shape != shape or scale.device != device or not scale.dtype.is_floating_point:
        return ArgumentError(
            f"{name} is {scale.dtype} {list(scale.shape)} on {scale.device}; "
            f"it must be floating point {list(shape)} on {device}: one for each row"
        )
    return stale_problem(name, scale)


def kernel_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if it is not contiguous or not aligned for full accesses of kernels."""
    x = x.contiguous()
    return x if x.data_ptr() % control.ACCESS_BYTES == 0 else x.clone()
