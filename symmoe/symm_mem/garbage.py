"""When a heap without room asks Python's collector for leases that only cycles of dead objects still hold."""

from __future__ import annotations

import gc
import time

_WORTH = 10  # a collection that finds nothing may cost as little as a tenth of the time


class Garbage:
    """Collects where it may help. A loop of leases that do not fit would otherwise do little else: a collection takes
    as long as the process has objects, a tenth of a second and more."""

    def __init__(self) -> None:
        self._fruitless: tuple[int, ...] = ()  # offsets of the live leases when a collection has freed none of them
        self._next_s = 0.0

    def collect(self, leases: tuple[int, ...]) -> bool:
        """Whether there may be room now.

        Args:
            leases: offsets of the live leases. If there are none, no collection frees any; if they are those before the
                last collection, which then was in vain, the next one waits until ten times its duration has passed.
        """
        if not leases or (leases == self._fruitless and time.monotonic() < self._next_s):
            return False
        start_s = time.monotonic()
        gc.collect()
        end_s = time.monotonic()
        self._fruitless, self._next_s = leases, end_s + _WORTH * (end_s - start_s)
        return True
