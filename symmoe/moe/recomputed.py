"""Which call of a module backward computes again, where a checkpoint repeats the module's forward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from symmoe.torch_internals import call_after_backward, graph_task_id, running_node_number


class Recomputed:
    """Knows calls by the numbers that autograd gives to the nodes of their graphs, one after the other in each thread:
    so it does not matter where backward begins, and in which order backwards come. A copy knows no calls.

    Attributes:
        nodes: of each call, the numbers of its nodes.
    """

    def __init__(self) -> None:
        self.nodes: list[range] = []
        self._thread = threading.get_ident()
        self._outer: _Pass | None = None

    def number(self) -> int | None:
        """The number of the call whose activations backward, which runs, computes again; None: not known."""
        node = running_node_number()
        found = next((i for i, nodes in enumerate(self.nodes) if node in nodes), None)
        outer = self._outer
        if outer is None or not outer.is_running():
            self._outer = _Pass(found)
        elif outer.task == graph_task_id():
            outer.number = found
        elif found is None or threading.get_ident() != self._thread:
            # Reentrant: a pass inside that one, through nodes that it has made; numbers are those of its thread.
            return outer.number
        return found

    def __reduce__(self) -> tuple[type[Recomputed], tuple[()]]:
        return Recomputed, ()


class _Pass:
    """The backward pass that runs. number: of the call whose activations it has computed again last; None: unknown."""

    def __init__(self, number: int | None) -> None:
        self.task = graph_task_id()
        self.number = number
        ending = self._end
        # Autograd lets go of it, also where the pass ends in an error.
        self._ending: Callable[[], object] = weakref.ref(ending)
        call_after_backward(ending)

    def is_running(self) -> bool:
        """Whether the pass has not ended."""
        return self._ending() is not None

    def _end(self) -> None:
        self._ending = lambda: None
