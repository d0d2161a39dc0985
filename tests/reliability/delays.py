"""Delays between the steps of the protocol, so that ranks synchronise in orders that are rare otherwise."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from symmoe import kernels

# Kernels that peers see the effect of, or that see what peers have done.
STEPS = ("barrier", "send_", "push_", "pull_", "add_from_", "sum_home", "lay_out", "index_rows")


@contextmanager
def before_steps(device: torch.device, act: Callable[[str], None], names=None) -> Iterator[None]:
    """Calls `act(name)` before this process calls one of `names` (None: a step) of the kernels for this type of device,
    in any thread."""

    def hook(name: str, kernel: Callable, /, *args, **kwargs):
        if name.startswith(STEPS) if names is None else name in names:
            act(name)
        return kernel(*args, **kwargs)

    with kernels.hooked(device, hook):
        yield


@contextmanager
def dawdling(
    device: torch.device, seed: int, *, longest_s: float, share: float = 0.5
) -> Iterator[None]:
    """A context in which this rank sleeps up to `longest_s` before a random `share` of its steps."""
    generator = random.Random(seed)

    def act(name: str) -> None:
        if generator.random() < share:
            time.sleep(generator.random() * longest_s)

    with before_steps(device, act):
        yield
