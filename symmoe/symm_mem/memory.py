"""This rank's memory of a heap: which lease holds which part of the arena, and when a part may be leased again."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from symmoe.kernels.control import Peers
from symmoe.symm_mem.arena import ALIGNMENT_BYTES, Arena, add_range
from symmoe.symm_mem.streams import NoStreams, StreamOrder, capture_id
from symmoe.symm_mem.thread_access import Access

_Place = tuple[Arena, tuple[int, int]]  # the arena that gets a span back, and its (offset, size) there

_SEARCH_WORTH = 10  # searches for garbage in vain take a tenth of the time at most


@dataclass
class HeapStatistics:
    """Counters of one heap since its construction.

    Attributes:
        num_leases: leases made.
        num_staging_copies: times rows were copied to or from the heap because the caller brought no buffer on it (the
            slow path of dispatch_tokens and combine_tokens; MoELayer never takes it).
    """

    num_leases: int = 0
    num_staging_copies: int = 0


class Span:
    """A lease's part of the arena; lives as long as the lease or any tensor over its memory.

    Every tensor over the memory finds it through its storage, which views share.

    Attributes:
        name: name of the lease.
        generation: how many leases the heap had made before this one.
        offset: byte offset in the arena.
        address: where it begins, in this process.
        place: the arena that gets it back, and (offset, size) there.
    """

    __slots__ = ("__weakref__", "_memory", "address", "generation", "name", "offset", "place")

    def __init__(self, memory: Memory, name: str, generation: int, place: _Place) -> None:
        self.name, self.generation, self.place, self.offset = name, generation, place, place[1][0]
        self.address = memory.base + self.offset
        self._memory: Memory | None = memory

    @property
    def end(self) -> str:
        """What has ended the lease, so that the memory may be somebody else's; "" while it is valid."""
        if self._memory is None:
            return "which was released"
        return "whose heap was closed" if self._memory.is_closed else ""

    def release(self) -> None:
        """Gives the memory back."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.give_back(*self.place)

    def shrink(self, num_bytes: int) -> None:
        """Gives back what comes after the first bytes, outside of captures."""
        if self._memory is not None:
            self._memory.shrink(self, num_bytes)

    def __del__(self) -> None:
        # The garbage collector may run this in any thread and in the middle of the arena's work: only note it.
        if self._memory is not None:
            self._memory.dropped.append(self.place)


class Memory:
    """Hands out spans of this rank's arena, and takes them back. Local, in any thread; never synchronises.

    Args:
        arena_tensor: function of a rank; a new uint8 tensor over its arena, with a separate version counter.

    Attributes:
        peers, arena_tensor: what leases make tensors with.
        arena: free ranges behind the control block.
        lock: guards the arenas and the order of streams.
        dropped: spans that were dropped without release. Used without the lock, because Python's collector may
            interrupt code that holds it.
        statistics: counters.
        base: address of the arena.
        is_closed: whether the heap has freed the arena.
    """

    def __init__(
        self,
        peers: Peers,
        arena_tensor: Callable[[int], torch.Tensor],
        access: Access,
        streams: StreamOrder | NoStreams,
    ) -> None:
        own = peers.views[peers.rank]
        self.peers, self.arena_tensor = peers, arena_tensor
        self.arena = Arena(peers.layout.num_bytes, own.numel())
        self.lock = threading.RLock()
        self.dropped: deque[_Place] = deque()
        self.statistics = HeapStatistics()
        self._access, self._streams = access, streams
        self._device, self.base, self.is_closed = own.device, own.data_ptr(), False
        add_range(self.base, own.numel())
        self._start, self._end = peers.layout.num_bytes, own.numel()
        self._graph_arenas: dict[int, Arena] = {}  # memory of captured graphs, which no call outside may get
        self._live: dict[int, int] = {}  # offset to size of every lease; the leases themselves are not held
        # After a search for garbage in vain: offsets of the live leases, and when to search again.
        self._fruitless: tuple[int, ...] = ()
        self._next_search_s = 0.0

    def take(self, num_bytes: int, name: str) -> Span | None:
        """A span for a lease, or None if no free range is large enough."""
        span = self._take(num_bytes, name)
        if span is None and num_bytes <= self.arena.capacity_bytes and self._collect_garbage():
            span = self._take(num_bytes, name)
        return span

    def lacks(self, num_bytes: int) -> bool:
        """Whether no free range has so many bytes."""
        with self.lock:
            self._take_back_dropped()
            return self.arena.largest_free_bytes < num_bytes

    def _take(self, num_bytes: int, name: str) -> Span | None:
        with self.lock:
            self._take_back_dropped()
            arena, capture = self.arena, capture_id(self._device)
            if capture:  # the calls of a captured graph share spans among themselves
                arena = self._graph_arenas.setdefault(capture, Arena(0, 0))
                found = arena.take_or_grow(num_bytes, self.arena)
            else:
                found = arena.take(num_bytes)
            if found is None:
                return None
            self._streams.taken(found)
            self.statistics.num_leases += 1
            self._live[found[0]] = num_bytes
            return Span(self, name, self.statistics.num_leases, (arena, found))

    def give_back(self, arena: Arena, span: tuple[int, int]) -> None:
        """Takes back (offset, size), with which the current stream is done."""
        if self._access.is_given:
            with self.lock:
                self._return(arena, span, self._streams.released)

    def shrink(self, span: Span, num_bytes: int) -> None:
        """Takes back what comes after the first bytes of a span."""
        arena, (offset, size) = span.place
        kept = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if arena is self.arena and self._access.is_given and 0 < kept < size:
            with self.lock:
                self._streams.released((offset + kept, size - kept))
                arena.give_back(offset + kept, size - kept)
                self._live[offset], span.place = num_bytes, (arena, (offset, kept))

    def release_graphs(self) -> None:
        """Takes back the memory of captured graphs."""
        for capture in list(self._graph_arenas):
            self.release_graph(capture)

    def release_graph(self, capture: int) -> None:
        """Takes back the memory of one captured graph, if it had any."""
        with self.lock:
            arena = self._graph_arenas.pop(capture, None)
            for span in () if arena is None else arena.clear():
                self.give_back(self.arena, span)

    def _return(self, arena: Arena, span: tuple[int, int], note: Callable[[tuple[int, int]], None]) -> None:
        self._live.pop(span[0], None)
        if arena is not self.arena or not capture_id(self._device):  # a capture begins after all earlier work
            note(span)
        if arena is not self.arena and arena not in self._graph_arenas.values():
            arena = self.arena  # the graph has been released meanwhile
        arena.give_back(*span)

    def _take_back_dropped(self) -> None:
        while self.dropped:
            self._return(*self.dropped.popleft(), self._streams.dropped)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the arena, behind the control block."""
        if tensor.device != self._device:
            return False
        if tensor.numel() == 0:  # torch gives an empty tensor no address
            return True
        offset = tensor.data_ptr() - self.base
        return self._start <= offset and offset + tensor.numel() * tensor.element_size() <= self._end

    def offset_of(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Byte offset of a tensor in the arena, and whether it lies in one live lease."""
        if tensor.numel() == 0:
            return self._start, True
        offset = tensor.data_ptr() - self.base
        end = offset + tensor.numel() * tensor.element_size()
        with self.lock:
            self._take_back_dropped()
            return offset, any(start <= offset and end <= start + size for start, size in self._live.items())

    def _collect_garbage(self) -> bool:
        """Collects leases that only cycles of dead objects hold, by Python's collector; whether there may be room now.

        That takes a tenth of a second and more. So that a loop of leases that do not fit does not only collect, it is
        skipped if no lease is live, and after one in vain for a multiple of its duration, while the leases stay.
        """
        with self.lock:
            leases = tuple(self._live)
        if not leases or (leases == self._fruitless and time.monotonic() < self._next_search_s):
            return False
        start_s = time.monotonic()
        gc.collect()
        end_s = time.monotonic()
        self._fruitless, self._next_search_s = leases, end_s + _SEARCH_WORTH * (end_s - start_s)
        return True

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased now, plus all bytes that captured graphs hold."""
        with self.lock:
            self._take_back_dropped()
            return self.arena.used_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured CUDA graphs hold, leased in them or not."""
        return sum(arena.capacity_bytes for arena in self._graph_arenas.values())
