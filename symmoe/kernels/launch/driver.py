"""The CUDA driver by ctypes, for what torch and Triton do not do for a thread that launches kernels."""

import ctypes
import functools
import threading

import torch

from symmoe.errors import SymmoeError

_SIGNATURES = {
    "cuCtxGetCurrent": [ctypes.c_void_p],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuDevicePrimaryCtxRetain": [ctypes.c_void_p, ctypes.c_int],
    "cuGetErrorName": [ctypes.c_int, ctypes.c_void_p],
    "cuLaunchKernel": [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3],
    "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
    "cuModuleGetFunction": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p],
    "cuModuleLoadData": [ctypes.c_void_p, ctypes.c_char_p],
    "cuStreamGetCaptureInfo": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p],
    "cuThreadExchangeStreamCaptureMode": [ctypes.c_void_p],
}


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def ensure_context() -> None:
    """Makes sure, once per thread, that a CUDA context is current; legal while a graph is captured.

    A new thread has none until the runtime binds one. Triton's launchers make one current, but without one
    the encoding of a tensor map fails. Autograd's thread of device 0 has none: torch does not set a device that is
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
    """libcuda, with the types of the functions that are used."""
    result = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(result, name).argtypes = types
    return result


def check(result: int, call: str) -> None:
    """Raises if a call of the driver has failed."""
    if result:
        name = ctypes.c_char_p()
        library().cuGetErrorName(result, ctypes.byref(name))
        raise SymmoeError(f"{call} returned {result} ({(name.value or b'unknown').decode()})")
