"""Experts over tensors that cannot be a module's parameters: this rank's parts of DTensors, or an operator's inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields

import torch

from symmoe.grouped.linear import GroupedLinear, weight_names
from symmoe.grouped.mlp import GroupedMLP, adapters_of, split_tensors
from symmoe.kernels.activation import Activation

_ACTIVATION_FIELDS = tuple(field.name for field in fields(Activation))


def without_memory(experts: GroupedMLP) -> GroupedMLP:
    """Experts of the same shape and activation, on the meta device."""
    return GroupedMLP(
        experts.num_groups,
        experts.hidden,
        experts.ffn,
        activation=experts.activation,
        bias=experts.fc1.bias is not None,
        weights="packed" if experts.fc1.is_packed else "discrete",
        precision=experts.precision,
        device="meta",
    )


def kind_of(experts: GroupedMLP) -> tuple[object, ...]:
    """Everything but the values of parameters in which two GroupedMLPs can differ."""
    fc1, fc2 = experts.fc1, experts.fc2
    sizes = experts.num_groups, experts.hidden, experts.ffn
    # The fields, not the object: torch.compile would tell layers apart that do not share the object.
    activation = [getattr(experts.activation.activation, name) for name in _ACTIVATION_FIELDS]
    return (*sizes, *activation, fc1.bias is not None, fc1.is_packed, fc1.precision_name, type(fc1), type(fc2))


class _LocalLinear(GroupedLinear):
    """A linear layer of :func:`with_parameters`. Its adapters may come from a module of another class."""

    local_adapters: tuple[torch.Tensor, ...]

    def adapters(self) -> tuple[torch.Tensor, ...]:
        return self.local_adapters


def with_parameters(
    experts: GroupedMLP,
    biases: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
) -> GroupedMLP:
    """A copy of the experts with other tensors as parameters: those of local_parameters, or tensors like them."""
    copied = copy.copy(experts)
    copied._modules = dict(experts._modules)
    weights_of_both = split_tensors(experts.fc1, experts.fc2, weights)[:2]
    for number, (name, own_weights) in enumerate(zip(("fc1", "fc2"), weights_of_both, strict=True)):
        linear = copy.copy(getattr(experts, name))
        linear.__class__ = _LocalLinear
        linear.local_adapters = tuple(adapters[2 * number : 2 * number + 2])
        names = ["weight"] if linear.is_packed else weight_names(linear.num_groups)
        bias = biases[number] if biases else None
        linear._parameters = dict(zip(names, own_weights, strict=True)) | {"bias": bias}
        copied._modules[name] = linear
    return copied


def local_experts(experts: GroupedMLP) -> GroupedMLP:
    """Experts whose parameters are this rank's parts, if they are DTensors; else the experts themselves."""
    if not hasattr(next(experts.parameters()), "device_mesh"):
        return experts
    return with_parameters(experts, *local_parameters(experts))


def local_parameters(experts: GroupedMLP) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(biases, weights, adapters) of fc1 and fc2; for DTensors this rank's parts, differentiable.

    The biases are two or none; the adapters are A1, B1, A2, B2 or none (adapters_of).
    """
    linears = experts.fc1, experts.fc2
    maybe_biases = [linear.bias_parameter() for linear in linears]
    biases = [bias for bias in maybe_biases if bias is not None]
    weights = [weight for linear in linears for weight in linear.weight_parameters()]
    return biases, weights, list(adapters_of(*linears))
