"""A tape: what one call launches, in order, with places for memory that differs from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from symmoe.errors import SymmoeError

# Marks of a trip during which peers wait for this rank's signals, not at a barrier:
FRAGILE = "fragile"  # from here on, an interruption cannot be told to the peers: the heap is given up
OWES = "owes"  # from here on, what is owed can be launched although the rest is not
EVEN = "even"  # nothing is owed any more


class Playing:
    """One call that is being played.

    Attributes:
        things: by slot, a tensor, a lease or another object.
        addresses: by slot, the address of a tensor's or lease's memory.
        numbers: integers of this call, by name.
        stream: the current stream.
    """

    __slots__ = ("addresses", "mark", "numbers", "stream", "things")

    def __init__(self, num_slots: int, numbers: Mapping[str, int], stream: int) -> None:
        self.things: list[Any] = [None] * num_slots
        self.addresses = [0] * num_slots
        self.numbers, self.stream, self.mark = numbers, stream, EVEN

    def put(self, slot: int, thing: Any) -> None:
        """Fills a slot."""
        self.things[slot] = thing
        if type(thing) is torch.Tensor:
            self.addresses[slot] = thing.data_ptr()
        else:
            self.addresses[slot] = getattr(thing, "address", 0)  # a lease's


# -- places ---------------------------------------------------------------------------------------------------------


def extent_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """From the first byte of a tensor to the one past its last."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A tensor in the memory of a slot, or, without a slot, at an address that never changes.

    Attributes:
        offset_bytes: from the beginning of the slot's memory, or the address.
        constant: the tensor, without a slot.
    """

    slot: int | None
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    constant: torch.Tensor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memory):
            return NotImplemented
        names = ("slot", "offset_bytes", "shape", "stride", "dtype")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def get(self, playing: Playing) -> torch.Tensor:
        """The tensor."""
        if self.slot is None:
            assert self.constant is not None
            return self.constant
        thing = playing.things[self.slot]
        base: torch.Tensor = thing if isinstance(thing, torch.Tensor) else thing.tensor
        if self.offset_bytes == 0 and base.dtype == self.dtype and base.shape == self.shape:
            if base.stride() == self.stride:
                return base
        storage = base.untyped_storage()
        first_byte = base.data_ptr() - storage.data_ptr() + self.offset_bytes
        if first_byte + extent_bytes(self.shape, self.stride, self.dtype) > storage.nbytes():
            want, has = (f"{list(each.shape)} {each.dtype}" for each in (self, base))
            raise SymmoeError(f"a recorded call wants {want} in the memory of {has}")
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(
            storage, first_byte // self.dtype.itemsize, self.shape, self.stride
        )

    def address(self, playing: Playing) -> int:
        """Its address."""
        return self.offset_bytes if self.slot is None else playing.addresses[self.slot] + self.offset_bytes


@dataclass(frozen=True, slots=True)
class Thing:
    """An object that an earlier entry has made."""

    slot: int

    def get(self, playing: Playing) -> Any:
        """The object."""
        return playing.things[self.slot]


@dataclass(frozen=True, slots=True)
class InArena:
    """An offset in the arena, within a lease."""

    slot: int
    offset_bytes: int

    def get(self, playing: Playing) -> int:
        """The offset."""
        offset: int = playing.things[self.slot].offset
        return offset + self.offset_bytes


@dataclass(frozen=True, slots=True)
class Number:
    """An integer that the call brings."""

    name: str

    def get(self, playing: Playing) -> int:
        """The integer."""
        return playing.numbers[self.name]


@dataclass(frozen=True, slots=True)
class Item:
    """One of the integers that an earlier entry has found; None counts as 0."""

    slot: int
    index: int

    def get(self, playing: Playing) -> int:
        """The integer."""
        return playing.things[self.slot][self.index] or 0


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a tensor."""

    memory: Memory

    def get(self, playing: Playing) -> int:
        """The address."""
        return self.memory.address(playing)


_PLACES = (Memory, Thing, InArena, Number, Item, Address)


def fill_in(template: Any, playing: Playing) -> Any:
    """The template with what this call has in the places."""
    kind = type(template)
    if kind in _PLACES:
        return template.get(playing)
    if kind is tuple or kind is list:
        return kind([fill_in(part, playing) for part in template])
    if kind is dict:
        return {name: fill_in(part, playing) for name, part in template.items()}
    return template


_BY_IDENTITY: Any = object.__eq__


def has_places(template: Any) -> bool:
    """Whether anything has to be filled in."""
    if isinstance(template, dict):
        return any(map(has_places, template.values()))
    return type(template) in _PLACES or (isinstance(template, (tuple, list)) and any(map(has_places, template)))


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


# -- entries --------------------------------------------------------------------------------------------------------


class Entry:
    """One thing that happens.

    Attributes:
        is_owed: see recorder.owed.
    """

    __slots__ = ()
    is_owed: bool = False

    def play(self, playing: Playing) -> None:
        """Does it, for one call."""
        raise NotImplementedError

    def same(self, other: Any) -> bool:
        """Whether another entry of this class does the same, up to what changes from call to call."""
        return bool(self == other)

    def __str__(self) -> str:
        """Its class and the name of what it calls, if it does."""
        what = getattr(self, "kernel", None) or getattr(self, "function", None)
        return f"{type(self).__name__} {getattr(what, '__qualname__', getattr(what, 'name', ''))}".rstrip()


@dataclass(eq=False, slots=True)
class Launch(Entry):
    """The launch of a compiled kernel.

    Attributes:
        call: the function in C, called with grid, stream, head and then the row, as a list or not.
        row: the arguments.
        addresses: (place in the row, memory) of tensors.
        maps: (place in the row, number of places, memory, tensor maps by address and shape).
        numbers: (place in the row, where the integer comes from).
        stream: None for the current stream; launches on others are played by C only.
    """

    call: Callable[..., None]
    kernel: object
    grid: tuple[int, int, int]
    head: tuple[Any, ...]
    takes_list: bool
    row: list[Any]
    addresses: tuple[tuple[int, Memory], ...]
    maps: tuple[tuple[int, int, Memory, Any], ...]
    numbers: tuple[tuple[int, Any], ...]
    stream: int | None = None

    def play(self, playing: Playing) -> None:
        """Launches the kernel on the current stream."""
        row = self.row.copy()
        for place, memory in self.addresses:
            row[place] = memory.address(playing)
        for place, count, memory, maps in self.maps:
            parts = maps.get((memory.address(playing), memory.shape)) or maps.encode(memory.get(playing))
            row[place : place + count] = parts
        for place, number in self.numbers:
            row[place] = number if type(number) is int else number.get(playing)
        arguments = (row,) if self.takes_list else row
        self.call(*self.grid, playing.stream, *self.head, *arguments)

    def same(self, other: Any) -> bool:
        """Whether the other one launches the same, up to what changes from call to call."""
        variable = {place for place, _ in (*self.addresses, *self.numbers)}
        for first, count, *_ in self.maps:
            variable.update(range(first, first + count))
        return (
            (self.kernel, self.grid, self.stream) == (other.kernel, other.grid, other.stream)
            and (self.addresses, self.numbers) == (other.addresses, other.numbers)
            and [each[:3] for each in self.maps] == [each[:3] for each in other.maps]
            and len(self.row) == len(other.row)
            and all(_same(a, b) for n, (a, b) in enumerate(zip(self.row, other.row, strict=True)) if n not in variable)
        )


@dataclass(eq=False, slots=True)
class Call(Entry):
    """A call of a recorded function; its result goes to a slot, or is dropped.

    Attributes:
        leaves_autocast: the type of device for which autocast was on around the whole call, but not here; or None.
    """

    function: Callable[..., Any]
    template: tuple[tuple[Any, ...], dict[str, Any]]
    slot: int | None
    is_owed: bool
    leaves_autocast: str | None = None
    _is_constant: bool = False

    def __post_init__(self) -> None:
        self._is_constant = not has_places(self.template)

    def play(self, playing: Playing) -> None:
        """Calls the function."""
        args, kwargs = self.template if self._is_constant else fill_in(self.template, playing)
        if self.leaves_autocast is None:
            result = self.function(*args, **kwargs)
        else:
            with torch.autocast(self.leaves_autocast, enabled=False):
                result = self.function(*args, **kwargs)
        if self.slot is not None:
            playing.put(self.slot, result)

    def same(self, other: Any) -> bool:
        """As in Launch."""
        return (self.function.__qualname__, self.slot, self.is_owed, self.leaves_autocast) == (
            other.function.__qualname__,
            other.slot,
            other.is_owed,
            other.leaves_autocast,
        ) and _same(self.template, other.template)


@dataclass(eq=False, slots=True)
class Note(Call):
    """A call that finds integers for the next launch, and notes on the host that it happens."""


@dataclass(frozen=True, slots=True)
class RecordEvent(Entry):
    """An event in a stream (None: the current one), which goes to a slot."""

    slot: int
    stream: int | None
    as_recorded: torch.cuda.Stream = field(compare=False)


@dataclass(frozen=True, slots=True)
class WaitEvent(Entry):
    """A stream (None: the current one) waits for the event in a slot."""

    slot: int
    stream: int | None


@dataclass(eq=False, slots=True)
class Operator(Call):
    """An operator of torch."""


@dataclass(frozen=True, slots=True)
class New(Entry):
    """New memory."""

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def play(self, playing: Playing) -> None:
        """Makes it."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        playing.things[self.slot] = tensor
        playing.addresses[self.slot] = tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class Free(Entry):
    """Memory that nobody needs any more."""

    slot: int

    def play(self, playing: Playing) -> None:
        """Lets it go."""
        playing.things[self.slot] = None


@dataclass(frozen=True, slots=True)
class Mark(Entry):
    """What an interruption means from here on."""

    what: str

    def play(self, playing: Playing) -> None:
        """Notes it."""
        playing.mark = self.what


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A recording.

    Attributes:
        num_slots: slots for memory and objects; inputs have the first ones.
        entries: what happens, in order.
        outputs: templates of what the function returned.
    """

    num_slots: int
    entries: tuple[Entry, ...]
    outputs: tuple[Any, ...]

    def difference(self, other: Tape) -> str:
        """What a later recording has that is not so here; "" if both came from calls that differ only in memory and in
        the numbers that a call brings."""
        ours, theirs = ([entry for entry in tape.entries if type(entry) is not Free] for tape in (self, other))
        for n, (a, b) in enumerate(zip_longest(ours, theirs)):
            if type(a) is not type(b) or not a.same(b):
                return f"step {n} was {a}, and is {b}" + (" with other arguments" if str(a) == str(b) else "")
        is_same = self.num_slots == other.num_slots and _same(self.outputs, other.outputs)
        return "" if is_same else "what is returned lies elsewhere"

    def play(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Mapping[str, int],
        stream: int,
        give_up: Callable[[BaseException], None],
    ) -> tuple[Any, ...]:
        """Does what was recorded, for other inputs of the same shapes, strides and dtypes.

        Args:
            give_up: called if an error arises where the peers could not be told of it.

        Returns:
            what the function would return.
        """
        playing = Playing(self.num_slots, numbers, stream)
        for slot, tensor in enumerate(inputs):
            playing.things[slot] = tensor
            playing.addresses[slot] = tensor.data_ptr()
        done = 0
        try:
            for entry in self.entries:
                entry.play(playing)
                done += 1
        except BaseException as error:
            self._pay(self.entries[done:], playing, give_up, error)
            raise
        return fill_in(self.outputs, playing)  # type: ignore[no-any-return]  # a tuple, as the template is

    def _pay(
        self, entries: Sequence[Entry], playing: Playing, give_up: Callable[[BaseException], None], error: BaseException
    ) -> None:
        """Launches what is owed to the peers: they wait for it, and memory that they write to must not be leased again
        before that."""
        if playing.mark == FRAGILE:
            give_up(error)
        owes = playing.mark == OWES
        try:
            for entry in entries:
                owes &= type(entry) is not Mark
                if owes and entry.is_owed:
                    with suppress(SymmoeError):  # a wait on a CPU may raise what will be raised again at the next call
                        entry.play(playing)
        except Exception as problem:  # noqa: BLE001 - the error that led here is raised
            give_up(problem)
