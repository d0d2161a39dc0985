"""Construction and end of heaps: wrong arguments, missing capabilities of a rank, and remains in shared memory."""

import errno
import gc
import math
import os
import re
import stat
import time
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import outcome, round_trip
from limits import PROMPT_S
from shared_memory import left_in_shared_memory
from worker import Findings

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.errors import HeapClosed
from symmoe.kernels import control
from symmoe.symm_mem import faults, host_backend, shared_heap

NUM_BYTES = 1 << 20


def test_the_repr_of_a_heap_shows_its_state():
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    capacity = NUM_BYTES - control.ControlLayout(1).num_bytes
    lease = heap.lease((100,), torch.float32)
    assert (
        repr(heap)
        == f"SymmetricHeap(rank 0 of 1, host backend on cpu, 512 of {capacity} bytes leased, open)"
    )
    lease.release()
    heap.abort("a test")
    assert repr(heap).endswith("0 of 1036288 bytes leased, poisoned: this rank gave up: a test)")
    heap.close()
    assert repr(heap) == repr(SymmetricHeap.__new__(SymmetricHeap)) == "SymmetricHeap(closed)"


def test_an_abort_with_a_broken_gpu_raises_no_further_error(monkeypatch: pytest.MonkeyPatch):
    """After an error of CUDA every call of CUDA raises; the abort raises no further error, and closes the heap."""

    def broken(device: torch.device) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(faults, "capture_id", broken)
    with (
        pytest.raises(ZeroDivisionError),
        SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap,
    ):
        raise ZeroDivisionError
    with pytest.raises(HeapClosed):
        heap.lease((1,), torch.float32)


MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 6000 kB\n"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "1:cpu:/a\n"}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "5\n"}, 6000 << 10),
        ({"proc/meminfo": MEMINFO, "a/memory.max": "5000\n", "a/memory.current": "1000\n"}, 4000),
        (
            {
                "a/memory.max": "5000",
                "a/memory.current": "1000",
                "a/b/memory.max": "7",
                "a/b/memory.current": "8",
            },
            0,
        ),
    ],
)
def test_available_memory_respects_control_groups(
    tmp_path: Path, files: dict[str, str], want: int | None
):
    for name, text in ({"proc/self/cgroup": "0::/a/b\n"} | files).items():
        path = tmp_path / ("" if name.startswith("proc") else "sys/fs/cgroup") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_backend.available_bytes(tmp_path) == want


@run_on(2)
def test_arenas_larger_than_the_machine_warn_once(rank: int, num_ranks: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SymmetricHeap(num_bytes=1 << 44, backend="host") as heap:
            assert round_trip(heap)
        with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
            assert round_trip(heap)
    assert len(caught) == (rank == 0)
    for warning in caught:
        assert warning.filename == __file__
        assert re.fullmatch(
            r"num_bytes \(17592186044416\) times 2 ranks on this machine is more than .* \(\d+ bytes\): .*",
            str(warning.message),
        )


def test_a_group_of_one_needs_no_process_group_and_auto_reports_its_choice():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: with one, auto picks nvshmem")
    with SymmetricHeap(num_bytes=NUM_BYTES) as heap:
        assert (heap.rank, heap.num_ranks, heap.device, heap.backend) == (
            0,
            1,
            torch.device("cpu"),
            "host",
        )
        assert heap.backend_reason == "auto: torch sees no CUDA device"
        assert round_trip(heap)
    assert not dist.is_initialized()


def test_ranks_without_a_process_group_are_warned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2.*init_process_group") as warned:
        SymmetricHeap(num_bytes=1 << 20, backend="host").close()
    assert warned[0].filename == __file__
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():  # (its arguments are Python 3.11's)
        warnings.simplefilter("error")
        SymmetricHeap(num_bytes=1 << 20, backend="host").close()


def test_calls_after_close_are_refused():
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    lease = heap.lease((4,), torch.float32)
    plan = make_plan(torch.zeros(1, 1, dtype=torch.int64), num_experts=1, heap=heap)
    x = torch.ones(1, 8)
    *_, handle = dispatch_tokens(x, plan)
    heap.close()
    heap.close()
    assert not heap.owns(lease.tensor)
    for use in (
        lambda: heap.lease((4,), torch.float32),
        lambda: heap.barrier(control.PHASE_START),
        lambda: make_plan(torch.zeros(1, 1, dtype=torch.int64), num_experts=1, heap=heap),
        lambda: dispatch_tokens(x, plan),
        lambda: combine_tokens(x, handle),
        heap.check,
    ):
        with pytest.raises(HeapClosed, match="has been closed"):
            use()
    lease.release()  # giving back to a closed heap is no error


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
    (
        "timeout_s",
        9.3e9,
        "ArgumentError",
        ("timeout_s (9300000000.0)", "at most 1e+09 s or math.inf"),
    ),
    ("timeout_s", True, "ArgumentError", ("timeout_s (True)",)),
    ("timeout_s", float("nan"), "ArgumentError", ("timeout_s (nan)", "greater than 0")),
    ("timeout_s", "soon", "ArgumentError", ("timeout_s ('soon')",)),
    ("start_timeout_s", 1e300, "ArgumentError", ("start_timeout_s (1e+300)", "math.inf")),
    ("start_timeout_s", -1.0, "ArgumentError", ("start_timeout_s (-1.0)",)),
    ("ranks_per_node", 0, "ArgumentError", ("ranks_per_node (0)",)),
    ("ranks_per_node", True, "ArgumentError", ("ranks_per_node (True)",)),
    ("ranks_per_node", 2.0, "ArgumentError", ("ranks_per_node (2.0)",)),
    ("backend", "nvshmem", "BackendUnavailable", ("no CUDA device",)),
    ("num_bytes", NUM_BYTES + 4096, "ConfigMismatch", ()),
    ("timeout_s", 7.5, "ConfigMismatch", ()),
)


@run_on(1, 2, 3)
def test_bad_construction_fails_on_every_rank(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Every wrong argument on every rank and on all: the same error everywhere; then a heap must work."""
    for culprits in [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1):
        for name, value, error, parts in BAD:
            if (error == "ConfigMismatch" and len(culprits) == num_ranks) or (
                value == "nvshmem" and torch.cuda.is_available()
            ):
                continue
            findings.where = f"{name}={value!r} on {culprits}, rank {rank} of {num_ranks}"
            name_of_error, text = outcome(
                SymmetricHeap, **{**GOOD, **({name: value} if rank in culprits else {})}
            )
            findings.equal("error", name_of_error, error)
            if error == "ConfigMismatch":
                values = [value if r in culprits else GOOD[name] for r in range(num_ranks)]
                findings.equal("text", text, f"{name} differs between ranks: {values}")
            else:
                findings.check(f"on rank {culprits[0]}: " in text, text)
                findings.check(all(part in text for part in parts), text)
        with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
            findings.check(round_trip(heap), "a heap does not work afterwards")


def fails(number: int, *places: str) -> Callable[..., object]:
    """A function of `os` that raises for these paths, or for all."""

    def failing(
        original: Callable[..., object], path: object = "", *args: object, **kwargs: object
    ) -> object:
        if places and not str(path).startswith(places):
            return original(path, *args, **kwargs)
        raise OSError(number, os.strerror(number), path)

    return failing


def another_namespace(
    original: Callable[..., object], path: object, *args: object, **kwargs: object
) -> object:
    return (
        types.SimpleNamespace(st_ino=12345)
        if path == "/proc/self/ns/pid"
        else original(path, *args, **kwargs)
    )


# (function of `os` on rank 1, its replacement, the rank that is named, parts of the text)
LACKS: tuple[tuple[str, Callable[..., object], int, tuple[str, ...]], ...] = (
    (
        "stat",
        fails(errno.ENOENT, "/proc"),
        1,
        ("cannot make an arena of 1048576 bytes", "/proc/self/ns/pid"),
    ),
    (
        "memfd_create",
        fails(errno.EPERM),
        1,
        ("cannot make an arena of 1048576 bytes", "Operation not permitted"),
    ),
    ("stat", another_namespace, 0, ("pid namespace 12345", "one container")),
    ("geteuid", lambda original: original() + 1, 0, ("rank 1 runs as user", "as one user")),
    ("open", fails(errno.ENOENT, "/proc"), 1, ("cannot open the arena of rank 0",)),
)


@run_on(3)
def test_a_missing_capability_of_one_rank_fails_on_every_rank(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """A rank on a machine that lacks something, or on another machine than its peers."""
    for name, stand_in, culprit, parts in LACKS:
        findings.where = f"{name}: {parts[0]}, rank {rank}"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(host_backend.os, name, partial(stand_in, getattr(os, name)))
            actual, text = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="host")
        findings.equal("error", actual, "BackendUnavailable")
        findings.check(
            text.startswith(f"on rank {culprit}: ") and all(part in text for part in parts), text
        )
    findings.where = f"rank {rank}"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so many bytes
        actual, text = outcome(SymmetricHeap, num_bytes=1 << 62, backend="host")
        findings.equal(
            "error", (actual, f"arenas of {1 << 62} bytes" in text), ("BackendUnavailable", True)
        )
        if rank == 1:
            patch.setattr(host_backend, "preflight", lambda: [][0])  # an error that is not symmoe's
        actual, text = outcome(SymmetricHeap, num_bytes=NUM_BYTES, backend="host")
        findings.check(text.startswith("on rank 1: IndexError: list index"), text)
        findings.equal("error", actual, "BackendUnavailable")
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        findings.check(round_trip(heap), "a heap does not work afterwards")


@run_on(2)
def test_groups_without_this_rank_are_refused_at_once(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Groups without this rank raise here at once, and the heaps of other ranks work."""
    group = dist.new_group([0])
    over = dist.new_group([rank])
    dist.destroy_process_group(over)
    start = time.monotonic()
    if rank == 0:
        with SymmetricHeap(
            group, num_bytes=NUM_BYTES, backend="host", start_timeout_s=math.inf
        ) as heap:
            findings.check(round_trip(heap), "the heap of a group of one does not work")
        dist.destroy_process_group(group)
        return
    for wrong_group, part in (
        (group, "this rank is not in"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in"),
        (over, "group is not usable"),
        ("ep", "group ('ep') must be a torch.distributed.ProcessGroup, or None"),
    ):
        name, text = outcome(SymmetricHeap, wrong_group, num_bytes=NUM_BYTES, backend="host")
        findings.check(name == "ArgumentError" and part in text, f"{name}: {text}")
    findings.check(time.monotonic() - start < PROMPT_S, "it has waited")


@run_on(4)
def test_wrong_expert_groups_are_refused_on_every_rank(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Two EP groups. Both ranks of a group raise the error of the second rank's expert_group, and the next heap
    works."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    group = pairs[rank // 2]
    replicas = pairs[2 + rank % 2]
    ranks = dist.get_process_group_ranks(group)
    make = partial(SymmetricHeap, group, num_bytes=NUM_BYTES, backend="host")
    for wrong_group, kind, part in (
        (
            group,
            "ArgumentError",
            f"expert_group has the ranks {ranks}, group has {ranks}: this rank ({ranks[1]}), and no other",
        ),
        (
            dist.GroupMember.NON_GROUP_MEMBER,
            "ArgumentError",
            "expert_group (GroupMember.NON_GROUP_MEMBER) is one that this rank is not in",
        ),
        ("edp", "ArgumentError", "expert_group ('edp') must be a torch.distributed.ProcessGroup"),
        (None, "ConfigMismatch", "size of expert_group differs between ranks: [2, 1]"),
    ):
        name, text = outcome(make, expert_group=replicas if rank == ranks[0] else wrong_group)
        findings.check(name == kind and part in text, f"{name}: {text}")
    with make(expert_group=replicas) as heap, make() as without:
        findings.check(heap.expert_group is replicas, "another group")
        findings.equal("ranks", heap.expert_ranks, [rank % 2, rank % 2 + 2])
        findings.equal("without", (without.expert_group, without.expert_ranks), (None, [rank]))


def arena_facts(rank: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """(mode, links, owner is us) of every arena that this rank has mapped."""
    facts = []
    gc.collect()  # of earlier tests that ended in errors
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:symmoe" in line:
                start, end = line.split()[0].split("-")
                info = os.stat(f"/proc/self/map_files/{start}-{end}")
                facts.append(
                    (stat.S_IMODE(info.st_mode), info.st_nlink, int(info.st_uid == os.geteuid()))
                )
        heap.barrier(control.PHASE_START)
    return facts


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_arenas_are_private_and_have_no_name(cluster, shared_memory_before, num_ranks: int):
    for facts in cluster(num_ranks).run(arena_facts):
        assert len(facts) == num_ranks
        assert all(fact == (0o600, 0, 1) for fact in facts)
    assert not left_in_shared_memory(shared_memory_before)


@run_on(2)
def test_modules_built_apart_share_a_heap(rank: int, num_ranks: int) -> None:
    """Modules with the same group and size share a heap as long as it is open."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    first, second = (shared_heap(num_bytes=NUM_BYTES, backend="host") for _ in range(2))
    with shared_heap(alone, num_bytes=NUM_BYTES, backend="host") as single:
        assert (first is second, first.num_ranks, single.num_ranks) == (True, 2, 1)
    with first:
        assert shared_heap(num_bytes=2 * NUM_BYTES, backend="host").close() is None
    with shared_heap(num_bytes=NUM_BYTES, backend="host") as third:
        assert third is not first
