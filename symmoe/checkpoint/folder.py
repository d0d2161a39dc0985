"""The directory of a job's checkpoints: its entries at any moment, and the order of changes.

    step-00000020/                  a complete checkpoint; renamed to this after all of it was on disk
    latest                          the newest one's name and manifest's sha256
    .step-00000040.1f2e3d4c.tmp/    a save that is running or was killed, or a checkpoint that is being deleted
    .latest.tmp                     the next `latest`
    step-00000020.replaced/         the older checkpoint of a step that was saved twice, until the newer one is in place
    .lock                           locked by the job that is saving

Only rank 0 locks, creates and renames; every rank writes its own files into the temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from symmoe.checkpoint.manifest import MANIFEST, SEAL, Manifest, parse, seal_of
from symmoe.errors import ArgumentError, CheckpointError

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 16 << 20
_LATEST = "latest"
_REPLACED = ".replaced"
_COMPLETE = re.compile(r"step-(\d{8})(\.replaced)?")
_TEMPORARY = re.compile(r"\.(step-\d{8}\.\w{8}|latest)\.tmp")


def path_of(directory: Any) -> Path:
    """A caller's `directory` as a path. ArgumentError: not a path."""
    try:
        return Path(directory)
    except TypeError:
        raise ArgumentError(f"directory is {directory!r}; it must be a path") from None


def name_of(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


@contextlib.contextmanager
def saving(directory: Path, step: int) -> Iterator[Path]:
    """Locks the directory, deletes remains of killed saves, and creates a temporary directory for the files. The end of
    the context deletes a temporary directory that was not published. CheckpointError: another job is saving here."""
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        sync(directory.parent)
    with locked(directory / ".lock"):
        for path in list(directory.iterdir()):
            if _TEMPORARY.fullmatch(path.name):
                _delete(path)
        for name in [name for name in _complete(directory) if name.endswith(_REPLACED)]:
            checkpoint = directory / name.removesuffix(_REPLACED)
            if checkpoint.exists():
                _remove(directory / name)
            else:  # a save was killed between its two renames
                (directory / name).rename(checkpoint)
        sync(directory)
        unfinished = _temporary(directory, name_of(step))
        try:
            yield unfinished
        finally:
            for path in (unfinished, directory / f".{_LATEST}.tmp"):
                with contextlib.suppress(OSError):
                    _delete(path)


def publish(unfinished: Path, step: int, manifest: bytes) -> None:
    """Writes the manifest, renames the temporary directory to its final name, and updates `latest`. The ranks' files
    must be on disk."""
    directory = unfinished.parent
    checkpoint = directory / name_of(step)
    pointer = directory / f".{_LATEST}.tmp"
    replaced = checkpoint.with_name(checkpoint.name + _REPLACED)
    write(unfinished / MANIFEST, manifest)
    write(unfinished / SEAL, seal_of(manifest))
    sync(unfinished)
    write(pointer, f"{checkpoint.name} {hashlib.sha256(manifest).hexdigest()}\n".encode())
    if checkpoint.exists():
        checkpoint.rename(replaced)
    unfinished.rename(checkpoint)
    sync(directory)
    pointer.rename(directory / _LATEST)
    sync(directory)
    if replaced.exists():
        _remove(replaced)


def prune(directory: Path, step: int, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints up to `step`. Later checkpoints stay."""
    older = sorted(name for name, age in _complete(directory).items() if age < step)
    for name in older[: max(0, len(older) + 1 - keep_last)]:
        _remove(directory / name)


def find(directory: Path, step: int | None) -> tuple[Path, Manifest, str]:
    """The directory of the checkpoint of a step, its manifest, and the manifest's sha256. None: the newest step, which
    `latest` names. If `latest` is missing, torn or no plain file, or its checkpoint was deleted, the complete
    checkpoint of the highest step is the newest, with a warning. CheckpointError: no such checkpoint, or a changed
    manifest."""
    if (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} is the checkpoint of one step: pass the directory that it is in, "
            f"{directory.absolute().parent}, and the step as `step`"
        )
    steps = _complete(directory)
    if step is not None:
        for name in (name_of(step), name_of(step) + _REPLACED):
            if name in steps:
                return directory / name, *open_(directory / name)
        raise CheckpointError(
            f"{directory} has no checkpoint of step {step}; it has steps {sorted(steps.values())}"
        )
    latest = directory / _LATEST
    try:
        name, _, sha = read(latest).decode(errors="replace").strip().partition(" ")
        reason = f"{latest} names {name[:80]!r}, which is not there"
    except CheckpointError as problem:
        name = sha = ""
        reason = str(problem)
    if name in steps:
        manifest, digest = open_(directory / name)
        if digest == sha:
            return directory / name, manifest, digest
        reason = f"{latest} names {name} with the sha256 of another manifest"
    for name in sorted(steps, key=lambda name: (-steps[name], name)):
        try:
            manifest, digest = open_(directory / name)
            _check_sizes(directory / name, manifest)
        except CheckpointError as problem:
            _LOG.warning("%s is passed over: %s", directory / name, problem)
            continue
        _LOG.warning("%s; taking %s, the newest complete checkpoint", reason, name)
        return directory / name, manifest, digest
    raise CheckpointError(f"{directory} has no complete checkpoint; {reason}")


def open_(checkpoint: Path) -> tuple[Manifest, str]:
    """A checkpoint's manifest, and its sha256. CheckpointError: the manifest was changed, or has another step."""
    data = read(checkpoint / MANIFEST)
    where = checkpoint / MANIFEST
    if read(checkpoint / SEAL) != seal_of(data):
        raise CheckpointError(f"{where} and its {SEAL} do not match: one of them has been changed")
    manifest = parse(data, where)
    if name_of(manifest.step) != checkpoint.name.removesuffix(_REPLACED):
        raise CheckpointError(f"{where}: step is {manifest.step}, not that of {checkpoint.name}")
    return manifest, hashlib.sha256(data).hexdigest()


def verify(checkpoint: Path, manifest: Manifest, rank: int, num_ranks: int) -> None:
    """Checks that a checkpoint has exactly these files, and the content of this rank's share of them.
    CheckpointError: a file was changed; the text names it."""
    _check_sizes(checkpoint, manifest)
    for name in sorted(manifest.files, key=lambda name: (manifest.files[name].bytes, name))[
        rank::num_ranks
    ]:
        if (digest := sha256(checkpoint / name)) != manifest.files[name].sha256:
            raise CheckpointError(
                f"{checkpoint / name} has been changed: its sha256 is {digest}, "
                f"{MANIFEST} says {manifest.files[name].sha256}"
            )


def _check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    # torch's reader loads every file of this pattern, also files that the manifest does not name.
    statuses = {path.name: path.lstat() for path in checkpoint.glob("*.safetensors")}
    actual = {
        name: status.st_size for name, status in statuses.items() if stat.S_ISREG(status.st_mode)
    }
    expected = {name: file.bytes for name, file in manifest.files.items()}
    for name, _ in sorted(actual.items() ^ expected.items()):
        raise CheckpointError(
            f"{checkpoint / name} has {actual.get(name)} bytes (None: is no plain file); "
            f"{MANIFEST} says {expected.get(name)}"
        )


def _complete(directory: Path) -> dict[str, int]:
    """The steps of the complete checkpoints, by name."""
    with naming(directory, "read"):
        paths = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    return {path.name: int(match[1]) for path in paths if (match := _COMPLETE.fullmatch(path.name))}


def _temporary(directory: Path, name: str) -> Path:
    """A new directory for one save. The random name keeps a rank of an earlier, failed save from writing into it."""
    return Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=directory))


def _remove(path: Path) -> None:
    """Renames a checkpoint, then deletes it: readers never take a half-deleted one for complete."""
    _delete(path.rename(_temporary(path.parent, path.name.removesuffix(_REPLACED))))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- plain files and their lock: a link, pipe or device in the folder must not make a reader wait, or read other data --


def read(path: Path) -> bytes:
    """The content of a file. CheckpointError: the file cannot be read, or is no plain file (a link, a pipe, a
    device)."""
    with naming(path, "read"), _open(path, os.O_RDONLY) as file:
        return file.readall()


def sha256(path: Path) -> str:
    """sha256 of a file. CheckpointError as :func:`read`."""
    digest = hashlib.sha256()
    with naming(path, "read"), _open(path, os.O_RDONLY) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    """Writes a new file, and waits until the disk has it. CheckpointError: the file exists, or cannot be written."""
    with (
        naming(path, "written"),
        io.BufferedWriter(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as file,
    ):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Writes the names of the folder's files to disk. CheckpointError: the folder cannot be written."""
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
    with contextlib.ExitStack() as resources:
        with naming(path, "written"):
            file = resources.enter_context(_open(path, os.O_RDWR | os.O_CREAT))
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
def naming(path: Path, action: str) -> Iterator[None]:
    """Converts system errors to CheckpointErrors with the path, which system errors may lack."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {action}: {error.strerror}") from error
