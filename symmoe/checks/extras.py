"""Packages that only a part of symmoe needs, by the extra of pyproject.toml that installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """A block that imports packages of an extra. ImportError: one is missing; the text names the fix."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'symmoe[{name}]'"
        raise ImportError(text, name=error.name) from error
