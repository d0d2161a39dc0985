"""Where the arenas of this process's heaps lie, or lay: memory of a lease is nowhere else.

So a look at addresses tells which of many tensors need a look at their leases. Ranges of closed heaps stay: tensors
over them may be alive. Where other memory lies there by now, a look at its leases finds none.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

_lock = threading.Lock()
_bounds: npt.NDArray[np.int64] = np.empty(0, np.int64)  # begin, end, begin, end, ... of ranges that do not touch


def add(start: int, num_bytes: int) -> None:
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
