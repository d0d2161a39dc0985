"""The order of a heap's calls on CUDA streams and in graphs, and of the threads and processes that make them ("Streams"
in docs/design/trips.md, "Threads and processes" in docs/design/faults.md)."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module

import torch

from symmoe.errors import ConcurrentUse, HeapClosed, HeapSuspended
from symmoe.program.builder import after_other_stream, builder, on_branch
from symmoe.torch_internals import current_stream, is_capturing

_Mark = tuple[int, torch.cuda.Event]  # a point in the work of a stream


@dataclass(slots=True)
class _Order:
    """The known calls and reuses of memory, outside of graphs or within the capture of one."""

    last: int | None = None  # the stream of the last call
    last_mark: _Mark | None = None  # the end of the last call; kept once there are two streams
    streams: set[int] = field(default_factory=set)  # streams of calls so far
    released: list[tuple[int, int, _Mark]] = field(
        default_factory=list
    )  # (start, end, when the last user was done)


class Branch:
    """A stream that forks from the current stream and joins it again. A branch without a stream changes no order."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._was_entered = False

    def point(self) -> torch.cuda.Event | None:
        """A point after all work of the current stream so far; inside of :meth:`after`, of the branch."""
        return (
            None
            if self._stream is None
            else _record(torch.cuda.current_stream(self._stream.device))
        )

    @contextmanager
    def after(self, point: torch.cuda.Event | None) -> Iterator[None]:
        """Work launched in this context runs on the branch, after its earlier work and after the point."""
        self._was_entered = True
        with on_branch():
            after_other_stream()
            if self._stream is None:
                yield
                return
            if point is not None:
                _wait(self._stream, point)
            with torch.cuda.stream(self._stream):
                yield

    def wait_for(self, point: torch.cuda.Event | None) -> None:
        """Orders later work of the current stream after the point."""
        after_other_stream()
        if self._stream is not None and point is not None:
            _wait(torch.cuda.current_stream(self._stream.device), point)

    def join(self) -> None:
        """Orders later work of the current stream after all work of the branch."""
        if self._was_entered:
            self.wait_for(None if self._stream is None else _record(self._stream))


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after all work of the stream so far."""
    current = builder()
    event: torch.cuda.Event = stream.record_event() if current is None else current.event(stream)
    return event


def _wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Orders later work of the stream after the event."""
    if (current := builder()) is not None:
        current.wait(stream, event)
    else:
        stream.wait_event(event)


class StreamOrder:
    """Orders a CUDA heap's calls and the reuse of its memory over streams. Calls in a capture have their own order: a
    capture begins after all earlier calls, and the user orders replays and other calls."""

    raises_at_once = (
        False  # whether the host knows a barrier's result at its end; else at its next check
    )
    eager_thread = 0  # the thread whose turn is on a stream that captures no graph; 0: none

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager = _Order()
        self._captured: tuple[int, _Order] = (0, self._eager)  # the last capture's id and order

    @functools.cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """A stream for callers' work in parallel with the heap's calls, always the same; None on CPUs."""
        return torch.cuda.Stream(self._device)

    @functools.cached_property
    def wire_stream(self) -> torch.cuda.Stream:
        """A high-priority stream, whose kernels start first: it moves rows while GEMMs run."""
        return torch.cuda.Stream(self._device, priority=-1)

    @functools.cached_property
    def rail_stream(self) -> torch.cuda.Stream:
        """A high-priority stream for transfers between nodes."""
        return torch.cuda.Stream(self._device, priority=-1)

    def branch(self) -> Branch:
        """The branch on which a collective call moves rows while GEMMs run. Joined before the call ends."""
        return Branch(self.wire_stream)

    @property
    def capture(self) -> int:
        """The number of the graph that the current stream is capturing, for Memory.release_graphs; 0: none."""
        return 0 if self.eager_thread == threading.get_ident() else capture_id(self._device)

    def begin_call(self) -> None:
        """Starts a collective call after the end of the last one, on any stream."""
        order = self._notice_stream()
        stream = current_stream(self._device.index)
        if stream != order.last:
            self._wait_for(order.last_mark)
            order.last = stream
            order.streams.add(stream)

    def end_call(self) -> None:
        """Ends a collective call: the next one comes after the work of the current stream so far."""
        order = self._order()
        if order.last_mark is not None:
            order.last_mark = _mark(torch.cuda.current_stream(self._device))

    def is_idle(self) -> bool:
        """Whether the current stream has no work left. Raises the error that stopped the device."""
        return torch.cuda.current_stream(self._device).query()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Work launched in this context waits for no other GPU work, and is complete at the context's end."""
        stream = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        torch.cuda.synchronize(self._device)

    def release(self, span: tuple[int, int, bool]) -> None:
        """Records that the current stream is done with (offset, size, was_dropped). was_dropped: any stream of earlier
        calls may have used it last."""
        offset, size, was_dropped = span
        order = self._order() if was_dropped else self._notice_stream()
        if order.last_mark is not None:
            streams = (
                [torch.cuda.ExternalStream(handle, self._device) for handle in order.streams]
                if was_dropped
                else [torch.cuda.current_stream(self._device)]
            )
            order.released += [(offset, offset + size, _mark(stream)) for stream in streams]

    def acquire(self, span: tuple[int, int]) -> None:
        """Waits for other streams that used (offset, size), before the current stream uses it."""
        order = self._notice_stream()
        start = span[0]
        end = sum(span)
        if order.last_mark is None:
            return
        still_released = []
        for other_start, other_end, mark in order.released:
            if start < other_end and other_start < end:
                self._wait_for(mark)
                # Only the part outside still needs a wait: whole spans would pile up where sizes vary.
                still_released += [
                    part
                    for part in ((other_start, start, mark), (end, other_end, mark))
                    if part[0] < part[1]
                ]
            else:
                still_released.append((other_start, other_end, mark))
        order.released = still_released

    def _order(self) -> _Order:
        if not (capture := self.capture):
            return self._eager
        if capture != self._captured[0]:
            self._captured = capture, _Order()
        return self._captured[1]

    def _notice_stream(self) -> _Order:
        """Records the current stream. Marks are kept once it differs from the last call's stream."""
        order = self._order()
        if (
            order.last_mark is None
            and order.last is not None
            and current_stream(self._device.index) != order.last
        ):
            # There are no marks yet: all work so far counts as the last call.
            order.last_mark = _mark(torch.cuda.ExternalStream(order.last, device=self._device))
            order.released = [(0, 1 << 62, order.last_mark)]
        return order

    def _wait_for(self, mark: _Mark | None) -> None:
        if mark is not None and mark[0] != current_stream(self._device.index):
            torch.cuda.current_stream(self._device).wait_event(mark[1])


class NoStreams:
    """Replaces StreamOrder for memory that only the host uses, in order and at once."""

    side_stream = rail_stream = None
    capture = 0
    raises_at_once = True
    eager_thread = 0
    at_once = nullcontext
    is_idle = functools.partial(bool, 1)
    branch = functools.partial(Branch, None)

    synchronize = acquire = release = bool  # nothing to wait for: does nothing, without a frame


Streams = StreamOrder | NoStreams


def _mark(stream: torch.cuda.Stream) -> _Mark:
    return stream.cuda_stream, stream.record_event()


# Imported on first use: the driver's module needs Triton, which is optional on CPUs.
_driver = functools.cache(functools.partial(import_module, "symmoe.kernels.launch.driver"))


def capture_id(device: torch.device) -> int:
    """The number of the CUDA graph that the current stream is capturing; 0 if there is none."""
    if device.type != "cuda" or not is_capturing():
        return 0
    status = ctypes.c_int()
    number = ctypes.c_ulonglong()
    arguments = current_stream(device.index), ctypes.byref(status), ctypes.byref(number)
    driver = _driver()
    driver.check(driver.library().cuStreamGetCaptureInfo(*arguments), "cuStreamGetCaptureInfo")
    return number.value


class Access:
    """The right to use one heap. As a context it is a turn of one thread, which may enter it again. Another thread
    raises and does not wait: the order of two threads could differ between ranks.

    Attributes:
        is_usable: whether this process has made the heap. A fork of it maps the same arenas, and must not touch them.
        is_open: whether the heap also has memory, and is not suspended.
    """

    def __init__(self) -> None:
        self.is_usable = self.is_open = True
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._thread: int | None = None  # the thread of the last turn
        # Reading the process id in every call would cost a system call.
        os.register_at_fork(after_in_child=functools.partial(_disable_in_fork, weakref.ref(self)))

    def check(self) -> None:
        """Raises HeapClosed if another process has made the heap, HeapSuspended if the heap has no memory."""
        if not self.is_usable:
            raise HeapClosed(
                f"the symmetric heap is that of process {self._pid}, of which this process ({os.getpid()}) is a fork: "
                "it has no rank of its own"
            )
        if not self.is_open:
            raise HeapSuspended(
                "the symmetric heap is suspended: call heap.resume() on all ranks before anything else"
            )

    @property
    def is_suspended(self) -> bool:
        """Whether this process has made the heap and the heap has no memory."""
        return self.is_usable and not self.is_open

    def __enter__(self, even_suspended: bool = False) -> None:
        if not self.is_open and not even_suspended:
            self.check()
        if not self._turn.acquire(blocking=False):
            owner = {thread.ident: thread.name for thread in threading.enumerate()}.get(
                self._thread, self._thread
            )
            raise ConcurrentUse(
                f"thread '{threading.current_thread().name}' calls a heap on which thread '{owner}' "
                "is in a call: threads take turns on a heap, in the same order on all ranks, or have a heap each"
            )
        self._thread = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._turn.release()

    @contextmanager
    def even_suspended(self) -> Iterator[None]:
        """A turn that a suspended heap allows, too."""
        self.__enter__(True)
        try:
            yield
        finally:
            self.__exit__()


class OneCall:
    """The context of a collective call's kernels on GPUs: a thread's turn, and within it the call's place in the order
    of streams, which the lock guards. (On CPUs Access is this context.)"""

    def __init__(self, access: Access, memory: threading.RLock, streams: StreamOrder) -> None:
        self._access = access
        self._memory = memory
        self._streams = streams
        self._depth = 0  # parts of a call share its place

    def __enter__(self) -> None:
        self._access.__enter__()
        try:
            if self._depth == 0:
                # Another thread reads for itself whether its stream captures a graph.
                self._streams.eager_thread = 0 if self._streams.capture else threading.get_ident()
                with self._memory:
                    self._streams.begin_call()
        except BaseException:
            self._leave()
            raise
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        try:
            if self._depth == 0:
                with self._memory:
                    self._streams.end_call()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._depth == 0:
            self._streams.eager_thread = 0
        self._access.__exit__()


def _disable_in_fork(reference: weakref.ref[Access]) -> None:
    access = reference()
    if access is not None:
        access.is_usable = access.is_open = False
