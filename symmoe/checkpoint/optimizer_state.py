"""The state of an optimizer: tensors cut like their parameters, and the rest, which is the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

import torch

from symmoe.checkpoint.manifest import DTYPES, Manifest
from symmoe.checkpoint.tensors import Place
from symmoe.errors import ArgumentError, CheckpointError

PREFIX = "optimizer."
State = dict[torch.Tensor, dict[str, Any]]
_Stored = TypeVar("_Stored")


def state_places(optimizer: torch.optim.Optimizer, model: Iterable[Place]) -> list[Place]:
    """Every tensor in the optimizer's state.

    Raises:
        ArgumentError: it has a parameter that the model does not have.
    """
    places = []
    for place in _parameters(optimizer, model):
        for kind, value in optimizer.state.get(place.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                places.append(place.like(_key(place, kind), value))
    return places


def record_of(optimizer: torch.optim.Optimizer, model: Iterable[Place]) -> dict[str, Any]:
    """Its class, hyperparameters, parameters' names by group, and the state that is not tensors; fit for JSON.

    Raises:
        ArgumentError: as in state_places, or a value is not fit for JSON.
    """
    model = list(model)
    values: dict[str, Any] = {}
    for place in _parameters(optimizer, model):
        for kind, value in optimizer.state.get(place.tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                values[_key(place, kind)] = value
    groups = [
        {"params": _names(group, optimizer, model)} | {name: _plain(value) for name, value in _settings(group).items()}
        for group in optimizer.param_groups
    ]
    record = {"class": type(optimizer).__name__, "groups": groups, "values": values}
    try:
        as_json: dict[str, Any] = json.loads(json.dumps(record))
        return as_json
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"optimizer has a setting or state that is not fit for JSON: {error}") from error


def check_record(optimizer: torch.optim.Optimizer, model: Iterable[Place], manifest: Manifest) -> None:
    """Checks that the stored optimizer has the same class as this one, and the same parameters in the same groups.

    Raises:
        CheckpointError: it has not.
    """
    stored, model = _stored(manifest), list(model)
    groups = stored.get("groups")
    if stored.get("class") != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint's optimizer is {stored.get('class')!r}, not {type(optimizer).__name__!r}"
        )
    if not isinstance(stored.get("values"), dict) or not isinstance(groups, list):
        raise CheckpointError("the checkpoint's optimizer has no groups and values")
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} groups; this one has {len(optimizer.param_groups)}"
        )
    for number, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        names = _names(group, optimizer, model)
        theirs = saved.get("params") if isinstance(saved, dict) else None
        if theirs != names:
            differing = sorted(set(names) ^ set(theirs)) if _are_names(theirs) else names
            raise CheckpointError(
                f"group {number} of the checkpoint's optimizer has other parameters, or another order: "
                f"{differing[:3] or names[:3]}"
            )
    kinds = _by_parameter(manifest.tensors)
    unknown = sorted(kinds.keys() - {place.key for place in _parameters(optimizer, model)})
    if unknown:
        raise CheckpointError(f"the checkpoint has optimizer state of {unknown[0]}, which this optimizer has not")


def empty_state(
    optimizer: torch.optim.Optimizer, model: Iterable[Place], manifest: Manifest
) -> tuple[State, list[Place]]:
    """A new state for the optimizer, and its tensors, to be filled. It uses the optimizer's tensors where they fit."""
    kinds, values = _by_parameter(manifest.tensors), _by_parameter(_stored(manifest)["values"])
    on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    state: State = {}
    places = []
    for place in _parameters(optimizer, model):
        parameter = place.tensor
        old, new = optimizer.state.get(parameter, {}), {}
        for kind, stored in kinds.get(place.key, {}).items():
            shape = _local_shape(place, stored.shape)
            dtype = DTYPES[stored.dtype]
            value = old.get(kind)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
                # As in torch: the count of steps stays on the host unless a kernel reads it.
                device = parameter.device if kind != "step" or on_device[id(parameter)] else "cpu"
                value = torch.empty(shape, dtype=dtype, device=device)
            new[kind] = value
            places.append(place.like(_key(place, kind), value))
        new |= values.get(place.key, {})
        if new:
            state[parameter] = new
    return state, places


def install(optimizer: torch.optim.Optimizer, state: State, manifest: Manifest) -> None:
    """Makes the state and the stored hyperparameters the optimizer's."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, stored in zip(optimizer.param_groups, _stored(manifest)["groups"], strict=True):
        for name, value in stored.items():
            if name == "params":
                continue
            current = group.get(name)
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _parameters(optimizer: torch.optim.Optimizer, model: Iterable[Place]) -> list[Place]:
    """The places of the optimizer's parameters, in its order."""
    places: dict[int, Place] = {}
    for place in model:
        places.setdefault(id(place.tensor), place)  # the first place of a tied parameter
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in places:
                raise ArgumentError(
                    f"optimizer has a parameter that is not in model: group {number}, {index}, {list(parameter.shape)}"
                )
            found.append(places[id(parameter)])
    return found


def _names(group: dict[str, Any], optimizer: torch.optim.Optimizer, model: list[Place]) -> list[str]:
    """The names of a group's parameters; discrete weights of one layer have one name."""
    own = {id(parameter) for parameter in group["params"]}
    return list(dict.fromkeys(place.key for place in _parameters(optimizer, model) if id(place.tensor) in own))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _stored(manifest: Manifest) -> dict[str, Any]:
    if manifest.optimizer is None:
        raise CheckpointError("the checkpoint has no optimizer state")
    return manifest.optimizer


def _are_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _key(place: Place, kind: str) -> str:
    return f"{PREFIX}{place.key}.{kind}"


def _by_parameter(stored: Mapping[str, _Stored]) -> dict[str, dict[str, _Stored]]:
    """Stored state by the parameter's key and kind."""
    kinds: dict[str, dict[str, _Stored]] = {}
    for key, value in stored.items():
        if key.startswith(PREFIX):
            parameter, _, kind = key.removeprefix(PREFIX).rpartition(".")
            kinds.setdefault(parameter, {})[kind] = value
    return kinds


def _local_shape(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of this rank's part of a state whose whole shape is `shape`."""
    if not place.shares_rows_with(shape):
        return shape
    return shape[1:] if place.is_row else (len(place.tensor), *shape[1:])
