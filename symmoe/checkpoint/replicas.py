"""Whether ranks that have the same part of a model have the same bits of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from symmoe.errors import CheckpointError

_DIGEST_BYTES = 32


def digest(tensor: torch.Tensor) -> bytes:
    """Of the bits of a tensor. Synchronises the host."""
    host = tensor.detach().to("cpu").contiguous()
    return hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy().data).digest()


def check_replicas(parts: Iterable[tuple[str, Sequence[int]]], digests: Sequence[bytes]) -> None:
    """Raises if the bits of a part differ, the same on every rank.

    Args:
        parts: the key and the ranks of each part that several ranks have, the same on every rank.
        digests: by rank, those of its parts in this order, one after the other.

    Raises:
        CheckpointError: names the key and two ranks.
    """
    positions = [0] * len(digests)
    for key, ranks in parts:
        expected = None
        for rank in ranks:
            found = digests[rank][positions[rank] : positions[rank] + _DIGEST_BYTES]
            positions[rank] += _DIGEST_BYTES
            expected = expected or found
            if found != expected:
                raise CheckpointError(
                    f"{key} differs between rank {ranks[0]} and rank {rank}, which must have the same bits (unless it "
                    "is an expert's: then its module has to say holds_experts = True)"
                )
