"""The module that replaces the `experts` of a transformers MoE block."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from symmoe.checks.arguments import (
    Order,
    Overflow,
    Problem,
    Stash,
    choices_problem,
    tensor_problem,
    working_dtype,
)
from symmoe.errors import ArgumentError, ConfigMismatch, PeerTimeout, raise_for
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.mlp import GroupedMLP
from symmoe.integrations.topk_override import override_topk
from symmoe.integrations.transformers.forms import ExpertsForm, PeftNames, StockExperts
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule
from symmoe.moe.listeners import Listeners
from symmoe.moe.routed_experts import RoutedExperts, run_routed
from symmoe.symm_mem.heap import SymmetricHeap

_ENDS = "ranks that generate end at different lengths, unless all pass synced_gpus=True to generate"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Options of every call of the experts. Equal on every rank; each field as in MoEConfig, `capacity=None` is exact.

    ArgumentError: a field has an invalid value.
    """

    capacity: int | None = None
    overflow: Overflow = "raise"
    max_tokens: int | None = None
    order: Order = "rank"
    stash: Stash = "all"

    def __post_init__(self) -> None:
        raise_for(choices_problem(overflow=self.overflow, order=self.order, stash=self.stash))


class ExpertParallelExperts(ExpertParallelModule):
    """Experts of one MoE block, spread over the ranks of a heap; called like transformers' own.

    Rank r holds experts r * e to (r + 1) * e - 1. The choice and the weights of the block's router are arguments.

    Args:
        mlp: this rank's e experts.
        heap: the EP group's symmetric heap; all blocks of a model share one.
        step: how a call runs.
        form: transformers' form of the weights.

    Attributes:
        peft_names: names in peft's files of the adapters of `mlp.fc1` and `mlp.fc2`, if they come from peft.
    """

    def __init__(
        self, mlp: GroupedMLP, heap: SymmetricHeap, *, step: StepConfig, form: ExpertsForm
    ) -> None:
        super().__init__()
        self.heap, self.form = heap, form
        self.num_experts = mlp.num_groups * heap.num_ranks  # E, experts of all ranks
        # Every call has its own K, and no user of this configuration reads its K.
        self.config = MoEConfig(
            hidden=mlp.hidden,
            ffn=mlp.ffn,
            num_experts=self.num_experts,
            top_k=1,
            activation=mlp.activation.activation,
            **asdict(step),
        )
        self.listeners = Listeners(
            heap,
            num_experts=self.num_experts,
            order=step.order,
            override_router=partial(
                override_topk, router="", position=1
            ),  # the caller of the experts chooses
        )
        self.peft_names: dict[str, PeftNames] = {}
        self.set_experts(mlp)
        self.register_state_dict_post_hook(_warn_of_state_dict)  # type: ignore[no-untyped-call]

    @property
    def experts(self) -> GroupedMLP:  # type: ignore[override]  # there it is a module, here one of another name
        """`mlp`, by MoELayer's name for it."""
        return self.mlp

    def set_experts(self, experts: GroupedMLP) -> None:
        """Replaces this rank's experts by `experts` of the same shape, e.g. by `mlp` after it got adapters. Local."""
        self.mlp = experts
        self._routed_experts = RoutedExperts.of(self.config, self.heap, experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the experts' outputs. Collective over the EP group, forward and backward. With exact
        capacity the host waits for the plan, once everything is launched.

        Args:
            hidden_states: [T, H] fp32, fp16 or bf16 on the heap's device. T may differ from rank to rank.
            top_k_index: int32 or int64 [T, K], expert ids in [0, E), or -1 for no expert.
            top_k_weights: [T, K], floating point; multiplied in fp32. Receives a gradient.

        Returns:
            [T, H] in the dtype of hidden_states.

        Raises:
            ArgumentError, ConfigMismatch, CapacityError, HeapExhausted, PeerTimeout: see make_plan; on every rank.
                Inside torch.compile wrong shapes are the compiler's error, on that rank only.
        """
        if torch.compiler.is_compiling():
            return self._run(hidden_states, top_k_index, top_k_weights)
        try:
            problem = self.prepare_call() or self._problem(
                hidden_states, top_k_index, top_k_weights
            )
            self.heap._fail_for(problem, control.PHASE_PLAN)
            return self._run(hidden_states, top_k_index, top_k_weights)
        except (ConfigMismatch, PeerTimeout) as error:
            if not torch.is_grad_enabled():
                error.args = (f"{error} ({_ENDS})",)
            raise

    def _run(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        dtype = working_dtype(hidden_states)
        tokens, probs = hidden_states.to(dtype), top_k_weights.float()
        y, load = run_routed(self._routed_experts, tokens, probs, top_k_index, self.mlp)
        self.listeners.notify(top_k_index, load, tokens, is_training=self.training)
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, ranks={self.heap.num_ranks}, hidden={self.mlp.hidden}, ffn={self.mlp.ffn}"

    def _problem(self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> Problem:
        error = tensor_problem(
            "hidden_states",
            x,
            shape=("T", self.mlp.hidden),
            dtypes=control.DTYPES,
            device=self.heap.device,
        )
        if error is None and (topk_idx.shape[:1] != x.shape[:1] or weights.shape != topk_idx.shape):
            return ArgumentError(
                f"top_k_index {list(topk_idx.shape)} and top_k_weights {list(weights.shape)} must both be "
                f"[{x.shape[0]}, K]"
            )
        return error


def _warn_of_state_dict(
    module: ExpertParallelExperts, state: Mapping[str, torch.Tensor], prefix: str, _: object
) -> None:
    """Warns of a state dict that may go to transformers. symmoe itself reads with keep_vars, without a warning."""
    if not any(isinstance(value, nn.Parameter) for value in state.values()):
        warnings.warn(
            "the state dict of a swapped model has this rank's experts, by names of symmoe: from_pretrained of "
            "transformers would leave experts as they were initialised. Save the model by "
            "symmoe.integrations.transformers.save_checkpoint(model, folder), and load that folder",
            stacklevel=2,
        )


def empty_experts(
    form: ExpertsForm,
    experts: StockExperts,
    num_local: int,
    heap: SymmetricHeap,
    *,
    step: StepConfig,
) -> ExpertParallelExperts:
    """A module for `num_local` experts shaped like those of transformers' module; parameters are on the meta device."""
    down = form.convert_layout(experts.down_proj)
    mlp = GroupedMLP(
        num_local,
        *down.shape[1:],
        activation=ScaledActivation(form.activation),
        bias=form.has_bias,
        dtype=down.dtype,
        device="meta",
    )
    return ExpertParallelExperts(mlp, heap, step=step, form=form)
