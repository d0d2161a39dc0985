"""Sequential: modules in sequence, with extra inputs and keyword arguments routed to their modules. Three modules run
as a GroupedMLP if the difference is not observable, with the same bits.

All tensors that the modules read and write are checked together before the first module runs. Otherwise a module would
find its arguments wrong after earlier modules have written into their buffers.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from symmoe.checks.arguments import (
    Buffer,
    Problem,
    RowsLike,
    check_kind,
    overlap_problem,
    scale_problem,
)
from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.experts import Layers
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import GroupedMLP, fused_mlp
from symmoe.grouped.rows_function import RowArguments, same_splits
from symmoe.torch_internals import around_call, replaceable

OpKwargs = Mapping["nn.Module | int", Mapping[str, Any]]
_Item = TypeVar("_Item")

_FORWARDS = (GroupedLinear.forward, ScaledActivation.forward, GroupedMLP.forward)
_UNKNOWN = RowsLike(None, None, None)
_PATTERN = (
    GroupedLinear,
    ScaledActivation,
    GroupedLinear,
)  # both layers of it need the same splits

# The fused kernels support these; with any other argument the three modules run.
_FUSED_FC1_KEYWORDS = {"grad_input_out", "is_first_microbatch"}
_FUSED_FC2_KEYWORDS = {"out", "bias_scale", "is_first_microbatch"}


class Sequential(nn.Sequential):
    """Modules in sequence.

    FC2's bias is multiplied by a scale only with `bias_scale`; GroupedMLP always multiplies it by the row's prob.

    Args:
        modules: each takes the result of the one before it as first argument, then as many of the extra inputs as its
            attribute `num_extra_inputs` says (GroupedLinear: its splits; ScaledActivation: its scale; GroupedMLP: its
            splits and row_probs; Sequential: its modules' extra inputs; other modules: none). A nested Sequential's
            modules run as if listed here; if it has hooks, it is called as one module.
    """

    def __init__(self, *modules: nn.Module) -> None:
        for i, module in enumerate(modules):
            check_kind(f"modules[{i}]", module, nn.Module, "an nn.Module")
        super().__init__(*modules)

    @property
    def num_extra_inputs(self) -> int:
        """The number of extra inputs of all modules. A subclass with its own forward overrides it."""
        return sum(map(_num_extra_inputs, self))

    @replaceable
    def forward(
        self, x: torch.Tensor, *extra_inputs: Any, op_kwargs: OpKwargs | None = None
    ) -> Any:
        """Runs the modules in order.

        Args:
            x: the input of the first module.
            extra_inputs: the extra inputs of all modules, from left to right. Or one fewer for each pattern
                GroupedLinear, ScaledActivation, GroupedLinear: `mlp(rows, splits, scale)`. Then the second layer of a
                pattern also gets the first layer's splits. Patterns are counted from the left, do not overlap, and may
                extend into nested Sequentials.
            op_kwargs: keyword arguments for single modules, keyed by the module or by its index (from the end if
                negative): `{-1: {"out": buffer}}`. Arguments for modules in a nested Sequential are its own
                `op_kwargs`: `{1: {"op_kwargs": {-1: {"out": buffer}}}}`.

        Returns:
            The last module's result; if modules return tuples, (result, all further elements in order).

        Raises:
            ArgumentError: the number of extra inputs is wrong; or a key of op_kwargs names no module, names one twice,
                or names one that does not take the keyword. No module has run.
            ArgumentError, StaleLease: an argument of a grouped layer or activation is wrong, or its buffers share
                memory with another module's tensors. No module has run, unless a module of another kind precedes it,
                such as a nested Sequential with hooks, which checks only itself, when it runs.
        """
        calls = list(_calls(self, iter(_complete(list(self), extra_inputs)), op_kwargs))
        stages = [Stage(part) for part in _split(calls, _are_fusible)]
        if len(stages) > 1:  # a single stage checks its own arguments
            raise_for(_stages_problem(stages, x))
        outputs: list[Any] = []
        for stage in stages:
            x = stage.run(x)
            if isinstance(x, tuple):
                x, *extra_outputs = x
                outputs += extra_outputs
        return (x, *outputs) if outputs else x


def _num_extra_inputs(module: nn.Module) -> int:
    return getattr(module, "num_extra_inputs", 0)


def _complete(modules: list[nn.Module], extra_inputs: tuple[Any, ...]) -> list[Any]:
    """One element for each input of the modules: repeats splits that a pattern has once."""
    counts = [_num_extra_inputs(module) for module in modules]
    num_inputs = len(extra_inputs)
    num_needed = sum(counts)
    completed = list(extra_inputs)
    if num_inputs == num_needed:
        return completed
    patterns = []
    index = 0  # of the first input of a pattern: splits, scale, splits
    for part in _split(list(_flatten(modules)), _is_pattern):
        patterns += [index] * (len(part) == 3)
        index += sum(map(_num_extra_inputs, part))
    if num_inputs != num_needed - len(patterns):
        names = ", ".join(kind.__name__ for kind in _PATTERN)
        fewest = (
            f", or {num_needed - len(patterns)} with the splits once for each of {names}"
            if patterns
            else ""
        )
        takers = (
            ", ".join(f"{n} for {_label(str(i), modules[i])}" for i, n in enumerate(counts) if n)
            or "none"
        )
        raise ArgumentError(
            f"extra_inputs has {num_inputs} elements; {num_needed} are needed{fewest}: {takers}"
        )
    for index in patterns:
        completed.insert(index + 2, completed[index])
    return completed


def _split(items: list[_Item], belong: Callable[[list[_Item]], bool]) -> Iterator[list[_Item]]:
    """Yields the items in order: three at once if they belong together, else one."""
    i = 0
    while i < len(items):
        count = 3 if belong(items[i : i + 3]) else 1
        yield items[i : i + count]
        i += count


def _flatten(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules, with each nested Sequential replaced by its modules."""
    # Also if it has hooks: a profiler's hook must not change the number of extra inputs.
    for module in modules:
        if type(module).forward is Sequential.forward:
            yield from _flatten(cast(Sequential, module))
        else:
            yield module


def _is_pattern(modules: list[nn.Module]) -> bool:
    return len(modules) == 3 and all(
        isinstance(module, kind) and module.num_extra_inputs == 1
        for module, kind in zip(modules, _PATTERN, strict=True)
    )


def _calls(
    sequential: Sequential, inputs: Iterator[Any], op_kwargs: OpKwargs | None, prefix: str = ""
) -> Iterator[Call]:
    """The modules with their arguments. Replaces a nested Sequential by its modules if its call is unobservable."""
    modules = list(sequential)
    for i, (module, keywords) in enumerate(
        zip(modules, _route(modules, op_kwargs, prefix), strict=True)
    ):
        name = f"{prefix}{i}"
        if isinstance(module, Sequential) and around_call(module) is None:
            yield from _calls(module, inputs, keywords.get("op_kwargs"), f"{name}.")
        else:
            yield Call(
                name, module, tuple(itertools.islice(inputs, _num_extra_inputs(module))), keywords
            )


def _route(
    modules: list[nn.Module], op_kwargs: OpKwargs | None, prefix: str
) -> list[dict[str, Any]]:
    """The keyword arguments of each module. `prefix` precedes the modules' indices in texts."""
    routed: list[dict[str, Any]] = [{} for _ in modules]
    if op_kwargs is None:
        return routed
    check_kind("op_kwargs", op_kwargs, Mapping, "a dict from modules or indices")
    labels = [_label(f"{prefix}{i}", module) for i, module in enumerate(modules)]
    keys: dict[int, object] = {}
    for key, keywords in op_kwargs.items():
        index = _index(modules, key, labels)
        if (first_key := keys.setdefault(index, key)) is not key:
            raise ArgumentError(
                f"op_kwargs addresses {labels[index]} twice, by {_label_of_key(first_key)} and by {_label_of_key(key)}"
            )
        if not isinstance(keywords, Mapping):
            raise ArgumentError(
                f"op_kwargs[{_label_of_key(key)}] ({keywords!r}) must be a dict of keyword arguments"
            )
        valid = _keywords(modules[index])
        for name in keywords:
            if valid is not None and name not in valid:
                choice = ", ".join(sorted(valid)) if valid else "no keyword arguments"
                raise ArgumentError(
                    f"op_kwargs gives {name!r} to {labels[index]}; it takes {choice}"
                )
        routed[index] = dict(keywords)
    return routed


def _index(modules: list[nn.Module], key: object, labels: list[str]) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        if not -len(modules) <= key < len(modules):
            raise ArgumentError(
                f"op_kwargs has index {key}; valid are {-len(modules)} to {len(modules) - 1}"
            )
        return key % len(modules)
    indices = [i for i, module in enumerate(modules) if module is key]
    if not indices:
        raise ArgumentError(
            f"op_kwargs has key {_label_of_key(key)}, which is not in this Sequential; valid are "
            f"{', '.join(labels)}"
        )
    if len(indices) > 1:
        raise ArgumentError(
            f"op_kwargs has key {_label_of_key(key)}, which is at {indices} here; address it by index"
        )
    return indices[0]


def _keywords(module: nn.Module) -> set[str] | None:
    """Names of the keyword arguments of the module's forward; None if forward accepts any keyword."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return keyword_only.union(positional[1 + _num_extra_inputs(module) :])


def _are_fusible(calls: list[Call]) -> bool:
    """Whether these are three modules with unobservable calls for which the fused kernels give the same result."""
    if len(calls) < 3:
        return False
    fc1, activation, fc2 = (call.module for call in calls)
    # Subclasses may compute differently: only the plain modules are fused.
    if not (
        type(fc1) is GroupedLinear
        and isinstance(activation, ScaledActivation)
        and type(fc2) is GroupedLinear
    ) or any(around_call(call.module) for call in calls):
        return False
    (splits1,), (scale,), (splits2,) = (call.inputs for call in calls)
    fc1_keywords, _, fc2_keywords = (call.keywords for call in calls)
    bias_scale = fc2_keywords.get("bias_scale")
    return (
        fc1.num_groups == fc2.num_groups
        and fc1.out_features == activation.activation.hidden_width(fc2.in_features)
        and fc1.weight_parameters()[0].dtype == fc2.weight_parameters()[0].dtype
        and fc1.precision == fc2.precision
        and not fc1.return_bias
        and not fc2.return_bias
        and same_splits(splits1, splits2)
        and fc1_keywords.keys() <= _FUSED_FC1_KEYWORDS
        and fc2_keywords.keys() <= _FUSED_FC2_KEYWORDS
        and (bias_scale is None or (bias_scale is scale and fc2.bias is not None))
    )


def _label(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})"


def _label_of_key(key: object) -> str:
    return repr(key) if isinstance(key, int) else f"a {type(key).__name__}"


@dataclass(frozen=True, slots=True)
class Call:
    """One module with its arguments besides the rows; `name` as in named_modules()."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """The call of one module, or of a GroupedLinear, an activation and a GroupedLinear that run fused."""

    calls: list[Call]

    @property
    def is_known(self) -> bool:
        """Whether the modules' use of all arguments is known, and the result has new memory."""
        return len(self.calls) == 3 or type(self.calls[0].module).forward in _FORWARDS

    def arguments(self) -> RowArguments:
        """The arguments of grouped layers."""
        first = self.calls[0]
        last = self.calls[-1]
        splits, *scales = [value for call in self.calls for value in call.inputs]
        scale = scales[0] if scales else first.keywords.get("bias_scale")
        overwrites = tuple(
            call.keywords.get("is_first_microbatch", False) for call in (first, last)
        )
        return RowArguments(
            splits,
            scale,
            last.keywords.get("out"),
            first.keywords.get("grad_input_out"),
            overwrites,
        )

    def problem(self, rows: RowsLike) -> Problem:
        """The error of an argument of a known stage, other than the rows, or None."""
        module = self.calls[0].module
        if isinstance(module, ScaledActivation):
            return scale_problem("scale", self.calls[0].inputs[0], rows)
        layers = (
            (module.fc1, module.fc2)
            if isinstance(module, GroupedMLP)
            else [c.module for c in self.calls[::2]]
        )
        return self.arguments().problem(rows, cast("list[GroupedLinear]", layers))

    def run(self, x: torch.Tensor) -> Any:
        """The result of the module, or of the last of the three."""
        if len(self.calls) == 1:
            (call,) = self.calls
            return call.module(x, *call.inputs, **call.keywords)
        layers = cast(Layers, tuple(call.module for call in self.calls))  # see _are_fusible
        scale_bias = self.calls[-1].keywords.get("bias_scale") is not None
        return fused_mlp(layers, x, self.arguments(), scale_bias=scale_bias)

    def buffer(self, name: str) -> Buffer | None:
        """`out` or `grad_input_out`, if a module of a known type gets it."""
        call = self.calls[0 if name == "grad_input_out" else -1]
        tensor = call.keywords.get(name)
        takes_buffer = isinstance(call.module, (GroupedLinear, GroupedMLP))
        if takes_buffer and isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            return Buffer(f"{name} of module {_label(call.name, call.module)}", tensor)
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that the stage reads besides the rows."""
        for call in self.calls:
            arguments = (
                value
                for name, value in call.keywords.items()
                if name not in ("out", "grad_input_out")
            )
            values = itertools.chain(arguments, call.inputs, call.module.parameters())
            yield from (value for value in values if isinstance(value, torch.Tensor))


def _stages_problem(stages: list[Stage], x: object) -> Problem:
    """The error of the arguments of any known stage, or None. Reads no device memory. A buffer may not
    share memory with a tensor that a stage reads, or with another buffer while both are in use. A result is in use by
    the stages after it, up to the first that is known to allocate its result, or by the caller. A graph may read it at
    any later time. Likewise a gradient is in use by the stages before it. A result and a gradient never share
    memory."""
    rows = (
        RowsLike.from_rows(x)
        if isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda")
        else _UNKNOWN
    )
    for stage in stages:
        if not stage.is_known:
            rows = _UNKNOWN
            continue
        if any(around_call(call.module) for call in stage.calls):  # it may cast inputs or outputs
            rows = rows._replace(dtype=None)
        if (error := stage.problem(rows)) is not None:
            return error
    results, gradients = (
        {i: buffer for i, stage in enumerate(stages) if (buffer := stage.buffer(name)) is not None}
        for name in ("out", "grad_input_out")
    )
    if not results and not gradients:
        return None
    inputs = [x] if isinstance(x, torch.Tensor) else []
    inputs += itertools.chain.from_iterable(stage.tensors() for stage in stages)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    known_stages = [i for i, stage in enumerate(stages) if stage.is_known]
    for i, buffer in results.items():
        reader = next((reader for reader in known_stages if reader > i), None)
        results[i] = replace(buffer, first=i, last=math.inf if trains or reader is None else reader)
    for i, buffer in gradients.items():  # backward visits stages in descending order
        reader = next((reader for reader in reversed(known_stages) if reader < i), None)
        # Delayed weight gradients still read tensors after the backward pass.
        delays = reader is not None and any(
            getattr(module, "delay_wgrad", False)
            for call in stages[reader].calls
            for module in call.module.modules()
        )
        gradients[i] = replace(
            buffer, first=-i, last=math.inf if reader is None or delays else -reader
        )
    return overlap_problem([*results.values()], inputs) or overlap_problem(
        [*gradients.values()], [*inputs, *(buffer.tensor for buffer in results.values())]
    )
