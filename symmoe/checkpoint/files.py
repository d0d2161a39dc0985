"""Plain files and their lock. Other writers of a folder must not make a reader wait, or read other data."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from symmoe.errors import CheckpointError

_LOG = logging.getLogger(__name__)
_BUFFER_BYTES = 16 << 20


def read(path: Path) -> bytes:
    """All of a file. CheckpointError: it cannot be read, or is no plain file (a link, a pipe, a device)."""
    with naming(path, "read"), _open(path, os.O_RDONLY) as file:
        return file.readall()


def sha256(path: Path) -> str:
    """sha256 of a file. CheckpointError as :func:`read`."""
    digest = hashlib.sha256()
    buffer = bytearray(_BUFFER_BYTES)
    with naming(path, "read"), _open(path, os.O_RDONLY) as file:
        while length := file.readinto(buffer):
            digest.update(memoryview(buffer)[:length])
    return digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    """A new file with these bytes, on disk when this returns. CheckpointError: it exists, or cannot be written."""
    with naming(path, "written"), _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Writes the names of the folder's files to disk. CheckpointError: this failed."""
    with naming(folder, "written"):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file until the context or the process ends; the file stays. Does not wait. Logs a warning if the file
    system has no locks. CheckpointError: another process has the lock; the text names it."""
    with contextlib.ExitStack() as held:
        with naming(path, "written"):
            file = held.enter_context(_open(path, os.O_RDWR | os.O_CREAT))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.readall().decode(errors="replace") or "a process"
            raise CheckpointError(
                f"another job is saving to {path.parent}: {holder} has {path.name}. Every job needs its own directory"
            ) from None
        except OSError as error:
            _LOG.warning(
                "%s cannot be locked (%s): another job that saves there goes unnoticed",
                path,
                error.strerror,
            )
        with contextlib.suppress(OSError):  # the disk may be full
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


def _open(path: Path, flags: int) -> io.FileIO:
    file = os.open(
        path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
    )  # opening a pipe without a writer would block
    if stat.S_ISREG(os.fstat(file).st_mode):
        return open(file, "r+b", buffering=0)
    os.close(file)
    raise CheckpointError(f"{path} is no plain file")


@contextlib.contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Converts system errors to CheckpointErrors with the path, which system errors may lack."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {what}: {error.strerror}") from error
