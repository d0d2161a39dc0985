"""Tapes by the kind of call: which calls are recorded, and which are played."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.tape.recorder import Recorder, recorder
from symmoe.tape.tape import Tape
from symmoe.torch_internals import current_stream, num_dispatch_modes

_MOST_KINDS = 256  # the kinds of calls that are remembered
_MOST_NUMBERS = 4096
_MOST_FAILURES = 3  # recordings of one kind that may be of no use

Function = Callable[[], Sequence[Any]]


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of call.

    Attributes:
        is_new: whether there was no call yet: the first one compiles, imports and fills caches.
        tape: the last recording.
        is_sure: whether two recordings agree.
        num_failures, problem: recordings of no use so far, and why the last one was.
    """

    is_new: bool = True
    tape: Tape | None = None
    is_sure: bool = False
    num_failures: int = 0
    problem: str = ""


class Tapes:
    """Runs functions of tensors; plays those that it knows. Of one heap; the heap's turns keep threads apart.

    Args:
        device: device of the tensors.
        give_up: called with an error that arises while a tape is played where the peers cannot be told of it.
        constants: tensors that functions use and that are the same in every call.
        compiled: makes a tape that does the same in less time.

    Attributes:
        num_played: calls that have been played.
    """

    def __init__(
        self,
        device: torch.device,
        give_up: Callable[[BaseException], None],
        constants: Sequence[torch.Tensor],
        compiled: Callable[[Tape], Tape],
    ) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._device, self._give_up, self._constants = device, give_up, tuple(constants)
        self._compiled = compiled
        self._numbers: dict[Hashable, int] = {}
        self._counter = itertools.count()
        self.num_played = 0

    def run(
        self, key: Hashable, function: Function, inputs: Sequence[torch.Tensor], numbers: Mapping[str, int]
    ) -> Sequence[Any]:
        """function(), or what the tape of an earlier call does.

        Args:
            key: everything but tensors and `numbers` on which depends what the function launches.
            function: launches kernels; all that it reads, writes and returns is memory of `inputs`, memory that it
                makes, leases that it takes, or a result of a recorded function. It does not wait for the device.
            inputs: tensors; their shapes, strides, dtypes and alignment become a part of the key.
            numbers: see Recorder.

        Returns:
            what the function returns.
        """
        if recorder() is not None or num_dispatch_modes():  # somebody has to see every operator
            return function()
        type_ = self._device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        whole_key = key, autocast, *[(t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in inputs]
        kind = self._kinds.get(whole_key)
        if kind is None:
            kind = self._kinds[whole_key] = _Kind()
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        elif kind.is_sure:
            assert kind.tape is not None
            self.num_played += 1
            self._kinds.move_to_end(whole_key)
            return kind.tape.play(inputs, numbers, self._stream(), self._give_up)
        if kind.is_new or kind.num_failures == _MOST_FAILURES:
            outputs = function()
            kind.is_new = False
            return outputs
        return self._record(kind, function, inputs, numbers)

    def number(self, kind: Hashable) -> int:
        """A number for a kind of call, the same for equal ones: to be hashed instead of it."""
        number = self._numbers.get(kind)
        if number is None:
            if len(self._numbers) == _MOST_NUMBERS:
                self._numbers.clear()
            number = self._numbers[kind] = next(self._counter)
        return number

    def forget(self) -> None:
        """Lets go of all tapes, which hold what their calls were made on."""
        self._kinds.clear()

    @property
    def problems(self) -> list[str]:
        """Why kinds of calls are not played."""
        return [kind.problem for kind in self._kinds.values() if kind.problem and not kind.is_sure]

    def _record(
        self, kind: _Kind, function: Function, inputs: Sequence[torch.Tensor], numbers: Mapping[str, int]
    ) -> Sequence[Any]:
        recording = Recorder(inputs, numbers, self._constants)
        try:
            with recording:
                outputs = function()
            tape, kind.problem = recording.finish(outputs), recording.problem or ""
        finally:
            recording.forget()
        if tape is not None and kind.tape is not None:
            kind.is_sure = kind.tape.same(tape)
            kind.problem = "" if kind.is_sure else "two calls differ in more than memory"
        kind.num_failures += bool(kind.problem)
        kind.tape = self._compiled(tape) if kind.is_sure and tape is not None else tape
        return outputs

    def _stream(self) -> int:
        return current_stream(self._device.index) if self._device.type == "cuda" else 0
