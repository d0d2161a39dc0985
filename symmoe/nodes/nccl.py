"""NCCL's point-to-point calls by ctypes, of the library that torch has loaded.

Not torch's process group for it: that one ends the whole process when a peer is lost, which here is an error that a
caller may handle, and its streams are its own, so that one cannot say what its work has to come after in a graph.
"""

from __future__ import annotations

import ctypes
from typing import Any

from symmoe.errors import BackendUnavailable

_LIBRARY = "libnccl.so.2"
_UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_UINT8 = 1  # ncclDataType_t


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_ADDRESS],
    "ncclGetUniqueId": [_ADDRESS],
    "ncclCommInitRank": [_ADDRESS, _INT, _UniqueId, _INT],
    "ncclCommAbort": [_ADDRESS],
    "ncclCommGetAsyncError": [_ADDRESS, _ADDRESS],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [_ADDRESS, ctypes.c_size_t, _INT, _INT, _ADDRESS, _ADDRESS],
    "ncclRecv": [_ADDRESS, ctypes.c_size_t, _INT, _INT, _ADDRESS, _ADDRESS],
}


class NcclError(Exception):
    """A call of NCCL has failed."""


class Nccl:
    """The library.

    Raises:
        BackendUnavailable: there is none.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, _INT
            self._library.ncclGetErrorString.argtypes = [_INT]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"GPUs on several nodes need NCCL, which torch brings along: {error}") from error

    @property
    def version(self) -> int:
        """As NCCL numbers it: 22703 is 2.27.3."""
        number = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """A new id by which the ranks of a communicator find each other."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def connect(self, unique_id: bytes, rank: int, num_ranks: int) -> int:
        """A communicator on the current GPU. Collective; waits for the others as long as it takes."""
        communicator = ctypes.c_void_p()
        made = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(communicator), num_ranks, made, rank)
        return communicator.value or 0

    def exchange(
        self, communicator: int, sends: list[tuple[int, int, int]], receives: list[tuple[int, int, int]], stream: int
    ) -> None:
        """Sends and receives (address, bytes, rank) on a CUDA stream, at once. Messages to a rank keep their order."""
        self._call("ncclGroupStart")
        try:
            for address, num_bytes, rank in receives:
                self._call("ncclRecv", address, num_bytes, _UINT8, rank, communicator, stream)
            for address, num_bytes, rank in sends:
                self._call("ncclSend", address, num_bytes, _UINT8, rank, communicator, stream)
        finally:
            self._call("ncclGroupEnd")

    def problem(self, communicator: int) -> str:
        """What has gone wrong with what was launched; "": nothing so far."""
        result = ctypes.c_int()
        self._call("ncclCommGetAsyncError", communicator, ctypes.byref(result))
        return "" if result.value in (_SUCCESS, _IN_PROGRESS) else self._text(result.value)

    def abort(self, communicator: int) -> None:
        """Ends a communicator, and the kernels that wait for its peers. Local. No other call may use it afterwards."""
        self._library.ncclCommAbort(communicator)

    def _text(self, result: int) -> str:
        text: bytes = self._library.ncclGetErrorString(result)
        return text.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != _SUCCESS:
            raise NcclError(f"{name}: {self._text(result)}; NCCL_DEBUG=INFO says why")
