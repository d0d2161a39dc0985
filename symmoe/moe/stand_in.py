"""Experts of one shape with the parameters of others: what a step computes with where a module cannot hold it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields

import torch

from symmoe.kernels.activation import Activation
from symmoe.moe.grouped_linear import GroupedLinear
from symmoe.moe.grouped_mlp import GroupedMLP, split_weights

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
        device="meta",
    )


def kind(experts: GroupedMLP) -> tuple[object, ...]:
    """All that tells two experts apart but for their parameters' values."""
    fc1, fc2 = experts.fc1, experts.fc2
    sizes = experts.num_groups, experts.hidden, experts.ffn
    # Its fields, not itself: torch.compile would tell layers apart by whether they share the object.
    activation = [getattr(experts.activation.activation, name) for name in _ACTIVATION_FIELDS]
    return (*sizes, *activation, fc1.bias is not None, fc1.is_packed, type(fc1), type(fc2))


def with_parameters(experts: GroupedMLP, biases: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> GroupedMLP:
    """The experts with other tensors for parameters: both biases or none, and the weights of fc1 and fc2."""
    stand_in = copy.copy(experts)
    stand_in._modules = dict(experts._modules)
    for number, (name, own) in enumerate(zip(("fc1", "fc2"), split_weights(experts.fc1, tuple(weights)), strict=True)):
        linear = copy.copy(getattr(experts, name))
        linear.__class__ = GroupedLinear  # what it is given are the effective weights, also of one with adapters
        names = ["weight"] if linear.is_packed else [f"weight{g}" for g in range(linear.num_groups)]
        linear._parameters = dict(zip(names, own, strict=True)) | {"bias": biases[number] if biases else None}
        stand_in._modules[name] = linear
    return stand_in


def local_experts(experts: GroupedMLP) -> GroupedMLP:
    """Experts whose parameters are this rank's parts, if they are DTensors; else the experts themselves."""
    if not hasattr(next(experts.parameters()), "device_mesh"):
        return experts
    return with_parameters(experts, *local_parameters(experts))


def local_parameters(experts: GroupedMLP) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(biases, weights) of fc1 and fc2; of DTensors this rank's parts, differentiable."""
    linears = experts.fc1, experts.fc2
    biases = [linear.bias_parameter() for linear in linears if linear.bias is not None]
    return biases, [weight for linear in linears for weight in linear.weight_parameters()]
