"""What the ranks of a job tell each other over torchrun's store: that works where neither gloo nor NCCL does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any


class RanksMissing(Exception):
    """Ranks did not answer in time.

    Attributes:
        ranks: which.
    """

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        super().__init__(what)
        self.ranks = tuple(ranks)


class Board:
    """Where every rank puts what it has found, and reads what the others have. Methods are collective.

    Args:
        store: of torch.
        wait_s: how long ranks wait for each other, in each call.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, wait_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._wait_s = store, rank, num_ranks, wait_s

    def gather(self, what: str, mine: Any) -> list[Any]:
        """What every rank has put under that name, as JSON has it, in rank order.

        Raises:
            RanksMissing: some have not.
        """
        everybody = range(self._num_ranks)
        self._store.set(self._key(what, self._rank), json.dumps(mine))
        self._wait(what, everybody)
        return [json.loads(self._store.get(self._key(what, rank))) for rank in everybody]

    def leave(self) -> None:
        """Returns when rank 0 leaves, on rank 0 when the others do, or when that takes too long: torchrun ends a node's
        ranks when one has failed, and rank 0 may keep the store."""
        self._store.set(self._key("leaves", self._rank), "null")
        with contextlib.suppress(RanksMissing):
            self._wait("leaves", range(self._num_ranks) if self._rank == 0 else [0])

    def _wait(self, what: str, ranks: Iterable[int]) -> None:
        deadline, missing = time.monotonic() + self._wait_s, []
        for rank in ranks:
            try:
                left_s = max(1e-3, deadline - time.monotonic())
                self._store.wait([self._key(what, rank)], timedelta(seconds=left_s))
            except RuntimeError:  # of some stores a DistError, of others not
                missing.append(rank)
        if missing:
            raise RanksMissing(what, missing)

    @staticmethod
    def _key(what: str, rank: int) -> str:
        return f"symmoe-doctor/{what}/{rank}"
