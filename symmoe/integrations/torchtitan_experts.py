"""torchtitan's routed experts as one step over symmetric memory, without copies to or from the heap (torchtitan 0.3).

    step = {"num_max_tokens_per_rank": 8192, "num_kept_layers": 1}
    config.override.imports = [("symmoe.integrations.torchtitan_experts.routed_experts", step)]

E experts, D hidden size, F of an expert. Scores multiply an expert's activation; in torchtitan they multiply its
output: the same sum, with other rounding. Experts compute in the tokens' dtype. torch.compile does not trace the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from symmoe.checks.arguments import Stash
from symmoe.errors import ArgumentError
from symmoe.grouped.activations import ScaledSwiGLU
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.parameters import local_part
from symmoe.integrations.torchtitan import token_dispatcher
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import device_problem
from symmoe.moe.routed_experts import RoutedExperts as Step
from symmoe.moe.routed_experts import run_routed

_MATRICES = {
    "fc1": ("w1_EFD", "w3_EFD"),
    "fc2": ("w2_EDF",),
}  # torchtitan's weights in a layer's weight


class _Linear(GroupedLinear, Module):
    """A GroupedLinear with the weight of all experts; torchtitan shards and initialises it like its own modules.
    matrices: the configuration's matrices in it."""

    def __init__(
        self, config: GroupedExperts.Config, matrices: Sequence[str], in_features: int, width: int
    ) -> None:
        super().__init__(config.num_experts, in_features, width, bias=False)
        if (inits := config.param_init) is not None:
            self._param_init = {"weight": partial(_fill, [inits[matrix] for matrix in matrices])}
        if (sharding := config.sharding_config) is not None:
            self._sharding_config = ShardingConfig(
                state_shardings={"weight": sharding.state_shardings[matrices[0]]}
            )


class SymmoeExperts(Module):
    """torchtitan's GroupedExperts with gates and ups in one parameter for the kernels: `fc1.weight` [E, 2F, D];
    `fc2.weight` is [E, D, F]. State dicts have torchtitan's w1_EFD, w2_EDF and w3_EFD."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    activation = ScaledSwiGLU()  # no child: torchtitan requires its own modules there

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.fc1 = _Linear(config, _MATRICES["fc1"], config.dim, 2 * config.hidden_dim)
        self.fc2 = _Linear(config, _MATRICES["fc2"], config.hidden_dim, config.dim)
        self.register_state_dict_post_hook(_as_torchtitan)
        self.register_load_state_dict_pre_hook(_from_torchtitan)


@torch.no_grad()
def _fill(inits: list[Any], weight: torch.Tensor) -> None:
    parts = weight.chunk(len(inits), dim=1)  # copies, for a DTensor sharded in dim 1
    for init, part in zip(inits, parts, strict=True):
        init(part)
    weight.copy_(torch.cat(parts, dim=1))


def _as_torchtitan(module: SymmoeExperts, state: dict[str, Any], prefix: str, *_: object) -> None:
    for linear, matrices in _MATRICES.items():
        parts = state.pop(f"{prefix}{linear}.weight").chunk(len(matrices), dim=1)
        state.update(
            (prefix + name, part.contiguous()) for name, part in zip(matrices, parts, strict=True)
        )


def _from_torchtitan(module: SymmoeExperts, state: dict[str, Any], prefix: str, *_: object) -> None:
    for linear, matrices in _MATRICES.items():
        if all(prefix + name in state for name in matrices):
            state[f"{prefix}{linear}.weight"] = torch.cat(
                [state.pop(prefix + name) for name in matrices], dim=1
            )


class SymmoeRoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts; tokens travel in one step with the experts. Collective over the EP group, forward and
    backward: FC1 reads rows where they arrive, and FC2 writes its results to combine's input."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        experts, sent = config.inner_experts, config.token_dispatcher
        sizes = {
            "hidden": experts.dim,
            "ffn": experts.hidden_dim,
            "num_experts": sent.num_experts,
            "top_k": sent.top_k,
        }
        stash: Stash = "all" if sent.num_kept_layers else "hidden"
        self._config = MoEConfig(**sizes, order=sent.order, stash=stash, router=None)
        self._step: Step | None = None

    @torch.compiler.disable
    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,  # torchtitan shards arguments by name
    ) -> torch.Tensor:
        """The sum of every token's experts times their scores, [B, L, D]. Errors: see make_plan."""
        experts, heap = self.inner_experts, self.token_dispatcher.heap
        if heap is None:
            raise ArgumentError(
                "expert_parallel_degree (1) must be at least 2 for routed_experts; leave it out"
            )
        if self._step is None:
            for linear in (experts.fc1, experts.fc2):
                linear.num_groups = len(local_part(linear.weight))  # of this rank
                linear._is_fsdp_managed_module = False  # torchtitan shards experts before FSDP
            self._step = Step.of(self._config, heap, experts)
        tokens, probs, topk_idx = (
            tensor.flatten(0, 1) for tensor in (x_BLD, topk_scores_BLK.float(), topk_expert_ids_BLK)
        )
        heap._fail_for(device_problem("experts", experts, heap.device), control.PHASE_PLAN)
        y, load = run_routed(self._step, tokens, probs, topk_idx, experts, x_BLD.shape)
        self.token_dispatcher.notify(topk_idx, load, tokens)
        return y


@override(
    target=RoutedExperts.Config, description="routed experts as one step over symmetric memory"
)
def routed_experts(config: RoutedExperts.Config, **fields: Any) -> SymmoeRoutedExperts.Config:
    """Replaces the configuration of any RoutedExperts: a torchtitan override, for `override.imports`. fields: of
    `SymmoeTokenDispatcher.Config`, at least num_max_tokens_per_rank. ArgumentError: the experts are not GroupedExperts;
    for these use symmoe.integrations.torchtitan.token_dispatcher."""
    if (config_type := type(config.inner_experts)) is not GroupedExperts.Config:
        raise ArgumentError(
            f"inner_experts ({config_type.__qualname__}) must be GroupedExperts.Config"
        )
    experts = derive(config.inner_experts, SymmoeExperts.Config)
    dispatcher = token_dispatcher(
        config.token_dispatcher, **{"num_kept_layers": 0, "hidden_dim": experts.dim, **fields}
    )
    return cast(
        SymmoeRoutedExperts.Config,
        derive(
            config, SymmoeRoutedExperts.Config, inner_experts=experts, token_dispatcher=dispatcher
        ),
    )
