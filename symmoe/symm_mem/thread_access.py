"""Who may use a heap: the process that has made it, and one of its threads at a time."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial

from symmoe.errors import ConcurrentUse, HeapClosed
from symmoe.symm_mem.streams import NoStreams, StreamOrder


class Access:
    """The right to use one heap. As a context it is a turn of one thread, which may enter it again.

    Another thread that comes meanwhile raises and does not wait: all ranks make their calls in one order, and the order
    of two threads would differ from rank to rank.

    Attributes:
        is_given: whether this process has made the heap. A process forked from it maps the same arenas, and must
            not touch them.
    """

    def __init__(self) -> None:
        self.is_given = True
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._thread: int | None = None  # the thread of the last turn
        # To ask for the process id in every call would cost a system call.
        os.register_at_fork(after_in_child=partial(_take_away, weakref.ref(self)))

    def check(self) -> None:
        """Raises HeapClosed if this process has not made the heap."""
        if not self.is_given:
            raise HeapClosed(
                f"the symmetric heap is that of process {self._pid}, of which this process ({os.getpid()}) is a fork: "
                "it has no rank of its own"
            )

    def __enter__(self) -> None:
        if not self.is_given:
            self.check()
        if not self._turn.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            other = names.get(self._thread, self._thread)
            raise ConcurrentUse(
                f"thread '{threading.current_thread().name}' calls a heap on which thread '{other}' "
                "is in a call: threads take turns on a heap, in the same order on all ranks, or have a heap each"
            )
        self._thread = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._turn.release()


class OneCall:
    """The context of a collective call's kernels: a thread's turn, and in it their place in the order of streams.

    Args:
        memory: lock of `streams`.
    """

    def __init__(self, access: Access, memory: threading.RLock, streams: StreamOrder | NoStreams) -> None:
        self._access, self._memory, self._streams = access, memory, streams

    def __enter__(self) -> None:
        self._access.__enter__()
        try:
            with self._memory:
                self._streams.begin_call()
        except BaseException:
            self._access.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            with self._memory:
                self._streams.end_call()
        finally:
            self._access.__exit__()


def _take_away(reference: weakref.ref[Access]) -> None:
    access = reference()
    if access is not None:
        access.is_given = False
