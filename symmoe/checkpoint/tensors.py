"""The tensors of a checkpoint, and this rank's part of each: consecutive rows of dimension 0. Weights of experts have
the rows of the rank's experts; other tensors have all rows. Ranks with the same rows have the same bits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from symmoe.errors import ArgumentError, CheckpointError, first_problem, raise_for
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.parameters import named_parameters
from symmoe.symm_mem.heap import SymmetricHeap

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_DISCRETE = re.compile(r"weight(\d+)")
REPLICAS = (  # a note of ranks that have the same part
    ", which must have the same bits (unless it is an expert's: then its module has to say holds_experts = True)"
)
_NOTE = "symmoe.state_dict"  # replaces a state dict: its path, its keys, and its values other than tensors
COMPILED = "_orig_mod."  # torch.compile's prefix of names in compiled modules


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """A tensor [e, ...] of experts `start` to `start` + e - 1 of `num_experts`: a leaf of a nested dict."""

    tensor: torch.Tensor
    start: int
    num_experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleState:
    """Tensors by the names of a module's state dict, for the same experts; values may differ from the module's (an
    average, or edited by a hook): a leaf of a nested dict. A tensor of another name belongs to experts if its name is
    a suffix of an experts' name, or the reverse. Missing names are not saved. An optimizer saved with it must be
    of the module's parameters."""

    module: nn.Module
    tensors: Mapping[str, torch.Tensor]

    def places(self) -> list[Place]:
        """Places of its tensors, by keys that begin with a dot; experts as if all were here."""
        places = _of_state("", self, 0, 1) if self.tensors else ()
        return [place for place in places if place.is_stored]

    def is_like_experts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the shape of one of the module's experts' tensors."""
        return any(
            place.start is not None and place.tensor.shape == tensor.shape
            for _, place in _of_module("", self.module, 0, 1)
        )

    @classmethod
    def empty(cls, module: nn.Module, stored: Mapping[str, torch.Tensor]) -> ModuleState:
        """New tensors on the host for a state, with this rank's experts. stored: by key, tensors with the state's
        dtypes and shapes, except the number of experts; they need no memory."""
        own = dict(_of_module("", module, 0, 1))
        names = lists_by_key((place.key[1:], name) for name, place in own.items())
        by_key = {key: own[its[0]] for key, its in names.items()}
        tensors = {}
        for key, like in stored.items():
            known = key if key in names else _alike(by_key, key, like.shape[1:])
            for name in [key] if known is None else names[known]:
                shape = like.shape if known is None else own[name].local_shape(like.shape)
                tensors[_renamed(key, name)] = torch.empty(shape, dtype=like.dtype, device="cpu")
        return cls(module=module, tensors=tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor of this rank, and its place in the checkpoint."""

    key: str  # name in the checkpoint; several places may share it
    tensor: torch.Tensor  # the live tensor, whose memory is read or filled
    start: int | None = None  # its first row in the whole tensor; None: it is the whole tensor
    num_rows: int = 0  # rows of the whole tensor, if sharded
    is_row: bool = (
        False  # it is one row of the whole tensor, without a row dimension (a discrete weight)
    )
    of: torch.Tensor | None = None  # the module's own tensor of this place, if different
    is_stored: bool = True  # in the checkpoint; False: it only names a parameter

    @property
    def parameter(self) -> torch.Tensor:
        """The optimizer's tensor."""
        return self.tensor if self.of is None else self.of

    @property
    def rows(self) -> torch.Tensor:
        """The tensor, detached, with a row dimension if sharded."""
        return self.tensor.detach()[None] if self.is_row else self.tensor.detach()

    @property
    def experts(self) -> list[int]:
        """The indices of its rows, if sharded."""
        return [] if self.start is None else [self.start + i for i in range(len(self.rows))]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        own = tuple(self.rows.shape)
        return own if self.start is None else (self.num_rows, *own[1:])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Its first element's index in the whole tensor."""
        return (self.start or 0, *[0] * (self.rows.dim() - 1)) if self.shape else ()

    def is_of_stack(self, state: torch.Tensor) -> bool:
        """Whether a state for this parameter is one number for all its experts, or has no dimension for experts.
        Optimizers with row and column states, e.g. Adafactor, use the last two dimensions."""
        if self.start is None or state.dim() == 0 or self.is_row:
            return self.start is not None and state.dim() == 0
        has_experts = state.shape[0] == len(self.tensor) and self.tensor.dim() > 2
        return state.shape != self.tensor.shape and not has_experts

    def is_of(self, experts: list[int] | None, key: str) -> bool:
        """Whether all experts of the parameter have a state. CheckpointError: only some of them do."""
        if experts is None or self.start is None:
            return True
        found = [expert in experts for expert in self.experts]
        if any(found) and not all(found):
            raise CheckpointError(
                f"{key} is there for the experts {experts}, and {self.experts} are one parameter here: load into "
                "discrete weights, or on as many ranks as saved"
            )
        return all(found)

    def like(
        self, key: str, state: torch.Tensor, *, experts: list[int] | None, is_of_stack: bool
    ) -> Place:
        """The place of an optimizer's state for this parameter. experts: the experts with such a state, if not all. A
        stack's state is repeated for each of its experts."""
        if is_of_stack and not self.is_row:
            state = state.expand(len(self.tensor), *state.shape)
        own = replace(self, key=key, tensor=state)
        if experts is None or self.start is None:
            return own
        return replace(own, start=experts.index(self.start), num_rows=len(experts))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The local shape of a tensor, from the `shape` of the whole, or of another number of its rows."""
        if self.start is None:
            return tuple(shape)
        return tuple(shape[1:]) if self.is_row else (len(self.tensor), *shape[1:])


def places_of(
    model: nn.Module | ModuleState | Mapping[str, Any], *, rank: int, num_ranks: int
) -> list[Place]:
    """Every tensor of a module's state dict, or of a nested dict of tensors, ExpertShards and modules. The EP group of
    experts is that of `heap` of their module, or of the nearest module around it; without a heap, `rank` and
    `num_ranks` define it. ArgumentError: a checkpoint cannot store a value."""
    places = list(_walk("model", model, rank, num_ranks))
    for place in places:
        raise_for(
            first_problem(
                (
                    hasattr(place.tensor, "device_mesh"),
                    f"{place.key} is a DTensor; use torch.distributed.checkpoint for models on a mesh (docs/fsdp.md)",
                ),
                (
                    place.tensor.layout != torch.strided or place.tensor.is_meta,
                    f"{place.key} is a {place.tensor.layout} tensor on {place.tensor.device}; it has no plain memory",
                ),
            )
        )
    return places


def bare(model: Any) -> Any:
    """The model without wrappers of torch.compile and DDP."""
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model._modules.get("_orig_mod", model._modules.get("module"))
    return model


def lists_by_key(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of every key, both in order."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def rows_problem(runs: Iterable[tuple[int, int]], num_rows: int) -> str | None:
    """The error in (start, length) runs that must cover rows 0 to `num_rows` - 1 once, or None."""
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


def agreed(tables: Sequence[Mapping[str, Any]], note: str = "") -> dict[str, Any]:
    """The values of all ranks, by key. tables: by rank, the values that it has. CheckpointError: ranks have different
    values of a key; the text names two ranks, and has the note, or both values."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, table in enumerate(tables):
        for key, value in table.items():
            first, known = found.setdefault(key, (rank, value))
            if known != value:
                differs = f"{key} differs between rank {first} and rank {rank}"
                raise CheckpointError(differs + (note or f": {known} and {value}"))
    return {key: value for key, (_, value) in found.items()}


# -- state dicts with experts, inside objects that a trainer pickles on one rank: all ranks save them instead ----------


def take_out(node: Any, module: nn.Module, path: str, found: dict[str, ModuleState]) -> Any:
    """Replaces state dicts in `node` that have tensors of the module's experts by notes, and collects them in `found`,
    by path. ArgumentError: a list has such tensors, without names."""
    if isinstance(node, list | tuple):
        state = ModuleState(module=module, tensors={})
        if any(isinstance(each, torch.Tensor) and state.is_like_experts(each) for each in node):
            raise ArgumentError(
                f"{path} is a {type(node).__name__} with tensors of the shape of this rank's experts, which would be "
                "saved on rank 0 only: make it a dict by the names of the model's state dict"
            )
    if not isinstance(node, Mapping):
        return node
    tensors = {
        name: each
        for name, each in node.items()
        if isinstance(name, str) and isinstance(each, torch.Tensor)
    }
    others = {
        name: take_out(each, module, f"{path}.{name}".lstrip("."), found)
        for name, each in node.items()
        if name not in tensors
    }
    state = ModuleState(module=module, tensors=tensors)
    places = state.places()
    if any(place.start is not None for place in places):
        found[path] = state
        stored = {place.key[1:]: place.rows.to("meta") for place in places}
        return {_NOTE: path, "tensors": stored, "others": others}
    is_same = all(each is node[name] for name, each in others.items())
    return node if is_same else {**node, **others}


def put_back(node: Any, module: nn.Module, found: dict[str, ModuleState]) -> Any:
    """Replaces notes in `node` by empty state dicts, and collects these in `found` for loading."""
    if not isinstance(node, Mapping):
        return node
    if _NOTE in node:
        found[node[_NOTE]] = ModuleState.empty(module, node["tensors"])
        return {**found[node[_NOTE]].tensors, **put_back(node["others"], module, found)}
    others = {name: put_back(each, module, found) for name, each in node.items()}
    return node if all(each is node[name] for name, each in others.items()) else others


def own_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of a module with this rank's experts, without the warning."""
    return {
        name: each.detach() if isinstance(each, torch.Tensor) else each
        for name, each in module.state_dict(keep_vars=True).items()
    }


def refuse_state_dicts(node: Any, module: nn.Module, path: str) -> None:
    """ArgumentError: a state dict in `node` has tensors of the module's experts, and only one rank would save it."""
    found: dict[str, ModuleState] = {}
    take_out(node, module, path, found)
    for where in found:
        raise ArgumentError(
            f"{where} has this rank's experts, and would be saved on rank 0 only: save it with "
            "symmoe.checkpoint.save_checkpoint, as a ModuleState"
        )


# -- places -----------------------------------------------------------------------------------------------------------


def _walk(prefix: str, node: Any, rank: int, num_ranks: int) -> Iterator[Place]:
    if isinstance(node, nn.Module):
        yield from (place for _, place in _of_module(prefix, node, rank, num_ranks))
    elif isinstance(node, ModuleState):
        yield from _of_state(prefix, node, rank, num_ranks)
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


def _of_state(prefix: str, state: ModuleState, rank: int, num_ranks: int) -> Iterator[Place]:
    own = dict(_of_module(prefix, state.module, rank, num_ranks))
    given = {name.replace(COMPILED, ""): tensor for name, tensor in state.tensors.items()}
    for name, place in own.items():
        tensor = given.pop(name, None)
        yield replace(
            place,
            tensor=place.tensor if tensor is None else tensor,
            of=place.tensor,
            is_stored=tensor is not None,
        )
    for name, tensor in given.items():
        known = _alike(own, name, tensor.shape[1:]) or _alike(own, name, tensor.shape)
        if known is None:
            yield Place(key=f"{prefix}.{name}", tensor=tensor)
        else:
            yield replace(
                own[known], key=f"{prefix}.{_renamed(name, own[known].key)}", tensor=tensor
            )


def _of_module(
    prefix: str, module: nn.Module, rank: int, num_ranks: int
) -> Iterator[tuple[str, Place]]:
    """The name and the place of every tensor of a module's state dict."""
    module = bare(module)
    heaps = {
        path: heap
        for path, child in module.named_modules()
        if isinstance(heap := getattr(child, "heap", None), SymmetricHeap)
    }
    experts = {name for name, _, is_expert in named_parameters(module, shared=True) if is_expert}
    for name, tensor in module.state_dict(keep_vars=True).items():
        plain = name.replace(COMPILED, "")
        key = f"{prefix}.{plain}"
        if name not in experts:
            yield from ((plain, place) for place in _walk(key, tensor, rank, num_ranks))
            continue
        path, _, leaf = name.rpartition(".")
        around = [
            path.rsplit(".", count)[0] for count in range(path.count(".") + 1)
        ]  # innermost first
        heap = next((heaps[outer] for outer in [*around, ""] if outer in heaps), None)
        ep_rank, ep_size = (rank, num_ranks) if heap is None else (heap.rank, heap.num_ranks)
        owner: Any = module.get_submodule(path)
        discrete = _DISCRETE.fullmatch(leaf) if isinstance(owner, GroupedLinear) else None
        num_local = owner.num_groups if discrete else len(tensor)
        yield (
            plain,
            Place(
                key=key.removesuffix(leaf) + "weight" if discrete else key,
                tensor=tensor,
                start=ep_rank * num_local + (int(discrete[1]) if discrete else 0),
                num_rows=ep_size * num_local,
                is_row=discrete is not None,
            ),
        )


def _alike(own: Mapping[str, Place], name: str, shape: Sequence[int]) -> str | None:
    """The experts' tensor name that ends with `name`, or that `name` ends with, if its rows have this shape."""
    fitting = (
        f".{known}"
        for known, place in own.items()
        if place.start is not None and tuple(place.rows.shape[1:]) == tuple(shape)
    )
    end = f".{name}"
    found = (known for known in fitting if known.endswith(end) or end.endswith(known))
    return next((known[1:] for known in found), None)


def _renamed(name: str, like: str) -> str:
    """`name` with the last part of `like`."""
    return ".".join([*name.split(".")[:-1], like.rpartition(".")[2]])
