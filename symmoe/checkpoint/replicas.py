"""Whether ranks that have the same part of a model have the same bits of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from symmoe.errors import CheckpointError


def digest(tensor: torch.Tensor) -> str:
    """Of the bits of a tensor. Synchronises the host."""
    host = tensor.detach().to("cpu").contiguous()
    return hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def check_replicas(parts: Iterable[tuple[str, Sequence[int]]], digests: Sequence[Mapping[str, str]]) -> None:
    """Raises if the bits of a part differ, the same on every rank.

    Args:
        parts: the key and the ranks of each part, the same on every rank.
        digests: by rank, those of its parts that others have as well, by key.

    Raises:
        CheckpointError: names the key and two ranks.
    """
    for key, (first, *others) in parts:
        for rank in others:
            if digests[rank][key] != digests[first][key]:
                raise CheckpointError(
                    f"{key} differs between rank {first} and rank {rank}, which must have the same bits (unless it "
                    "is an expert's: then its module has to say holds_experts = True)"
                )
