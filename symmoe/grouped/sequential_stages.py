"""The stages of a Sequential, and what is wrong with the arguments of any of them before the first has run.

All that the modules read and write is checked together: a module sees only its own arguments, and would find them wrong
only after earlier modules have written into their buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from symmoe.checks.arguments import RowsLike, scale_problem
from symmoe.checks.buffers import Buffer, overlap_problem
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.linear import GroupedLinear, linear_problem
from symmoe.grouped.mlp import GroupedMLP, mlp_problem

_FORWARDS = (GroupedLinear.forward, ScaledActivation.forward, GroupedMLP.forward)
Three = tuple[GroupedLinear, ScaledActivation, GroupedLinear]
_UNKNOWN = RowsLike(None, None, None)


@dataclass(frozen=True, slots=True)
class Stage:
    """One module of a Sequential, or a GroupedLinear, an activation and a GroupedLinear that run fused.

    Attributes:
        index: the index of the first module.
        modules, inputs, keywords: one or three of each: what a module takes in addition to the rows.
    """

    index: int
    modules: list[nn.Module]
    inputs: list[tuple[Any, ...]]
    keywords: list[dict[str, Any]]

    @property
    def is_fused(self) -> bool:
        """Whether it is three modules."""
        return len(self.modules) == 3

    @property
    def is_known(self) -> bool:
        """Whether it is known how the modules use all arguments, and that the result has new memory."""
        return self.is_fused or type(self.modules[0]).forward in _FORWARDS

    @property
    def delays_gradients(self) -> bool:
        """Whether tensors of forward or backward are still read after the backward pass."""
        return any(getattr(part, "delay_wgrad", False) for module in self.modules for part in module.modules())

    def problem(self, rows: RowsLike) -> Exception | None:
        """What is wrong with an argument of a known stage other than the rows, or None."""
        module, (first, *_) = self.modules[0], self.inputs
        out, grad_input_out = self.keywords[-1].get("out"), self.keywords[0].get("grad_input_out")
        if isinstance(module, ScaledActivation):
            return scale_problem("scale", first[0], rows)
        if isinstance(module, GroupedMLP):
            return mlp_problem(module.fc1, module.fc2, rows, first[0], first[1], out, grad_input_out)
        if self.is_fused:
            fc1, _, fc2 = cast(Three, self.modules)
            return mlp_problem(fc1, fc2, rows, first[0], self.inputs[1][0], out, grad_input_out)
        linear, bias_scale = cast(GroupedLinear, module), self.keywords[0].get("bias_scale")
        return linear_problem(linear, rows, first[0], out, grad_input_out, bias_scale)

    def buffer(self, name: str) -> Buffer | None:
        """`out` or `grad_input_out`, if it was given to a module of a known kind."""
        place = 0 if name == "grad_input_out" else len(self.modules) - 1
        module, tensor = self.modules[place], self.keywords[place].get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        if not isinstance(module, (GroupedLinear, GroupedMLP)):
            return None
        return Buffer(f"{name} of module {self.index + place} ({type(module).__name__})", tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """What the stage reads in addition to the rows."""
        keywords = (k for each in self.keywords for k in each.items())
        arguments = (value for name, value in keywords if name not in ("out", "grad_input_out"))
        values = itertools.chain(arguments, *self.inputs, *(module.parameters() for module in self.modules))
        return (value for value in values if isinstance(value, torch.Tensor))


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, which see what goes into it or comes out of it."""
    return _has_any_global_hook() or bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def stages_problem(stages: list[Stage], x: object) -> Exception | None:
    """What is wrong with the arguments of any stage, or None, as far as it can be told. Reads no device memory."""
    rows = RowsLike.of(x) if isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda") else _UNKNOWN
    for stage in stages:
        if not stage.is_known:
            rows = _UNKNOWN
            continue
        if any(map(has_hooks, stage.modules)):  # a hook may cast what goes in or comes out
            rows = rows._replace(dtype=None)
        error = stage.problem(rows)
        if error is not None:
            return error
    return _shared_memory_problem(stages, x)


def _shared_memory_problem(stages: list[Stage], x: object) -> Exception | None:
    """The error if a buffer shares memory with what any stage reads, or with another one while both matter, or None.

    A result matters to the stages after it, up to the first that is known to allocate its result, or to the caller.
    A graph may read it at any later time. In the same way a gradient matters to the stages before it. A result and a
    gradient never share memory.
    """
    results = [(i, buffer) for i, stage in enumerate(stages) if (buffer := stage.buffer("out")) is not None]
    gradients = [
        (i, buffer) for i, stage in enumerate(stages) if (buffer := stage.buffer("grad_input_out")) is not None
    ]
    if not results and not gradients:
        return None
    read = [x] if isinstance(x, torch.Tensor) else []
    read += itertools.chain.from_iterable(stage.tensors() for stage in stages)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
    known = [i for i, stage in enumerate(stages) if stage.is_known]

    def result(i: int, buffer: Buffer) -> Buffer:
        reader = next((reader for reader in known if reader > i), None)
        return replace(buffer, first=i, last=math.inf if trains or reader is None else reader)

    def gradient(i: int, buffer: Buffer) -> Buffer:  # time goes on as the number of the stage falls
        reader = next((reader for reader in reversed(known) if reader < i), None)
        last = math.inf if reader is None or stages[reader].delays_gradients else -reader
        return replace(buffer, first=-i, last=last)

    error = overlap_problem([result(*each) for each in results], read)
    return error or overlap_problem(
        [gradient(*each) for each in gradients], [*read, *(buffer.tensor for _, buffer in results)]
    )
