"""The environment of a launcher, on a rank of a cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def environment_of(rank: int, num_ranks: int, **variables: str) -> Iterator[None]:
    """The environment variables of torchrun."""
    names = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    texts = {name: str(value) for name, value in names.items()}
    with mock.patch.dict(os.environ, texts, MASTER_ADDR="127.0.0.1", **variables):
        yield


@contextmanager
def launched(rank: int, num_ranks: int) -> Iterator[None]:
    """The environment of torchrun for accelerate, whose state is reset afterwards."""
    from accelerate.state import AcceleratorState

    with environment_of(rank, num_ranks, OMP_NUM_THREADS="1"):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
