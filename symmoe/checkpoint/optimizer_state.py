"""The state of an optimizer: tensors cut like their parameters, and the rest, which is the same on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from symmoe.checkpoint.manifest import StoredGroup, StoredOptimizer
from symmoe.checkpoint.tensors import Place
from symmoe.errors import ArgumentError, CheckpointError

PREFIX = "optimizer."
State = dict[torch.Tensor, dict[str, Any]]
Groups = list[list[Place]]


def groups_of(optimizer: torch.optim.Optimizer, model: Iterable[Place]) -> Groups:
    """The places of the optimizer's parameters, by group. ArgumentError: the model does not have one of them."""
    places = {
        id(place.tensor): place for place in reversed(list(model))
    }  # the first place of a tied parameter
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in places:
                raise ArgumentError(
                    f"optimizer has a parameter that is not in model: group {number}, {index}, {list(parameter.shape)}"
                )
    return [
        [places[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
    ]


def stored_of(
    optimizer: torch.optim.Optimizer, groups: Groups
) -> tuple[list[Place], StoredOptimizer]:
    """Every tensor in the optimizer's state; and what is stored in addition, if that is fit for JSON, in which discrete
    weights of one layer have one name."""
    tensors: list[Place] = []
    values: dict[str, dict[str, Any]] = {}
    for place in itertools.chain(*groups):
        for kind, value in optimizer.state.get(place.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                tensors.append(place.like(f"{PREFIX}{place.key}.{kind}", value))
            else:
                values.setdefault(place.key, {})[kind] = value
    stored = []
    for places, group in zip(groups, optimizer.param_groups, strict=True):
        settings = {
            name: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        stored.append(StoredGroup(list(dict.fromkeys(place.key for place in places)), settings))
    return tensors, StoredOptimizer(type(optimizer).__name__, stored, values)


def check_record(
    stored: StoredOptimizer | None, optimizer: torch.optim.Optimizer, groups: Groups
) -> StoredOptimizer:
    """The stored optimizer. CheckpointError: it has another class than this one, or other parameters in its groups."""
    if stored is None:
        raise CheckpointError("the checkpoint has no optimizer state")
    _, own = stored_of(optimizer, groups)
    if stored.name != own.name:
        raise CheckpointError(f"the checkpoint's optimizer is {stored.name!r}, not {own.name!r}")
    for number, pair in enumerate(itertools.zip_longest(stored.groups, own.groups)):
        theirs, ours = (group.params if group else [] for group in pair)
        if theirs != ours:
            differing = sorted(set(theirs) ^ set(ours)) or ours
            raise CheckpointError(
                f"group {number} of the checkpoint's optimizer has other parameters, or another order: {differing[:3]}"
            )
    return stored


def empty_state(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    record: StoredOptimizer,
    tensors: Mapping[str, TensorStorageMetadata],
) -> tuple[State, list[Place]]:
    """A new state for the optimizer, and its tensors, to be filled. It uses the optimizer's tensors where they fit."""
    kinds: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, stored in tensors.items():
        if key.startswith(PREFIX):
            name, _, kind = key.removeprefix(PREFIX).rpartition(".")
            kinds.setdefault(name, {})[kind] = stored
    state: State = {}
    filled = []
    for places, group in zip(groups, optimizer.param_groups, strict=True):
        for place in places:
            old, new = optimizer.state.get(place.tensor, {}), dict(record.values.get(place.key, {}))
            for kind, stored in kinds.get(place.key, {}).items():
                shape, dtype = place.local_shape(tuple(stored.size)), stored.properties.dtype
                value = old.get(kind)
                if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (
                    shape,
                    dtype,
                ):
                    # As in torch: the count of steps stays on the host unless a kernel reads it.
                    on_host = kind == "step" and not (group.get("capturable") or group.get("fused"))
                    value = torch.empty(
                        shape, dtype=dtype, device="cpu" if on_host else place.tensor.device
                    )
                new[kind] = value
                filled.append(place.like(f"{PREFIX}{place.key}.{kind}", value))
            if new:
                state[place.tensor] = new
    return state, filled


def install(optimizer: torch.optim.Optimizer, state: State, record: StoredOptimizer) -> None:
    """Makes the state and the stored hyperparameters the optimizer's."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, stored in zip(optimizer.param_groups, record.groups, strict=True):
        for name, value in stored.settings.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
