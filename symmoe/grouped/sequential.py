"""Sequential: modules in a row, with extra inputs and keyword arguments brought to the module that takes them.

It runs GroupedLinear, ScaledActivation, GroupedLinear through the fused kernels where nothing can tell the
difference: the result is the same, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import fused_mlp
from symmoe.grouped.sequential_stages import Stage, Three, has_hooks, stages_problem
from symmoe.grouped.splits import same_splits

OpKwargs = Mapping["nn.Module | int", Mapping[str, Any]]

# What the fused kernels can honour; any other argument brings the three modules back.
_FUSED_FC1_KEYWORDS = {"grad_input_out", "is_first_microbatch"}
_FUSED_FC2_KEYWORDS = {"out", "bias_scale", "is_first_microbatch"}


class Sequential(nn.Module):
    """Modules in a row.

    Args:
        modules: each takes the result of the one before it as first argument, then as many of the extra inputs as its
            attribute `num_extra_inputs` says (GroupedLinear: its splits; ScaledActivation: its scale; GroupedMLP: its
            splits and row_probs; other modules: none).
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise ArgumentError(f"modules[{i}] ({type(module).__name__}) must be an nn.Module")
            self.add_module(str(i), module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module in self._modules.values() if module is not None)

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(str(range(len(self))[index]))

    def forward(self, x: torch.Tensor, *extra_inputs: Any, op_kwargs: OpKwargs | None = None) -> Any:
        """Runs the modules in order.

        Args:
            x: the input of the first module.
            extra_inputs: those of all modules that take some, from left to right.
            op_kwargs: keyword arguments for single modules, keyed by the module or by its index (from the end if
                negative): `{-1: {"out": buffer}}`.

        Returns:
            What the last module returns; where modules return tuples, (result, all further elements in order).

        Raises:
            ArgumentError: the number of extra inputs is wrong; or a key of op_kwargs names no module, names one twice,
                or names one that does not take the keyword. Nothing has been computed.
            ArgumentError, StaleLease: what a grouped layer or activation is given is wrong, or its buffers share memory
                with what another of the modules uses. Nothing has been computed, unless a
                module of another kind comes before it.
        """
        modules = list(self)
        if op_kwargs is not None and not isinstance(op_kwargs, Mapping):
            raise ArgumentError(f"op_kwargs ({type(op_kwargs).__name__}) must be a dict from modules or indices")
        keywords = _route(modules, op_kwargs or {})
        inputs = _deal(modules, extra_inputs)
        stages = _stages(modules, inputs, keywords)
        if len(stages) > 1:  # a single stage checks its own arguments
            raise_for(stages_problem(stages, x))
        outputs: list[Any] = []
        for stage in stages:
            x = _run_fused(stage, x) if stage.is_fused else stage.modules[0](x, *stage.inputs[0], **stage.keywords[0])
            if isinstance(x, tuple):
                x, *more = x
                outputs += more
        return (x, *outputs) if outputs else x


def _stages(modules: list[nn.Module], inputs: list[tuple[Any, ...]], keywords: list[dict[str, Any]]) -> list[Stage]:
    """The modules with their arguments; three modules that can be fused are one stage."""
    stages: list[Stage] = []
    i = 0
    while i < len(modules):
        count = 3 if _are_fusible(modules[i : i + 3], inputs[i : i + 3], keywords[i : i + 3]) else 1
        part = slice(i, i + count)
        stages.append(Stage(i, modules[part], inputs[part], keywords[part]))
        i += count
    return stages


def _deal(modules: list[nn.Module], extra_inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The extra inputs of each module."""
    counts = [getattr(module, "num_extra_inputs", 0) for module in modules]
    if sum(counts) != len(extra_inputs):
        takers = ", ".join(f"{n} for {_label(modules, i)}" for i, n in enumerate(counts) if n) or "none"
        raise ArgumentError(f"extra_inputs has {len(extra_inputs)} elements; {sum(counts)} are needed: {takers}")
    remaining = iter(extra_inputs)
    return [tuple(next(remaining) for _ in range(n)) for n in counts]


def _route(modules: list[nn.Module], op_kwargs: OpKwargs) -> list[dict[str, Any]]:
    """The keyword arguments of each module."""
    routed: list[dict[str, Any]] = [{} for _ in modules]
    keys: dict[int, object] = {}
    for key, keywords in op_kwargs.items():
        index = _index(modules, key)
        if index in keys:
            raise ArgumentError(
                f"op_kwargs addresses {_label(modules, index)} twice, by {_show(keys[index])} and by {_show(key)}"
            )
        keys[index] = key
        if not isinstance(keywords, Mapping):
            raise ArgumentError(f"op_kwargs[{_show(key)}] ({keywords!r}) must be a dict of keyword arguments")
        valid = _keywords(modules[index])
        if valid is not None:
            for name in keywords:
                if name not in valid:
                    choice = f"it takes {', '.join(sorted(valid))}" if valid else "it takes no keyword arguments"
                    raise ArgumentError(f"op_kwargs gives {name!r} to {_label(modules, index)}; {choice}")
        routed[index] = dict(keywords)
    return routed


def _index(modules: list[nn.Module], key: object) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        if not -len(modules) <= key < len(modules):
            raise ArgumentError(f"op_kwargs has index {key}; valid are {-len(modules)} to {len(modules) - 1}")
        return key % len(modules)
    places = [i for i, module in enumerate(modules) if module is key]
    names = ", ".join(_label(modules, i) for i in range(len(modules)))
    if not places:
        raise ArgumentError(f"op_kwargs has key {_show(key)}, which is not in this Sequential; valid are {names}")
    if len(places) > 1:
        raise ArgumentError(f"op_kwargs has key {_show(key)}, which is at {places} here; address it by index")
    return places[0]


def _keywords(module: nn.Module) -> set[str] | None:
    """Names of the keyword arguments that the module's forward takes; None if it takes any."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    num_taken = 1 + getattr(module, "num_extra_inputs", 0)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][num_taken:]
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | set(positional)


def _are_fusible(modules: list[nn.Module], inputs: list[tuple[Any, ...]], keywords: list[dict[str, Any]]) -> bool:
    """Whether these are three modules without hooks, and the fused kernels give the same result."""
    if len(modules) < 3:
        return False
    fc1, activation, fc2 = modules
    # Subclasses may compute something else, hooks would not be called: only the plain modules are known well enough.
    if not (type(fc1) is GroupedLinear and isinstance(activation, ScaledActivation) and type(fc2) is GroupedLinear):
        return False
    if type(activation).forward is not ScaledActivation.forward or any(has_hooks(module) for module in modules):
        return False
    (splits1,), (scale,), (splits2,) = inputs
    bias_scale = keywords[2].get("bias_scale")
    return (
        fc1.num_groups == fc2.num_groups
        and fc1.out_features == activation.activation.hidden_width(fc2.in_features)
        and fc1.weight_parameters()[0].dtype == fc2.weight_parameters()[0].dtype
        and fc1.precision == fc2.precision
        and not fc1.return_bias
        and not fc2.return_bias
        and same_splits(splits1, splits2)
        and keywords[0].keys() <= _FUSED_FC1_KEYWORDS
        and keywords[2].keys() <= _FUSED_FC2_KEYWORDS
        and (bias_scale is None or (bias_scale is scale and fc2.bias is not None))
    )


def _run_fused(stage: Stage, x: torch.Tensor) -> torch.Tensor:
    fc1, activation, fc2 = cast(Three, stage.modules)
    (splits,), (scale,), _ = stage.inputs
    first, _, last = stage.keywords
    return fused_mlp(
        fc1,
        activation,
        fc2,
        x,
        splits,
        scale,
        scale_bias=last.get("bias_scale") is not None,
        out=last.get("out"),
        grad_input_out=first.get("grad_input_out"),
        is_first_microbatch=(first.get("is_first_microbatch", False), last.get("is_first_microbatch", False)),
    )


def _label(modules: list[nn.Module], index: int) -> str:
    return f"{index} ({type(modules[index]).__name__})"


def _show(key: object) -> str:
    return repr(key) if isinstance(key, int) else f"a {type(key).__name__}"
