"""A lock, so that one job at a time saves to a directory. It ends with the process that has it, even if that dies."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from symmoe.checkpoint.files import naming, read
from symmoe.errors import CheckpointError

LOCK = ".lock"
_LOG = logging.getLogger(__name__)
_MAX_BYTES = 512


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of this directory until the end of the context. Local; does not wait.

    Where the file system has no locks, a warning is logged, and nothing is locked.

    Raises:
        CheckpointError: another process has it. The text says which.
    """
    path = directory / LOCK
    with naming(path):
        file = _take(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # in this order: nobody locks a file that is about to be deleted
            path.unlink()
        os.close(file)


def _take(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        file = os.open(path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise CheckpointError(f"{path} is no plain file")
            _lock(file, path)
            if _is(path, file):
                with contextlib.suppress(OSError):  # a full disk is not full for this one
                    os.ftruncate(file, 0)
                    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode()[:_MAX_BYTES])
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the process that had it has deleted it since it was opened


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another job is saving to {path.parent}: {_holder(path)} has {path.name}. Every job needs a directory of "
            "its own"
        ) from None
    except OSError as error:
        _LOG.warning("%s cannot be locked (%s): another job that saves there goes unnoticed", path, error.strerror)


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(CheckpointError):
        if text := read(path, _MAX_BYTES).decode(errors="replace"):
            return text
    return "a process"
