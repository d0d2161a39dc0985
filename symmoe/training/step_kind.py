"""The identity of a captured step besides the contents of tensors: its arguments, its model's modules, and torch's
settings. An unknown kind of value is refused by name: a replay would repeat its value from the capture."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
import operator
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from symmoe.checks.arguments import memory_problem, modules_of
from symmoe.errors import ArgumentError, raise_for, warn
from symmoe.grouped.parameters import local_part
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule
from symmoe.moe.listeners import find_listeners
from symmoe.torch_internals import HOOKS, pytree, version_of

_CONSTANTS = frozenset((bool, int, float, complex, str, bytes, range, types.NoneType))
_CONSTANTS |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
# Tables of a module that its calls use for lookups.
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
_SET_BY_DDP = ("modules_buffers", "named_module_buffers")  # lists, new in every call
_TRAINED = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANTS or isinstance(value, numbers.Number | enum.Enum | np.generic)


def _parts(value: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]] | None:
    """A container's parts by position, and a function that rebuilds it from other parts; None: unknown type."""
    kind = type(value)
    if kind in (list, tuple, torch.Size) or (isinstance(value, tuple) and hasattr(kind, "_make")):
        return {f"[{i}]": part for i, part in enumerate(value)}, getattr(kind, "_make", kind)
    if kind is slice:
        return {
            f".{name}": getattr(value, name) for name in ("start", "stop", "step")
        }, lambda new_parts: slice(*new_parts)
    is_dataclass = dataclasses.is_dataclass(kind)
    if is_dataclass or isinstance(value, dict | UserDict | types.SimpleNamespace):
        items = value if isinstance(value, dict) else {}
        fields = [field.name for field in dataclasses.fields(kind)] if is_dataclass else []
        names = [
            name
            for name in dict.fromkeys([*fields, *getattr(value, "__dict__", ())])
            if hasattr(value, name)
        ]
        if not all(map(_is_constant, items)):
            return None

        def rebuild(new_parts: list[Any]) -> Any:
            result = copy.copy(value)
            for key, part in zip(items, new_parts, strict=False):
                dict.__setitem__(result, key, part)
            for name, part in zip(names, new_parts[len(items) :], strict=True):
                object.__setattr__(result, name, part)  # it may be frozen
            return result

        return {
            **{f"[{key!r}]": part for key, part in items.items()},
            **{f".{name}": getattr(value, name) for name in names},
        }, rebuild
    children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        return None
    parts = {f"[{i}]": part for i, part in enumerate(children)} | {".context": spec.context}
    return parts, lambda new_parts: pytree.tree_unflatten(new_parts[:-1], spec)


class Tree:
    """Values by name, flattened: arguments of a captured step of a model on a device, or (None) a step's result.
    ArgumentError, StaleLease: a value has an unknown type, or is a tensor that cannot be an argument. `kind`:
    everything except the contents of `tensors`."""

    def __init__(self, values: dict[str, object], device: torch.device | None = None) -> None:
        self.tensors: list[torch.Tensor] = []  # of the values, each once
        self.paths: list[str] = []  # their positions
        self._values = values
        self._device = device
        self._numbers: dict[int, int] = {}
        tokens: list[Hashable] = []
        for path, value in values.items():
            self._add(path, value, tokens)
        self.kind: Hashable = (*values, *tokens)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> OrderedDict[str, Any]:
        """The values by name, with new tensors in place of `tensors`."""
        return OrderedDict(
            (name, self._with(value, tensors)) for name, value in self._values.items()
        )

    def _with(self, value: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(id(value))
            return value.clone() if number is None else tensors[number]
        if type(value) in _CONSTANTS or (split := _parts(value)) is None:
            return value
        parts, rebuild = split
        return rebuild([self._with(part, tensors) for part in parts.values()])

    def _add(self, path: str, value: object, tokens: list[Hashable]) -> None:
        if isinstance(value, torch.Tensor):
            tokens.append(self._add_tensor(path, value))
        elif type(value) in _CONSTANTS:
            tokens.append(
                (type(value), value if isinstance(value, str) else repr(value))
            )  # 0.0 is not -0.0
        elif (split := _parts(value)) is not None:
            parts, _ = split
            tokens.append((type(value), *parts))
            for where, part in parts.items():
                self._add(path + where, part, tokens)
        elif _is_constant(value):
            tokens.append((type(value), repr(value)))
        else:
            raise ArgumentError(
                f"{path} ({type(value).__name__}) cannot be captured: arguments and results of a captured step are "
                "tensors (torch.from_numpy makes them of arrays), numbers, strings, None, dtypes, devices, and lists, "
                "tuples, dicts (by such keys) and dataclasses of these; what is always the same may stay in the step"
            )

    def _add_tensor(self, path: str, tensor: torch.Tensor) -> Hashable:
        if (number := self._numbers.get(id(tensor))) is not None:
            return number
        if self._device is not None:
            if tensor.requires_grad:
                raise ArgumentError(
                    f"{path} {list(tensor.shape)} requires a gradient; a captured step gives it none"
                )
            raise_for(memory_problem(path, tensor))
            if tensor.device != self._device:
                if (
                    tensor.device.type == "cpu" and tensor.dim() == 0
                ):  # kernels receive it as a number
                    return tensor.dtype, repr(tensor.item())
                raise ArgumentError(
                    f"{path} {list(tensor.shape)} is on {tensor.device}, the model on {self._device}: a replay would "
                    "not read it; move it there, or, if the host shall read it, give numbers"
                )
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.paths.append(path)
        return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def modes(device_type: str) -> Hashable:
    """torch's global settings that a capture fixes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.fp32_precision,
    )


class Modules:
    """A model's modules, inspected before every call. num_inspections: the number of full inspections, which follow a
    change of parameters, buffers, modules, hooks, listeners, or attributes set by the step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.num_inspections = 0
        self._num_replaced = 0
        self._set_by_step: dict[
            tuple[int, str], object
        ] = {}  # attributes that the step itself sets
        self._numbers: dict[Hashable, int] = {}
        self._objects: dict[int, object] = {}  # by id; the reference keeps the id unique
        self.ddp_on_default_stream = False  # a DDP accumulates gradients on it
        self._settings = 0
        self._inspect()

    def _inspect(self) -> None:
        self.num_inspections += 1
        modules = modules_of(self._model, nn.Module)  # ArgumentError: no model
        self.parameters = list(self._model.parameters())
        self._hooks = [hooks for _, *hooks in map(_TRAINED, self.parameters)]
        self.layers = [module for module in modules if isinstance(module, ExpertParallelModule)]
        self.ddps = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._listeners = [listeners for _, listeners in find_listeners(self._model).values()]
        self._callbacks = [listeners.callbacks for listeners in self._listeners]
        tables = [
            *(vars(module)[name] for module in modules for name in _TABLES if name in vars(module)),
            *(table for table in chain.from_iterable(self._hooks) if table is not None),
        ]
        self._full = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._entries = list(chain.from_iterable(map(dict.values, self._full)))
        self._vars = list(map(vars, modules))
        self._num_attributes = sum(map(len, self._vars))
        attributes = [
            (d, n)
            for d in self._vars
            for n in d
            if (id(d), n) not in self._set_by_step and n not in _SET_BY_DDP
        ]
        self._attributes = [
            (d, name)
            for d, name in attributes
            if type(t := d[name]) is torch.Tensor and t.layout is torch.strided
        ]
        self._public = [
            (d, name)
            for d, name in attributes
            if name[0] != "_" and type(d[name]) is not torch.Tensor
        ]
        self.located = [  # in memory of their own
            t
            for t in (*self.parameters, *self._model.buffers())
            if type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        ]
        self.sharded: list[Any] = [
            parameter for parameter in self.parameters if hasattr(parameter, "device_mesh")
        ]
        # Unknown until `settings`.
        self.addresses: list[list[Any]] = []  # tensor addresses
        self._trained: list[tuple[Any, ...]] = []
        self._values: list[Any] = []

    def settings(self) -> int:
        """A number that identifies the step's settings, except tensor addresses."""
        if self._have_changed() or sum(map(len, self._vars)) != self._num_attributes:
            self._inspect()
        trained = list(map(_TRAINED, self.parameters))
        values = [d.get(name) for d, name in self._public]
        tensors = self._tensors()
        addresses = [
            list(map(read, tensors))
            for read in (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel)
        ]
        if (
            trained == self._trained
            and addresses == self.addresses
            and all(map(operator.is_, values, self._values))
        ):
            return self._settings
        if torch.Tensor in map(type, values) or [hooks for _, *hooks in trained] != self._hooks:
            self._inspect()
            return self.settings()
        self._trained = trained
        self._values = values
        self.addresses = addresses
        tokens = [
            (type(value), repr(value) if type(value) in _CONSTANTS else id(value))
            for value in values
        ]
        self._objects |= {id(value): value for value in values if type(value) not in _CONSTANTS}
        layouts = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
        ]
        settings = (
            self.num_inspections,
            *[needs_gradient for needs_gradient, *_ in trained],
            *tokens,
            *layouts,
        )
        self._settings = self._numbers.setdefault(settings, len(self._numbers))
        return self._settings

    def states(self) -> list[torch.Tensor]:
        """Tensors that a step may change, except gradients. (It cannot change tensors with overlapping elements.)"""
        tensors = [
            *(
                t.detach()
                for t in self._tensors()[len(self.sharded) :]
                if not isinstance(t, nn.Parameter)
            ),
            *(total for listeners in self._listeners for total in listeners.totals),
        ]
        return [
            t
            for t in tensors
            if all(step or size < 2 for step, size in zip(t.stride(), t.shape, strict=True))
        ]

    def _tensors(self) -> list[torch.Tensor]:
        with torch.no_grad():
            shards = list(map(local_part, self.sharded))
        return [
            *shards,
            *self.located,
            *[t for d, name in self._attributes if type(t := d.get(name)) is torch.Tensor],
        ]

    @contextmanager
    def running(self, arguments: dict[str, torch.Tensor]) -> Iterator[None]:
        """A context that detects which attributes the step sets. arguments: by position. ArgumentError: the step
        writes into arguments or parameters, or always replaces something in the model."""
        tensors = [
            (name, tensor)
            for name, tensor in (*arguments.items(), *self._model.named_parameters())
            if not tensor.is_inference()  # inference tensors have no versions
        ]
        versions = [version_of(tensor) for _, tensor in tensors]
        watched = [*self._public, *self._attributes]
        before = [d.get(name) for d, name in watched]
        yield
        for (name, tensor), version in zip(tensors, versions, strict=True):
            if version_of(tensor) != version:
                raise ArgumentError(
                    f"the step writes into {name} {list(tensor.shape)}, twice if it has to be repeated"
                )
        self._num_replaced = self._num_replaced + 1 if self._have_changed() else 0
        if self._num_replaced == 2:
            entry_ids = set(map(id, self._entries))
            names = [
                key
                for d in (*self._full, *self._empty)
                for key, value in d.items()
                if id(value) not in entry_ids
            ]
            raise ArgumentError(
                f"the step replaces {names or ['listeners']} of modules in every call, which a replay would not"
            )
        changed = [
            pair
            for pair, value in zip(watched, before, strict=True)
            if not _is_same(value, pair[0].get(pair[1]))
        ]
        if changed:
            names = sorted({name for _, name in changed})
            warn(f"the step sets {names} of modules, which replays of a capture will not")
            self._set_by_step |= {(id(d), name): d for d, name in changed}
            self._inspect()

    def _have_changed(self) -> bool:
        """Whether parameters, buffers, modules, hooks or listeners differ from the last inspection."""
        entries = chain.from_iterable(map(dict.values, self._full))
        is_known = all(map(operator.is_, entries, self._entries)) and sum(
            map(len, self._full)
        ) == len(self._entries)
        return (
            not is_known
            or any(self._empty)
            or [listeners.callbacks for listeners in self._listeners] != self._callbacks
        )


def _is_same(first: object, second: object) -> bool:
    return first is second or (
        type(first) is type(second) and type(first) in _CONSTANTS and first == second
    )
