"""Megatron's experts as grouped GEMMs that write into buffers of the heap.

H hidden, F moe_ffn_hidden_size, e experts on this rank, N rows sorted by expert.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from symmoe.errors import ArgumentError, raise_for
from symmoe.integrations.megatron.compat import experts_problem, process_groups
from symmoe.moe.activations import ScaledActivation, ScaledClampedSwiGLU, ScaledSReLU
from symmoe.moe.grouped_linear import GroupedLinear
from symmoe.moe.grouped_mlp import fused_mlp

_QUICK_GELU_ALPHA = 1.702


class SymmExperts(MegatronModule):
    """The experts of one rank, in place of TEGroupedMLP or SequentialMLP.

    Parameters are `linear_fc1.weight{i}` [2F, H] (gate, then up) and `linear_fc2.weight{i}` [H, F], as in
    TEGroupedMLP. FC1's output is kept for backward, the activation is computed again: recomputing "moe_act" is what
    the experts always do.

    Args:
        num_local_experts: e.
        config: Megatron's; gradient_accumulation_fusion and delay_wgrad_compute are honoured.
        pg_collection: process groups; None: Megatron's default ones.
        name: ignored; newer versions pass it.

    Raises:
        ArgumentError: the configuration asks for what the experts cannot do; the text names the field.
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
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        width = self.activation.activation.hidden_width(ffn)
        self.linear_fc1 = self._linear(hidden, width, config.init_method, split_dim=0)
        self.linear_fc2 = self._linear(ffn, hidden, config.output_layer_init_method, split_dim=1)

    def _linear(
        self, in_features: int, out_features: int, init_method: Callable[[torch.Tensor], object], *, split_dim: int
    ) -> GroupedLinear:
        config = self.config
        on_cpu = config.use_cpu_initialization
        # Experts of different ranks start from different numbers: Megatron has a generator for them on GPUs.
        generator = contextlib.nullcontext()
        if config.perform_initialization and not on_cpu:
            generator = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        with generator:
            linear = GroupedLinear(
                self.num_local_experts,
                in_features,
                out_features,
                bias=False,
                weights="discrete",
                accumulate_into_main_grad=config.gradient_accumulation_fusion,
                delay_wgrad=config.delay_wgrad_compute,
                init_method=init_method if config.perform_initialization else _leave_as_it_is,
                dtype=config.params_dtype,
                device="cpu" if on_cpu else torch.cuda.current_device(),
            )
        for weight in linear.weight_parameters():
            weight.allreduce = config.expert_model_parallel_size == 1  # else: the expert-data-parallel buckets
            # No duplicates on tensor-parallel ranks: gradient norms count it wherever it is.
            weight.tensor_model_parallel = True
            weight.partition_dim, weight.partition_stride = split_dim, 1
        return linear

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Applies every expert to its rows. Not collective; device counts do not synchronise the host.

        Args:
            permuted_local_hidden_states: [N, H] sorted by expert.
            tokens_per_expert: int32 or int64 [e], on the device or on the CPU.
            permuted_probs: [N], multiplies the activation.
            output_buffer, grad_input_buffer: [N, H] on the heap, for the result and for the gradient of the rows.

        Returns:
            [N, H], and None for Megatron's bias.
        """
        output = fused_mlp(
            self.linear_fc1,
            self.activation,
            self.linear_fc2,
            permuted_local_hidden_states,
            tokens_per_expert,
            permuted_probs,
            scale_bias=False,
            out=output_buffer,
            grad_input_out=grad_input_buffer,
            is_first_microbatch=(False, False),
        )
        return output, None

    def backward_dw(self) -> None:
        """The weight gradients that delay_wgrad_compute left out of the oldest backward pass."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Under the keys of SequentialMLP and TEGroupedMLP, so that checkpoints move both ways. Not collective."""
        per_expert_keys = (metadata or {}).get("singleton_local_shards", False)
        num_local, num_global = self.num_local_experts, self.num_local_experts * self._ep_group.size()
        replica_id = (0, 0, self._expt_dp_group.rank())
        sharded: ShardedStateDict = {}
        for i in range(num_local):
            expert = self._ep_group.rank() * num_local + i
            if per_expert_keys:
                key_prefix, offsets = f"{prefix}experts.{expert}.", sharded_offsets
            else:
                key_prefix = f"{prefix}experts."
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, num_global))
            for name in ("linear_fc1", "linear_fc2"):
                weight = self._parameter(name, i)
                tensor = ShardedTensor.from_rank_offsets(
                    f"{key_prefix}{name}.weight",
                    weight,
                    *offsets,
                    replica_id=replica_id,
                    prepend_axis_num=len(offsets),
                )
                if name == "linear_fc1" and self.config.gated_linear_unit:
                    tensor = apply_swiglu_sharded_factory(tensor, offsets, per_expert_keys)
                sharded[f"{prefix}{name}.weight{i}"] = tensor
                extra: ShardedObject = make_sharded_object_for_checkpoint(
                    None, f"{key_prefix}{name}._extra_state", offsets, replica_id
                )
                sharded[f"{prefix}{name}._extra_state{i}"] = extra
        return sharded

    def _parameter(self, name: str, i: int) -> torch.nn.Parameter:
        return getattr(self, name).weight_parameters()[i]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        """Drops the `_extra_state` of other experts: TE's are about FP8, SequentialMLP's are empty."""
        for key in [key for key in state_dict if key.startswith(prefix) and "._extra_state" in key]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


def register_experts_from_last(model: torch.nn.Module) -> None:
    """For models with Megatron's distributed optimizer: keeps the weights of SymmExperts packed. Local; before DDP.

    Megatron's DDP lays parameters out in its buffers from the last registered to the first, `main_grad` always, and
    with the distributed optimizer the weights too. Experts that are registered as they are numbered then lie in
    descending order, and kernels need a table of their addresses. This registers them the other way round. Names,
    numbers and results stay the same.

    What holds the state of optimizers by position then fits only models that have been through this too, and no
    TEGroupedMLP: the formats "dp_reshardable" and "dp_zero_gather_scatter", and plain state dicts of optimizers.
    "fully_reshardable" and "fully_sharded_model_space" go by name.
    """
    for module in model.modules():
        if isinstance(module, SymmExperts):
            for linear in (module.linear_fc1, module.linear_fc2):
                for i in reversed(range(module.num_local_experts)):
                    weight = linear.get_parameter(f"weight{i}")
                    delattr(linear, f"weight{i}")
                    linear.register_parameter(f"weight{i}", weight)


def activation_of(config: TransformerConfig) -> ScaledActivation:
    """The activation that the configuration names, times the probs.

    Raises:
        ArgumentError: there is no kernel for it.
    """
    function, gated = config.activation_func, config.gated_linear_unit
    if gated and function in (F.silu, quick_gelu):
        clamp = config.activation_func_clamp_value
        return ScaledClampedSwiGLU(
            alpha=1.0 if function is F.silu else _QUICK_GELU_ALPHA,
            limit=math.inf if clamp is None else clamp,
            offset=config.glu_linear_offset,
        )
    if not gated and function is squared_relu:
        return ScaledSReLU()
    name = getattr(function, "__name__", repr(function))
    raise ArgumentError(
        f"activation_func ({name}) with gated_linear_unit ({gated}) must be silu or quick_gelu with True, "
        "or squared_relu with False"
    )


def _leave_as_it_is(weight: torch.Tensor) -> None:
    """perform_initialization=False: a checkpoint will fill the weight."""
