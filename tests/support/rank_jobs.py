"""What ranks of the reliability suites' launcher do in its own tests."""

import os
import time
from collections.abc import Iterator


def sleep_on_the_last_rank(rank: int, num_ranks: int) -> Iterator[str]:
    yield "here"
    if rank == num_ranks - 1:
        time.sleep(3600.0)
    yield "there"


def raise_on_the_last_rank(rank: int, num_ranks: int) -> Iterator[str]:
    if rank == num_ranks - 1:
        raise ZeroDivisionError("on purpose")
    yield "fine"


def yield_pid(rank: int, num_ranks: int) -> Iterator[int]:
    yield os.getpid()
