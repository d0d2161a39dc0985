"""Copies of small host data to the device as kernel arguments, and reads of tensors' addresses.

The copy kernel is PTX in this module, launched by the driver: 5 us, against 66 us for a Triton launch with 256
integers. A launch has 4080 bytes of data, which the driver copies before it returns or, during capture, into the graph.
"""

import ctypes
import functools
import os
from contextlib import nullcontext
from typing import Any

import torch

from symmoe.kernels.launch import driver
from symmoe.kernels.launch.triton_internals import build_module
from symmoe.kernels.twin.pointers import PointerKernels, host_bytes
from symmoe.program.builder import BuildError, builder
from symmoe.torch_internals import address_in_python, current_device, current_stream

PARAM_BYTES = 4096  # every driver supports this size
HEADER_BYTES = 16  # the destination's address, number of bytes
PAYLOAD_BYTES = PARAM_BYTES - HEADER_BYTES
NUM_THREADS = 512

# Byte by byte, for any alignment of the destination: at most 8 steps.
COPY_PTX = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry copy_bytes(.param .align 16 .b8 params[{PARAM_BYTES}])
{{
    .reg .pred %p;
    .reg .b16 %byte;
    .reg .b32 %count, %i;
    .reg .b64 %source, %destination, %offset, %from, %to;

    ld.param.u64 %destination, [params];
    ld.param.u32 %count, [params+8];
    cvta.to.global.u64 %destination, %destination;
    mov.u64 %source, params;
    mov.u32 %i, %tid.x;
NEXT:
    setp.ge.u32 %p, %i, %count;
    @%p bra DONE;
    cvt.u64.u32 %offset, %i;
    add.u64 %from, %source, %offset;
    ld.param.u8 %byte, [%from+{HEADER_BYTES}];
    add.u64 %to, %destination, %offset;
    st.global.u8 [%to], %byte;
    add.u32 %i, %i, {NUM_THREADS};
    bra NEXT;
DONE:
    ret;
}}
"""

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CAPTURE_MODE_RELAXED = 2


def copy_host_to_device(source, destination):
    if builder() is not None:
        raise BuildError("addresses of the host are copied to the device")
    device = destination.get_device()
    with nullcontext() if current_device() == device else torch.cuda.device(device):
        copy = _in_c().copy_bytes
        functions = _launch_kernel(), _copy_bytes(device)
        launch = *functions, current_stream(device), destination.data_ptr(), host_bytes(source)
        result = copy(*launch)
        if result == _INVALID_CONTEXT:  # this thread has not used the device yet
            driver.set_context(driver.primary_context(device))
            result = copy(*launch)
        if result:
            driver.check(result, "cuLaunchKernel")


@functools.cache
def _launch_kernel() -> int:
    return ctypes.cast(driver.library().cuLaunchKernel, ctypes.c_void_p).value or 0


@functools.cache
def _copy_bytes(device: int) -> int:
    """The function copy_bytes on a device; loaded on first use, also while a graph is captured."""
    cuda = driver.library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    driver.set_context(driver.primary_context(device))
    exchange = cuda.cuThreadExchangeStreamCaptureMode
    driver.check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        driver.check(
            cuda.cuModuleLoadData(ctypes.byref(module), COPY_PTX.encode()), "cuModuleLoadData"
        )
        driver.check(
            cuda.cuModuleGetFunction(ctypes.byref(function), module, b"copy_bytes"),
            "cuModuleGetFunction",
        )
    finally:
        exchange(ctypes.byref(mode))
    return function.value or 0


# read_addresses uses torch's C interface for compiled models (aoti_torch), whose functions report exceptions as codes.
# A Python tensor is PyObject_HEAD, then the at::Tensor; _readers checks this layout.
SOURCE = f"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {{ PyObject_HEAD void *impl; }} Tensor;
typedef int32_t (*GetPointer)(void *tensor, void **out);
typedef int32_t (*GetInt)(void *tensor, int32_t *out);
typedef int32_t (*GetBool)(void *tensor, bool *out);
typedef unsigned Size;
typedef int (*LaunchKernel)(void *, Size, Size, Size, Size, Size, Size, Size, void *, void **, void **);

static PyObject *read_addresses(PyObject *self, PyObject *args)
{{
    PyObject *tensors, *tensor_type, *parameter_type;
    unsigned long long data_ptr, device_type, device_index, is_contiguous, alignment;
    int wanted_type, wanted_index, contiguous;
    if (!PyArg_ParseTuple(args, "O!OOKKKKiiKp", &PyList_Type, &tensors, &tensor_type, &parameter_type, &data_ptr,
                          &device_type, &device_index, &is_contiguous, &wanted_type, &wanted_index, &alignment,
                          &contiguous))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * 8);
    if (!result)
        return NULL;
    char *out = PyBytes_AS_STRING(result);
    for (Py_ssize_t i = 0; i < count; i++) {{
        PyObject *object = PyList_GET_ITEM(tensors, i);
        PyObject *type = (PyObject *)Py_TYPE(object);
        void *tensor = &((Tensor *)object)->impl, *address = NULL;
        int32_t found_type = -1, found_index = -1;
        bool is = !contiguous;
        if ((type != tensor_type && type != parameter_type)
            || ((GetInt)device_type)(tensor, &found_type) || found_type != wanted_type
            || ((GetInt)device_index)(tensor, &found_index) || found_index != wanted_index
            || (contiguous && ((GetBool)is_contiguous)(tensor, &is)) || !is
            || ((GetPointer)data_ptr)(tensor, &address) || !address || (uintptr_t)address % alignment) {{
            Py_DECREF(result);
            Py_RETURN_NONE;
        }}
        memcpy(out + 8 * i, &address, 8);
    }}
    return result;
}}

static PyObject *copy_bytes(PyObject *self, PyObject *args)
{{
    unsigned long long launch, function, stream, destination;
    Py_buffer source;
    if (!PyArg_ParseTuple(args, "KKKKy*", &launch, &function, &stream, &destination, &source))
        return NULL;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    struct {{ uint64_t destination, num_bytes; char payload[{PAYLOAD_BYTES}]; }} params;
    void *parameters[] = {{&params}};
    for (Py_ssize_t start = 0; start < source.len && !error; start += {PAYLOAD_BYTES}) {{
        Py_ssize_t rest = source.len - start;
        params.destination = destination + start;
        params.num_bytes = rest < {PAYLOAD_BYTES} ? rest : {PAYLOAD_BYTES};
        memcpy(params.payload, (char *)source.buf + start, params.num_bytes);
        error = ((LaunchKernel)launch)((void *)function, 1, 1, 1, {NUM_THREADS}, 1, 1, 0, (void *)stream, parameters,
                                       NULL);
    }}
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    return PyLong_FromLong(error);
}}

static PyMethodDef methods[] = {{{{"read_addresses", read_addresses, METH_VARARGS, NULL}},
                                {{"copy_bytes", copy_bytes, METH_VARARGS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "symmoe_pointers", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_symmoe_pointers(void) {{ return PyModule_Create(&module); }}
"""
_READERS = ("data_ptr", "device_type", "device_index", "is_contiguous")


@functools.cache
def _in_c() -> Any:
    """The compiled module, built in the same way as Triton's launchers, which every GPU kernel needs."""
    return build_module(SOURCE, "symmoe_pointers")


def read_addresses(tensors, device, *, alignment, contiguous):
    readers = _readers()
    payload: bytes | None = None
    if readers is not None:
        payload = _in_c().read_addresses(
            tensors,
            torch.Tensor,
            torch.nn.Parameter,
            *readers,
            1 if device.type == "cuda" else 0,  # c10::DeviceType
            -1 if device.index is None else device.index,
            alignment,
            contiguous,
        )
    # Python reads subclasses of Tensor.
    return payload or PointerKernels.read_addresses(
        tensors, device, alignment=alignment, contiguous=contiguous
    )


@functools.cache
def _readers() -> list[int] | None:
    """Addresses of torch's functions; None if this torch lacks them, or if Python's tensors have another layout."""
    try:
        library = ctypes.CDLL(
            os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        )
        readers = [
            getattr(library, f"aoti_torch_get_{name}", None)
            or getattr(library, f"aoti_torch_{name}")
            for name in _READERS
        ]
    except (AttributeError, OSError):
        return None
    for probe in (torch.zeros(1, device="cpu"), torch.nn.Parameter(torch.zeros(1, device="cpu"))):
        if ctypes.c_void_p.from_address(
            id(probe) + object.__basicsize__
        ).value != address_in_python(probe):
            return None
    return [ctypes.cast(reader, ctypes.c_void_p).value or 0 for reader in readers]
