"""How many rows recent calls of a group needed, and how many the next call gets before its routing is known. Routing
changes slowly, so this nearly always fits; a call that does not fit on every rank is planned again ("Exact capacity" in
docs/design/plan.md)."""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial

# Calls of a window, and windows: a budget beyond the needs of these calls is not kept. A call reads windows only, to be
# quick.
_WINDOW = 32
_NUM_WINDOWS = 4
_MARGIN = 32  # a call may need a 32nd more than the largest of them, since routing changes,
_DEVIATIONS = 4  # and so many square roots more by chance, if tokens choose independently
_BITS = 5  # budgets are rounded up to so many significant bits, so that sizes repeat


@dataclass(frozen=True, slots=True)
class RowBudget:
    """The rows that a call gets on this rank before its routing is known, in a group that has made calls before.

    Attributes:
        expected_rows: about the rows that the fullest rank is expected to need, rounded up; the same on all ranks.
        rail_rows: tokens that fit in a message to another node.
        rows, packed_rows: rows that this rank can take; both None: as the routing needs, for which the host waits.
        why_it_waits: a clause whose subject is the call; empty if the host does not wait.
    """

    expected_rows: int
    rail_rows: int
    rows: int | None = None
    packed_rows: int | None = None
    why_it_waits: str = ""


class RowHistory:
    """The largest numbers of rows that any rank of the group needed in recent calls, and of tokens that this rank sent
    to another node, by the number of tokens. Each rank knows only its own tokens before the plan, so ranks may get
    different budgets. Every rank reads in the plan whether it was enough on all ranks."""

    def __init__(self) -> None:
        self._last_rows: int | None = None
        # By the bits of the number of tokens, because a small call needs little: windows, each the number of its calls
        # and the largest numbers that they have noted.
        self._windows: dict[int, deque[tuple[int, ...]]] = defaultdict(
            partial(deque, maxlen=_NUM_WINDOWS)
        )

    def note(self, num_tokens: int, rows: int, packed_rows: int, rail_rows: int = 0) -> None:
        """Records a call: the largest numbers of rows and of packed rows that any rank needed, and of tokens that this
        rank sent to another node."""
        self._last_rows = rows
        windows = self._windows[num_tokens.bit_length()]
        if not windows or windows[-1][0] == _WINDOW:
            windows.append((0, 0, 0, 0))
        num_calls, *largest = windows[-1]
        windows[-1] = num_calls + 1, *map(max, largest, (rows, packed_rows, rail_rows))

    def budget(
        self, num_tokens: int, max_rows: int | None, factor: float | None = None
    ) -> RowBudget | None:
        """The budget of the next call, at most `max_rows` rows; None if there is no history, on all ranks. factor: the
        budget is this multiple of the largest recent need, unless that exceeds `max_rows`."""
        if self._last_rows is None:
            return None
        expected_rows = rounded_up(self._last_rows)
        windows = self._windows.get(num_tokens.bit_length())
        if windows is None:
            return RowBudget(
                expected_rows,
                num_tokens,
                why_it_waits=f"has {num_tokens} tokens, and no earlier call had about as many",
            )
        _, *needs = map(max, zip(*windows, strict=True))
        limit = sys.maxsize if max_rows is None else max_rows
        if factor is not None and with_margin(needs[0], factor) > limit:
            factor = None
        rows, packed_rows, rail_rows = map(with_margin, needs, [factor] * 3)
        rail_rows = min(num_tokens, rail_rows)
        if needs[0] > limit:
            return RowBudget(
                expected_rows,
                rail_rows,
                why_it_waits=f"needs {needs[0]} rows, as earlier ones did, more than max_row_budget ({max_rows})",
            )
        rows = min(rows, limit)
        return RowBudget(expected_rows, rail_rows, rows, min(rows, packed_rows))


@functools.lru_cache(maxsize=1024)
def rounded_up(num_rows: int) -> int:
    """The number, rounded up to four significant bits: exact capacities change every step, rounded ones rarely."""
    step = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


@functools.lru_cache(maxsize=1024)
def with_margin(number: int, factor: float | None = None) -> int:
    """The rows that a call gets if the largest recent call needed `number`; factor: this multiple instead."""
    if factor is not None:
        return math.ceil(factor * number)
    number += -(-number // _MARGIN) + _DEVIATIONS * math.isqrt(number)
    step = 1 << max(0, number.bit_length() - _BITS)
    return -(-number // step) * step
