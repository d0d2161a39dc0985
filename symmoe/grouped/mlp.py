"""GroupedMLP: FC1, activation times scale, FC2, for all experts of a rank, through the fused kernels.

H hidden, I ffn, G groups (experts of this rank), N rows sorted by group. The scale (the router's prob) multiplies the
activation before FC2, so that combining rows is a plain sum and FC2's output is not needed in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from symmoe.checks.arguments import call_problem, size_problem
from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.activations import ScaledActivation, ScaledSwiGLU, activation_problem
from symmoe.grouped.experts import ExpertSpec, ExpertWeights, Layers, SavedActivations, of_tensors
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.quantized_experts import QuantizedWeights, Wire
from symmoe.grouped.rows_function import (
    ExpertRows,
    MaybeTensor,
    Needs,
    RowArguments,
    RowGradients,
    Splits,
    run_rows,
)
from symmoe.grouped.weights import LayerWeights, kernel_matrices
from symmoe.kernels.activation import Activation
from symmoe.precision.operands import CachedWeight
from symmoe.precision.recipes import Recipe
from symmoe.torch_internals import replaceable

_ACTIVATION_FIELDS = tuple(field.name for field in fields(Activation))


class GroupedMLP(nn.Module):
    """The experts of one rank: for group g, `scale * (W2[g] act(W1[g] x + b1[g]) + b2[g])`.

    FC2's bias is always multiplied by the row's prob; Sequential multiplies it only with `bias_scale`. ArgumentError:
    as in GroupedLinear; or `activation` is not a ScaledActivation.

    Args:
        num_groups: G, experts on this rank.
        hidden, ffn: H, I. On GPUs both must be multiples of 8.
        activation: the function between the two layers; None is ScaledSwiGLU().
        bias, weights, accumulate_into_main_grad, delay_wgrad, precision: as in GroupedLinear, for both layers.

    Attributes:
        fc1, fc2: GroupedLinear H -> W (W = 2I for gated activations) and I -> H.
    """

    num_extra_inputs = 2  # Sequential passes the splits and the scale

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        ffn: int,
        *,
        activation: ScaledActivation | None = None,
        bias: bool = False,
        weights: Literal["packed", "discrete"] = "packed",
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        precision: Recipe | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        raise_for(size_problem(num_groups=num_groups, hidden=hidden, ffn=ffn))
        if activation is not None:
            raise_for(activation_problem(activation, ScaledActivation))
        self.num_groups, self.hidden, self.ffn = map(operator.index, (num_groups, hidden, ffn))
        self.activation = ScaledSwiGLU() if activation is None else activation
        options: dict[str, Any] = {
            "bias": bias,
            "weights": weights,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "delay_wgrad": delay_wgrad,
            "precision": precision,
            "dtype": dtype,
            "device": device,
        }
        self.fc1 = GroupedLinear(
            num_groups, hidden, self.activation.activation.hidden_width(ffn), **options
        )
        self.fc2 = GroupedLinear(num_groups, ffn, hidden, **options)

    @property
    def precision(self) -> Recipe | None:
        """The number format of both layers' products."""
        return self.fc1.precision

    def reset_parameters(self) -> None:
        """Uniform weights and biases with the bound of nn.Linear, 1 / sqrt(inputs)."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    @replaceable
    def forward(
        self,
        rows: torch.Tensor,
        splits: Splits,
        row_probs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        grad_input_out: torch.Tensor | None = None,
        is_first_microbatch: bool = False,
    ) -> torch.Tensor:
        """Applies expert g to the g-th run of rows. Not collective; device splits do not synchronise the host.

        Args:
            rows: [..., H] sorted by group; rows past sum(splits) are a tail that is never read.
            splits: as in GroupedLinear.
            row_probs: [...], scale of each row; the computation is in fp32.
            out, grad_input_out: [..., H] buffers for the result and for the gradient of `rows`, e.g. of heap leases.
                Their tails do not change.
            is_first_microbatch: the weight gradients overwrite `main_grad`.

        Returns:
            [..., H], in the memory of `out` if given; the tail is zero otherwise.

        Raises:
            ArgumentError, StaleLease: an argument is wrong; no kernel has run.
        """
        arguments = RowArguments(
            splits, row_probs, out, grad_input_out, (is_first_microbatch, is_first_microbatch)
        )
        return fused_mlp((self.fc1, self.activation, self.fc2), rows, arguments, scale_bias=True)

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def backward_dw(self) -> None:
        """Runs GroupedLinear.backward_dw of both layers."""
        self.fc2.backward_dw()
        self.fc1.backward_dw()


def fused_mlp(
    layers: Layers, x: torch.Tensor, arguments: RowArguments, *, scale_bias: bool
) -> torch.Tensor:
    """fc2(activation(fc1(x), scale)) through the fused kernels: the same bits, without intermediate rows. Arguments as
    in GroupedMLP.forward. scale_bias: whether the scale also multiplies fc2's bias."""
    fc1, activation, fc2 = layers
    raise_for(call_problem(fc1=fc1, activation=activation, fc2=fc2))
    x, biases, tensors = arguments.check("rows", x, (fc1, fc2))
    experts = of_tensors(layers, biases, tensors)
    inputs = (x, arguments.scale, *experts.biases, *experts.tensors)
    trains = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )
    has_scaled_bias = scale_bias and experts.biases[1] is not None
    products = MLPProducts(
        experts.form, (fc1, fc2), has_scaled_bias, (trains and x.requires_grad, trains)
    )
    return run_rows(products, arguments, x, experts.biases, experts.tensors)


def experts_call_problem(experts: Any) -> ArgumentError | None:
    """The result of call_problem for a step of experts."""
    parts = {f"experts.{name}": getattr(experts, name) for name in ("fc1", "activation", "fc2")}
    return call_problem(experts=experts, **parts)


def without_memory(experts: GroupedMLP) -> GroupedMLP:
    """Experts of the same shape and activation, on the meta device."""
    fc1 = experts.fc1
    return GroupedMLP(
        fc1.num_groups,
        fc1.in_features,
        experts.fc2.in_features,
        activation=experts.activation,
        bias=fc1.has_bias,
        weights="packed" if fc1.is_packed else "discrete",
        precision=fc1.precision,
        device="meta",
    )


def kind_of(experts: GroupedMLP) -> tuple[object, ...]:
    """All properties in which two GroupedMLPs can differ, except the values of parameters."""
    fc1 = experts.fc1
    fc2 = experts.fc2
    sizes = fc1.num_groups, fc1.in_features, fc2.in_features
    # The fields, not the object: torch.compile would distinguish layers with separate objects.
    activation = [getattr(experts.activation.activation, name) for name in _ACTIVATION_FIELDS]
    return (
        *sizes,
        *activation,
        fc1.has_bias,
        fc1.is_packed,
        fc1.precision_name,
        type(fc1),
        type(fc2),
    )


def expert_weights(
    form: ExpertSpec,
    biases: Sequence[MaybeTensor],
    tensors: Sequence[torch.Tensor],
    *,
    trains: tuple[bool, bool],
    wire: Wire | None = None,
    cached: tuple[CachedWeight | None, CachedWeight | None] = (None, None),
) -> ExpertWeights:
    """The experts' weights in the kernels' form. `tensors`: the weights, then the adapters; trains: whether backward
    needs the gradient of the rows, and whether it will run; wire: wire formats of rows and gradients; cached: weights
    of fc1 and fc2 in symmoe.grouped.cache_quantized_weights."""
    weights1, weights2, adapters = form.split(tensors)
    w1, w2 = kernel_matrices({"fc1": weights1, "fc2": weights2})
    a1, b1, a2, b2 = adapters or (None,) * 4
    fc1 = LayerWeights(w1, biases[0], a1, b1)
    fc2 = LayerWeights(w2, biases[1], a2, b2)
    if form.precision is None:
        return ExpertWeights(fc1, fc2, form.activation)
    if adapters:
        raise ArgumentError(
            f"adapters need precision None; the experts compute in {form.precision}"
        )
    fc1, fc2 = (
        fc if weight is None else fc.with_cached(weight, form.precision, is_transposed)
        for fc, weight, is_transposed in zip((fc1, fc2), cached, trains, strict=True)
    )
    return QuantizedWeights(fc1, fc2, form.activation, form.precision, trains, wire or Wire())


@dataclass(frozen=True, slots=True)
class MLPProducts:
    """The computation of an MLP's layers in a call, without autograd. trains: as in expert_weights."""

    form: ExpertSpec
    layers: tuple[GroupedLinear, GroupedLinear]
    scale_bias: bool
    trains: tuple[bool, bool]

    @property
    def key(self) -> Hashable:
        return self.form, self.scale_bias, self.trains

    def weights(self, tensors: Sequence[Any], *, is_forward: bool) -> ExpertWeights:
        cached = [layer.cached_weight if is_forward else None for layer in self.layers]
        return expert_weights(
            self.form,
            tensors[:2],
            tensors[2:],
            trains=self.trains,
            cached=(cached[0], cached[1]),
        )

    def forward(
        self, weights: ExpertWeights, rows: ExpertRows, out: torch.Tensor, *, zero_tail: bool
    ) -> SavedActivations:
        hidden, a = weights.first_layer(rows, num_rows=len(rows.rows))
        weights.second_layer(a, rows, out, zero_tail=zero_tail)
        return hidden

    def backward(
        self,
        weights: ExpertWeights,
        rows: ExpertRows,
        saved: Sequence[Any],
        d_out: torch.Tensor,
        needs: Needs,
        d_rows: MaybeTensor,
        *,
        zero_tail: bool,
    ) -> RowGradients:
        steps = weights.backward(rows, SavedActivations(*saved), d_out, needs_scale=needs[1])
        if d_rows is not None:
            steps.input_gradient(d_rows, zero_tail=zero_tail)
        products = steps.w1_product, steps.w2_product
        return RowGradients(steps.d_scale, steps.d_biases, products, steps.adapter_gradients)
