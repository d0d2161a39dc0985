"""Payload between GPUs of several nodes: NCCL's send and recv on the current stream, without a wait of the host.

NCCL is called by ctypes, in the library that torch has loaded. Torch's process group ends the whole process when a peer
is lost, and has its own streams, so that a graph cannot order its work. NCCL itself waits without a bound: the device
counts the exchanges that it has begun and ended in the host's memory, for a watching thread
(symm_mem/several_nodes.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import BackendUnavailable
from symmoe.nodes.rail import BEGUN, ENDED, Pairs, Payload, Started

_LIBRARY = "libnccl.so.2"
_UNIQUE_ID_BYTES = 128
_SUCCESS = 0
_IN_PROGRESS = 7  # ncclResult_t
_UINT8 = 1  # ncclDataType_t
_MOMENT_S = 0.5  # for launched work to end, when a rail ends
_POLL_S = 1e-3
_ID = "id"
_FAILED = "failed"  # keys in the store of a rail
_CONNECT_POLL_S = 0.05
_MEASURED_BYTES = 1 << 25
_HINT = "; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name its devices"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


_ADDRESS = ctypes.c_void_p
_INT = ctypes.c_int
_MESSAGE = [_ADDRESS, ctypes.c_size_t, _INT, _INT, _ADDRESS, _ADDRESS]
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [_ADDRESS],
    "ncclCommInitRank": [_ADDRESS, _INT, _UniqueId, _INT],
    "ncclCommAbort": [_ADDRESS],
    "ncclCommGetAsyncError": [_ADDRESS, _ADDRESS],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": _MESSAGE,
    "ncclRecv": _MESSAGE,
}


class NcclError(Exception):
    """A call of NCCL has failed."""


class Nccl:
    """The library NCCL. BackendUnavailable: the library is missing."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes = arguments
                function.restype = _INT
            self._library.ncclGetErrorString.argtypes = [_INT]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(
                f"GPUs on several nodes need NCCL, which torch brings along: {error}"
            ) from error

    def unique_id(self) -> bytes:
        """A new id by which the ranks of a communicator find each other."""
        unique_id = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def connect(self, unique_id: bytes, rank: int, num_ranks: int) -> int:
        """A communicator on the current GPU. Collective; waits for the other ranks without a bound."""
        communicator = ctypes.c_void_p()
        self.call(
            "ncclCommInitRank",
            ctypes.byref(communicator),
            num_ranks,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
        )
        return communicator.value or 0

    def problem(self, communicator: int) -> str:
        """The error of the launched work so far, or ""."""
        result = ctypes.c_int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(result))
        return "" if result.value in (_SUCCESS, _IN_PROGRESS) else self._text(result.value)

    def abort(self, communicator: int) -> None:
        """Ends a communicator, and the kernels that wait for its peers. Local. Later calls must not use it."""
        self._library.ncclCommAbort(communicator)

    def _text(self, result: int) -> str:
        return str(self._library.ncclGetErrorString(result), errors="replace")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library. NcclError: the function has failed."""
        result = getattr(self._library, name)(*arguments)
        if result != _SUCCESS:
            raise NcclError(f"{name}: {self._text(result)}; NCCL_DEBUG=INFO says why")


class NcclRail(Payload):
    """A rail for tensors on the current GPU, by this library; other arguments are as in GlooRail. Construction is
    collective over the rail and synchronises. BackendUnavailable: see connect_together."""

    def __init__(
        self, library: Nccl, store: Any, *, node: int, num_nodes: int, timeout_s: float
    ) -> None:
        self._library = library
        self._node = node
        self._num_nodes = num_nodes
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._communicator = 0
        self._turn = threading.Lock()  # of the threads that use it
        with torch.inference_mode(False):
            self.progress: torch.Tensor = torch.zeros(
                2, dtype=torch.int64, device="cpu", pin_memory=True
            )
            self.counts: torch.Tensor = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.count(BEGUN)  # its first launch must not come while ranks exchange
        self.counts.zero_()
        torch.cuda.synchronize(self._device)
        self.progress.zero_()
        try:
            connect_together(
                library.unique_id if node == 0 else None,
                self._connect,
                store,
                node=node,
                timeout_s=timeout_s,
            )
        except BackendUnavailable:
            self.end()  # first messages that would wait forever
            raise

    def begin(self, sends: Pairs, receives: Pairs, stream: Any = None) -> Started:
        with self._turn:
            if self._communicator:  # after the end, missing tensors are not used
                captures = torch.cuda.is_current_stream_capturing()
                self.num_launched += not captures
                self.is_captured |= captures
                self._exchange(sends, receives, stream)
        return []

    def count(self, which: int) -> None:
        kernels.for_device(self._device).count_exchange(self.counts, self.progress, which=which)

    def settle(self) -> None:
        self.counts[ENDED].copy_(self.counts[BEGUN])
        self.progress[ENDED].copy_(self.counts[ENDED], non_blocking=True)

    def problem(self) -> str:
        if not self._turn.acquire(blocking=False):
            return ""
        try:
            return self._library.problem(self._communicator) if self._communicator else ""
        except NcclError as error:
            return str(error)
        finally:
            self._turn.release()

    def end(self) -> None:
        deadline = time.monotonic() + _MOMENT_S
        while self._communicator and self.is_moving and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # A host that waits inside NCCL for a lost rank keeps the turn until the communicator has ended.
        has_turn = self._turn.acquire(timeout=_MOMENT_S)
        communicator = self._communicator
        self._communicator = 0
        if has_turn:
            self._turn.release()
        if communicator:
            # In a separate thread: the abort ends the kernels at once, then waits until no graph uses the communicator.
            thread = threading.Thread(target=self._library.abort, args=(communicator,), daemon=True)
            thread.start()
            thread.join(_MOMENT_S)

    def _connect(self, unique_id: bytes, is_given_up: threading.Event) -> None:
        torch.cuda.set_device(self._device)
        communicator = self._library.connect(unique_id, self._node, self._num_nodes)
        with self._turn:
            if is_given_up.is_set():
                self._library.abort(communicator)
                return
            self._communicator = communicator
        # The first messages between two ranks connect them, for which they wait for each other.
        with torch.cuda.stream(torch.cuda.Stream(self._device)), torch.inference_mode(False):
            sent = torch.full(
                (self._num_nodes,), self._node, dtype=torch.int64, device=self._device
            )
            received = torch.full_like(sent, self._node)
            self._exchange(
                [*enumerate([sent[:1]] * self._num_nodes)], [*enumerate(received.split(1))]
            )
            if received.tolist() != list(range(self._num_nodes)):
                raise NcclError(f"the ranks of the rail have sent {received.tolist()}")
            self.bytes_per_s = self._measure()

    def _measure(self) -> float:
        """Bytes per second that this rank sends while all send. Collective over the rail; waits for the device."""
        rows = torch.empty(
            (2, self._num_nodes, _MEASURED_BYTES // (self._num_nodes - 1)),  # messages
            dtype=torch.uint8,
            device=self._device,
        )
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for event in events:  # the first exchange is not timed
            self._exchange([*enumerate(rows[0])], [*enumerate(rows[1])])
            event.record()
        events[1].synchronize()
        return _MEASURED_BYTES / float(events[0].elapsed_time(events[1]) * 1e-3)

    def _exchange(self, sends: Pairs, receives: Pairs, stream: Any = None) -> None:
        """Sends and receives on a CUDA stream, at once, in order for each node."""
        stream = torch.cuda.current_stream(self._device) if stream is None else stream
        where = self._communicator, stream.cuda_stream
        self._library.call("ncclGroupStart")
        try:
            for name, pairs in (("ncclRecv", receives), ("ncclSend", sends)):
                for node, tensor in pairs:
                    if node != self._node and tensor.numel():
                        address = tensor.data_ptr()
                        self._library.call(name, address, tensor.nbytes, _UINT8, node, *where)
        finally:
            self._library.call("ncclGroupEnd")


def connect_together(
    make_id: Callable[[], bytes] | None,
    connect: Callable[[bytes, threading.Event], None],
    store: Any,
    *,
    node: int,
    timeout_s: float,
) -> None:
    """Calls connect(id, is_given_up) in a separate thread, and waits for its end. Collective over the rail. NCCL itself
    has no bound, and does not inform the other ranks when one rank fails. An abandoned thread ends when NCCL returns,
    and must undo its work. make_id: on one rank, makes the id by which ranks find each other; None on other ranks.
    store: of torch, for this rail and this attempt. BackendUnavailable: one of both functions has failed, here or on
    another rank, or needs longer."""
    is_given_up = threading.Event()

    def run() -> None:
        try:
            if make_id is not None:
                store.set(_ID, make_id().hex())
            # Not store.wait: other threads could not use the store meanwhile.
            while not store.check([_ID]):
                if is_given_up.wait(_CONNECT_POLL_S):
                    return
            connect(bytes.fromhex(store.get(_ID).decode()), is_given_up)
        except BaseException as error:  # noqa: BLE001 - of another thread
            if not is_given_up.is_set():
                store.set(
                    _FAILED, f"NCCL does not connect node {node} with the others: {error}{_HINT}"
                )

    thread = threading.Thread(target=run, name="symmoe-nccl", daemon=True)
    deadline = time.monotonic() + timeout_s
    thread.start()
    try:
        has_ended = False
        while not has_ended:
            thread.join(_CONNECT_POLL_S)
            has_ended = (
                not thread.is_alive()
            )  # before the store is read, where it reports a failure
            if store.check([_FAILED]):
                raise BackendUnavailable(store.get(_FAILED).decode())
            if not has_ended and time.monotonic() > deadline:
                raise BackendUnavailable(
                    f"NCCL has not connected the nodes within {timeout_s:g} s{_HINT}"
                )
    finally:
        is_given_up.set()
