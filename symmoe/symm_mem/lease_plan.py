"""The leases of a tape, whose sizes are known: all are taken before anything is launched, and those that end in the
same call are parts of one. So nothing of Python stands between launches, and where the heap lacks the memory, the call
runs without its tape."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from symmoe.symm_mem.memory import Arena, Lease, Memory
from symmoe.tape.tape import Call, Entry, ObjectSlot, Tape

_RELEASE = Lease.release.__wrapped__  # type: ignore[attr-defined]  # what a tape repeats


class _Part(NamedTuple):
    """A lease, which begins so many bytes behind where its span begins."""

    slot: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    start_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Leases:
    """What a tape leases: what outlives the call, each with a span, and parts of one span, which is in a slot, too."""

    memory: Memory
    kept: Sequence[_Part]
    parts: Sequence[_Part]
    whole: _Part

    def take(self, things: list[Any]) -> bool:
        """Takes all, each for its slot. False: the heap lacks the memory, and nothing has been taken."""
        spans = [(part, self.memory.take(part.num_bytes, part.name)) for part in self.kept]
        if self.parts:
            whole = self.memory.take(self.whole.num_bytes, self.whole.name)
            spans += [(part, whole) for part in (self.whole, *self.parts)]
        taken = [span for _, span in spans if span is not None]
        if len(taken) < len(spans):
            for span in taken:
                span.release()
            return False
        for (part, _), span in zip(spans, taken, strict=True):
            things[part.slot] = Lease(self.memory, span, *part[2:])
        return True


def with_leases_first(tape: Tape, take: Any, memory: Memory) -> Tape:
    """The tape with its leases apart. take: what an entry calls for a lease."""
    calls = [entry for entry in tape.entries if isinstance(entry, Call)]
    ended = {call.template[0][0].slot for call in calls if call.function is _RELEASE}
    events = list[Call]()  # begins and ends of leases that end in the call
    kept = list[_Part]()
    for call in calls:
        if call.function is take and call.slot not in ended:
            kept.append(_part_of(call))
        elif call.function is take or call.function is _RELEASE:
            events.append(call)
    parts, num_bytes = _laid_out(events, overlap=not memory.fills)
    names = ", ".join(part.name for part in parts)
    whole = _Part(tape.num_slots, names, (num_bytes,), torch.uint8, num_bytes)
    entries = [
        entry
        for entry in tape.entries
        if not (isinstance(entry, Call) and (entry.function is take or entry in events[:-1]))
    ]
    if events:
        last = entries.index(events[-1])
        entries[last] = replace(events[-1], template=((ObjectSlot(whole.slot),), {}))
    return replace(
        tape,
        num_slots=tape.num_slots + 1,
        entries=tuple[Entry, ...](entries),
        leases=Leases(memory, kept, parts, whole),
    )


def _part_of(call: Call) -> _Part:
    _, shape, dtype, name, _ = call.template[0]
    return _Part(cast(int, call.slot), name, shape, dtype, dtype.itemsize * math.prod(shape))


def _laid_out(events: Sequence[Call], *, overlap: bool) -> tuple[list[_Part], int]:
    """Where leases have their places in one span, and its bytes. Where one ends before another begins, they may have
    the same memory, if they may overlap."""
    arena = Arena(0, sys.maxsize)
    spans, parts = dict[int, tuple[int, int]](), list[_Part]()
    for call in events:
        if call.function is not _RELEASE:
            part = _part_of(call)
            spans[part.slot] = cast(tuple[int, int], arena.take(part.num_bytes))
            parts.append(part._replace(start_bytes=spans[part.slot][0]))
        elif overlap:
            # Where they do not, each begins with what the span is filled with: NaN.
            arena.give_back(*spans[call.template[0][0].slot])
    return parts, arena.high_water_bytes
