"""Which tensors a checkpoint holds, and which part of each this rank has: a run of rows of dimension 0. For weights of
experts these are of the rank's experts; for anything else, all rows. Ranks with the same rows have the same bits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError, CheckpointError
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.parameters import named_parameters
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
    """A tensor of this rank, and where it belongs in the checkpoint."""

    key: str  # name in the checkpoint; several places may have the same
    tensor: torch.Tensor  # the live tensor, whose memory is read or filled
    start: int | None = None  # its first row in the whole tensor; None: it is the whole tensor
    num_rows: int = 0  # rows of the whole tensor, if it is cut
    is_row: bool = (
        False  # it is one row of the whole tensor and has no dimension for that (a discrete weight)
    )

    @property
    def rows(self) -> torch.Tensor:
        """The tensor, detached, with a dimension of rows if it is cut."""
        return self.tensor.detach()[None] if self.is_row else self.tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        own = tuple(self.rows.shape)
        return own if self.start is None else (self.num_rows, *own[1:])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where its first element is in the whole tensor."""
        return (self.start or 0, *[0] * (self.rows.dim() - 1)) if self.shape else ()

    def like(self, key: str, state: torch.Tensor) -> Place:
        """The place of an optimizer's state for this parameter."""
        is_cut = (
            self.start is not None
            and state.dim() > 0
            and (self.is_row or len(state) == len(self.tensor))
        )
        return replace(self, key=key, tensor=state) if is_cut else Place(key=key, tensor=state)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a state for this parameter has here, if `shape` is that of the whole."""
        if self.start is None or shape[:1] != (self.num_rows,):
            return shape
        return shape[1:] if self.is_row else (len(self.tensor), *shape[1:])


def places_of(model: nn.Module | Mapping[str, Any], *, rank: int, num_ranks: int) -> list[Place]:
    """Every tensor of a module's state dict, or of a nested dict of tensors, ExpertShards and modules. Experts are of
    the EP group of the heap that their module, or the nearest around it, has as `heap`; without one, of that of `rank`
    and `num_ranks`. ArgumentError: something in it has no place in a checkpoint."""
    places = list(_walk("model", model, rank, num_ranks))
    for place in places:
        if hasattr(place.tensor, "device_mesh"):
            raise ArgumentError(
                f"{place.key} is a DTensor; use torch.distributed.checkpoint for models on a mesh (docs/fsdp.md)"
            )
        if place.tensor.layout != torch.strided or place.tensor.is_meta:
            raise ArgumentError(
                f"{place.key} is a {place.tensor.layout} tensor on {place.tensor.device}; it has no plain memory"
            )
    return places


def rows_problem(runs: Iterable[tuple[int, int]], num_rows: int) -> str | None:
    """What is wrong with (start, length) runs that must cover rows 0 to `num_rows` - 1 once, or None."""
    covered = 0
    for start, length in sorted(runs):
        if start != covered:
            wrong = "there twice" if start < covered else "missing"
            return f"rows {min(start, covered)} to {max(start, covered) - 1} are {wrong}"
        covered += length
    return None if covered == num_rows else f"rows {covered} to {num_rows - 1} are missing"


def digest(tensor: torch.Tensor) -> str:
    """sha256 of the bits of a tensor. Synchronises the host."""
    host = tensor.detach().to("cpu").contiguous()
    return hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def check_replicas(
    parts: Iterable[tuple[str, Sequence[int]]], digests: Sequence[Mapping[str, str]]
) -> None:
    """Compares the ranks that have the same part: `parts` are the key and the ranks of each, `digests` by rank those of
    its parts by key; both the same on every rank. CheckpointError: the bits of a part differ; it names two ranks."""
    for key, (first, *others) in parts:
        for rank in others:
            if digests[rank][key] != digests[first][key]:
                raise CheckpointError(
                    f"{key} differs between rank {first} and rank {rank}, which must have the same bits (unless it "
                    "is an expert's: then its module has to say holds_experts = True)"
                )


def _walk(prefix: str, node: Any, rank: int, num_ranks: int) -> Iterator[Place]:
    if isinstance(node, nn.Module):
        yield from _of_module(prefix, node, rank, num_ranks)
    elif isinstance(node, Mapping):
        for name, child in node.items():
            if not isinstance(name, str) or not name:
                raise ArgumentError(
                    f"{prefix} has the key {name!r}; keys must be strings that are not empty"
                )
            yield from _walk(f"{prefix}.{name}", child, rank, num_ranks)
    elif isinstance(node, ExpertShard):
        end = node.start + len(node.tensor) if node.tensor.dim() else -1
        if not 0 <= node.start <= end <= node.num_experts:
            raise ArgumentError(
                f"{prefix}: an ExpertShard of shape {list(node.tensor.shape)} that starts at {node.start} "
                f"is none of {node.num_experts} experts"
            )
        yield Place(key=prefix, tensor=node.tensor, start=node.start, num_rows=node.num_experts)
    elif isinstance(node, torch.Tensor):
        yield Place(key=prefix, tensor=node)
    else:
        raise ArgumentError(
            f"{prefix} is of type {type(node).__name__}; it must be a tensor, module or dict of them"
        )


def _of_module(prefix: str, module: nn.Module, rank: int, num_ranks: int) -> Iterator[Place]:
    found = {path: getattr(child, "heap", None) for path, child in module.named_modules()}
    heaps = {path: heap for path, heap in found.items() if isinstance(heap, SymmetricHeap)}
    experts = {name for name, _, is_expert in named_parameters(module, shared=True) if is_expert}
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = f"{prefix}.{name}"
        if name not in experts:
            yield from _walk(key, tensor, rank, num_ranks)
            continue
        path, _, leaf = name.rpartition(".")
        around = [
            path.rsplit(".", count)[0] for count in range(path.count(".") + 1)
        ]  # from the inside out
        heap = next((heaps[outer] for outer in [*around, ""] if outer in heaps), None)
        ep_rank, ep_size = (rank, num_ranks) if heap is None else (heap.rank, heap.num_ranks)
        owner, discrete = module.get_submodule(path), _DISCRETE.fullmatch(leaf)
        if discrete and isinstance(owner, GroupedLinear):
            start = ep_rank * owner.num_groups + int(discrete[1])
            packed, num_rows = key.removesuffix(leaf) + "weight", ep_size * owner.num_groups
            yield Place(key=packed, tensor=tensor, start=start, num_rows=num_rows, is_row=True)
        else:
            yield Place(
                key=key, tensor=tensor, start=ep_rank * len(tensor), num_rows=ep_size * len(tensor)
            )
