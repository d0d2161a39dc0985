"""Which tensors a checkpoint holds, and which part of each this rank has.

A tensor of a checkpoint is cut along dimension 0 or not at all. A rank has a run of its rows: for weights of experts,
the rows of the rank's experts; for anything else, all rows. Ranks with the same rows have the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.grouped.linear import GroupedLinear
from symmoe.moe.ownership import named_parameters
from symmoe.symm_mem.heap import SymmetricHeap

_DISCRETE = re.compile(r"weight(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """A tensor [e, ...] that holds experts `start` to `start` + e - 1 of `num_experts`: a leaf of a nested dict."""

    tensor: torch.Tensor
    start: int
    num_experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor of this rank, and where it belongs in the checkpoint.

    Attributes:
        key: name in the checkpoint; several places may have the same.
        tensor: the live tensor, whose memory is read or filled.
        start: its first row in the whole tensor; None: it is the whole tensor.
        num_rows: rows of the whole tensor, if it is cut.
        is_row: it is one row of the whole tensor and has no dimension for that (a discrete weight).
    """

    key: str
    tensor: torch.Tensor
    start: int | None = None
    num_rows: int = 0
    is_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        own = tuple(self.tensor.shape)
        if self.start is None:
            return own
        return (self.num_rows, *own) if self.is_row else (self.num_rows, *own[1:])

    @property
    def rows(self) -> torch.Tensor:
        """The tensor with its dimension of rows, detached; a scalar is one row."""
        own = self.tensor.detach()
        return own.unsqueeze(0) if self.is_row or own.dim() == 0 else own

    @property
    def first(self) -> int:
        """The number of its first row in the whole tensor."""
        return self.start or 0

    def shares_rows_with(self, shape: tuple[int, ...]) -> bool:
        """Whether a state of an optimizer, whose whole shape is `shape`, is cut like this parameter."""
        return self.start is not None and len(shape) > 0 and shape[0] == self.num_rows

    def like(self, key: str, state: torch.Tensor) -> Place:
        """The place of an optimizer's state for this parameter."""
        if self.is_row:
            is_cut = state.dim() > 0
        else:
            is_cut = self.start is not None and state.dim() > 0 and len(state) == len(self.tensor)
        if not is_cut:
            return Place(key=key, tensor=state)
        return Place(key=key, tensor=state, start=self.start, num_rows=self.num_rows, is_row=self.is_row)


def places_of(model: nn.Module | Mapping[str, Any], *, rank: int, num_ranks: int) -> list[Place]:
    """Every tensor of a module's state dict, or of a nested dict of tensors, ExpertShards and modules.

    Args:
        model: experts belong to the EP group of the heap that their module, or the nearest around it, has as `heap`.
        rank, num_ranks: rank and size in the EP group of experts without a heap.

    Raises:
        ArgumentError: something in it has no place in a checkpoint.
    """
    return list(_walk("model", model, rank, num_ranks))


def _walk(prefix: str, node: Any, rank: int, num_ranks: int) -> Iterator[Place]:
    if isinstance(node, nn.Module):
        yield from _module_places(prefix, node, rank, num_ranks)
    elif isinstance(node, Mapping):
        for name, child in node.items():
            if not isinstance(name, str) or not name:
                raise ArgumentError(f"{prefix} has the key {name!r}; keys must be strings that are not empty")
            yield from _walk(f"{prefix}.{name}", child, rank, num_ranks)
    elif isinstance(node, ExpertShard):
        end = node.start + len(node.tensor) if node.tensor.dim() else -1
        if not 0 <= node.start <= end <= node.num_experts:
            raise ArgumentError(
                f"{prefix}: an ExpertShard of shape {list(node.tensor.shape)} that starts at {node.start} "
                f"is none of {node.num_experts} experts"
            )
        yield _plain(prefix, Place(key=prefix, tensor=node.tensor, start=node.start, num_rows=node.num_experts))
    elif isinstance(node, torch.Tensor):
        yield _plain(prefix, Place(key=prefix, tensor=node))
    else:
        raise ArgumentError(
            f"{prefix} is of type {type(node).__name__}; it must be a tensor, a module or a dict of them"
        )


def _module_places(prefix: str, module: nn.Module, rank: int, num_ranks: int) -> Iterator[Place]:
    heaps = {path: child.heap for path, child in module.named_modules() if _has_heap(child)}
    experts = {name for name, _, is_expert in named_parameters(module, shared=True) if is_expert}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{prefix}.{name} is of type {type(tensor).__name__}; only tensors have a place")
        key = f"{prefix}.{name}"
        if name not in experts:
            yield _plain(key, Place(key=key, tensor=tensor))
            continue
        path, _, leaf = name.rpartition(".")
        heap = _nearest(heaps, path)
        ep_rank, ep_size = (rank, num_ranks) if heap is None else (heap.rank, heap.num_ranks)
        owner, discrete = module.get_submodule(path), _DISCRETE.fullmatch(leaf)
        if discrete and isinstance(owner, GroupedLinear):
            first = ep_rank * owner.num_groups
            packed = key.removesuffix(leaf) + "weight"
            yield _plain(
                key,
                Place(
                    key=packed,
                    tensor=tensor,
                    start=first + int(discrete[1]),
                    num_rows=owner.num_groups * ep_size,
                    is_row=True,
                ),
            )
        else:
            start, num_rows = ep_rank * len(tensor), ep_size * len(tensor)
            yield _plain(key, Place(key=key, tensor=tensor, start=start, num_rows=num_rows))


def _has_heap(module: nn.Module) -> bool:
    return isinstance(getattr(module, "heap", None), SymmetricHeap)


def _nearest(heaps: Mapping[str, SymmetricHeap], path: str) -> SymmetricHeap | None:
    while True:
        if path in heaps:
            return heaps[path]
        if not path:
            return None
        path = path.rpartition(".")[0]


def _plain(name: str, place: Place) -> Place:
    if hasattr(place.tensor, "device_mesh"):
        raise ArgumentError(
            f"{name} is a DTensor; use torch.distributed.checkpoint for models on a mesh (docs/fsdp.md)"
        )
    if place.tensor.layout != torch.strided or place.tensor.is_meta:
        raise ArgumentError(
            f"{name} is a {place.tensor.layout} tensor on {place.tensor.device}; it has no plain memory"
        )
    return place
