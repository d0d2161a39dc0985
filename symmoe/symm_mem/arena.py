"""Arenas: a first-fit allocator of offsets that depends only on the order of its calls, and where all arenas lie.

Memory of a lease lies in the arena of one of this process's heaps, and nowhere else. So a look at addresses tells which
of many tensors need a look at their leases. Ranges of closed heaps stay: tensors over them may be alive. Where other
memory lies there by now, a look at its leases finds none.
"""

from __future__ import annotations

import threading
from bisect import insort

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 512  # fits TMA (128), and leases share no cache lines

_lock = threading.Lock()
_bounds: npt.NDArray[np.int64] = np.empty(0, np.int64)  # begin, end, begin, end, ... of ranges that do not touch


class Arena:
    """Hands out byte ranges of [start, end). Lowest address first, so equal call sequences give equal offsets."""

    def __init__(self, start: int, end: int) -> None:
        start = -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = max(start, end // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.capacity_bytes = end - start
        self.used_bytes = 0
        self.high_water_bytes = 0
        self._free: list[tuple[int, int]] = [(start, end)] if end > start else []

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """(offset, size) of a range of at least `num_bytes`, or None if no free range is large enough."""
        size = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, end)
                self.used_bytes += size
                self.high_water_bytes = max(self.high_water_bytes, self.used_bytes)
                return start, size
        return None

    def take_or_grow(self, num_bytes: int, source: Arena) -> tuple[int, int] | None:
        """Same as :meth:`take`, but if no range fits, this arena first grows by a range of `source`."""
        span = self.take(num_bytes)
        if span is None and (more := source.take(num_bytes)) is not None:
            self.capacity_bytes += more[1]
            self._insert(*more)
            span = self.take(num_bytes)
        return span

    def give_back(self, offset: int, size: int) -> None:
        """Returns a range from :meth:`take`; neighbours merge."""
        self.used_bytes -= size
        self._insert(offset, size)

    def clear(self) -> list[tuple[int, int]]:
        """Removes all free ranges from the arena; returns them as (offset, size)."""
        spans = [(start, end - start) for start, end in self._free]
        self.capacity_bytes -= sum(size for _, size in spans)
        self._free = []
        return spans

    def _insert(self, offset: int, size: int) -> None:
        insort(self._free, (offset, offset + size))
        merged = [self._free[0]]
        for start, end in self._free[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest lease that would fit now."""
        return max((end - start for start, end in self._free), default=0)


def add_range(start: int, num_bytes: int) -> None:
    """Notes an arena; ranges that meet become one."""
    global _bounds
    with _lock:
        end = start + num_bytes
        first, last = _bounds.searchsorted(start, "left"), _bounds.searchsorted(end, "right")
        # An odd position lies in a range, which then begins or ends this one.
        new = [bound for bound, position in ((start, first), (end, last)) if position % 2 == 0]
        _bounds = np.concatenate([_bounds[:first], np.array(new, np.int64), _bounds[last:]])


def positions_inside(addresses: bytes) -> list[int]:
    """Which of the addresses, native int64, lie in a range."""
    if not _bounds.size:
        return []
    places = _bounds.searchsorted(np.frombuffer(addresses, np.int64), "right")
    inside: list[int] = np.flatnonzero(places & 1).tolist()
    return inside
