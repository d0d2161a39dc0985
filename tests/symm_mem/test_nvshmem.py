"""The NVSHMEM backend, as far as it can be tested without NVSHMEM."""

import ctypes
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cluster import run_on
from heap_calls import outcome, round_trip

from symmoe import SymmetricHeap
from symmoe.errors import BackendUnavailable
from symmoe.kernels.launch import driver
from symmoe.nodes.topology import Topology
from symmoe.symm_mem import nvshmem_backend
from symmoe.symm_mem.bootstrap import Bootstrap

NUM_BYTES = 1 << 20
ONE_RANK = Topology(0, ((0,),))


class FakeNvshmem:
    """Replaces the NVSHMEM packages in a group of one. The arena is memory of this process; the fake records calls, and
    their umask and environment."""

    def __init__(self, num_bytes: int = 5000) -> None:
        self.umasks, self.environment, self.calls = {}, {}, []
        self.is_initialized, self.has_peer_access, self.num_machines = False, True, 1
        self.memory = (ctypes.c_uint8 * num_bytes)()
        self.address = ctypes.addressof(self.memory)
        self.any_byte_when_freed: bool | None = None

    def note(self, call: str) -> None:
        os.umask(old_mask := os.umask(0))
        self.umasks[call] = old_mask
        self.environment = dict(os.environ)

    def init(self, **kwargs: object) -> None:
        self.note("init")
        self.is_initialized = True

    def malloc(self, num_bytes: int) -> int:
        self.note("malloc")
        assert num_bytes == len(self.memory)
        return self.address

    def ptr(self, address: int, rank: int) -> int:
        assert (address, rank) == (self.address, 0)
        return address if self.has_peer_access else 0

    def free(self, address: int) -> None:
        assert address == self.address
        self.calls.append("free")
        self.any_byte_when_freed = any(self.memory)
        ctypes.memset(address, 0xAA, len(self.memory))  # it is somebody else's from here on

    def finalize(self) -> None:
        self.calls.append("finalize")
        self.is_initialized = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvshmem]:
    """A fake in place of the NVSHMEM packages, with the CPU for the GPU. Afterwards the umask is as before."""
    fake = FakeNvshmem()
    core = types.SimpleNamespace(
        InitStatus=types.SimpleNamespace(STATUS_IS_INITIALIZED=2),
        init_status=lambda: 2 * fake.is_initialized,
        get_unique_id=lambda empty: types.SimpleNamespace(_data=np.zeros(16, dtype=np.int64)),
        init=fake.init,
        finalize=fake.finalize,
    )
    device = types.SimpleNamespace(set_current=lambda: None, index=0)
    for name, module in (
        ("nvshmem", types.SimpleNamespace(core=core, bindings=fake)),
        ("nvshmem.core", core),
        ("nvshmem.bindings", fake),
        ("cuda", types.ModuleType("cuda")),
        ("cuda.core", types.SimpleNamespace(Device=lambda index: device)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    zeros, ranges = torch.zeros, nvshmem_backend.AddressRange
    monkeypatch.setattr(nvshmem_backend.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvshmem_backend.torch, "zeros", lambda *shape, device=None: zeros(*shape))
    monkeypatch.setattr(
        nvshmem_backend.NvshmemBackend, "_check_peers", lambda self, bootstrap: fake.num_machines
    )
    cpu = torch.device("cpu", 0)
    monkeypatch.setattr(
        nvshmem_backend,
        "AddressRange",
        lambda start, num_bytes, device: ranges(start, num_bytes, cpu),
    )
    names = nvshmem_backend._ENVIRONMENT | nvshmem_backend._ON_ONE_MACHINE
    for name in (*names, "NVSHMEM_SYMMETRIC_SIZE"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    before = os.umask(0o022)
    yield fake
    assert os.umask(before) == 0o022


@pytest.mark.parametrize("num_machines", [1, 2])
def test_nvshmem_starts_privately(fake: FakeNvshmem, num_machines: int):
    """The start up to the first allocation, where the fake fails like NVSHMEM without peer access. NVSHMEM requests
    shared memory with mode 0777. On one machine its sockets are on loopback; on two machines their links are used."""
    fake.has_peer_access, fake.num_machines = False, num_machines
    end_of_text = ", here between 2 machines of one" if num_machines == 2 else "$"
    with pytest.raises(
        BackendUnavailable,
        match=rf"no direct address for ranks \[0\]: peer access is needed{end_of_text}",
    ):
        nvshmem_backend.NvshmemBackend(Bootstrap(None), ONE_RANK, len(fake.memory))
    assert fake.umasks == {"init": 0o077, "malloc": 0o077}
    assert fake.environment["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    on_one_machine = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo", "NVSHMEM_DISABLE_MNNVL": "1"}
    set_variables = on_one_machine.items() & fake.environment.items()
    assert set_variables == (on_one_machine.items() if num_machines == 1 else set())
    assert fake.calls == []  # finalize is collective


def test_preflight_names_the_problem_of_nvshmem(fake: FakeNvshmem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 80 << 30))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert nvshmem_backend.preflight(1 << 20) == ""
    text = "num_bytes (4194304) is more than the GPU's free memory (1048576 bytes)"
    assert nvshmem_backend.preflight(4 << 20) == text
    fake.is_initialized = True
    assert nvshmem_backend.preflight(1 << 20).startswith(
        "NVSHMEM is in use in this process: by an open heap"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nvshmem_backend.preflight(1 << 20).startswith(
        "the package nvshmem4py-cu13 is not installed: pip install"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvshmem_backend.preflight(1 << 20) == "no CUDA device is visible to torch"


@run_on(2)
def test_gpus_that_cannot_address_each_other_are_refused(rank: int, num_ranks: int) -> None:
    """A heap's checks of the GPUs of two ranks, with fake GPUs; and the numbers of machines that it finds."""
    outcomes, num_machines, find = [], [], nvshmem_backend.find_machine
    for gpus, reach, machines in (
        ("00", True, 1),
        ("01", False, 1),
        ("01", True, 1),
        ("01", False, 2),
    ):
        machine = "another machine" if machines == 2 and rank else find()
        backend = object.__new__(nvshmem_backend.NvshmemBackend)
        backend.device = torch.device("cuda", int(gpus[rank]))
        backend._topology = Topology(rank, ((0, 1),))
        gpu = types.SimpleNamespace(uuid=f"GPU-{gpus[rank]}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
            patch.setattr(
                torch.cuda, "can_device_access_peer", lambda device, peer, reach=reach: reach
            )
            patch.setattr(nvshmem_backend, "find_machine", lambda machine=machine: machine)
            check = backend._check_peers
            outcomes.append(
                outcome(lambda check=check: num_machines.append(check(Bootstrap(None))))
            )
    assert num_machines == [1, 2]
    assert [name for name, _ in outcomes] == ["BackendUnavailable"] * 2 + ["", ""]
    assert outcomes[0][1].startswith(
        "on rank 0: two ranks of the group use the same GPU: set torch.cuda.set_device("
    )
    assert outcomes[1][1] == "on rank 0: GPU 0 cannot address GPUs [1]"


@pytest.mark.parametrize("together", [True, False])
def test_the_arena_of_nvshmem_is_zeroed_before_it_is_freed(
    fake: FakeNvshmem, monkeypatch, together: bool
):
    waits = []
    monkeypatch.setattr(
        nvshmem_backend.torch.cuda, "synchronize", lambda device: waits.append(list(fake.calls))
    )
    backend = nvshmem_backend.NvshmemBackend(Bootstrap(None), ONE_RANK, 5000)
    arena = backend.arenas[0]()
    assert (arena.device, arena.shape) == (torch.device("cpu"), (5000,))
    arena.fill_(7)
    assert bytes(fake.memory) == b"\7" * 5000  # no copy
    backend.close(together=together)
    if together:
        assert fake.calls == ["free", "finalize"]
        assert waits == [[]]  # zeroing is over when it is freed
        assert fake.any_byte_when_freed is False
    else:
        assert (fake.calls, bytes(fake.memory)) == ([], b"\7" * 5000)


class FakeDriver:
    """The functions of CUDA's driver that map memory; records the calls. pieces: (start, size) of NVSHMEM's mappings;
    fails: the call that fails."""

    def __init__(self, calls: list[object], pieces: list[tuple[int, int]]) -> None:
        self.calls, self.pieces, self.fails = calls, pieces, ""
        self.range = (ctypes.c_uint8 * sum(size for _, size in pieces))()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments) -> int:
            values = [getattr(argument, "_obj", argument) for argument in arguments]
            if name == "cuMemAddressReserve":
                values[0].value = ctypes.addressof(self.range)
            elif name == "cuMemRetainAllocationHandle":
                values[0].value = values[1].value + 1
            elif name == "cuMemGetAddressRange_v2":
                address = values[2].value
                piece = next(
                    (start, size) for start, size in self.pieces if start <= address < start + size
                )
                values[0].value, values[1].value = piece
                return 0
            self.calls.append(
                (
                    name,
                    *(
                        list(value) if hasattr(value, "__len__") else value.value
                        for value in values
                    ),
                )
            )
            return int(name == self.fails)

        return call


def test_reserved_addresses_stay_valid_after_a_suspend(
    fake: FakeNvshmem, monkeypatch: pytest.MonkeyPatch
):
    """NVSHMEM's memory, in two pieces, is mapped at the reserved addresses, unmapped and mapped again."""
    start, size = fake.address - 600, len(fake.memory) + 1000
    cuda = FakeDriver(fake.calls, [(start, 2000), (start + 2000, size - 2000)])
    reserved = ctypes.addressof(cuda.range)
    monkeypatch.setattr(driver, "library", lambda: cuda)
    monkeypatch.setattr(nvshmem_backend.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        nvshmem_backend, "preflight", lambda num_bytes: "" if num_bytes == size else "another size"
    )
    backend = nvshmem_backend.NvshmemBackend(Bootstrap(None), ONE_RANK, len(fake.memory))
    mapped = []
    for at, piece, length in (
        (reserved, start, 2000),
        (reserved + 2000, start + 2000, size - 2000),
    ):
        mapped += [
            ("cuMemRetainAllocationHandle", piece + 1, piece),
            ("cuMemMap", at, length, 0, piece + 1, 0),
        ]
        mapped += [("cuMemRelease", piece + 1), ("cuMemSetAccess", at, length, [1, 0, 3], 1)]
    assert fake.calls == [("cuMemAddressReserve", reserved, size, 0, 0, 0), *mapped]
    assert (backend.bases, backend.suspend_problem) == ([reserved + 600], "")
    backend.arenas[0]().fill_(7)
    fake.calls.clear()
    backend.suspend()
    assert not any(cuda.range)
    assert fake.calls == [
        *(
            ("cuMemUnmap", at, length)
            for at, length in ((reserved + 2000, size - 2000), (reserved, 2000))
        ),
        *("free", "finalize"),
    ]
    fake.calls.clear()
    backend.resume(Bootstrap(None))
    assert (fake.calls, fake.is_initialized) == (mapped, True)
    backend.suspend()
    cuda.pieces[1] = start + 2000, size
    with pytest.raises(BackendUnavailable, match="laid out its memory otherwise than before"):
        backend.resume(Bootstrap(None))
    backend.close(together=True)
    assert fake.calls[-3:] == ["free", "finalize", ("cuMemAddressFree", reserved, size)]
    cuda.fails, cuda.cuGetErrorName = "cuMemMap", lambda *_: 0
    backend = nvshmem_backend.NvshmemBackend(Bootstrap(None), ONE_RANK, len(fake.memory))
    assert backend.bases == [fake.address]
    assert backend.suspend_problem.startswith(
        "NVSHMEM's memory cannot be mapped again: cuMemMap returned 1"
    )


@pytest.mark.gpu
@run_on(2, device="cuda")
def test_two_ranks_on_one_gpu(rank: int, num_ranks: int) -> None:
    torch.cuda.set_device(0)
    name, text = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="nvshmem")
    torch.cuda.set_device(rank)
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="nvshmem") as heap:
        assert round_trip(heap)
    assert (name, "two ranks of the group use the same GPU" in text) == ("BackendUnavailable", True)
