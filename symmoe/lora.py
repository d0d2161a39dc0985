"""LoRA on grouped experts (arXiv:2106.09685): y_g = W[g] x + (alpha / r) * B[g] (A[g] x), with W frozen
(docs/training.md).

G groups, C input features, O output features, r rank. Only merging computes B A.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from symmoe.checks.arguments import check_factor, modules_of, parameter_dtype_problem, size_problem
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.parameters import RANK_MULTIPLE, local_part


class LoRAGroupedLinear(GroupedLinear):
    """A GroupedLinear with adapters; :func:`add_lora` creates it. rank_dropout: in training, the probability that a
    call drops each of the r directions of an expert. (The paper's dropout of the adapter's input is not
    implemented.)"""

    lora_a: nn.Parameter  # [G, r, C], uniform like nn.Linear
    lora_b: nn.Parameter  # [G, O, r], zeros: initially the layer equals the original, bit for bit
    scaling: float  # alpha / r
    rank_dropout: float
    is_merged: bool  # whether the weight includes the adapters

    @classmethod
    def from_linear(
        cls,
        linear: GroupedLinear,
        *,
        rank: int,
        alpha: float,
        rank_dropout: float,
        dtype: torch.dtype | None,
    ) -> LoRAGroupedLinear:
        """Adds adapters to `linear`; shares and freezes its parameters."""
        adapted = cls.__new__(cls)
        adapted.__dict__.update(linear.__dict__)
        adapted._parameters = dict(linear._parameters)
        adapted.requires_grad_(False)
        weight = adapted.weight_parameters()[0]
        adapted.lora_a = nn.Parameter(
            weight.new_empty((linear.num_groups, rank, linear.in_features), dtype=dtype)
        )
        adapted.lora_b = nn.Parameter(
            weight.new_zeros((linear.num_groups, linear.out_features, rank), dtype=dtype)
        )
        adapted.scaling = alpha / rank
        adapted.rank_dropout = rank_dropout
        adapted.is_merged = False
        adapted.reset_adapters()
        return adapted

    def reset_parameters(self) -> None:
        """Resets weights and biases as in GroupedLinear, and adapters as in `reset_adapters`."""
        super().reset_parameters()
        self.reset_adapters()
        if self.is_merged:  # the merged weights are now replaced
            self.is_merged = False
            self._set_adapters_trainable(True)

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Sets A to new random values, and B to zero, as before training."""
        bound = 1 / math.sqrt(self.in_features)
        local_part(self.lora_a).uniform_(-bound, bound)
        local_part(self.lora_b).zero_()

    def adapters(self) -> tuple[torch.Tensor, ...]:
        """A [G, r, C] and B [G, O, r] times the scaling, zero-padded to a rank that kernels support; differentiable.

        They keep their own dtype. The tuple is empty after merging.
        """
        if self.is_merged:
            return ()
        a = local_part(self.lora_a)
        b = local_part(self.lora_b) * self.scaling
        if self.training and self.rank_dropout:
            rank_mask = torch.ones((*a.shape[:2], 1), dtype=a.dtype, device=a.device)
            a = a * nn.functional.dropout(rank_mask, self.rank_dropout)
        if padding := -a.shape[1] % RANK_MULTIPLE:
            a = nn.functional.pad(a, (0, 0, 0, padding))
            b = nn.functional.pad(b, (0, padding))
        return a, b

    def merge(self) -> None:
        """Adds the adapters to the weights, in place; then they cost nothing, and receive no gradient."""
        if not self.is_merged:
            self._add_to_weights(1.0)

    def unmerge(self) -> None:
        """Subtracts the adapters from the weights again, up to the rounding of the weights."""
        if self.is_merged:
            self._add_to_weights(-1.0)

    def _set_adapters_trainable(self, trainable: bool) -> None:
        for adapter in (self.lora_a, self.lora_b):
            adapter.requires_grad_(trainable)
            if not trainable:
                adapter.grad = None  # an optimizer's step would change merged adapters

    @torch.no_grad()
    def _add_to_weights(self, sign: float) -> None:
        a = local_part(self.lora_a)
        b = local_part(self.lora_b)
        with torch.autocast(a.device.type, enabled=False):  # in the adapters' own dtype
            delta = torch.bmm(b, a) * self.scaling
        deltas = (delta,) if self.is_packed else delta
        for weight, weight_delta in zip(self.weight_parameters(), deltas, strict=True):
            weight.add_(weight_delta.to(weight.dtype), alpha=sign)
        self.is_merged = sign > 0
        self._set_adapters_trainable(not self.is_merged)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_merged:  # layers without adapters can load it; nothing is added twice
            del destination[f"{prefix}lora_a"], destination[f"{prefix}lora_b"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names = [f"{prefix}lora_a", f"{prefix}lora_b"]
        if any(name in state_dict for name in names):
            self.unmerge()  # stores weights without their adapters
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.is_merged:
            args[2][:] = [key for key in args[2] if key not in names]  # the missing keys

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_a.shape[1]}, scaling={self.scaling}"


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    rank_dropout: float = 0.0,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Adds adapters to both layers of every GroupedMLP in `model`, in place; freezes their weights and biases. Local.

    Everything else keeps its `requires_grad`. Call it before sharding the model and before building its optimizer.
    Returns all new parameters to train.

    Args:
        model: e.g. a GroupedMLP, a MoELayer, or a whole model.
        rank, alpha: r, and the scaling alpha / r. Any rank is computed as the next multiple of 8.
        rank_dropout: see LoRAGroupedLinear.
        dtype: the dtype of the adapters; None: the weights'. Optimizers want fp32 adapters on bf16 weights.

    Raises:
        ArgumentError: a number is out of range, or the model has no GroupedMLP, or has one with adapters, or one with
            another target for its gradients. The model is unchanged.
    """
    raise_for(
        size_problem(rank=rank)
        or (None if dtype is None else parameter_dtype_problem(dtype))
        or first_problem(
            (not 0.0 <= rank_dropout < 1.0, f"rank_dropout ({rank_dropout}) must be in [0, 1)")
        )
    )
    check_factor("alpha", alpha)
    mlps = modules_of(model, GroupedMLP, needs="GroupedMLP to give adapters to")
    for mlp in mlps:
        for name in ("fc1", "fc2"):
            _check_linear(name, getattr(mlp, name))
    adapt = partial(
        LoRAGroupedLinear.from_linear,
        rank=rank,
        alpha=alpha,
        rank_dropout=rank_dropout,
        dtype=dtype,
    )
    for mlp in mlps:
        mlp.fc1, mlp.fc2 = adapt(mlp.fc1), adapt(mlp.fc2)
    for module in model.modules():
        # MoELayer and layers of integrations: compiled steps refer to the experts' weights.
        if (set_experts := getattr(module, "set_experts", None)) is not None:
            set_experts(module.experts)
    return [
        parameter
        for linear in modules_of(model, LoRAGroupedLinear)
        for parameter in (linear.lora_a, linear.lora_b)
    ]


def merge_lora(model: nn.Module) -> None:
    """Runs LoRAGroupedLinear.merge on all adapters: for inference, and for state dicts without adapters."""
    for linear in modules_of(model, LoRAGroupedLinear):
        linear.merge()


def unmerge_lora(model: nn.Module) -> None:
    """Runs LoRAGroupedLinear.unmerge on all adapters, to continue training."""
    for linear in modules_of(model, LoRAGroupedLinear):
        linear.unmerge()


def _check_linear(name: str, linear: GroupedLinear) -> None:
    if type(linear) is not GroupedLinear:
        raise ArgumentError(f"{name} ({type(linear).__name__}) must be a GroupedLinear")
    reason = "(True) must be False: gradients are those of the adapters"
    raise_for(
        first_problem(
            (linear.accumulate_into_main_grad, f"{name}.accumulate_into_main_grad {reason}"),
            (linear.delay_wgrad, f"{name}.delay_wgrad {reason}"),
            (
                linear.precision is not None,
                f"{name}.precision ({linear.precision}) must be None: adapters add to products in full",
            ),
            (
                any(hasattr(parameter, "device_mesh") for parameter in linear.parameters()),
                f"{name} holds DTensors; give it adapters before it is sharded",
            ),
        )
    )
