"""Every exception that symmoe raises. All derive from :class:`SymmoeError`.

An error of one rank is sent to its peers as (class, text), so that every rank raises the same type in the same call.
Only classes in :data:`TRAVELLING` are sent; their constructor takes the finished text and nothing else.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import warnings
from typing import Any

import torch

logger = logging.getLogger("symmoe")


class SymmoeError(Exception):
    """Base class of every error of this package.

    Attributes:
        flight: this rank's flight record (docs/reliability.md) if a barrier has found the error, else None.
    """

    flight: dict[str, Any] | None = None


class ArgumentError(SymmoeError, ValueError):
    """An argument is wrong: shape, dtype, device, layout or value. The text names it, its value and valid ones."""


class ExpertIdError(ArgumentError):
    """`topk_idx` contains an id that is neither -1 nor in [0, num_experts)."""


class ConfigMismatch(SymmoeError):
    """Ranks disagree on a value that must be equal. The text lists the field and every rank's value."""


class CapacityError(SymmoeError):
    """A rank is routed more rows than its static capacity, and `overflow="raise"`."""


class HeapExhausted(SymmoeError):
    """The arena has no room for another lease. The text names the lease, its size, free bytes, and a sufficient
    heap."""


class HeapClosed(SymmoeError):
    """The heap was used after `close()`, or in a fork of the process that made it."""


class HeapSuspended(SymmoeError):
    """The heap was used between `suspend()` and `resume()`, when it has no memory."""


class ConcurrentUse(SymmoeError):
    """A thread made a call on a heap while another thread was in a call on it."""


class HeapPoisoned(SymmoeError):
    """A peer timed out or a rank aborted earlier; only `close()` works on this heap."""


class WrongResult(SymmoeError):
    """A result differs from its reference: wrong results are not timed."""


class StaleLease(SymmoeError):
    """A lease was used or released after its release, or its memory was used after its heap was closed."""


class StalePlan(SymmoeError):
    """Calls that share a plan came in a wrong order, or backward got a copy of forward's state."""


class StaleRows(SymmoeError):
    """Rows that a delayed weight gradient needs have been overwritten since its backward pass."""


class CheckpointError(SymmoeError):
    """A checkpoint cannot be read or written, or belongs to another model. The text names the file or the key."""


class BackendUnavailable(SymmoeError):
    """The symmetric heap cannot be built here. The text names the missing part and how to get it."""


class PeerError(SymmoeError):
    """A peer has ended, has aborted or was too late. The heap cannot be used again; `close()` is local from here on.

    Attributes:
        rank: the peer (rank in the EP group).
    """

    rank: int


class PeerTimeout(PeerError):
    """A peer did not arrive at a barrier in time.

    Attributes:
        node: the missing peer's node, if the group spans several; else None.
        phase: the barrier's name, e.g. "dispatch: arrived".
        expected: the epoch for which this rank waited.
        seen: the last epoch the peer had reached.
        bound, bound_s: name and value of the heap's bound, timeout_s or start_timeout_s.
        reported_by: the rank whose wait ended first and that reported it; None: this one.
        is_lost: whether the wait ended early, because the connection between nodes has closed.
    """

    def __init__(
        self,
        *,
        rank: int,
        phase: str,
        expected: int,
        seen: int,
        bound: tuple[str, float],
        reported_by: int | None = None,
        node: int | None = None,
        is_lost: bool = False,
    ) -> None:
        source = "" if reported_by is None else f" (reported by rank {reported_by})"
        where = "" if node is None else f" on node {node}"
        self.bound, self.bound_s = bound
        reason = (
            "and has closed its connection" if is_lost else f"within {self.bound}={self.bound_s:g}"
        )
        super().__init__(
            f"rank {rank}{where} did not reach '{phase}' {reason}: expected epoch {expected}, seen {seen}{source}"
        )
        self.rank = rank
        self.phase = phase
        self.expected = expected
        self.seen = seen
        self.reported_by = reported_by
        self.node = node
        self.is_lost = is_lost


class PeerAborted(PeerError):
    """A peer has aborted: it called `heap.abort`, or an exception left its `with heap:` block, for this `reason`."""

    def __init__(self, *, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} gave up: {reason}")
        self.rank = rank
        self.reason = reason


class PeerLost(PeerError):
    """The connection to a peer broke while a heap was under construction, or in collective work of the host: that
    peer's process has ended."""

    def __init__(self, *, rank: int, problem: str) -> None:
        super().__init__(f"lost rank {rank}: {problem}")
        self.rank = rank


def choice_problem(name: str, word: object, words: tuple[str, ...]) -> ArgumentError | None:
    """The error of an argument whose value is none of these words, or None."""
    if isinstance(word, str) and word in words:  # an array would compare with each element
        return None
    return ArgumentError(f"{name} ({word!r}) must be one of {words}")


def first_problem(*rules: tuple[object, str]) -> ArgumentError | None:
    """The error of the first rule that is broken, of (whether it is, the text), or None."""
    return next((ArgumentError(text) for is_broken, text in rules if is_broken), None)


_FOLDERS = [os.path.dirname(str(module.__file__)) for module in (torch, sys.modules["symmoe"])]
_INSIDE = (*[folder + os.sep for folder in _FOLDERS], contextlib.__file__)


def users_line() -> tuple[str, int]:
    """File and number of the innermost line outside of this package and torch."""
    frame = inspect.currentframe()
    # contextlib's frames lie between when a context of the package runs.
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    assert frame is not None  # in CPython
    return frame.f_code.co_filename, frame.f_lineno


def warn(text: str, line: tuple[str, int] | None = None) -> None:
    """A UserWarning at the user's line. Python shows it once for each line and text."""
    file, number = line or users_line()
    warnings.warn_explicit(text, UserWarning, file, number, registry=_shown.setdefault(file, {}))


_shown: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}  # Python's records, by file


def raise_for(problem: Exception | None) -> None:
    """Raises the problem if there is one.

    The caller must keep no name for it: a name would tie the traceback, and all tensors in its frames, into a cycle.
    """
    try:
        if problem is not None:
            raise problem
    finally:
        del problem


# The index travels to peers; only append.
TRAVELLING: tuple[type[SymmoeError], ...] = (
    SymmoeError,
    ArgumentError,
    ExpertIdError,
    ConfigMismatch,
    CapacityError,
    HeapExhausted,
    HeapClosed,
    HeapPoisoned,
    StaleLease,
    StalePlan,
    BackendUnavailable,
    CheckpointError,
    HeapSuspended,
)

FAULT_BYTES = 512  # one encoded error: 2 bytes class, 2 bytes length, UTF-8 text, zero padding


def encode(error: SymmoeError) -> bytes:
    """An error as exactly :data:`FAULT_BYTES` bytes; a long text is cut."""
    kind = TRAVELLING.index(type(error)) if type(error) in TRAVELLING else 0
    text = str(error).encode()[: FAULT_BYTES - 4]
    return (
        (kind + 1).to_bytes(2, "little")
        + len(text).to_bytes(2, "little")
        + text.ljust(FAULT_BYTES - 4, b"\0")
    )


def decode(payload: bytes, *, rank: int) -> SymmoeError:
    """The error that rank `rank` sent, in its class, with the rank before the text; -1: no single rank."""
    kind = int.from_bytes(payload[:2], "little") - 1  # stored from 1, so that no error is all zeros
    cls = TRAVELLING[kind] if 0 <= kind < len(TRAVELLING) else SymmoeError
    return cls(decode_text(payload) if rank < 0 else f"on rank {rank}: {decode_text(payload)}")


def decode_text(payload: bytes) -> str:
    """The text of an encoded error."""
    length = min(int.from_bytes(payload[2:4], "little"), FAULT_BYTES - 4)
    return payload[4 : 4 + length].decode(errors="replace")
