"""Launches of compiled kernels by the driver: a single launch, or a program's section of launches as one CUDA graph.

Every launch reads its arguments from one array of 64-bit values, which a call fills: addresses, integers, the bits of
floats. A Parameter has the index of its value; the driver reads as many bytes as the kernel's parameter has. With an
old driver, and for unsupported kernels, Triton's JIT makes every launch.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels.launch import driver
from symmoe.kernels.launch.graph import (
    WORD_BYTES,
    EventNode,
    KernelNode,
    LaunchGraph,
    Node,
    Parameter,
    aligned_maps,
)
from symmoe.kernels.launch.triton_internals import MAP_BYTES, Compiled, described_parts
from symmoe.program.program import (
    IN_ORDER,
    MUST_ABORT,
    MUST_SIGNAL,
    NEW,
    NOTE,
    OPERATOR,
    STREAM,
    VALUES,
    Address,
    Call,
    Entry,
    Event,
    Launch,
    LeaseOffset,
    Mark,
    Number,
    ObjectSlot,
    Program,
    ResultField,
    TensorRef,
    extent_bytes,
    operands_of,
)

_FLOATS = {"fp32": ("<f", "<i"), "fp64": ("<d", "<q")}
_INTEGERS = {"i1", "u1", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"}
_ZERO, _FIRST = STREAM + 1, STREAM + 2  # indices of values: 0, the first argument
_MAX_SHARED_BYTES = 227 << 10  # with more, Triton sets attributes of the launch
_SMALL_BYTES, _WORTH_BYTES, _ALIGNMENT_BYTES = 1 << 20, 32 << 20, 256

MAX_TENSOR_MAPS = (
    1024  # cached for one argument of one compiled kernel: about 600 KiB of host memory
)
Describe = Callable[[torch.Tensor], TensorDescriptor]
Parts = tuple[
    tuple[int, ...], object
]  # values (the address of a tensor map, or 0; integers), and their owner


def picker(positions: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Function from a sequence or a mapping to the tuple of its elements at `positions`."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return (lambda row: (row[positions[0]],)) if positions else (lambda row: ())


class Kernel:
    """A compiled kernel, launched by the driver. Immutable except for its cache of tensor maps. name: the kernel's."""

    def __init__(
        self,
        name: str,
        compiled: Compiled,
        args: Sequence[Any],
        tensors: Sequence[int],
        describe: Mapping[int, Describe],
    ) -> None:
        self.name, self._compiled = name, compiled
        self._tensors = {position: n for n, position in enumerate(tensors)}
        self.kinds = compiled.kinds[: len(args)]
        self._maps = {
            position: _TensorMaps(compiled, n, describe[position])
            for n, position in enumerate(
                i for i, kind in enumerate(self.kinds) if kind == "tensordesc"
            )
        }
        self._numbers = [
            i
            for i, arg in enumerate(args)
            if i not in self._tensors and self.kinds[i] != "constexpr"
        ]
        self._pick = picker(self._numbers)
        first_number = _FIRST + len(tensors)
        self._floats = [
            (n, kind)
            for n, i in enumerate(self._numbers, first_number)
            if (kind := self.kinds[i]) in _FLOATS
        ]
        self._mapped = [(self._tensors[position], maps) for position, maps in self._maps.items()]
        values = {position: _FIRST + n for n, position in enumerate((*tensors, *self._numbers))}
        parts = iter(range(_FIRST + len(values), 1 << 30))
        lengths = {
            position: len(maps.parts_of(args[position])[0]) for position, maps in self._maps.items()
        }
        self._parameters = self.parameters(
            {position: (value, 0) for position, value in values.items()},
            {
                position: [next(parts) for _ in range(length)]
                for position, length in lengths.items()
            },
        )
        self._offsets = [WORD_BYTES * parameter.value for parameter in self._parameters]
        self._described = [
            (number, parameter)
            for number, parameter in enumerate(self._parameters)
            if parameter.tensor_map >= 0
        ]
        _check_number(compiled.function, len(self._parameters))

    def launch(
        self,
        grid: tuple[int, ...],
        stream: int,
        tensors: tuple[torch.Tensor, ...],
        addresses: tuple[int, ...],
        args: tuple[Any, ...],
    ) -> None:
        """Launches the kernel. tensors, addresses: the tensors among the arguments, and their addresses."""
        words = [stream, 0, *addresses, *self._pick(args)]
        for n, kind in self._floats:
            words[n] = _bits(words[n], kind)
        map_objects = []
        for n, maps in self._mapped:
            parts, map_object = maps.get(tensors[n].shape) or maps.parts_of(tensors[n])
            words += parts
            map_objects.append(map_object)  # another thread may drop it
        values = _values(words)  # per call: threads may launch the same kernel at once
        base, _ = values.buffer_info()
        pointers = array("Q", [base + offset for offset in self._offsets])
        driver.ensure_context()
        memory = self._copy_maps(words, pointers) if self._described else None
        compiled = self._compiled
        error = driver.library().cuLaunchKernel(
            compiled.function,
            *_whole_grid(grid),
            *(32 * compiled.num_warps, 1, 1),
            compiled.shared_bytes,
            stream,
            pointers.buffer_info()[0],
            None,
        )
        del memory, map_objects  # the driver has read them
        driver.check(error, f"the launch of {self.name}")

    def _copy_maps(self, words: Sequence[int], pointers: array[int]) -> Any:
        """Copies tensor maps for a call and sets the arguments' pointers to them. Returns the copies' owner."""
        memory, address = aligned_maps(len(self._described))
        for number, parameter in self._described:
            ctypes.memmove(address, words[parameter.tensor_map], MAP_BYTES)
            replace_address = driver.library().cuTensorMapReplaceAddress
            driver.check(replace_address(address, words[parameter.value]), "a tensor map's address")
            pointers[number] = address
            address += MAP_BYTES
        return memory

    def maps(self, args: Sequence[Any]) -> dict[int, Parts]:
        """The values for arguments with tensor maps, by position."""
        return {position: maps.parts_of(args[position]) for position, maps in self._maps.items()}

    def parameters(
        self, values: Mapping[int, tuple[int, int]], parts: Mapping[int, Sequence[int]]
    ) -> tuple[Parameter, ...]:
        """The source of each parameter of the compiled kernel.

        values: by position, the index of an argument's value, and its addend. parts: by position, indices of the values
        of :meth:`maps`.
        """
        result = []
        for position, kind in enumerate(self.kinds):
            if kind == "constexpr":
                continue
            is_mapped = position in parts and self._maps[position].has_map
            result.append(Parameter(*values[position], parts[position][0] if is_mapped else -1))
            result += (
                [Parameter(part, 0) for part in parts[position][1:]] if position in parts else []
            )
        scratch = Parameter(_ZERO, 0)  # kernels with scratch memory are launched by the JIT
        return (*result, scratch, scratch)

    def node(
        self, grid: tuple[int, ...], parameters: tuple[Parameter, ...], priority: int
    ) -> KernelNode:
        """A launch of the kernel in a graph."""
        compiled = self._compiled
        threads = 32 * compiled.num_warps
        return KernelNode(
            compiled.function,
            _whole_grid(grid),
            threads,
            compiled.shared_bytes,
            parameters,
            priority,
        )


def _whole_grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def known_kernel(
    name: str,
    compiled: Compiled | None,
    args: Sequence[Any],
    tensors: Sequence[int],
    describe: Mapping[int, Describe],
) -> Kernel | None:
    """The launcher of a compiled kernel; None if only Triton's JIT can launch it.

    args: one call's arguments without constants; tensors: the positions of tensors. Later calls have None and tensors
    at the same positions.
    describe: by position, functions from a tensor to its descriptor, which begins at the tensor's address.
    """
    if compiled is None or not driver.can_launch() or compiled.shared_bytes > _MAX_SHARED_BYTES:
        return None
    for position, kind in enumerate(compiled.kinds[: len(args)]):
        if kind == "tensordesc":
            if position not in describe or position not in tensors:
                return None
        elif not (
            kind in _INTEGERS or kind in _FLOATS or kind == "constexpr" or kind.startswith("*")
        ):
            return None
    if any(kind != "constexpr" for kind in compiled.kinds[len(args) :]):
        return None
    try:
        return Kernel(name, compiled, args, tensors, describe)
    except (_Unsupported, AttributeError, KeyError, TypeError, ValueError, struct.error):
        return None


class _Unsupported(Exception):
    """A kernel that this module cannot launch."""


class _TensorMaps(dict[torch.Size, Parts]):
    """Values for an argument with a tensor map, without the address, by the tensor's shape."""

    def __init__(self, compiled: Compiled, number: int, describe: Describe) -> None:
        self._compiled, self._number, self._describe = compiled, number, describe
        self.has_map = compiled.has_maps

    def parts_of(self, tensor: torch.Tensor) -> Parts:
        """The values for a tensor."""
        parts = self.get(tensor.shape)
        if parts is None:
            driver.ensure_context()
            if len(self) >= MAX_TENSOR_MAPS:
                self.clear()
            descriptor = self._describe(tensor)
            descriptor.base = _PLACEHOLDER  # every launch writes its own address there
            parts = described_parts(self._compiled, self._number, descriptor)
            if parts is None:
                raise _Unsupported
            self[tensor.shape] = parts
        return parts


class _PlaceholderTensor:
    """A stand-in for the tensor of a descriptor: an address that a driver accepts."""

    def data_ptr(self) -> int:
        return 1 << 40


_PLACEHOLDER = _PlaceholderTensor()


def _bits(value: float, kind: str) -> int:
    as_float, as_integer = _FLOATS[kind]
    return int(struct.unpack(as_integer, struct.pack(as_float, value))[0])


def _values(words: Iterable[int]) -> array[int]:
    try:
        return array("q", words)
    except OverflowError:  # of unsigned integers
        return array("q", [(word + 2**63) % 2**64 - 2**63 for word in words])


def _check_number(function: int, count: int) -> None:
    """Raises _Unsupported if the driver reports another number of parameters for the kernel."""
    query = driver.library().cuFuncGetParamInfo
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    arguments = (
        ctypes.c_void_p(function),
        ctypes.c_size_t(count - 1),
        ctypes.byref(offset),
        ctypes.byref(size),
    )
    has_more = query(arguments[0], ctypes.c_size_t(count), *arguments[2:]) == 0
    if has_more or query(*arguments) != 0:
        raise _Unsupported


# -- programs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """The data that the sections of a program share."""

    # The stream, 0, constants, and 0 for each value of a call.
    values: array[int] = field(default_factory=functools.partial(array, "q", (0, 0)))
    # Indices of values by their source in a call: the slot of memory with this address, or a number's operand.
    indices: dict[Any, int] = field(default_factory=dict)
    # By slot, the larger memory that contains this memory: its slot, and the offset in bytes.
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    # By the slot of an event, the work of streams outside of sections that the event follows.
    outside: dict[int, tuple[_Outside, ...]] = field(default_factory=dict)
    # Whether entries between sections launch work of their own, on any stream.
    has_outside: bool = False

    def constant(self, value: int) -> int:
        """The index of a new value."""
        self.values.extend(_values([value]))
        return len(self.values) - 1


def in_sections(program: Program) -> Program:
    """The program with its launches in as few sections as possible, and calls from Python between sections.

    All memory is allocated before the first launch, in the same order; the call frees it at its end. So a branch
    stream's memory is memory of the current stream, which reuses it only after it has waited for the branch, and no
    other thread gets it before our launches. Otherwise a branch could get memory without waiting for its last user on
    the current stream. Memory that only launches use, and small memory, is one allocation. Large memory that only the
    current stream uses is freed before the program allocates large memory that comes after its last use.
    """
    allocations, steps = list[Call](), list[Entry]()
    has_outside = any(getattr(entry, "kind", None) == IN_ORDER for entry in program.entries)
    group, layout = _Group(), _Layout(has_outside=has_outside)
    for entry in _with_memory_planned(program, allocations, layout.parts):
        if not group.try_add(entry):
            steps += group.end(layout)
            group = _Group()
            group.try_add(entry)
    steps += group.end(layout)
    return replace(program, entries=(*allocations, *steps), values=layout.values)


def _with_memory_planned(
    program: Program, allocations: list[Call], parts: dict[int, tuple[int, int]]
) -> list[Entry]:
    """The entries without the allocations before the first launch. Adds these to `allocations`, and the parts of memory
    to `parts` (see _Layout)."""
    users: dict[int, list[tuple[int, Entry]]] = {}
    for n, entry in enumerate(program.entries):
        for slot in _slots(
            entry.args if isinstance(entry, Launch) else getattr(entry, "template", None)
        ):
            users.setdefault(slot, []).append((n, entry))
    returned = set(_slots(program.outputs))
    entries: list[Entry] = []
    small: list[Call] = []
    large: dict[int, int] = {}  # bytes by slot, of memory that may be freed early
    for n, entry in enumerate(program.entries):
        if not (isinstance(entry, Call) and entry.kind == NEW and entry.slot is not None):
            entries.append(entry)
            continue
        num_bytes, used = (
            extent_bytes(*entry.template[0]),
            [user for _, user in users.get(entry.slot, ())],
        )
        launches_use = entry.slot not in returned and all(isinstance(user, Launch) for user in used)
        if launches_use and num_bytes < _SMALL_BYTES:
            small.append(entry)
            continue
        is_alone = all(getattr(user, "stream", None) is None for user in used)
        ended = [slot for slot in large if users[slot][-1][0] < n] if is_alone else []
        if sum(large[slot] for slot in ended) < _WORTH_BYTES:
            allocations.append(entry)
        else:
            entries += [*map(_free, ended), entry]
            large = {slot: size for slot, size in large.items() if slot not in ended}
        if launches_use and is_alone and used:
            large[entry.slot] = num_bytes
    if small:
        allocations.append(_workspace(small, parts))
    return entries


def _workspace(entries: Sequence[Call], parts: dict[int, tuple[int, int]]) -> Call:
    """Allocates the memory of several entries at once, until the call ends."""
    sizes = [
        -(-extent_bytes(*entry.template[0]) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for entry in entries
    ]
    slots = [entry.slot for entry in entries if entry.slot is not None]
    parts.update(zip(slots, zip(repeat(slots[0]), accumulate(sizes, initial=0)), strict=False))
    return Call(entries[0].function, (((sum(sizes),), (1,), torch.uint8), {}), slots[0], NEW)


def _free(slot: int) -> Call:
    """Drops memory after all of its users have been launched, on the current stream."""
    return Call(_nothing, ((), {}), slot)


def _nothing() -> None:
    """Returns None, the value of a slot whose memory has been freed."""


def _slots(template: Any) -> Iterator[int]:
    """The slots in a template."""
    return (operand.slot for operand in operands_of(template) if operand.slot is not None)


class _Group:
    """Entries that run with the launches of one section."""

    def __init__(self) -> None:
        self._before: list[Entry] = []
        self._notes: list[
            Entry
        ] = []  # last, because leases may fail: a noted wait must be launched
        self._launches: list[Launch | Event] = []
        self._mark: Mark | None = None  # the last one
        self._after: list[Call] = []
        self._is_full = False

    def try_add(self, entry: Entry) -> bool:
        """Adds the entry to this group if it fits; returns whether it does."""
        has_operator = any(entry.kind == OPERATOR for entry in self._after)
        # A launch may read what an operator writes.
        if self._is_full or (has_operator and isinstance(entry, (Launch, Event, Mark))):
            return False
        if isinstance(entry, (Launch, Event)):
            self._launches.append(entry)
        elif isinstance(entry, Mark):
            self._mark = entry
        elif isinstance(entry, Call) and entry.function is _nothing:
            self._after.append(entry)
        elif not isinstance(entry, Call):
            raise AssertionError(f"an unknown entry: {entry}")
        elif entry.kind == NOTE:
            self._notes.append(entry)
        elif entry.kind == IN_ORDER:
            self._after.append(entry)
            self._is_full = True
        elif not any(True for _ in operands_of(entry.template)):
            if self._after:
                return False  # a lease may get memory that was released meanwhile
            self._before.append(entry)
        else:
            self._after.append(entry)  # an operator, or the end of a lease
            self._is_full = entry.kind != OPERATOR and entry.slot is not None
        return True

    def end(self, layout: _Layout) -> list[Entry]:
        """The entries to run. A section cannot be interrupted, so only the last mark counts after it. Exchanges that
        peers wait for share a section with other work, because no peer would see an error of Python between them."""
        section = [Section(self._launches, layout).call] if self._launches else []
        is_owing = self._mark is not None and self._mark.meaning == MUST_SIGNAL
        marks = [Mark(MUST_ABORT) if is_owing else self._mark]
        return [*self._before, *self._notes, *section, *filter(None, marks), *self._after]


class _Outside(NamedTuple):
    """All work of a stream that entries between sections have launched."""

    stream: int


_Point = int | _Outside  # the number of a node, or work of an entry between sections


class _Order:
    """The order of a section's launches, as edges of a graph. Earlier work of the current stream precedes the whole
    section, later work follows it. Other streams have work outside of sections only if entries between sections launch
    it."""

    def __init__(self, layout: _Layout) -> None:
        self.nodes: list[tuple[Node, tuple[int, ...]]] = []
        self.entered: dict[int, torch.cuda.Event] = {}  # by stream, recorded before the section
        self.exited: dict[int, torch.cuda.Event] = {}  # by stream, waited for after the section
        self._layout = layout
        self._last: dict[
            int | None, tuple[_Point, ...]
        ] = {}  # by stream, the points that its next work follows
        self._events: dict[int, tuple[_Point, ...]] = dict(layout.outside)  # by slot
        self._waits: dict[int, int] = {}  # by stream, the node that waits for it

    def add(self, node: Node, stream: int | None) -> None:
        """Adds a launch on a stream; None is the current stream."""
        after = self._numbers(self._points_of(stream))
        self.nodes.append((node, after))
        self._last[stream] = (len(self.nodes) - 1,)

    def note(self, event: Event) -> None:
        """Adds an event that is recorded or waited for."""
        points = self._points_of(event.stream)
        if event.is_wait:
            # An event of an earlier section has happened.
            waited = self._events.get(event.slot, ())
            self._last[event.stream] = tuple(dict.fromkeys((*points, *waited)))
        else:
            self._events[event.slot] = points

    def end(self) -> None:
        """Ends the order: nothing follows."""
        self._numbers(self._points_of(None))
        for stream, points in self._last.items():
            after = [point for point in points if point != _Outside(stream or 0)]
            if stream is not None and self._layout.has_outside and after:
                self.exited[stream] = event = _new_event()
                self.nodes.append((EventNode(event, is_wait=False), self._numbers(after)))
        for slot, points in self._events.items():
            self._layout.outside[slot] = tuple(
                point for point in points if isinstance(point, _Outside)
            )

    def _points_of(self, stream: int | None) -> tuple[_Point, ...]:
        is_outside = stream is not None and self._layout.has_outside
        first = (_Outside(stream),) if stream is not None and is_outside else ()
        return self._last.get(stream, first)

    def _numbers(self, points: Iterable[_Point]) -> tuple[int, ...]:
        return tuple(
            self._wait_of(point.stream) if isinstance(point, _Outside) else point
            for point in points
        )

    def _wait_of(self, stream: int) -> int:
        """The node that waits for a stream's work from entries between sections."""
        if stream not in self._waits:
            self.entered[stream] = event = _new_event()
            self.nodes.append((EventNode(event, is_wait=True), ()))
            self._waits[stream] = len(self.nodes) - 1
        return self._waits[stream]


def _new_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()  # this creates the event
    return event


class Section:
    """Consecutive launches and events of a program, as a CUDA graph. call: the entry that launches everything."""

    def __init__(self, entries: Sequence[Launch | Event], layout: _Layout) -> None:
        self._references: list[Any] = []  # kernels, and tensor maps to be copied
        self._layout = layout
        # Slots of memory, and numbers, that no earlier section uses, with the indices of their values.
        self._memory: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, Number | LeaseOffset | ResultField]] = []
        order = _Order(layout)
        for entry in entries:
            if isinstance(entry, Event):
                order.note(entry)
            else:
                order.add(self._node(entry), entry.stream)
        order.end()
        self._entered, self._exited = order.entered, order.exited
        self._graph = LaunchGraph(order.nodes, layout.values) if order.nodes else None
        memory = [ObjectSlot(slot) for _, slot in self._memory]
        numbers = [number for _, number in self._numbers]
        self.call = Call(self.launch, ((ObjectSlot(VALUES), *memory, *numbers), {}), None)

    def launch(self, values: array[int], *arguments: Any) -> None:
        """Launches the section. arguments: memory, tensors and leases, and numbers."""
        num_memory = len(self._memory)
        for (index, _), memory in zip(self._memory, arguments[:num_memory], strict=True):
            values[index] = memory.data_ptr()
        for (index, _), number in zip(self._numbers, arguments[num_memory:], strict=True):
            values[index] = number
        driver.ensure_context()
        library = driver.library()
        for stream, event in self._entered.items():
            driver.check(library.cuEventRecord(event.cuda_event, stream), "cuEventRecord")
        if self._graph is not None:
            self._graph.launch(values[STREAM], values)
        for stream, event in self._exited.items():
            driver.check(
                library.cuStreamWaitEvent(stream, event.cuda_event, 0), "cuStreamWaitEvent"
            )

    def _node(self, entry: Launch) -> KernelNode:
        kernel: Kernel = entry.kernel
        values, constant = {}, self._layout.constant
        for position, (arg, kind) in enumerate(zip(entry.args, kernel.kinds, strict=True)):
            arg = arg.tensor if isinstance(arg, Address) else arg
            if isinstance(arg, (TensorRef, ObjectSlot)) and arg.slot is not None:
                slot, offset = self._layout.parts.get(arg.slot, (arg.slot, 0))
                values[position] = self._index(slot, self._memory), offset + arg.offset_bytes
            elif isinstance(arg, TensorRef):
                values[position] = constant(arg.offset_bytes), 0
            elif isinstance(arg, (Number, LeaseOffset, ResultField)):
                values[position] = self._index(arg, self._numbers), 0
            elif kind != "constexpr":
                values[position] = constant(_bits(arg, kind) if kind in _FLOATS else arg), 0
        parts = {
            position: [constant(word) for word in words]
            for position, (words, _) in entry.maps.items()
        }
        self._references += [kernel, entry.maps]
        return kernel.node(entry.grid, kernel.parameters(values, parts), _priority(entry.stream))

    def _index(self, source: Any, additions: list[tuple[int, Any]]) -> int:
        """The index of a value by its source in a call. additions: gets the entry if no section has used the value."""
        if source not in self._layout.indices:
            additions.append(
                (self._layout.indices.setdefault(source, self._layout.constant(0)), source)
            )
        return self._layout.indices[source]


def _priority(stream: int | None) -> int:
    """The priority of a stream; the current stream (None) counts as the default priority."""
    priority = ctypes.c_int(0)
    if stream is not None:
        get_priority = driver.library().cuStreamGetPriority
        driver.check(get_priority(stream, ctypes.byref(priority)), "cuStreamGetPriority")
    return priority.value
