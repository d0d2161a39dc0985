"""Which calls are recorded and which are played; and the recorder: it notes what a function launches, and which memory
each launch reads and writes.

The recorder sees kernels (kernels/launch on GPUs, the seam of kernels/select.py elsewhere), functions that are
:func:`recorded`, and every operator of torch. What it does not understand ends the recording with a reason; the call
itself goes on.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from symmoe import torch_internals
from symmoe.errors import StaleTape, SymmoeError
from symmoe.tape import tape as tapes
from symmoe.tape.tape import (
    STREAM,
    Call,
    Entry,
    Event,
    Launch,
    Mark,
    Memory,
    ObjectSlot,
    Playing,
    Tape,
)
from symmoe.torch_internals import TorchDispatchMode, current_stream, num_dispatch_modes

P = ParamSpec("P")
R = TypeVar("R")

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
SHARED = "inputs share memory"
MODES = ("on", "audit", "off")
_MOST_NUMBER = (
    1 << 40
)  # a larger integer may be an address, which would be another one in the next call
_MOST_KINDS = 256  # the kinds of calls that are remembered
_MOST_KIND_NUMBERS = 4096
_MOST_FAILURES = 3  # recordings of one kind that may be of no use
_FIRST_AUDIT = 10  # this call of a kind is recorded again and compared, and then those with ten times the number

Function = Callable[[], Sequence[Any]]


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


def recorder() -> Recorder | None:
    """What records this thread's calls now, or None."""
    return _thread.recorder


def recorded(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of functions of which a tape repeats the whole call, not what they launch."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        current = _thread.recorder
        return (
            function(*args, **kwargs) if current is None else current.call(function, args, kwargs)
        )

    return call


def recorded_on_cpus(function: Callable[P, R]) -> Callable[P, R]:
    """Same as :func:`recorded` on CPUs. On GPUs a tape repeats what the function launches."""
    function.is_seen_through = True  # type: ignore[attr-defined]  # our attribute
    return recorded(function)


def recorded_in_order(function: Callable[P, R]) -> Callable[P, R]:
    """Same as :func:`recorded`, of what launches work itself, or meets others: on a tape, nothing passes it."""
    function.is_in_order = True  # type: ignore[attr-defined]  # our attribute
    return recorded(function)


def mark(what: str) -> None:
    """Notes a point that matters if playing is interrupted; see Tape.play."""
    if _thread.recorder is not None:
        _thread.recorder.entries.append(Mark(what))


@contextmanager
def owed() -> Iterator[None]:
    """What is launched in this context is launched even if playing is interrupted between the marks of a trip."""
    current = _thread.recorder
    if current is None:
        yield
        return
    before, current.is_owed = current.is_owed, True
    try:
        yield
    finally:
        current.is_owed = before


def fill(memory: torch.Tensor) -> torch.Tensor:
    """Fills dense memory with 0x7FFF in every two bytes: NaN as any float, as an index one that no tensor has."""
    numbers = memory.as_strided((memory.numel(),), (1,)).view(torch.uint8)
    numbers[: numbers.numel() // 2 * 2].view(torch.int16).fill_(0x7FFF)
    return memory


class Recorder(TorchDispatchMode):
    """Records one call, as a context. One thread.

    Args:
        inputs: the tensors that the function reads and writes, in slots 0, 1, ... No two share memory.
        numbers: integers that differ from call to call, by the name of the keyword under which recorded functions get
            them.
        constants: tensors that are the same in every call.
        fills: whether the tape fills memory that it makes.

    Attributes:
        entries: what has been recorded.
        problem: why the recording is of no use, or None.
        is_owed: whether entries are noted as owed to the peers.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Mapping[str, int],
        constants: Sequence[torch.Tensor],
        *,
        fills: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.entries: list[Entry] = []
        self.problem: str | None = None
        self.is_owed = False
        self.numbers = numbers
        self._num_slots = 0
        # (first address, one past the last, slot, look), the newest last. look: of a tensor that each call has in the
        # slot, or None.
        self._spans: list[tuple[int, int, int, Any]] = []
        self._things: dict[
            int, tuple[int, object]
        ] = {}  # id of an object to its slot; holds the object
        self._constants = {tensor.data_ptr() for tensor in constants}
        for tensor in inputs:
            self._place(tensor, _look(tensor))
        if any(
            end > start
            for (_, end), (start, _) in pairwise(sorted(span[:2] for span in self._spans))
        ):
            self.give_up(SHARED)
        device = inputs[0].device
        self._device, self._on_gpu = device, device.type == "cuda"
        make = torch_internals.empty_strided[device.type]
        self._make = (lambda *look: fill(make(*look))) if fills else make
        self._autocast = device.type if torch.is_autocast_enabled(device.type) else None
        self._stream = torch.cuda.current_stream(device).cuda_stream if self._on_gpu else 0
        self._next_numbers: dict[str, Any] = {}  # those of the next launch, by the parameter's name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks. True would have it import its compiler, which takes seconds, for the first recording."""
        return False

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        _thread.recorder = self
        return self

    def __exit__(self, *exc: Any) -> None:
        _thread.recorder = None
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # untyped in torch

    def forget(self) -> None:
        """Lets go of the objects of the call, which may own leases."""
        self._things.clear()

    def give_up(self, problem: str) -> None:
        """Ends the recording, not the call."""
        self._next_numbers = {}
        self.problem = self.problem or problem

    def finish(self, outputs: Sequence[object]) -> Tape | None:
        """The tape of a function with these outputs; None if there is a problem."""
        templates = tuple(self._template(output) for output in outputs)
        return None if self.problem else Tape(self._num_slots, tuple(self.entries), templates)

    def call(
        self,
        function: Callable[..., R],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str | None = None,
    ) -> R:
        """Calls a function, and notes the call. name: of a kernel, which the tape looks up in every call."""
        if self._on_gpu and hasattr(function, "is_seen_through"):
            return function(*args, **kwargs)
        template = (
            self._template(args),
            {key: self._named(key, value) for key, value in kwargs.items()},
        )
        _thread.recorder = None
        try:
            result = function(*args, **kwargs)
        finally:
            _thread.recorder = self
        self._note_call(name or function, template, result)
        return result

    def kernel(self, name: str, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """A hook for kernels that are functions of the host; see kernels/select.py."""
        return self.call(function, args, kwargs, name)

    def launches_with(
        self,
        function: Callable[..., Sequence[Any]],
        template: tuple[Any, ...],
        numbers: Mapping[str, Any],
        results: Sequence[str],
        nan_on_failure: torch.Tensor | None,
    ) -> Sequence[Any]:
        """Calls a function of integers in this call and in later ones; its results are arguments of the next launch.

        Args:
            template: the arguments, numbers of the call as CallInteger.
            numbers, results: where other arguments of the launch come from, and the names of those that are returned.
            nan_on_failure: the tensor whose address is the argument `spoiled`.
        """
        result = function(
            *[
                self.numbers[each.name] if type(each) is tapes.CallInteger else each
                for each in template
            ]
        )
        slot = self._new_slot()
        self.entries.append(Call(function, (template, {}), slot, tapes.NOTE, self.is_owed))
        self._next_numbers = {
            **numbers,
            **{name: tapes.ResultField(slot, n) for n, name in enumerate(results)},
        }
        if nan_on_failure is not None:
            self._next_numbers["spoiled"] = self._memory(nan_on_failure)
        return result

    def launch(
        self,
        kernel: Any,
        names: Sequence[str],
        grid: tuple[int, ...],
        stream: int,
        args: tuple[Any, ...],
        maps: Any,
    ) -> None:
        """Notes the launch of a compiled kernel that is about to happen; see Launch. names: of the parameters."""
        numbers, self._next_numbers = self._next_numbers, {}
        for name, value in zip(names, args, strict=False):
            if (
                type(value) is int
                and value > _MOST_NUMBER
                and value not in self._constants
                and name not in numbers
            ):
                self.give_up(f"{name} is an integer above {_MOST_NUMBER}, which may be an address")
        given = [
            numbers[name] if name in numbers else self._template(arg)
            for name, arg in zip(names, args)  # noqa: B905 - constants follow
        ]
        self.entries.append(Launch(kernel, grid, tuple(given), self._named_stream(stream), maps))

    def note_event(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Notes that an event has been recorded."""
        slot = self._new_slot()
        self._things[id(event)] = slot, event
        self.entries.append(Event(slot, self._named_stream(stream.cuda_stream), stream))

    def note_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Notes that a stream waits for an event."""
        if id(event) not in self._things:
            self.give_up("a stream waits for an event of another call")
            return
        slot = self._things[id(event)][0]
        self.entries.append(Event(slot, self._named_stream(stream.cuda_stream), is_wait=True))

    def offset(self, offset: int) -> tapes.LeaseOffset | int:
        """Where an offset in the arena comes from: the newest lease that holds it."""
        for slot, thing in reversed(list(self._things.values())):
            start = getattr(thing, "offset", None)
            if start is not None and start <= offset < start + thing.num_bytes:  # type: ignore[attr-defined]  # a lease
                return tapes.LeaseOffset(slot, offset - start)
        if offset > 0:
            self.give_up("an offset lies in no lease of this call")
        return offset

    def _named_stream(self, stream: int) -> int | None:
        """None for the stream that the call came on."""
        return None if stream == self._stream else stream

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _thread.recorder is not self or function.is_view:
            return function(*args, **kwargs)
        if function is torch_internals.READS_BACK:
            self.give_up(f"the host reads a tensor ({function})")
        template = self._template(args), self._template(kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and any(
            isinstance(value, torch.Tensor)
            and torch_internals.storage_of(value) == torch_internals.storage_of(result)
            for value in (*args, *kwargs.values())
        ):
            if torch_internals.schema_of(function).is_mutable:
                self._note_operator(function, template, None)
            return result
        if function in _EMPTY and result.device == self._device:
            self.entries.append(
                Call(self._make, (_look(result), {}), self._place(result, _look(result)), tapes.NEW)
            )
        elif isinstance(result, torch.Tensor):
            self._note_operator(function, template, self._place(result))
        else:
            self.give_up(f"{function} returns {type(result).__name__}")
        return result

    def _note_operator(self, function: Any, template: tuple[Any, Any], slot: int | None) -> None:
        if self._on_gpu and torch.cuda.current_stream(self._device).cuda_stream != self._stream:
            self.give_up(f"{function} runs on another stream")
        # What autocast does to operators has been done here.
        self.entries.append(
            Call(function, template, slot, tapes.OPERATOR, self.is_owed, self._autocast)
        )

    def _note_call(
        self, function: Callable[..., Any] | str, template: tuple[Any, Any], result: object
    ) -> None:
        slot = None
        if isinstance(result, torch.Tensor):
            slot = self._place(result)
        elif isinstance(result, (bytes, tuple, list)):
            self.give_up(
                f"{function} returns {type(result).__name__}"
            )  # addresses, read by the host
        elif not isinstance(result, (int, type(None))):
            tensor = getattr(result, "tensor", None)  # a lease
            slot = self._place(tensor) if isinstance(tensor, torch.Tensor) else self._new_slot()
            self._things[id(result)] = slot, result
        autocast = None if torch.is_autocast_enabled(self._device.type) else self._autocast
        kind = tapes.IN_ORDER if hasattr(function, "is_in_order") else tapes.CALL
        self.entries.append(Call(function, template, slot, kind, self.is_owed, autocast))

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _place(self, tensor: torch.Tensor, known: Any = None) -> int:
        """A new slot for a new tensor. known: its look, if each call has a tensor of this look there."""
        if tensor.numel() == 0:
            self.give_up("a tensor is empty")
        slot, start = self._new_slot(), tensor.data_ptr()
        self._spans.append((start, start + tapes.extent_bytes(*_look(tensor)), slot, known))
        return slot

    def _memory(self, tensor: torch.Tensor) -> Memory | ObjectSlot:
        start, look = tensor.data_ptr(), _look(tensor)
        end = start + tapes.extent_bytes(*look)
        for first, last, slot, known in reversed(self._spans):
            if first == start and look == known:
                return ObjectSlot(slot)
            if first <= start and end <= last:
                return Memory(slot, start - first, *look)
        if start not in self._constants:
            self.give_up(f"memory of a {list(tensor.shape)} {tensor.dtype} tensor is not known")
        return Memory(None, start, *look, tensor)

    def _template(self, value: Any) -> Any:
        """The value with what changes from call to call replaced by where to find it."""
        if isinstance(value, torch.Tensor):
            return self._memory(value)
        if isinstance(value, (tuple, list)):
            parts = [self._template(part) for part in value]
            return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        if isinstance(value, dict):
            return {name: self._template(part) for name, part in value.items()}
        if id(value) in self._things:
            return ObjectSlot(self._things[id(value)][0])
        return value

    def _named(self, name: str, value: Any) -> Any:
        if name in self.numbers:
            return tapes.CallInteger(name)
        if name == "publish":
            return tuple(self.offset(offset) for offset in value)
        return self._template(value)


def _look(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of call."""

    is_new: bool = True  # there was no call yet: the first one compiles, imports and fills caches
    tape: Tape | None = None  # the last recording
    played: Tape | None = None  # what later calls play, once two recordings agree
    fill: Callable[[Playing], Sequence[Any]] | None = None  # fills in its outputs
    num_failures: int = 0  # recordings of no use
    problem: str = ""  # why the last one was
    num_calls: int = 0
    last_call: int = 0  # its number among those of all kinds
    next_audit: int = _FIRST_AUDIT  # the number of the next call that is compared


class Tapes:
    """Runs functions of tensors; plays those that it knows. Of one heap; the heap's turns keep threads apart.

    Args:
        device: device of the tensors.
        give_up: called with an error that arises while a tape is played where the peers cannot be told of it.
        fail: called with the error of a call that does not do any more what its tape does; raises it on all ranks.
        constants: tensors that functions use and that are the same in every call.
        kernels: returns the kernels for the device.
        compiled: makes what is played of a tape; None: it is not played.
        audits: whether no call is played, and each is compared with the tape instead.
        fills: as in Recorder.

    Attributes:
        num_played, num_audited: calls that have been played, and compared.
    """

    def __init__(
        self,
        device: torch.device,
        give_up: Callable[[BaseException], None],
        fail: Callable[[StaleTape], NoReturn],
        constants: Sequence[torch.Tensor],
        kernels: Callable[[], object],
        compiled: Callable[[Tape], Tape | None],
        *,
        audits: bool = False,
        fills: bool = False,
    ) -> None:
        self._kinds, self._numbers = dict[Hashable, _Kind](), dict[Hashable, int]()
        self._device, self._give_up, self._fail = device, give_up, fail
        self._type = device.type  # torch makes a new word each time that it is asked
        self._constants, self._kernels, self._compiled = tuple(constants), kernels, compiled
        self._audits, self._is_ready, self._counter = audits, False, itertools.count()
        self.num_played = self.num_audited = self._num_calls = 0
        self._fills = fills

    def run(
        self,
        key: tuple[Hashable, ...],
        function: Function,
        inputs: Sequence[torch.Tensor],
        numbers: Mapping[str, int],
    ) -> Sequence[Any]:
        """function(), or what the tape of an earlier call does and returns.

        Args:
            key: a word for errors, and everything but tensors and `numbers` on which depends what is launched.
            function: launches kernels; all that it reads, writes and returns is memory of `inputs`, memory that it
                makes, leases that it takes, or a result of a recorded function. It does not wait for the device.
            inputs: tensors; their looks, devices, alignment and whether they require gradients are a part of the key.
            numbers: see Recorder.
        """
        if num_dispatch_modes():  # a recorder, or somebody else who has to see every operator
            return function()
        key, kind = self._kind(key, inputs)
        kind.num_calls += 1
        played, num_done = kind.played, 0
        if played is not None and not self._audits and kind.num_calls < kind.next_audit:
            things = [*inputs, *[None] * (played.num_slots - len(inputs))]
            if played.leases is not None and not played.leases.take(things):
                return function()  # which may need less, or says what is lacking
            self.num_played += 1
            playing = Playing(things, played.values[:], numbers, self._kernels)
            if self._type == "cuda":
                playing.values[STREAM] = current_stream(self._device.index)
            try:
                for entry in played.entries:
                    entry.play(playing)
                    num_done += 1
            except BaseException as error:
                self._pay(played.entries[num_done:], playing, error)
                raise
            return played.outputs if kind.fill is None else kind.fill(playing)
        if kind.is_new or kind.num_failures == _MOST_FAILURES:
            outputs = function()
            kind.is_new = False
            return outputs
        tape, problem, outputs = self._record(function, inputs, numbers)
        if kind.played is None:
            self._learn(kind, tape, problem)
        else:
            self._audit(key, kind, tape, problem)
        return outputs

    def number(self, kind: Hashable) -> int:
        """A number for a kind of call, the same for equal ones: to be hashed instead of it."""
        if len(self._numbers) == _MOST_KIND_NUMBERS:
            self._numbers.clear()
        return self._numbers.setdefault(kind, next(self._counter))

    def forget(self) -> None:
        """Lets go of all tapes, which hold what their calls were made on."""
        self._kinds.clear()

    @property
    def problems(self) -> list[str]:
        """Why kinds of calls are not played."""
        return [
            kind.problem for kind in self._kinds.values() if kind.problem and kind.played is None
        ]

    def _kind(
        self, key: tuple[Hashable, ...], inputs: Sequence[torch.Tensor]
    ) -> tuple[tuple[tuple[Hashable, ...], Hashable], _Kind]:
        """The whole key of a call, and its kind."""
        if not self._is_ready:
            self._get_ready()
        autocast = (
            torch.get_autocast_dtype(self._type) if torch.is_autocast_enabled(self._type) else None
        )
        looks = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & 15)
            for t in inputs
        ]
        whole_key = key, (autocast, *looks)
        kind = self._kinds.get(whole_key)
        if kind is None:
            if len(self._kinds) == _MOST_KINDS:
                del self._kinds[min(self._kinds, key=lambda each: self._kinds[each].last_call)]
            kind = self._kinds[whole_key] = _Kind()
        self._num_calls = kind.last_call = self._num_calls + 1
        return whole_key, kind

    def _pay(self, entries: Sequence[Entry], playing: Playing, error: BaseException) -> None:
        """Launches what is owed to the peers: they wait for it, and memory that they write to must not be leased again
        before that."""
        if playing.mark == tapes.MUST_ABORT:
            self._give_up(error)
        owes = playing.mark == tapes.MUST_SIGNAL
        try:
            for entry in entries:
                owes &= type(entry) is not Mark
                if owes and entry.is_owed:
                    with suppress(
                        SymmoeError
                    ):  # a wait on a CPU may raise what will be raised again at the next call
                        entry.play(playing)
        except Exception as problem:  # noqa: BLE001 - the error that led here is raised
            self._give_up(problem)

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
        recording = Recorder(inputs, numbers, self._constants, fills=self._fills)
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
                    problem, kind.num_failures = "nothing plays it here", _MOST_FAILURES - 1
                kind.fill = None if kind.played is None else tapes.filler(kind.played.outputs)
        kind.problem = problem
        kind.num_failures += bool(problem)
        kind.tape = tape

    def _audit(
        self, whole_key: tuple[Any, ...], kind: _Kind, tape: Tape | None, problem: str
    ) -> None:
        """Compares a recording. If it differs, throws the tape away and raises."""
        assert kind.tape is not None
        difference = problem if tape is None else kind.tape.difference(tape)
        self.num_audited += 1
        kind.next_audit = 10 * kind.num_calls
        if not difference or difference == SHARED:  # the latter is no matter of the tape
            return
        del self._kinds[whole_key]
        text = f"call {kind.num_calls} of '{whole_key[0][0]}' with these sizes does not do what its tape does: "
        text += f"{difference}. Those since the last one that was compared may be wrong; SYMMOE_TAPES=off plays none"
        self._fail(StaleTape(text))
