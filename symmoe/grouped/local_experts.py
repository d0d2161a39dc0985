"""The experts of one call: a frozen description, and tensors that are a module's, this rank's parts of DTensors, what
parametrizations and adapters have made for this call, or an operator's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import ExpertForm, GroupedMLP, adapters_of
from symmoe.kernels.activation import Activation

_ACTIVATION_FIELDS = tuple(field.name for field in fields(Activation))


def without_memory(experts: GroupedMLP) -> GroupedMLP:
    """Experts of the same shape and activation, on the meta device."""
    return GroupedMLP(
        experts.num_groups,
        experts.hidden,
        experts.ffn,
        activation=experts.activation,
        bias=experts.fc1.has_bias,
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
    return (*sizes, *activation, fc1.has_bias, fc1.is_packed, fc1.precision_name, type(fc1), type(fc2))


@dataclass(frozen=True, slots=True, eq=False)
class CallExperts:
    """The experts of one call, see :func:`evaluated`.

    Attributes:
        form: what launches depend on besides tensors.
        biases: of fc1 and fc2, or None.
        tensors: their weights and adapters in one sequence, see ExpertForm.split.
        linears: fc1 and fc2, whose options backward reads when it runs.
    """

    form: ExpertForm
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    tensors: tuple[torch.Tensor, ...]
    linears: tuple[GroupedLinear, GroupedLinear]


def of_tensors(
    experts: GroupedMLP, biases: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
) -> CallExperts:
    """Experts of that form with other biases, and weights and adapters: like those of local_tensors."""
    linears = experts.fc1, experts.fc2
    b1, b2 = biases or (None, None)
    form = ExpertForm.of(experts.fc1, experts.activation, experts.fc2)
    return CallExperts(form, (b1, b2), tuple(tensors), linears)


def evaluated(experts: GroupedMLP | CallExperts, dtype: torch.dtype) -> CallExperts:
    """The experts for a call in that dtype. Parametrizations and adapters are evaluated here, and nowhere else: they
    may draw random numbers, or save something."""
    if isinstance(experts, CallExperts):
        return experts
    biases, weights, adapters = local_tensors(experts, dtype)
    return of_tensors(experts, biases, [*weights, *adapters])


def local_tensors(
    experts: GroupedMLP, dtype: torch.dtype
) -> tuple[list[torch.Tensor | None], list[torch.Tensor], list[torch.Tensor]]:
    """(biases, weights, adapters) of fc1 and fc2 in that dtype; for DTensors this rank's parts, differentiable.

    The biases are two, or None; the adapters are A1, B1, A2, B2 or none (adapters_of).
    """
    linears = experts.fc1, experts.fc2
    found = [linear.bias_parameter() for linear in linears]
    biases = [None if bias is None else bias.to(dtype) for bias in found]
    weights = [weight for linear in linears for weight in linear.weight_parameters()]
    adapters = [adapter.to(dtype) for adapter in adapters_of(*linears, weights[0])]
    return biases, [weight.to(dtype) for weight in weights], adapters
