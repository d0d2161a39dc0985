"""CUDA graphs of kernels that get other arguments in every launch.

To launch a kernel costs the host 4.3 us, to change a node of a graph 0.6 us, and to launch the graph 2 us (H200). So
launches that follow each other are one graph, made once. Before each launch of it, the nodes whose arguments have
changed get the new ones; launches that are queued keep theirs. Unlike in a captured graph, nothing that a call brings
is fixed: addresses, epochs and bounds of waits are arguments.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from symmoe.kernels.launch import driver

MAP_BYTES = 128  # of a tensor map, which lies at a multiple of it
_PRIORITY_ATTRIBUTE = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY
_USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class Parameter(NamedTuple):
    """Where a call finds what a kernel gets: indices into the 64-bit values of the call."""

    value: int  # of the argument
    addend: int  # is added to the argument
    tensor_map: int = -1  # of the address of a tensor map, of memory that begins at the argument


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A launch. priority: that of the stream on which it would be without a graph."""

    function: int
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EventNode:
    """What comes after it waits for an event; or an event is recorded after what comes before it."""

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


def aligned_maps(num_maps: int) -> tuple[Any, int]:
    """Memory of the host for so many tensor maps: what keeps it, and its address."""
    memory = (ctypes.c_char * (MAP_BYTES * (num_maps + 1)))()
    address = ctypes.addressof(memory)
    return memory, address + -address % MAP_BYTES


class LaunchGraph:
    """A graph of kernels. One thread at a time launches it.

    Args:
        nodes: each with the numbers of those before it that it comes after.
        values: of a call, with the addresses of tensor maps; other values may be any.
    """

    def __init__(
        self, nodes: Sequence[tuple[Node, tuple[int, ...]]], values: Sequence[int]
    ) -> None:
        kernels = [node for node, _ in nodes if isinstance(node, KernelNode)]
        parameters = [parameter for kernel in kernels for parameter in kernel.parameters]
        self._index = np.array([parameter.value for parameter in parameters], dtype=np.int64)
        self._addend = np.array([parameter.addend for parameter in parameters], dtype=np.int64)
        self._words = np.zeros(len(parameters), dtype=np.int64)  # the arguments, for the driver
        counts = [len(kernel.parameters) for kernel in kernels]
        starts = np.cumsum([0, *counts])[:-1]
        self._starts = starts.astype(np.intp)
        self._is_set = False  # whether the nodes have the arguments in _words
        # By kernel, its parameters that are tensor maps: the number of each, and its address.
        self._maps: dict[int, list[tuple[int, int]]] = {}
        self._pointers = (ctypes.c_void_p * len(parameters))()
        self._fill_pointers(kernels, values)
        self._params = (_KernelParams * len(kernels))()
        base = ctypes.addressof(self._pointers)
        for params, kernel, start in zip(self._params, kernels, starts.tolist(), strict=True):
            params.function = kernel.function
            params.x, params.y, params.z = kernel.grid
            params.threads_x, params.threads_y, params.threads_z = kernel.num_threads, 1, 1
            params.shared_bytes = kernel.shared_bytes
            params.parameters = base + start * ctypes.sizeof(ctypes.c_void_p)
        size = ctypes.sizeof(_KernelParams)
        self._params_addresses = [
            ctypes.addressof(self._params) + number * size for number in range(len(kernels))
        ]
        self._kernel_nodes: list[int] = []
        self._events = [node.event for node, _ in nodes if isinstance(node, EventNode)]
        self._graph = self._make(nodes)
        self._exec = self._instantiate()

    def launch(self, stream: int, values: array[int]) -> None:
        """Launches the graph with the arguments of a call."""
        words = np.frombuffer(values, dtype=np.int64)[self._index]
        words += self._addend
        if self._is_set:
            is_new = np.logical_or.reduceat(words != self._words, self._starts)
            changed = np.flatnonzero(is_new).tolist()
        else:
            changed = range(len(self._kernel_nodes))
        self._is_set = False
        self._words[:] = words
        library = driver.library_with_gil()
        set_params = library.cuGraphExecKernelNodeSetParams_v2
        for kernel in changed:
            for number, tensor_map in self._maps.get(kernel, ()):
                error = library.cuTensorMapReplaceAddress(tensor_map, int(words[number]))
                driver.check(error, "cuTensorMapReplaceAddress")
            error = set_params(
                self._exec, self._kernel_nodes[kernel], self._params_addresses[kernel]
            )
            driver.check(error, "cuGraphExecKernelNodeSetParams")
        self._is_set = True
        driver.check(driver.library().cuGraphLaunch(self._exec, stream), "cuGraphLaunch")

    def _fill_pointers(self, kernels: Sequence[KernelNode], values: Sequence[int]) -> None:
        """Where the driver reads each argument: in _words, or in a copy of its tensor map."""
        mapped = [
            parameter
            for kernel in kernels
            for parameter in kernel.parameters
            if parameter.tensor_map >= 0
        ]
        self._map_memory, next_map = aligned_maps(len(mapped))
        number = 0
        for kernel_number, kernel in enumerate(kernels):
            for parameter in kernel.parameters:
                self._pointers[number] = self._words.ctypes.data + number * self._words.itemsize
                if parameter.tensor_map >= 0:
                    ctypes.memmove(next_map, values[parameter.tensor_map], MAP_BYTES)
                    self._pointers[number] = next_map
                    self._maps.setdefault(kernel_number, []).append((number, next_map))
                    next_map += MAP_BYTES
                number += 1

    def _make(self, nodes: Sequence[tuple[Node, tuple[int, ...]]]) -> ctypes.c_void_p:
        library = driver.library()
        graph = ctypes.c_void_p()
        driver.check(library.cuGraphCreate(ctypes.byref(graph), 0), "cuGraphCreate")
        weakref.finalize(self, library.cuGraphDestroy, graph).atexit = False
        made: list[int] = []
        params = iter(self._params_addresses)
        for node, before in nodes:
            handle = ctypes.c_void_p()
            after = (ctypes.c_void_p * len(before))(*[made[number] for number in before])
            place = ctypes.byref(handle), graph, after, len(before)
            if isinstance(node, KernelNode):
                error = library.cuGraphAddKernelNode_v2(*place, next(params))
                driver.check(error, "cuGraphAddKernelNode")
                self._kernel_nodes.append(handle.value or 0)
                _set_priority(handle, node.priority)
            elif node.is_wait:
                error = library.cuGraphAddEventWaitNode(*place, node.event.cuda_event)
                driver.check(error, "cuGraphAddEventWaitNode")
            else:
                error = library.cuGraphAddEventRecordNode(*place, node.event.cuda_event)
                driver.check(error, "cuGraphAddEventRecordNode")
            made.append(handle.value or 0)
        return graph

    def _instantiate(self) -> ctypes.c_void_p:
        library = driver.library()
        result = ctypes.c_void_p()
        error = library.cuGraphInstantiateWithFlags(
            ctypes.byref(result), self._graph, _USE_NODE_PRIORITY
        )
        driver.check(error, "cuGraphInstantiate")
        # The driver frees it once no launch of it runs any more.
        weakref.finalize(self, library.cuGraphExecDestroy, result).atexit = False
        return result


def _set_priority(node: ctypes.c_void_p, priority: int) -> None:
    if priority:
        value = (ctypes.c_int * 16)(priority)  # CUlaunchAttributeValue has 64 bytes
        set_attribute = driver.library().cuGraphKernelNodeSetAttribute
        error = set_attribute(node, _PRIORITY_ATTRIBUTE, value)
        driver.check(error, "cuGraphKernelNodeSetAttribute")
