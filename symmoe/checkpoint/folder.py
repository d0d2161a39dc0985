"""The directory of a job's checkpoints: what is in it at any moment, and the order in which that changes.

    step-00000020/                  a complete checkpoint; it got this name when all of it was on disk
    latest                          name and manifest's sha256 of the newest one
    .step-00000040.1f2e3d4c.tmp/    a save that is running or was killed, or a checkpoint that is being deleted
    step-00000020.replaced/         the older checkpoint of a step that was saved twice, until the newer one is in place
    .lock                           the lock of the job that saves at this moment

Only rank 0 locks, makes and renames; every rank writes its own files into the temporary directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from symmoe.checkpoint.files import read, reading, sync, write
from symmoe.checkpoint.lock import locked
from symmoe.checkpoint.manifest import MANIFEST, SEAL, Manifest, parse, read_sealed, seal_of
from symmoe.errors import ArgumentError, CheckpointError

_LOG = logging.getLogger(__name__)
_LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8})(\.replaced)?")
_POINTER = re.compile(r"(step-\d{8}) ([0-9a-f]{64})\n")
_TEMPORARY = re.compile(r"\.(step-\d{8}|latest)\.[0-9a-f]{8}\.tmp")
_POINTER_BYTES = 79
_BUFFER_BYTES = 16 << 20


def path_of(directory: Any) -> Path:
    """A caller's `directory` as a path.

    Raises:
        ArgumentError: it is no path.
    """
    try:
        return Path(directory)
    except TypeError:
        raise ArgumentError(f"directory is {directory!r}; it must be a path") from None


def new_token() -> str:
    """A token that makes the temporary names of one save unique: a rank of an older save cannot write into them."""
    return secrets.token_hex(4)


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary(directory: Path, step: int, token: str) -> Path:
    """The directory that a save writes into."""
    return directory / f".{name_of(step)}.{token}.tmp"


@contextlib.contextmanager
def saving(directory: Path, step: int, token: str) -> Iterator[None]:
    """Locks the directory and makes a temporary one to write into. At the end deletes it, unless it was published.

    Raises:
        CheckpointError: another job is saving to it.
    """
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        sync(directory.parent)
    with locked(directory):
        try:
            prepare(directory, step, token)
            yield
        finally:
            for path in (temporary(directory, step, token), _pointer(directory, token)):
                with contextlib.suppress(OSError):
                    _delete(path)


def prepare(directory: Path, step: int, token: str) -> None:
    """Deletes what killed saves have left, and makes the temporary directory of a save."""
    for path in list(directory.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            _delete(path)
        elif path.name.endswith(".replaced") and _COMPLETE.fullmatch(path.name):
            place = path.with_suffix("")
            if place.exists():
                _remove(path)
            else:  # the save that should replace it did not finish
                path.rename(place)
    sync(directory)
    temporary(directory, step, token).mkdir(mode=0o700)


def publish(directory: Path, step: int, token: str, manifest: bytes) -> None:
    """Writes the manifest, gives the temporary directory its final name, and writes that to `latest`. The ranks' files
    must be on disk."""
    unfinished, place = temporary(directory, step, token), directory / name_of(step)
    write(unfinished / MANIFEST, manifest)
    write(unfinished / SEAL, seal_of(manifest))
    sync(unfinished)
    replaced = place.with_name(place.name + ".replaced")
    if place.exists():
        place.rename(replaced)
    unfinished.rename(place)
    sync(directory)
    pointer = _pointer(directory, token)
    write(pointer, f"{place.name} {hashlib.sha256(manifest).hexdigest()}\n".encode())
    pointer.rename(directory / _LATEST)
    sync(directory)
    if replaced.exists():
        _remove(replaced)


def prune(directory: Path, step: int, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints up to `step`. Those of later steps stay."""
    older = sorted((path for path, of in _complete(directory) if of < step), reverse=True)
    for path in older[keep_last - 1 :]:
        _remove(path)


def find(directory: Path, step: int | None) -> tuple[Path, str, Manifest]:
    """The checkpoint of a step, or the newest: its directory, its manifest's sha256, and the manifest.

    The newest is the one that `latest` names. If that is missing, torn or no plain file, or its checkpoint has been
    deleted, it is the complete one of the highest step, and a warning is logged.

    Raises:
        CheckpointError: there is none, or its manifest is not what was written.
    """
    there = {path.name: of for path, of in _complete(directory)}
    if step is not None:
        for name in (name_of(step), name_of(step) + ".replaced"):
            if name in there:
                return directory / name, *open_(directory / name)
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has steps {sorted(there.values())}")
    path = directory / _LATEST
    try:
        match = _POINTER.fullmatch(read(path, _POINTER_BYTES).decode(errors="replace"))
    except CheckpointError as problem:
        reason = str(problem)
    else:
        if match is None:
            reason = f"{path} is torn"
        elif match[1] not in there:
            reason = f"{path} names {match[1]}, which is not there"
        else:
            data = read_sealed(directory / match[1])
            if hashlib.sha256(data).hexdigest() == match[2]:
                return directory / match[1], match[2], _parse(directory / match[1], data)
            reason = f"{path} names {match[1]} with the sha256 of another manifest"
    for name in sorted(there, key=lambda name: (-there[name], name)):
        try:
            digest, manifest = open_(directory / name)
            check_sizes(directory / name, manifest)
        except CheckpointError as problem:
            _LOG.warning("%s is passed over: %s", directory / name, problem)
            continue
        _LOG.warning("%s; taking %s, the newest complete checkpoint", reason, name)
        return directory / name, digest, manifest
    raise CheckpointError(f"{directory} has no complete checkpoint; {reason}")


def open_(checkpoint: Path) -> tuple[str, Manifest]:
    """Sha256 and content of a checkpoint's manifest.

    Raises:
        CheckpointError: it is not what was written, or is the manifest of another step.
    """
    data = read_sealed(checkpoint)
    return hashlib.sha256(data).hexdigest(), _parse(checkpoint, data)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Checks that every file of a checkpoint exists, is a plain file, and has its size.

    Raises:
        CheckpointError: one does not. The text names it.
    """
    for name, file in manifest.files.items():
        try:
            status = os.lstat(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{folder / name} is no plain file")
        if status.st_size != file.bytes:
            raise CheckpointError(f"{folder / name} has {status.st_size} bytes; {MANIFEST} says {file.bytes}")


def check_content(path: Path, sha256: str) -> None:
    """Checks that a file has the content that was written.

    Raises:
        CheckpointError: it has another content, or cannot be read.
    """
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER_BYTES)
    with reading(path) as file:
        while length := file.readinto(buffer):
            digest.update(memoryview(buffer)[:length])
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} has been changed: its sha256 is {digest.hexdigest()}, {MANIFEST} says {sha256}")


def _complete(directory: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = list(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    for path in entries:
        match = _COMPLETE.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, int(match[1])


def _parse(checkpoint: Path, data: bytes) -> Manifest:
    manifest, match = parse(data, checkpoint / MANIFEST), _COMPLETE.fullmatch(checkpoint.name)
    if match is None or manifest.step != int(match[1]):
        raise CheckpointError(f"{checkpoint / MANIFEST}: step is {manifest.step}, not that of {checkpoint.name}")
    return manifest


def _pointer(directory: Path, token: str) -> Path:
    """The temporary file that is renamed to `latest`."""
    return directory / f".{_LATEST}.{token}.tmp"


def _remove(path: Path) -> None:
    """Deletes a checkpoint so that a part of it is never taken for a whole one."""
    unnamed = path.with_name(f".{path.name.removesuffix('.replaced')}.{new_token()}.tmp")
    path.rename(unnamed)
    _delete(unnamed)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
