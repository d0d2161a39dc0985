"""Delays between the steps of the protocol, so that ranks meet in orders that are rare by themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

# Kernels that peers see the effect of, or that see what peers have done.
STEPS = ("barrier", "send_", "push_", "pull_", "sum_home", "lay_out", "index_rows")


def step_names(kernels: ModuleType) -> list[str]:
    """The kernels of a module that begin with one of :data:`STEPS`."""
    return [name for name in kernels.__all__ if name.startswith(STEPS)]


@contextmanager
def before_steps(kernels: ModuleType, act: Callable[[str], None], names: Iterable[str] | None = None) -> Iterator[None]:
    """Calls `act(name)` before this process calls one of `names` (None: a step) in `kernels`, in any thread."""

    def wrapped(name: str, step: Callable) -> Callable:
        def call(*args, **kwargs):
            act(name)
            return step(*args, **kwargs)

        return call

    originals = {name: getattr(kernels, name) for name in (step_names(kernels) if names is None else names)}
    for name, step in originals.items():
        setattr(kernels, name, wrapped(name, step))
    try:
        yield
    finally:
        for name, step in originals.items():
            setattr(kernels, name, step)


@contextmanager
def dawdling(kernels: ModuleType, seed: int, *, longest_s: float, share: float = 0.5) -> Iterator[None]:
    """This rank sleeps up to `longest_s` before a random `share` of its steps."""
    generator = random.Random(seed)

    def act(name: str) -> None:
        if generator.random() < share:
            time.sleep(generator.random() * longest_s)

    with before_steps(kernels, act):
        yield
