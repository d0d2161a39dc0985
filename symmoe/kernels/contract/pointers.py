"""Addresses of tensors, and small data of the host on its way to the device."""

from typing import Protocol

import torch
from torch import Tensor

from symmoe.kernels.contract.operands import writes

HostBytes = Tensor | bytes | bytearray | memoryview


class PointerKernels(Protocol):
    @writes("destination")
    def copy_host_to_device(self, source: HostBytes, destination: Tensor) -> None:
        """The first bytes of destination = source; on GPUs without a copy engine, so that graphs can hold the bytes.
        source: contiguous memory of the host, of any size up to that of destination. The caller may change it when the
        call returns."""

    @writes()
    def read_addresses(
        self, tensors: list[Tensor], device: torch.device, *, alignment: int, contiguous: bool
    ) -> bytes | None:
        """The addresses of tensors as native int64; None if one of them is not what it must be.

        Args:
            tensors: any number of tensors, each on `device` and with memory.
            alignment: alignment of their addresses in bytes, a power of two.
            contiguous: whether they must be contiguous.
        """
