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
from symmoe.checkpoint.tensors import Place, agreed, lists_by_key
from symmoe.errors import ArgumentError, CheckpointError, first_problem, raise_for

PREFIX = "optimizer."
State = dict[torch.Tensor, dict[str, Any]]
Groups = list[list[Place]]
Shared = list[
    tuple[torch.Tensor, Place]
]  # a state of several experts, and the loaded copies for each
_Experts = dict[
    str, list[Any]
]  # by key: number of experts, and their ids; 0 and none: not an expert's


def groups_of(optimizer: torch.optim.Optimizer, model: Iterable[Place]) -> Groups:
    """The places of the optimizer's parameters, by group. ArgumentError: the model lacks a parameter."""
    # A tied parameter's first place.
    places = {
        id(place.parameter): replace(place, tensor=place.parameter)
        for place in reversed(list(model))
    }
    raise_for(
        first_problem(
            *(
                (
                    id(parameter) not in places,
                    f"optimizer has a parameter that is not in model: group {number}, {index}, {list(parameter.shape)}",
                )
                for number, group in enumerate(optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
            )
        )
    )
    return [
        [places[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
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
    common = [[place.key for place in places if place.start is None] for places in groups]
    return [type(optimizer).__name__, settings, common]


def told_of(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """Describes this rank's part of an optimizer to the other ranks, in JSON. ArgumentError: experts of a layer
    have different plain values."""
    states = list(_states_of(optimizer, groups))
    values: dict[str, Any] = {}
    for key, _, value in states:
        if not isinstance(value, torch.Tensor) and values.setdefault(key, value) != value:
            raise ArgumentError(f"{key} is {values[key]} and {value}: experts of a layer differ")
    return {
        "params": [_by_key((place.key, place) for place in places) for places in groups],
        "states": _by_key((key, place) for key, place, _ in states),
        "values": values,
        "of_stacks": [
            key
            for key, place, value in states
            if isinstance(value, torch.Tensor) and place.is_of_stack(value)
        ],
    }


def record_of(settings: list[Any], told: Sequence[Mapping[str, Any]]) -> StoredOptimizer:
    """Merges all ranks' descriptions to the stored record without tensors. CheckpointError: ranks disagree."""
    name, settings_of_groups, _ = settings
    params_of_groups = zip(*(table["params"] for table in told), strict=True)
    return StoredOptimizer(
        name=name,
        groups=[
            StoredGroup(params=_merged(tables), settings=its)
            for tables, its in zip(params_of_groups, settings_of_groups, strict=True)
        ],
        values=agreed([table["values"] for table in told]),
        experts={
            key: experts
            for key, experts in _merged(table["states"] for table in told).items()
            if experts is not None
        },
        of_stacks=sorted({key for table in told for key in table["of_stacks"]}),
    )


def places_of_state(
    optimizer: torch.optim.Optimizer, groups: Groups, record: StoredOptimizer
) -> list[Place]:
    """Every tensor in the optimizer's state."""
    return [
        place.like(key, value, experts=record.experts.get(key), is_of_stack=key in record.of_stacks)
        for key, place, value in _states_of(optimizer, groups)
        if isinstance(value, torch.Tensor)
    ]


def check_record(
    stored: StoredOptimizer | None,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    model: Iterable[Place],
) -> StoredOptimizer:
    """Checks the stored optimizer. CheckpointError: its class, or a group's parameters, differ from this one's."""
    if stored is None:
        raise CheckpointError("the checkpoint has no optimizer state")
    name = type(optimizer).__name__
    if stored.name != name:
        raise CheckpointError(f"the checkpoint's optimizer is {stored.name!r}, not {name!r}")
    here: dict[str, list[int | None]] = lists_by_key(
        (place.key, expert) for place in model for expert in place.experts or (None,)
    )
    for number, (group, places) in enumerate(itertools.zip_longest(stored.groups, groups)):
        ours = {
            (place.key, expert) for place in places or () for expert in place.experts or (None,)
        }
        theirs = {
            (key, expert)
            for key, experts in (group.params if group else {}).items()
            for expert in here.get(key, (None,))
            if experts is None or expert in experts
        }
        if differing := sorted({key for key, _ in ours ^ theirs}):
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
) -> tuple[State, list[Place], Shared]:
    """A new state for the optimizer, its tensors for loading, and the tensors that experts share, to load first. Reuses
    the optimizer's tensors that fit. CheckpointError: the stored sets of experts differ from ours."""
    parts = (
        key.removeprefix(PREFIX).rpartition(".")
        for key in (*tensors, *record.values)
        if key.startswith(PREFIX)
    )
    kinds = lists_by_key((name, kind) for name, _, kind in parts)
    state: State = {}
    filled = []
    shared: Shared = []
    for places, group in zip(groups, optimizer.param_groups, strict=True):
        # As in torch, the step count stays on the host unless a kernel reads it.
        on_host = () if group.get("capturable") or group.get("fused") else ("step",)
        for place in places:
            for kind in kinds.get(place.key, ()):
                key = f"{PREFIX}{place.key}.{kind}"
                if not place.is_of(record.experts.get(key), key):
                    continue
                if key in record.values:
                    value = record.values[key]
                else:
                    device = torch.device("cpu") if kind in on_host else place.tensor.device
                    old = optimizer.state.get(place.tensor, {}).get(kind)
                    value, own = _empty(place, key, record, tensors[key], old, device)
                    if own.tensor is value:
                        filled.append(own)
                    else:
                        shared.append((value, own))
                state.setdefault(place.tensor, {})[kind] = value
    return state, filled, shared


def check_shared(shared: Shared) -> None:
    """CheckpointError: experts that share one state here had different states when saved."""
    for _, place in shared:
        copies = place.tensor.reshape(len(place.tensor), -1).view(torch.uint8)
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            raise _other_stacks(place.key)


def install(
    optimizer: torch.optim.Optimizer, state: State, shared: Shared, record: StoredOptimizer
) -> None:
    """Sets the optimizer's state and stored hyperparameters."""
    for value, place in shared:
        value.copy_(place.tensor[0])
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
) -> Iterator[tuple[str, Place, Any]]:
    """Key, place of the parameter, and value of every state."""
    for place in itertools.chain(*groups):
        for kind, value in optimizer.state.get(place.tensor, {}).items():
            yield f"{PREFIX}{place.key}.{kind}", place, value


def _by_key(places: Iterable[tuple[str, Place]]) -> _Experts:
    """The experts of the places, by key."""
    table: _Experts = {}
    for key, place in places:
        table.setdefault(key, [place.num_rows, []])[1] += place.experts
    return table


def _merged(tables: Iterable[_Experts]) -> dict[str, list[int] | None]:
    """By key, the experts of all ranks; None: all experts, or the key is not an expert's."""
    found: dict[str, tuple[int, set[int]]] = {}
    for table in tables:
        for key, (number, experts) in table.items():
            found.setdefault(key, (number, set()))[1].update(experts)
    return {
        key: None if len(experts) == number else sorted(experts)
        for key, (number, experts) in found.items()
    }


def _empty(
    place: Place,
    key: str,
    record: StoredOptimizer,
    stored: TensorStorageMetadata,
    old: Any,
    device: torch.device,
) -> tuple[torch.Tensor, Place]:
    """A state for a parameter (`old` if it fits), and the tensor to load: the state, or copies of it."""
    is_of_stack = place.start is not None and key in record.of_stacks
    shape = tuple(stored.size[1:]) if is_of_stack else place.local_shape(stored.size)
    dtype = stored.properties.dtype
    fits = isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype) == (shape, dtype)
    value = old if fits else torch.empty(shape, dtype=dtype, device=device)
    own = place.like(key, value, experts=record.experts.get(key), is_of_stack=is_of_stack)
    if not is_of_stack or place.is_row:
        return value, own
    # A stack's state other than a number belongs to exactly these experts.
    cuts = [(chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks]
    if own.tensor.dim() > 1 and (own.offsets[0], len(own.tensor)) not in cuts:
        raise _other_stacks(key)
    return value, replace(own, tensor=own.tensor.new_empty(own.tensor.shape))


def _other_stacks(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key} was made by the optimizer for all experts of a rank together, and the ranks that load have other "
        "experts together: load on as many ranks as saved, or with optimizer=None"
    )
