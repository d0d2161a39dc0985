"""Copies small host data to the device as arguments of a kernel, and reads addresses of tensors.

The copy is PTX in this file, launched by the driver: 5 us, against 66 us for a Triton launch with 256 integers. A
launch carries 4080 bytes, which the driver copies before it returns or, while a graph is captured, into the graph.
"""

import ctypes
import functools
import os
import struct
import subprocess
from collections.abc import Callable

import torch

from symmoe.kernels.contract.pointers import HostBytes
from symmoe.kernels.launch import driver
from symmoe.kernels.twin import pointers as twin
from symmoe.kernels.twin.pointers import host_bytes
from symmoe.tape.recorder import recorder

PARAM_BYTES = 4096  # every driver lets a kernel take as many
HEADER = struct.Struct("<QQ")  # the destination's address, number of bytes
PAYLOAD_BYTES = PARAM_BYTES - HEADER.size
NUM_THREADS = 512  # one word each

# Words if the destination is aligned, and bytes for the rest.
COPY_PTX = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry copy_bytes(.param .align 16 .b8 params[{PARAM_BYTES}])
{{
    .reg .pred %p;
    .reg .b16 %byte;
    .reg .b32 %thread, %count, %words, %misaligned, %i;
    .reg .b64 %word, %source, %destination, %offset, %from, %to;

    ld.param.u64 %destination, [params];
    ld.param.u32 %count, [params+8];
    cvta.to.global.u64 %destination, %destination;
    mov.u64 %source, params;
    mov.u32 %thread, %tid.x;

    shr.u32 %words, %count, 3;
    cvt.u32.u64 %misaligned, %destination;
    and.b32 %misaligned, %misaligned, 7;
    setp.ne.u32 %p, %misaligned, 0;
    selp.u32 %words, 0, %words, %p;
    setp.ge.u32 %p, %thread, %words;
    @%p bra BYTES;
    mul.wide.u32 %offset, %thread, 8;
    add.u64 %from, %source, %offset;
    ld.param.u64 %word, [%from+{HEADER.size}];
    add.u64 %to, %destination, %offset;
    st.global.u64 [%to], %word;
BYTES:
    shl.b32 %i, %words, 3;
    add.u32 %i, %i, %thread;
NEXT:
    setp.ge.u32 %p, %i, %count;
    @%p bra DONE;
    cvt.u64.u32 %offset, %i;
    add.u64 %from, %source, %offset;
    ld.param.u8 %byte, [%from+{HEADER.size}];
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


class _Arguments:
    """The memory of one launch's arguments."""

    __slots__ = ("_memory", "_pointers", "address", "view")

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * PARAM_BYTES)()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))
        self.view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._pointers)


# A launch takes one _Arguments out and puts it back: other threads run while the driver reads it.
_free_arguments: list[_Arguments] = []


def copy_host_to_device(source: HostBytes, destination: torch.Tensor) -> None:
    data = host_bytes(source)
    device = destination.get_device()
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            _copy(data, destination.data_ptr(), device)
    else:
        _copy(data, destination.data_ptr(), device)


def _copy(data: memoryview, address: int, device: int) -> None:
    try:
        arguments = _free_arguments.pop()
    except IndexError:
        arguments = _Arguments()
    for start in range(0, len(data), PAYLOAD_BYTES):
        chunk = data[start : start + PAYLOAD_BYTES]
        HEADER.pack_into(arguments.view, 0, address + start, len(chunk))
        arguments.view[HEADER.size : HEADER.size + len(chunk)] = chunk
        _launch(arguments.address, device)
    _free_arguments.append(arguments)


def _launch(arguments: int, device: int) -> None:
    """One block of copy_bytes on the current stream of `device`, which is the current device."""
    if (recording := recorder()) is not None:
        recording.give_up("addresses of the host are copied to the device")
    launch = driver.library().cuLaunchKernel
    function = _copy_bytes(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    result = launch(function, 1, 1, 1, NUM_THREADS, 1, 1, 0, stream, arguments, None)
    if result == _INVALID_CONTEXT:  # a thread that has not used the device yet
        driver.set_context(driver.primary_context(device))
        result = launch(function, 1, 1, 1, NUM_THREADS, 1, 1, 0, stream, arguments, None)
    if result:
        driver.check(result, "cuLaunchKernel")


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
        driver.check(cuda.cuModuleLoadData(ctypes.byref(module), COPY_PTX.encode()), "cuModuleLoadData")
        driver.check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"copy_bytes"), "cuModuleGetFunction")
    finally:
        exchange(ctypes.byref(mode))
    return function.value or 0


# read_addresses in C, through the C interface that torch gives to compiled models (aoti_torch), whose functions report
# exceptions as codes. A Python tensor is PyObject_HEAD and then the at::Tensor; _read_in_c makes sure of that.
READ_SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct { PyObject_HEAD void *impl; } Tensor;
typedef int32_t (*GetPointer)(void *tensor, void **out);
typedef int32_t (*GetInt)(void *tensor, int32_t *out);
typedef int32_t (*GetBool)(void *tensor, bool *out);

static PyObject *read_addresses(PyObject *self, PyObject *args)
{
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
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyList_GET_ITEM(tensors, i);
        PyObject *type = (PyObject *)Py_TYPE(object);
        void *tensor = &((Tensor *)object)->impl, *address = NULL;
        int32_t found_type = -1, found_index = -1;
        bool is = !contiguous;
        if ((type != tensor_type && type != parameter_type)
            || ((GetInt)device_type)(tensor, &found_type) || found_type != wanted_type
            || ((GetInt)device_index)(tensor, &found_index) || found_index != wanted_index
            || (contiguous && ((GetBool)is_contiguous)(tensor, &is)) || !is
            || ((GetPointer)data_ptr)(tensor, &address) || !address || (uintptr_t)address % alignment) {
            Py_DECREF(result);
            Py_RETURN_NONE;
        }
        memcpy(out + 8 * i, &address, 8);
    }
    return result;
}

static PyMethodDef methods[] = {{"read_addresses", read_addresses, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "symmoe_addresses", NULL, -1, methods};
PyMODINIT_FUNC PyInit_symmoe_addresses(void) { return PyModule_Create(&module); }
"""
_READERS = ("data_ptr", "device_type", "device_index", "is_contiguous")


def read_addresses(
    tensors: list[torch.Tensor], device: torch.device, *, alignment: int, contiguous: bool
) -> bytes | None:
    read = _read_in_c()
    payload = None
    if read is not None:
        kind = 1 if device.type == "cuda" else 0  # c10::DeviceType
        payload = read(kind, -1 if device.index is None else device.index, alignment, contiguous, tensors)
    # Subclasses of Tensor are left to Python.
    return payload or twin.read_addresses(tensors, device, alignment=alignment, contiguous=contiguous)


@functools.cache
def _read_in_c() -> Callable[[int, int, int, bool, list[torch.Tensor]], bytes | None] | None:
    """The compiled function; None if it cannot be built, or if Python's tensors have another layout."""
    try:
        from triton.runtime.build import compile_module_from_src  # same as for Triton's launchers

        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        readers = [
            getattr(library, f"aoti_torch_get_{name}", None) or getattr(library, f"aoti_torch_{name}")
            for name in _READERS
        ]
        compiled = compile_module_from_src(READ_SOURCE, "symmoe_addresses").read_addresses
    except (AttributeError, ImportError, OSError, RuntimeError, subprocess.CalledProcessError):
        return None
    functions = [ctypes.cast(reader, ctypes.c_void_p).value for reader in readers]
    types = (torch.Tensor, torch.nn.Parameter)
    for probe in (torch.zeros(1, device="cpu"), torch.nn.Parameter(torch.zeros(1, device="cpu"))):
        if ctypes.c_void_p.from_address(id(probe) + object.__basicsize__).value != probe._cdata:
            return None

    def read(kind: int, index: int, alignment: int, contiguous: bool, tensors: list[torch.Tensor]) -> bytes | None:
        return compiled(tensors, *types, *functions, kind, index, alignment, contiguous)

    return read
