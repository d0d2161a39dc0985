"""Addresses of our own for memory that NVSHMEM has mapped: they stay when that memory goes, and when other comes.

CUDA graphs and programs hold addresses. NVSHMEM gives memory back to the driver only when it ends, and has other ones
when it starts again. So its memory is mapped a second time, in a range that we have reserved.
"""

from __future__ import annotations

import ctypes
from typing import Any

from symmoe.errors import BackendUnavailable

_ON_DEVICE = 1
_READ_WRITE = 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class OwnAddresses:
    """A range of addresses for the `num_bytes` at `source`, and for all of the pieces of memory in which they lie.
    Raises SymmoeError if these cannot be mapped, as what cudaMalloc gives. Attributes: address, of the first of the
    bytes here; size, of the range."""

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
        try:
            self.map(source)
        except BaseException:
            self.close()
            raise

    def map(self, source: int) -> None:
        """Maps what is at `source` now, in pieces that begin and end where the first did."""
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
                _call("cuMemRelease", handle.value)  # what is mapped lives on
            self._mapped.append((start, size))
            _call("cuMemSetAccess", start, size, self._access, 1)
            start += size

    def unmap(self) -> None:
        """Lets the memory go; the range stays reserved."""
        while self._mapped:
            _call("cuMemUnmap", *self._mapped.pop())

    def close(self) -> None:
        """Lets the memory go, and the range."""
        self.unmap()
        _call("cuMemAddressFree", self._start, self.size)


def _pieces(address: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, size) of each piece of memory, as it was mapped, in which `num_bytes` at `address` lie."""
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
    """Calls the driver with integers of 64 bits, and with pointers to what else is given."""
    from symmoe.kernels.launch import driver  # needs Triton, which CPUs need not have

    words = [
        ctypes.c_uint64(word) if isinstance(word, int) else ctypes.byref(word) for word in arguments
    ]
    driver.check(getattr(driver.library(), name)(*words), name)
