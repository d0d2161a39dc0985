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

import torch
from torch import nn

from symmoe.lora import LoRAGroupedLinear
from symmoe.symm_mem.heap import SymmetricHeap


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
            f"{self.prefix}lora_B.weight": second.permute(1, 2, 0)
            .reshape(second.shape[1], -1)
            .contiguous(),
        }

    def fill(
        self, layer: LoRAGroupedLinear, a: torch.Tensor, b: torch.Tensor, heap: SymmetricHeap
    ) -> None:
        """Puts this rank's part of A [E r, C] and B [O, r E] of a file into its layer."""
        first = a.reshape(heap.num_ranks * layer.num_groups, -1, a.shape[1])
        second = b.reshape(b.shape[0], -1, len(first)).permute(2, 0, 1)
        whole = (
            (second.transpose(1, 2), first.transpose(1, 2)) if self.exchanged else (first, second)
        )
        for own, values in zip((layer.lora_a, layer.lora_b), whole, strict=True):
            own.copy_(values.chunk(heap.num_ranks)[heap.rank])


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """What peft's ParamWrappers are around, and them, the outermost first."""
    wrappers = []
    while hasattr(module, "parameter_name") and isinstance(
        inner := getattr(module, "base_layer", None), nn.Module
    ):
        wrappers.append(module)
        module = inner
    return module, wrappers
