"""The ranks that save or load together: exchanges JSON between them, and raises one rank's error on all."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from symmoe.errors import (
    FAULT_BYTES,
    CheckpointError,
    PeerError,
    PeerLost,
    SymmoeError,
    decode,
    encode,
)
from symmoe.symm_mem.bootstrap import Bootstrap

_Result = TypeVar("_Result")


@dataclass
class Exchange:
    """Values that ranks exchange at the end of a step, in JSON."""

    local: Any = None
    by_rank: list[Any] = field(default_factory=list)  # set after the step


class Peers(contextlib.AbstractContextManager["Peers"]):
    """A process group that exchanges JSON. Every method is collective.

    A block `with peers:` surrounds all calls. If an exception of one rank (an interrupt) ends its block, the next
    exchange reports this to the other ranks: all exchanges begin with the same message. The group may be a
    heap's `bootstrap`; None: the default one, or only this process if there is none.
    """

    def __init__(self, group: dist.ProcessGroup | Bootstrap | None) -> None:
        self._bootstrap = group if isinstance(group, Bootstrap) else Bootstrap(group)
        self._is_over = False  # no peer will wait for this rank again
        self.rank = self._bootstrap.rank
        self.num_ranks = self._bootstrap.num_ranks

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._is_over:
            return
        with contextlib.suppress(CheckpointError):  # this rank's own error, or a lost peer
            self._gather(CheckpointError(f"{kind.__name__} has ended the call"), b"", is_last=True)

    @contextlib.contextmanager
    def step(self, *, is_last: bool = False) -> Iterator[Exchange]:
        """A block of work on every rank; at its end, ranks synchronise and exchange values. `is_last`: no other
        exchange follows. SymmoeError: one rank's error, on every rank; any other exception becomes a CheckpointError,
        and so does a rank that is lost, or does not arrive within the process group's timeout. The text
        names the rank."""
        exchange = Exchange()
        problem: SymmoeError | None = None
        message = b""
        try:
            yield exchange
            message = json.dumps(exchange.local).encode()
        except SymmoeError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - peers must receive any error
            problem = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            exchange.by_rank = [
                json.loads(data) for data in self._gather(problem, message, is_last=is_last)
            ]
        finally:
            del problem  # its traceback refers to this frame: together they would be a cycle

    def run(self, work: Callable[[], _Result], *, is_last: bool = False) -> _Result:
        """Runs `work` as one :meth:`step`; returns its result."""
        with self.step(is_last=is_last):
            return work()

    def _gather(self, problem: SymmoeError | None, message: bytes, *, is_last: bool) -> list[bytes]:
        """Every rank's message; or the first rank's problem, on every rank."""
        payload = (bytes(FAULT_BYTES) if problem is None else encode(problem)) + message

        def gather() -> list[bytes]:
            self._is_over = True  # unless every rank arrives, without a problem
            try:
                payloads = self._bootstrap.gather_bytes(payload)
            except PeerError as error:
                reason = (
                    "is gone"
                    if isinstance(error, PeerLost)
                    else "has not come within the process group's timeout"
                )
                raise CheckpointError(f"rank {error.rank} {reason}: {error.__cause__}") from error
            for rank, data in enumerate(payloads):
                if data[:FAULT_BYTES].strip(b"\0"):
                    raise decode(data[:FAULT_BYTES], rank=rank)
            self._is_over = is_last
            return [data[FAULT_BYTES:] for data in payloads]

        return gather() if self.num_ranks == 1 else _shielded(gather)


def _shielded(work: Callable[[], _Result]) -> _Result:
    """Completes `work` in another thread, and only then raises an interrupt of this thread. An interrupted exchange
    could not continue: Python raises KeyboardInterrupt, and exceptions of signal handlers, between any two
    instructions of the main thread."""
    result = Future[_Result]()
    claim = threading.Lock()

    def run(result: Future[_Result]) -> None:
        if not claim.acquire(blocking=False):
            return  # an interrupt repeated a start that had succeeded
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            result.set_exception(error)

    interrupt: BaseException | None = None
    while not result.done():
        try:
            threading.Thread(
                target=run, args=(result,), name="symmoe-checkpoint", daemon=True
            ).start()
            wait([result])
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    try:
        if interrupt is not None:
            raise interrupt
        return result.result()
    finally:
        # Their tracebacks refer to this frame: together they would be a cycle.
        del interrupt, result
