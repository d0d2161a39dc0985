"""A choice of experts that is given to a router of transformers: see symmoe.training.replay."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from symmoe.errors import ArgumentError
from symmoe.integrations.given_topk import give_topk
from symmoe.moe.listeners import Choose


def give_routing(model: nn.Module, name: str, choose: Choose) -> Callable[[], None]:
    """See Give, for swapped experts. The router is that of the block (or decoder layer) that calls them.

    ArgumentError: `model` is the experts, without their block.
    """
    block, _, own_name = name.rpartition(".")
    if not own_name:
        raise ArgumentError(
            f"model ({type(model).__name__}) has no router; pass the block of the experts, or the model"
        )
    return give_topk(model.get_submodule(block), model.get_submodule(name), choose, position=1)
