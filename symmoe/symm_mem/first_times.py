"""Which waits for peers come after work that happens once, and may take `start_timeout_s` for it.

A rank that compiles kernels, imports modules or touches memory for the first time keeps its peers waiting, and they
cannot see why. But all ranks make the same calls in the same order: what one does for the first time between two of its
waits, the others do there too. So a wait is a first one if none of its kind has followed one of the last kind yet, or
if this process has compiled or imported anything since the last one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from symmoe.kernels import control

_ALL_BUT_PLAN = control.pack_call(**{name: -1 for name in control.CALL_FIELDS if name != "plan"})

_BARRIER = -1  # in the place of a peer
Kind = tuple[int, int]  # the call of the last barrier, and the peer whose signal is waited for after it


class FirstTimes:
    """What this rank's waits for peers have followed so far, on one heap.

    Args:
        num_compiled: how many variants of kernels this process has compiled so far, or found in a cache.
    """

    def __init__(self, num_compiled: Callable[[], int]) -> None:
        self._num_compiled = num_compiled
        self._num_ready = 0
        self._last: Kind = (0, _BARRIER)
        self._stretches: set[tuple[Kind, Kind]] = set()  # from one wait to the next
        self._waits: set[tuple[int, int, int]] = set()  # epoch, phase, and peer or _BARRIER

    def is_first_barrier(self, call: int, *, epoch: int, fault: bool) -> bool:
        """Notes a barrier that is about to be entered, and says whether it is a first wait.

        Args:
            call: as in control.pack_call.
            epoch: of the barrier.
            fault: this rank's arguments are wrong, and `call` has the phase alone.
        """
        last, phase, first = self._last, call & 0xFF, self._has_made_ready()
        if fault:
            first |= not any(before == last and after[0] & 0xFF == phase for before, after in self._stretches)
        elif phase != control.PHASE_CLOSE:  # to which ranks come from anywhere
            first |= self._goes_on_to((call & _ALL_BUT_PLAN, _BARRIER))
        if first:
            self._waits.add((epoch, phase, _BARRIER))
        return first

    def is_first_signal(self, phase: int, peer: int, *, epoch: int) -> bool:
        """The same for a wait for a peer's signal, after the barrier of this epoch."""
        first = self._has_made_ready() | self._goes_on_to((self._last[0], peer))
        if first:
            self._waits.add((epoch, phase, peer))
        return first

    def was_first(self, epoch: int, phase: int, peer: int) -> bool:
        """Whether the wait of this epoch and phase in which this peer was missing was a first one."""
        return not self._waits.isdisjoint({(epoch, phase, _BARRIER), (epoch, phase, peer)})

    def _has_made_ready(self) -> bool:
        """Whether something was compiled or imported since the last wait."""
        before, self._num_ready = self._num_ready, len(sys.modules) + self._num_compiled()
        return before != self._num_ready

    def _goes_on_to(self, kind: Kind) -> bool:
        """Whether this is the first wait of its kind after one of the last kind."""
        stretch, self._last = (self._last, kind), kind
        if stretch in self._stretches:
            return False
        self._stretches.add(stretch)
        return True
