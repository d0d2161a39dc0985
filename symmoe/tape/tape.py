"""A tape: what one call launches, in order, with places for memory and integers that differ from call to call."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, cast

import torch

from symmoe.errors import SymmoeError
from symmoe.torch_internals import over_memory_of

# Marks of a trip during which peers wait for this rank's signals, not at a barrier:
MUST_ABORT = (
    "must abort"  # from here on, an interruption cannot be told to the peers: the heap is given up
)
MUST_SIGNAL = "must signal"  # from here on, what is owed can be launched although the rest is not
CLEAN = "clean"  # nothing is owed any more
STREAM = 0  # index of the current stream among a call's values


@dataclass(eq=False, slots=True)
class Playing:
    """One call that is being played."""

    things: list[Any]  # by slot, a tensor, a lease or another object
    values: array[
        int
    ]  # for its launches: a copy of Tape.values, with the current stream; sections fill in the rest
    numbers: Mapping[str, int]  # integers of this call, by name
    kernels: Callable[[], object]  # returns the kernels which calls name
    mark: str = CLEAN


@lru_cache(maxsize=4096)  # a tape asks for the same ones in every call
def extent_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """From the first byte of a tensor to the one past its last."""
    if 0 in shape:
        return 0
    num_elements: int = (
        1 + sum(map(operator.mul, shape, stride)) - sum(stride)
    )  # (size - 1) * step of each
    return num_elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor in the memory of a slot, or, without a slot, at an address that never changes."""

    slot: int | None
    offset_bytes: int  # from the beginning of the slot's memory, or the address
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    constant: torch.Tensor | None = field(default=None, compare=False)  # the tensor, without a slot

    def get(self, playing: Playing) -> torch.Tensor:
        if self.slot is None:
            assert self.constant is not None
            return self.constant
        thing = playing.things[self.slot]
        base: torch.Tensor = thing if isinstance(thing, torch.Tensor) else thing.tensor
        if (
            self.offset_bytes == 0
            and base.dtype == self.dtype
            and base.shape == self.shape
            and base.stride() == self.stride
        ):
            return base
        storage, item_bytes = base.untyped_storage(), self.dtype.itemsize
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
    """An object that an earlier entry has made, or a whole tensor, as it was made or given."""

    slot: int
    offset_bytes = 0  # as in Memory

    def get(self, playing: Playing) -> Any:
        return playing.things[self.slot]


@dataclass(frozen=True, slots=True)
class LeaseOffset:
    """An offset in the arena, within a lease."""

    slot: int
    offset_bytes: int

    def get(self, playing: Playing) -> int:
        return int(playing.things[self.slot].offset) + self.offset_bytes


@dataclass(frozen=True, slots=True)
class CallInteger:
    """An integer that the call brings."""

    name: str

    def get(self, playing: Playing) -> int:
        return playing.numbers[self.name]


@dataclass(frozen=True, slots=True)
class ResultField:
    """One of the integers that an earlier entry has found."""

    slot: int
    index: int

    def get(self, playing: Playing) -> int:
        return int(playing.things[self.slot][self.index])


_PLACES = (Memory, ObjectSlot, LeaseOffset, CallInteger, ResultField)


def filler(template: Any) -> Callable[[Playing], Any] | None:
    """Function that returns the template with what a call has in the places; None if there are none."""
    kind = type(template)
    if kind in _PLACES:
        return cast(Callable[[Playing], Any], template.get)
    if kind is not dict and not isinstance(template, (tuple, list)):
        return None
    values = [*(template.values() if kind is dict else template)]
    slots = [(n, value.slot) for n, value in enumerate(values) if type(value) is ObjectSlot]
    parts = [
        (n, part)
        for n, (value, part) in enumerate(zip(values, map(filler, values), strict=True))
        if part is not None and type(value) is not ObjectSlot
    ]
    make = (
        (lambda each: dict(zip(template, each, strict=True)))
        if kind is dict
        else getattr(kind, "_make", kind)
    )

    def fill(playing: Playing) -> Any:
        filled, things = values[:], playing.things
        for n, slot in slots:
            filled[n] = things[slot]
        for n, part in parts:
            filled[n] = part(playing)
        return make(filled)

    return fill if slots or parts else None


_BY_IDENTITY: Any = object.__eq__


def _same(a: Any, b: Any) -> bool:
    """Whether two templates are the same: numbers and words by value, objects without values by type."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return type(a).__eq__ is _BY_IDENTITY or bool(a == b)


class Entry:
    """One thing that happens. is_owed: see recorder.owed."""

    __slots__ = ()
    is_owed: bool = False

    def play(self, playing: Playing) -> None:
        """Does it, for one call. Launches and events have none: they are played in sections."""
        raise NotImplementedError

    def same(self, other: Any) -> bool:
        """Whether another entry of this class does the same, up to what changes from call to call."""
        return bool(self == other)


@dataclass(eq=False, slots=True)
class Launch(Entry):
    """The launch of a compiled kernel, by kernels/launch/player.py."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # an argument, or its place, for each parameter that is no constant
    stream: int | None = None  # None for the current stream
    maps: Any = (
        None  # what the kernel has made of the arguments whose tensors are described by tensor maps
    )

    def same(self, other: Any) -> bool:
        ours, theirs = ((each.kernel, each.grid, each.stream) for each in (self, other))
        return ours == theirs and _same(self.args, other.args)

    def __str__(self) -> str:
        return f"Launch {getattr(self.kernel, 'name', '')}"


@dataclass(frozen=True, slots=True)
class Event(Entry):
    """An event of the slot: a stream (None: the current one) waits for it, or, with `recorded_on`, it is recorded."""

    slot: int
    stream: int | None
    recorded_on: torch.cuda.Stream | None = field(default=None, compare=False)
    is_wait: bool = False


# What a call is:
CALL = "Call"
IN_ORDER = "Call in order"  # which nothing may pass
NOTE = "Note"  # it finds integers for the next launch, and notes on the host that it happens
OPERATOR = "Operator"  # of torch
NEW = "New"  # makes memory


@dataclass(eq=False, slots=True)
class Call(Entry):
    """A call of a function; its result goes to a slot, or is dropped.

    Attributes:
        function: the function, or the name of a kernel.
        kind: CALL, NOTE, OPERATOR or NEW.
        leaves_autocast: the type of device for which autocast was on around the whole call, but not here; or None.
        fills: what fills in the two parts of the template; None: it has no places.
    """

    function: Callable[..., Any] | str
    template: tuple[tuple[Any, ...], dict[str, Any]]
    slot: int | None
    kind: str = CALL
    is_owed: bool = False
    leaves_autocast: str | None = None
    fills: tuple[Callable[[Playing], Any] | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.fills = tuple(map(filler, self.template))

    def play(self, playing: Playing) -> None:
        fill_args, fill_kwargs = self.fills
        args = self.template[0] if fill_args is None else fill_args(playing)
        kwargs = self.template[1] if fill_kwargs is None else fill_kwargs(playing)
        function = (
            getattr(playing.kernels(), self.function)
            if isinstance(self.function, str)
            else self.function
        )
        if self.leaves_autocast is None:
            result = function(*args, **kwargs)
        else:
            with torch.autocast(self.leaves_autocast, enabled=False):
                result = function(*args, **kwargs)
        if self.slot is not None:
            playing.things[self.slot] = result

    def same(self, other: Any) -> bool:
        ours, theirs = (
            (str(each), each.slot, each.is_owed, each.leaves_autocast, each.template)
            for each in (self, other)
        )
        return _same(ours, theirs)

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", getattr(self.function, "name", self.function))
        return f"{self.kind} {name() if callable(name) else name}"


@dataclass(frozen=True, slots=True)
class Mark(Entry):
    """What an interruption means from here on."""

    what: str

    def play(self, playing: Playing) -> None:
        playing.mark = self.what


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A recording: what happens, in order, and templates of what the function returned. num_slots: for memory and
    objects; inputs have the first ones. values: see kernels/launch/player.py. leases: see symm_mem/lease_plan.py."""

    num_slots: int
    entries: tuple[Entry, ...]
    outputs: tuple[Any, ...]
    values: array[int] = field(default_factory=partial(array, "q"))
    leases: Any = None

    def difference(self, other: Tape) -> str:
        """What a later recording has that is not so here; "" if both came from calls that differ only in memory and in
        the numbers that a call brings."""
        for n, (a, b) in enumerate(zip_longest(self.entries, other.entries)):
            if type(a) is not type(b) or not a.same(b):
                return f"step {n} was {a}, and is {b}" + (
                    " with other arguments" if str(a) == str(b) else ""
                )
        is_same = self.num_slots == other.num_slots and _same(self.outputs, other.outputs)
        return "" if is_same else "what is returned lies elsewhere"
