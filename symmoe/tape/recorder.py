"""The recorder: notes what a function launches, and which memory each launch reads and writes.

It sees kernels (kernels/launch on GPUs, the functions of the twins elsewhere), functions that are :func:`recorded`, and
every operator of torch. What it does not understand ends the recording with a reason; the call itself goes on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from symmoe.tape.tape import (
    Address,
    Call,
    Entry,
    Free,
    InArena,
    Item,
    Launch,
    Mark,
    Memory,
    New,
    Note,
    Number,
    Operator,
    RecordEvent,
    Tape,
    Thing,
    WaitEvent,
    extent_bytes,
)
from symmoe.torch_internals import READS_BACK, TorchDispatchMode, schema_of, storage_of

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
_MOST_NUMBER = 1 << 40  # a larger integer may be an address, which would be another one in the next call


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
        return function(*args, **kwargs) if current is None else current.call(function, args, kwargs)

    return call


def recorded_on_cpus(function: Callable[P, R]) -> Callable[P, R]:
    """Same as :func:`recorded` on CPUs. On GPUs a tape repeats what the function launches."""
    function.is_seen_through = True  # type: ignore[attr-defined]  # our attribute
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


class _Token:
    """Lives as long as memory that was made while recording, and says when it is freed."""

    def __init__(self, recorder: Recorder, slot: int) -> None:
        self._recorder, self._slot = recorder, slot

    def __del__(self) -> None:
        if _thread.recorder is self._recorder:
            self._recorder.entries.append(Free(self._slot))


class Recorder(TorchDispatchMode):
    """Records one call, as a context. One thread.

    Args:
        inputs: the tensors that the function reads and writes, in slots 0, 1, ... No two share memory.
        numbers: integers that differ from call to call, by the name of the keyword under which recorded functions get
            them.
        constants: tensors that are the same in every call.

    Attributes:
        entries: what has been recorded.
        problem: why the recording is of no use, or None.
        is_owed: whether entries are noted as owed to the peers.
        numbers: as given.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor], numbers: Mapping[str, int], constants: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.entries: list[Entry] = []
        self.problem: str | None = None
        self.is_owed = False
        self.numbers = numbers
        self._num_slots = 0
        self._spans: list[tuple[int, int, int]] = []  # (first address, one past the last, slot), the newest last
        self._things: dict[int, tuple[int, object]] = {}  # id of an object to its slot; holds the object
        self._constants = {tensor.data_ptr() for tensor in constants}
        for tensor in inputs:
            self._place(tensor)
        if any(end > start for (_, end, _), (start, _, _) in pairwise(sorted(self._spans))):
            self.give_up(SHARED)
        device = inputs[0].device
        self._device, self._on_gpu = device, device.type == "cuda"
        self._has_autocast = torch.is_autocast_enabled(device.type)
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

    # -- what the function does ---------------------------------------------------------------------------------------

    def call(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """Calls a function, and notes the call."""
        if self._on_gpu and hasattr(function, "is_seen_through"):
            return function(*args, **kwargs)
        template = self._template(args), {name: self._named(name, value) for name, value in kwargs.items()}
        with self._suspended():
            result = function(*args, **kwargs)
        self._note_call(function, template, result)
        return result

    def launches_with(
        self,
        function: Callable[..., Sequence[Any]],
        template: tuple[Any, ...],
        numbers: Mapping[str, Any],
        results: Sequence[str],
        spoils: torch.Tensor | None,
    ) -> Sequence[Any]:
        """Calls a function of integers in this call and in later ones; its results are arguments of the next launch.

        Args:
            template: the arguments, numbers of the call as Number.
            numbers: where other arguments of the launch come from, by the parameter's name.
            results: the names of those that the function returns.
            spoils: the tensor whose address is the argument `spoiled`.
        """
        result = function(*[self.numbers[each.name] if type(each) is Number else each for each in template])
        slot = self._new_slot()
        self.entries.append(Note(function, (template, {}), slot, is_owed=self.is_owed))
        self._next_numbers = {**numbers, **{name: Item(slot, n) for n, name in enumerate(results)}}
        if spoils is not None:
            self._next_numbers["spoiled"] = Address(self._memory(spoils))
        return result

    def launch(
        self,
        launch: Callable[..., None],
        names: Sequence[str],
        grid: tuple[int, ...],
        stream: int,
        tensors: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
    ) -> None:
        """Notes the launch of a compiled kernel that is about to happen. names: of the parameters."""
        bind = getattr(launch, "bind", None)
        if bind is None:
            self.give_up("a kernel is launched by Triton's launcher")
            return
        numbers = {names.index(name): place for name, place in self._next_numbers.items() if name in names}
        self._next_numbers = {}
        for i, value in enumerate(args):
            if type(value) is int and value > _MOST_NUMBER and i not in numbers and value not in self._constants:
                self.give_up(f"{names[i]} is an integer above {_MOST_NUMBER}, which may be an address")
        memory = [self._memory(tensor) for tensor in tensors]
        if self.problem is None:
            entry: Launch = bind(grid, args, tensors, memory, numbers)
            entry.stream = self._named_stream(stream)
            self.entries.append(entry)

    def note_event(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Notes that an event has been recorded."""
        slot = self._new_slot()
        self._things[id(event)] = slot, event
        self.entries.append(RecordEvent(slot, self._named_stream(stream.cuda_stream), stream))

    def note_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Notes that a stream waits for an event."""
        if id(event) not in self._things:
            self.give_up("a stream waits for an event of another call")
            return
        self.entries.append(WaitEvent(self._things[id(event)][0], self._named_stream(stream.cuda_stream)))

    def offset(self, offset: int) -> InArena | int:
        """Where an offset in the arena comes from: the newest lease that holds it."""
        for slot, thing in reversed(list(self._things.values())):
            start = getattr(thing, "offset", None)
            if start is not None and start <= offset < start + thing.num_bytes:  # type: ignore[attr-defined]  # a lease
                return InArena(slot, offset - start)
        if offset > 0:
            self.give_up("an offset lies in no lease of this call")
        return offset

    def _named_stream(self, stream: int) -> int | None:
        """None for the stream that the call came on."""
        return None if stream == self._stream else stream

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _thread.recorder is not self:
            return function(*args, **kwargs)
        if function.is_view:
            return function(*args, **kwargs)
        if function is READS_BACK:
            self.give_up(f"the host reads a tensor ({function})")
        template = self._template(args), self._template(kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and any(
            isinstance(value, torch.Tensor) and storage_of(value) == storage_of(result)
            for value in (*args, *kwargs.values())
        ):
            if schema_of(function).is_mutable:
                self._note_operator(function, template, None)
            return result
        if function in _EMPTY:
            self.entries.append(New(self._place(result), *_look(result), result.device))
        elif isinstance(result, torch.Tensor):
            self._note_operator(function, template, self._place(result))
        else:
            self.give_up(f"{function} returns {type(result).__name__}")
        return result

    def _note_operator(self, function: Any, template: tuple[Any, Any], slot: int | None) -> None:
        if self._on_gpu and torch.cuda.current_stream(self._device).cuda_stream != self._stream:
            self.give_up(f"{function} runs on another stream")
        autocast = self._device.type if self._has_autocast else None  # what it does to operators has been done here
        self.entries.append(Operator(function, template, slot, is_owed=self.is_owed, leaves_autocast=autocast))

    # -- what it works on -------------------------------------------------------------------------------------------

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        _thread.recorder = None
        try:
            yield
        finally:
            _thread.recorder = self

    def _note_call(self, function: Callable[..., Any], template: tuple[Any, Any], result: object) -> None:
        slot = None
        if isinstance(result, torch.Tensor):
            slot = self._place(result)
        elif isinstance(result, (bytes, tuple, list)):
            self.give_up(f"{function.__qualname__} returns {type(result).__name__}")  # addresses, read by the host
        elif not isinstance(result, (int, type(None))):
            slot = self._new_slot()
            self._things[id(result)] = slot, result
            tensor = getattr(result, "tensor", None)  # a lease
            if isinstance(tensor, torch.Tensor):
                self._note_span(tensor, slot)
        leaves = self._has_autocast and not torch.is_autocast_enabled(self._device.type)
        autocast = self._device.type if leaves else None
        self.entries.append(Call(function, template, slot, is_owed=self.is_owed, leaves_autocast=autocast))

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _place(self, tensor: torch.Tensor) -> int:
        """A new slot for a new tensor."""
        slot = self._new_slot()
        self._note_span(tensor, slot)
        storage = tensor.untyped_storage()
        if _thread.recorder is self and not hasattr(storage, "_tape_token"):
            storage._tape_token = _Token(self, slot)  # type: ignore[attr-defined]  # our attribute
        return slot

    def _note_span(self, tensor: torch.Tensor, slot: int) -> None:
        if tensor.numel() == 0:
            self.give_up("a tensor is empty")
        start = tensor.data_ptr()
        self._spans.append((start, start + extent_bytes(*_look(tensor)), slot))

    def _memory(self, tensor: torch.Tensor) -> Memory:
        start = tensor.data_ptr()
        end = start + extent_bytes(*_look(tensor))
        for first, last, slot in reversed(self._spans):
            if first <= start and end <= last:
                return Memory(slot, start - first, *_look(tensor))
        if start in self._constants:
            return Memory(None, start, *_look(tensor), tensor)
        self.give_up(f"memory of a {list(tensor.shape)} {tensor.dtype} tensor is not known")
        return Memory(None, start, *_look(tensor), tensor)

    def _template(self, value: Any) -> Any:
        """The value with what changes from call to call replaced by where to find it."""
        if isinstance(value, torch.Tensor):
            return self._memory(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._template(part) for part in value])
        if isinstance(value, dict):
            return {name: self._template(part) for name, part in value.items()}
        if id(value) in self._things:
            return Thing(self._things[id(value)][0])
        return value

    def _named(self, name: str, value: Any) -> Any:
        if name in self.numbers:
            return Number(name)
        if name == "publish":
            return tuple(self.offset(offset) for offset in value)
        return self._template(value)


class _ByName:
    """A function of a module, looked up when it is called: whoever replaces it there is heeded."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self.__qualname__ = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._module, self.__qualname__)(*args, **kwargs)


class RecordedModule:
    """The functions of a module as recorded functions."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return recorded(_ByName(self._module, name))


def _look(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
