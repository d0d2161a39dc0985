"""The state of an optimizer, by parameter: tensors sharded like the parameters, states that a rank's experts share,
and plain values, equal on all ranks. The optimizer may have all experts of a layer, or some."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from symmoe.checkpoint.manifest import StoredGroup, StoredOptimizer
from symmoe.checkpoint.tensors import TensorShard, agreed, lists_by_key
from symmoe.errors import ArgumentError, CheckpointError, first_problem, raise_for

PREFIX = "optimizer."
State = dict[torch.Tensor, dict[str, Any]]
Groups = list[list[TensorShard]]
Shared = list[
    tuple[torch.Tensor, TensorShard]
]  # a state that several experts share, and the loaded copies, one for each expert
_Experts = dict[str, list[Any]]  # by key: number of experts, and their ids; 0 and []: no expert's


def groups_of(optimizer: torch.optim.Optimizer, model: Iterable[TensorShard]) -> Groups:
    """The shards of the optimizer's parameters, by group. ArgumentError: the model lacks a parameter."""
    # Reversed: a tied parameter has the key of its first shard.
    by_parameter = {
        id(shard.parameter): replace(shard, tensor=shard.parameter)
        for shard in reversed(list(model))
    }
    raise_for(
        first_problem(
            *(
                (
                    id(parameter) not in by_parameter,
                    f"optimizer has a parameter that is not in model: group {number}, {index}, {list(parameter.shape)}",
                )
                for number, group in enumerate(optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
            )
        )
    )
    return [
        [by_parameter[id(parameter)] for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def settings_of(optimizer: torch.optim.Optimizer, groups: Groups) -> list[Any]:
    """The settings that must be equal on all ranks, in JSON: the class, and each group's hyperparameters and replicated
    parameters."""
    settings = [
        {
            name: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
    common = [[shard.key for shard in shards if shard.start is None] for shards in groups]
    return [type(optimizer).__name__, settings, common]


def description_of(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """The description of this rank's part of an optimizer for the other ranks, in JSON. ArgumentError: experts of a
    layer have different plain values."""
    states = list(_states_of(optimizer, groups))
    values: dict[str, Any] = {}
    for key, _, value in states:
        if not isinstance(value, torch.Tensor) and values.setdefault(key, value) != value:
            raise ArgumentError(f"{key} is {values[key]} and {value}: experts of a layer differ")
    return {
        "params": [_by_key((shard.key, shard) for shard in shards) for shards in groups],
        "states": _by_key((key, shard) for key, shard, _ in states),
        "values": values,
        "of_stacks": [
            key
            for key, shard, value in states
            if isinstance(value, torch.Tensor) and shard.is_of_stack(value)
        ],
    }


def record_of(settings: list[Any], descriptions: Sequence[Mapping[str, Any]]) -> StoredOptimizer:
    """The stored optimizer, merged from the descriptions of all ranks. CheckpointError: ranks disagree."""
    name, settings_by_group, _ = settings
    params_by_group = zip(*(table["params"] for table in descriptions), strict=True)
    return StoredOptimizer(
        name=name,
        groups=[
            StoredGroup(params=_merged(tables), settings=group_settings)
            for tables, group_settings in zip(params_by_group, settings_by_group, strict=True)
        ],
        values=agreed([table["values"] for table in descriptions]),
        experts={
            key: experts
            for key, experts in _merged(table["states"] for table in descriptions).items()
            if experts is not None
        },
        of_stacks=sorted({key for table in descriptions for key in table["of_stacks"]}),
    )


def state_shards(
    optimizer: torch.optim.Optimizer, groups: Groups, record: StoredOptimizer
) -> list[TensorShard]:
    """The shards of all tensors in the optimizer's state."""
    return [
        shard.for_state(
            key, value, experts=record.experts.get(key), is_of_stack=key in record.of_stacks
        )
        for key, shard, value in _states_of(optimizer, groups)
        if isinstance(value, torch.Tensor)
    ]


def check_record(
    stored: StoredOptimizer | None,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    model: Iterable[TensorShard],
) -> StoredOptimizer:
    """Checks that the stored optimizer fits. CheckpointError: the class or the parameters of a group differ."""
    if stored is None:
        raise CheckpointError("the checkpoint has no optimizer state")
    name = type(optimizer).__name__
    if stored.name != name:
        raise CheckpointError(f"the checkpoint's optimizer is {stored.name!r}, not {name!r}")
    model_experts: dict[str, list[int | None]] = lists_by_key(
        (shard.key, expert) for shard in model for expert in shard.experts or (None,)
    )
    for number, (group, shards) in enumerate(itertools.zip_longest(stored.groups, groups)):
        expected = {
            (shard.key, expert) for shard in shards or () for expert in shard.experts or (None,)
        }
        stored_params = {
            (key, expert)
            for key, experts in (group.params if group else {}).items()
            for expert in model_experts.get(key, (None,))
            if experts is None or expert in experts
        }
        if differing := sorted({key for key, _ in expected ^ stored_params}):
            raise CheckpointError(
                f"group {number} of the checkpoint's optimizer has other parameters, or other experts of them: "
                f"{differing[:3]}"
            )
    return stored


def empty_state(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    record: StoredOptimizer,
    tensors: Mapping[str, TensorStorageMetadata],
) -> tuple[State, list[TensorShard], Shared]:
    """A new state for the optimizer, the shards that loading fills, and the tensors that experts share, to load first.
    Reuses the optimizer's tensors that fit. CheckpointError: a set of experts that share a state is stored for no rank
    with the same experts."""
    parts = (
        key.removeprefix(PREFIX).rpartition(".")
        for key in (*tensors, *record.values)
        if key.startswith(PREFIX)
    )
    kinds = lists_by_key((name, kind) for name, _, kind in parts)
    state: State = {}
    filled = []
    shared: Shared = []
    for shards, group in zip(groups, optimizer.param_groups, strict=True):
        # As in torch, the step count stays on the host unless a kernel reads it.
        on_host = () if group.get("capturable") or group.get("fused") else ("step",)
        for shard in shards:
            for kind in kinds.get(shard.key, ()):
                key = f"{PREFIX}{shard.key}.{kind}"
                if not shard.has_state(record.experts.get(key), key):
                    continue
                if key in record.values:
                    value = record.values[key]
                else:
                    device = torch.device("cpu") if kind in on_host else shard.tensor.device
                    existing = optimizer.state.get(shard.tensor, {}).get(kind)
                    value, loaded = _empty(shard, key, record, tensors[key], existing, device)
                    if loaded.tensor is value:
                        filled.append(loaded)
                    else:
                        shared.append((value, loaded))
                state.setdefault(shard.tensor, {})[kind] = value
    return state, filled, shared


def check_shared(shared: Shared) -> None:
    """Checks the loaded copies of states that experts share. CheckpointError: the saved states of these experts
    differ."""
    for _, shard in shared:
        copies = shard.tensor.reshape(len(shard.tensor), -1).view(torch.uint8)
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            raise _other_stacks(shard.key)


def install(
    optimizer: torch.optim.Optimizer, state: State, shared: Shared, record: StoredOptimizer
) -> None:
    """Sets the optimizer's state and stored hyperparameters."""
    for value, shard in shared:
        value.copy_(shard.tensor[0])
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, stored in zip(optimizer.param_groups, record.groups, strict=True):
        for name, value in stored.settings.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _states_of(
    optimizer: torch.optim.Optimizer, groups: Groups
) -> Iterator[tuple[str, TensorShard, Any]]:
    """The key, the parameter's shard, and the value of every state."""
    for shard in itertools.chain(*groups):
        for kind, value in optimizer.state.get(shard.tensor, {}).items():
            yield f"{PREFIX}{shard.key}.{kind}", shard, value


def _by_key(shards: Iterable[tuple[str, TensorShard]]) -> _Experts:
    """The experts of the shards, by key."""
    table: _Experts = {}
    for key, shard in shards:
        table.setdefault(key, [shard.num_rows, []])[1] += shard.experts
    return table


def _merged(tables: Iterable[_Experts]) -> dict[str, list[int] | None]:
    """The experts of all ranks, by key; None: all experts, or the key is no expert's."""
    merged: dict[str, tuple[int, set[int]]] = {}
    for table in tables:
        for key, (number, experts) in table.items():
            merged.setdefault(key, (number, set()))[1].update(experts)
    return {
        key: None if len(experts) == number else sorted(experts)
        for key, (number, experts) in merged.items()
    }


def _empty(
    shard: TensorShard,
    key: str,
    record: StoredOptimizer,
    stored: TensorStorageMetadata,
    existing: Any,
    device: torch.device,
) -> tuple[torch.Tensor, TensorShard]:
    """A state for a parameter (`existing` if it fits), and the shard to load: of the state, or of copies for each
    expert."""
    is_of_stack = shard.start is not None and key in record.of_stacks
    shape = tuple(stored.size[1:]) if is_of_stack else shard.local_shape(stored.size)
    dtype = stored.properties.dtype
    fits = isinstance(existing, torch.Tensor) and (tuple(existing.shape), existing.dtype) == (
        shape,
        dtype,
    )
    value = existing if fits else torch.empty(shape, dtype=dtype, device=device)
    loaded = shard.for_state(key, value, experts=record.experts.get(key), is_of_stack=is_of_stack)
    if not is_of_stack or shard.is_row:
        return value, loaded
    # A stack's state other than a number belongs to exactly these experts.
    cuts = [(chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks]
    if loaded.tensor.dim() > 1 and (loaded.offsets[0], len(loaded.tensor)) not in cuts:
        raise _other_stacks(key)
    return value, replace(loaded, tensor=loaded.tensor.new_empty(loaded.tensor.shape))


def _other_stacks(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key} was made by the optimizer for all experts of a rank together, and the ranks that load have other "
        "experts together: load on as many ranks as saved, or with optimizer=None"
    )
