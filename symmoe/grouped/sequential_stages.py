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

from symmoe import torch_internals
from symmoe.checks.arguments import RowsLike, scale_problem
from symmoe.checks.buffers import Buffer, overlap_problem
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.linear import GroupedLinear, linear_problem
from symmoe.grouped.mlp import GroupedMLP, mlp_problem

_FORWARDS = (GroupedLinear.forward, ScaledActivation.forward, GroupedMLP.forward)
_UNKNOWN = RowsLike(None, None, None)


@dataclass(frozen=True, slots=True)
class Call:
    """One module with what it takes in addition to the rows.

    Attributes:
        name: its name in the outermost Sequential, as in named_modules().
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """The call of one module, or of a GroupedLinear, an activation and a GroupedLinear that run fused."""

    calls: list[Call]

    @property
    def is_fused(self) -> bool:
        """Whether it is three modules."""
        return len(self.calls) == 3

    @property
    def is_known(self) -> bool:
        """Whether it is known how the modules use all arguments, and that the result has new memory."""
        return self.is_fused or type(self.calls[0].module).forward in _FORWARDS

    @property
    def delays_gradients(self) -> bool:
        """Whether tensors of forward or backward are still read after the backward pass."""
        return any(getattr(part, "delay_wgrad", False) for call in self.calls for part in call.module.modules())

    def problem(self, rows: RowsLike) -> Exception | None:
        """What is wrong with an argument of a known stage other than the rows, or None."""
        first, last = self.calls[0], self.calls[-1]
        module, inputs = first.module, first.inputs
        out, grad_input_out = last.keywords.get("out"), first.keywords.get("grad_input_out")
        if isinstance(module, ScaledActivation):
            return scale_problem("scale", inputs[0], rows)
        if isinstance(module, GroupedMLP):
            return mlp_problem(module.fc1, module.fc2, rows, inputs[0], inputs[1], out, grad_input_out)
        linear = cast(GroupedLinear, module)
        if self.is_fused:
            fc2, scale = cast(GroupedLinear, last.module), self.calls[1].inputs[0]
            return mlp_problem(linear, fc2, rows, inputs[0], scale, out, grad_input_out)
        return linear_problem(linear, rows, inputs[0], out, grad_input_out, first.keywords.get("bias_scale"))

    def buffer(self, name: str) -> Buffer | None:
        """`out` or `grad_input_out`, if it was given to a module of a known kind."""
        call = self.calls[0 if name == "grad_input_out" else -1]
        tensor = call.keywords.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        if not isinstance(call.module, (GroupedLinear, GroupedMLP)):
            return None
        return Buffer(f"{name} of module {call.name} ({type(call.module).__name__})", tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """What the stage reads in addition to the rows."""
        for call in self.calls:
            arguments = (value for name, value in call.keywords.items() if name not in ("out", "grad_input_out"))
            values = itertools.chain(arguments, call.inputs, call.module.parameters())
            yield from (value for value in values if isinstance(value, torch.Tensor))


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, or a forward of its own: they see what goes into it or comes out of it."""
    return torch_internals.has_hooks(module) or "forward" in vars(module)


def stages_problem(stages: list[Stage], x: object) -> Exception | None:
    """What is wrong with the arguments of any stage, or None, as far as it can be told. Reads no device memory."""
    rows = RowsLike.of(x) if isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda") else _UNKNOWN
    for stage in stages:
        if not stage.is_known:
            rows = _UNKNOWN
            continue
        if any(has_hooks(call.module) for call in stage.calls):  # a hook may cast what goes in or comes out
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
