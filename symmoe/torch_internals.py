"""Every private name of torch that symmoe reads: a new torch may break these.

For a missing name there is an equally correct replacement, or its users get an error that names it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from symmoe.errors import BackendUnavailable

__all__ = ["TorchDispatchMode", "pytree"]

_GONE = object()
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def _missing(name: str, *args: object) -> NoReturn:
    raise BackendUnavailable(
        f"torch {torch.__version__} has no {name}, which symmoe needs: install one that is tested"
    )


def _named(path: str, otherwise: Callable[..., Any] | None = None) -> Any:
    """The object with this name in torch, or else the replacement; without either, a function that raises."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, _GONE)
    return value if value is not _GONE else otherwise or functools.partial(_missing, path)


def _empty_strided(
    kind: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=kind)


def _over_memory_of(
    base: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    result = torch.empty(0, dtype=base.dtype, device=base.device)
    return result.set_(base.untyped_storage(), base.storage_offset() + offset, shape, stride)


def _attribute(name: str, owner: object = None) -> Callable[[Any], Any]:
    """A function that reads this attribute of an object of torch, e.g. of `owner`."""
    if hasattr(owner, name):
        return operator.attrgetter(name)  # without a frame

    def read(torch_object: Any) -> Any:
        value = getattr(torch_object, name, _GONE)
        return value if value is not _GONE else _missing(name)

    return read


# torch.cuda.current_device, if CUDA is in use, in a fifth of the time; and the handle of a device's current stream.
current_device: Callable[[], int] = _named("_C._cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = _named(
    "_C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
# torch.cuda.is_current_stream_capturing, without a frame.
is_capturing: Callable[[], bool] = _named(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# By type of device, torch.empty_strided(shape, stride, dtype) in half the time; on the current device.
empty_strided: dict[str, Callable[..., torch.Tensor]] = {
    kind: _named(
        f"_C._dynamo.guards._empty_strided_{kind}", functools.partial(_empty_strided, kind)
    )
    for kind in ("cpu", "cuda")
}
# A tensor (base, shape, stride, offset in elements) over another one's memory; for autograd it is no view.
over_memory_of: Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor] = (
    _named("_C._dynamo.guards._reinterpret_tensor", _over_memory_of)
)
gpu_sleep: Callable[[int], None] = _named("cuda._sleep")
SLEEP_KERNEL = "spin_kernel"  # the kernel of gpu_sleep

graph_task_id: Callable[[], int] = _named(
    "_C._current_graph_task_id"
)  # of the calling backward pass; or -1
next_node_number: Callable[[], int] = _named("_C._autograd._get_sequence_nr")  # in this thread
_running_node: Callable[[], Any] = _named("_C._current_autograd_node")
_number_of: Callable[[Any], Callable[[], int]] = _attribute("_sequence_nr")
# Whether that pass keeps its graph for another one. Keeping memory without another pass is correct, too.
keeps_graph: Callable[[], bool] = _named(
    "_C._autograd._get_current_graph_task_keep_graph", lambda: True
)
call_after_backward: Callable[[Callable[[], object]], None] = _named(
    "autograd.Variable._execution_engine.queue_callback"
)
num_references: Callable[[torch.Tensor], int] = _named(
    "Tensor._use_count"
)  # all Python references count as one
# The hooks on tensors that are saved for backward now; None: there are none. Argument True: also during a trace.
saved_tensor_hooks: Callable[[bool], object] = _named(
    "_C._autograd._top_saved_tensors_default_hooks", lambda _: ()
)
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _attribute("_base")
version_of: Callable[[torch.Tensor], int] = _attribute("_version")
address_in_python: Callable[[torch.Tensor], int] = _attribute("_cdata")
STOPS_RECOMPUTATION: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

num_dispatch_modes: Callable[[], int] = _named("_C._len_torch_dispatch_stack")
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _named(
    "utils._python_dispatch._disable_current_modes"
)
has_storage: Callable[[torch.Tensor], bool] = _named("_C._has_storage")  # tensors of vmap have none
transform_level: Callable[[], int | None] = _named(
    "_C._functorch.maybe_current_level"
)  # of torch.func; None outside
schema_of: Callable[[Any], Any] = _attribute("_schema")
READS_BACK = torch.ops.aten._local_scalar_dense.default
reshaped_result: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] = (
    torch.ops.aten._unsafe_view.default
)  # no view

# Without it, a torch.export with such a tuple cannot be saved.
register_namedtuple: Callable[..., object] = _named(
    "utils._pytree._register_namedtuple", lambda kind, **names: None
)

store_of: Callable[[Any], Any] = _named("distributed.distributed_c10d._get_process_group_store")
DDP_IGNORED = (
    "_ddp_params_and_buffers_to_ignore"  # if DDP ignores it, MoELayer finds the experts in DDP
)
# The DDP whose forward is running, as an attribute of the class; or None.
active_ddp_of: Callable[[type[DistributedDataParallel]], DistributedDataParallel | None] = (
    _attribute("_active_ddp_module", DistributedDataParallel)
)
ddp_parameters: Callable[[DistributedDataParallel], list[torch.nn.Parameter]] = _attribute(
    "_module_parameters"
)
_ddp_record: Callable[[Any], Callable[[], dict[str, Any]]] = _attribute("_get_ddp_logging_data")
_ddp_rate: Callable[[Any], Callable[[int], None]] = _attribute(
    "_set_ddp_runtime_logging_sample_rate"
)

_redirect: Callable[[bool], None] = _named("_C._set_override_stale_capture_stream", lambda _: None)
_redirects: Callable[[], bool] = _named("_C._override_stale_capture_stream", lambda: False)
may_redirect_streams = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")

_has_global_hooks: Callable[[], bool] = _named(
    "nn.modules.module._has_any_global_hook", lambda: True
)
non_persistent_buffers: Callable[[torch.nn.Module], set[str]] = _attribute(
    "_non_persistent_buffers_set"
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REPLACEABLE: set[Callable[..., Any]] = {
    torch.nn.Module.forward
}  # the forward of modules without a call


def running_node_number() -> int:
    """The number of the graph node that autograd runs, in the thread that made it; -1: it runs none."""
    node = _running_node()
    return -1 if node is None else _number_of(node)()


def fills_memory() -> bool:
    """Whether torch fills new memory with NaN when it uses deterministic algorithms only."""
    return bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is on."""
    return transform_level() is not None or forward_ad._current_level >= 0


@contextmanager
def outside_transforms() -> Iterator[None]:
    """In this context torch.func transforms nothing, e.g. no words of a rank's error report to its peers."""
    if transform_level() is None:
        yield
        return
    from torch._functorch.pyfunctorch import (
        temporarily_clear_interpreter_stack,
    )  # only errors need it

    with temporarily_clear_interpreter_stack():
        yield


def stop_ddp_timing(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has chosen its buckets, and has finished the ten passes that it times, waiting for the device in each
    next one. If so, it no longer times every hundredth pass."""
    is_past = int(_ddp_record(ddp)().get("iteration", 0)) >= 10
    if is_past:
        _ddp_rate(ddp)(2**31 - 1)
    return is_past


@contextmanager
def redirected_streams() -> Iterator[None]:
    """In this context autograd nodes that were made on a stream outside of a capture run on a stream of the capture,
    where torch can do this (2.13)."""
    previous = _redirects()
    _redirect(True)
    try:
        yield
    finally:
        _redirect(previous)


def replaceable(forward: _Forward) -> _Forward:
    """Marks the forward of a class of this package: kernels may replace a call of it."""
    # By identity: functools.wraps would copy a mark on the function to a user's replacement.
    _REPLACEABLE.add(forward)
    return forward


def modules_key(*parts: torch.nn.Module | None) -> list[object]:
    """All properties that determine whether the parameters of modules, and the calls of their parts, fit the kernels.
    Runs in every call, so it must be quick."""
    key: list[object] = []
    modules = [*parts]
    for m in modules:  # the list grows by the children
        if m is not None:
            attributes = vars(m)
            is_sharded = attributes.get("_is_fsdp_managed_module", False)
            key += (
                m,
                any(map(attributes.get, HOOKS)),
                "_hf_hook" in attributes,
                "forward" in attributes or getattr(type(m), "forward", None) not in _REPLACEABLE,
                is_sharded,
            )
            for parameter in m._parameters.values():
                if parameter is not None:
                    key += type(parameter), parameter.dtype, parameter.device
                    if is_sharded:
                        key.append(parameter.shape)
            modules += m._modules.values()
    return key


def around_call(m: torch.nn.Module, *, everywhere: bool = True) -> str | None:
    """The part around a module's call that kernels would omit if they replaced it, in words, or None: a forward that is
    not :func:`replaceable`, of the class or of the instance, or hooks of the module; `everywhere`: also hooks of all
    modules."""
    if any(map(vars(m).get, HOOKS)):
        return "a " + ", ".join(kind[1:-1] for kind in HOOKS if vars(m)[kind])
    if "forward" in vars(m):
        return "a forward of its own"
    if type(m).forward not in _REPLACEABLE:
        return f"the forward of {type(m).__name__}"
    return "hooks of all modules" if everywhere and _has_global_hooks() else None


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the tensor's memory, equal for all tensors over it."""
    return address_in_python(tensor.untyped_storage())  # type: ignore[arg-type]  # of storages, too
