"""The NVSHMEM backend: one symmetric arena on the GPU, which peers reach through plain pointers.

NVSHMEM only allocates memory that every rank of the group can address. Kernels are ordinary kernels with peer
addresses; no NVSHMEM device library is linked.

CUDA graphs and programs keep addresses. NVSHMEM returns memory to the driver only when it ends, and uses other
addresses when it starts again. So its memory is mapped a second time, in a reserved range whose addresses stay
valid.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from symmoe.address_range import AddressRange
from symmoe.errors import BackendUnavailable, SymmoeError
from symmoe.nodes.topology import Topology, find_machine
from symmoe.symm_mem.bootstrap import Bootstrap

# Plain NVLink or PCIe peers: no network transport, no proxy thread, no multicast.
_ENVIRONMENT = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
}
_ON_ONE_MACHINE = {
    "NVSHMEM_DISABLE_MNNVL": "1",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY": "AF_INET",
}

_ON_DEVICE = 1
_READ_WRITE = 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def preflight(num_bytes: int) -> str:
    """The reason why NVSHMEM cannot work for this rank, or "".

    Some failures in NVSHMEM end the process without an error, so everything possible is checked first.
    """
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    if importlib.util.find_spec("nvshmem") is None:
        return "the package nvshmem4py-cu13 is not installed: pip install 'nvshmem4py-cu13>=0.4.1,<0.5'"
    import nvshmem.core as core

    if core.init_status() >= core.InitStatus.STATUS_IS_INITIALIZED:
        return (
            "NVSHMEM is in use in this process: by an open heap, which must be closed first, or by one that ended in "
            "an error, whose memory goes with the process"
        )
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < num_bytes:
        return f"num_bytes ({num_bytes}) is more than the GPU's free memory ({free_bytes} bytes)"
    return ""


class NvshmemBackend:
    """Arenas in GPU memory, see HostBackend. The constructor is collective and synchronises the device. On one node the
    arenas have addresses of our own, if possible; on several the addresses of NVSHMEM, which NICs know."""

    def __init__(self, bootstrap: Bootstrap, topology: Topology, num_bytes: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._topology = topology
        self._num_bytes, self._num_machines = num_bytes, self._check_peers(bootstrap)
        self.bases = self._start(bootstrap)
        self._ranges = list[OwnAddresses]()
        self.suspend_problem = ""
        if topology.num_nodes == 1:
            try:
                for base in self.bases:
                    self._ranges.append(OwnAddresses(base, num_bytes, self.device.index))
                    self._ranges[-1].map(base)
                self.bases = [addresses.address for addresses in self._ranges]
            except (SymmoeError, OSError) as error:
                self.suspend_problem = f"NVSHMEM's memory cannot be mapped again: {error}"
                self._free_addresses()
        self.arenas = [AddressRange(base, num_bytes, self.device).tensor for base in self.bases]

    def _start(self, bootstrap: Bootstrap) -> list[int]:
        """Starts NVSHMEM and allocates the arenas; returns their addresses by rank. Collective."""
        import nvshmem.bindings as bindings
        import nvshmem.core as core
        from cuda.core import Device

        self._bindings = bindings
        self._core = core
        num_bytes = self._num_bytes
        rank = self._topology.local_rank
        ranks = self._topology.ranks
        torch.zeros(1, device=self.device)  # creates the primary context
        device = Device(self.device.index)
        device.set_current()
        environment = _ENVIRONMENT | _ON_ONE_MACHINE if self._num_machines == 1 else _ENVIRONMENT
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        # Used only where NVSHMEM cannot map memory on demand and takes its whole heap at once.
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(num_bytes + (64 << 20))
        unique_id = core.get_unique_id(empty=rank != 0)
        id_bytes = unique_id._data.view(np.uint8)
        of_first = bootstrap.gather(id_bytes.tobytes().hex())[ranks[0]]
        id_bytes[:] = np.frombuffer(bytes.fromhex(of_first), dtype=np.uint8)
        with _files_of_this_user():
            core.init(
                device=device, uid=unique_id, rank=rank, nranks=len(ranks), initializer_method="uid"
            )
        # The binding reports success for a half-done start; an allocation would then end the process.
        is_started = core.init_status() >= core.InitStatus.STATUS_IS_INITIALIZED
        problem = "NVSHMEM did not initialise; NVSHMEM_DEBUG=INFO says why"
        _agree(bootstrap, "" if is_started else problem)
        with _files_of_this_user():  # sockets that pass its handles are files, too
            self._address = bindings.malloc(num_bytes)
        bases = [bindings.ptr(self._address, local_rank) for local_rank in range(len(ranks))]
        missing = [rank for rank, base in zip(ranks, bases, strict=True) if base == 0]
        problem = f"NVSHMEM gives no direct address for ranks {missing}: peer access is needed"
        if (number := self._num_machines) > 1:
            problem += f", here between {number} machines of one NVLink domain; ranks_per_node can part them"
        _agree(bootstrap, problem if missing else "")
        return bases

    def suspend(self) -> None:
        """Zeroes and frees the arena, and ends NVSHMEM in this process: only this returns the memory. Collective."""
        self.arenas[self._topology.local_rank]().zero_()
        torch.cuda.synchronize(self.device)
        for addresses in self._ranges:
            addresses.unmap()
        self._bindings.free(self._address)
        self._core.finalize()
        self._address = 0

    def resume(self, bootstrap: Bootstrap) -> None:
        """Starts NVSHMEM again, maps its memory at the old addresses, and zeroes this rank's arena. Collective."""
        rank = self._topology.local_rank
        _agree(bootstrap, preflight(self._ranges[rank].size))
        bases = self._start(bootstrap)
        bootstrap.attempt(
            partial(list, map(OwnAddresses.map, self._ranges, bases))
        )  # list: it maps them
        self.arenas[rank]().zero_()

    def close(self, *, together: bool) -> None:
        """Suspends for good: tensors over the arena dangle afterwards. Collective, if `together`. Else it is the local
        end after a failure: the memory stays until the process ends, because NVSHMEM frees only collectively. The
        memory is not zeroed, because a peer may be about to read it. A suspended heap has none."""
        if together:
            self.suspend()
        if not self._address:
            self._free_addresses()

    def _free_addresses(self) -> None:
        while self._ranges:
            self._ranges.pop().close()

    def _check_peers(self, bootstrap: Bootstrap) -> int:
        """The number of machines of this node. Raises on all ranks unless the node's ranks use different GPUs that can
        address each other. Collective."""
        index = self.device.index
        machine = bootstrap.attempt(find_machine)
        gathered = bootstrap.gather(
            [
                str(torch.cuda.get_device_properties(self.device).uuid),
                index,
                machine,
                os.environ.get("CUDA_VISIBLE_DEVICES", "")[:128],
            ]
        )
        uuids, indices, machines, views = zip(
            *(gathered[rank] for rank in self._topology.ranks), strict=True
        )
        problem = ""
        if len(set(uuids)) < len(uuids):
            problem = (
                "two ranks of the group use the same GPU: set torch.cuda.set_device(local_rank)"
            )
        elif (
            len(set(views)) == 1
        ):  # all number the GPUs equally: a peer's index means something here
            peer_indices = {
                i
                for i, peer_machine in zip(indices, machines, strict=True)
                if peer_machine == machine and i != index
            }
            blocked = [
                i for i in sorted(peer_indices) if not torch.cuda.can_device_access_peer(index, i)
            ]
            if blocked:
                problem = f"GPU {index} cannot address GPUs {blocked}"
        _agree(bootstrap, problem)
        return len(set(machines))


def _agree(bootstrap: Bootstrap, problem: str) -> None:
    """Raises the first rank's problem on every rank; "": this rank has none."""
    bootstrap.agree(BackendUnavailable(problem) if problem else None)


@contextmanager
def _files_of_this_user() -> Iterator[None]:
    """Restricts files created in this context to this user: NVSHMEM requests shared memory that all may write."""
    old_mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(old_mask)


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
