"""The ranks that save or load together: what they tell each other, and how the error of one becomes that of all."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from symmoe.errors import CheckpointError, SymmoeError
from symmoe.symm_mem.bootstrap import Bootstrap

_Result = TypeVar("_Result")


class Peers:
    """A process group as JSON and bytes, or this process alone where there is none. Every method is collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._bootstrap = Bootstrap(group)
        self.rank, self.num_ranks = self._bootstrap.rank, self._bootstrap.num_ranks

    def together(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns here; if it fails on any rank, that rank's error on every rank.

        Raises:
            SymmoeError: of a rank; any other exception there becomes a CheckpointError that names it.
        """
        problem: SymmoeError | None = None
        try:
            result = work()
        except SymmoeError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
            problem = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            _reach(functools.partial(self._bootstrap.agree, problem))
            return result
        finally:
            del problem  # its traceback would keep this frame, and the frame it

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of any length, in rank order."""
        lengths = [int.from_bytes(length, "little") for length in self._exchange(len(payload).to_bytes(8, "little"), 8)]
        padded = self._exchange(payload, max(*lengths, 1))
        return [bytes_[:length] for bytes_, length in zip(padded, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, which must be fit for JSON, in rank order."""
        return [json.loads(payload) for payload in self.gather(json.dumps(value).encode())]

    def _exchange(self, payload: bytes, num_bytes: int) -> list[bytes]:
        return _reach(lambda: self._bootstrap.all_gather_bytes(payload, num_bytes=num_bytes))


def _reach(exchange: Callable[[], _Result]) -> _Result:
    try:
        return exchange()
    except RuntimeError as error:  # of the process group: a rank is gone, or does not answer
        raise CheckpointError(f"a rank could not be reached: {error}") from error
