"""Operators of torch whose results the host has to see."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from worker import Watching

READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "bincount",
    "_unique2",
}


class NoReads(Watching):
    """Notes operations whose result the host has to see, or whose result's shape depends on values."""

    num_operations = 0

    def look(self, func, given, result) -> None:
        name = func.overloadpacket.__name__
        self.num_operations += 1
        indices = (
            [i for i in given[0][1] if i is not None]
            if name in ("index", "index_put", "index_put_")
            else []
        )
        if name in READS or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.noted.append(name)


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
