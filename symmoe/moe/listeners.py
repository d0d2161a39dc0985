"""What a layer tells of its calls, to whoever listens: metrics and recordings ask no layer what class it is.

MoELayer has a :class:`Calls`, and so have the layers of integrations whose routers are a trainer's own.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One forward call of a layer. Tensors on the device.

    Attributes:
        topk_idx: int32 or int64 [T, K], experts of this rank's tokens, before a static capacity drops any; -1 is none.
        chosen_idx: the same before a capacity factor has dropped any, where that is known.
        expert_load: int32 [E], slots of each expert over the EP group, before a static capacity drops any.
        num_dropped: int32 [1], slots of the whole group dropped by a static capacity.
        row_bytes: of a token.
        sent_row_bytes: of a token on its way to an expert.
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


class Calls:
    """Those who listen to one layer, which has this as its attribute `calls`.

    The layer asks for `listeners` before it makes a :class:`Call`: nobody pays for what nobody hears.

    Args:
        heap: of the layer.
        num_experts: E, of all ranks.
        order: of the sums in combine.
    """

    def __init__(self, heap: SymmetricHeap, *, num_experts: int, order: str) -> None:
        self.heap, self.num_experts, self.order = heap, num_experts, order
        self.listeners: tuple[Callable[[Call], object], ...] = ()

    def listen(self, listener: Callable[[Call], object]) -> Callable[[], None]:
        """`listener(call)` in every forward from now on, recomputed ones too, until what this returns is called. Local.

        A compiled model is compiled again then.
        """
        # A new tuple, whose length torch.compile asks for; it does not see that a dict is no longer empty.
        self.listeners = (*self.listeners, listener)
        return partial(self._forget, listener)

    def tell(self, call: Call) -> None:
        """To every listener, in the order in which they came."""
        for listener in self.listeners:
            listener(call)

    def _forget(self, listener: Callable[[Call], object]) -> None:
        self.listeners = tuple(other for other in self.listeners if other is not listener)


def layers_with_calls(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that tell of their calls, by their names in it.

    Raises:
        ArgumentError: there is none.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(getattr(module, "calls", None), Calls)
    }
    if not layers:
        raise ArgumentError(f"model ({type(model).__name__}) has no MoELayer, and no layer of symmoe's integrations")
    return layers


def calls_of(layer: nn.Module) -> Calls:
    """What one of :func:`layers_with_calls` has as `calls`."""
    return cast(Calls, layer.calls)  # torch types every attribute of a module alike
