"""The directory of a job's checkpoints: what is in it at any moment, and the order in which that changes.

    step-00000020/                  a complete checkpoint; it got this name when all of it was on disk
    latest                          name and manifest's sha256 of the newest one
    .step-00000040.1f2e3d4c.tmp/    of a save that is running, or was killed, or of a checkpoint being deleted
    step-00000020.replaced/         the older checkpoint of a step that was saved twice, until the newer one is in place

Rank 0 alone makes and renames; every rank writes files of its own into the temporary directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from symmoe.checkpoint.manifest import MANIFEST, Manifest, parse, read_sealed
from symmoe.errors import CheckpointError

_LOG = logging.getLogger(__name__)
_LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8})(\.replaced)?")
_POINTER = re.compile(r"(step-\d{8}) ([0-9a-f]{64})\n")
_TEMPORARY = re.compile(r"\.(step-\d{8}|latest)\.[0-9a-f]{8}\.tmp")
_POINTER_BYTES = 79
_BUFFER_BYTES = 16 << 20


def new_token() -> str:
    """What makes the temporary names of one save its own: a rank left over from another cannot write into them."""
    return secrets.token_hex(4)


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary(directory: Path, step: int, token: str) -> Path:
    """Where a save writes."""
    return directory / f".{name_of(step)}.{token}.tmp"


def prepare(directory: Path, step: int, token: str) -> None:
    """Makes the directories for a save, after what killed saves have left is cleaned away."""
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        _sync(directory.parent)
    for path in list(directory.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            _delete(path)
        elif path.name.endswith(".replaced") and _COMPLETE.fullmatch(path.name):
            place = path.with_suffix("")
            if place.exists():
                _remove(path)
            else:  # the save that was to replace it did not come that far
                path.rename(place)
    _sync(directory)
    temporary(directory, step, token).mkdir(mode=0o700)


def write(path: Path, data: bytes) -> None:
    """A new file with these bytes, on disk when this returns.

    Raises:
        OSError: it exists, or cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def publish(directory: Path, step: int, token: str) -> None:
    """Gives the temporary directory its name and makes `latest` say it. All files are on disk, and stay so."""
    unfinished, place = temporary(directory, step, token), directory / name_of(step)
    digest = hashlib.sha256((unfinished / MANIFEST).read_bytes()).hexdigest()
    _sync(unfinished)
    replaced = place.with_name(place.name + ".replaced")
    if place.exists():
        place.rename(replaced)
    unfinished.rename(place)
    _sync(directory)
    pointer = directory / f".{_LATEST}.{token}.tmp"
    write(pointer, f"{place.name} {digest}\n".encode())
    pointer.rename(directory / _LATEST)
    _sync(directory)
    if replaced.exists():
        _remove(replaced)


def prune(directory: Path, step: int, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints up to `step`. Those of later steps are not ours to judge."""
    older = sorted((path for path, of in _complete(directory) if of < step), reverse=True)
    for path in older[keep_last - 1 :]:
        _remove(path)


def abandon(directory: Path, step: int, token: str) -> None:
    """Deletes what a save that failed has written."""
    shutil.rmtree(temporary(directory, step, token), ignore_errors=True)


def find(directory: Path, step: int | None) -> tuple[Path, bytes]:
    """The checkpoint of a step, or the newest, and the bytes of its manifest.

    The newest is the one that `latest` names. If that is missing or torn, or its checkpoint has been deleted, it is the
    complete one of the highest step, and a warning is logged.

    Raises:
        CheckpointError: there is none, or its manifest is not what was written.
    """
    there = {path.name: of for path, of in _complete(directory)}
    if step is not None:
        for name in (name_of(step), name_of(step) + ".replaced"):
            if name in there:
                return directory / name, read_sealed(directory / name)
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has steps {sorted(there.values())}")
    pointer = _read_pointer(directory / _LATEST)
    if pointer is None:
        reason = "is missing or torn"
    elif pointer[0] not in there:
        reason = f"names {pointer[0]}, which is not there"
    else:
        manifest = read_sealed(directory / pointer[0])
        if hashlib.sha256(manifest).hexdigest() == pointer[1]:
            return directory / pointer[0], manifest
        reason = f"names {pointer[0]} with the sha256 of another manifest"
    for name in sorted(there, key=lambda name: (-there[name], name)):
        try:
            manifest = read_sealed(directory / name)
            check_sizes(directory / name, parse(manifest, directory / name / MANIFEST))
        except CheckpointError as problem:
            _LOG.warning("%s is passed over: %s", directory / name, problem)
            continue
        _LOG.warning("%s %s; taking %s, the newest complete checkpoint", directory / _LATEST, reason, name)
        return directory / name, manifest
    raise CheckpointError(f"{directory} has no complete checkpoint; {_LATEST} {reason}")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file of a checkpoint is there, is a plain file, and has its size.

    Raises:
        CheckpointError: one is not. The text names it.
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
    """A file has the content that was written.

    Raises:
        CheckpointError: it has not.
    """
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
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


def _read_pointer(path: Path) -> tuple[str, str] | None:
    try:
        with path.open("rb") as file:
            match = _POINTER.fullmatch(file.read(_POINTER_BYTES + 1).decode(errors="replace"))
    except OSError:
        return None
    return (match[1], match[2]) if match else None


def _remove(path: Path) -> None:
    """Deletes a checkpoint so that no half of it is ever taken for a whole one."""
    unnamed = path.with_name(f".{path.name.removesuffix('.replaced')}.{new_token()}.tmp")
    path.rename(unnamed)
    _delete(unnamed)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path) -> None:
    """What has a name in the folder now keeps it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
