"""Plain files of a checkpoint. Others who can write to its folder must not make a reader wait, or read other data."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from symmoe.errors import CheckpointError

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer would be waited for


@contextlib.contextmanager
def reading(path: Path) -> Iterator[io.FileIO]:
    """The file, opened to read; errors of reading name it, too.

    Raises:
        CheckpointError: it cannot be read, or is no plain file: a link, a pipe, a device.
    """
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is no plain file")
        with open(os.open(path, os.O_RDONLY | _FLAGS), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # another file has this name now
                raise CheckpointError(f"{path} is no plain file")
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read(path: Path, max_bytes: int) -> bytes:
    """All of a file.

    Raises:
        CheckpointError: as in :func:`reading`, or it is larger than `max_bytes`.
    """
    with reading(path) as file:
        data = bytearray()
        while chunk := file.read(max_bytes + 1 - len(data)):
            data += chunk
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes} bytes")
    return bytes(data)


def write(path: Path, data: bytes) -> None:
    """A new file with these bytes, on disk when this returns.

    Raises:
        CheckpointError: it exists, or cannot be written.
    """
    with naming(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)


def sync(folder: Path) -> None:
    """Writes the names of the folder's files to disk.

    Raises:
        CheckpointError: this failed.
    """
    with naming(folder):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors of writing, which do not always name it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
