"""State dicts with experts inside objects that a trainer pickles on one rank: all ranks save them instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint.tensors import ModuleState
from symmoe.errors import ArgumentError

_NOTE = "symmoe.state_dict"  # replaces a state dict: its path, its keys, and its values other than tensors


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
    return node if is_same else {name: others.get(name, each) for name, each in node.items()}


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
