"""A program: the launches of one kind of call, in order, with operands for memory and integers that differ between
calls."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch

from symmoe.errors import SymmoeError
from symmoe.torch_internals import over_memory_of

# Marks of a trip during which peers wait for this rank's signals, not at a barrier:
MUST_ABORT = (
    "must abort"  # from here on, an interruption cannot be reported to the peers: the heap aborts
)
MUST_SIGNAL = "must signal"  # from here on, owed work can be launched without the rest
CLEAN = "clean"  # no more work is owed
STREAM = 0  # index of the current stream among a call's values


Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride, dtype


@dataclass(eq=False, slots=True)
class Frame:
    """One call that runs a program."""

    things: list[Any]  # by slot, a tensor, a lease or another object
    # For its launches: a copy of Program.values, with the current stream; sections fill in the rest.
    values: array[int]
    numbers: Mapping[str, int]  # integers of this call, by name
    kernels: Callable[[], object]  # returns the kernels, by name
    mark: str = CLEAN


def look_of(tensor: torch.Tensor) -> Look:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@lru_cache(maxsize=4096)  # a program repeats the same arguments in every call
def extent_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes from a tensor's first byte to the end of its last element."""
    if 0 in shape:
        return 0
    num_elements: int = (
        1 + sum(map(operator.mul, shape, stride)) - sum(stride)
    )  # (size - 1) * step of each
    return num_elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in the memory of a slot, or, without a slot, at a constant address."""

    slot: int | None
    offset_bytes: int  # from the beginning of the slot's memory, or the address
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    constant: torch.Tensor | None = field(default=None, compare=False)  # the tensor, without a slot

    def get(self, frame: Frame) -> torch.Tensor:
        if self.slot is None:
            assert self.constant is not None
            # A returned empty tensor joins a graph of autograd: each call needs a new one.
            return self.constant if self.constant.numel() else torch.empty_like(self.constant)
        thing = frame.things[self.slot]
        base: torch.Tensor = thing if isinstance(thing, torch.Tensor) else thing.tensor
        if (
            self.offset_bytes == 0
            and base.dtype == self.dtype
            and base.shape == self.shape
            and base.stride() == self.stride
        ):
            return base
        storage = base.untyped_storage()
        item_bytes = self.dtype.itemsize
        first_byte = base.data_ptr() - storage.data_ptr() + self.offset_bytes
        if first_byte + extent_bytes(self.shape, self.stride, self.dtype) > storage.nbytes():
            want, has = (f"{list(each.shape)} {each.dtype}" for each in (self, base))
            raise SymmoeError(f"a recorded call wants {want} in the memory of {has}")
        if base.dtype == self.dtype:
            return over_memory_of(base, self.shape, self.stride, self.offset_bytes // item_bytes)
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(
            storage, first_byte // item_bytes, self.shape, self.stride
        )


@dataclass(frozen=True, slots=True)
class ObjectSlot:
    """An object from an earlier entry, or a whole tensor, unchanged."""

    slot: int
    offset_bytes = 0  # as in TensorRef

    def get(self, frame: Frame) -> Any:
        return frame.things[self.slot]


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a tensor."""

    of: TensorRef | ObjectSlot

    def get(self, frame: Frame) -> int:
        return int(self.of.get(frame).data_ptr())


@dataclass(frozen=True, slots=True)
class LeaseOffset:
    """An offset in the arena, within a lease."""

    slot: int
    offset_bytes: int

    def get(self, frame: Frame) -> int:
        return int(frame.things[self.slot].offset) + self.offset_bytes


@dataclass(frozen=True, slots=True)
class CallInteger:
    """An integer that the call provides."""

    name: str

    def get(self, frame: Frame) -> int:
        return frame.numbers[self.name]


@dataclass(frozen=True, slots=True)
class ResultField:
    """One of the integers that an earlier entry has returned."""

    slot: int
    index: int

    def get(self, frame: Frame) -> int:
        return int(frame.things[self.slot][self.index])


OPERANDS = (TensorRef, ObjectSlot, Address, LeaseOffset, CallInteger, ResultField)


def compiled_template(template: Any) -> Callable[[Frame], Any] | None:
    """A function that returns the template with a call's operands filled in; None if it has no operands."""
    kind = type(template)
    if kind in OPERANDS:
        return cast(Callable[[Frame], Any], template.get)
    if kind is not dict and not isinstance(template, (tuple, list)):
        return None
    values = [*(template.values() if kind is dict else template)]
    slots = [(n, value.slot) for n, value in enumerate(values) if type(value) is ObjectSlot]
    parts = [
        (n, part)
        for n, (value, part) in enumerate(zip(values, map(compiled_template, values), strict=True))
        if part is not None and type(value) is not ObjectSlot
    ]
    make = (
        (lambda each: dict(zip(template, each, strict=True)))
        if kind is dict
        else getattr(kind, "_make", kind)
    )

    def fill(frame: Frame) -> Any:
        filled = values[:]
        things = frame.things
        for n, slot in slots:
            filled[n] = things[slot]
        for n, part in parts:
            filled[n] = part(frame)
        return make(filled)

    return fill if slots or parts else None


class Entry:
    """One action of a program. must_complete: see builder.must_complete."""

    __slots__ = ()
    must_complete: bool = False

    def run(self, frame: Frame) -> None:
        """Runs the action for one call. Launches and events have no such method: they are parts of sections."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Launch(Entry):
    """The launch of a compiled kernel, by kernels/launch/player.py."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # for each parameter that is no constant, an argument or its operand
    stream: int | None = None  # None for the current stream
    # The kernel's form of arguments whose tensors are described by tensor maps.
    maps: Any = None

    def __str__(self) -> str:
        return f"Launch {getattr(self.kernel, 'name', '')}"


@dataclass(frozen=True, slots=True)
class Event(Entry):
    """An event of the slot: a stream (None: the current one) waits for it, or, with `recorded_on`, it is recorded."""

    slot: int
    stream: int | None
    recorded_on: torch.cuda.Stream | None = field(default=None, compare=False)
    is_wait: bool = False


# Kinds of calls:
CALL = "Call"
IN_ORDER = "Call in order"  # no entry may be reordered around it
NOTE = "Note"  # returns integers for the next launch, and records the launch on the host
OPERATOR = "Operator"  # of torch
NEW = "New"  # makes memory


@dataclass(eq=False, slots=True)
class Call(Entry):
    """A call of a function; its result goes to a slot, or is dropped.

    Attributes:
        function: the function, or the name of a kernel.
        kind: CALL, NOTE, OPERATOR or NEW.
        leaves_autocast: the device type for which autocast was on around the whole call, but not here; or None.
        fill: fills in all parts of the template; None: no operands.
    """

    function: Callable[..., Any] | str
    template: tuple[tuple[Any, ...], dict[str, Any]]
    slot: int | None
    kind: str = CALL
    must_complete: bool = False
    leaves_autocast: str | None = None
    fill: Callable[[Frame], tuple[Any, ...]] | None = field(init=False)

    def __post_init__(self) -> None:
        args, kwargs = self.template
        self.fill = compiled_template((*args, *kwargs.values()))

    def run(self, frame: Frame) -> None:
        args, kwargs = self.template
        if self.fill is not None:
            filled = self.fill(frame)
            kwargs = dict(zip(kwargs, filled[len(args) :], strict=True))
            args = filled[: len(args)]
        function = (
            getattr(frame.kernels(), self.function)
            if isinstance(self.function, str)
            else self.function
        )
        if self.leaves_autocast is None:
            result = function(*args, **kwargs)
        else:
            with torch.autocast(self.leaves_autocast, enabled=False):
                result = function(*args, **kwargs)
        if self.slot is not None:
            frame.things[self.slot] = result

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", getattr(self.function, "name", self.function))
        return f"{self.kind} {name() if callable(name) else name}"


@dataclass(frozen=True, slots=True)
class Mark(Entry):
    """The meaning of an interruption from here on."""

    what: str

    def run(self, frame: Frame) -> None:
        frame.mark = self.what


class Operation(NamedTuple):
    """A call of a program's function, for people (kernels/launches.py); entries follow from it. Tensors are TensorRef,
    also whole ones, and integers of a plan are shown as their storage."""

    function: Any  # the name of a kernel, an operator of torch, or a function that is noted
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: TensorRef | None  # of an operator
    is_on_branch: bool  # whether it is on a branch stream
    is_after_other: bool  # whether it waits for a point of another stream


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Entries in order, and templates of the function's outputs. num_slots: for memory and objects; inputs have the
    first ones. values: see kernels/launch/player.py. leases: see symm_mem/memory.py. fill: fills in the outputs; None:
    they have no operands."""

    num_slots: int
    entries: tuple[Entry, ...]
    outputs: tuple[Any, ...]
    values: array[int] = field(default_factory=partial(array, "q", (0,)))
    leases: Any = None
    operations: tuple[Operation, ...] = ()
    fill: Callable[[Frame], tuple[Any, ...]] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", compiled_template(self.outputs))
