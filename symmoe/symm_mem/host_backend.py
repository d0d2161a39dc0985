"""The host backend: one anonymous shared-memory file per rank, mapped by every rank, and the free memory for them.

A memfd has no name, so no file remains however a process ends. A peer opens it through /proc/<pid>/fd, which requires
the same user and the same pid namespace.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from symmoe.errors import BackendUnavailable, warn
from symmoe.nodes.topology import Topology
from symmoe.symm_mem.bootstrap import Bootstrap

_Ticket = Sequence[int]  # pid, file descriptor, inode, pid namespace, user


def preflight() -> str:
    """The reason why the host backend cannot work on this machine, or ""."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return f"the host backend needs Linux with memfd_create, this is {platform.system()}"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Only x86-64 keeps plain stores in order, and the twins' barrier relies on that.
        return f"the host backend needs x86-64, this is {platform.machine()}"
    return ""


class HostBackend:
    """Arenas in shared memory. The constructor is collective over the group.

    Attributes:
        arenas: by rank, a function that makes a new uint8 tensor over its arena, with a separate version counter.
        bases: by rank, the address of its arena in this process.
        suspend_problem: the reason why :meth:`suspend` cannot work, or "".
    """

    suspend_problem = ""

    def __init__(self, bootstrap: Bootstrap, topology: Topology, num_bytes: int) -> None:
        self.device = torch.device("cpu")
        self._rank = topology.local_rank
        files: dict[int, int] = {}
        try:
            namespace, ticket = bootstrap.attempt(
                partial(_make_arena, num_bytes, files, topology.rank)
            )
            tickets = bootstrap.gather(ticket)
            # No rank closes its descriptor before every peer has opened it, and all fail together.
            self._maps = bootstrap.attempt(
                partial(
                    _map_arenas,
                    num_bytes,
                    files,
                    tickets={rank: tickets[rank] for rank in topology.ranks},
                    namespace=namespace,
                )
            )
        finally:
            for file in files.values():
                os.close(file)
        self.arenas = [
            partial(torch.frombuffer, mapped, dtype=torch.uint8) for mapped in self._maps
        ]
        self.bases = [make().data_ptr() for make in self.arenas]

    def suspend(self) -> None:
        """Frees this rank's arena, which then reads as zeros in every process: no tokens remain, and a peer that hangs
        keeps no memory. Writes allocate memory again. Local."""
        self._maps[self._rank].madvise(mmap.MADV_REMOVE)

    def resume(self, bootstrap: Bootstrap) -> None:
        """Does nothing."""

    def close(self, *, together: bool) -> None:
        """Frees this rank's arena and drops the mappings; each ends with the last tensor over it. Local."""
        self.suspend()
        self._maps = []
        self.arenas.clear()


def _make_arena(num_bytes: int, files: dict[int, int], rank: int) -> tuple[int, _Ticket]:
    """This process's pid namespace, and the ticket by which peers find its arena. Adds the arena's file to `files`."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        files[rank] = file = os.memfd_create("symmoe", os.MFD_CLOEXEC)
        os.fchmod(file, 0o600)  # readable and writable only by this user
        os.ftruncate(file, num_bytes)
    except OSError as error:
        raise BackendUnavailable(f"cannot make an arena of {num_bytes} bytes: {error}") from error
    return namespace, (os.getpid(), file, os.fstat(file).st_ino, namespace, os.geteuid())


def _map_arenas(
    num_bytes: int, files: dict[int, int], tickets: Mapping[int, _Ticket], namespace: int
) -> list[mmap.mmap]:
    """The arenas of the ranks that have tickets, in their order. Adds the peers' files to `files`."""
    for rank, ticket in tickets.items():
        if rank not in files:  # this rank's own file is there
            files[rank] = _open_peer(rank, ticket, namespace)
    try:
        return [mmap.mmap(files[rank], num_bytes, mmap.MAP_SHARED) for rank in tickets]
    except OSError as error:
        raise BackendUnavailable(
            f"cannot map {len(tickets)} arenas of {num_bytes} bytes: {error}"
        ) from error


def _open_peer(rank: int, ticket: _Ticket, namespace: int) -> int:
    pid, fd, inode, peer_namespace, user = ticket
    if peer_namespace != namespace or user != os.geteuid():
        raise BackendUnavailable(
            f"rank {rank} runs as user {user} in pid namespace {peer_namespace}, this rank as user {os.geteuid()} in "
            f"{namespace}: the host backend needs all ranks on one machine, in one container, as one user"
        )
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailable(
            f"cannot open the arena of rank {rank} (process {pid}): {error}"
        ) from error
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise BackendUnavailable(
            f"process {pid} on this machine is not rank {rank}: are all ranks on one machine?"
        )
    return opened


def warn_if_too_large(num_bytes: int, num_ranks: int) -> None:
    """Warns if arenas in shared memory may not fit. The first write allocates a page: an arena that is too large causes
    no error, but a rank is killed in the middle of training."""
    free_bytes = available_bytes()
    if free_bytes is not None and num_bytes * num_ranks > free_bytes:
        warn(
            f"num_bytes ({num_bytes}) times {num_ranks} ranks on this machine is more than the memory that is free for "
            f"them ({free_bytes} bytes): a rank that fills its arena may be killed"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that is still available to this process's control group; None if unknown. root: of the file system."""
    lines = [line.partition(":") for line in text_of(root / "proc/meminfo").splitlines()]
    system_bytes = [
        int(value.split()[0]) << 10 for name, _, value in lines if name == "MemAvailable"
    ]
    return min([*system_bytes, *left_by_groups("memory", root)], default=None)


def left_by_groups(resource: str, root: Path = Path("/")) -> list[int]:
    """How much of "memory" (bytes) or "pids" this process's control group and its ancestors (version 2) leave, if they
    limit it. A container sees its group as the root. root: of the file system."""
    amounts = []
    top = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        group = top / line.removeprefix("0::").strip().lstrip("/")
        for folder in (group, *group.parents) if line.startswith("0::") else ():
            limit, used = (
                text_of(folder / f"{resource}.{name}").strip() for name in ("max", "current")
            )
            if limit.isdigit() and used.isdigit():  # "max" is no limit
                amounts.append(max(0, int(limit) - int(used)))
            if folder == top:
                break
    return amounts


def text_of(path: Path) -> str:
    """The text of one of the kernel's files; "" without it."""
    try:
        return path.read_text()
    except OSError:
        return ""
