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
class Told:
    """Values that ranks exchange at the end of a step, in JSON."""

    mine: Any = None
    by_rank: list[Any] = field(default_factory=list)  # set after the step


class Peers(contextlib.AbstractContextManager["Peers"]):
    """A process group that exchanges JSON. Every method is collective.

    A block `with peers:` surrounds all calls. If an exception of one rank (an interrupt) ends its block, the next
    exchange signals this to the other ranks: all exchanges begin with the same message. The group may be a
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
            self._meet(CheckpointError(f"{kind.__name__} has ended the call"), b"", is_last=True)

    @contextlib.contextmanager
    def step(self, *, is_last: bool = False) -> Iterator[Told]:
        """A block of work on every rank; at its end, ranks synchronise and exchange values. `is_last`: no other
        exchange follows. SymmoeError: one rank's error, on every rank; any other exception becomes a CheckpointError,
        and so does a rank that is lost, or does not arrive within the process group's timeout. The text
        names the rank."""
        told = Told()
        problem: SymmoeError | None = None
        message = b""
        try:
            yield told
            message = json.dumps(told.mine).encode()
        except SymmoeError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - the others must receive any error
            problem = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            told.by_rank = list(map(json.loads, self._meet(problem, message, is_last=is_last)))
        finally:
            del problem  # its traceback would keep this frame, and the frame it

    def together(self, work: Callable[[], _Result], *, is_last: bool = False) -> _Result:
        """Runs `work` as one :meth:`step`; its result."""
        with self.step(is_last=is_last):
            return work()

    def _meet(self, problem: SymmoeError | None, message: bytes, *, is_last: bool) -> list[bytes]:
        """Every rank's message; or the first rank's problem, on every rank."""
        mine = (bytes(FAULT_BYTES) if problem is None else encode(problem)) + message

        def exchange() -> list[bytes]:
            self._is_over = True  # unless every rank arrives, without a problem
            try:
                told = self._bootstrap.gather_bytes(mine)
                for rank, theirs in enumerate(told):
                    if theirs[:FAULT_BYTES].strip(b"\0"):
                        raise decode(theirs[:FAULT_BYTES], rank=rank)
                self._is_over = is_last
                return [theirs[FAULT_BYTES:] for theirs in told]
            except PeerError as error:
                how = (
                    "is gone"
                    if isinstance(error, PeerLost)
                    else "has not come within the process group's timeout"
                )
                raise CheckpointError(f"rank {error.rank} {how}: {error.__cause__}") from error

        return exchange() if self.num_ranks == 1 else _to_the_end(exchange)


def _to_the_end(work: Callable[[], _Result]) -> _Result:
    """Completes `work`, returns its result, and only then raises an interrupt of this thread: Python raises
    KeyboardInterrupt, and exceptions of signal handlers, between any two instructions of the main thread. An
    interrupted exchange cannot continue, so it runs in another thread."""
    done = Future[_Result]()
    claim = threading.Lock()

    def run(done: Future[_Result]) -> None:
        if not claim.acquire(blocking=False):
            return  # the start succeeded, was interrupted, and was repeated
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    interrupt: BaseException | None = None
    while not done.done():
        try:
            threading.Thread(
                target=run, args=(done,), name="symmoe-checkpoint", daemon=True
            ).start()
            wait([done])
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    try:
        if interrupt is not None:
            raise interrupt
        return done.result()
    finally:
        del interrupt, done  # tracebacks in them would keep this frame, and the frame them
