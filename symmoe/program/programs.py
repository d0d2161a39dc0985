"""The programs of a heap: a call runs the program of its kind, which the second call of the kind builds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import length_hint
from typing import Any, ClassVar

import torch

from symmoe.errors import SymmoeError
from symmoe.program.builder import Builder
from symmoe.program.program import (
    MARK,
    MUST_ABORT,
    MUST_SIGNAL,
    STREAM,
    VALUES,
    Program,
    Step,
    extent_bytes,
    meta_of,
)
from symmoe.program.steps import run_steps, with_steps
from symmoe.torch_internals import current_stream, num_dispatch_modes

MODES = ("on", "off")
_MAX_PROGRAMS = 256  # in the cache
_MAX_KIND_NUMBERS = 4096
_MAX_KINDS = 1 << 16

Function = Callable[[], Sequence[Any]]
Recorded = tuple[tuple[Hashable, ...], Program, int]  # a call: its key, program, number of inputs


class Programs:
    """Runs functions of tensors by programs. Belongs to one heap, whose turns keep threads apart.

    Args:
        device: device of the tensors.
        abort: called with an error of a running program that cannot be reported to the peers.
        constants: tensors of functions that are the same in every call.
        kernels: returns the kernels for the device.
        compiled: makes the runnable form of a program.
        fills: as in Builder.

    Attributes:
        num_built, num_runs: programs built so far, and calls that have run one.
        recorded: of all instances: None, or a list to which each call of a program is added.
    """

    recorded: ClassVar[list[Recorded] | None] = None

    def __init__(
        self,
        device: torch.device,
        abort: Callable[[BaseException], None],
        constants: Sequence[torch.Tensor],
        kernels: Callable[[], object],
        compiled: Callable[[Program], Program],
        *,
        fills: bool = False,
    ) -> None:
        # For a build's shapes torch imports this, which takes 0.3 s to seconds while peers wait.
        with suppress(ImportError):  # this torch has no such module
            import torch.fx.experimental.symbolic_shapes  # noqa: F401

        self._programs = dict[Hashable, Program]()
        self._numbers = dict[Hashable, int]()
        self._device = device
        self._abort = abort
        self._fills = fills
        self._type = device.type  # torch makes a new string on every read
        self._constants = tuple(constants)
        self._kernels = kernels
        self._compiled = compiled
        self._counter = itertools.count()
        self._kinds = set[int]()
        self.num_built = self.num_runs = 0

    def run(
        self,
        key: tuple[Hashable, ...],
        function: Function,
        inputs: Sequence[torch.Tensor | None],
        numbers: Mapping[str, int],
    ) -> Sequence[Any]:
        """Does the work of function() and returns its result.

        Args:
            key: the values other than tensors and `numbers` that determine the launches.
            function: launches kernels. It reads, writes and returns only memory of `inputs`, memory that it makes,
                leases that it takes, and results of noted functions. It changes nothing else, and does not wait for the
                device.
            inputs: tensors; their shapes, strides, dtypes, devices, alignment and requires_grad are a part of the key,
                and so is which of them are None.
            numbers: integers that differ between calls, by their keyword in noted functions.
        """
        if num_dispatch_modes():  # a builder, or another mode that must see every operator
            return function()
        autocast = (
            torch.get_autocast_dtype(self._type) if torch.is_autocast_enabled(self._type) else None
        )
        tensors = []
        metas: list[Hashable] = []
        for t in inputs:
            if t is None:
                metas.append(None)
            else:
                tensors.append(t)
                meta = (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & 15)
                metas.append(meta)
        whole_key = (key, autocast, *metas)
        program = self._programs.pop(whole_key, None)
        program = program or self._new_program(whole_key, function, tensors, numbers)
        if program is None:
            return function()
        self._programs[whole_key] = program  # as the last used
        arguments = [*tensors, *numbers.values()]
        slot_values = [*arguments, *program.slot_values[len(arguments) :]]
        if program.leases is not None and not program.leases.take(slot_values):
            return function()  # needs less memory, or raises
        self.num_runs += 1
        if Programs.recorded is not None:
            Programs.recorded.append((key, program, len(tensors)))
        slot_values[VALUES] = values = program.values[:]
        if self._type == "cuda":
            values[STREAM] = current_stream(self._device.index)
        steps = iter(program.steps)
        try:
            if autocast is not None:  # its changes to operators have been made in the build
                torch.set_autocast_enabled(self._type, False)
            run_steps(steps, slot_values, self._kernels)
        except BaseException as error:
            num_begun = len(program.steps) - length_hint(steps)
            self._finish_obligations(program.steps[max(0, num_begun - 1) :], slot_values, error)
            raise
        finally:
            if autocast is not None:
                torch.set_autocast_enabled(self._type, True)
        return program.result(slot_values)

    def number(self, kind: Hashable) -> int:
        """A number for a kind of call, equal for equal kinds: a quick key."""
        if len(self._numbers) == _MAX_KIND_NUMBERS:
            self._numbers.clear()
        return self._numbers.setdefault(kind, next(self._counter))

    def forget(self) -> None:
        """Drops all programs, which keep the objects of their calls alive."""
        self._programs.clear()

    def _new_program(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[torch.Tensor],
        numbers: Mapping[str, int],
    ) -> Program | None:
        """The program of a call of this kind, or None if the kind is new: a build takes as long as many calls, and
        sizes may come only once. None also if inputs share memory: then a use does not identify its input."""
        kind = hash(key)
        if kind not in self._kinds or _share_memory(inputs):
            if len(self._kinds) == _MAX_KINDS:
                self._kinds.clear()
            self._kinds.add(kind)
            return None
        with Builder(inputs, numbers, self._constants, fills=self._fills) as builder:
            outputs = function()
        self.num_built += 1
        if len(self._programs) == _MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return with_steps(self._compiled(builder.finish(outputs)))

    def _finish_obligations(
        self, steps: Iterable[Step], slot_values: list[Any], error: BaseException
    ) -> None:
        """Launches the work owed to the peers: the peers wait for it, and memory that they write to must not be leased
        again before it. steps: the steps that have not ended."""
        if slot_values[MARK] == MUST_ABORT:
            self._abort(error)
        owes = slot_values[MARK] == MUST_SIGNAL
        try:
            for step in steps:
                owes &= step.slot != MARK
                if owes and step.must_complete:
                    # A wait on a CPU may raise an error that the next call raises again.
                    with suppress(SymmoeError):
                        run_steps([step], slot_values, self._kernels)
        except Exception as problem:  # noqa: BLE001 - the error that led here is raised
            self._abort(problem)


def _share_memory(inputs: Sequence[torch.Tensor]) -> bool:
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + extent_bytes(*meta_of(tensor))) for tensor in inputs
    )
    return any(end > start for (_, end), (start, _) in pairwise(spans))
