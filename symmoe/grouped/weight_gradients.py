"""Where the gradient of grouped weights goes: `.grad`, a trainer's fp32 `main_grad`, now or later.

The protocol of `main_grad` is that of Megatron-style trainers: a parameter has an fp32 `main_grad` (or a method
`get_main_grad`), into which the wgrad kernel accumulates. `overwrite_main_grad` on the parameter, or a call on the
first micro-batch, makes it overwrite instead. A parameter that has `grad_added_to_main_grad` gets it set to True, and
a gradient of zeros, so that the trainer's hooks on `.grad` still run.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from symmoe.errors import ArgumentError
from symmoe.grouped.weights import kernel_matrices, packed_shape
from symmoe.kernels.tensor_table import TensorTable
from symmoe.torch_internals import version_of

# compute(out, accumulate): the wgrad kernel of one linear layer, into a packed tensor or scattered matrices.
Compute = Callable[[torch.Tensor | TensorTable, bool], None]
Gradients = Sequence[torch.Tensor | None]  # one for each weight


class Target:
    """Where the gradients of a layer's weights go, found when backward begins. Here: nowhere.

    Attributes:
        tensors: the trainer's memory.
        option: tells targets apart that launch something else.
        computes: whether :meth:`add` computes anything.
    """

    tensors: Sequence[torch.Tensor] = ()
    option: str = "none"
    computes: bool = False

    def add(self, weights: Sequence[torch.Tensor], compute: Compute) -> Gradients:
        """Computes them, or sees to it. Those that autograd has to be given."""
        return [None] * len(weights)

    def placeholders(self, weights: Sequence[torch.Tensor]) -> Gradients:
        """What autograd gets for `weights` where :meth:`add` has found None."""
        return [None] * len(weights)

    def for_autograd(self, weights: Sequence[torch.Tensor], compute: Compute) -> Gradients:
        """Same as :meth:`add`, but gives all that an autograd function's backward returns for `weights`."""
        found = self.add(weights, compute)
        return found if self.option == "new" else self.placeholders(weights)


class NewGradients(Target):
    """Autograd gets new tensors: [G, O, C] for one packed weight, or views of one buffer for G of [O, C]."""

    option, computes = "new", True

    def add(self, weights: Sequence[torch.Tensor], compute: Compute) -> Gradients:
        buffer = torch.empty(packed_shape(weights), dtype=weights[0].dtype, device=weights[0].device)
        compute(buffer, False)
        return [buffer] if weights[0].dim() == 3 else list(buffer.unbind(0))


class MainGrads(Target):
    """The `main_grad`s of a layer's parameters, one packed or G, as they are now.

    Args:
        overwrite: gradients overwrite what is there, whatever the parameters say.

    Raises:
        ArgumentError: a parameter has no `main_grad`, or not one that the kernel can write to.
    """

    computes = True

    def __init__(self, parameters: Sequence[torch.Tensor], *, overwrite: bool) -> None:
        self._parameters = parameters
        # The kernel computes a gradient for every group; that of a frozen parameter is thrown away.
        self.tensors = [
            _main_grad(p) if p.requires_grad else torch.empty_like(p, dtype=torch.float32) for p in parameters
        ]
        overwrites = overwrite or getattr(parameters[0], "overwrite_main_grad", False)
        self.option = "overwrite" if overwrites else "add"

    def add(self, weights: Sequence[torch.Tensor], compute: Compute) -> Gradients:
        (target,) = kernel_matrices({"main_grad": self.tensors})
        compute(target, self.option == "add")
        return [None] * len(weights)

    def placeholders(self, weights: Sequence[torch.Tensor]) -> Gradients:
        """`weights` are the parameters, or what autocast has made of them; then a gradient goes through the cast."""
        asked = [p.requires_grad and hasattr(p, "grad_added_to_main_grad") for p in self._parameters]
        if not any(asked):
            return [None] * len(weights)
        for parameter in itertools.compress(self._parameters, asked):
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # the trainer's
        zeros = _shared_zeros(weights[0])
        # A tensor for each: autograd would copy one that it has been given twice.
        return [zeros.detach() if is_asked else None for is_asked in asked]


class DelayedGradients(Target):
    """One of the `calls` that backward_dw makes. overwrite: as in MainGrads; None: gradients go to `.grad`."""

    option = "delayed"

    def __init__(
        self, parameters: Sequence[torch.Tensor], calls: deque[Callable[[], None]], overwrite: bool | None
    ) -> None:
        self._parameters, self._calls, self._overwrite = parameters, calls, overwrite

    def add(self, weights: Sequence[torch.Tensor], compute: Compute) -> Gradients:
        self._calls.append(functools.partial(self._compute, compute))
        return [None] * len(weights)

    def _compute(self, compute: Compute) -> None:
        """Leaves what autograd would have left: a sum in `.grad`, or placeholders. Megatron's DDP looks there before it
        reduces."""
        to_grad, parameters = self._overwrite is None, self._parameters
        target = NewGradients() if self._overwrite is None else MainGrads(parameters, overwrite=self._overwrite)
        for parameter, gradient in zip(parameters, target.for_autograd(parameters, compute), strict=True):
            if gradient is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            elif to_grad:
                parameter.grad.add_(gradient)


def _main_grad(parameter: torch.Tensor) -> torch.Tensor:
    getter = getattr(parameter, "get_main_grad", None)  # FSDP makes the tensor when it is asked for
    main_grad: torch.Tensor | None = getattr(parameter, "main_grad", None) if getter is None else getter()
    if main_grad is None:
        raise ArgumentError(
            f"main_grad is missing on a weight of shape {list(parameter.shape)}, but accumulate_into_main_grad is True"
        )
    if (
        main_grad.shape != parameter.shape
        or main_grad.dtype != torch.float32
        or main_grad.device != parameter.device
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
        # Those of other layers must not come out of a graph's memory.
        return weight.new_zeros(()).expand(weight.shape)
    key = tuple(weight.shape), weight.dtype, weight.device
    if version_of(_zeros(*key)):  # somebody has written into their gradient
        _zeros.cache_clear()
    return _zeros(*key)


@functools.lru_cache(maxsize=16)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Shared by all parameters of a shape: trainers drop these gradients at once, and a model has dozens of layers.
    return torch.zeros(shape, dtype=dtype, device=device)
