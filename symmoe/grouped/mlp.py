"""GroupedMLP: FC1, activation times scale, FC2, for all experts of a rank, through the fused kernels.

H hidden, I ffn, G groups (experts of this rank), N rows sorted by group. The scale (the router's prob) multiplies the
activation before FC2, so that combining rows is a plain sum and FC2's output is not needed in backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context, Function, GradientBuffer, wrote_into
from symmoe.checks.arguments import (
    RowsLike,
    check_gradient,
    gradient_rows,
    kernel_rows,
    result_buffers_problem,
    rows_problem,
    scale_problem,
    shared_memory_problem,
    size_problem,
    width_problem,
    wrapped_problem,
)
from symmoe.errors import ArgumentError, StaleLease, raise_for
from symmoe.grouped.activations import ScaledActivation, ScaledSwiGLU
from symmoe.grouped.experts import ExpertRows, ExpertWeights, Hidden, experts_forward
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.lora_experts import AdaptedWeights
from symmoe.grouped.low_rank import RANK_MULTIPLE, LowRank
from symmoe.grouped.quantized_experts import FULL, QuantizedWeights, Wire
from symmoe.grouped.splits import Splits, splits_problem, splits_to_row_range
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels.activation import Activation
from symmoe.precision.operands import HeldWeight
from symmoe.precision.recipes import Recipe


class GroupedMLP(nn.Module):
    """The experts of one rank: for group g, `scale * (W2[g] act(W1[g] x + b1[g]) + b2[g])`.

    It always multiplies FC2's bias by the row's prob; Sequential does so only with `bias_scale`.

    Args:
        num_groups: G, experts on this rank.
        hidden, ffn: H, I. On GPUs both must be multiples of 8.
        activation: the function between the two layers; None is ScaledSwiGLU().
        bias: whether both layers have a bias.
        weights, accumulate_into_main_grad, delay_wgrad, precision: as in GroupedLinear, for both layers.

    Attributes:
        fc1: GroupedLinear H -> W (W = 2I for gated activations).
        fc2: GroupedLinear I -> H.

    Raises:
        ArgumentError: as in GroupedLinear; or `activation` is not a ScaledActivation.
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
        if activation is not None and not isinstance(activation, ScaledActivation):
            raise ArgumentError(f"activation ({activation!r}) must be a ScaledActivation, or None")
        self.num_groups, self.hidden, self.ffn = num_groups, hidden, ffn
        self.activation = ScaledSwiGLU() if activation is None else activation
        linear = partial(
            GroupedLinear,
            num_groups,
            bias=bias,
            weights=weights,
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad=delay_wgrad,
            precision=precision,
            dtype=dtype,
            device=device,
        )
        self.fc1 = linear(hidden, self.activation.activation.hidden_width(ffn))
        self.fc2 = linear(ffn, hidden)

    @property
    def precision(self) -> Recipe | None:
        """Which numbers the products of both layers multiply."""
        return self.fc1.precision

    def reset_parameters(self) -> None:
        """Uniform weights and biases with the bound of nn.Linear, 1 / sqrt(inputs)."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

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
            out: [..., H] buffer for the result, e.g. of a heap lease. Its tail stays as it is.
            grad_input_out: [..., H] buffer for the gradient of `rows`. Its tail stays as it is, too.
            is_first_microbatch: the weight gradients overwrite `main_grad`.

        Returns:
            [..., H], in the memory of `out` if given; the tail is zero otherwise.

        Raises:
            ArgumentError, StaleLease: an argument is wrong; nothing has been computed.
        """
        return fused_mlp(
            self.fc1,
            self.activation,
            self.fc2,
            rows,
            splits,
            row_probs,
            scale_bias=True,
            out=out,
            grad_input_out=grad_input_out,
            is_first_microbatch=(is_first_microbatch, is_first_microbatch),
        )

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def backward_dw(self) -> None:
        """Runs GroupedLinear.backward_dw of both layers."""
        self.fc2.backward_dw()
        self.fc1.backward_dw()


def fused_mlp(
    fc1: GroupedLinear,
    activation: ScaledActivation,
    fc2: GroupedLinear,
    x: torch.Tensor,
    splits: Splits,
    scale: torch.Tensor,
    *,
    scale_bias: bool,
    out: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
    is_first_microbatch: tuple[bool, bool],
) -> torch.Tensor:
    """fc2(activation(fc1(x), scale)) through the fused kernels: the same bits, without the rows in between.

    Args:
        scale_bias: whether `scale` multiplies fc2's bias too.
        is_first_microbatch: for fc1 and for fc2.
        The other arguments: as in GroupedMLP.forward.
    """
    raise_for(wrapped_problem("fc1", fc1, "held_problem") or wrapped_problem("fc2", fc2, "held_problem"))
    raise_for(rows_problem("rows", x, fc1) or width_problem(fc2, x) or fc1.held_problem() or fc2.held_problem())
    raise_for(
        mlp_problem(fc1, fc2, RowsLike.of(x), splits, scale, out, grad_input_out)
        or shared_memory_problem(
            out, grad_input_out, itertools.chain((x, splits, scale), fc1.parameters(), fc2.parameters())
        )
    )
    x, weights1, b1 = fc1.operands(x)
    _, weights2, b2 = fc2.operands(x)
    tensors = (x, scale, b1, b2, *weights1, *weights2)
    trains = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    trains_rows = trains and x.requires_grad
    settings = _MLPSettings(
        fc1=fc1,
        fc2=fc2,
        form=ExpertForm.of(fc1, activation, fc2),
        scale_bias=scale_bias and b2 is not None,
        overwrite_main_grad=is_first_microbatch,
        trains=(trains_rows, trains),
    )
    row_range = splits_to_row_range(splits, device=x.device, num_rows=math.prod(x.shape[:-1]))
    adapters = (adapter.to(x.dtype) for adapter in adapters_of(fc1, fc2, weights1[0]))
    y: torch.Tensor = _FusedMLP.apply(
        settings, (out, grad_input_out), row_range, x, scale.float(), b1, b2, *weights1, *weights2, *adapters
    )
    return y


_ACTIVATION_FIELDS = tuple(field.name for field in fields(Activation))
T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What launches of experts depend on besides tensors.

    Attributes:
        num_groups, hidden, ffn, activation, precision: as in GroupedMLP.
        are_packed: whether the weights of fc1 are packed, and whether those of fc2 are.
    """

    num_groups: int
    hidden: int
    ffn: int
    activation: Activation
    precision: Recipe | None
    are_packed: tuple[bool, bool]

    @classmethod
    def of(cls, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear) -> ExpertForm:
        """That of these layers now."""
        sizes = fc1.num_groups, fc1.in_features, fc2.in_features
        return cls(*sizes, activation.activation, fc1.precision, (fc1.is_packed, fc2.is_packed))

    def split(self, tensors: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        """What is of the weights of fc1, of those of fc2, and of the adapters after them."""
        first, second = (1 if is_packed else self.num_groups for is_packed in self.are_packed)
        return tuple(tensors[:first]), tuple(tensors[first : first + second]), tuple(tensors[first + second :])


def adapters_of(fc1: GroupedLinear, fc2: GroupedLinear, weight: torch.Tensor) -> Tensors:
    """GroupedLinear.adapters of both layers, A1, B1, A2, B2; none if neither has any. weight: one of fc1.

    If only one layer has adapters, e.g. because those of the other are merged, the other gets zeros.
    """
    pairs = fc1.adapters(), fc2.adapters()
    if not any(pairs):
        return ()
    return *(pairs[0] or _zero_adapters(fc1, weight)), *(pairs[1] or _zero_adapters(fc2, weight))


def _zero_adapters(linear: GroupedLinear, weight: torch.Tensor) -> Tensors:
    shapes = (RANK_MULTIPLE, linear.in_features), (linear.out_features, RANK_MULTIPLE)
    return tuple(weight.new_zeros((linear.num_groups, *shape)) for shape in shapes)


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
    """The experts of one call: a frozen description, and tensors: a module's, this rank's parts of DTensors, what
    parametrizations and adapters have made for this call, or an operator's inputs.

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


Held = tuple[HeldWeight | None, HeldWeight | None]


def expert_weights(
    form: ExpertForm,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
    *,
    trains: tuple[bool, bool],
    wire: Wire = FULL,
    held: Held = (None, None),
) -> ExpertWeights:
    """The experts' weights as the kernels take them. `tensors` are the weights and the adapters in one sequence.

    Args:
        trains: whether backward will ask for the gradient of the rows, and whether there will be one.
        wire: the formats in which rows and gradients have travelled.
        held: what symmoe.constant_weights holds of fc1 and fc2.
    """
    weights1, weights2, adapters = form.split(tensors)
    w1, w2 = kernel_matrices({"fc1": weights1, "fc2": weights2})
    weights = (w1, biases[0], w2, biases[1], form.activation)
    if form.precision is not None:
        if adapters:
            raise ArgumentError(f"adapters need precision None; the experts compute in {form.precision}")
        return QuantizedWeights(*weights, form.precision, trains, wire, held)
    if not adapters:
        return ExpertWeights(*weights)
    return AdaptedWeights(*weights, LowRank(*adapters[:2]), LowRank(*adapters[2:]))


def mlp_problem(
    fc1: GroupedLinear,
    fc2: GroupedLinear,
    rows: RowsLike,
    splits: Splits,
    scale: torch.Tensor,
    out: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
) -> ArgumentError | StaleLease | None:
    """What is wrong with an argument of :func:`fused_mlp` other than the rows, or None. Reads no device memory."""
    return (
        splits_problem(splits, num_groups=fc1.num_groups, device=rows.device, num_rows=rows.num_rows)
        or scale_problem("row_probs", scale, rows)
        or result_buffers_problem(rows, fc1.in_features, fc2.out_features, out, grad_input_out)
    )


@dataclass(frozen=True, slots=True)
class _MLPSettings:
    """The arguments of one call that are not tensors."""

    fc1: GroupedLinear
    fc2: GroupedLinear
    form: ExpertForm
    scale_bias: bool
    overwrite_main_grad: tuple[bool, bool]
    trains: tuple[bool, bool]

    def operands(
        self,
        x: torch.Tensor,
        row_range: torch.Tensor,
        scale: torch.Tensor,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        tensors: Sequence[torch.Tensor],
    ) -> tuple[ExpertRows, ExpertWeights]:
        """Inputs as the kernels take them."""
        scale = scale.view(-1)
        held = self.fc1.held_weight, self.fc2.held_weight
        return (
            ExpertRows(x.view(-1, x.shape[-1]), row_range, scale, scale if self.scale_bias else None),
            expert_weights(self.form, (b1, b2), tensors, trains=self.trains, held=held),
        )


class _FusedMLPContext(Context, Protocol):
    settings: _MLPSettings
    grad_input_out: GradientBuffer


class _FusedMLP(Function):
    @staticmethod
    def forward(
        ctx: _FusedMLPContext,
        settings: _MLPSettings,
        buffers: tuple[torch.Tensor | None, torch.Tensor | None],
        row_range: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        x, scale = kernel_rows(x), scale.contiguous()
        hidden, (out, grad_input_out) = settings.fc2.out_features, buffers
        y = x.new_empty((*x.shape[:-1], hidden)) if out is None else out
        rows, experts = settings.operands(x, row_range, scale, b1, b2, tensors)
        kept = experts_forward(rows, experts, y.view(-1, hidden), num_rows=scale.numel(), zero_tail=out is None)
        ctx.save_for_backward(x, row_range, scale, b1, b2, *kept, *tensors)
        ctx.settings, ctx.grad_input_out = settings, GradientBuffer("grad_input_out", grad_input_out)
        # Not `mark_dirty(out)`: for a slice of a lease, autograd would make that a copy into the lease's gradient.
        return y if out is None else wrote_into(y).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: _FusedMLPContext, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_gradient(d_y)
        x, row_range, scale, b1, b2, *rest = ctx.saved_tensors
        settings = ctx.settings
        hidden, tensors = Hidden(*rest[: len(Hidden._fields)]), rest[len(Hidden._fields) :]
        weights1, weights2, _ = settings.form.split(tensors)
        rows, experts = settings.operands(x, row_range, scale, b1, b2, tensors)
        experts_backward = experts.backward(rows, hidden, kernel_rows(d_y).view(-1, d_y.shape[-1]))
        d_x = None
        if ctx.needs_input_grad[3]:
            d_x = gradient_rows(ctx.grad_input_out, x, d_y)
            experts_backward.input_gradient(d_x.view(-1, x.shape[-1]), zero_tail=ctx.grad_input_out.tensor is None)
            d_x = ctx.grad_input_out.hand_on(d_x)
        first, second = settings.overwrite_main_grad
        d_w2 = settings.fc2.weight_gradients(weights2, experts_backward.w2_gradient, overwrite_main_grad=second)
        d_w1 = settings.fc1.weight_gradients(weights1, experts_backward.w1_gradient, overwrite_main_grad=first)
        d_scale, d_adapters = experts_backward.d_scale.view(scale.shape), experts_backward.adapter_gradients()
        ctx.grad_input_out.end_backward()
        return None, None, None, d_x, d_scale, experts_backward.db1, experts_backward.db2, *d_w1, *d_w2, *d_adapters
