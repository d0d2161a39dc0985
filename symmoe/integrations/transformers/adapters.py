"""Converts peft's adapters of a transformers model's experts to adapters of symmoe's grouped layers.

peft's `target_parameters` wraps an experts module in nested ParamWrappers, one for each parameter. A wrapper computes
W + B A of all experts in every call, and replaces a parameter that swapped experts do not have. So symmoe takes the
adapters' values out of the wrappers, and writes them to peft's files by peft's names. Nothing here imports peft.

E experts in all, e on this rank, r rank, C input features, O output features. peft has A [E r, C], expert by expert,
and B [O, r E], whose columns are numbered r first. If peft interprets a weight [E, C, O] as [E, O, C], or the
reverse, A and B are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from symmoe.lora import LoRAGroupedLinear
from symmoe.symm_mem.heap import SymmetricHeap


@dataclass(frozen=True, slots=True)
class PeftNames:
    """The form of one grouped layer's adapters in peft's files."""

    prefix: str  # of "lora_A.weight" and "lora_B.weight", after the name of the experts
    exchanged: bool  # whether A and B are exchanged

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """A file's A [E r, C] and B [O, r E], from symmoe's a [E, r, C] and b [E, O, r]."""
        first, second = (b.transpose(1, 2), a.transpose(1, 2)) if self.exchanged else (a, b)
        return {
            f"{self.prefix}lora_A.weight": first.reshape(-1, first.shape[2]).contiguous(),
            f"{self.prefix}lora_B.weight": second.permute(1, 2, 0)
            .reshape(second.shape[1], -1)
            .contiguous(),
        }

    def fill(
        self, layer: LoRAGroupedLinear, a: torch.Tensor, b: torch.Tensor, heap: SymmetricHeap
    ) -> None:
        """Copies this rank's part of a file's A [E r, C] and B [O, r E] to its layer."""
        first = a.reshape(heap.num_ranks * layer.num_groups, -1, a.shape[1])
        second = b.reshape(b.shape[0], -1, len(first)).permute(2, 0, 1)
        whole = (
            (second.transpose(1, 2), first.transpose(1, 2)) if self.exchanged else (first, second)
        )
        for own, values in zip((layer.lora_a, layer.lora_b), whole, strict=True):
            own.copy_(values.chunk(heap.num_ranks)[heap.rank])


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module inside peft's ParamWrappers, and the wrappers, outermost first."""
    wrappers = []
    while hasattr(module, "parameter_name") and isinstance(
        inner := getattr(module, "base_layer", None), nn.Module
    ):
        wrappers.append(module)
        module = inner
    return module, wrappers
