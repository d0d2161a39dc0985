"""CUDA graphs of kernels whose arguments change in every launch.

A kernel launch costs the host 4.3 us, a change of a graph's node 0.6 us, and the launch of the graph 2 us (H200). So
consecutive launches form one graph, made once. Before each launch of the graph, the nodes with changed arguments are
updated; queued launches keep their arguments. Unlike in a captured graph, the values of a call are not fixed:
addresses, epochs and bounds of waits are arguments.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch

from symmoe.kernels.launch import driver
from symmoe.kernels.launch.triton_internals import MAP_BYTES, build_module

_PRIORITY_ATTRIBUTE = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY
_USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
WORD_BYTES = 8  # bytes of an argument

# Sets the kernels' arguments and launches. Python costs the host 0.1 to 0.2 ms more in each direction of a step.
_SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct { int64_t value, addend; void *map; } Parameter;
typedef struct { void *node; const void *params; int64_t num_parameters; } Kernel;
typedef int (*SetParams)(void *, void *, const void *);
typedef int (*ReplaceAddress)(void *, void *);
typedef int (*LaunchGraph)(void *, void *);

/* launch(functions of the driver, graph, kernels, number, parameters, words, all, stream, values) */
static PyObject *launch(PyObject *self, PyObject *args)
{
    unsigned long long functions, graph, kernels, parameters, arguments, stream;
    long long num_kernels;
    int all, error = 0;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "KKKLKKpKy*", &functions, &graph, &kernels, &num_kernels, &parameters, &arguments,
                          &all, &stream, &buffer))
        return NULL;
    SetParams set = ((SetParams *)functions)[0];
    ReplaceAddress replace = ((ReplaceAddress *)functions)[1];
    LaunchGraph launch_graph = ((LaunchGraph *)functions)[2];
    const int64_t *values = buffer.buf;
    const Parameter *parameter = (const Parameter *)parameters;
    int64_t *word = (int64_t *)arguments;
    for (const Kernel *kernel = (const Kernel *)kernels; num_kernels-- && !error; kernel++) {
        int changed = all;
        for (int64_t i = 0; i < kernel->num_parameters && !error; i++, parameter++, word++) {
            int64_t new = values[parameter->value] + parameter->addend;
            if (new == *word && !all)
                continue;
            *word = new;
            changed = 1;
            if (parameter->map)
                error = replace(parameter->map, (void *)new);
        }
        if (changed && !error)
            error = set((void *)graph, kernel->node, kernel->params);
    }
    PyBuffer_Release(&buffer);
    if (!error) {
        Py_BEGIN_ALLOW_THREADS /* it waits while too much is queued */
        error = launch_graph((void *)graph, (void *)stream);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(error);
}

static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "symmoe_graph", NULL, -1, methods};
PyMODINIT_FUNC PyInit_symmoe_graph(void) { return PyModule_Create(&module); }
"""


class Parameter(NamedTuple):
    """The source of a kernel's parameter: indices into the 64-bit values of the call."""

    value: int  # of the argument
    addend: int  # is added to the argument
    tensor_map: int = -1  # of the address of a tensor map, for memory from the argument on


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A launch. priority: the priority of the stream that the launch would use without a graph."""

    function: int
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EventNode:
    """Makes later nodes wait for an event, or records an event after the earlier nodes."""

    event: torch.cuda.Event
    is_wait: bool


Node = KernelNode | EventNode


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *[(name, ctypes.c_uint) for name in "x y z threads_x threads_y threads_z".split()],
        ("shared_bytes", ctypes.c_uint),
        *[(name, ctypes.c_void_p) for name in "parameters extra kernel context".split()],
    ]


class _Parameter(ctypes.Structure):
    """The source of an argument, and of its tensor map if there is one."""

    _fields_ = [("value", ctypes.c_int64), ("addend", ctypes.c_int64), ("map", ctypes.c_void_p)]


class _Kernel(ctypes.Structure):
    """A node, its parameters for the driver, and their number."""

    _fields_ = [
        ("node", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("num_parameters", ctypes.c_int64),
    ]


def aligned_maps(num_maps: int) -> tuple[Any, int]:
    """Host memory for num_maps tensor maps: its owner, and its address."""
    memory = (ctypes.c_char * (MAP_BYTES * (num_maps + 1)))()
    address = ctypes.addressof(memory)
    return memory, address + -address % MAP_BYTES


class LaunchGraph:
    """A graph of kernels. Only one thread at a time may launch it.

    Args:
        nodes: each with the numbers of the earlier nodes that it depends on.
        values: the values of a call. Addresses of tensor maps must be real; other values are arbitrary.
    """

    def __init__(
        self, nodes: Sequence[tuple[Node, tuple[int, ...]]], values: Sequence[int]
    ) -> None:
        kernels = [node for node, _ in nodes if isinstance(node, KernelNode)]
        parameters = [parameter for kernel in kernels for parameter in kernel.parameters]
        self._is_set = False  # whether the nodes have the arguments in _words
        self._words = (ctypes.c_int64 * len(parameters))()  # the arguments, for the driver
        self._pointers = (ctypes.c_void_p * len(parameters))()  # pointers to the arguments and maps
        self._parameters = (_Parameter * len(parameters))()
        num_maps = sum(parameter.tensor_map >= 0 for parameter in parameters)
        self._map_memory, next_map = aligned_maps(num_maps)
        for number, parameter in enumerate(parameters):
            self._parameters[number].value = parameter.value
            self._parameters[number].addend = parameter.addend
            self._pointers[number] = ctypes.addressof(self._words) + number * WORD_BYTES
            if parameter.tensor_map >= 0:
                ctypes.memmove(next_map, values[parameter.tensor_map], MAP_BYTES)
                self._parameters[number].map = self._pointers[number] = next_map
                next_map += MAP_BYTES
        self._params = (_KernelParams * len(kernels))()
        self._kernels = (_Kernel * len(kernels))()
        starts = accumulate((len(kernel.parameters) for kernel in kernels), initial=0)
        for number, (kernel, start) in enumerate(zip(kernels, starts, strict=False)):
            self._describe(number, kernel, start)
        self._events = [node.event for node, _ in nodes if isinstance(node, EventNode)]
        self._graph = self._make(nodes)
        self._exec = self._instantiate()
        self._launch: Callable[..., int] = functools.partial(
            _c_module().launch,
            ctypes.addressof(_driver_functions()),
            self._exec.value,
            ctypes.addressof(self._kernels),
            len(self._kernels),
            ctypes.addressof(self._parameters),
            ctypes.addressof(self._words),
        )

    def launch(self, stream: int, values: array[int]) -> None:
        """Launches the graph with the arguments of a call."""
        is_first = not self._is_set
        self._is_set = False
        error = self._launch(is_first, stream, values)
        driver.check(error, "cuGraphExecKernelNodeSetParams or cuGraphLaunch")
        self._is_set = True

    def _describe(self, number: int, kernel: KernelNode, start: int) -> None:
        """Fills the driver's description of a kernel, whose first parameter has the number `start`."""
        params = self._params[number]
        params.function = kernel.function
        params.x, params.y, params.z = kernel.grid
        params.threads_x, params.threads_y, params.threads_z = kernel.num_threads, 1, 1
        params.shared_bytes = kernel.shared_bytes
        params.parameters = ctypes.addressof(self._pointers) + start * WORD_BYTES
        size = ctypes.sizeof(_KernelParams)
        self._kernels[number].params = ctypes.addressof(self._params) + number * size
        self._kernels[number].num_parameters = len(kernel.parameters)

    def _make(self, nodes: Sequence[tuple[Node, tuple[int, ...]]]) -> ctypes.c_void_p:
        library = driver.library()
        graph = ctypes.c_void_p()
        driver.check(library.cuGraphCreate(ctypes.byref(graph), 0), "cuGraphCreate")
        weakref.finalize(self, library.cuGraphDestroy, graph).atexit = False
        handles: list[int | None] = []
        kernels = iter(self._kernels)
        for node, dependencies in nodes:
            handle = ctypes.c_void_p()
            handles_before = (ctypes.c_void_p * len(dependencies))(
                *[handles[number] for number in dependencies]
            )
            arguments = ctypes.byref(handle), graph, handles_before, len(dependencies)
            if isinstance(node, KernelNode):
                kernel = next(kernels)
                error = library.cuGraphAddKernelNode_v2(*arguments, kernel.params)
                driver.check(error, "cuGraphAddKernelNode")
                kernel.node = handle.value
                _set_priority(handle, node.priority)
            elif node.is_wait:
                error = library.cuGraphAddEventWaitNode(*arguments, node.event.cuda_event)
                driver.check(error, "cuGraphAddEventWaitNode")
            else:
                error = library.cuGraphAddEventRecordNode(*arguments, node.event.cuda_event)
                driver.check(error, "cuGraphAddEventRecordNode")
            handles.append(handle.value)
        return graph

    def _instantiate(self) -> ctypes.c_void_p:
        library = driver.library()
        result = ctypes.c_void_p()
        error = library.cuGraphInstantiateWithFlags(
            ctypes.byref(result), self._graph, _USE_NODE_PRIORITY
        )
        driver.check(error, "cuGraphInstantiate")
        # The driver frees the graph after its last launch has ended.
        weakref.finalize(self, library.cuGraphExecDestroy, result).atexit = False
        return result


def _set_priority(node: ctypes.c_void_p, priority: int) -> None:
    if priority:
        value = (ctypes.c_int * 16)(priority)  # CUlaunchAttributeValue has 64 bytes
        set_attribute = driver.library().cuGraphKernelNodeSetAttribute
        error = set_attribute(node, _PRIORITY_ATTRIBUTE, value)
        driver.check(error, "cuGraphKernelNodeSetAttribute")


@functools.cache
def _driver_functions() -> Any:
    """The driver functions that the compiled function calls."""
    names = "cuGraphExecKernelNodeSetParams_v2", "cuTensorMapReplaceAddress", "cuGraphLaunch"
    addresses = [
        ctypes.cast(getattr(driver.library(), name), ctypes.c_void_p).value for name in names
    ]
    return (ctypes.c_void_p * len(addresses))(*addresses)


@functools.cache
def _c_module() -> ModuleType:
    """The compiled module, built in the same way as Triton's launchers, which every GPU kernel needs."""
    return build_module(_SOURCE, "symmoe_graph")
