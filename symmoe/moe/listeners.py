"""What a layer reports of each forward call, to listeners. So metrics and recordings need not know the layer's class.

MoELayer has :class:`Listeners`, and so have the layers of integrations whose routers are a trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Where the tokens of one forward call went. Tensors on the device.

    Attributes:
        topk_idx: int32 or int64 [T, K], experts of this rank's tokens, before a static capacity drops any; -1 is none.
        chosen_idx: the same before a capacity factor has dropped any, where that is known.
        expert_load: int32 [E], slots of each expert over the EP group, before a static capacity drops any.
        num_dropped: int32 [1], slots of the whole group dropped by a static capacity.
        row_bytes: bytes of a token.
        sent_row_bytes: bytes of a token on its way to an expert.
        is_training: whether the layer is in training mode.
        num_over_capacity: int32 [1], slots of this rank dropped by symmoe's capacity factor; None without one.
        aux_loss: scalar; None where losses are the trainer's own.
    """

    topk_idx: torch.Tensor
    chosen_idx: torch.Tensor
    expert_load: torch.Tensor
    num_dropped: torch.Tensor
    row_bytes: int
    sent_row_bytes: int
    is_training: bool
    num_over_capacity: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Listeners:
    """The listeners of one layer, which has this object as its attribute `listeners`.

    The layer makes a :class:`RoutingReport` only if there are `callbacks`: without them it costs nothing.

    Args:
        heap: the layer's heap.
        num_experts: E, experts of all ranks.
        order: the order of the sums in combine.
    """

    def __init__(self, heap: SymmetricHeap, *, num_experts: int, order: str) -> None:
        self.heap, self.num_experts, self.order = heap, num_experts, order
        self.callbacks: tuple[Callable[[RoutingReport], object], ...] = ()

    def add(self, callback: Callable[[RoutingReport], object]) -> Callable[[], None]:
        """Calls `callback(report)` in every forward from now on, recomputed ones too. Local.

        This makes torch.compile compile a compiled model again.

        Returns:
            a function that ends the calls.
        """
        # A new tuple, whose length torch.compile asks for; it does not see that a dict is no longer empty.
        self.callbacks = (*self.callbacks, callback)
        return partial(self._remove, callback)

    def tell(self, report: RoutingReport) -> None:
        """Gives the report to every listener, in the order in which they came."""
        for callback in self.callbacks:
            callback(report)

    def _remove(self, callback: Callable[[RoutingReport], object]) -> None:
        self.callbacks = tuple(other for other in self.callbacks if other is not callback)


def layers_with_listeners(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that one can listen to, by their names in it.

    Raises:
        ArgumentError: there is none.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "listeners", None), Listeners)
    }
    if not layers:
        raise ArgumentError(f"model ({type(model).__name__}) has no MoELayer, and no layer of symmoe's integrations")
    return layers


def listeners_of(layer: nn.Module) -> Listeners:
    """The listeners of one of :func:`layers_with_listeners`."""
    return cast(Listeners, layer.listeners)  # torch gives every attribute of a module the same type
