"""Addresses of tensors, and copies of small host data to the device."""

import ctypes
import functools
import operator
import struct

import torch

from symmoe.kernels.operands import writes

HostBytes = torch.Tensor | bytes | bytearray | memoryview


def host_bytes(source: HostBytes) -> memoryview:
    """The memory of a contiguous CPU tensor or of any contiguous buffer, as bytes, without a copy.

    The memory is valid as long as the tensor exists.
    """
    if not isinstance(source, torch.Tensor):
        return memoryview(source).cast("B")
    num_bytes = source.numel() * source.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(source.data_ptr() or 1)).cast("B")


class PointerKernels:
    @staticmethod
    @writes("destination")
    def copy_host_to_device(source: HostBytes, destination: torch.Tensor) -> None:
        """Copies source to the first bytes of destination; on GPUs without a copy engine, so that graphs can contain
        the bytes. source: contiguous host memory, at most as large as destination. The caller may change it after the
        call."""
        data = host_bytes(source)
        host_bytes(destination)[: len(data)] = data

    @staticmethod
    @writes()
    def read_addresses(
        tensors: list[torch.Tensor], device: torch.device, *, alignment: int, contiguous: bool
    ) -> bytes | None:
        """The addresses of tensors as native int64; None if a tensor does not meet the conditions below.

        Args:
            tensors: any number of tensors, each on `device` and with memory.
            alignment: alignment of their addresses in bytes, a power of two.
            contiguous: whether they must be contiguous.
        """
        try:
            addresses = list(map(torch.Tensor.data_ptr, tensors))
        except (TypeError, RuntimeError):  # not a tensor, or a sparse one
            return None
        if 0 in addresses or functools.reduce(operator.or_, addresses, 0) % alignment:
            return None
        if contiguous and not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        if any(
            tensor_device != device
            for tensor_device in set(map(operator.attrgetter("device"), tensors))
        ):
            return None
        return struct.pack(f"={len(addresses)}q", *addresses)
