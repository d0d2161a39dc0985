"""A layer's reports of each forward call to listeners. Metrics and recordings thus do not depend on the layer's class.

MoELayer has :class:`Listeners`, as do the layers of integrations with a trainer's own router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from symmoe.checks.arguments import check_model
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap

# From T and K (None if the router has not set K yet) to the experts' ids int [T, K]; -1 is none.
Choose = Callable[[int, int | None], torch.Tensor]
# Makes the router of the model's layer of this name use that choice, until the returned function is called.
OverrideRouter = Callable[[nn.Module, str, Choose], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The routing of one forward call. Tensors are on the device, as in MoEMetrics unless noted."""

    topk_idx: torch.Tensor  # int32 or int64
    chosen_idx: torch.Tensor  # before the capacity factor's drops, if known
    expert_load: torch.Tensor
    num_dropped: torch.Tensor
    row_bytes: int  # of a token
    sent_row_bytes: int  # of a token on its way to an expert
    is_training: bool
    num_over_capacity: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None  # None if the trainer has its own losses
    probs: torch.Tensor | None = None  # fp32 [T, K] of topk_idx; None if the trainer has them
    replica_to_expert: torch.Tensor | None = None
    replica_rows: torch.Tensor | None = None
    replica_bytes: int = (
        0  # of one replica: its weights in forward and again in backward, and their gradients
    )


class Listeners:
    """The listeners of one layer (of its heap, E experts and order of sums), stored as attribute `listeners` of the
    layer or of its `token_dispatcher`. `override_router`: None for a MoELayer, whose calls take a choice. A layer
    without `callbacks` makes no :class:`RoutingReport`, which would cost time."""

    def __init__(
        self,
        heap: SymmetricHeap,
        *,
        num_experts: int,
        order: str,
        override_router: OverrideRouter | None = None,
    ) -> None:
        self.heap = heap
        self.num_experts = num_experts
        self.order = order
        self.override_router = override_router
        self.is_fixed = False  # whether token ids determine the experts (hash layers)
        self.is_overridden = False  # whether a context sets the layer's choice (symmoe.routing)
        self.callbacks: tuple[Callable[[RoutingReport], object], ...] = ()
        self.totals: tuple[torch.Tensor, ...] = ()

    def add(
        self, callback: Callable[[RoutingReport], object], *totals: torch.Tensor
    ) -> Callable[[], None]:
        """Adds a callback: each forward, also a recomputed one, calls `callback(report)` until the returned function is
        called. totals: the tensors to which the callback adds; a captured step restores them when it repeats a call.
        Local. A compiled model is compiled again, and a captured step is captured again."""
        # A new tuple: torch.compile guards on its length, but not on whether a dict is empty.
        self.callbacks = (*self.callbacks, callback)
        self.totals = (*self.totals, *totals)
        return partial(self._remove, callback, totals)

    def report(self, report: RoutingReport) -> None:
        """Passes the report to every listener, in the order of registration."""
        for callback in self.callbacks:
            callback(report)

    def notify(
        self,
        topk_idx: torch.Tensor,
        load: Sequence[torch.Tensor],
        tokens: torch.Tensor,
        *,
        is_training: bool,
        chosen_idx: torch.Tensor | None = None,
    ) -> None:
        """Reports a call whose router is a trainer's, if there are listeners. load: the plan's expert_load and
        num_dropped; tokens: of the width and dtype that travel; chosen_idx: None if it is not known."""
        if self.callbacks:
            row_bytes = tokens.shape[-1] * tokens.element_size()
            chosen_idx = topk_idx if chosen_idx is None else chosen_idx
            self.report(
                RoutingReport(
                    topk_idx, chosen_idx, load[0], load[1], row_bytes, row_bytes, is_training
                )
            )

    def _remove(
        self, callback: Callable[[RoutingReport], object], totals: tuple[torch.Tensor, ...]
    ) -> None:
        self.callbacks = tuple(added for added in self.callbacks if added is not callback)
        self.totals = tuple(
            total for total in self.totals if all(total is not removed for removed in totals)
        )


def find_listeners(model: nn.Module) -> dict[str, tuple[nn.Module, Listeners]]:
    """By the layers' names in the model, all layers that have listeners, and these listeners."""
    check_model(model)
    layers: dict[str, tuple[nn.Module, Listeners]] = {}
    for name, module in model.named_modules():
        for owner in (module, getattr(module, "token_dispatcher", None)):
            if isinstance(listeners := getattr(owner, "listeners", None), Listeners):
                layers[name] = module, listeners
    return layers


def layers_with_listeners(model: nn.Module) -> dict[str, tuple[nn.Module, Listeners]]:
    """The result of :func:`find_listeners`; ArgumentError if it is empty."""
    if not (layers := find_listeners(model)):
        raise ArgumentError(
            f"model ({type(model).__name__}) has no MoELayer, and no layer of symmoe's integrations"
        )
    return layers
