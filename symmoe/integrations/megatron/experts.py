"""Megatron's experts as grouped GEMMs.

H hidden_size or moe_latent_size, F moe_ffn_hidden_size, e experts on this rank, N rows sorted by expert.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import fused_mlp
from symmoe.grouped.rows_function import RowArguments
from symmoe.integrations.megatron.compat import (
    expert_hidden,
    experts_problem,
    precision_of,
    process_groups,
    slots_per_token,
)
from symmoe.kernels.activation import Activation
from symmoe.moe.config import MoEConfig
from symmoe.torch_internals import replaceable

_QUICK_GELU = Activation(alpha=1.702)
_ACTIVATIONS: dict[Callable[..., torch.Tensor], Activation] = {
    F.silu: Activation(),
    quick_gelu: _QUICK_GELU,
    activations.quick_gelu: _QUICK_GELU,
    F.gelu: Activation(function="gelu"),
    activations.fast_gelu: Activation(function="gelu_tanh"),
    activations.squared_relu: Activation(function="relu2"),
}


class SymmExperts(MegatronModule):
    """The experts of one rank, in place of TEGroupedMLP or SequentialMLP.

    Parameters are `linear_fc1.weight` [e, 2F, H] (gates, then ups) and `linear_fc2.weight` [e, H, F]: only two, because
    Megatron's DDP and optimizers work parameter by parameter. Checkpoints store them expert by expert, like Megatron's
    own experts. Backward keeps FC1's output and recomputes the activation: the experts always recompute
    "moe_act".

    `config` is Megatron's; gradient_accumulation_fusion, delay_wgrad_compute and blockwise fp8 are honoured.
    `pg_collection=None`: Megatron's default groups. `name`, which newer versions pass, is ignored. ArgumentError: the
    experts do not support the configuration; the text names the field.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        raise_for(experts_problem(config))
        pg_collection = process_groups(pg_collection)
        self.num_local_experts = num_local_experts
        self._ep_group, self._expt_dp_group = pg_collection.ep, pg_collection.expt_dp
        self.activation = activation_of(config)
        hidden, ffn = expert_hidden(config), config.moe_ffn_hidden_size
        width = self.activation.activation.hidden_width(ffn)
        self.linear_fc1 = self._linear(hidden, width, config.init_method, split_dim=1)
        self.linear_fc2 = self._linear(ffn, hidden, config.output_layer_init_method, split_dim=2)

    def _linear(
        self,
        in_features: int,
        out_features: int,
        init_method: Callable[[torch.Tensor], object],
        *,
        split_dim: int,
    ) -> GroupedLinear:
        config = self.config
        on_cpu = config.use_cpu_initialization
        # Ranks initialise experts with different random numbers: on GPUs with Megatron's generator for experts.
        with (
            get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
            if config.perform_initialization and not on_cpu
            else contextlib.nullcontext()
        ):
            linear = GroupedLinear(
                self.num_local_experts,
                in_features,
                out_features,
                bias=False,
                weights="packed",
                accumulate_into_main_grad=config.gradient_accumulation_fusion,
                delay_wgrad=config.delay_wgrad_compute,
                precision=precision_of(config),
                init_method=init_method
                if config.perform_initialization
                else lambda weight: None,  # a checkpoint will fill it
                dtype=config.params_dtype,
                device="cpu" if on_cpu else torch.device(torch.cuda.current_device()),
            )
        linear.mark_weights(
            allreduce=config.expert_model_parallel_size
            == 1,  # else: the expert-data-parallel buckets
            tensor_model_parallel=True,  # no duplicates on tensor-parallel ranks: every rank's gradient norm counts it
            partition_dim=split_dim,
            partition_stride=1,
        )
        return linear

    # RoutedExperts reads these of a GroupedMLP, and the activation.
    fc1, fc2 = property(attrgetter("linear_fc1")), property(attrgetter("linear_fc2"))

    @replaceable
    @torch.compiler.disable
    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Applies every expert to its rows, for Megatron's own dispatchers; SymmMoELayer calls the kernels itself. Not
        collective; device counts do not synchronise the host.

        Args:
            permuted_local_hidden_states: [N, H] sorted by expert.
            tokens_per_expert: int32 or int64 [e], on the device or on the CPU.
            permuted_probs: [N], multiplies the activation.

        Returns:
            [N, H], and None for Megatron's bias.
        """
        return fused_mlp(
            (self.linear_fc1, self.activation, self.linear_fc2),
            permuted_local_hidden_states,
            RowArguments(tokens_per_expert, permuted_probs),
            scale_bias=False,
        ), None

    def backward_dw(self) -> None:
        """Computes weight gradients that delay_wgrad_compute deferred in the oldest backward."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Uses the keys of SequentialMLP and TEGroupedMLP: checkpoints convert both ways. Not collective."""
        num_local = self.num_local_experts
        first, num_global = self._ep_group.rank() * num_local, num_local * self._ep_group.size()
        replica_id = (0, 0, self._expt_dp_group.rank())
        per_expert_keys = (metadata or {}).get("singleton_local_shards", False)
        # The local experts' matrices: the key after "experts", and offsets.
        places = [
            (f".{expert}", sharded_offsets)
            if per_expert_keys
            else ("", (*sharded_offsets, (len(sharded_offsets), expert, num_global)))
            for expert in range(first, first + num_local)
        ]
        sharded: ShardedStateDict = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            is_gated = name == "linear_fc1" and self.config.gated_linear_unit
            sharded[f"{prefix}{name}.weight"] = ShardedTensorFactory(
                f"{prefix}experts.{name}.weight",
                linear.weight,
                functools.partial(
                    _split, places=places, is_gated=is_gated, per_expert_keys=per_expert_keys
                ),
                functools.partial(_join, num_halves=2 if is_gated else 1),
                replica_id,
            )
            for i, (number, offsets) in enumerate(places):
                key = f"{prefix}experts{number}.{name}._extra_state"
                sharded[f"{prefix}{name}._extra_state{i}"] = make_sharded_object_for_checkpoint(
                    None, key, offsets, replica_id
                )
        return sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        """Drops the `_extra_state` of other experts: TE's describes FP8, SequentialMLP's is empty."""
        for key in [key for key in state_dict if key.startswith(prefix) and "._extra_state" in key]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def _split(
    key: str,
    weight: torch.Tensor,
    replica_id: tuple[int, ...],
    flattened_range: slice | None = None,
    *,
    places: list[tuple[str, tuple[Any, ...]]],
    is_gated: bool,
    per_expert_keys: bool,
) -> list[ShardedTensor]:
    """Splits [e, O, C], a weight or its optimizer state, into Megatron's stored matrices (gates, ups apart)."""
    if flattened_range is not None:
        raise ArgumentError(
            f"{key}: a flattened part {flattened_range} of the experts' state has no place in a checkpoint; save the "
            "distributed optimizer with distrib_optim_sharding_type 'fully_reshardable' or 'dp_reshardable'"
        )
    before, _, after = key.rpartition("experts.")
    shards = []
    for matrix, (number, offsets) in zip(weight.unbind(0), places, strict=True):
        for h, half in enumerate(matrix.chunk(2) if is_gated else (matrix,)):
            half_key, half_offsets = f"{before}experts{number}.{after}", offsets
            if is_gated and per_expert_keys:
                half_key += ("_w", "_v")[h]
            elif is_gated:
                half_offsets = (*offsets, (len(offsets), h, 2))
            shards.append(
                ShardedTensor.from_rank_offsets(
                    half_key,
                    half,
                    *half_offsets,
                    replica_id=replica_id,
                    prepend_axis_num=len(offsets),
                )
            )
    return shards


@torch.no_grad()
def _join(shards: list[torch.Tensor], *, num_halves: int) -> torch.Tensor:
    """The inverse of :func:`_split`: the weight."""
    return torch.stack(
        [torch.cat(shards[i : i + num_halves]) for i in range(0, len(shards), num_halves)]
    )


def activation_of(config: TransformerConfig) -> ScaledActivation:
    """The configuration's activation, times the probs. ArgumentError: symmoe has no kernel for it."""
    activation = _ACTIVATIONS.get(config.activation_func)
    if activation is None:
        names = ", ".join(dict.fromkeys(function.__name__ for function in _ACTIVATIONS))
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        raise ArgumentError(f"activation_func ({name}) must be one of {names}")
    if not config.gated_linear_unit:  # then the other fields have no effect
        return ScaledActivation(replace(activation, is_gated=False))
    clamp = config.activation_func_clamp_value
    return ScaledActivation(
        replace(
            activation,
            limit=math.inf if clamp is None else clamp,
            offset=config.glu_linear_offset,
        )
    )


def routed_config(config: TransformerConfig, **overrides: Any) -> MoEConfig:
    """symmoe's configuration for tokens routed by Megatron; `how`: further fields."""
    return MoEConfig(
        hidden=expert_hidden(config),
        ffn=config.moe_ffn_hidden_size,
        num_experts=config.num_moe_experts,
        top_k=slots_per_token(config),
        activation=activation_of(config).activation,
        precision=precision_of(config),
        router=None,
        **overrides,
    )
