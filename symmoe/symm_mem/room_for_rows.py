"""How many rows recent calls of a group have needed, and how many the next call gets before its routing is known.

With exact capacity the host would have to wait for the plan before it can make buffers. Instead a call gets room for
what recent calls have needed, with a margin, and the host looks at the plan when everything is launched. Routing
changes slowly while a model trains, so it nearly always fits; a call that does not fit is planned again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WINDOW = 64  # calls; what is larger than all calls of two windows have needed is given up
_MARGIN = 32  # a call may need a 32nd more than the largest of them, since routing changes,
_DEVIATIONS = 4  # and so many square roots more by chance, if tokens choose independently
_BITS = 5  # room is rounded up to so many significant bits, so that sizes repeat


@dataclass(frozen=True, slots=True)
class Room:
    """What a call gets.

    Attributes:
        rows, packed_rows: rows that each rank can take.
        expected_rows: rows that the fullest rank is expected to need.
    """

    rows: int
    packed_rows: int
    expected_rows: int


class RowHistory:
    """The largest numbers of rows that any rank of the group needed in recent calls.

    All ranks see the same calls, so they give the next call the same room.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next call measures. For after an error: ranks may notice it in different calls."""
        self._last_rows = self._num_calls = 0
        self._before, self._now = (0, 0), (0, 0)  # the largest of the last whole window, and of the one that runs

    def note(self, rows: int, packed_rows: int) -> None:
        """Notes a call: the largest numbers of rows and of packed rows that any rank needed."""
        if self._num_calls == _WINDOW:
            self._before, self._now, self._num_calls = self._now, (0, 0), 0
        self._num_calls += 1
        self._last_rows = rows
        self._now = max(self._now[0], rows), max(self._now[1], packed_rows)

    def room(self, most_rows: int | None, factor: float | None = None) -> Room | None:
        """What the next call gets, at most `most_rows` rows; None if it has to measure. factor: it gets so many times
        what the largest recent one needed, if that is no more than `most_rows`."""
        rows, packed_rows = (max(pair) for pair in zip(self._before, self._now, strict=True))
        if rows and factor is not None and (most_rows is None or math.ceil(factor * rows) <= most_rows):
            room = math.ceil(factor * rows)
            return Room(room, min(room, math.ceil(factor * packed_rows)), self._last_rows)
        if not rows or (most_rows is not None and rows > most_rows):
            return None
        room = _with_margin(rows)
        if most_rows is not None:
            room = min(room, most_rows)
        return Room(room, min(room, _with_margin(packed_rows)), self._last_rows)


def _with_margin(number: int) -> int:
    number += -(-number // _MARGIN) + _DEVIATIONS * math.isqrt(number)
    step = 1 << max(0, number.bit_length() - _BITS)
    return -(-number // step) * step
