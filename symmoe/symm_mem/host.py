"""The host backend: one anonymous shared-memory file per rank, mapped by every rank of the group.

A memfd has no name, so nothing is left behind however a process ends. A peer opens it through /proc/<pid>/fd, which
needs the same user and the same pid namespace.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct

import torch

from symmoe.errors import BackendUnavailable
from symmoe.symm_mem.bootstrap import Bootstrap

_TICKET = struct.Struct("<qqqqq")  # pid, file descriptor, inode, pid namespace, user


def preflight() -> str:
    """What keeps the host backend from working on this machine; "" if nothing does."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return f"the host backend needs Linux with memfd_create, this is {platform.system()}"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Plain stores stay in order on x86-64 only, and the twins' barrier relies on that.
        return f"the host backend needs x86-64, this is {platform.machine()}"
    return ""


class HostBackend:
    """Arenas in shared memory. The constructor is collective over the group."""

    def __init__(self, bootstrap: Bootstrap, num_bytes: int) -> None:
        self.device, self._rank = torch.device("cpu"), bootstrap.rank
        namespace = os.stat("/proc/self/ns/pid").st_ino
        files: list[int] = []
        try:
            problem, ticket = None, b""
            try:
                files.append(_create(num_bytes))
                inode = os.fstat(files[0]).st_ino
                ticket = _TICKET.pack(os.getpid(), files[0], inode, namespace, os.geteuid())
            except OSError as error:
                problem = BackendUnavailable(f"cannot make an arena of {num_bytes} bytes: {error}")
            bootstrap.agree(problem)
            tickets = [_TICKET.unpack(t) for t in bootstrap.all_gather_bytes(ticket, num_bytes=_TICKET.size)]
            try:
                for rank, peer in enumerate(tickets):
                    if rank != bootstrap.rank:
                        files.append(_open_peer(rank, peer, namespace))
                own, *others = files
                others.insert(bootstrap.rank, own)
                self._maps = [mmap.mmap(file, num_bytes, mmap.MAP_SHARED) for file in others]
            except BackendUnavailable as error:
                problem = error
            except OSError as error:
                problem = BackendUnavailable(f"cannot map {len(tickets)} arenas of {num_bytes} bytes: {error}")
            # Nobody closes its descriptor before every peer has opened it, and all fail together.
            bootstrap.agree(problem)
        finally:
            problem = None  # its traceback refers to this frame: a cycle that would keep the arenas mapped
            for file in files:
                os.close(file)
        self.bases = [self.arena_tensor(rank).data_ptr() for rank in range(bootstrap.num_ranks)]

    def arena_tensor(self, rank: int) -> torch.Tensor:
        """A new uint8 tensor over rank `rank`'s arena, with a version counter of its own."""
        return torch.frombuffer(self._maps[rank], dtype=torch.uint8)

    def close(self) -> None:
        """Frees this rank's arena, which reads as zeros from now on, wherever it is still mapped: nobody finds tokens
        there, and a peer that stands still holds no memory. Drops the mappings; each goes away with the last tensor
        over it. Local."""
        if self._maps:
            self._maps[self._rank].madvise(mmap.MADV_REMOVE)
        self._maps = []

    def abandon(self) -> None:
        """As :meth:`close`: nothing of this backend needs the peers."""
        self.close()


def _create(num_bytes: int) -> int:
    """A new anonymous file of `num_bytes`, readable and writable by this user alone."""
    file = os.memfd_create("symmoe", os.MFD_CLOEXEC)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file


def _open_peer(rank: int, ticket: tuple[int, ...], namespace: int) -> int:
    pid, fd, inode, peer_namespace, user = ticket
    if peer_namespace != namespace or user != os.geteuid():
        raise BackendUnavailable(
            f"rank {rank} runs as user {user} in pid namespace {peer_namespace}, this rank as user {os.geteuid()} in "
            f"{namespace}: the host backend needs all ranks on one machine, in one container, as one user"
        )
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailable(f"cannot open the arena of rank {rank} (process {pid}): {error}") from error
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise BackendUnavailable(f"process {pid} on this machine is not rank {rank}: are all ranks on one machine?")
    return opened
