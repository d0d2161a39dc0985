"""What the peers' modules share."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from symmoe.tools.bench.timing import Variant


@dataclass(frozen=True)
class Measured:
    """A variant of a peer.

    Attributes:
        suite: the suite that it belongs to.
        leaving_bytes: bytes of rows that leave this rank in a call; 0: not counted.
    """

    suite: str
    variant: Variant
    leaving_bytes: int = 0


def missing(package: str, device: torch.device, num_ranks: int, *, least_ranks: int = 1) -> str:
    """Why a package for GPUs cannot be measured here, as far as that shows without importing it; or ""."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if device.type != "cuda":
        return f"{package} needs a GPU, this is a CPU"
    if num_ranks < least_ranks:
        return f"{package} needs at least {least_ranks} ranks, this is {num_ranks}"
    return ""
