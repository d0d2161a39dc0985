"""What a rank does with an unexpected exception in the middle of a collective call: its peers are waiting."""

from __future__ import annotations

from symmoe.errors import SymmoeError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import STOPS_RECOMPUTATION


class told:
    """A context around the part of a collective call after which the peers wait for this rank once more.

    An exception that leaves it (no memory, a hook of the user, a defect) makes the call fail on every rank, same as a
    wrong argument: the peers raise a SymmoeError with its class and text, and the next correct call works. This rank
    raises the exception unchanged. Errors that all ranks raise anyway pass, and so does KeyboardInterrupt, which is no
    Exception: a process that has to stop at once does not wait for peers.

    Args:
        heap: heap of the call.
        phase: name of the wait, for the heap's records.
    """

    __slots__ = ("_heap", "_phase")

    def __init__(self, heap: SymmetricHeap, phase: int) -> None:
        self._heap, self._phase = heap, phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not _is_known(error):
            error._symmoe_told = True  # type: ignore[attr-defined]  # contexts may be nested
            self._heap.tell(error, self._phase)


def _is_known(error: Exception) -> bool:
    """Whether all ranks raise the error already: a barrier has found it, or recomputation ends early."""
    if getattr(error, "_symmoe_told", False):
        return True
    if isinstance(error, SymmoeError):
        return error.flight is not None
    return isinstance(error, STOPS_RECOMPUTATION)
