"""This rank's memory of a heap: a first-fit arena, the leases of its parts, and when a part may be leased again.

A lease's memory lies in the arena of one of this process's heaps, so addresses show which of many tensors may
belong to a lease. Ranges of closed heaps stay in the list: tensors over them may be alive. Other memory that lies there
later has no lease.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from symmoe.autograd import wrote_into
from symmoe.errors import ArgumentError, StaleLease
from symmoe.kernels.control import Peers, contiguous_strides
from symmoe.program.builder import FIRST_ADDRESS, builder, fill, noted, symbolic_bytes
from symmoe.program.program import Address, Call, ObjectSlot, Program
from symmoe.symm_mem.streams import Access, Streams
from symmoe.torch_internals import over_memory_of

ALIGNMENT_BYTES = 512  # fits TMA (128), and leases share no cache lines
_SEARCH_WORTH = 10  # vain searches for garbage take at most a tenth of the time

_lock = threading.Lock()
# Begin, end, begin, end, ... of ranges that do not touch.
_bounds: npt.NDArray[np.int64] = np.empty(0, np.int64)


class Arena:
    """Allocates byte ranges of [start, end). Lowest address first, so equal call sequences give equal offsets."""

    def __init__(self, start: int, end: int) -> None:
        start = aligned(start)
        self._end = end = max(start, end // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.capacity_bytes = end - start
        self.used_bytes = 0
        self.high_water_bytes = 0
        # (offset, size) of each free range.
        self._free: list[tuple[int, int]] = [(start, end - start)] if end > start else []

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """(offset, size) of a range of at least `num_bytes`, or None if no free range is large enough."""
        size = -(-(num_bytes or 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(start + size, free - size)] if free > size else []
                self.used_bytes += size
                self.high_water_bytes = max(self.high_water_bytes, self.used_bytes)
                return start, size
        return None

    def take_or_grow(self, num_bytes: int, source: Arena) -> tuple[int, int] | None:
        """Like :meth:`take`, but if no range fits, this arena first grows by a range of `source`."""
        span = self.take(num_bytes)
        if span is None and (range_of_source := source.take(num_bytes)) is not None:
            self.capacity_bytes += range_of_source[1]
            self.used_bytes += range_of_source[1]
            self.give_back(*range_of_source)
            span = self.take(num_bytes)
        return span

    def give_back(self, offset: int, size: int) -> None:
        """Returns a range from :meth:`take`; neighbours merge."""
        free = self._free
        index = bisect(self._free, (offset, 0))
        self.used_bytes -= size
        if index and sum(free[index - 1]) == offset:
            index -= 1
            offset, size_before = free.pop(index)
            size += size_before
        if index < len(free) and free[index][0] == offset + size:
            size += free.pop(index)[1]
        free.insert(index, (offset, size))

    def clear(self) -> list[tuple[int, int]]:
        """Removes all free ranges from the arena; returns them as (offset, size)."""
        spans = self._free
        self._free = []
        self.capacity_bytes -= sum(size for _, size in spans)
        return spans

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest lease that would fit now."""
        return max(map(itemgetter(1), self._free), default=0)

    def end_for(self, num_bytes: int) -> int:
        """The end that the arena would need, so that a range of so many bytes fits behind the used ones."""
        start, size = self._free[-1] if self._free else (self._end, 0)
        return (start if start + size == self._end else self._end) + aligned(max(1, num_bytes))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def add_range(start: int, num_bytes: int) -> None:
    """Registers an arena; adjacent ranges become one."""
    global _bounds
    with _lock:
        end = start + num_bytes
        first = _bounds.searchsorted(start, "left")
        last = _bounds.searchsorted(end, "right")
        # An odd position lies in a range, which then begins or ends this one.
        bounds = [bound for bound, position in ((start, first), (end, last)) if position % 2 == 0]
        _bounds = np.concatenate([_bounds[:first], np.array(bounds, np.int64), _bounds[last:]])


def positions_inside(addresses: bytes) -> list[int]:
    """The indices of those addresses, native int64, that lie in a range."""
    positions = _bounds.searchsorted(np.frombuffer(addresses, np.int64), "right")
    return [*np.flatnonzero(positions & 1).tolist()]


_Location = tuple[Arena, tuple[int, int]]  # the arena of a span, and its (offset, size) there


@dataclass
class HeapStatistics:
    """Counters of one heap since its construction: leases made; copies of rows to or from the heap because the caller
    gave no buffer on it (the slow path of dispatch_tokens and combine_tokens; MoELayer never takes it)."""

    num_leases: int = 0
    num_staging_copies: int = 0


@dataclass(eq=False, repr=False)
class Span:
    """A lease's part of the arena, alive as long as the lease or any tensor over its memory. A tensor finds the span
    through its storage, which views share. Attributes: as in Lease, and memory, None after the release; location: the
    arena, and (offset, size) in it."""

    memory: Memory | None
    name: str
    generation: int
    location: _Location

    @property
    def end(self) -> str:
        """The event that ended the lease, so that the memory may have a new user; "" while the lease is valid."""
        if self.memory is None:
            return "which was released"
        return "whose heap was closed" if self.memory.is_closed else ""

    def release(self) -> None:
        """Returns the memory to the arena."""
        memory = self.memory
        self.memory = None
        if memory is not None:
            memory.give_back(*self.location)

    def __del__(self) -> None:
        # The garbage collector may run this in any thread and in the middle of the arena's work: only note it.
        if self.memory is not None:
            self.memory.dropped.append(self.location)


class Memory:
    """Allocates and frees spans of this rank's arena. Local, in any thread; never synchronises.

    Args:
        arenas: by rank, a function that makes a new uint8 tensor over its arena, with a separate version counter.
        streams: the order of uses of the memory.
        fills: whether :meth:`take` fills spans with NaN on the current stream; see program.builder.fill.

    Attributes:
        arena: free ranges behind the control block.
        lock: guards the arenas and the order of streams.
        dropped: spans that were dropped without release. Used without the lock: Python's collector may interrupt the
            lock's owner.
        base: address of the arena.
        is_closed: whether the heap has freed the arena.
    """

    def __init__(
        self,
        peers: Peers,
        arenas: Sequence[Callable[[], torch.Tensor]],
        access: Access,
        streams: Streams,
        *,
        fills: bool,
    ) -> None:
        arena_bytes = peers.views[peers.rank]
        self.peers = peers
        self.arenas = arenas
        self.fills = fills
        self._start = peers.layout.num_bytes
        self._end = arena_bytes.numel()
        self.arena = Arena(self._start, self._end)
        self.lock = threading.RLock()
        self.statistics = HeapStatistics()
        self.dropped: deque[_Location] = deque()
        self._access = access
        self._streams = streams
        self._device = arena_bytes.device
        self.base = arena_bytes.data_ptr()
        self.is_closed = False
        add_range(self.base, arena_bytes.numel())
        self._graph_arenas: dict[int, Arena] = {}  # memory of captured graphs, only for their calls
        # Offset to size and name (None: in a graph) of every lease; the dict does not keep the leases alive.
        self._live: dict[int, tuple[int, str | None]] = {}
        # After a vain search for garbage: offsets of the live leases, and when to search again.
        self._leases_at_search: tuple[int, ...] = ()
        self._next_search_s = 0.0

    def take(self, num_bytes: int, name: str, *, searches: bool = True) -> Span | None:
        """A span for a lease, or None if no free range is large enough, even after a search for garbage."""
        with self.lock:
            if self.dropped:
                self._take_back_dropped()
            arena = self.arena
            if capture := self._streams.capture:  # calls of a captured graph share spans
                arena = self._graph_arenas.setdefault(capture, Arena(0, 0))
                span = arena.take_or_grow(num_bytes, self.arena)
            else:
                span = arena.take(num_bytes)
            if span is not None:
                self._streams.acquire(span)
                if self.fills:
                    fill(self.peers.views[self.peers.rank][span[0] : sum(span)])
                self._live[span[0]] = num_bytes, name if arena is self.arena else None
                self.statistics.num_leases += 1
                return Span(self, name, self.statistics.num_leases, (arena, span))
        may_have_freed = (
            searches and num_bytes <= self.arena.capacity_bytes and self._collect_garbage()
        )
        return self.take(num_bytes, name, searches=False) if may_have_freed else None

    def lacks(self, num_bytes: int) -> bool:
        """Whether every free range is smaller than so many bytes."""
        with self.lock:
            self._take_back_dropped()
            return self.arena.largest_free_bytes < num_bytes

    def give_back(self, arena: Arena, span: tuple[int, int], *, was_dropped: bool = False) -> None:
        """Frees (offset, size) after the current stream's use; was_dropped: after the use of any stream."""
        if not self._access.is_usable:
            return
        with self.lock:
            self._live.pop(span[0], None)
            is_of_graph = arena is not self.arena
            if is_of_graph or not self._streams.capture:  # a capture begins after earlier work
                self._streams.release((*span, was_dropped))
            if is_of_graph and arena not in self._graph_arenas.values():
                arena = self.arena  # the graph has been released meanwhile
            arena.give_back(*span)

    def shrink(self, span: Span, num_bytes: int) -> None:
        """Frees the part of a span after its first bytes."""
        arena, (offset, size) = span.location
        kept_bytes = aligned(num_bytes)
        if arena is self.arena and self._access.is_usable and 0 < kept_bytes < size:
            with self.lock:
                self.give_back(arena, (offset + kept_bytes, size - kept_bytes))
                self._live[offset] = num_bytes, span.name
                span.location = arena, (offset, kept_bytes)

    def release_graphs(self, *captures: int) -> None:
        """Frees the memory of these captured graphs; some may have none. By default of all graphs."""
        with self.lock:
            for capture in captures or [*self._graph_arenas]:
                for span in self._graph_arenas.pop(capture, Arena(0, 0)).clear():
                    self.give_back(self.arena, span)

    def _take_back_dropped(self) -> None:
        while self.dropped:
            self.give_back(*self.dropped.popleft(), was_dropped=True)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the open arena, behind the control block."""
        if self.is_closed or tensor.device != self._device:
            return False
        if tensor.numel() == 0:  # torch gives an empty tensor no address
            return True
        offset = tensor.data_ptr() - self.base
        return (
            self._start <= offset and offset + tensor.numel() * tensor.element_size() <= self._end
        )

    def offset_of(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Byte offset of a tensor in the arena, and whether it lies in one live lease."""
        if tensor.numel() == 0:
            return self._start, True
        offset = tensor.data_ptr() - self.base
        end = offset + tensor.numel() * tensor.element_size()
        with self.lock:
            self._take_back_dropped()
            return offset, any(
                start <= offset and end <= start + size for start, (size, _) in self._live.items()
            )

    def _collect_garbage(self) -> bool:
        """Collects leases that only cycles of dead objects keep alive; returns whether memory may be free now. A search
        takes 0.1 s or more, so none is made without live leases, and for a while after a vain one if the leases
        stay."""
        with self.lock:
            leases = tuple(self._live)
        if not leases or (
            leases == self._leases_at_search and time.monotonic() < self._next_search_s
        ):
            return False
        start_s = time.monotonic()
        gc.collect()
        end_s = time.monotonic()
        self._leases_at_search = leases
        self._next_search_s = end_s + _SEARCH_WORTH * (end_s - start_s)
        return True

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased now, plus all bytes of captured graphs."""
        with self.lock:
            self._take_back_dropped()
            return self.arena.used_bytes

    def live_leases(self) -> list[tuple[str, int]]:
        """Name and bytes of each live lease outside of graphs, the largest first, after a search for garbage."""
        if self.leased_bytes > self.graph_bytes:
            gc.collect()
        with self.lock:
            self._take_back_dropped()
            leases = [(name, size) for size, name in self._live.values() if name is not None]
        return sorted(leases, key=lambda lease: -lease[1])

    @property
    def graph_bytes(self) -> int:
        """Bytes of captured CUDA graphs, leased in them or not."""
        return sum(arena.capacity_bytes for arena in self._graph_arenas.values())


def lease_problem(shape: object, dtype: object) -> ArgumentError | None:
    """The error in the arguments of :meth:`SymmetricHeap.lease`, or None."""
    if not isinstance(dtype, torch.dtype):
        return ArgumentError(f"dtype ({dtype!r}) must be a torch.dtype")
    if not isinstance(shape, (tuple, list)):
        return ArgumentError(f"shape ({shape!r}) must be a tuple of ints")
    if not all(
        hasattr(size, "__index__") and not isinstance(size, bool) and size >= 0 for size in shape
    ):
        return ArgumentError(f"shape ({shape!r}) must be of ints of at least 0")
    return None


def ended_lease(tensor: torch.Tensor) -> Span | None:
    """The span of `tensor`'s lease, if the lease was released or its heap closed; else None."""
    if tensor.layout != torch.strided:  # other layouts have no storage
        return None
    span = getattr(tensor.untyped_storage(), "_lease_span", None)
    return span if span is not None and span.end else None


class Lease(AbstractContextManager["Lease"]):
    """Memory of the symmetric heap, made by :meth:`SymmetricHeap.lease`. Contents are undefined at first.

    Attributes:
        name: purpose of the lease, shown in error texts.
        shape, dtype, num_bytes: of the tensor.
        offset: byte offset in the arena.
        generation: the number of leases that the heap made before this one.

    The memory returns to the heap by :meth:`release`, or when neither the lease nor any tensor over it is alive. So
    autograd may save the tensor, checkpointing may drop it, and a dropped graph leaks nothing. Releasing is local and
    does not synchronise: later kernels on the same stream may reuse the memory, and peers write into it only after a
    barrier on this rank's stream.
    """

    def __init__(
        self,
        memory: Memory,
        span: Span,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        num_bytes: int,
    ) -> None:
        self.name = span.name
        self.generation = span.generation
        self.offset = span.location[1][0]
        self.shape = shape
        self.dtype = dtype
        self.num_bytes = num_bytes
        self._span = span
        self._memory = memory

    @cached_property  # leases that only peers and kernels read need none
    def tensor(self) -> torch.Tensor:
        """This rank's memory as a contiguous tensor of `shape` and `dtype`."""
        tensor = self.peer(self._memory.peers.rank)
        tensor.untyped_storage()._lease_span = self._span  # type: ignore[attr-defined]  # our attribute
        return tensor

    def data_ptr(self) -> int:
        """The address of this rank's memory, as of a tensor."""
        return self._memory.base + self.offset

    def peer(self, rank: int) -> torch.Tensor:
        """This byte range in rank `rank`'s arena, as a tensor: that rank's lease of the same name if all ranks lease
        and release in the same order. ArgumentError, on this rank only: the group has no such rank."""
        if self._span.memory is None:
            raise self._stale("has been released")
        num_ranks = self._memory.peers.num_ranks
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_ranks:
            raise ArgumentError(f"rank ({rank!r}) must be an int in [0, {num_ranks})")
        arena = self._memory.arenas[rank]().view(self.dtype)
        first = self.offset // self.dtype.itemsize
        # Autograd would track a write to a view as a write to the arena.
        return over_memory_of(arena, self.shape, contiguous_strides(self.shape), first)

    @noted(stands_for="itself")
    def release(self) -> None:
        """Returns the memory to the heap. A second call raises StaleLease. Local."""
        if self._span.memory is None:
            raise self._stale("was released twice")
        if (tensor := vars(self).pop("tensor", None)) is not None:
            wrote_into(tensor)  # tensors that autograd has saved of it are no longer valid
        self._span.release()

    def shrink(self, num_bytes: int) -> None:
        """Frees the memory after the first bytes; the tensor stays, but must not be written there. Local."""
        if self._span.memory is not None:
            self._memory.shrink(self._span, num_bytes)

    def __exit__(self, *exc: object) -> None:
        if self._span.memory is not None:
            self.release()

    def _stale(self, problem: str) -> StaleLease:
        return StaleLease(f"lease '{self.name}' (generation {self.generation}) {problem}")


# -- leases of programs ------------------------------------------------------------------------------------------------
# Their sizes are known: a call takes all its leases before any launch, and leases that end in the same call are parts
# of one. So no Python runs between launches. If the heap lacks the memory, the call runs without its program.

_RELEASE = Lease.release.__wrapped__  # type: ignore[attr-defined]  # the function in programs


class _LeaseSpec(NamedTuple):
    """The arguments of a lease, and its slot."""

    slot: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    @classmethod
    def from_call(cls, call: Call) -> _LeaseSpec:
        """The lease that this entry takes."""
        _, shape, dtype, name, _ = call.template[0]
        return cls(cast(int, call.slot), name, shape, dtype, dtype.itemsize * math.prod(shape))


@dataclass(frozen=True, slots=True)
class Leases:
    """The leases of a program. names: of all leases, also of parts of others, by slot."""

    memory: Memory
    leased: Sequence[_LeaseSpec]
    names: Mapping[int, str]

    def take(self, slot_values: list[Any]) -> bool:
        """Takes all leases, each for its slot. False: the heap lacks the memory, and no lease was taken."""
        memory = self.memory
        spans = list[Span]()
        for slot, name, shape, dtype, num_bytes in self.leased:
            span = memory.take(num_bytes, name)
            if span is None:
                for taken_span in spans:
                    taken_span.release()
                return False
            spans.append(span)
            slot_values[slot] = Lease(memory, span, shape, dtype, num_bytes)
        return True


def with_leases_first(program: Program, take: Any, memory: Memory) -> Program:
    """The program with its leases separated. take: the function that an entry calls for a lease."""
    calls = [entry for entry in program.entries if isinstance(entry, Call)]
    ended = {call.template[0][0].slot for call in calls if call.function is _RELEASE}
    leases = [_LeaseSpec.from_call(call) for call in calls if call.function is take]
    leased = [lease for lease in leases if lease.slot not in ended]
    names = {lease.slot: lease.name for lease in leases}
    entries = [entry for entry in program.entries if getattr(entry, "function", None) is not take]
    if ended:
        # Begins and ends of leases that end in the call.
        events = [call for call in calls if call.function is _RELEASE or call.slot in ended]
        starts, num_bytes = _layout_of(events, overlap=not memory.fills)
        name = ", ".join(names[slot] for slot in starts)
        shared_lease = _LeaseSpec(program.num_slots, name, (num_bytes,), torch.uint8, num_bytes)
        leased.append(shared_lease)

        def in_shared_lease(operand: Any) -> Any:
            if isinstance(operand, Address):
                return Address(in_shared_lease(operand.tensor))
            start = starts.get(getattr(operand, "slot", None) or -1)
            if start is None:
                return operand
            if isinstance(operand, ObjectSlot):  # of a release
                return ObjectSlot(shared_lease.slot)
            return replace(
                operand, slot=shared_lease.slot, offset_bytes=operand.offset_bytes + start
            )

        last = events[-1]
        entries = [
            entry.with_operands(in_shared_lease)
            for entry in entries
            if entry is last or getattr(entry, "function", None) is not _RELEASE
        ]
    return replace(
        program,
        num_slots=program.num_slots + 1,
        entries=tuple(entries),
        leases=Leases(memory, leased, names),
    )


def _layout_of(events: Sequence[Call], *, overlap: bool) -> tuple[dict[int, int], int]:
    """The first bytes of leases in one, by slot, and the bytes of that one. Leases that are not live together may share
    memory, if they may overlap."""
    arena = Arena(0, sys.maxsize)
    spans = dict[int, tuple[int, int]]()
    for call in events:
        if call.function is not _RELEASE:
            lease = _LeaseSpec.from_call(call)
            spans[lease.slot] = cast(tuple[int, int], arena.take(lease.num_bytes))
        elif overlap:
            # Without overlap, each lease starts with the NaN of the whole one.
            arena.give_back(*spans[call.template[0][0].slot])
    return {slot: start for slot, (start, _) in spans.items()}, arena.high_water_bytes


def lease_in_build(
    heap: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, phase: int | None
) -> Lease:
    """A stand-in for the lease that a heap makes with these arguments."""
    current = builder()
    num_bytes = dtype.itemsize * math.prod(shape)
    assert current is not None
    # Its offset belongs to a symbolic address; no memory is freed.
    memory: Any = SimpleNamespace(
        base=FIRST_ADDRESS,
        arenas=[partial(symbolic_bytes, heap.device)],
        peers=SimpleNamespace(rank=0, num_ranks=1),
        is_closed=False,
        dropped=[],
        give_back=lambda *location: None,
    )
    location: Any = None, (current.reserve(), num_bytes)
    return Lease(memory, Span(memory, name, 0, location), shape, dtype, num_bytes)
