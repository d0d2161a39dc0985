"""Tapes by the kind of call: which calls are recorded, and which are played."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from symmoe.errors import StaleTape
from symmoe.tape.recorder import SHARED, Recorder, recorder
from symmoe.tape.tape import Tape
from symmoe.torch_internals import current_stream, num_dispatch_modes

_MOST_KINDS = 256  # the kinds of calls that are remembered
_MOST_NUMBERS = 4096
_MOST_FAILURES = 3  # recordings of one kind that may be of no use
_FIRST_AUDIT = 10  # this call of a kind is recorded again and compared, and then those with ten times the number
MODES = ("on", "audit", "off")

Function = Callable[[], Sequence[Any]]


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of call.

    Attributes:
        is_new: whether there was no call yet: the first one compiles, imports and fills caches.
        tape: the last recording.
        played: what later calls play, once two recordings agree.
        num_failures, problem: recordings of no use so far, and why the last one was.
        num_calls, next_audit: calls so far, and the next one that is compared.
    """

    is_new: bool = True
    tape: Tape | None = None
    played: Tape | None = None
    num_failures: int = 0
    problem: str = ""
    num_calls: int = 0
    next_audit: int = _FIRST_AUDIT


class Tapes:
    """Runs functions of tensors; plays those that it knows. Of one heap; the heap's turns keep threads apart.

    Args:
        device: device of the tensors.
        give_up: called with an error that arises while a tape is played where the peers cannot be told of it.
        fail: called with the error of a call that does not do any more what its tape does; raises it on all ranks.
        constants: tensors that functions use and that are the same in every call.
        compiled: makes what is played of a tape, or None.
        audits: whether no call is played, and each is compared with the tape instead.

    Attributes:
        num_played, num_audited: calls that have been played, and compared.
    """

    def __init__(
        self,
        device: torch.device,
        give_up: Callable[[BaseException], None],
        fail: Callable[[StaleTape], NoReturn],
        constants: Sequence[torch.Tensor],
        compiled: Callable[[Tape], Tape | None],
        *,
        audits: bool = False,
    ) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._device, self._give_up, self._fail = device, give_up, fail
        self._constants, self._compiled, self._audits = tuple(constants), compiled, audits
        self._numbers: dict[Hashable, int] = {}
        self._counter = itertools.count()
        self._is_ready = False
        self.num_played = self.num_audited = 0

    def run(
        self, key: tuple[Hashable, ...], function: Function, inputs: Sequence[torch.Tensor], numbers: Mapping[str, int]
    ) -> Sequence[Any]:
        """function(), or what the tape of an earlier call does.

        Args:
            key: a word for errors, and everything but tensors and `numbers` on which depends what is launched.
            function: launches kernels; all that it reads, writes and returns is memory of `inputs`, memory that it
                makes, leases that it takes, or a result of a recorded function. It does not wait for the device.
            inputs: tensors; their looks, devices, alignment and whether they require gradients are a part of the key.
            numbers: see Recorder.

        Returns:
            what the function returns.
        """
        if recorder() is not None or num_dispatch_modes():  # somebody has to see every operator
            return function()
        if not self._is_ready:
            self._get_ready()
        type_ = self._device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        looks = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & 15) for t in inputs]
        whole_key = key, autocast, *looks
        kind = self._kinds.get(whole_key)
        if kind is None:
            kind = self._kinds[whole_key] = _Kind()
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        kind.num_calls += 1
        if kind.played is not None and not self._audits and kind.num_calls < kind.next_audit:
            self.num_played += 1
            self._kinds.move_to_end(whole_key)
            return kind.played.play(inputs, numbers, self._stream(), self._give_up)
        if kind.is_new or kind.num_failures == _MOST_FAILURES:
            outputs = function()
            kind.is_new = False
            return outputs
        tape, problem, outputs = self._record(function, inputs, numbers)
        if kind.played is None:
            self._learn(kind, tape, problem)
        else:
            self._audit(whole_key, kind, tape, problem)
        return outputs

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
        return [kind.problem for kind in self._kinds.values() if kind.problem and kind.played is None]

    def _get_ready(self) -> None:
        """What torch imports for a recording, and what is compiled to play it: before the first call of any kind, which
        is a first time for all ranks, and not when only one rank records."""
        self._is_ready = True
        with torch.inference_mode(False), Recorder([torch.empty(1, device=self._device)], {}, ()):
            torch.empty(1, device=self._device).fill_(0)
        self._compiled(Tape(0, (), ()))

    def _record(
        self, function: Function, inputs: Sequence[torch.Tensor], numbers: Mapping[str, int]
    ) -> tuple[Tape | None, str, Sequence[Any]]:
        """The recording of function(), or why there is none; and what the function returns."""
        recording = Recorder(inputs, numbers, self._constants)
        try:
            with recording:
                outputs = function()
            return recording.finish(outputs), recording.problem or "", outputs
        finally:
            recording.forget()

    def _learn(self, kind: _Kind, tape: Tape | None, problem: str) -> None:
        if tape is not None and kind.tape is not None:
            if kind.tape.difference(tape):
                problem = "two calls differ in more than memory"
            else:
                kind.played = self._compiled(tape)
                if kind.played is None:
                    problem, kind.num_failures = "not all of it can be played", _MOST_FAILURES - 1
        kind.problem = problem
        kind.num_failures += bool(problem)
        kind.tape = tape

    def _audit(self, whole_key: tuple[Any, ...], kind: _Kind, tape: Tape | None, problem: str) -> None:
        """Compares a recording. If it differs, throws the tape away and raises."""
        assert kind.tape is not None
        difference = problem if tape is None else kind.tape.difference(tape)
        self.num_audited += 1
        kind.next_audit = 10 * kind.num_calls
        if not difference or difference == SHARED:  # the latter is no matter of the tape
            return
        del self._kinds[whole_key]
        self._fail(
            StaleTape(
                f"call {kind.num_calls} of '{whole_key[0][0]}' with these sizes does not do what its tape does: "
                f"{difference}. Those since the last one that was compared may be wrong; SYMMOE_TAPES=off plays none"
            )
        )

    def _stream(self) -> int:
        return current_stream(self._device.index) if self._device.type == "cuda" else 0
