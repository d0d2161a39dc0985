"""How many rows recent calls of a group have needed, and how many the next call gets before its routing is known.
Routing changes slowly, so it nearly always fits; a call that does not fit on every rank is planned again ("Capacity" in
docs/design.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WINDOW = 64  # calls; what is larger than all calls of two windows have needed is given up
_MARGIN = 32  # a call may need a 32nd more than the largest of them, since routing changes,
_DEVIATIONS = 4  # and so many square roots more by chance, if tokens choose independently
_BITS = 5  # room is rounded up to so many significant bits, so that sizes repeat


@dataclass(frozen=True, slots=True)
class RowBudget:
    """What a call gets: rows that this rank can take, -1: what the routing needs, for which its host waits; those that
    the fullest rank is expected to need, the same on all ranks; and tokens that fit in a message to another node."""

    rows: int
    packed_rows: int
    expected_rows: int
    rail_rows: int = 0


class RowHistory:
    """The largest numbers of rows that any rank of the group needed in recent calls, and of tokens that this rank sent
    to another node, by how many it had. As each knows only its own tokens before the plan, ranks may get different
    room; whether it was enough on all of them, every rank reads in the plan."""

    def __init__(self) -> None:
        self._last_rows = 0
        self._windows: dict[
            int, _Windows
        ] = {}  # by the bits of the number of tokens: a small call holds little

    def note(self, num_tokens: int, rows: int, packed_rows: int, rail_rows: int = 0) -> None:
        """Notes a call: the largest numbers of rows and of packed rows that any rank needed, and of tokens that this
        rank sent to another node."""
        self._last_rows = rows
        self._windows.setdefault(num_tokens.bit_length(), _Windows()).note(
            rows, packed_rows, rail_rows
        )

    def room(
        self, num_tokens: int, most_rows: int | None, factor: float | None = None
    ) -> RowBudget | None:
        """What the next call gets, at most `most_rows` rows; None if nothing is known, on all ranks. factor: it gets so
        many times what the largest recent one needed, if that is no more than `most_rows`."""
        if not self._last_rows:
            return None
        windows = self._windows.get(num_tokens.bit_length())
        rows, packed_rows, rail_rows = (0, 0, num_tokens) if windows is None else windows.most()
        if (
            rows
            and factor is not None
            and (most_rows is None or math.ceil(factor * rows) <= most_rows)
        ):
            room, *others = (math.ceil(factor * each) for each in (rows, packed_rows, rail_rows))
        else:
            room, *others = map(with_margin, (rows, packed_rows, rail_rows))
            room = room if most_rows is None else min(room, most_rows)
        does_not_fit = not rows or (most_rows is not None and rows > most_rows)
        sizes = (-1, -1) if does_not_fit else (room, min(room, others[0]))
        return RowBudget(*sizes, self._last_rows, min(num_tokens, others[1]))


class _Windows:
    def __init__(self) -> None:
        self._num_calls = 0
        self._before, self._now = (
            [0] * 3,
            [0] * 3,
        )  # the largest of the last whole window, of this one

    def note(self, *numbers: int) -> None:
        if self._num_calls == _WINDOW:
            self._before, self._now, self._num_calls = self._now, [0] * 3, 0
        self._num_calls += 1
        self._now = [*map(max, self._now, numbers)]

    def most(self) -> list[int]:
        return [*map(max, self._before, self._now)]


def with_margin(number: int) -> int:
    """What a call gets of rows, if the largest recent one needed this number."""
    number += -(-number // _MARGIN) + _DEVIATIONS * math.isqrt(number)
    step = 1 << max(0, number.bit_length() - _BITS)
    return -(-number // step) * step
