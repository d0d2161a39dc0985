"""The leases of a program, whose sizes are known: all are taken before anything is launched, and those that end in the
same call are parts of one. So nothing of Python stands between launches, and where the heap lacks the memory, the call
runs without its program."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from symmoe.program.builder import FIRST_ADDRESS, builder, symbolic_bytes
from symmoe.program.program import Call, Entry, ObjectSlot, Program
from symmoe.symm_mem.memory import Arena, Lease, Memory, Span

_RELEASE = Lease.release.__wrapped__  # type: ignore[attr-defined]  # what a program repeats


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
    """What a program leases: what outlives the call, each with a span, and parts of one span, which has a slot, too."""

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


def with_leases_first(program: Program, take: Any, memory: Memory) -> Program:
    """The program with its leases apart. take: what an entry calls for a lease."""
    calls = [entry for entry in program.entries if isinstance(entry, Call)]
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
    whole = _Part(program.num_slots, names, (num_bytes,), torch.uint8, num_bytes)
    entries = [
        entry
        for entry in program.entries
        if not (isinstance(entry, Call) and (entry.function is take or entry in events[:-1]))
    ]
    if events:
        last = entries.index(events[-1])
        entries[last] = replace(events[-1], template=((ObjectSlot(whole.slot),), {}))
    return replace(
        program,
        num_slots=program.num_slots + 1,
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


class _MemoryInBuild:
    """Stands for the memory of leases: their offsets are those of symbolic addresses."""

    is_closed = False

    def __init__(self, device: torch.device) -> None:
        self.base, self.dropped = FIRST_ADDRESS, list[Any]()
        self.arenas = [partial(symbolic_bytes, device)]
        self.peers = SimpleNamespace(rank=0)

    def give_back(self, *place: object) -> None:
        """There is nothing to give back."""


def lease_in_build(
    heap: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, phase: int | None
) -> Lease:
    """Stands for the lease that a heap takes with these arguments."""
    current, memory = builder(), cast(Memory, _MemoryInBuild(heap.device))
    assert current is not None
    num_bytes = dtype.itemsize * math.prod(shape)
    place: Any = None, (current.reserve(), num_bytes)
    return Lease(memory, Span(memory, name, 0, place), shape, dtype, num_bytes)
