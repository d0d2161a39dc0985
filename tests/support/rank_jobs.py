"""What ranks of the reliability suites' launcher do in its own tests."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from reliability import checkpoint_kills


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


def save_after_deleting(rank: int, num_ranks: int, directory: Path, *given) -> Iterator:
    """A save that deletes the old checkpoint of its step before the new one is there."""
    shutil.rmtree(directory / f"step-{checkpoint_kills.OLD:08d}", ignore_errors=True)
    yield from checkpoint_kills.save_until_killed(rank, num_ranks, directory, *given)
