"""What a layer reports of each forward call, to listeners. So metrics and recordings need not know the layer's class.

MoELayer has :class:`Listeners`, and so have the layers of integrations whose routers are a trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from symmoe.checks.arguments import check_model
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap

# Of T tokens and K experts of each, or None where the router has not said K yet, their ids int [T, K]; -1 is none.
Choose = Callable[[int, int | None], torch.Tensor]
# Has the router of a model's layer of this name take what such a function chooses, until what it returns is called.
Give = Callable[[nn.Module, str, Choose], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Where the tokens of one forward call went. Tensors, on the device, are those of MoEMetrics, if not said
    otherwise."""

    topk_idx: torch.Tensor  # int32 or int64
    chosen_idx: (
        torch.Tensor
    )  # the same before a capacity factor has dropped any, where that is known
    expert_load: torch.Tensor
    num_dropped: torch.Tensor
    row_bytes: int  # of a token
    sent_row_bytes: int  # of a token on its way to an expert
    is_training: bool
    num_over_capacity: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None  # None where losses are the trainer's own
    replica_to_expert: torch.Tensor | None = None
    replica_rows: torch.Tensor | None = None
    replica_bytes: int = (
        0  # of one replica: its weights in forward and again in backward, and their gradients
    )


class Listeners:
    """The listeners of one layer (of its heap, E experts and order of sums), which has them as attribute `listeners`,
    itself or its `token_dispatcher`. `give`: see Give; None for a MoELayer, whose calls take a choice. The layer makes
    a :class:`RoutingReport` only if there are `callbacks`: without them it costs nothing."""

    def __init__(
        self, heap: SymmetricHeap, *, num_experts: int, order: str, give: Give | None = None
    ) -> None:
        self.heap = heap
        self.num_experts = num_experts
        self.order = order
        self.give = give
        self.is_fixed = False  # whether experts follow from the tokens' ids (hash layers): nothing to record or to give
        self.is_given = False  # whether a context gives the layer its experts (training/replay.py)
        self.callbacks: tuple[Callable[[RoutingReport], object], ...] = ()
        self.totals: tuple[torch.Tensor, ...] = ()

    def add(
        self, callback: Callable[[RoutingReport], object], *totals: torch.Tensor
    ) -> Callable[[], None]:
        """Calls `callback(report)` in every forward from now on, recomputed ones too, until the function that this
        returns is called. totals: what it adds to, and a captured step takes back where it is repeated. Local. Makes
        torch.compile compile a compiled model again, and a captured step be captured again."""
        # A new tuple, whose length torch.compile asks for; it does not see that a dict is no longer empty.
        self.callbacks = (*self.callbacks, callback)
        self.totals = (*self.totals, *totals)
        return partial(self._remove, callback, totals)

    def tell(self, report: RoutingReport) -> None:
        """Gives the report to every listener, in the order in which they came."""
        for callback in self.callbacks:
            callback(report)

    def _remove(
        self, callback: Callable[[RoutingReport], object], totals: tuple[torch.Tensor, ...]
    ) -> None:
        self.callbacks = tuple(other for other in self.callbacks if other is not callback)
        self.totals = tuple(
            other for other in self.totals if all(other is not each for each in totals)
        )


def find_listeners(model: nn.Module) -> dict[str, tuple[nn.Module, Listeners]]:
    """The layers of a model that one can listen to, and their listeners, by the layers' names in it."""
    check_model(model)
    layers: dict[str, tuple[nn.Module, Listeners]] = {}
    for name, module in model.named_modules():
        for place in (module, getattr(module, "token_dispatcher", None)):
            if isinstance(listeners := getattr(place, "listeners", None), Listeners):
                layers[name] = module, listeners
    return layers


def layers_with_listeners(model: nn.Module) -> dict[str, tuple[nn.Module, Listeners]]:
    """The result of :func:`find_listeners`; ArgumentError if there are none."""
    if not (layers := find_listeners(model)):
        raise ArgumentError(
            f"model ({type(model).__name__}) has no MoELayer, and no layer of symmoe's integrations"
        )
    return layers
