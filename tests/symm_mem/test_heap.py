"""The symmetric heap: leases, construction, barrier, timeouts, and what is left when a rank is killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib.util
import itertools
import json
import math
import os
import random
import re
import signal
import stat
import sys
import time
import types
import warnings
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, RankFailure, on_ranks
from conftest import left_in_shared_memory
from limits import HANG_S, PROMPT_S
from worker import Findings, is_poison, open_heap, poisoned_lease, wait_for_arrivals

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, kernels, make_plan
from symmoe.dispatch.trip import dispatch
from symmoe.errors import (
    ArgumentError,
    BackendUnavailable,
    HeapClosed,
    HeapExhausted,
    HeapPoisoned,
    PeerAborted,
    PeerError,
    PeerLost,
    PeerTimeout,
    StaleLease,
)
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division
from symmoe.nodes.place import Place
from symmoe.symm_mem import faults, host_backend, memory, nvshmem_backend
from symmoe.symm_mem.arena import ALIGNMENT_BYTES
from symmoe.symm_mem.bootstrap import Bootstrap

NUM_BYTES = 1 << 20


@pytest.fixture
def heap():
    """A group of one without a process group, in the test process itself."""
    assert not dist.is_initialized()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        yield heap


def round_trip(heap: SymmetricHeap, seed: int = 0) -> bool:
    """Whether a plan, a dispatch and a combine give every token K times its own row."""
    rank, num_experts = heap.rank, 2 * heap.num_ranks
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(5)]).to(heap.device)
    x = torch.randint(-50, 50, (5, 8), generator=generator).float().to(heap.device)
    plan = make_plan(ids, num_experts=num_experts, heap=heap)
    rows, _ = dispatch_tokens(x, plan)
    y = combine_tokens(rows, plan, order="slot")
    return torch.equal(y, 2 * x)


def outcome(fn, *args, **kwargs) -> tuple[str, str]:
    """Class and text of what a call raises; ("", "") if it raises nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller compares the class
        return type(error).__name__, str(error)
    return "", ""


# -- leases -----------------------------------------------------------------------------------------------------------


def test_lease_is_a_tensor_of_its_own(heap: SymmetricHeap):
    shapes = {torch.float32: (3, 5), torch.bfloat16: (7, 2, 3), torch.int32: (1,), torch.uint8: (513,)}
    leases = [heap.lease(shape, dtype, name=str(dtype)) for dtype, shape in shapes.items()]
    for index, (lease, (dtype, shape)) in enumerate(zip(leases, shapes.items(), strict=True)):
        assert (lease.tensor.shape, lease.tensor.dtype, lease.tensor.device) == (shape, dtype, heap.device)
        assert lease.tensor.is_contiguous()
        assert lease.offset % ALIGNMENT_BYTES == 0
        assert lease.tensor.data_ptr() % 128 == 0  # TMA
        assert lease.num_bytes == lease.tensor.numel() * dtype.itemsize
        assert lease.name == str(dtype)
        assert heap.owns(lease.tensor)
        assert heap.offset_of(lease.tensor) == lease.offset
        lease.tensor.fill_(index + 1)
    for index, lease in enumerate(leases):
        assert bool((lease.tensor == index + 1).all())
        assert torch.equal(lease.peer(0), lease.tensor)
        assert lease.peer(0).data_ptr() == lease.tensor.data_ptr()
    generations = [lease.generation for lease in leases]
    assert generations == sorted(set(generations))
    used = heap.leased_bytes
    assert used == sum(-(-lease.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for lease in leases)
    for lease in leases:
        lease.release()
    assert heap.leased_bytes == 0
    assert heap.high_water_bytes == used


def test_released_memory_is_reused_by_a_later_generation(heap: SymmetricHeap):
    first = heap.lease((100,), torch.float32, name="first")
    kept = heap.lease((100,), torch.float32)
    offset, generation = first.offset, first.generation
    first.release()
    second = heap.lease((50,), torch.int64)
    assert second.offset == offset
    assert second.generation > generation
    assert kept.offset > offset


def test_released_lease_is_stale(heap: SymmetricHeap):
    lease = heap.lease((4, 4), torch.float32, name="short-lived")
    tensor = lease.tensor
    lease.release()
    with pytest.raises(StaleLease, match=rf"'short-lived' \(generation {lease.generation}\) was released twice"):
        lease.release()
    for use in (lambda: lease.tensor, lambda: lease.peer(0)):
        with pytest.raises(StaleLease, match=rf"'short-lived' \(generation {lease.generation}\) has been released"):
            use()
    with pytest.raises(StaleLease, match="belongs to no live lease"):
        heap.offset_of(tensor)
    assert heap.leased_bytes == 0


def test_what_ends_a_lease(heap: SymmetricHeap):
    """Its block, a release in it, its last reference, that of a tensor on it, and what autograd has saved."""
    with heap.lease((8,), torch.float32) as lease:
        assert heap.leased_bytes == ALIGNMENT_BYTES
    assert heap.leased_bytes == 0
    with heap.lease((8,), torch.float32) as lease:
        lease.release()
    other = lease = heap.lease((8,), torch.float32)
    del lease
    gc.collect()
    assert heap.leased_bytes == ALIGNMENT_BYTES
    del other
    gc.collect()
    assert heap.leased_bytes == 0
    tensor = heap.lease((8,), torch.float32).tensor
    offset, view = heap.offset_of(tensor), tensor.view(2, 4)[1:]
    del tensor
    gc.collect()
    assert heap.offset_of(view) == offset + 16
    weight = torch.ones(1, 4, requires_grad=True)
    y = weight * view
    del view
    gc.collect()
    assert heap.leased_bytes == ALIGNMENT_BYTES
    y.sum().backward()
    gc.collect()
    assert heap.leased_bytes == 0


def test_exhaustion_names_the_lease_and_the_sizes(heap: SymmetricHeap):
    capacity = NUM_BYTES - control.ControlLayout(1).num_bytes
    kept = heap.lease((1000, 10), torch.float32)
    with pytest.raises(HeapExhausted) as caught:
        heap.lease((512, 1024), torch.bfloat16, name="too much")
    for part in (
        "lease 'too much' [512, 1024] torch.bfloat16 needs 1048576 bytes",
        f"largest free range has {capacity - 40448}",  # 40000 rounded up
        f"40448 of {capacity} bytes are leased",
        "high-water mark 40448",
        f"num_bytes (now {NUM_BYTES})",
    ):
        assert part in str(caught.value)
    assert heap.leased_bytes == 40448
    kept.release()
    everything = heap.lease((capacity,), torch.uint8)
    assert everything.offset + capacity == NUM_BYTES
    with pytest.raises(HeapExhausted):
        heap.lease((1,), torch.uint8)


def test_empty_leases(heap: SymmetricHeap):
    first, second = heap.lease((0, 8), torch.float32), heap.lease((8, 0), torch.float32)
    assert first.tensor.shape == (0, 8)
    assert first.offset != second.offset  # both count, so that equal calls give equal offsets
    assert heap.owns(first.tensor)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((-1, 4), torch.float32, "shape ((-1, 4)) must be of ints of at least 0"),
        ((2.5, 4), torch.float32, "shape ((2.5, 4)) must be of ints of at least 0"),
        ((True, 4), torch.float32, "shape ((True, 4)) must be of ints of at least 0"),
        (("3",), torch.float32, "shape (('3',)) must be of ints of at least 0"),
        (4, torch.float32, "shape (4) must be a tuple of ints"),
        (None, torch.float32, "shape (None) must be a tuple of ints"),
        ((4, 4), "float32", "dtype ('float32') must be a torch.dtype"),
        ((4, 4), float, "dtype (<class 'float'>) must be a torch.dtype"),
        ((4, 4), None, "dtype (None) must be a torch.dtype"),
    ],
)
def test_arguments_of_a_lease(heap: SymmetricHeap, shape: object, dtype: object, text: str):
    assert outcome(heap.lease, shape, dtype) == ("ArgumentError", text)
    assert (heap.leased_bytes, heap.statistics.num_leases) == (0, 0)
    lease = heap.lease([np.int64(2), torch.tensor(3)], torch.float32)
    assert lease.tensor.shape == (2, 3)


def lease_badly(rank: int, num_ranks: int) -> list[str]:
    """In a collective call all ranks raise it; outside, and for ranks that there are none of, this one alone."""
    findings = Findings()
    findings.where = f"rank {rank}"
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        if rank == 1:
            found = outcome(heap.lease, (-1,), torch.uint8, phase=control.PHASE_DISPATCH_READY)
        else:
            found = outcome(heap.barrier, control.PHASE_DISPATCH_READY)
        text = "shape ((-1,)) must be of ints of at least 0"
        findings.equal("error", found, ("ArgumentError", text if rank == 1 else f"on rank 1: {text}"))
        lease = heap.lease((1,), torch.uint8)
        for peer in (-1, num_ranks, 5, True, 0.0, "0"):
            wanted = ("ArgumentError", f"rank ({peer!r}) must be an int in [0, 2)")
            findings.equal("error of a peer", outcome(lease.peer, peer), wanted)
        findings.check(all(lease.peer(peer).shape == (1,) for peer in range(num_ranks)), "a peer's lease")
        findings.check(round_trip(heap), "the next correct call is wrong")
    return findings.texts


def test_ranks_and_peers_of_a_lease(cluster):
    assert cluster(2).run(lease_badly) == [[]] * 2


def test_a_heap_shows_itself():
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    capacity = NUM_BYTES - control.ControlLayout(1).num_bytes
    lease = heap.lease((100,), torch.float32)
    assert repr(heap) == f"SymmetricHeap(rank 0 of 1, host backend on cpu, 512 of {capacity} bytes leased, open)"
    lease.release()
    heap.abort("a test")
    assert repr(heap).endswith("0 of 1036288 bytes leased, poisoned: this rank gave up: a test)")
    heap.close()
    assert repr(heap) == repr(SymmetricHeap.__new__(SymmetricHeap)) == "SymmetricHeap(closed)"


def test_giving_up_with_a_gpu_that_is_out_of_order(monkeypatch: pytest.MonkeyPatch):
    """After an error of CUDA every call of it raises; giving up raises nothing more, and is written down."""

    def broken(device: torch.device) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(faults, "capture_id", broken)
    with pytest.raises(ZeroDivisionError), SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        raise ZeroDivisionError
    with pytest.raises(HeapClosed):
        heap.lease((1,), torch.float32)


def test_a_lease_without_room_collects_where_it_may_help(heap: SymmetricHeap, monkeypatch: pytest.MonkeyPatch):
    now, full = itertools.count(1000.0, 0.01), []  # a collection takes 0.01 s

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([phase] * (phase == "start" and info["generation"] == 2))

    def fails(num_bytes: int, times: int = 1) -> None:
        for _ in range(times):
            assert outcome(heap.lease, (num_bytes,), torch.uint8)[0] == "HeapExhausted"

    monkeypatch.setattr(memory, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    gc.disable()
    gc.callbacks.append(note)
    try:
        fails(NUM_BYTES, 50)  # nobody holds anything
        most = heap._memory.arena.largest_free_bytes
        kept = heap.lease((512,), torch.uint8)
        fails(2 * NUM_BYTES, 50)  # more than the whole heap
        assert len(full) == 0
        fails(most, 5)
        assert len(full) == 1
        now = itertools.count(2000.0, 0.01)  # something may have died meanwhile
        fails(most)
        assert len(full) == 2
        cycle = [heap.lease((1024,), torch.uint8)]
        cycle.append(cycle)
        del cycle
        kept.release()  # the live leases are others by now
        heap.lease((most,), torch.uint8).release()
        assert len(full) == 3
    finally:
        gc.callbacks.remove(note)
        gc.enable()


MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 6000 kB\n"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "1:cpu:/a\n"}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "5\n"}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "a/memory.max": "5000\n", "a/memory.current": "1000\n"}, 4000),
        ({"a/memory.max": "5000", "a/memory.current": "1000", "a/b/memory.max": "7", "a/b/memory.current": "8"}, 0),
    ],
)
def test_memory_that_is_left(tmp_path: Path, files: dict[str, str], want: int | None):
    for name, text in ({"proc/self/cgroup": "0::/a/b\n"} | files).items():
        path = tmp_path / ("" if name.startswith("proc") else "sys/fs/cgroup") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_backend.available_bytes(tmp_path) == want


def construct_large(rank: int, num_ranks: int) -> list[str]:
    """Texts of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SymmetricHeap(num_bytes=1 << 44, backend="host") as heap:
            assert round_trip(heap)
        with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
            assert round_trip(heap)
    for warning in caught:
        assert warning.filename == __file__
    return [str(warning.message) for warning in caught]


def test_more_memory_than_the_machine_has_is_said_once(cluster):
    [text], others = cluster(2).run(construct_large)
    assert re.fullmatch(
        r"num_bytes \(17592186044416\) times 2 ranks on this machine is more than .* \(\d+ bytes\): .*", text
    )
    assert others == []


def test_owns(heap: SymmetricHeap):
    lease = heap.lease((16, 16), torch.float32)
    assert heap.owns(lease.tensor)
    assert heap.owns(lease.tensor[3:5, 1:])
    assert not heap.owns(torch.empty(16, 16))
    assert not heap.owns(torch.empty(16, 16, device="meta"))
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as other, other.lease((16, 16), torch.float32) as foreign:
        # One of the two arenas lies above the other.
        assert not heap.owns(foreign.tensor)
        assert not other.owns(lease.tensor)
    control_block = heap.peers.views[0][: heap._layout.num_bytes]
    assert not heap.owns(control_block)
    assert heap.offset_of(lease.tensor[3:]) == lease.offset + 3 * 64
    with pytest.raises(StaleLease):  # half of it is past the end of the lease
        heap.offset_of(heap.peers.views[0][lease.offset + 512 : lease.offset + 1536])


# -- construction and end ---------------------------------------------------------------------------------------------


def test_a_group_of_one_needs_no_process_group_and_auto_says_what_it_picked():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: with one, auto picks nvshmem")
    with SymmetricHeap(num_bytes=NUM_BYTES) as heap:
        assert (heap.rank, heap.num_ranks, heap.device, heap.backend) == (0, 1, torch.device("cpu"), "host")
        assert heap.backend_reason == "auto: torch sees no CUDA device"
        assert round_trip(heap)
    assert not dist.is_initialized()


def test_ranks_without_a_process_group_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2.*init_process_group"):
        SymmetricHeap(num_bytes=1 << 20, backend="host").close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():  # (its arguments are Python 3.11's)
        warnings.simplefilter("error")
        SymmetricHeap(num_bytes=1 << 20, backend="host").close()


def test_use_after_close():
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    lease = heap.lease((4,), torch.float32)
    plan = make_plan(torch.zeros(1, 1, dtype=torch.int64), num_experts=1, heap=heap)
    heap.close()
    heap.close()
    assert not heap.owns(lease.tensor)
    x = torch.ones(1, 8)
    for use in (
        lambda: heap.lease((4,), torch.float32),
        lambda: heap.barrier(control.PHASE_START),
        lambda: make_plan(torch.zeros(1, 1, dtype=torch.int64), num_experts=1, heap=heap),
        lambda: dispatch_tokens(x, plan),
        lambda: combine_tokens(x, plan),
        heap.check,
    ):
        with pytest.raises(HeapClosed, match="has been closed"):
            use()
    lease.release()  # giving back to a closed heap is no error


def construct(rank: int, num_ranks: int) -> list[str]:
    """Every wrong argument on every rank and on all: the same error everywhere; then a heap must work."""
    findings = Findings()
    for culprits in [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1):
        for name, value, error, parts in BAD:
            if (error == "ConfigMismatch" and len(culprits) == num_ranks) or (
                value == "nvshmem" and torch.cuda.is_available()
            ):
                continue
            findings.where = f"{name}={value!r} on {culprits}, rank {rank} of {num_ranks}"
            found, text = outcome(SymmetricHeap, **{**GOOD, **({name: value} if rank in culprits else {})})
            findings.equal("error", found, error)
            if error == "ConfigMismatch":
                values = [value if r in culprits else GOOD[name] for r in range(num_ranks)]
                findings.equal("text", text, f"{name} differs between ranks: {values}")
            else:
                findings.check(f"on rank {culprits[0]}: " in text, text)
                findings.check(all(part in text for part in parts), text)
            with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
                findings.check(round_trip(heap), "a heap does not work afterwards")
    return findings.texts


GOOD = {"num_bytes": NUM_BYTES, "backend": "host", "timeout_s": 5.0}
BAD: tuple[tuple[str, object, str, tuple[str, ...]], ...] = (
    ("num_bytes", 1000, "ArgumentError", ("num_bytes (1000)", "at least")),
    ("num_bytes", 0, "ArgumentError", ("num_bytes (0)", "at least")),
    ("num_bytes", 1 << 70, "ArgumentError", (f"num_bytes ({1 << 70})", "less than 2**63")),
    ("num_bytes", "1 GiB", "ArgumentError", ("num_bytes ('1 GiB')",)),
    ("num_bytes", float(NUM_BYTES), "ArgumentError", (f"num_bytes ({float(NUM_BYTES)})",)),
    ("backend", "mpi", "ArgumentError", ("backend ('mpi')", "'auto', 'host' or 'nvshmem'")),
    ("timeout_s", 0.0, "ArgumentError", ("timeout_s (0.0)", "greater than 0")),
    ("timeout_s", 1e300, "ArgumentError", ("timeout_s (1e+300)", "at most 1e+09 s or math.inf")),
    ("timeout_s", 9.3e9, "ArgumentError", ("timeout_s (9300000000.0)", "at most 1e+09 s or math.inf")),
    ("timeout_s", True, "ArgumentError", ("timeout_s (True)",)),
    ("timeout_s", float("nan"), "ArgumentError", ("timeout_s (nan)", "greater than 0")),
    ("timeout_s", "soon", "ArgumentError", ("timeout_s ('soon')",)),
    ("start_timeout_s", 1e300, "ArgumentError", ("start_timeout_s (1e+300)", "math.inf")),
    ("start_timeout_s", -1.0, "ArgumentError", ("start_timeout_s (-1.0)",)),
    ("backend", "nvshmem", "BackendUnavailable", ("no CUDA device",)),
    ("num_bytes", NUM_BYTES + 4096, "ConfigMismatch", ()),
    ("timeout_s", 7.5, "ConfigMismatch", ()),
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_bad_construction_fails_on_every_rank(cluster, num_ranks: int):
    assert cluster(num_ranks).run(construct) == [[]] * num_ranks


def fails(number: int, *places: str) -> Callable[..., object]:
    """A function of `os` that raises for these paths, or for all."""

    def failing(original: Callable[..., object], path: object = "", *args: object, **kwargs: object) -> object:
        if places and not str(path).startswith(places):
            return original(path, *args, **kwargs)
        raise OSError(number, os.strerror(number), path)

    return failing


def another_namespace(original: Callable[..., object], path: object, *args: object, **kwargs: object) -> object:
    return types.SimpleNamespace(st_ino=12345) if path == "/proc/self/ns/pid" else original(path, *args, **kwargs)


# (function of `os` on rank 1, what stands for it, the rank that is named, parts of the text)
LACKS: tuple[tuple[str, Callable[..., object], int, tuple[str, ...]], ...] = (
    ("stat", fails(errno.ENOENT, "/proc"), 1, ("cannot make an arena of 1048576 bytes", "/proc/self/ns/pid")),
    ("memfd_create", fails(errno.EPERM), 1, ("cannot make an arena of 1048576 bytes", "Operation not permitted")),
    ("stat", another_namespace, 0, ("pid namespace 12345", "one container")),
    ("geteuid", lambda original: original() + 1, 0, ("rank 1 runs as user", "as one user")),
    ("open", fails(errno.ENOENT, "/proc"), 1, ("cannot open the arena of rank 0",)),
)


def construct_without(rank: int, num_ranks: int) -> list[str]:
    """A rank on a machine that lacks something, or that is none of its peers' machine."""
    findings = Findings()
    for name, stand_in, culprit, parts in LACKS:
        findings.where = f"{name}: {parts[0]}, rank {rank}"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(host_backend.os, name, partial(stand_in, getattr(os, name)))
            found, text = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="host")
        findings.equal("error", found, "BackendUnavailable")
        findings.check(text.startswith(f"on rank {culprit}: ") and all(part in text for part in parts), text)
    findings.where = f"rank {rank}"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so many bytes
        found, text = outcome(SymmetricHeap, num_bytes=1 << 62, backend="host")
        findings.equal("error", (found, f"arenas of {1 << 62} bytes" in text), ("BackendUnavailable", True))
        if rank == 1:
            patch.setattr(host_backend, "preflight", lambda: [][0])  # an error that is not symmoe's
        found, text = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="host")
        findings.check(text.startswith("on rank 1: IndexError: list index"), text)
        findings.equal("error", found, "BackendUnavailable")
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        findings.check(round_trip(heap), "a heap does not work afterwards")
    return findings.texts


def test_what_a_rank_lacks_fails_on_every_rank(cluster):
    assert cluster(3).run(construct_without) == [[]] * 3


def construct_with_other_groups(rank: int, num_ranks: int) -> list[str]:
    """Groups that are none of this rank's raise here at once, and keep nobody else from anything."""
    findings = Findings()
    group, over = dist.new_group([0]), dist.new_group([rank])
    dist.destroy_process_group(over)
    start = time.monotonic()
    if rank == 0:
        with SymmetricHeap(group, num_bytes=NUM_BYTES, backend="host", start_timeout_s=math.inf) as heap:
            findings.check(round_trip(heap), "the heap of a group of one does not work")
        dist.destroy_process_group(group)
        return findings.texts
    for other, part in (
        (group, "this rank is not in: it has no heap there"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in: it has no heap there"),
        (over, "group is not usable"),
        ("ep", "group ('ep') must be a torch.distributed.ProcessGroup, or None"),
    ):
        name, text = outcome(SymmetricHeap, other, num_bytes=NUM_BYTES, backend="host")
        findings.check(name == "ArgumentError" and part in text, f"{name}: {text}")
    findings.check(time.monotonic() - start < PROMPT_S, "it has waited")
    return findings.texts


def test_a_group_that_this_rank_is_not_in(cluster):
    assert cluster(2).run(construct_with_other_groups) == [[]] * 2


def arena_facts(rank: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """(mode, links, owner is us) of every arena that this rank has mapped."""
    facts = []
    gc.collect()  # of earlier tests that ended in errors
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:symmoe" in line:
                start, end = line.split()[0].split("-")
                info = os.stat(f"/proc/self/map_files/{start}-{end}")
                facts.append((stat.S_IMODE(info.st_mode), info.st_nlink, int(info.st_uid == os.geteuid())))
        heap.barrier(control.PHASE_START)
    return facts


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_arenas_are_private_and_have_no_name(cluster, shared_memory_before, num_ranks: int):
    for facts in cluster(num_ranks).run(arena_facts):
        assert len(facts) == num_ranks
        assert all(fact == (0o600, 0, 1) for fact in facts)
    assert not left_in_shared_memory(shared_memory_before)


def open_and_close(rank: int, num_ranks: int, times: int) -> list[tuple[int, int]]:
    """(File descriptors, mapped arenas) before and after many heaps."""

    def held() -> tuple[int, int]:
        gc.collect()  # what earlier functions on this rank left to the collector must not count as freed here
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:symmoe")

    before = held()
    for seed in range(times):
        with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
            assert round_trip(heap, seed)
        del heap
    return [before, held()]


def test_heaps_leave_no_descriptors_and_no_mappings(cluster):
    for before, after in cluster(2).run(open_and_close, 5):
        assert after == before


# -- peers and groups -------------------------------------------------------------------------------------------------


def check_peers(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with (
        open_heap("cpu", num_bytes=NUM_BYTES) as heap,
        poisoned_lease(heap, (num_ranks, 4), torch.int32, name="a") as a,
    ):
        heap.barrier(control.PHASE_START)
        for peer in range(num_ranks):
            a.peer(peer)[rank] = 100 * rank + peer  # each rank writes its row everywhere
        heap.barrier(control.PHASE_START)
        want = [[100 * source + rank] * 4 for source in range(num_ranks)]
        findings.equal("what peers wrote", a.tensor.tolist(), want)
        for peer in range(num_ranks):
            want = [[100 * source + peer] * 4 for source in range(num_ranks)]
            findings.equal(f"what rank {peer} holds", a.peer(peer).tolist(), want)
        # what a barrier publishes arrives, in many rounds with ranks that dawdle
        generator = random.Random(rank)
        for turn in range(200):
            if generator.random() < 0.05:
                time.sleep(0.002)
            got = heap.barrier(control.PHASE_START, publish=(turn, 1000 * rank + turn)[: 1 + turn % 2])
            first = [turn] * num_ranks
            second = [1000 * r + turn if turn % 2 else 0 for r in range(num_ranks)]
            findings.equal("published", got.tolist(), [[u, v, 0] for u, v in zip(first, second, strict=True)])
        heap.barrier(control.PHASE_START)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_peers_see_each_other(cluster, num_ranks: int):
    assert cluster(num_ranks).run(check_peers) == [[]] * num_ranks


def check_offsets(rank: int, num_ranks: int) -> bool:
    """Leases at other offsets on every rank: peers are told, nothing is assumed."""
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        with heap.lease((1000 * rank + 1,), torch.uint8, name="only here, so large"):
            first = round_trip(heap)
            with heap.lease((512 * (num_ranks - rank),), torch.uint8, name="and here"):
                second = round_trip(heap, seed=50)
        return first and second and heap.leased_bytes == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_may_lease_in_different_ways(cluster, num_ranks: int):
    assert cluster(num_ranks).run(check_offsets) == [True] * num_ranks


def check_groups(rank: int, num_ranks: int, device: str) -> list[str]:
    """Two interleaved groups at once, even ranks and odd ones; on CPUs also the world and groups of one rank."""
    findings = Findings()
    findings.where = f"rank {rank}"
    evens, odds = (list(range(first, num_ranks, 2)) for first in (0, 1))
    groups = [dist.new_group(ranks) for ranks in (evens, odds, *([r] for r in range(num_ranks)))]
    with contextlib.ExitStack() as stack:
        kinds = (groups[rank % 2], None, groups[2 + rank])[: 1 if device == "cuda" else 3]  # NVSHMEM: one in a process
        heaps = [stack.enter_context(open_heap(device, group=group, num_bytes=NUM_BYTES)) for group in kinds]
        wanted = [(rank // 2, num_ranks // 2), (rank, num_ranks), (0, 1)][: len(heaps)]
        findings.equal("rank in each group", [(heap.rank, heap.num_ranks) for heap in heaps], wanted)
        half, *others = heaps
        with poisoned_lease(half, (64,), torch.uint8, name="untouched") as lease:
            for turn in range(30):
                if turn % 3 == rank % 2:  # one half is ahead of the other now and then
                    time.sleep(0.001)
                findings.check(round_trip(half, 1000 * (rank % 2) + 10 * turn), f"half, turn {turn}")
                for heap in others if turn % 5 == 0 else others[1:]:
                    findings.check(round_trip(heap, 7 * turn), f"group of {heap.num_ranks}, turn {turn}")
            findings.check(is_poison(lease.tensor), "another group wrote into this heap")
        # one half fails, the other does not notice
        bad = torch.full((1, 1), 0 if rank % 2 else 99, device=half.device)
        kind, _ = outcome(make_plan, bad, num_experts=half.num_ranks, heap=half)
        findings.equal("error of the half", kind, "" if rank % 2 else "ExpertIdError")
        findings.check(round_trip(half), "half, afterwards")
    with open_heap(device, num_bytes=NUM_BYTES) as heap:  # and again, all together
        findings.check(round_trip(heap), "the world, afterwards")
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return findings.texts


@on_ranks(cpu=(4, 8), cuda=(4, 8))
def test_disjoint_groups_at_once(cluster, num_ranks: int, device: str):
    assert cluster(num_ranks, device).run(check_groups, device) == [[]] * num_ranks


# -- a peer that does not come ----------------------------------------------------------------------------------------


def leave_out(rank: int, num_ranks: int, call: str, phase: str) -> list[str]:
    """The last rank stays away from `call` and comes late; what the others see, and that a new heap works at once."""
    findings, missing, timeout_s = Findings(), num_ranks - 1, 0.5
    findings.where = f"rank {rank} of {num_ranks}"
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=HANG_S, start_timeout_s=HANG_S)
    ids, x = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 8)
    calls: dict[str, Callable[..., object]] = {
        "make_plan": lambda plan: make_plan(ids, num_experts=num_ranks, heap=heap),
        "dispatch_tokens": lambda plan: dispatch_tokens(x, plan) and plan,
        "combine_tokens": lambda plan: combine_tokens(torch.ones(plan.row_capacity, 8), plan),
    }
    first = list(calls).index(call)
    plan = reduce(lambda plan, name: calls[name](plan), list(calls)[:first], None)
    dist.barrier()
    if rank == 0:  # who loses patience with the last rank alone: the others, who have more, wait by then
        wait_for_arrivals(heap, range(1, missing))
        heap.timeout_s = heap.start_timeout_s = timeout_s
    wanted = f"rank {missing} did not reach '{phase}' within "
    start = time.monotonic()
    if rank != missing:
        with pytest.raises(PeerTimeout) as caught:
            calls[call](plan)
        took_s, error = time.monotonic() - start, caught.value
        findings.check(0.9 * timeout_s < took_s < PROMPT_S, f"it took {took_s} s")
        found = (error.rank, error.phase, error.expected - error.seen)
        findings.equal("rank, phase and epochs too late", found, (missing, phase, 1))
        exact = wanted + (f"timeout_s={timeout_s}: expected epoch" if rank == 0 else "")
        findings.check(str(error).startswith(exact), str(error))
        heap.timeout_s = heap.start_timeout_s = HANG_S  # nobody waits any more
        name, text = outcome(make_plan, ids, num_experts=num_ranks, heap=heap)
        findings.check(name == "HeapPoisoned" and wanted in text, f"{name}: {text}")
        # Kernels that were on their way when the peer was given up: they return at once and hand out no offsets.
        offsets = heap._waits.barrier(control.pack_call(phase=control.PHASE_START), (), fault=False)
        findings.equal("offsets", offsets.tolist(), [[-1] * control.NUM_PUBLISHED] * num_ranks)
        findings.equal("error of a lease", outcome(heap.lease, (1,), torch.uint8)[0], "HeapPoisoned")
    dist.barrier()
    if rank == missing:  # finds that its peers have given it up
        name, text = outcome(reduce, lambda plan, name: calls[name](plan), list(calls)[first:], plan)
        exact = f"rank 0 gave up: {wanted}timeout_s={timeout_s}: expected epoch"
        findings.check(name == "PeerAborted" and text.startswith(exact), f"{name}: {text}")
    heap.close()
    findings.equal("after close", outcome(heap.check)[0], "HeapClosed")
    dist.barrier()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        findings.check(round_trip(heap), "a new heap does not work")
    return findings.texts


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("make_plan", "plan: counts"),
        ("dispatch_tokens", "dispatch: ready"),
        ("combine_tokens", "combine: ready"),
    ],
)
def test_a_peer_that_does_not_come(cluster, num_ranks: int, call: str, phase: str):
    assert cluster(num_ranks).run(leave_out, call, phase) == [[]] * num_ranks


def run_ahead(rank: int, num_ranks: int) -> list[str]:
    """One rank fails a call whose barriers, and those of the next calls, its peers have launched without a look at
    the status, as the hosts of GPUs do: the fault is raised once, and all go on from the same epoch."""
    findings = Findings()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=PROMPT_S) as heap:
        for turn in range(4 * num_ranks):
            findings.where = f"rank {rank} of {num_ranks}, turn {turn}"
            if rank == turn % num_ranks:
                found = outcome(heap.fail, ArgumentError(f"turn {turn}"), control.PHASE_DISPATCH_READY)
                findings.equal("error", found, ("ArgumentError", f"turn {turn}"))
            else:
                phases = [control.PHASE_DISPATCH_READY, control.PHASE_DISPATCH_DONE, control.PHASE_COMBINE_READY]
                for phase in phases[: 1 + turn % 3]:
                    words = heap._waits.barrier(control.pack_call(phase=phase), (512,), fault=False)
                    findings.check(bool((words == -1).all()), f"offsets in a failed call: {words.tolist()}")
                culprit = turn % num_ranks
                findings.equal("error", outcome(heap.check), ("ArgumentError", f"on rank {culprit}: turn {turn}"))
            findings.equal("error afterwards", outcome(heap.check), ("", ""))
            if turn % 2:
                findings.check(round_trip(heap, turn), "the next correct call is wrong")
    return findings.texts


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_fault_stops_what_is_on_its_way(cluster, num_ranks: int):
    assert cluster(num_ranks).run(run_ahead) == [[]] * num_ranks


def fail_in_dispatch(rank: int, num_ranks: int) -> list[str]:
    """The last rank gives up between its rows and their arrival; what the others have of the call then."""
    findings = Findings()
    last = rank == num_ranks - 1
    for way in ("dispatch_tokens", "gradient", "beside GEMMs"):
        findings.where = f"{way}, rank {rank} of {num_ranks}"
        heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0)
        x, probs = torch.ones(5, 8, dtype=torch.bfloat16), torch.rand(5, 2)
        ids = (torch.arange(5)[:, None] + torch.tensor([0, 1])) % num_ranks
        plan = make_plan(ids, num_experts=num_ranks, heap=heap)
        buffers = [heap.lease((plan.row_capacity, 8), torch.bfloat16) for _ in range(3)]
        below, out, above = (lease.tensor.fill_(7) for lease in buffers)
        dist.barrier()
        if last:
            heap.barrier = _gives_up(heap, control.PHASE_DISPATCH_DONE)
            heap.send_signal = partial(_aborts_when_all_have_sent, heap)
        try:
            if way == "dispatch_tokens":
                dispatch_tokens(x, plan, probs=probs, out=out)
            elif way == "gradient":
                plan.packed_to_row = torch.zeros(plan.packed_row_capacity, 2, dtype=torch.int32)
                plan.row_to_packed_row = torch.zeros(plan.row_capacity, dtype=torch.int32)
                with dispatch(x, plan, out, layout="expert-major", gradients=0):
                    pass
            else:
                with dispatch(x, plan, out, probs, layout="expert-major", division=Division(1, 1)) as arrival:
                    for _ in arrival.parts:
                        pass
        except (PeerAborted, HeapPoisoned):
            # Where rows travel one rank at a time, some of the last rank's may come after the failure: right ones.
            spoiled = out.isnan() | ((out == 1) if way == "beside GEMMs" else False)
            fine = bool(spoiled.all() and out.isnan().any())
            findings.check(fine or last, f"rows of a failed call: {out.tolist()}")
            findings.check(bool((below == 7).all() and (above == 7).all()), "a neighbour was overwritten")
        else:
            findings.check(last, "nothing was raised")
        dist.barrier()
        heap.close()
    return findings.texts


def _aborts_when_all_have_sent(heap: SymmetricHeap, peer: int) -> None:
    shape = heap.num_ranks, control.SIGNAL_WORDS
    signals = heap.peers.region(heap.rank, heap.peers.layout.signals, shape, torch.int64)[: heap.rank, 0]
    while bool((signals != heap.epoch).any()):
        time.sleep(0.01)
    heap.abort("on purpose")


def _gives_up(heap: SymmetricHeap, at: int):
    barrier = heap.barrier

    def gives_up(phase: int, **kwargs):
        if phase == at:
            wait_for_arrivals(heap, range(heap.rank))  # they have sent their rows
            heap.abort("on purpose")
            heap.check()
        return barrier(phase, **kwargs)

    return gives_up


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_of_a_failed_dispatch_are_nan(cluster, num_ranks: int):
    assert cluster(num_ranks).run(fail_in_dispatch) == [[]] * num_ranks


def fail_after_a_signal(rank: int, num_ranks: int) -> list[str]:
    """An exception while the last rank copies a peer's rows: it has sent all its own, and none of them twice."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    ids = (torch.arange(5)[:, None] + torch.tensor([0, num_ranks])) % (2 * num_ranks)
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0) as heap:
        plan, sent = make_plan(ids, num_experts=2 * num_ranks, heap=heap), []
        out = heap.lease((plan.row_capacity, 8), torch.bfloat16).tensor.fill_(7)
        send_signal = heap.send_signal
        heap.send_signal = lambda peer: (sent.append(peer), send_signal(peer))

        def fails(name: str, kernel, /, *args, **options) -> object:
            if name == "fan_out" and rank == num_ranks - 1 and options["source"] != rank:
                raise ZeroDivisionError("a bug of ours")
            return kernel(*args, **options)

        with (
            kernels.hooked(heap.device, fails),
            contextlib.suppress(ZeroDivisionError) if rank == num_ranks - 1 else contextlib.nullcontext(),
            dispatch(
                torch.ones(5, 8, dtype=torch.bfloat16),
                plan,
                out,
                torch.rand(5, 2),
                layout="expert-major",
                division=Division(1, 1),
            ) as arrival,
        ):
            for _ in arrival.parts:
                pass
        findings.equal("peers that were sent to", sent, [(rank + step) % num_ranks for step in range(1, num_ranks)])
        findings.check(rank == num_ranks - 1 or bool((out[: plan.num_rows] == 1).all()), f"rows: {out.tolist()}")
        findings.check(round_trip(heap), "the next correct call is wrong")
    return findings.texts


def test_rows_are_sent_once_when_the_trip_fails(cluster):
    assert cluster(3).run(fail_after_a_signal) == [[]] * 3


def leave_rows(rank: int, num_ranks: int, how: str) -> list[str]:
    """What is left of the tokens in an arena that somebody has kept mapped when its rank has closed it."""
    findings = Findings()
    findings.where = f"{how}, rank {rank} of {num_ranks}"
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=60.0)
    assert round_trip(heap)
    lease = heap.lease((1000, 8), torch.float32)
    lease.tensor.fill_(3.0)
    arenas = [heap._backend.arena_tensor(peer) for peer in range(num_ranks)]
    dist.barrier()
    findings.check(all(bool(arena[heap._layout.num_bytes :].any()) for arena in arenas), "nothing to be zeroed")
    dist.barrier()
    if how == "close":
        heap.close()
    else:
        with contextlib.suppress(ZeroDivisionError), heap:
            raise ZeroDivisionError
    dist.barrier()
    for peer, arena in enumerate(arenas):
        # The peers write into the control block that they give up.
        findings.check(not arena[heap._layout.num_bytes :].any(), f"rank {peer}'s arena holds something")
    dist.barrier()
    return findings.texts


@pytest.mark.parametrize("how", ["close", "exception"])
def test_nothing_of_the_tokens_is_left(cluster, how: str):
    assert cluster(2).run(leave_rows, how) == [[]] * 2


def stay_away_from_construction(rank: int, num_ranks: int, folder: str, how: str) -> None:
    """Rank 0 does, until the others have found out."""
    found = [Path(folder, str(survivor)) for survivor in range(1, num_ranks)]
    if rank == 0:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        _until_there(found)
        os._exit(3)
    start, bound_s = time.monotonic(), 1.0 if how == "late" else HANG_S
    try:
        SymmetricHeap(num_bytes=NUM_BYTES, backend="host", start_timeout_s=bound_s)
    except PeerError as error:
        facts = {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    facts["took_s"] = time.monotonic() - start
    written = Path(folder, f"{rank}.partial")
    written.write_text(json.dumps(facts))
    written.rename(found[rank - 1])
    _until_there(found)
    os._exit(7)  # the process group is broken


def _until_there(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.02)


@pytest.mark.parametrize(("how", "num_ranks"), [("killed", 3), ("late", 2)])
def test_construction_does_not_wait_for_ever(tmp_path: Path, how: str, num_ranks: int):
    ranks = Cluster(num_ranks)
    try:
        with pytest.raises(RankFailure, match="died with exit code"):
            ranks.run(stay_away_from_construction, str(tmp_path), how)
    finally:
        ranks.close()
    found = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in range(1, num_ranks)}
    assert 0 in [facts["rank"] for facts in found.values()]
    for rank, facts in found.items():
        # gloo takes leave of all ranks when it has lost one: a survivor may be as lost as the one that was killed.
        assert facts["rank"] == 0 or (how == "killed" and facts["rank"] == 3 - rank)
        if how == "late":
            assert facts["error"] == PeerTimeout.__name__
            assert facts["text"].startswith("rank 0 did not reach 'start-up' within start_timeout_s=1")
            assert 0.9 < facts["took_s"] < PROMPT_S
        else:
            assert facts["error"] == PeerLost.__name__
            assert facts["took_s"] < PROMPT_S  # and not start_timeout_s


def without_bound(rank: int, num_ranks: int) -> bool:
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=float("inf")) as heap:
        if rank:
            time.sleep(0.2)
        return round_trip(heap)


def test_waits_may_have_no_bound(cluster):
    assert cluster(2).run(without_bound) == [True, True]


# -- NVSHMEM, as far as it can be tested without it -------------------------------------------------------------------


def test_files_of_nvshmem_are_for_this_user_only(tmp_path: Path):
    """Its shared memory asks for mode 0777, see nvshmem_backend.py; and the umask is as before afterwards."""
    before = os.umask(0o022)
    try:
        with nvshmem_backend._files_of_this_user():
            os.close(os.open(tmp_path / "segment", os.O_CREAT | os.O_RDWR, 0o777))
        with contextlib.suppress(ZeroDivisionError), nvshmem_backend._files_of_this_user():
            raise ZeroDivisionError
        os.close(os.open(tmp_path / "afterwards", os.O_CREAT | os.O_RDWR, 0o777))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("segment", "afterwards")]
    assert modes == [0o700, 0o755]


class FakeNvshmem:
    """Stands for the NVSHMEM packages in a group of one. Its arena is memory of this process; it notes what happens to
    it, and the umask and the environment that its calls see."""

    def __init__(self, num_bytes: int = 5000) -> None:
        self.umasks, self.environment, self.calls = {}, {}, []
        self.is_initialized, self.has_peer_access, self.num_machines = False, True, 1
        self.memory = (ctypes.c_uint8 * num_bytes)()
        self.address = ctypes.addressof(self.memory)
        self.any_byte_when_freed: bool | None = None

    def note(self, call: str) -> None:
        os.umask(old := os.umask(0))
        self.umasks[call] = old
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


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvshmem:
    """A fake, which starts as the real one does, where the NVSHMEM packages are imported, the CPU for the GPU."""
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
    monkeypatch.setattr(nvshmem_backend.NvshmemBackend, "_check_peers", lambda self, bootstrap: fake.num_machines)
    monkeypatch.setattr(nvshmem_backend, "_DL_CUDA", 1)  # DLPack's number of the CPU
    cpu = torch.device("cpu", 0)
    monkeypatch.setattr(nvshmem_backend, "AddressRange", lambda start, num_bytes, device: ranges(start, num_bytes, cpu))
    names = nvshmem_backend._ENVIRONMENT | nvshmem_backend._ON_ONE_MACHINE
    for name in (*names, "NVSHMEM_SYMMETRIC_SIZE"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    return fake


def test_nvshmem_starts_privately_on_loopback(fake: FakeNvshmem):
    """Up to its first allocation; there the fake one fails, like one without peer access."""
    fake.has_peer_access = False
    before = os.umask(0o022)
    try:
        with pytest.raises(BackendUnavailable, match="no direct address for ranks"):
            nvshmem_backend.NvshmemBackend(Bootstrap(None), len(fake.memory))
    finally:
        after = os.umask(before)
    assert after == 0o022
    assert fake.umasks == {"init": 0o077, "malloc": 0o077}
    assert fake.environment["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "lo"
    assert fake.environment["NVSHMEM_DISABLE_MNNVL"] == "1"
    assert fake.calls == []  # finalize is collective


def test_nvshmem_between_machines(fake: FakeNvshmem):
    """It must neither stay on loopback nor leave out the links between machines."""
    fake.has_peer_access, fake.num_machines = False, 2
    with pytest.raises(
        BackendUnavailable, match=r"ranks \[0\]: peer access is needed, here between 2 machines of one NVL"
    ):
        nvshmem_backend.NvshmemBackend(Bootstrap(None), len(fake.memory))
    assert fake.environment["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert not {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_DISABLE_MNNVL"} & fake.environment.keys()


def test_what_keeps_nvshmem_from_starting(fake: FakeNvshmem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 80 << 30))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert nvshmem_backend.preflight(1 << 20) == ""
    assert (
        nvshmem_backend.preflight(4 << 20) == "num_bytes (4194304) is more than the GPU's free memory (1048576 bytes)"
    )
    fake.is_initialized = True
    assert nvshmem_backend.preflight(1 << 20).startswith("NVSHMEM is in use in this process: by an open heap")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nvshmem_backend.preflight(1 << 20).startswith("the package nvshmem4py-cu13 is not installed: pip install")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvshmem_backend.preflight(1 << 20) == "no CUDA device is visible to torch"


def meet_on_gpus(rank: int, num_ranks: int) -> tuple[list[tuple[str, str]], list[int]]:
    """What a heap checks of the GPUs of two ranks, on GPUs that are made up; the numbers of machines that it finds."""
    found, num_machines, find = [], [], nvshmem_backend.find_place
    for gpus, reach, machines in (("00", True, 1), ("01", False, 1), ("01", True, 1), ("01", False, 2)):
        place = Place(b"another machine") if machines == 2 and rank else find(None)
        backend = object.__new__(nvshmem_backend.NvshmemBackend)
        backend.device = torch.device("cuda", int(gpus[rank]))
        gpu = types.SimpleNamespace(uuid=f"GPU-{gpus[rank]}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
            patch.setattr(torch.cuda, "can_device_access_peer", lambda here, there, reach=reach: reach)
            patch.setattr(nvshmem_backend, "find_place", lambda gpu, place=place: place)
            check = backend._check_peers
            found.append(outcome(lambda check=check: num_machines.append(check(Bootstrap(None)))))
    return found, num_machines


def test_gpus_of_two_ranks(cluster):
    for found, num_machines in cluster(2).run(meet_on_gpus):
        assert num_machines == [1, 2]
        assert [name for name, _ in found] == ["BackendUnavailable"] * 2 + ["", ""]
        assert found[0][1].startswith("on rank 0: two ranks of the group use the same GPU: set torch.cuda.set_device(")
        assert found[1][1] == "on rank 0: GPU 0 cannot address GPUs [1]"


@pytest.mark.parametrize("how", ["close", "abandon"])
def test_the_arena_of_nvshmem_is_zeroed_before_it_is_freed(fake: FakeNvshmem, monkeypatch, how: str):
    waits = []
    monkeypatch.setattr(nvshmem_backend.torch.cuda, "synchronize", lambda device: waits.append(list(fake.calls)))
    backend = nvshmem_backend.NvshmemBackend(Bootstrap(None), 5000)
    arena = backend.arena_tensor(0)
    assert (arena.device, arena.shape) == (torch.device("cpu"), (5000,))
    arena.fill_(7)
    assert bytes(fake.memory) == b"\7" * 5000  # no copy
    getattr(backend, how)()
    if how == "close":
        assert fake.calls == ["free", "finalize"]
        assert waits == [[]]  # zeroing is over when it is freed
        assert fake.any_byte_when_freed is False
    else:
        assert (fake.calls, bytes(fake.memory)) == ([], b"\7" * 5000)


def share_one_gpu(rank: int, num_ranks: int) -> tuple[str, str]:
    torch.cuda.set_device(0)
    found = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="nvshmem")
    torch.cuda.set_device(rank)
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="nvshmem") as heap:
        assert round_trip(heap)
    return found


@pytest.mark.gpu
def test_two_ranks_on_one_gpu(cluster):
    for name, text in cluster(2, "cuda").run(share_one_gpu):
        assert (name, "two ranks of the group use the same GPU" in text) == ("BackendUnavailable", True)
