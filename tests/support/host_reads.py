"""Operators of torch whose results the host has to see."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "_unique2"}


class NoReads(TorchDispatchMode):
    """Notes operations whose result the host has to see, or whose result's shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        self.num_operations += 1
        indices = [i for i in args[1] if i is not None] if name in ("index", "index_put", "index_put_") else []
        if name in READS or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
