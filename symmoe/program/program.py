"""A program: the launches of one kind of call, in order, with operands for memory and integers that differ between
calls."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch

# Marks of a trip during which peers wait for this rank's signals, not at a barrier:
MUST_ABORT = (
    "must abort"  # from here on, an interruption cannot be reported to the peers: the heap aborts
)
MUST_SIGNAL = "must signal"  # from here on, owed work can be launched without the rest
CLEAN = "clean"  # no more work is owed
STREAM = 0  # index of the current stream among a call's values
# The last slots: the meaning of an interruption from here on, and the values of sections (kernels/launch/player.py).
MARK, VALUES = -1, -2


TensorMeta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride, dtype


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@lru_cache(maxsize=4096)  # a program repeats the same arguments in every call
def extent_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes from a tensor's first byte to the end of its last element."""
    if 0 in shape:
        return 0
    # 1 + the sum of (size - 1) * step over the dimensions.
    num_elements: int = 1 + sum(map(operator.mul, shape, stride)) - sum(stride)
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


@dataclass(frozen=True, slots=True)
class ObjectSlot:
    """An object from an earlier entry, or a whole tensor, unchanged."""

    slot: int
    offset_bytes = 0  # as in TensorRef


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a tensor."""

    tensor: TensorRef | ObjectSlot

    @property
    def slot(self) -> int | None:
        return self.tensor.slot


@dataclass(frozen=True, slots=True)
class LeaseOffset:
    """An offset in the arena, within a lease."""

    slot: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Number:
    """An integer that the call provides."""

    slot: int


@dataclass(frozen=True, slots=True)
class ResultField:
    """One of the integers that an earlier entry has returned."""

    slot: int
    index: int


OPERANDS = (TensorRef, ObjectSlot, Address, LeaseOffset, Number, ResultField)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The value with the function applied to every leaf."""
    if isinstance(value, (tuple, list)):
        filled = [mapped(part, function) for part in value]
        return value._make(filled) if hasattr(value, "_make") else type(value)(filled)
    if isinstance(value, dict):
        return {name: mapped(part, function) for name, part in value.items()}
    return function(value)


def operands_of(template: Any) -> Iterator[Any]:
    """The operands in a template."""
    if isinstance(template, dict):
        template = tuple(template.values())
    if isinstance(template, (tuple, list)):
        yield from chain.from_iterable(map(operands_of, template))
    elif isinstance(template, OPERANDS):
        yield template


class Entry:
    """One action of a program. must_complete: see builder.must_complete."""

    __slots__ = ()
    must_complete: bool = False

    def with_operands(self, change: Callable[[Any], Any]) -> Entry:
        """The entry with every operand, and every constant, replaced by what `change` returns for it."""
        return self


@dataclass(eq=False, slots=True)
class Launch(Entry):
    """The launch of a compiled kernel, by kernels/launch/player.py."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # for each parameter that is no constant, an argument or its operand
    stream: int | None = None  # None for the current stream
    # The kernel's form of arguments whose tensors are described by tensor maps.
    maps: Any = None

    def with_operands(self, change: Callable[[Any], Any]) -> Launch:
        return replace(self, args=mapped(self.args, change))

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
    """

    function: Callable[..., Any] | str
    template: tuple[tuple[Any, ...], dict[str, Any]]
    slot: int | None
    kind: str = CALL
    must_complete: bool = False

    def with_operands(self, change: Callable[[Any], Any]) -> Call:
        return replace(self, template=mapped(self.template, change))

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", getattr(self.function, "name", self.function))
        return f"{self.kind} {name() if callable(name) else name}"


@dataclass(frozen=True, slots=True)
class Mark(Entry):
    """The meaning of an interruption from here on."""

    meaning: str


class Operation(NamedTuple):
    """A call of a program's function, for readers (kernels/launches.py); entries follow from it. Tensors are TensorRef,
    also whole ones, and integers of a plan are shown as their storage."""

    function: Any  # the name of a kernel, an operator of torch, or a function that is noted
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: TensorRef | None  # of an operator
    is_on_branch: bool  # whether it is on a branch stream
    is_after_other: bool  # whether it waits for a point of another stream


class Step(NamedTuple):
    """slot_values[slot] = function(*arguments), where `slot_values` has the value of every slot."""

    # Or the name of a kernel, which is looked up in every call; None: the picked arguments are the result.
    function: Callable[..., Any] | str | None
    arguments: Callable[[list[Any]], Any]  # picks them from the slot_values
    slot: int | None  # None: the result is dropped
    names: tuple[str, ...] = ()  # of keyword arguments, and a function that picks these
    named: Callable[[list[Any]], Any] = list
    must_complete: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Entries in order, and templates of the function's outputs. num_slots: for memory and objects; inputs have the
    first ones, and the call's integers the next. values: see kernels/launch/player.py. leases: see symm_mem/memory.py.
    The others: see program/steps.py."""

    num_slots: int
    entries: tuple[Entry, ...]
    outputs: tuple[Any, ...]
    values: array[int] = field(default_factory=partial(array, "q", (0,)))
    leases: Any = None
    operations: tuple[Operation, ...] = ()
    steps: tuple[Step, ...] = ()
    slot_values: tuple[Any, ...] = ()  # by slot, when a call begins
    result: Callable[[list[Any]], Sequence[Any]] = list  # picks the outputs from the slot_values
