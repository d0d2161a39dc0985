"""Twins of contract/rows.py."""

import ctypes
import functools
import operator
import struct

import torch

from symmoe.kernels.contract.rows import HostBytes


def host_bytes(source: HostBytes) -> memoryview:
    """The memory of a contiguous CPU tensor or of any contiguous buffer, as bytes, without a copy.

    A tensor's memory is valid as long as the tensor.
    """
    if not isinstance(source, torch.Tensor):
        view = memoryview(source)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    num_bytes = source.numel() * source.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(source.data_ptr() or 1)).cast("B")


def copy_host_to_device(source, destination):
    data = host_bytes(source)
    host_bytes(destination)[: len(data)] = data


def read_addresses(tensors, device, *, alignment, contiguous):
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except (TypeError, RuntimeError):  # not a tensor, or a sparse one
        return None
    if 0 in addresses or functools.reduce(operator.or_, addresses, 0) % alignment:
        return None
    if contiguous and not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if any(found != device for found in set(map(operator.attrgetter("device"), tensors))):
        return None
    return struct.pack(f"={len(addresses)}q", *addresses)
