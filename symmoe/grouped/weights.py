"""Weights of a layer, packed in one tensor or scattered in G, in the kernels' form; and the targets of their gradients:
`.grad`, or a trainer's fp32 `main_grad`, now or later.

G groups, O output features, C input features. Every call inspects a list of matrices, in forward and in backward, and
passes it on as a packed tensor if the matrices are adjacent, else as a table of addresses. There is no cache, because
trainers move parameters with `.data =`.

The `main_grad` protocol follows Megatron-style trainers: a parameter has an fp32 `main_grad` (or a method
`get_main_grad`), into which the wgrad kernel accumulates, or with `overwrite_main_grad` writes. A parameter that has
`grad_added_to_main_grad` gets it set to True, and a gradient of zeros, so that trainers' hooks on `.grad` still run.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from symmoe import kernels
from symmoe.autograd import Unmodified
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.operands import Matrices, Operand, TensorTable, require_tensor
from symmoe.pointers import load_addresses
from symmoe.precision.operands import CachedWeight, Directions
from symmoe.precision.recipes import Recipe
from symmoe.torch_internals import version_of


class LayerWeights(NamedTuple):
    """The tensors of one layer in the kernels' form; the first four are the kinds of control.REPLICA_MATRICES."""

    weight: Matrices  # [G, O, C]
    bias: torch.Tensor | None = None  # [G, O]
    a: Any = None  # adapters or None, see grouped/linear.py: [G, r, C],
    b: Any = None  # and [G, O, r]
    cached: Directions | None = None  # operands that several calls share; None: a call makes them

    def with_cached(self, weight: CachedWeight, recipe: Recipe, transposed: bool) -> LayerWeights:
        """With the weight cached by symmoe.grouped.cache_quantized_weights; for dgrad too if `transposed`."""
        return self._replace(cached=weight.operands(recipe, self.weight, transposed=transposed))

    @property
    def operands(self) -> list[torch.Tensor | None]:
        """All tensors that kernels read, including tables of addresses; None for a missing one. Their shapes, dtypes
        and strides and the precision determine the launches."""
        cached = itertools.chain.from_iterable(filter(None, self.cached or ()))
        weight = self.weight
        operand = weight if isinstance(weight, torch.Tensor) else weight.pointers
        return [operand, self.bias, self.a, self.b, *cached]


def kernel_matrices(
    lists: Mapping[str, Sequence[torch.Tensor]],
) -> list[torch.Tensor | TensorTable]:
    """Each named list, one tensor [G, O, C] or G of [O, C], in the kernels' form: one packed tensor, or a table of
    tensors that are not adjacent. One launch loads the addresses of all tables. Does not synchronise the host.
    ArgumentError: discrete weights differ in shape or dtype; a packed tensor is not aligned to 16 bytes; tensors in a
    table are not contiguous or not aligned to 16 bytes."""
    operands: dict[str, Any] = {}
    scattered = {}
    for name, matrices in lists.items():
        if matrices[0].dim() == 3:
            packed: torch.Tensor | None = matrices[0].contiguous()
        else:
            check_uniform(matrices)
            packed = packed_view(matrices)
        operands[name] = packed
        if packed is None:
            scattered[name] = matrices
        elif (address := packed.data_ptr()) % control.ACCESS_BYTES:
            raise ArgumentError(
                f"{name} starts at address {address}; it must be aligned to {control.ACCESS_BYTES}"
            )
    if scattered:
        device = next(iter(scattered.values()))[0].device
        addresses = load_addresses(
            scattered, device, alignment=control.ACCESS_BYTES, contiguous=True
        )
        parts = addresses.split([len(matrices) for matrices in scattered.values()])
        for (name, matrices), part in zip(scattered.items(), parts, strict=True):
            operands[name] = TensorTable(part, packed_shape(matrices), matrices[0].dtype)
    return list(operands.values())


def packed_shape(weights: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """(G, O, C) of one packed weight or of G single ones."""
    first = weights[0]
    num_groups, out_features, in_features = (
        first.shape if first.dim() == 3 else (len(weights), *first.shape)
    )
    return num_groups, out_features, in_features


def packed_view(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[G, O, C] over the memory of G matrices of one shape and dtype, if each begins where the one before it ends.
    Copies nothing, does not synchronise the host. The view has no history and does not share version counters. Also
    None if they are not contiguous, aligned and on one device, or if the first one's storage ends before the last
    matrix: then they are adjacent by chance, and the view would not keep the others alive."""
    first = matrices[0]
    # The addresses of the first two matrices rule out most lists that are not adjacent.
    if not (_are_adjacent(matrices[:2]) and _are_adjacent(matrices)):
        return None
    storage = first.untyped_storage()
    if first.data_ptr() + len(matrices) * first.nbytes > storage.data_ptr() + storage.nbytes():
        return None
    num_rows, num_columns = first.shape
    shape = (len(matrices), num_rows, num_columns)
    return first.detach().as_strided(shape, (num_rows * num_columns, num_columns, 1))


def check_uniform(weights: Sequence[torch.Tensor]) -> None:
    """ArgumentError if discrete weights differ in shape or dtype: a layer has one of each, like a packed weight."""
    for name in ("shape", "dtype"):
        values = list(map(operator.attrgetter(name), weights))
        if values.count(values[0]) != len(values):
            g = next(g for g, value in enumerate(values) if value != values[0])
            raise ArgumentError(
                f"weight{g} has {name} {values[g]}; weight0 has {values[0]}, and all must have one"
            )


def lay_side_by_side(parameters: Sequence[torch.Tensor]) -> None:
    """Copies G parameters [O, C] into one storage, adjacent, for packed_view. Leaves them unchanged if they are
    adjacent already, or are not plain tensors of one shape, dtype and device."""
    first = parameters[0]
    layouts = {(type(p), p.shape, p.dtype, p.device, p.layout) for p in parameters}
    if layouts != {(nn.Parameter, first.shape, first.dtype, first.device, torch.strided)}:
        return
    if packed_view(parameters) is None:
        for parameter, part in zip(
            parameters, torch.stack([p.data for p in parameters]), strict=True
        ):
            parameter.data = part


def addresses(matrices: Sequence[torch.Tensor]) -> list[int] | None:
    """The addresses of G tensors; None if a tensor has no memory with an address, or they are not on one device."""
    payload = _read_addresses(matrices, alignment=1, contiguous=False)
    return None if payload is None else memoryview(payload).cast("q").tolist()


def _are_adjacent(matrices: Sequence[torch.Tensor]) -> bool:
    first = matrices[0]
    payload = _read_addresses(matrices, alignment=control.ACCESS_BYTES, contiguous=True)
    return payload is not None and payload == _side_by_side(
        first.data_ptr(), first.nbytes, len(matrices)
    )


@functools.lru_cache(maxsize=1024)  # a layer's numbers repeat in every call
def _side_by_side(start: int, num_bytes: int, count: int) -> bytes:
    """Addresses of `count` matrices, each of which begins where the one before it ends, as native int64."""
    return struct.pack(f"={count}q", *range(start, start + count * num_bytes, num_bytes))


def _read_addresses(
    matrices: Sequence[torch.Tensor], *, alignment: int, contiguous: bool
) -> bytes | None:
    device = matrices[0].device
    payload: bytes | None = kernels.for_device(device).read_addresses(
        list(matrices), device, alignment=alignment, contiguous=contiguous
    )
    return payload


# -- gradients ---------------------------------------------------------------------------------------------------------

# compute(out, accumulate): the wgrad kernel of one linear layer, into a packed tensor or scattered matrices.
Compute = Callable[[torch.Tensor | TensorTable, bool], None]


class WeightProduct(NamedTuple):
    """The gradient of a layer's weights before it is computed, now or later: left^T right of the rows of each group. It
    keeps no weights alive. As a function, a Compute."""

    left: Any  # Rows, or an Operand of columns
    right: Any
    row_range: torch.Tensor
    read: dict[str, torch.Tensor] | None = None  # by name, rows in memory of other owners

    def __call__(
        self, out: torch.Tensor | TensorTable, accumulate: bool, *, num_sms: int | None = None
    ) -> None:
        ops = kernels.for_device(self.row_range.device)
        options = {"num_sms": num_sms}
        is_quantized = isinstance(self.left, Operand)
        product = ops.grouped_gemm_wgrad_quantized if is_quantized else ops.grouped_gemm_wgrad
        product(self.left, self.right, self.row_range, out, accumulate=accumulate, **options)


Gradients = Sequence[torch.Tensor | None]  # one for each weight


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target of the gradients of a layer's weights, fixed when backward begins. option: "none", no gradients;
    "new", autograd gets new tensors, [G, O, C] for one packed weight, or views of that for G of [O, C]; "add" and
    "overwrite", the parameters' main_grads; "delayed", backward_dw computes them."""

    option: str = "none"
    parameters: Sequence[torch.Tensor] = ()  # whose main_grads these are:
    tensors: Sequence[torch.Tensor] = ()  # the trainer's memory
    matrices: Matrices | None = None  # in the kernels' form
    delay: Callable[[WeightProduct], object] | None = None  # postpones a computation

    @property
    def operands(self) -> list[torch.Tensor]:
        """The target's tensors in the kernels' form: packed, or a table of addresses."""
        matrices = self.matrices
        if matrices is None:
            return []
        return [matrices if isinstance(matrices, torch.Tensor) else matrices.pointers]

    @property
    def computes(self) -> bool:
        """Whether :meth:`add` computes gradients at once."""
        return self.option in ("new", "add", "overwrite")

    def add(
        self,
        weights: Sequence[torch.Tensor],
        product: Callable[[], WeightProduct],
        compute: Compute | None = None,
    ) -> Sequence[Any]:
        """Computes the gradients, by the product or its replacement; if they are delayed, only makes the product.
        Returns the argument for :meth:`for_autograd`."""
        if self.option == "new":
            shape = packed_shape(weights)
            first = weights[0]
            buffer = torch.empty(shape, dtype=first.dtype, device=first.device)
            (compute or product())(buffer, False)
            return [buffer]
        if self.matrices is not None:
            (compute or product())(self.matrices, self.option == "add")
        return [None] * len(weights) if self.delay is None else [product()]

    def for_autograd(self, weights: Sequence[torch.Tensor], results: Sequence[Any]) -> Gradients:
        """The result of an autograd function's backward for `weights`, from the results of :meth:`add`; postpones a
        delayed computation. `weights` are the parameters, or autocast's casts of them; then the gradient goes through
        the cast."""
        if self.delay is not None:
            self.delay(results[0])
            return [None] * len(weights)
        if self.option == "new" and weights[0].dim() == 2:
            return require_tensor("buffer", results[0]).unbind(0)
        is_flagged = [
            p.requires_grad and hasattr(p, "grad_added_to_main_grad") for p in self.parameters
        ]
        if not any(is_flagged):
            return results
        for parameter in itertools.compress(self.parameters, is_flagged):
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # the trainer's
        zeros = _shared_zeros(weights[0])
        # Separate tensors: autograd would copy a tensor that it gets twice.
        return [zeros.detach() if flag else None for flag in is_flagged]


def main_grads_of(parameters: Sequence[torch.Tensor], *, overwrite: bool) -> Target:
    """The current `main_grad`s of a layer's parameters, one packed or G; ArgumentError if the kernel cannot write to
    one. overwrite: gradients overwrite them, regardless of the parameters' attributes."""
    # The kernel computes a gradient for every group; a frozen parameter's is discarded.
    tensors = [
        _main_grad(p) if p.requires_grad else torch.empty_like(p, dtype=torch.float32)
        for p in parameters
    ]
    overwrites = overwrite or getattr(parameters[0], "overwrite_main_grad", False)
    (matrices,) = kernel_matrices({"main_grad": tensors})
    return Target("overwrite" if overwrites else "add", parameters, tensors, matrices)


def compute_delayed(
    parameters: Sequence[torch.Tensor],
    overwrite: bool | None,
    product: WeightProduct,
    rows: Unmodified,
) -> None:
    """Computes delayed gradients. Leaves a sum in `.grad`, or zeros, like autograd: Megatron's DDP reads it before it
    reduces. overwrite: as in main_grads_of; None: gradients go to `.grad`. StaleRows: the rows have changed since."""
    rows.check()
    to_grad = overwrite is None
    target = Target("new") if overwrite is None else main_grads_of(parameters, overwrite=overwrite)
    gradients = target.for_autograd(parameters, target.add(parameters, lambda: product))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        elif to_grad:
            parameter.grad.add_(gradient)


def _main_grad(parameter: torch.Tensor) -> torch.Tensor:
    getter = getattr(parameter, "get_main_grad", None)  # FSDP makes the tensor on request
    main_grad: torch.Tensor | None = (
        getattr(parameter, "main_grad", None) if getter is None else getter()
    )
    if main_grad is None:
        raise ArgumentError(
            f"main_grad is missing on a weight of shape {list(parameter.shape)}, but accumulate_into_main_grad is True"
        )
    layout = main_grad.shape, main_grad.dtype, main_grad.device
    if (
        layout != (parameter.shape, torch.float32, parameter.device)
        or not main_grad.is_contiguous()
    ):
        raise ArgumentError(
            f"main_grad is {main_grad.dtype} {list(main_grad.shape)} with strides {list(main_grad.stride())} on "
            f"{main_grad.device}; it must be contiguous torch.float32 {list(parameter.shape)} on {parameter.device}"
        )
    return main_grad


def _shared_zeros(weight: torch.Tensor) -> torch.Tensor:
    """Zeros like a layer's weights, which all have one shape and dtype."""
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # Other layers' zeros must not be in a graph's memory.
        return weight.new_zeros(()).expand(weight.shape)
    key = tuple(weight.shape), weight.dtype, weight.device
    if version_of(_zeros(*key)):  # a trainer has written into a gradient
        _zeros.cache_clear()
    return _zeros(*key)


@functools.lru_cache(maxsize=16)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Shared by all parameters of a shape: trainers drop these gradients at once, and a model has dozens of layers.
    return torch.zeros(shape, dtype=dtype, device=device)
