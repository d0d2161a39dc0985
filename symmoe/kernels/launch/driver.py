"""The CUDA driver through ctypes: functions for launches that torch and Triton lack."""

import ctypes
import functools
import threading

import torch

from symmoe.errors import SymmoeError

_POINTER, _SIZE, _UNSIGNED = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_NEW_NODE = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER]  # node, graph, dependencies, what
_SIGNATURES = {
    "cuCtxGetCurrent": [_POINTER],
    "cuCtxSetCurrent": [_POINTER],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuFuncGetParamInfo": [_POINTER, _SIZE, _POINTER, _POINTER],
    "cuGetErrorName": [ctypes.c_int, _POINTER],
    "cuGraphAddEventRecordNode": _NEW_NODE,
    "cuGraphAddEventWaitNode": _NEW_NODE,
    "cuGraphAddKernelNode_v2": _NEW_NODE,
    "cuGraphCreate": [_POINTER, _UNSIGNED],
    "cuGraphDestroy": [_POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuGraphExecKernelNodeSetParams_v2": [_POINTER, _POINTER, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_ulonglong],
    "cuGraphKernelNodeSetAttribute": [_POINTER, ctypes.c_int, _POINTER],
    "cuGraphLaunch": [_POINTER, _POINTER],
    "cuLaunchKernel": [_POINTER, *[_UNSIGNED] * 7, *[_POINTER] * 3],
    "cuModuleGetFunction": [_POINTER, _POINTER, ctypes.c_char_p],
    "cuModuleLoadData": [_POINTER, ctypes.c_char_p],
    "cuStreamGetCaptureInfo": [_POINTER, _POINTER, _POINTER],
    "cuStreamGetPriority": [_POINTER, _POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, _UNSIGNED],
    "cuTensorMapReplaceAddress": [_POINTER, _POINTER],
    "cuThreadExchangeStreamCaptureMode": [_POINTER],
}


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def ensure_context() -> None:
    """Ensures, once per thread, that a CUDA context is current; allowed while a graph is captured.

    A new thread has no context until the runtime binds one. Triton's launchers make one current, but the encoding of a
    tensor map fails without one. Autograd's thread of device 0 has no context: torch does not set a device that is
    current already. If the current device changes later, cudaSetDevice binds that device's context.
    """
    if not _thread.has_context:
        context = ctypes.c_void_p()
        check(library().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if context.value is None:
            set_context(primary_context(torch.cuda.current_device()))
        _thread.has_context = True


def set_context(context: int) -> None:
    """Makes a context this thread's current one."""
    check(library().cuCtxSetCurrent(context), "cuCtxSetCurrent")


@functools.cache
def primary_context(device: int) -> int:
    """The context that the runtime, torch and Triton use on a device."""
    context = ctypes.c_void_p()
    check(
        library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        "cuDevicePrimaryCtxRetain",
    )
    return context.value or 0


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda, with the types of the functions that symmoe calls. An old driver may lack some of them."""
    result = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        if (function := getattr(result, name, None)) is not None:
            function.argtypes = types
    return result


@functools.cache
def can_launch() -> bool:
    """Whether the driver has the functions for launches without Triton; CUDA 12.4 and newer have them."""
    try:
        return all(hasattr(library(), name) for name in _SIGNATURES)
    except OSError:
        return False


def check(result: int, call: str) -> None:
    """Raises if a call of the driver has failed."""
    if result:
        name = ctypes.c_char_p()
        library().cuGetErrorName(result, ctypes.byref(name))
        raise SymmoeError(f"{call} returned {result} ({(name.value or b'unknown').decode()})")
