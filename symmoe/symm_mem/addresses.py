"""Own addresses for memory that NVSHMEM has mapped: they stay valid when NVSHMEM frees and allocates it again.

CUDA graphs and programs keep addresses. NVSHMEM returns memory to the driver only when it ends, and uses other
addresses when it starts again. So its memory is mapped a second time, in a range that we have reserved.
"""

from __future__ import annotations

import ctypes
from typing import Any

from symmoe.errors import BackendUnavailable

_ON_DEVICE = 1
_READ_WRITE = 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class OwnAddresses:
    """A reserved range of addresses for the `num_bytes` at `source`, and for all pieces of memory that contain them.
    Attributes: address, of the first byte; size, of the range."""

    def __init__(self, source: int, num_bytes: int, device: int) -> None:
        self._num_bytes = num_bytes
        self._mapped = list[tuple[int, int]]()
        self._access = (ctypes.c_int * 3)(_ON_DEVICE, device, _READ_WRITE)
        pieces = _pieces(source, num_bytes)
        start = ctypes.c_uint64()
        self._before = source - pieces[0][0]
        self.size = sum(size for _, size in pieces)
        _call("cuMemAddressReserve", start, self.size, 0, 0, 0)
        self._start = start.value
        self.address = start.value + self._before

    def map(self, source: int) -> None:
        """Maps the memory that is now at `source`; its pieces must begin and end as the first ones did. Raises
        SymmoeError if they do not, or cannot be mapped, as memory of cudaMalloc."""
        pieces = _pieces(source, self._num_bytes)
        start = self._start
        if (source - pieces[0][0], sum(size for _, size in pieces)) != (self._before, self.size):
            raise BackendUnavailable(
                f"NVSHMEM has laid out its memory otherwise than before: {pieces}"
            )
        for piece, size in pieces:
            _call("cuMemRetainAllocationHandle", handle := ctypes.c_uint64(), piece)
            try:
                _call("cuMemMap", start, size, 0, handle.value, 0)
            finally:
                _call("cuMemRelease", handle.value)  # the mapping keeps the memory
            self._mapped.append((start, size))
            _call("cuMemSetAccess", start, size, self._access, 1)
            start += size

    def unmap(self) -> None:
        """Unmaps the memory; the range stays reserved."""
        while self._mapped:
            _call("cuMemUnmap", *self._mapped.pop())

    def close(self) -> None:
        """Unmaps the memory and frees the range."""
        self.unmap()
        _call("cuMemAddressFree", self._start, self.size)


def _pieces(address: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, size) of each mapped piece of memory that contains some of the `num_bytes` at `address`."""
    end = address + num_bytes
    pieces = list[tuple[int, int]]()
    while address < end:
        _call(
            "cuMemGetAddressRange_v2",
            start := ctypes.c_uint64(),
            size := ctypes.c_uint64(),
            address,
        )
        pieces.append((start.value, size.value))
        address = start.value + size.value
    return pieces


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver with 64-bit integers, and with pointers to all other arguments."""
    from symmoe.kernels.launch import driver  # needs Triton, which is optional on CPUs

    words = [
        ctypes.c_uint64(word) if isinstance(word, int) else ctypes.byref(word) for word in arguments
    ]
    driver.check(getattr(driver.library(), name)(*words), name)
