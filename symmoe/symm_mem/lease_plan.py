"""The leases of a tape that end in the same call, as parts of one: their sizes are known, so one request and one
release do for all of them, and nothing of Python stands between launches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from symmoe.symm_mem.memory import Arena, Lease
from symmoe.tape.tape import Call, Entry, ObjectSlot, TakeTogether, Tape

_RELEASE = Lease.release.__wrapped__  # type: ignore[attr-defined]  # what a tape repeats


class _Part(NamedTuple):
    """A lease as a part of another one."""

    start_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def with_leases_together(tape: Tape, take: Callable[..., Lease], *, overlap: bool) -> Tape:
    """The tape with one lease in place of those that it takes and releases. Where one of them ends before another
    begins, they may have the same memory, if parts may `overlap`. take: what an entry calls for a lease."""
    ends = {
        entry.template[0][0].slot
        for entry in tape.entries
        if isinstance(entry, Call) and entry.function is _RELEASE
    }
    calls = dict[int, Call]()  # by number, those that take a lease, and those that release one
    slots = list[int]()  # of the leases
    for number, entry in enumerate(tape.entries):
        if isinstance(entry, Call) and entry.function is take and entry.slot in ends:
            calls[number] = entry
            slots.append(cast(int, entry.slot))
        elif isinstance(entry, Call) and entry.function is _RELEASE:
            if entry.template[0][0].slot in slots:
                calls[number] = entry
    if len(slots) < 2:
        return tape
    parts, num_bytes = _laid_out([*calls.values()], overlap=overlap)
    first, *_, last = calls
    heap, _, _, _, phase = calls[first].template[0]
    names = ", ".join(call.template[0][3] for call in calls.values() if call.function is take)
    together = partial(_take_together, take, heap, num_bytes, names, phase, parts)
    whole = tape.num_slots
    entries = dict[int, Entry](enumerate(tape.entries))
    for number in calls:
        del entries[number]
    entries[first] = TakeTogether(together, (whole, *slots))
    entries[last] = replace(calls[last], template=((ObjectSlot(whole),), {}))
    in_order = tuple(entries[number] for number in sorted(entries))
    return replace(tape, num_slots=whole + 1, entries=in_order)


def _laid_out(calls: Sequence[Call], *, overlap: bool) -> tuple[list[_Part], int]:
    """Where the leases of these calls, in order, have their places in one lease; and its bytes."""
    arena = Arena(0, sys.maxsize)
    spans, parts = dict[int, tuple[int, int]](), list[_Part]()
    for call in calls:
        if call.slot is None:
            if overlap:
                arena.give_back(*spans[call.template[0][0].slot])
            continue
        _, shape, dtype, *_ = call.template[0]
        num_bytes = dtype.itemsize * math.prod(shape)
        span = arena.take(num_bytes)
        assert span is not None
        spans[call.slot] = span
        parts.append(_Part(span[0], shape, dtype, num_bytes))
    return parts, arena.high_water_bytes


def _take_together(
    take: Callable[..., Lease],
    heap: Any,
    num_bytes: int,
    names: str,
    phase: int | None,
    parts: Sequence[_Part],
) -> list[Lease]:
    """A lease, and leases that are parts of it and end with it."""
    whole = take(heap, (num_bytes,), torch.uint8, names, phase)
    return [whole, *[whole.part(*part) for part in parts]]
