"""CUDA and Triton's JIT without a GPU: a driver that keeps what it is given, with graphs, and a JIT that "compiles"
whatever it gets."""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels.launch import driver, graph, triton_internals
from symmoe.kernels.launch import launch as launches
from symmoe.kernels.launch.launch import FastLaunch

CPU = -1  # what Tensor.get_device says of a CPU tensor
STREAM = 77


class TensorMap:
    """As large as Triton's object. (What lies where the map would is copied, and its first word replaced.)"""

    __slots__ = tuple(f"_{n}" for n in range(30))


assert TensorMap.__basicsize__ == 256


@dataclass(frozen=True)
class Launched:
    """A launch that the driver was asked for. words: the first 8 bytes of each parameter. after: in a graph, what it
    comes after, by place in the graph."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    words: tuple[int, ...]
    after: tuple[int, ...] = ()


class FakeCuda:
    """The calls that launches make to CUDA; the current device is where CPU tensors say they are. A graph is a
    dictionary of nodes by their handles, and its executable is the same graph. A node is a function of the stream."""

    def __init__(self) -> None:
        self.device, self.fails = CPU, 0  # fails: what every launch returns
        self.happened: list[
            Any
        ] = []  # launches, ("record", event, stream or where in the graph) and ("wait", stream, event)
        self.encoded: list[TensorDescriptor] = []  # that have become tensor maps
        self.num_parameters: dict[int, int] = {}  # by function
        self.graphs: list[dict[int, Callable[[int], Any]]] = []
        self.num_changed = 0  # nodes that have got other arguments
        self.priorities: dict[int, int] = {}  # of nodes and streams

    @property
    def launches(self) -> list[Launched]:
        return [event for event in self.happened if isinstance(event, Launched)]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def encode(self, descriptor: TensorDescriptor, metadata: Any, *args: Any) -> list[Any]:
        """As make_tensordesc_arg does; since Triton 3.8 it is given the arguments of the launch, and ignores them."""
        assert len(args) == (triton_internals.VERSION >= (3, 8))
        self.encoded.append(descriptor)
        first = descriptor.base if metadata is None else TensorMap()
        return [first, *descriptor.shape, *descriptor.strides]

    def cuFuncGetParamInfo(self, function: Any, index: Any, *_: Any) -> int:
        return int(index.value >= self.num_parameters[function.value])

    def cuLaunchKernel(self, function: int, *args: Any) -> int:
        x, y, z, threads, threads_y, threads_z, shared_bytes, stream, pointers, extra = args
        assert (threads_y, threads_z, extra) == (1, 1, None)
        words = self._words(function, pointers)
        self.happened.append(Launched(function, (x, y, z), threads, shared_bytes, stream, words))
        return self.fails

    def cuTensorMapReplaceAddress(self, tensor_map: int, address: int) -> int:
        assert tensor_map % 128 == 0
        ctypes.c_int64.from_address(tensor_map).value = address
        return 0

    def cuGraphCreate(self, result: Any, flags: int) -> int:
        self.graphs.append({})
        result._obj.value = len(self.graphs)
        return 0

    def cuGraphAddKernelNode_v2(self, *args: Any) -> int:
        *position, params = args
        after = self._add(*position, lambda stream: None)
        self._set(self._graph_of(position[1]), position[0]._obj.value, params, after)
        return 0

    def cuGraphAddEventWaitNode(self, *args: Any) -> int:
        *position, event = args
        self._add(*position, lambda stream: ("wait", stream, event))
        return 0

    def cuGraphAddEventRecordNode(self, *args: Any) -> int:
        *position, event = args
        after: list[tuple[int, ...]] = []
        after.append(self._add(*position, lambda stream: ("record", event, after[0])))
        return 0

    def cuGraphKernelNodeSetAttribute(self, node: Any, attribute: int, value: Any) -> int:
        assert attribute == 8
        self.priorities[node.value] = value[0]
        return 0

    def cuGraphInstantiateWithFlags(self, result: Any, graph: Any, flags: int) -> int:
        assert flags == 8
        result._obj.value = graph.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, graph: Any, node: int, params: int) -> int:
        nodes = self._graph_of(graph)
        self._set(nodes, node, params, nodes[node](0).after)
        self.num_changed += 1
        return 0

    def cuGraphLaunch(self, graph: Any, stream: int) -> int:
        self.happened += [happen(stream) for happen in self._graph_of(graph).values()]
        return self.fails

    def cuStreamGetPriority(self, stream: int, result: Any) -> int:
        result._obj.value = self.priorities.get(stream, 0)
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.happened.append(("record", event, stream))
        return 0

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self.happened.append(("wait", stream, event))
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    cuGraphExecDestroy = cuGraphDestroy

    def cuGetErrorName(self, error: int, result: Any) -> int:
        result._obj.value = b"CUDA_ERROR_FAKE"
        return 0

    def _graph_of(self, handle: Any) -> dict[int, Any]:
        return self.graphs[handle.value - 1]

    def _add(
        self, result: Any, graph: Any, after: Any, num_after: int, happen: Callable[[int], Any]
    ) -> tuple[int, ...]:
        """A new node. Returns the places of those that it comes after."""
        nodes = self._graph_of(graph)
        places = tuple(list(nodes).index(node) for node in after)
        assert len(places) == num_after
        handle = 1000 * graph.value + len(nodes)
        result._obj.value = handle
        nodes[handle] = happen
        return places

    def _set(self, nodes: dict[int, Any], node: int, params: int, after: tuple[int, ...]) -> None:
        node_params = graph._KernelParams.from_address(params)
        assert (node_params.threads_y, node_params.threads_z, node_params.extra) == (1, 1, None)
        grid = node_params.x, node_params.y, node_params.z
        words = self._words(node_params.function, node_params.parameters)
        look = node_params.function, grid, node_params.threads_x, node_params.shared_bytes
        nodes[node] = lambda stream: Launched(*look, stream, words, after)

    def _words(self, function: int, pointers: int) -> tuple[int, ...]:
        count = self.num_parameters[function]
        addresses = (ctypes.c_int64 * count).from_address(pointers)
        return tuple(ctypes.c_int64.from_address(address).value for address in addresses)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    result = FakeCuda()
    monkeypatch.setattr(
        triton_internals, "IS_KNOWN", True
    )  # a new Triton shall show what it has changed
    monkeypatch.setattr(triton_internals, "make_tensordesc_arg", result.encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", result)
    monkeypatch.setattr(launches, "current_device", result.get_current_device)
    monkeypatch.setattr(launches, "current_stream", result.get_current_stream)
    monkeypatch.setattr(driver, "ensure_context", lambda: None)
    monkeypatch.setattr(driver, "library", lambda: result)
    monkeypatch.setattr(driver, "can_launch", lambda: True)
    callbacks = [
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(
            lambda graph, node, params: result.cuGraphExecKernelNodeSetParams_v2(
                ctypes.c_void_p(graph), node, params
            )
        ),
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2)(result.cuTensorMapReplaceAddress),
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2)(
            lambda graph, stream: result.cuGraphLaunch(ctypes.c_void_p(graph), stream)
        ),
    ]
    functions = (ctypes.c_void_p * 3)(
        *[ctypes.cast(callback, ctypes.c_void_p) for callback in callbacks]
    )
    functions.callbacks = callbacks
    monkeypatch.setattr(graph, "_driver_functions", lambda: functions)
    return result


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*i8"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<fp32{value.block_shape}>"
    return {bool: "i1", int: "i64", float: "fp32"}.get(type(value), "constexpr")


class FakeCompiled(CompiledKernel):
    """A compiled kernel. change: what is done to its launcher."""

    _count = 0
    run: Any = None  # a property of Triton's class

    def __init__(
        self, kinds: Iterable[str] = (), change: Callable[[Any], None] = lambda launcher: None
    ) -> None:
        FakeCompiled._count += 1
        self.function, self.packed_metadata = FakeCompiled._count, (4, 1, 1000)
        self.module = None  # CompiledKernel unloads it when it ends
        self.src = SimpleNamespace(signature=dict(enumerate(kinds)))
        described = [kind for kind in self.src.signature.values() if kind.startswith("tensordesc")]
        self.metadata = SimpleNamespace(tensordesc_meta=["metadata"] * len(described))
        self.run = launcher = object.__new__(CudaLauncher)
        launcher.launch_cooperative_grid = launcher.launch_pdl = False
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        change(self)

    def num_parameters(self) -> int:
        """Of a tensor map also its sizes and strides, and after all two pointers to scratch memory."""
        kinds = [kind for kind in self.src.signature.values() if kind != "constexpr"]
        return 2 + sum(
            3 + 2 * kind.count(",") if kind[:10] == "tensordesc" else 1 for kind in kinds
        )


class FakeJIT:
    """Stands in for a JITFunction's `run`: keeps the arguments of launches and compilations, and "compiles" each."""

    def __init__(self, kernel: Any, cuda: FakeCuda) -> None:
        self.kernel, self.cuda, self.calls = kernel, cuda, []
        self.compiled: list[FakeCompiled] = []
        self.change: Callable[[Any], None] = lambda compiled: None

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> FakeCompiled:
        assert not warmup or grid == (1,)  # it is compiled, and not launched
        fused = kwargs.pop("enable_fp_fusion")  # every compilation says it
        self.calls.append((args, grid, kwargs if fused else {**kwargs, "enable_fp_fusion": fused}))
        assert self.kernel.cache_key  # as compiling does, this notes which globals the kernel uses
        for (name, _), (value, module) in self.kernel.used_global_vals.items():
            if module.get(name) != value:
                raise RuntimeError(f"{name} has changed")
        values = dict(zip(self.kernel.arg_names, args, strict=False))
        kinds = [
            "constexpr" if p.is_constexpr else _kind(values.get(p.name)) for p in self.kernel.params
        ]
        compiled = FakeCompiled(kinds, self.change)
        self.cuda.num_parameters[compiled.function] = compiled.num_parameters()
        self.compiled.append(compiled)
        return compiled


def fake_jits(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, *modules: ModuleType
) -> dict[str, FakeJIT]:
    """The JITs of all kernels of some modules replaced: by kernel."""
    jits = {}
    members = {name: member for module in modules for name, member in vars(module).items()}
    for name, kernel in members.items():
        if not isinstance(kernel, FastLaunch):
            continue
        jits[name] = FakeJIT(kernel.kernel, cuda)
        monkeypatch.setattr(kernel.kernel, "run", jits[name], raising=False)
        monkeypatch.setattr(kernel, "_calls", {})
    return jits


def assert_only_the_first_compiles(
    jits: dict[str, FakeJIT], step: Callable, sizes: Iterable[Any]
) -> None:
    """The first step compiles, and no later one: neither what it has launched nor anything else."""
    first, *later = sizes
    step(first)
    before = {name: len(jit.calls) for name, jit in jits.items()}
    assert any(before.values()), before
    for size in later:
        step(size)
    assert {name: len(jit.calls) for name, jit in jits.items()} == before
