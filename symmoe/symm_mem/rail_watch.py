"""Sees exchanges between nodes that were begun on the device and do not end: nothing on a device bounds them.

A thread of the host looks at two numbers in its own memory, and calls nothing of CUDA as long as all is well: a call
from a thread that is not capturing would end a capture.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from symmoe.nodes.rail import Payload

logger = logging.getLogger("symmoe")

_POLL_S = 0.02
_PROBE_S = 0.25  # how often an exchange that takes long is asked whether a connection has closed
_LONG_S = 1.0  # on the rail, but no more than an eighth of the bound: then the peers are told


class Looks(Protocol):
    """Who looks at the rail."""

    def look_at_rail(self) -> bool:
        """Whether to look again."""


class RailWatch:
    """What is known of a rank's exchanges.

    Args:
        payload: which moves them.
        mark: writes where the peers of this node see it whether this rank is on the rail.
        find_lost: a node whose connection has closed, or None.

    Attributes:
        waits_since: when the host has begun to wait for other nodes; None: it does not.
    """

    def __init__(self, payload: Payload, mark: Callable[[bool], None], find_lost: Callable[[], int | None]) -> None:
        self._payload, self._mark, self._find_lost = payload, mark, find_lost
        self._number, self._begun, self._probed = 0, 0.0, 0.0
        self._is_marked = False
        self.waits_since: float | None = None

    def overdue(self, progress: torch.Tensor) -> tuple[int | None, bool] | None:
        """None if all is well. Otherwise a node that is lost, None if unknown, and whether a connection has closed."""
        now, bound_s, host = time.monotonic(), self._payload.bound_s, self.waits_since
        begun, ended = progress.tolist()
        if begun != self._number:
            self._number, self._begun = begun, now
        is_moving = begun > ended
        since = min([now, *([self._begun] if is_moving else []), *([] if host is None else [host])])
        is_long = now - since > min(_LONG_S, bound_s / 8)
        if is_long != self._is_marked:
            self._mark(is_long)
            self._is_marked = is_long
        if not is_moving:
            return None
        if now - self._begun > bound_s:
            return self._find_lost(), False
        if is_long and now - self._probed > _PROBE_S:
            self._probed = now
            if (lost := self._find_lost()) is not None or self._payload.problem():
                return lost, True
        return None


def start_watch(who: Looks) -> threading.Event:
    """Starts a thread that looks until there is nothing more to see, until `who` is gone, or until the event is set."""
    ended, reference = threading.Event(), weakref.ref(who)
    threading.Thread(target=_watch, args=(reference, ended), name="symmoe-rail", daemon=True).start()
    return ended


def _watch(reference: weakref.ref[Looks], ended: threading.Event) -> None:
    try:
        while not ended.wait(_POLL_S):
            who = reference()
            if who is None or not who.look_at_rail():
                return
            del who
    except Exception as problem:  # noqa: BLE001 - a GPU that is out of order, say
        logger.warning("exchanges between nodes are no longer watched: %s: %s", type(problem).__name__, problem)
