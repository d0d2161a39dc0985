"""The parameters of a grouped linear layer: packed or discrete weights, biases, and where their gradients go. Also
separates a model's parameters into those of all ranks and those of experts, which are on one rank of each EP group.

The module that owns a parameter determines whether it is an expert's. An attribute of a Parameter would be lost when
the Parameter is replaced (copies of layers, loading by assignment, the meta device, FSDP, parametrizations).

G groups (experts of this rank), C input features, O output features.
"""

from __future__ import annotations

import math
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from symmoe.autograd import Unmodified
from symmoe.checks.arguments import modules_of, parameter_dtype_problem, size_problem
from symmoe.errors import ArgumentError, choice_problem, raise_for
from symmoe.grouped.weights import (
    Target,
    WeightProduct,
    addresses,
    check_uniform,
    compute_delayed,
    lay_side_by_side,
    main_grads_of,
)
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem
from symmoe.precision.operands import CachedWeight
from symmoe.precision.recipes import Recipe, precision_problem

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_GPU_MULTIPLE = 8  # TMA needs rows of a multiple of 16 bytes, also for fp32 weights used in 16 bits
RANK_MULTIPLE = 8  # of adapters: kernels need rows of a multiple of 16 bytes
_INDEXED = re.compile(r"(weight|bias)(\d+)")


class GroupedParameters(nn.Module):
    """The parameters of a GroupedLinear, without a forward; arguments as in GroupedLinear."""

    holds_experts = True
    _is_fsdp_managed_module = False  # FSDP sets it

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        weights: Literal["packed", "discrete"] = "packed",
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        precision: Recipe | None = None,
        init_method: Callable[[torch.Tensor], object] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        raise_for(
            size_problem(num_groups=num_groups, in_features=in_features, out_features=out_features)
        )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        raise_for(parameter_dtype_problem(dtype))
        raise_for(choice_problem("weights", weights, ("packed", "discrete")))
        raise_for(precision_problem(precision, in_features=in_features, out_features=out_features))
        self.num_groups = operator.index(num_groups)
        self.in_features = operator.index(in_features)
        self.out_features = operator.index(out_features)
        self.return_bias = return_bias
        self.precision = precision
        self.precision_name = str(
            precision
        )  # equal for equal precisions: torch.compile compares it
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad = delay_wgrad
        self.is_packed = weights == "packed"
        self.weight_names = (
            ("weight",) if self.is_packed else tuple(f"weight{g}" for g in range(num_groups))
        )
        self.cached_weight: CachedWeight | None = (
            None  # symmoe.grouped.cache_quantized_weights sets it
        )
        self._init_method = init_method
        self._delayed: deque[Callable[[], None]] = deque()
        self._after_backward_dw: list[Callable[[], object]] = []
        packed = torch.empty((num_groups, out_features, in_features), dtype=dtype, device=device)
        raise_for(e4m3_problem(precision, packed.device))
        if self.is_packed:
            self.weight = nn.Parameter(packed)
        else:
            for g, weight in enumerate(packed.unbind(0)):  # in one storage: see packed_view
                setattr(self, f"weight{g}", nn.Parameter(weight))
        self.bias = nn.Parameter(packed.new_empty((num_groups, out_features))) if bias else None
        self._weight_marks: dict[str, object] = {}
        if delay_wgrad:
            self.mark_weights(skip_backward_post_hook=True)  # for Megatron's DDP: a later gradient
        self.reset_parameters()

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        parameters = self.__dict__.get("_parameters", {})
        if name not in parameters and (match := _INDEXED.fullmatch(name)):
            packed = parameters.get(match[1])
            if packed is not None and int(match[2]) < self.num_groups:
                part: torch.Tensor = packed[int(match[2])]
                return part
        return super().__getattr__(name)

    def weight_parameters(self) -> tuple[torch.Tensor, ...]:
        """The one packed weight, or the G discrete ones; for a DTensor this rank's part, differentiable."""
        try:
            weights: tuple[Any, ...] = tuple(map(self._parameters.__getitem__, self.weight_names))
        except KeyError:  # parametrized
            weights = tuple(getattr(self, name) for name in self.weight_names)
        if self.is_packed and hasattr(weights[0], "device_mesh"):
            return (local_part(weights[0]),)
        return weights

    def mark_weights(self, **marks: object) -> None:
        """Sets attributes of every weight, for trainers to read. Parameters that replace the weights also get them."""
        self._weight_marks |= marks
        self._restore_marks()

    def width_problem(self, device: torch.device) -> ArgumentError | None:
        """The error if the layer cannot run on the device, due to the dtype of its weights or a width, or None."""
        weight = next(
            iter(self._parameters.values()), None
        )  # three times as fast as `parameters()`
        if weight is not None and weight.dtype not in control.DTYPES:
            return ArgumentError(
                f"the weights are {weight.dtype}; they must be one of {control.DTYPES}"
            )
        for name, width in (("in_features", self.in_features), ("out_features", self.out_features)):
            if device.type == "cuda" and width % _GPU_MULTIPLE:
                return ArgumentError(
                    f"{name} ({width}) must be a multiple of {_GPU_MULTIPLE} on GPUs"
                )
        return None if self.precision is None else e4m3_problem(self.precision, device)

    def cache_problem(self) -> ArgumentError | None:
        """The reason why a forward pass cannot use the weights cached by symmoe.grouped.cache_quantized_weights, or
        None."""
        if self.cached_weight is None:
            return None
        # FSDP and parametrizations make new tensors in every call.
        is_recreated = self._is_fsdp_managed_module or self.weight_names[0] not in self._parameters
        current = () if is_recreated else map(self._parameters.__getitem__, self.weight_names)
        return self.cached_weight.problem(current)

    # A [G, r, C] and B [G, O, r], differentiable, if a subclass adds B (A x) to W x; none here.
    adapters: Callable[[], tuple[torch.Tensor, ...]] = tuple

    def bias_parameter(self) -> torch.Tensor | None:
        """The bias, if there is one; for a DTensor this rank's part, differentiable."""
        # Read once: a parametrization evaluates it, and module attributes take a microsecond each.
        bias = self._parameters["bias"] if "bias" in self._parameters else self.bias
        return None if bias is None else local_part(bias)

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias. Does not evaluate it."""
        return not any(
            "bias" in attributes and attributes["bias"] is None
            for attributes in (self._parameters, self.__dict__)
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """With `init_method`, fills the weights by it and the biases with zeros; else both uniformly like nn.Linear."""
        bound = 1 / math.sqrt(self.in_features)
        bias = self.bias_parameter()
        if self._init_method is None:
            for parameter in (*self.weight_parameters(), *(() if bias is None else (bias,))):
                parameter.uniform_(-bound, bound)
            return
        for g in range(self.num_groups):
            self._init_method(getattr(self, f"weight{g}"))
        if bias is not None:
            bias.zero_()

    def gradient_target(
        self, weights: tuple[torch.Tensor, ...], *, overwrite_main_grad: bool
    ) -> Target:
        """The target of the gradients of `weights` (the computation's inputs), by the current options. ArgumentError:
        an option needs this module's own parameters, but the weights are computed from others."""
        if not any(weight.requires_grad for weight in weights):
            return Target()
        if not (self.delay_wgrad or self.accumulate_into_main_grad):
            return Target("new")
        parameters: tuple[Any, ...] = tuple(map(self._parameters.get, self.weight_names))
        if any(parameter is None or hasattr(parameter, "device_mesh") for parameter in parameters):
            option = "delay_wgrad" if self.delay_wgrad else "accumulate_into_main_grad"
            raise ArgumentError(
                f"{option} (True) must be False: weights of a {type(self).__name__} are made of others"
            )
        if not self.delay_wgrad:
            return main_grads_of(parameters, overwrite=overwrite_main_grad)
        overwrite = overwrite_main_grad if self.accumulate_into_main_grad else None

        def postpone(product: WeightProduct) -> None:
            rows = Unmodified(**(product.read or {}))
            self._delayed.append(partial(compute_delayed, parameters, overwrite, product, rows))

        return Target("delayed", delay=postpone)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> GroupedParameters:
        before = None if self.is_packed else addresses(self.weight_parameters())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._restore_marks()
        if self.is_packed:
            return self
        weights = self.weight_parameters()
        after = addresses(weights)
        # A moved parameter has new memory. A parameter that did not move may be in a trainer's buffer, and stays there.
        if after is not None and (
            before is None
            or all(previous != current for previous, current in zip(before, after, strict=True))
        ):
            lay_side_by_side(weights)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        for kind in ("weight", "bias"):
            indexed = [f"{prefix}{kind}{g}" for g in range(self.num_groups)]
            packed = f"{prefix}{kind}"
            if kind in self._parameters and all(key in state_dict for key in indexed):
                state_dict[packed] = torch.stack([state_dict.pop(key) for key in indexed])
            elif f"{kind}0" in self._parameters and packed in state_dict:
                weights = state_dict.pop(packed)
                if weights.shape[:1] == (self.num_groups,):
                    state_dict.update(zip(indexed, weights.unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._restore_marks()  # loading may assign new parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._restore_marks()  # the parameters of a copy are new

    def _restore_marks(self) -> None:
        if self._weight_marks:
            for name in self.weight_names:
                vars(self._parameters[name]).update(self._weight_marks)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, differentiable; any other tensor unchanged."""
    # Not isinstance: torch.distributed.tensor takes long to import, and most users have no DTensors.
    return cast("DTensor", parameter).to_local() if hasattr(parameter, "device_mesh") else parameter


def local_tensors(
    linears: Sequence[GroupedParameters], dtype: torch.dtype, *, cast_biases: bool = True
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Biases of the layers in that dtype, and weights, then adapters; for DTensors this rank's parts, differentiable.
    Parametrizations and adapters are evaluated here, once in a call: they may draw random numbers, or save tensors.
    Each layer has a bias or None; kernels also take a bias of another dtype. Adapters are A and B of each layer, or
    empty if no layer has any: if only one layer has any, e.g. because the other's are merged, the other gets zeros."""
    biases: list[torch.Tensor | None] = []
    tensors: list[torch.Tensor] = []
    pairs = []
    for linear in linears:
        bias = linear.bias_parameter()
        biases.append(bias if bias is None or not cast_biases else bias.to(dtype))
        weights = linear.weight_parameters()
        if weights[0].dtype != dtype:  # otherwise kernel_matrices checks them
            check_uniform(weights)
            weights = tuple(weight.to(dtype) for weight in weights)
        tensors += weights
        pairs.append(linear.adapters())
    if not any(pairs):
        return biases, tensors
    for linear, pair in zip(linears, pairs, strict=True):
        shapes = (RANK_MULTIPLE, linear.in_features), (linear.out_features, RANK_MULTIPLE)
        zeros = (tensors[0].new_zeros((linear.num_groups, *shape)) for shape in shapes)
        tensors += [adapter.to(dtype) for adapter in pair or zeros]
    return biases, tensors


def tensors_of_experts(model: nn.Module) -> set[int]:
    """Ids of the parameters and buffers of modules with `holds_experts = True`, and of all modules inside them."""
    modules = [m for m in modules_of(model, nn.Module) if getattr(m, "holds_experts", False)]
    return {
        id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())
    }


def named_parameters(
    model: nn.Module, *, shared: bool = False
) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """(name, parameter, whether it is an expert's) of every parameter, in the order of `model.named_parameters()`; if
    `shared`, once for each of its names. GroupedLinear has `holds_experts`, and any module of experts may have it. A
    parameter of such a module is an expert's under all of its names."""
    experts = tensors_of_experts(model)
    for name, parameter in model.named_parameters(remove_duplicate=not shared):
        yield name, parameter, id(parameter) in experts


def trainable(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts): trainable parameters, each once, in the order of `model.parameters()`."""
    named = [entry for entry in named_parameters(model) if entry[1].requires_grad]
    dense = [parameter for _, parameter, is_expert in named if not is_expert]
    experts = [parameter for _, parameter, is_expert in named if is_expert]
    return dense, experts
