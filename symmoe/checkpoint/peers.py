"""The ranks that save or load together: what they tell each other, and how the error of one becomes that of all."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from symmoe.errors import FAULT_BYTES, CheckpointError, PeerError, PeerLost, SymmoeError, decode, encode
from symmoe.symm_mem.bootstrap import Bootstrap

_Result = TypeVar("_Result")
_HEAD_BYTES = FAULT_BYTES + 8  # an error, or none, and the length of what follows


class Peers:
    """A process group that exchanges JSON and bytes; only this process if there is none. Every method is collective.

    A block `with peers:` is around all of them. If it is left by an exception that the others do not have (an
    interrupt), they learn it in their next exchange: all exchanges begin with the same message.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._bootstrap = Bootstrap(group)
        self._is_over = False  # nobody will wait for this rank again
        self.rank, self.num_ranks = self._bootstrap.rank, self._bootstrap.num_ranks

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or self._is_over:
            return
        with contextlib.suppress(CheckpointError):  # this rank's error comes back, or a peer is lost
            self._meet(CheckpointError(f"{kind.__name__} has ended the call"), b"", is_last=True)

    def together(self, work: Callable[[], _Result], *, is_last: bool = False) -> _Result:
        """What `work` returns here; if it fails on any rank, that rank's error on every rank.

        Args:
            is_last: no other exchange follows.

        Raises:
            SymmoeError: the error of a rank; any other exception there becomes a CheckpointError that names it.
            CheckpointError: a rank is gone, or did not come within the process group's timeout. The text names it.
        """
        return self._together(work, lambda result: b"", is_last=is_last)[0]

    def gather(self, work: Callable[[], bytes]) -> list[bytes]:
        """What `work` returns on every rank, in rank order. Raises as :meth:`together` does."""
        return self._together(work, lambda payload: payload)[1]

    def gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """Same as :meth:`gather`, for values that are fit for JSON."""
        return [json.loads(payload) for payload in self.gather(lambda: json.dumps(work()).encode())]

    def _together(
        self, work: Callable[[], _Result], payload_of: Callable[[_Result], bytes], *, is_last: bool = False
    ) -> tuple[_Result, list[bytes]]:
        problem: SymmoeError | None = None
        payload = b""
        try:
            result = work()
            payload = payload_of(result)
        except SymmoeError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - the others wait to hear of any error
            problem = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            payloads = self._meet(problem, payload, is_last=is_last)
            return result, payloads
        finally:
            del problem  # its traceback would keep this frame, and the frame it

    def _meet(self, problem: SymmoeError | None, payload: bytes, *, is_last: bool) -> list[bytes]:
        """Every rank's payload; or the first rank's problem, on every rank."""
        head = b"" if problem is None else encode(problem)
        head = head.ljust(FAULT_BYTES, b"\0") + len(payload).to_bytes(8, "little")

        def exchange() -> list[bytes]:
            try:
                heads = self._bootstrap.all_gather_bytes(head, num_bytes=_HEAD_BYTES)
                for rank, theirs in enumerate(heads):
                    if theirs[:FAULT_BYTES].strip(b"\0"):
                        raise decode(theirs[:FAULT_BYTES], rank=rank)
                lengths = [int.from_bytes(theirs[FAULT_BYTES:], "little") for theirs in heads]
                padded = self._bootstrap.all_gather_bytes(payload, num_bytes=max(lengths)) if any(lengths) else heads
                self._is_over = is_last
                return [theirs[:length] for theirs, length in zip(padded, lengths, strict=True)]
            except PeerError as error:
                self._is_over = True
                how = "is gone" if isinstance(error, PeerLost) else "has not come within the process group's timeout"
                raise CheckpointError(f"rank {error.rank} {how}: {error.__cause__}") from error
            except BaseException:
                self._is_over = True
                raise

        return exchange() if self.num_ranks == 1 else _to_the_end(exchange)


def _to_the_end(work: Callable[[], _Result]) -> _Result:
    """What `work` returns. An interrupt of this thread is raised when it has been done.

    Python raises KeyboardInterrupt, and what handlers of signals raise, between any two instructions of the main
    thread. An exchange that is interrupted cannot go on, so it runs in another thread.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []
    claim, done = threading.Lock(), threading.Lock()
    done.acquire()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # the start was interrupted after it had succeeded, and was made again
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        done.release()

    interrupt: BaseException | None = None
    while not (results or errors):
        try:
            threading.Thread(target=run, name="symmoe-checkpoint", daemon=True).start()
            done.acquire()
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    try:
        if interrupt is not None:
            raise interrupt
        if errors:
            raise errors.pop()
        return results.pop()
    finally:
        del interrupt  # its traceback would keep this frame, and the frame it
        errors.clear()
