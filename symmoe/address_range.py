"""Tensors over memory that torch did not allocate."""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DL_TYPES = {"cpu": 1, "cuda": 2}
_DL_UINT = 1
_capsule_type = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_new_capsule = _capsule_type(("PyCapsule_New", ctypes.pythonapi))


class _DLManagedTensor(ctypes.Structure):
    """DLPack's struct, with the fields of its inner structs."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),  # none: there is nothing to free
    ]


class AddressRange:
    """`num_bytes` at `address`, for tensors that own and free nothing. DLPack makes them, and lets the
    maker name the device. (The CUDA array interface would ask the driver for the memory's device, and torch would
    silently copy a peer's memory to this one.)"""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        self._shape = (ctypes.c_int64 * 1)(num_bytes)
        self._managed = _DLManagedTensor(
            address, _DL_TYPES[device.type], device.index or 0, 1, _DL_UINT, 8, 1, self._shape
        )
        # A tensor reads the deleter field when it dies, maybe after this object: these 100 bytes are never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._managed))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._shape))

    def tensor(self) -> torch.Tensor:
        """A new uint8 tensor over the whole range, with a separate version counter."""
        return from_dlpack(_new_capsule(ctypes.addressof(self._managed), b"dltensor", None))
