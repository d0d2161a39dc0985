"""Finds the call of a module that backward recomputes when a checkpoint repeats the module's forward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable

import torch

from symmoe.torch_internals import (
    call_after_backward,
    graph_task_id,
    next_node_number,
    running_node_number,
)


class Recomputed:
    """Identifies calls by autograd's numbers of their graphs' nodes, which count up in each thread. So backward may
    begin anywhere, and backward passes may run in any order.

    Attributes:
        nodes: of each call, the numbers of its nodes.
    """

    def __init__(self) -> None:
        self.nodes: list[range] = []
        self._thread = threading.get_ident()
        self._outer: _Pass | None = None

    def number(self) -> int | None:
        """The number of the call whose activations the running backward recomputes; None: unknown."""
        node = running_node_number()
        number = next((i for i, nodes in enumerate(self.nodes) if node in nodes), None)
        outer = self._outer
        if outer is None or not outer.is_running():
            self._outer = _Pass(number)
        elif outer.task == graph_task_id():
            outer.number = number
        elif number is None or threading.get_ident() != self._thread or node >= outer.first_node:
            # Reentrant: a pass inside the outer one, through nodes that the outer one made in its own thread.
            return outer.number
        return number


class CountedCalls:
    """The load that a step had counted before each call of a layer. A copy starts without calls."""

    def __init__(self) -> None:
        self._recomputed = Recomputed()
        self._loads: list[torch.Tensor] = []
        self._first_node = (
            next_node_number()
        )  # of the step, or since the last call without gradients

    def begin(self, load: torch.Tensor) -> torch.Tensor:
        """Begins a call and returns a copy of the load."""
        nodes = self._recomputed.nodes
        now = next_node_number()
        if torch.is_grad_enabled():
            call_nodes = range(now, sys.maxsize)
        else:
            # A checkpoint with use_reentrant=True has one node, older than its calls. The calls have no nodes.
            is_alone = not nodes or nodes[-1].stop < sys.maxsize
            call_nodes = range(self._first_node if is_alone else now - 1, now)
            self._first_node = now
        if nodes:
            nodes[-1] = range(nodes[-1].start, min(nodes[-1].stop, call_nodes.start))
        nodes.append(call_nodes)
        self._loads.append(load.clone())
        return self._loads[-1]

    def recomputed_load(self) -> torch.Tensor | None:
        """The load that :meth:`begin` returned for the call that backward recomputes; None: unknown."""
        number = self._recomputed.number()
        return None if number is None else self._loads[number]

    def __reduce__(self) -> tuple[type[CountedCalls], tuple[()]]:
        return CountedCalls, ()


class _Pass:
    """The running backward pass. number: of the call whose activations it recomputed last; None: unknown. first_node:
    the number of the first node made in the pass."""

    def __init__(self, number: int | None) -> None:
        self.task = graph_task_id()
        self.first_node = next_node_number()
        self.number = number
        end = self._end
        # Autograd drops the reference even if the pass ends in an error.
        self._end_callback: Callable[[], object] = weakref.ref(end)
        call_after_backward(end)

    def is_running(self) -> bool:
        """Whether the backward pass still runs."""
        return self._end_callback() is not None

    def _end(self) -> None:
        self._end_callback = lambda: None
