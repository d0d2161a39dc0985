"""Plays the launches of a tape by one function in C: 2 us of the host for each, where Python takes 6.

A launch's parameters are in memory that this file owns, laid out as the driver wants them. The function writes the
addresses of a call into them, and launches. It is built by Triton's compiler of launchers. Where it cannot be, and for
launches that it does not know, Python plays a tape entry by entry, if all of it is on one stream.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from symmoe.errors import SymmoeError
from symmoe.kernels.launch import driver
from symmoe.kernels.launch.triton_internals import address_of_map, build_module, launch_shape, runner, signature_of
from symmoe.tape.tape import (
    Address,
    Call,
    Entry,
    Free,
    Launch,
    Mark,
    New,
    Note,
    Operator,
    Playing,
    RecordEvent,
    Tape,
    WaitEvent,
    has_places,
)

_SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct { int64_t *target; int64_t value; int64_t addend; } Word;
typedef struct {
    int64_t kind;               /* 0: launch, 1: record an event, 2: wait for one */
    void *handle;               /* kernel or event */
    int64_t stream;             /* index */
    int64_t x, y, z, threads, shared_bytes;
    void **parameters;
    Word *words; int64_t num_words;  /* where values go */
    Word *maps; int64_t num_maps;    /* tensor maps, whose addresses are values */
} Op;
typedef unsigned Size;
typedef int (*LaunchKernel)(void *, Size, Size, Size, Size, Size, Size, Size, void *, void **, void **);
typedef int (*RecordEvent)(void *, void *);
typedef int (*WaitEvent)(void *, void *, unsigned);
typedef int (*ReplaceAddress)(void *, void *);
typedef struct { LaunchKernel launch; RecordEvent record; WaitEvent wait; ReplaceAddress replace; } Driver;

static int run(const Driver *driver, const Op *op, int64_t num_ops, const int64_t *values, void **streams)
{
    for (; num_ops--; op++) {
        void *stream = streams[op->stream];
        int error = 0;
        if (op->kind == 1)
            error = driver->record(op->handle, stream);
        else if (op->kind == 2)
            error = driver->wait(stream, op->handle, 0);
        else {
            for (int64_t i = 0; i < op->num_words; i++)
                *op->words[i].target = values[op->words[i].value] + op->words[i].addend;
            for (int64_t i = 0; i < op->num_maps && !error; i++) {
                const Word *map = &op->maps[i];
                error = driver->replace(map->target, (void *)(values[map->value] + map->addend));
            }
            if (!error)
                error = driver->launch(op->handle, op->x, op->y, op->z, op->threads, 1, 1, op->shared_bytes, stream,
                                       op->parameters, NULL);
        }
        if (error)
            return error;
    }
    return 0;
}

static PyObject *play(PyObject *self, PyObject *args)
{
    unsigned long long driver, ops, values, streams;
    long long num_ops;
    int error;
    if (!PyArg_ParseTuple(args, "KKLKK", &driver, &ops, &num_ops, &values, &streams))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = run((const Driver *)driver, (const Op *)ops, num_ops, (const int64_t *)values, (void **)streams);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(error);
}

static PyMethodDef methods[] = {{"play", play, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "symmoe_player", NULL, -1, methods};
PyMODINIT_FUNC PyInit_symmoe_player(void) { return PyModule_Create(&module); }
"""
_DRIVER = ("cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuTensorMapReplaceAddress")
_FORMATS = {"i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q"}
_FORMATS |= {"u64": "Q", "fp32": "f", "fp64": "d"}
_LAUNCH, _RECORD, _WAIT = range(3)


class _Word(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("target", "value", "addend")]


class _Op(ctypes.Structure):
    _names = "kind handle stream x y z threads shared_bytes parameters words num_words maps num_maps"
    _fields_ = [(name, ctypes.c_int64) for name in _names.split()]


class _Unknown(Exception):
    """A launch that this file cannot make."""


def compiled_tape(tape: Tape) -> Tape | None:
    """What is played of a tape: all launches in one step by C; else the tape, if it is of one stream; else None.

    C takes memory and leases before the first launch, in the same order, and ends them after the last one. So memory
    that a branch stream uses comes from the current stream's, which gets it back only once it has waited for the
    branch. Entry by entry a branch could get memory whose last user, on the current stream, it does not wait for.
    """
    tape = replace(tape, entries=tuple(sorted(tape.entries, key=lambda entry: isinstance(entry, Free))))
    if _player() is not None and (by_c := _by_c(tape)) is not None:
        return by_c
    return None if any(isinstance(entry, (RecordEvent, WaitEvent)) for entry in tape.entries) else tape


def _by_c(tape: Tape) -> Tape | None:
    before: list[Entry] = []
    notes: list[Entry] = []  # last, because memory may be missing: a wait that is noted has to be launched
    launches: list[Any] = []
    after: list[Entry] = []
    for entry in tape.entries:
        if isinstance(entry, (Launch, RecordEvent, WaitEvent)):
            if any(isinstance(each, Operator) for each in after):
                return None  # it may read what the operator writes
            launches.append(entry)
        elif isinstance(entry, New):
            before.append(entry)
        elif isinstance(entry, Free):
            after.append(entry)  # or another thread might get the memory, and use it before our launches do
        elif isinstance(entry, Call):
            if isinstance(entry, Note):
                notes.append(entry)
            elif not has_places(entry.template):
                if any(isinstance(each, Call) for each in after):
                    return None  # a lease may get memory that was given back meanwhile
                before.append(entry)
            elif entry.slot is None or isinstance(entry, Operator):
                after.append(entry)  # the end of a lease, or an operator that comes last
            else:
                return None
        elif not isinstance(entry, Mark):  # nothing can interrupt the function in C
            return None
    try:
        section = _Section(launches, tape.num_slots)
    except (_Unknown, AttributeError, KeyError, TypeError, ValueError, struct.error):
        return None
    return Tape(tape.num_slots, (*before, *notes, section, *after), tape.outputs)


class _Section(Entry):
    """All launches of a tape, in order."""

    def __init__(self, entries: Sequence[Any], num_slots: int) -> None:
        self._numbers: list[Any] = []  # places of integers, whose values come after those of the slots
        self._num_slots = num_slots
        self._kept: list[Any] = []  # what the ops point to
        streams: dict[int | None, int] = {None: 0}
        events: dict[int, torch.cuda.Event] = {}
        self._ops = (_Op * len(entries))()
        for op, entry in zip(self._ops, entries, strict=True):
            op.stream = streams.setdefault(entry.stream, len(streams))
            if isinstance(entry, Launch):
                self._set_launch(op, entry)
            elif isinstance(entry, RecordEvent):
                event = events[entry.slot] = torch.cuda.Event()
                event.record(entry.as_recorded)  # this makes it
                op.kind, op.handle = _RECORD, event.cuda_event
            else:
                op.kind, op.handle = _WAIT, events[entry.slot].cuda_event
        self._kept += events.values()
        self._streams = (ctypes.c_void_p * len(streams))(*[stream or 0 for stream in streams])
        play = _player()
        assert play is not None
        self._play: Callable[..., int] = play
        self._addresses = ctypes.addressof(_driver_functions()), ctypes.addressof(self._ops), len(entries)

    def play(self, playing: Playing) -> None:
        """Launches everything."""
        values = array("q", playing.addresses)
        values.extend([number.get(playing) for number in self._numbers])
        self._streams[0] = playing.stream
        driver.ensure_context()
        error = self._play(*self._addresses, values.buffer_info()[0], ctypes.addressof(self._streams))
        if error:
            driver.check(error, "a launch of a recorded call")

    def _set_launch(self, op: _Op, entry: Launch) -> None:
        kernel, (_, function, _) = entry.kernel, runner(entry.kernel)
        num_warps, num_ctas, shared_bytes, has_attributes = launch_shape(kernel)
        if num_ctas != 1 or has_attributes:
            raise _Unknown
        memory = (*entry.addresses, *((place, each) for place, _, each, _ in entry.maps))
        values = {place: (each.slot, each.offset_bytes) for place, each in memory if each.slot is not None}
        values |= {place: self._value(number) for place, number in entry.numbers if type(number) is not int}
        parameters: list[int] = []
        words: list[_Word] = []
        map_words: list[_Word] = []
        for place, kind in _parameters(kernel):
            is_map = kind == "map"
            address, buffer = _copy_of_map(entry.row[place]) if is_map else _packed(kind, entry.row[place])
            if place in values:
                (map_words if is_map else words).append(_Word(address, *values[place]))
            parameters.append(address)
            self._kept.append(buffer)
        scratch = ctypes.create_string_buffer(8)  # two null pointers: kernels with scratch memory are not on tapes
        parameters += [ctypes.addressof(scratch)] * 2
        _check_parameters(function, len(parameters))
        self._kept.append(scratch)
        op.kind, op.handle, (op.x, op.y, op.z) = _LAUNCH, function, entry.grid
        op.threads, op.shared_bytes = 32 * num_warps, shared_bytes
        op.parameters = self._array(ctypes.c_void_p, parameters)
        op.words, op.num_words = self._array(_Word, words), len(words)
        op.maps, op.num_maps = self._array(_Word, map_words), len(map_words)

    def _value(self, number: Any) -> tuple[int, int]:
        """Index of the value that a number is, and what is added to it."""
        if isinstance(number, Address) and number.memory.slot is not None:
            return number.memory.slot, number.memory.offset_bytes
        self._numbers.append(number)
        return self._num_slots + len(self._numbers) - 1, 0

    def _array(self, kind: type, values: Sequence[Any]) -> int:
        made = (kind * max(1, len(values)))(*values)  # type: ignore[operator]  # ctypes' way to say an array's type
        self._kept.append(made)
        return ctypes.addressof(made)


def _parameters(kernel: Any) -> list[tuple[int, str]]:
    """(place in the row of the launch, type) of each parameter that the compiled kernel has."""
    parameters, place = [], 0
    for kind in signature_of(kernel):
        if not isinstance(kind, str):
            raise _Unknown
        if kind.startswith("tensordesc"):
            shape = re.match(r"tensordesc<[^\[>]*\[([^\]]*)\]", kind)
            if shape is None:
                raise _Unknown
            num_dims = shape.group(1).count(",") + 1
            kinds = ["map", *["i32"] * num_dims, *["i64"] * num_dims]
        else:
            kinds = [kind]
        for each in kinds:
            if each != "constexpr":
                parameters.append((place, each))
            place += 1
    return parameters


def _packed(kind: str, value: int) -> tuple[int, Any]:
    """Address of an argument of that type, and the memory that it is in."""
    data = struct.pack("<Q" if kind.startswith("*") else "<" + _FORMATS[kind], value)
    buffer = ctypes.create_string_buffer(data, 8)
    return ctypes.addressof(buffer), buffer


def _copy_of_map(triton_map: Any) -> tuple[int, Any]:
    """Address of an aligned copy of a tensor map, and the memory that it is in."""
    if (place := address_of_map(triton_map)) is None:
        raise _Unknown
    source, num_bytes = place
    buffer = ctypes.create_string_buffer(2 * num_bytes)
    address = -(-ctypes.addressof(buffer) // num_bytes) * num_bytes
    ctypes.memmove(address, source, num_bytes)
    return address, buffer


def _check_parameters(function: int, count: int) -> None:
    """_Unknown if the driver knows another number of parameters of the kernel."""
    query = driver.library().cuFuncGetParamInfo
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    arguments = ctypes.c_void_p(function), ctypes.c_size_t(count - 1), ctypes.byref(offset), ctypes.byref(size)
    if query(*arguments) != 0 or query(arguments[0], ctypes.c_size_t(count), *arguments[2:]) == 0:
        raise _Unknown


@functools.cache
def _driver_functions() -> Any:
    """The four functions of the driver that C calls."""
    functions = [ctypes.cast(getattr(driver.library(), name), ctypes.c_void_p).value for name in _DRIVER]
    return (ctypes.c_void_p * len(functions))(*functions)


@functools.cache
def _player() -> Callable[..., int] | None:
    """The compiled function; None if it cannot be built."""
    try:
        _driver_functions()
        _ = driver.library().cuFuncGetParamInfo  # drivers of CUDA 12.4 and later have it
        play: Callable[..., int] = build_module(_SOURCE, "symmoe_player").play
    except (AttributeError, ImportError, OSError, RuntimeError, SymmoeError, subprocess.CalledProcessError):
        return None
    return play
