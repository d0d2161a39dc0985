"""The kernels for tensors on "meta", which have shapes and no memory: every name is a function that does nothing."""

from __future__ import annotations


def nothing(*args: object, **options: object) -> int:
    """Takes the place of every kernel; a kernel with a result returns a number."""
    return 0


def read_addresses(*args: object, **options: object) -> None:
    """No tensor without memory has an address."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return nothing
