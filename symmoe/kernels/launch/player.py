"""Launches of compiled kernels by one function in C: a single one, or those of a section of a tape.

Every launch takes its arguments out of one array of 64-bit values, which a call fills: addresses, integers, the bits of
floats. A parameter says where its value is; the driver reads as many bytes of it as the kernel's parameter has. C
copies all of it to its stack, so threads may launch the same at the same time. It is built by Triton's compiler of
launchers. Where it cannot be, and for kernels that it does not know, Triton's JIT makes every launch.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import subprocess
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.errors import SymmoeError
from symmoe.kernels.launch import driver
from symmoe.kernels.launch.triton_internals import Compiled, build_module, described_parts
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

_MOST_PARAMETERS, _MOST_MAPS = 128, 8
_SOURCE = f"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {{
    int64_t value;   /* index of the parameter's value, */
    int64_t addend;  /* to which this is added */
    int64_t map;     /* index of the address of a tensor map for memory that begins at the value; -1: there is none */
}} Parameter;
typedef struct {{
    int64_t kind;               /* 0: launch, 1: record an event, 2: wait for one */
    void *handle;               /* kernel or event */
    int64_t stream;             /* index of a value */
    int64_t x, y, z, threads, shared_bytes;
    const Parameter *parameters; int64_t num_parameters;
}} Op;
typedef struct {{ _Alignas(128) char bytes[128]; }} Map;
typedef unsigned Size;
typedef int (*LaunchKernel)(void *, Size, Size, Size, Size, Size, Size, Size, void *, void **, void **);
typedef int (*RecordEvent)(void *, void *);
typedef int (*WaitEvent)(void *, void *, unsigned);
typedef int (*ReplaceAddress)(void *, void *);
typedef struct {{ LaunchKernel launch; RecordEvent record; WaitEvent wait; ReplaceAddress replace; }} Driver;

static int launch_one(const Driver *driver, const Op *op, const int64_t *values, int64_t x, int64_t y, int64_t z)
{{
    int64_t words[{_MOST_PARAMETERS}];
    void *pointers[{_MOST_PARAMETERS}];
    Map maps[{_MOST_MAPS}];
    int num_maps = 0;
    if (!x || !y || !z)
        return 0;
    for (int64_t i = 0; i < op->num_parameters; i++) {{
        const Parameter *parameter = &op->parameters[i];
        words[i] = values[parameter->value] + parameter->addend;
        pointers[i] = &words[i];
        if (parameter->map >= 0) {{
            Map *map = &maps[num_maps++];
            memcpy(map, (const void *)values[parameter->map], sizeof(Map));
            int error = driver->replace(map, (void *)words[i]);
            if (error)
                return error;
            pointers[i] = map;
        }}
    }}
    return driver->launch(op->handle, x, y, z, op->threads, 1, 1, op->shared_bytes, (void *)values[op->stream],
                          pointers, NULL);
}}

/* play(driver, ops, their number, values, and, if there is one launch, its grid) */
static PyObject *play(PyObject *self, PyObject *args)
{{
    unsigned long long driver_address, ops;
    long long num_ops;
    int x = 0, y = 0, z = 0, error = 0;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "KKLy*|iii", &driver_address, &ops, &num_ops, &buffer, &x, &y, &z))
        return NULL;
    const Driver *driver = (const Driver *)driver_address;
    const int64_t *values = buffer.buf;
    Py_BEGIN_ALLOW_THREADS
    for (const Op *op = (const Op *)ops; num_ops-- && !error; op++) {{
        void *stream = (void *)values[op->stream];
        if (op->kind == 1)
            error = driver->record(op->handle, stream);
        else if (op->kind == 2)
            error = driver->wait(stream, op->handle, 0);
        else
            error = launch_one(driver, op, values, x ? x : op->x, y ? y : op->y, z ? z : op->z);
    }}
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyLong_FromLong(error);
}}

static PyMethodDef methods[] = {{{{"play", play, METH_VARARGS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "symmoe_player", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_symmoe_player(void) {{ return PyModule_Create(&module); }}
"""
_DRIVER = ("cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuTensorMapReplaceAddress")
_LAUNCH, _RECORD, _WAIT = range(3)
_FLOATS = {"fp32": ("<f", "<i"), "fp64": ("<d", "<q")}
_INTEGERS = {"i1", "u1", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"}
_ZERO, _FIRST = STREAM + 1, STREAM + 2  # indices of values: of 0, of the first argument
_REST_OF_GRID: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())
_MAX_SHARED_BYTES = 227 << 10  # with more, Triton sets attributes of the launch
_SMALL_BYTES, _WORTH_BYTES, _ALIGNMENT_BYTES = 1 << 20, 32 << 20, 256

MAX_TENSOR_MAPS = (
    1024  # remembered for one argument of one compiled kernel: about 600 KiB of host memory
)
Describe = Callable[[torch.Tensor], TensorDescriptor]
Parts = tuple[
    tuple[int, ...], object
]  # values (the address of a tensor map, or 0; integers), and what keeps them


def picker(places: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Function from a sequence or a mapping to the tuple of its elements at `places`."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())


class _Parameter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("value", "addend", "map")]


class _Op(ctypes.Structure):
    _names = "kind handle stream x y z threads shared_bytes parameters num_parameters"
    _fields_ = [(name, ctypes.c_int64) for name in _names.split()]


class Kernel:
    """A compiled kernel, launched by C. Immutable but for the tensor maps that it remembers. name: of the kernel."""

    def __init__(
        self,
        name: str,
        compiled: Compiled,
        args: Sequence[Any],
        tensors: Sequence[int],
        describe: Mapping[int, Describe],
    ) -> None:
        self.name, self._compiled = name, compiled
        self._tensors = {place: n for n, place in enumerate(tensors)}
        self.kinds = compiled.kinds[: len(args)]
        self._maps = {
            place: _TensorMaps(compiled, n, describe[place])
            for n, place in enumerate(
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
        self._mapped = [(self._tensors[place], maps) for place, maps in self._maps.items()]
        values = {place: _FIRST + n for n, place in enumerate((*tensors, *self._numbers))}
        parts = iter(range(_FIRST + len(values), 1 << 30))
        self._op = _Op()
        lengths = {place: len(maps.of(args[place])[0]) for place, maps in self._maps.items()}
        parameters = self.parameters(
            {place: (value, 0) for place, value in values.items()},
            {place: [next(parts) for _ in range(length)] for place, length in lengths.items()},
        )
        self._array = self.set_launch(self._op, parameters)
        _check_number(compiled.function, len(parameters))
        self._play = _player().play
        self._addresses = ctypes.addressof(_driver_functions()), ctypes.addressof(self._op), 1

    def launch(
        self,
        grid: tuple[int, ...],
        stream: int,
        tensors: tuple[torch.Tensor, ...],
        addresses: tuple[int, ...],
        args: tuple[Any, ...],
    ) -> None:
        """Launches it. tensors, addresses: those among the arguments."""
        words = [stream, 0, *addresses, *self._pick(args)]
        for n, kind in self._floats:
            words[n] = _bits(words[n], kind)
        kept = []
        for n, maps in self._mapped:
            parts, map_object = maps.get(tensors[n].shape) or maps.of(tensors[n])
            words += parts
            kept.append(map_object)  # another thread may drop it
        driver.ensure_context()
        if error := self._play(*self._addresses, _values(words), *grid, *_REST_OF_GRID[len(grid)]):
            driver.check(error, f"the launch of {self.name}")

    def maps(self, args: Sequence[Any]) -> dict[int, Parts]:
        """By place, the values for arguments that are described by tensor maps."""
        return {place: maps.of(args[place]) for place, maps in self._maps.items()}

    def parameters(
        self, values: Mapping[int, tuple[int, int]], parts: Mapping[int, Sequence[int]]
    ) -> list[tuple[int, int, int]]:
        """(value, addend, map) of each parameter.

        values: by place, index of an argument's value, and what is added to it. parts: by place, indices of the values
        of :meth:`maps`.
        """
        result = []
        for place, kind in enumerate(self.kinds):
            if kind == "constexpr":
                continue
            is_mapped = place in parts and self._maps[place].has_map
            result.append((*values[place], parts[place][0] if is_mapped else -1))
            result += [(part, 0, -1) for part in parts[place][1:]] if place in parts else []
        return [
            *result,
            (_ZERO, 0, -1),
            (_ZERO, 0, -1),
        ]  # kernels with scratch memory are launched by the JIT

    def set_launch(self, op: _Op, parameters: Sequence[tuple[int, int, int]]) -> Any:
        """Fills in an operation, except for its grid. Returns what the caller has to keep."""
        made = (_Parameter * len(parameters))(*[_Parameter(*each) for each in parameters])
        op.kind, op.handle, op.stream = _LAUNCH, self._compiled.function, STREAM
        op.threads, op.shared_bytes = 32 * self._compiled.num_warps, self._compiled.shared_bytes
        op.parameters, op.num_parameters = ctypes.addressof(made), len(parameters)
        return made


def known_kernel(
    name: str,
    compiled: Compiled | None,
    args: Sequence[Any],
    tensors: Sequence[int],
    describe: Mapping[int, Describe],
) -> Kernel | None:
    """What launches a compiled kernel; None if only Triton's JIT can.

    args: of one call, without constants; tensors: their places. Later calls have None and tensors in the same places.
    describe: by place, functions from a tensor to its descriptor, which begins at the tensor's address.
    """
    if compiled is None or _player() is None or compiled.shared_bytes > _MAX_SHARED_BYTES:
        return None
    described = 0
    for place, kind in enumerate(compiled.kinds[: len(args)]):
        if kind == "tensordesc":
            described += 1
            if place not in describe or place not in tensors:
                return None
        elif not (
            kind in _INTEGERS or kind in _FLOATS or kind == "constexpr" or kind.startswith("*")
        ):
            return None
    if described > _MOST_MAPS or any(kind != "constexpr" for kind in compiled.kinds[len(args) :]):
        return None
    try:
        return Kernel(name, compiled, args, tensors, describe)
    except (_Unknown, AttributeError, KeyError, TypeError, ValueError, struct.error):
        return None


class _Unknown(Exception):
    """A kernel that this file cannot launch."""


class _TensorMaps(dict[torch.Size, Parts]):
    """Values for an argument that is described by a tensor map, by the tensor's shape: C fills in the address."""

    def __init__(self, compiled: Compiled, number: int, describe: Describe) -> None:
        self._compiled, self._number, self._describe = compiled, number, describe
        self.has_map = compiled.has_maps

    def of(self, tensor: torch.Tensor) -> Parts:
        """Those for a tensor."""
        found = self.get(tensor.shape)
        if found is None:
            driver.ensure_context()
            if len(self) >= MAX_TENSOR_MAPS:
                self.clear()
            found = described_parts(self._compiled, self._number, self._describe(tensor))
            if found is None:
                raise _Unknown
            self[tensor.shape] = found
        return found


def _bits(value: float, kind: str) -> int:
    as_float, as_integer = _FLOATS[kind]
    return int(struct.unpack(as_integer, struct.pack(as_float, value))[0])


def _values(words: Iterable[int]) -> array[int]:
    try:
        return array("q", words)
    except OverflowError:  # of unsigned integers
        return array("q", [(word + 2**63) % 2**64 - 2**63 for word in words])


def _check_number(function: int, count: int) -> None:
    """_Unknown if the driver knows another number of parameters of the kernel, or if there are too many."""
    query = driver.library().cuFuncGetParamInfo
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    arguments = (
        ctypes.c_void_p(function),
        ctypes.c_size_t(count - 1),
        ctypes.byref(offset),
        ctypes.byref(size),
    )
    has_more = query(arguments[0], ctypes.c_size_t(count), *arguments[2:]) == 0
    if has_more or query(*arguments) != 0 or count > _MOST_PARAMETERS:
        raise _Unknown


@functools.cache
def _driver_functions() -> Any:
    """The four functions of the driver that C calls."""
    functions = [
        ctypes.cast(getattr(driver.library(), name), ctypes.c_void_p).value for name in _DRIVER
    ]
    return (ctypes.c_void_p * len(functions))(*functions)


@functools.cache
def _player() -> Any:
    """The compiled module; None if it cannot be built."""
    try:
        _driver_functions()
        _ = driver.library().cuFuncGetParamInfo  # drivers of CUDA 12.4 and later have it
        return build_module(_SOURCE, "symmoe_player")
    except (
        AttributeError,
        ImportError,
        OSError,
        RuntimeError,
        SymmoeError,
        subprocess.CalledProcessError,
    ):
        return None


# -- tapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the sections of a tape share."""

    # The stream, 0, constants, and, for what a call brings, 0.
    values: array[int] = field(default_factory=functools.partial(array, "q", (0, 0)))
    # Of values by what a call brings: the slot of memory with this address, or the place of a number.
    indices: dict[Any, int] = field(default_factory=dict)
    # By slot, the larger memory of which it is a part: its slot, and the offset in bytes.
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)  # by slot

    def constant(self, value: int) -> int:
        """Index of a new value."""
        self.values.extend(_values([value]))
        return len(self.values) - 1


def in_sections(tape: Tape) -> Tape | None:
    """What is played of a tape: its launches in sections, as few as possible, and calls from Python between them. None
    where nothing is launched by C.

    All memory is made before the first launch, in the same order; the call frees it at its end. So memory that a branch
    stream uses comes from the current stream's, which gets it back only once it has waited for the branch, and no other
    thread gets it before our launches have happened. Otherwise a branch could get memory whose last user, on the
    current stream, it does not wait for. What only launches use, and what is small, is one allocation. Large memory
    that only the current stream uses ends before such memory is made that comes after its last use.
    """
    if _player() is None:
        return None
    made, steps = list[Call](), list[Entry]()
    group, layout = _Group(), _Layout()
    for entry in _with_memory_planned(tape, made, layout.parts):
        if not group.takes(entry):
            steps += group.end(layout)
            group = _Group()
            group.takes(entry)
    steps += group.end(layout)
    # A whole tensor is returned as it was made.
    whole = {
        Memory(each.slot, 0, *each.template[0]): ObjectSlot(each.slot)
        for each in made
        if each.slot is not None
    }
    outputs = [whole.get(each, each) if isinstance(each, Memory) else each for each in tape.outputs]
    return replace(tape, entries=(*made, *steps), outputs=tuple(outputs), values=layout.values)


def _with_memory_planned(
    tape: Tape, made: list[Call], parts: dict[int, tuple[int, int]]
) -> list[Entry]:
    """The entries without those that make memory before the first launch: `made`, and `parts` of it (see _Layout)."""
    users: dict[int, list[tuple[int, Entry]]] = {}
    for n, entry in enumerate(tape.entries):
        for slot in _slots(
            entry.args if isinstance(entry, Launch) else getattr(entry, "template", None)
        ):
            users.setdefault(slot, []).append((n, entry))
    returned = set(_slots(tape.outputs))
    entries: list[Entry] = []
    small: list[Call] = []
    large: dict[int, int] = {}  # bytes by slot, of memory that may end
    for n, entry in enumerate(tape.entries):
        if not (isinstance(entry, Call) and entry.kind == tapes.NEW and entry.slot is not None):
            entries.append(entry)
            continue
        num_bytes, used = (
            tapes.extent_bytes(*entry.template[0]),
            [user for _, user in users.get(entry.slot, ())],
        )
        launches_use = entry.slot not in returned and all(isinstance(user, Launch) for user in used)
        if launches_use and num_bytes < _SMALL_BYTES:
            small.append(entry)
            continue
        is_alone = all(getattr(user, "stream", None) is None for user in used)
        ended = [slot for slot in large if users[slot][-1][0] < n] if is_alone else []
        if sum(large[slot] for slot in ended) < _WORTH_BYTES:
            made.append(entry)
        else:
            entries += [_End(tuple(ended)), entry]
            large = {slot: size for slot, size in large.items() if slot not in ended}
        if launches_use and is_alone and used:
            large[entry.slot] = num_bytes
    if small:
        made.append(_workspace(small, parts))
    return entries


def _workspace(entries: Sequence[Call], parts: dict[int, tuple[int, int]]) -> Call:
    """Makes memory of several entries in one allocation, which lives until the call ends."""
    sizes = [
        -(-tapes.extent_bytes(*entry.template[0]) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for entry in entries
    ]
    slots = [entry.slot for entry in entries if entry.slot is not None]
    parts.update(zip(slots, zip(repeat(slots[0]), accumulate(sizes, initial=0)), strict=False))
    return Call(entries[0].function, (((sum(sizes),), (1,), torch.uint8), {}), slots[0], tapes.NEW)


def _slots(template: Any) -> Iterator[int]:
    """The slots in a template."""
    if isinstance(template, dict):
        template = tuple(template.values())
    if isinstance(template, (tuple, list)):
        yield from chain.from_iterable(map(_slots, template))
    elif isinstance(slot := getattr(template, "slot", None), int):
        yield slot


@dataclass(frozen=True, slots=True)
class _End(Entry):
    """Memory ends, of which all users have been launched on the current stream."""

    slots: tuple[int, ...]
    kind = tapes.CALL

    def play(self, playing: Playing) -> None:
        for slot in self.slots:
            playing.things[slot] = None


class _Group:
    """Entries that are played with the launches of one section."""

    def __init__(self) -> None:
        self._before: list[Entry] = []
        self._notes: list[
            Entry
        ] = []  # last, because leases may fail: a wait that is noted has to be launched
        self._launches: list[Launch | Event] = []
        self._mark: Mark | None = None  # the last one
        self._after: list[Call | _End] = []
        self._is_full = False

    def takes(self, entry: Entry) -> bool:
        """Whether the entry may have its place in this group, which takes it then."""
        has_operator = any(each.kind == tapes.OPERATOR for each in self._after)
        if self._is_full:
            return False
        if isinstance(entry, (Launch, Event)):
            if has_operator:
                return False  # it may read what the operator writes
            self._launches.append(entry)
        elif isinstance(entry, Mark):
            if has_operator:
                return False
            self._mark = entry
        elif isinstance(entry, _End):
            self._after.append(entry)
        elif not isinstance(entry, Call):
            raise AssertionError(f"an unknown entry: {entry}")
        elif entry.kind == tapes.NOTE:
            self._notes.append(entry)
        elif entry.kind == tapes.IN_ORDER:
            self._after.append(entry)
            self._is_full = True
        elif entry.fills == (None, None):
            if self._after:
                return False  # a lease may get memory that was given back meanwhile
            self._before.append(entry)
        else:
            self._after.append(entry)  # an operator, or the end of a lease
            self._is_full = entry.kind != tapes.OPERATOR and entry.slot is not None
        return True

    def end(self, layout: _Layout) -> list[Entry]:
        """What is played: nothing can interrupt the function in C, so only the last mark counts after it. What would be
        owed is in sections with what is not: an error of Python between them cannot be told to the peers."""
        section = [Section(self._launches, layout)] if self._launches else []
        is_owing = self._mark is not None and self._mark.what == tapes.MUST_SIGNAL
        marks = [Mark(tapes.MUST_ABORT) if is_owing else self._mark]
        return [*self._before, *self._notes, *section, *filter(None, marks), *self._after]


class Section(Entry):
    """Launches and events of a tape that follow each other."""

    def __init__(self, entries: Sequence[Launch | Event], layout: _Layout) -> None:
        self._kept: list[Any] = []  # what the ops point to
        self._layout = layout
        # With their indices, what no earlier section uses: slots of memory, and places of numbers.
        self._slots: list[tuple[int, int]] = []
        self._numbers: list[
            tuple[int, tapes.CallInteger | tapes.LeaseOffset | tapes.ResultField]
        ] = []
        self._ops = (_Op * len(entries))()
        for op, entry in zip(self._ops, entries, strict=True):
            if isinstance(entry, Launch):
                self._set_launch(op, entry)
            else:
                if entry.recorded_on is not None:
                    layout.events[entry.slot] = torch.cuda.Event()
                    layout.events[entry.slot].record(entry.recorded_on)  # this makes it
                self._kept.append(event := layout.events[entry.slot])
                op.kind, op.handle = _WAIT if entry.is_wait else _RECORD, event.cuda_event
            op.stream = STREAM if entry.stream is None else layout.constant(entry.stream)
        self._play = _player().play
        self._addresses = (
            ctypes.addressof(_driver_functions()),
            ctypes.addressof(self._ops),
            len(entries),
        )

    def play(self, playing: Playing) -> None:
        """Launches everything."""
        values, things = playing.values, playing.things
        for index, slot in self._slots:
            values[index] = things[slot].data_ptr()  # of a tensor or a lease
        for index, number in self._numbers:
            values[index] = number.get(playing)
        driver.ensure_context()
        if error := self._play(*self._addresses, values):
            driver.check(error, "a launch of a recorded call")

    def _set_launch(self, op: _Op, entry: Launch) -> None:
        kernel: Kernel = entry.kernel
        values, constant = {}, self._layout.constant
        for place, (arg, kind) in enumerate(zip(entry.args, kernel.kinds, strict=True)):
            if isinstance(arg, Memory) and arg.slot is not None:
                slot, offset = self._layout.parts.get(arg.slot, (arg.slot, 0))
                values[place] = self._index(slot, self._slots), offset + arg.offset_bytes
            elif isinstance(arg, Memory):
                values[place] = constant(arg.offset_bytes), 0
            elif isinstance(arg, (tapes.CallInteger, tapes.LeaseOffset, tapes.ResultField)):
                values[place] = self._index(arg, self._numbers), 0
            elif kind != "constexpr":
                values[place] = constant(_bits(arg, kind) if kind in _FLOATS else arg), 0
        parts = {
            place: [constant(word) for word in words] for place, (words, _) in entry.maps.items()
        }
        self._kept += [kernel.set_launch(op, kernel.parameters(values, parts)), kernel, entry.maps]
        op.x, op.y, op.z = (*entry.grid, 1, 1)[:3]

    def _index(self, source: Any, new: list[tuple[int, Any]]) -> int:
        """Index of what each call has in a slot or a place. new: where it is noted if no section has used it."""
        if source not in self._layout.indices:
            new.append((self._layout.indices.setdefault(source, self._layout.constant(0)), source))
        return self._layout.indices[source]
