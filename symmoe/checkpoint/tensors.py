"""The shards of a checkpoint's tensors. A shard of a rank has consecutive rows of dimension 0: weights of experts have
the rows of the rank's experts, other tensors have all rows. Ranks with the same rows have the same bits."""

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
# The key of a note, which replaces a state dict: its value is the path; "tensors" have shapes and dtypes, and "others"
# are the values other than tensors.
_NOTE = "symmoe.state_dict"
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

    def places(self) -> list[TensorShard]:
        """The shards of the tensors. Keys begin with a dot; the numbering takes this rank for the only one."""
        shards = _shards_of_state("", self, 0, 1) if self.tensors else ()
        return [shard for shard in shards if shard.is_stored]

    def is_like_experts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the shape of one of the module's experts' tensors."""
        return any(
            shard.start is not None and shard.tensor.shape == tensor.shape
            for _, shard in _shards_of_module("", self.module, 0, 1)
        )

    @classmethod
    def empty(cls, module: nn.Module, stored: Mapping[str, torch.Tensor]) -> ModuleState:
        """A state with new tensors on the host, for this rank's experts. stored: by key, tensors with the dtypes and
        shapes of the state, except the number of experts; meta tensors are enough."""
        shards = dict(_shards_of_module("", module, 0, 1))
        names = lists_by_key((shard.key[1:], name) for name, shard in shards.items())
        by_key = {key: shards[aliases[0]] for key, aliases in names.items()}
        tensors = {}
        for key, template in stored.items():
            match = key if key in names else _matching_name(by_key, key, template.shape[1:])
            for name in [key] if match is None else names[match]:
                shape = (
                    template.shape if match is None else shards[name].local_shape(template.shape)
                )
                tensors[_renamed(key, name)] = torch.empty(
                    shape, dtype=template.dtype, device="cpu"
                )
        return cls(module=module, tensors=tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """A tensor of this rank, and its position in the global tensor, which the checkpoint has under `key`."""

    key: str  # discrete weights of one layer share a key
    tensor: torch.Tensor  # the live tensor, whose memory is read or filled
    start: int | None = None  # the first row's index in the global tensor; None: replicated
    num_rows: int = 0  # of the global tensor, if sharded
    is_row: bool = False  # a discrete weight: one row of the global tensor, without a row dimension
    module_tensor: torch.Tensor | None = None  # the module's tensor, if `tensor` replaces it
    is_stored: bool = True  # False: the shard only names a parameter

    @property
    def parameter(self) -> torch.Tensor:
        """The optimizer's tensor."""
        return self.tensor if self.module_tensor is None else self.module_tensor

    @property
    def rows(self) -> torch.Tensor:
        """The tensor, detached, with a row dimension if sharded."""
        return self.tensor.detach()[None] if self.is_row else self.tensor.detach()

    @property
    def experts(self) -> list[int]:
        """The global indices of the rows, if sharded."""
        return [] if self.start is None else [self.start + i for i in range(len(self.rows))]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        shape = tuple(self.rows.shape)
        return shape if self.start is None else (self.num_rows, *shape[1:])

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first element's index in the global tensor."""
        return (self.start or 0, *[0] * (self.rows.dim() - 1)) if self.shape else ()

    def is_of_stack(self, state: torch.Tensor) -> bool:
        """Whether a state for this parameter is one number for all its experts, or has no dimension for experts.
        Optimizers with row and column states, e.g. Adafactor, use the last two dimensions."""
        if self.start is None or state.dim() == 0 or self.is_row:
            return self.start is not None and state.dim() == 0
        has_experts = state.shape[0] == len(self.tensor) and self.tensor.dim() > 2
        return state.shape != self.tensor.shape and not has_experts

    def has_state(self, experts: list[int] | None, key: str) -> bool:
        """Whether all experts of the parameter have a state. experts: the experts that have one, None for all.
        CheckpointError: only some experts of the parameter have a state."""
        if experts is None or self.start is None:
            return True
        present = [expert in experts for expert in self.experts]
        if any(present) and not all(present):
            raise CheckpointError(
                f"{key} is there for the experts {experts}, and {self.experts} are one parameter here: load into "
                "discrete weights, or on as many ranks as saved"
            )
        return all(present)

    def for_state(
        self, key: str, state: torch.Tensor, *, experts: list[int] | None, is_of_stack: bool
    ) -> TensorShard:
        """The shard of an optimizer's state for this parameter. experts: the experts with such a state, None for all. A
        stack's state is repeated for each expert."""
        if is_of_stack and not self.is_row:
            state = state.expand(len(self.tensor), *state.shape)
        shard = replace(self, key=key, tensor=state)
        if experts is None or self.start is None:
            return shard
        return replace(shard, start=experts.index(self.start), num_rows=len(experts))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The local shape of a tensor whose global shape is `shape`; the first size of `shape` does not matter."""
        if self.start is None:
            return tuple(shape)
        return tuple(shape[1:]) if self.is_row else (len(self.tensor), *shape[1:])


def shards_of(
    model: nn.Module | ModuleState | Mapping[str, Any], *, rank: int, num_ranks: int
) -> list[TensorShard]:
    """The shards of a module's state dict, or of a nested dict of tensors, ExpertShards and modules. The EP group of
    experts belongs to `heap` of their module, or of the nearest module around it; without a heap, `rank` and
    `num_ranks` define it. ArgumentError: a checkpoint cannot store a value."""
    shards = list(_walk("model", model, rank, num_ranks))
    for shard in shards:
        raise_for(
            first_problem(
                (
                    hasattr(shard.tensor, "device_mesh"),
                    f"{shard.key} is a DTensor; use torch.distributed.checkpoint for models on a mesh (docs/fsdp.md)",
                ),
                (
                    shard.tensor.layout != torch.strided or shard.tensor.is_meta,
                    f"{shard.key} is a {shard.tensor.layout} tensor on {shard.tensor.device}; it has no plain memory",
                ),
            )
        )
    return shards


def bare(model: Any) -> Any:
    """The model without wrappers of torch.compile and DDP."""
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model._modules.get("_orig_mod", model._modules.get("module"))
    return model


def lists_by_key(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of every key, both in order."""
    lists: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        lists.setdefault(key, []).append(value)
    return lists


def rows_problem(runs: Iterable[tuple[int, int]], num_rows: int) -> str | None:
    """The error of (start, length) runs, which must cover rows 0 to `num_rows` - 1 once; None: no error."""
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
    """Merges the tables of all ranks. CheckpointError: ranks have different values of a key; the text names two ranks,
    and has the note, or both values."""
    values: dict[str, tuple[int, Any]] = {}
    for rank, table in enumerate(tables):
        for key, value in table.items():
            first_rank, first_value = values.setdefault(key, (rank, value))
            if first_value != value:
                differs = f"{key} differs between rank {first_rank} and rank {rank}"
                raise CheckpointError(differs + (note or f": {first_value} and {value}"))
    return {key: value for key, (_, value) in values.items()}


# -- state dicts with experts inside an object that a trainer pickles on one rank: all ranks save them instead ---------


def extract_states(node: Any, module: nn.Module, path: str, states: dict[str, ModuleState]) -> Any:
    """Replaces state dicts in `node` that have tensors of the module's experts by notes, and collects these state dicts
    in `states`, by path. ArgumentError: a list has such tensors, without names."""
    if isinstance(node, list | tuple):
        state = ModuleState(module=module, tensors={})
        if any(isinstance(value, torch.Tensor) and state.is_like_experts(value) for value in node):
            raise ArgumentError(
                f"{path} is a {type(node).__name__} with tensors of the shape of this rank's experts, which would be "
                "saved on rank 0 only: make it a dict by the names of the model's state dict"
            )
    if not isinstance(node, Mapping):
        return node
    tensors = {
        name: value
        for name, value in node.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    remaining = {
        name: extract_states(value, module, f"{path}.{name}".lstrip("."), states)
        for name, value in node.items()
        if name not in tensors
    }
    state = ModuleState(module=module, tensors=tensors)
    shards = state.places()
    if any(shard.start is not None for shard in shards):
        states[path] = state
        stored = {shard.key[1:]: shard.rows.to("meta") for shard in shards}
        return {_NOTE: path, "tensors": stored, "others": remaining}
    is_same = all(value is node[name] for name, value in remaining.items())
    return node if is_same else {**node, **remaining}


def insert_states(node: Any, module: nn.Module, states: dict[str, ModuleState]) -> Any:
    """Replaces notes in `node` by empty state dicts, and collects these in `states` for loading."""
    if not isinstance(node, Mapping):
        return node
    if _NOTE in node:
        states[node[_NOTE]] = ModuleState.empty(module, node["tensors"])
        return {**states[node[_NOTE]].tensors, **insert_states(node["others"], module, states)}
    remaining = {name: insert_states(value, module, states) for name, value in node.items()}
    return node if all(value is node[name] for name, value in remaining.items()) else remaining


def own_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of a module with this rank's experts. `keep_vars`: symmoe's own reads raise no warning."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
    }


def refuse_state_dicts(node: Any, module: nn.Module, path: str) -> None:
    """ArgumentError: a state dict in `node` has tensors of the module's experts, and only one rank would save it."""
    states: dict[str, ModuleState] = {}
    extract_states(node, module, path, states)
    for state_path in states:
        raise ArgumentError(
            f"{state_path} has this rank's experts, and would be saved on rank 0 only: save it with "
            "symmoe.checkpoint.save_checkpoint, as a ModuleState"
        )


# -- shards -----------------------------------------------------------------------------------------------------------


def _walk(prefix: str, node: Any, rank: int, num_ranks: int) -> Iterator[TensorShard]:
    if isinstance(node, nn.Module):
        yield from (shard for _, shard in _shards_of_module(prefix, node, rank, num_ranks))
    elif isinstance(node, ModuleState):
        yield from _shards_of_state(prefix, node, rank, num_ranks)
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
        yield TensorShard(
            key=prefix, tensor=node.tensor, start=node.start, num_rows=node.num_experts
        )
    elif isinstance(node, torch.Tensor):
        yield TensorShard(key=prefix, tensor=node)
    else:
        raise ArgumentError(
            f"{prefix} is of type {type(node).__name__}; it must be a tensor, module or dict of them"
        )


def _shards_of_state(
    prefix: str, state: ModuleState, rank: int, num_ranks: int
) -> Iterator[TensorShard]:
    shards = dict(_shards_of_module(prefix, state.module, rank, num_ranks))
    tensors = {name.replace(COMPILED, ""): tensor for name, tensor in state.tensors.items()}
    for name, shard in shards.items():
        tensor = tensors.pop(name, None)
        yield replace(
            shard,
            tensor=shard.tensor if tensor is None else tensor,
            module_tensor=shard.tensor,
            is_stored=tensor is not None,
        )
    for name, tensor in tensors.items():
        match = _matching_name(shards, name, tensor.shape[1:]) or _matching_name(
            shards, name, tensor.shape
        )
        if match is None:
            yield TensorShard(key=f"{prefix}.{name}", tensor=tensor)
        else:
            yield replace(
                shards[match], key=f"{prefix}.{_renamed(name, shards[match].key)}", tensor=tensor
            )


def _shards_of_module(
    prefix: str, module: nn.Module, rank: int, num_ranks: int
) -> Iterator[tuple[str, TensorShard]]:
    """The name and the shard of every tensor of a module's state dict."""
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
            yield from ((plain, shard) for shard in _walk(key, tensor, rank, num_ranks))
            continue
        path, _, leaf = name.rpartition(".")
        ancestors = [
            path.rsplit(".", count)[0] for count in range(path.count(".") + 1)
        ]  # innermost first
        heap = next((heaps[ancestor] for ancestor in [*ancestors, ""] if ancestor in heaps), None)
        ep_rank, ep_size = (rank, num_ranks) if heap is None else (heap.rank, heap.num_ranks)
        owner: Any = module.get_submodule(path)
        discrete = _DISCRETE.fullmatch(leaf) if isinstance(owner, GroupedLinear) else None
        num_local = owner.num_groups if discrete else len(tensor)
        yield (
            plain,
            TensorShard(
                key=key.removesuffix(leaf) + "weight" if discrete else key,
                tensor=tensor,
                start=ep_rank * num_local + (int(discrete[1]) if discrete else 0),
                num_rows=ep_size * num_local,
                is_row=discrete is not None,
            ),
        )


def _matching_name(
    shards: Mapping[str, TensorShard], name: str, shape: Sequence[int]
) -> str | None:
    """The name of an experts' tensor whose rows have this shape and whose name ends with `name`, or is an end of it;
    None: no such tensor."""
    fitting = (
        f".{expert_name}"
        for expert_name, shard in shards.items()
        if shard.start is not None and tuple(shard.rows.shape[1:]) == tuple(shape)
    )
    suffix = f".{name}"
    matches = (
        expert_name
        for expert_name in fitting
        if expert_name.endswith(suffix) or suffix.endswith(expert_name)
    )
    return next((expert_name[1:] for expert_name in matches), None)


def _renamed(name: str, template: str) -> str:
    """`name` with the last part of `like`."""
    return ".".join([*name.split(".")[:-1], template.rpartition(".")[2]])
