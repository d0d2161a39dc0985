"""The builder of programs: it runs a function of the package once and records its launches, without a real launch.

Memory that the function makes or leases has a symbolic address in an unused range, one for each slot. So a tensor, an
offset or an address identifies its operand. Kernels, operators of torch and functions that are :func:`noted` are
recorded, not called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from symmoe import torch_internals
from symmoe.address_range import AddressRange
from symmoe.program import program as parts
from symmoe.program.program import (
    Call,
    Entry,
    Event,
    Launch,
    Mark,
    ObjectSlot,
    Operation,
    Program,
    TensorMeta,
    TensorRef,
    extent_bytes,
    mapped,
    meta_of,
)
from symmoe.torch_internals import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_OF_NUMBERS = {"dact_workspace_numel", "dact_quantize_workspace_numel"}
# Symbolic addresses: above all real ones, and below the largest integer that kernels take for one.
FIRST_ADDRESS = 1 << 60
SLOT_BYTES = 1 << 42
_MAX_SLOTS = 1 << 16
_META = torch.device("meta")


class _Thread(threading.local):
    builder: Builder | None = None


_thread = _Thread()


def builder() -> Builder | None:
    """The builder that records this thread's calls now, or None."""
    return _thread.builder


def noted(
    *,
    stands_for: Callable[..., Any] | Literal["itself"] | None = None,
    is_in_order: bool = False,
    on_gpus: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of functions whose whole call a program repeats, instead of their launches.

    Args:
        stands_for: called in a build with the same arguments; its result replaces that of the call. "itself": the
            function. None: there is no result, or the build does not use it.
        is_in_order: the function launches work itself, or waits for peers: nothing is reordered around it.
        on_gpus: False: on GPUs a program repeats the function's launches.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kind = parts.IN_ORDER if is_in_order else parts.CALL
        stand_in = function if stands_for == "itself" else stands_for

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            current = _thread.builder
            if current is None or (current.on_gpu and not on_gpus):
                return function(*args, **kwargs)
            return cast(R, current.call(function, args, kwargs, stand_in, kind))

        return call

    return decorate


def mark(meaning: str) -> None:
    """Records the meaning of an interruption from here on; see Programs."""
    if _thread.builder is not None:
        _thread.builder.entries.append(Mark(meaning))


def must_complete() -> AbstractContextManager[None]:
    """Launches in this context happen even if a program is interrupted between the marks of a trip."""
    return _entries_with("must_complete")


def on_branch() -> AbstractContextManager[None]:
    """Launches in this context go to a branch stream, where there are streams."""
    return _entries_with("is_on_branch")


def after_other_stream() -> None:
    """The next launch on this stream comes after a point of another stream, where there are streams."""
    if (current := _thread.builder) is not None:
        current.waiting.add(current.is_on_branch)


@contextmanager
def _entries_with(attribute: str) -> Iterator[None]:
    current = _thread.builder
    if current is None:
        yield
        return
    previous = getattr(current, attribute)
    setattr(current, attribute, True)
    try:
        yield
    finally:
        setattr(current, attribute, previous)


def fill(memory: torch.Tensor) -> torch.Tensor:
    """Fills dense memory with 0x7FFF in every two bytes: NaN as any float, and an invalid index."""
    numbers = memory.as_strided((memory.numel(),), (1,)).view(torch.uint8)
    numbers[: numbers.numel() // 2 * 2].view(torch.int16).fill_(0x7FFF)
    return memory


class BuildError(Exception):
    """A function does something that no program can do: a defect of this package."""


class Builder(TorchDispatchMode):
    """A context that records the launches of one function. One thread.

    Args:
        inputs: the tensors that the function reads and writes, in slots 0, 1, ... No two share memory.
        names: keywords in noted functions of integers that differ between calls.
        constants: tensors that are the same in every call.
        fills: whether the program fills its new memory.

    Attributes:
        entries: the recorded entries.
        numbers: the operands of those integers, by name.
        operations: the function's calls.
        must_complete, is_on_branch: whether entries are recorded as owed to the peers, and operations as on a branch.
        waiting: `is_on_branch` of streams whose next operation comes after a point of another one.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        names: Iterable[str],
        constants: Sequence[torch.Tensor],
        *,
        fills: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.entries: list[Entry] = []
        self.operations: list[Operation] = []
        self.must_complete = self.is_on_branch = False
        self.waiting = set[bool]()
        self._metas: list[TensorMeta | None] = []  # by slot, of each call's tensor there
        self._objects: dict[int, tuple[int, object]] = {}  # by id, an object's slot and the object
        self._spans = [
            (tensor.data_ptr(), tensor.data_ptr() + extent_bytes(*meta_of(tensor)))
            for tensor in inputs
        ]
        for tensor in inputs:
            self._new_slot(meta_of(tensor))
        self.numbers = {name: parts.Number(self._new_slot()) for name in names}
        self._constants = {tensor.data_ptr() for tensor in constants}
        self.device = inputs[0].device
        self.on_gpu = self.device.type == "cuda"
        make = torch_internals.empty_strided[self.device.type]
        self._make = (lambda *meta: fill(make(*meta))) if fills else make
        self._stream = torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else 0
        self._outer: list[Builder | None] = []
        self._next_numbers: dict[str, Any] = {}  # of the next launch, by parameter name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """For torch. True would make it import its compiler in the first build, which takes seconds."""
        return False

    def __enter__(self) -> Builder:
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._outer.append(_thread.builder)  # None, or this one, around parts of an operator
        _thread.builder = self
        return self

    def __exit__(self, *exc: Any) -> None:
        _thread.builder = self._outer.pop()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # untyped in torch

    def finish(self, outputs: Sequence[object]) -> Program:
        """The program of a function with these outputs."""
        templates = tuple(self._template(output) for output in outputs)
        operations = tuple(self.operations)
        return Program(len(self._metas), tuple(self.entries), templates, operations=operations)

    # -- records -------------------------------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stands_for: Callable[..., Any] | None = None,
        kind: str = parts.CALL,
    ) -> Any:
        """Records a call; see :func:`noted`. function: or the name of a kernel, which is looked up in every call."""
        template = (
            self._template(args),
            {key: self._named(key, value) for key, value in kwargs.items()},
        )
        result = None if stands_for is None else stands_for(*args, **kwargs)
        slot = None
        if isinstance(result, torch.Tensor):
            slot = self._slot_of(result)
        elif result is not None:
            offset = getattr(result, "offset", None)  # of a lease
            slot = self._new_slot() if offset is None else offset // SLOT_BYTES
            self._objects[id(result)] = slot, result
        if kind == parts.IN_ORDER:
            self.note(function, args, kwargs)
        self.entries.append(Call(function, template, slot, kind, self.must_complete))
        return result

    def kernel(self, name: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A hook for kernels, see kernels/select.py. On CPUs kernels are functions that a program calls; on GPUs the
        program has their launches. Kernels with a result are functions of numbers."""
        if name in _OF_NUMBERS:
            return kernel(*args, **kwargs)
        self.note(name, args, kwargs)
        operations = self.operations
        self.operations = []  # the kernel's own calls are parts of it
        result = kernel(*args, **kwargs) if self.on_gpu else self.call(name, args, kwargs)
        self.operations = operations
        return result

    def note(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: torch.Tensor | None = None,
    ) -> None:
        """Records an operation of the function; see Operation."""
        operands = mapped((args, dict(kwargs), result), self._in_operation)
        streams = self.is_on_branch, self.is_on_branch in self.waiting
        self.waiting.discard(self.is_on_branch)
        self.operations.append(Operation._make((function, *operands, *streams)))

    def launches_with(
        self,
        function: Callable[..., Sequence[Any]],
        template: tuple[Any, ...],
        numbers: Mapping[str, Any],
        results: Sequence[str],
        nan_on_failure: torch.Tensor | None,
    ) -> None:
        """Records the call of a function of integers, whose results are arguments of the next launch.

        Args:
            template: the arguments, with the call's numbers as Number.
            numbers, results: the sources of other arguments of the launch, and the names of the results.
            nan_on_failure: the tensor whose address is the argument `spoiled`.
        """
        slot = self._new_slot()
        self.entries.append(Call(function, (template, {}), slot, parts.NOTE, self.must_complete))
        self._next_numbers = {
            **numbers,
            **{name: parts.ResultField(slot, n) for n, name in enumerate(results)},
        }
        if nan_on_failure is not None:
            self._next_numbers["spoiled"] = parts.Address(self._memory(nan_on_failure))

    def launch(
        self,
        kernel: Any,
        names: Sequence[str],
        grid: tuple[int, ...],
        stream: int,
        args: tuple[Any, ...],
        maps: Any,
    ) -> None:
        """Records the launch of a compiled kernel; see Launch. names: of the parameters."""
        template = self._arguments(names, args)
        self.entries.append(Launch(kernel, grid, template, self._named_stream(stream), maps))

    def launch_by(
        self, launch: Callable[..., Any], names: Sequence[str], stream: int, *args: Any
    ) -> None:
        """Records a launch that only Python can make, by a function whose last argument has the kernel's arguments."""
        *launch_args, kernel_args = args
        template = (
            self._named_stream(stream),
            *launch_args,
            self._arguments(names, kernel_args),
        )
        self.entries.append(Call(launch, (template, {}), None, parts.IN_ORDER, self.must_complete))

    def _arguments(self, names: Sequence[str], args: tuple[Any, ...]) -> tuple[Any, ...]:
        numbers = self._next_numbers
        self._next_numbers = {}
        return tuple(
            [
                numbers[name] if name in numbers else self._argument(name, arg)
                for name, arg in zip(names, args)  # noqa: B905 - constants follow
            ]
        )

    def _argument(self, name: str, value: Any) -> Any:
        is_of_call = type(value) is int and name in self.numbers
        return self.numbers[name] if is_of_call else self._template(value)

    def event(self, stream: torch.cuda.Stream) -> Any:
        """Records the recording of an event; returns a stand-in for the event."""
        slot = self._new_slot()
        event = SimpleNamespace()
        self._objects[id(event)] = slot, event
        self.entries.append(Event(slot, self._named_stream(stream.cuda_stream), stream))
        return event

    def wait(self, stream: torch.cuda.Stream, event: object) -> None:
        """Records that a stream waits for an event."""
        slot = self._objects[id(event)][0]
        self.entries.append(Event(slot, self._named_stream(stream.cuda_stream), is_wait=True))

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # a composite operator: its parts are dispatched again
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if function.is_view or kwargs.get("device") not in (None, self.device):
            return function(*args, **kwargs)
        if function is torch_internals.READS_BACK:
            raise BuildError("the host reads a tensor")
        if (written := _written(function, args, kwargs)) is not None:
            self._note_operator(function, args, kwargs, None, written)
            return written
        options = {**kwargs, "device": _META} if "device" in kwargs else kwargs
        meta_result = function(*mapped(args, _on_meta), **mapped(options, _on_meta))
        if not isinstance(meta_result, torch.Tensor):
            raise BuildError(f"{function} returns {type(meta_result).__name__}")
        result = self.tensor(*meta_of(meta_result))
        slot = self._slot_of(result)
        if function in _EMPTY:
            self.entries.append(Call(self._make, (meta_of(meta_result), {}), slot, parts.NEW))
        else:
            self._note_operator(function, args, kwargs, slot, result)
        return result

    def _note_operator(
        self, function: Any, args: Any, kwargs: Any, slot: int | None, result: torch.Tensor
    ) -> None:
        self.note(function, args, kwargs, result)
        if self.on_gpu and torch.cuda.current_stream(self.device).cuda_stream != self._stream:
            raise BuildError(f"{function} runs on another stream")
        template = self._template(args), self._template(kwargs)
        self.entries.append(Call(function, template, slot, parts.OPERATOR, self.must_complete))

    # -- operands -------------------------------------------------------------------------------------------------

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A stand-in for a new tensor, in a slot of its own."""
        offset_bytes = SLOT_BYTES * self._new_slot((tuple(shape), tuple(stride), dtype))
        base = _symbolic_memory(self.device, dtype)
        return torch_internals.over_memory_of(
            base, tuple(shape), tuple(stride), offset_bytes // dtype.itemsize
        )

    def reserve(self) -> int:
        """Reserves a new slot for leased memory; returns its symbolic offset."""
        return SLOT_BYTES * self._new_slot(None)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """The symbolic offset of a tensor in a lease of this call; 0 if it is empty and has no address."""
        address = tensor.data_ptr()
        if address and address < FIRST_ADDRESS:
            raise BuildError("an offset lies in no lease of this call")
        return max(0, address - FIRST_ADDRESS)

    def offset(self, offset: int) -> parts.LeaseOffset | int:
        """The operand of an offset in the arena; other integers are returned unchanged."""
        slot, inside = divmod(offset, SLOT_BYTES)
        return parts.LeaseOffset(slot, inside) if slot > 0 else offset

    def _new_slot(self, meta: TensorMeta | None = None) -> int:
        if len(self._metas) == _MAX_SLOTS:
            raise BuildError(f"more than {_MAX_SLOTS} operands")
        self._metas.append(meta)
        return len(self._metas) - 1

    def _slot_of(self, tensor: torch.Tensor) -> int:
        """The slot of a stand-in tensor. An empty one has no address, but is always the last."""
        address = tensor.data_ptr()
        return (address - FIRST_ADDRESS) // SLOT_BYTES if address else len(self._metas) - 1

    def _memory(self, tensor: torch.Tensor) -> TensorRef | ObjectSlot:
        memory = self._ref_of(tensor)
        if (
            memory.slot is None
            or memory.offset_bytes
            or self._metas[memory.slot] != meta_of(tensor)
        ):
            return memory
        return ObjectSlot(memory.slot)

    def _ref_of(self, tensor: torch.Tensor) -> TensorRef:
        start = tensor.data_ptr()
        meta = meta_of(tensor)
        if tensor.numel() == 0:
            with torch.inference_mode(False):  # later calls may be outside of it
                empty = torch_internals.empty_strided[self.device.type](*meta)
            return TensorRef(None, 0, *meta, empty)
        slot, offset = divmod(start - FIRST_ADDRESS, SLOT_BYTES)
        if slot < 0:  # an input, or a constant
            end = start + extent_bytes(*meta)
            slots = [n for n, span in enumerate(self._spans) if span[0] <= start and end <= span[1]]
            if not slots:
                if start not in self._constants:
                    raise BuildError(f"memory of a {[*tensor.shape]} {tensor.dtype} is not known")
                return TensorRef(None, start, *meta, tensor)
            slot = slots[0]
            offset = start - self._spans[slots[0]][0]
        return TensorRef(slot, offset, *meta)

    def _template(self, value: Any) -> Any:
        """The value, with everything that differs between calls replaced by its operand."""
        return mapped(value, self._operand)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._memory(value)
        return ObjectSlot(self._objects[id(value)][0]) if id(value) in self._objects else value

    def _in_operation(self, value: Any) -> Any:
        """The form of a value in an operation."""
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "storage", None)
        return self._ref_of(tensor) if isinstance(tensor, torch.Tensor) else value

    def _named(self, name: str, value: Any) -> Any:
        if name in self.numbers:
            return self.numbers[name]
        if name == "publish":
            return tuple(self.offset(offset) for offset in value)
        return self._template(value)

    def _named_stream(self, stream: int) -> int | None:
        """The stream, or None for the call's own stream."""
        return None if stream == self._stream else stream


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that an operator writes and returns; None: the operator returns a new tensor."""
    schema = torch_internals.schema_of(function)
    if not schema.is_mutable:
        return None
    for n, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[n] if n < len(args) else kwargs[argument.name]
    return None


def _on_meta(value: Any) -> Any:
    """A tensor of the same meta without memory; other values unchanged."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value


@functools.cache
def _symbolic_range(device: torch.device) -> AddressRange:
    return AddressRange(FIRST_ADDRESS, SLOT_BYTES * _MAX_SLOTS, device)


@functools.cache
def _symbolic_memory(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """All symbolic addresses, as one tensor."""
    with torch.inference_mode(False):  # later builds may be outside of it
        return symbolic_bytes(device).view(dtype)


def symbolic_bytes(device: torch.device) -> torch.Tensor:
    """All symbolic addresses, as a new tensor of bytes with a separate version counter."""
    return _symbolic_range(device).tensor()
