"""CUDA tensors over memory that torch did not allocate, made from its address through DLPack.

DLPack lets the maker name the device. (The CUDA array interface would ask the driver where the memory lives, and
torch would silently copy a peer's memory here.)
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DL_CUDA = 2
_DL_UINT = 1
_CAPSULE_NAME = b"dltensor"


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class AddressRange:
    """`num_bytes` of device memory at `address`, from which tensors are made that own nothing and free nothing."""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        self._shape = (ctypes.c_int64 * 1)(num_bytes)
        self._managed = _DLManagedTensor(
            _DLTensor(address, _DLDevice(_DL_CUDA, device.index), 1, _DLDataType(_DL_UINT, 8, 1), self._shape, None, 0),
            None,
            None,  # no deleter: there is nothing to free
        )
        # A tensor reads the deleter field when it dies, maybe after this object: these 100 bytes are never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._managed))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._shape))

    def tensor(self) -> torch.Tensor:
        """A new uint8 tensor over the whole range, with a separate version counter."""
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return from_dlpack(new_capsule(ctypes.addressof(self._managed), _CAPSULE_NAME, None))
