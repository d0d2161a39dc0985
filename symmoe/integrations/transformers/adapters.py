"""Adapters that peft has put around the experts of a transformers model, as those of symmoe's grouped layers.

peft's `target_parameters` puts a ParamWrapper around an experts module for each parameter, one around the other. It
makes W + B A of all experts in every call, and replaces a parameter that swapped experts do not have. So the adapters'
values are taken out of the wrappers, and go back into peft's files by their names there. Nothing here imports peft.

E experts in all, e on this rank, r rank, C input features, O output features. peft has A [E r, C], expert by expert,
and B [O, r E], whose columns are numbered r first. Where it takes a weight [E, C, O] for [E, O, C], or the other way
round, A and B have changed their places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.training.lora import LoRAGroupedLinear

if TYPE_CHECKING:
    from symmoe.integrations.transformers.experts import ExpertParallelExperts

_LINEAR_OF = {"gate_up_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"}


@dataclass(frozen=True, slots=True)
class PeftNames:
    """How the adapters of one grouped layer are kept in peft's files."""

    prefix: str  # of "lora_A.weight" and "lora_B.weight", after the name of the experts
    exchanged: bool  # whether A and B have changed their places

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """A [E r, C] and B [O, r E] of a file, of symmoe's a [E, r, C] and b [E, O, r]."""
        first, second = (b.transpose(1, 2), a.transpose(1, 2)) if self.exchanged else (a, b)
        return {
            f"{self.prefix}lora_A.weight": first.reshape(-1, first.shape[2]).contiguous(),
            f"{self.prefix}lora_B.weight": second.permute(1, 2, 0).reshape(second.shape[1], -1).contiguous(),
        }

    def fill(self, layer: LoRAGroupedLinear, a: torch.Tensor, b: torch.Tensor, heap: SymmetricHeap) -> None:
        """Puts this rank's part of A [E r, C] and B [O, r E] of a file into its layer."""
        first = a.reshape(heap.num_ranks * layer.num_groups, -1, a.shape[1])
        second = b.reshape(b.shape[0], -1, len(first)).permute(2, 0, 1)
        whole = (second.transpose(1, 2), first.transpose(1, 2)) if self.exchanged else (first, second)
        for own, values in zip((layer.lora_a, layer.lora_b), whole, strict=True):
            own.copy_(values.chunk(heap.num_ranks)[heap.rank])


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """What peft's ParamWrappers are around, and them, the outermost first."""
    wrappers = []
    while hasattr(module, "parameter_name") and isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        wrappers.append(module)
        module = inner
    return module, wrappers


@torch.no_grad()
def adapt(experts: ExpertParallelExperts, wrappers: list[nn.Module]) -> None:
    """Gives the experts of a rank the adapters of `wrappers`, which are of all experts. Their weights are frozen.
    Local. ArgumentError: not exactly one adapter, not merged, for gate_up_proj and down_proj each; or options that
    grouped layers do not have."""
    names, mlp, is_transposed = dict[str, PeftNames](), experts.mlp, experts.form.is_transposed
    for depth, wrapper in enumerate(wrappers):
        peft: Any = wrapper  # torch gives all attributes of a module one type
        if peft.parameter_name not in _LINEAR_OF or len(peft.lora_A) != 1 or peft.merged_adapters:
            raise ArgumentError(
                f"peft has adapters {list(peft.lora_A)} for {peft.parameter_name}, merged {peft.merged_adapters}; "
                "experts can have one, not merged, for gate_up_proj and down_proj"
            )
        (adapter,) = peft.lora_A
        linear = _LINEAR_OF[peft.parameter_name]
        keys = PeftNames("base_layer." * depth, getattr(peft, "_did_swap_in_out_features", False) == is_transposed)
        a, b, rank = peft.lora_A[adapter].weight, peft.lora_B[adapter].weight, peft.r[adapter]
        options = {"rank": rank, "alpha": peft.scaling[adapter] * rank, "dtype": a.dtype}
        adapted = LoRAGroupedLinear.from_linear(getattr(mlp, linear), rank_dropout=0.0, **options)
        keys.fill(adapted, a, b, experts.heap)
        setattr(mlp, linear, adapted)
        names[linear] = keys
    if names.keys() != {"fc1", "fc2"}:
        raise ArgumentError(
            f"peft has adapters for {[wrapper.parameter_name for wrapper in wrappers]} of experts; "
            "they can be adapted only with both gate_up_proj and down_proj"
        )
    experts.peft_names = names
    experts.set_experts(mlp)
