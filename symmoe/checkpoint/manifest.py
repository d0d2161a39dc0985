"""manifest.json: what a checkpoint consists of. Written last, and believed only after every field has been checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from symmoe.checkpoint.files import read
from symmoe.errors import CheckpointError

MANIFEST = "manifest.json"
SEAL = "manifest.json.sha256"  # as sha256sum writes it, so that `sha256sum -c` can check it
FORMAT, VERSION = "symmoe-checkpoint", 1
MAX_MANIFEST_BYTES = 256 << 20
MAX_STEP = 99_999_999

# safetensors' names of dtypes
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FILE = re.compile(r"rank-\d{5}-\d{4}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and content of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Rows `start` to `start` + `length` - 1 of a tensor, and the file that holds them. A scalar is one row."""

    start: int
    length: int
    file: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor: safetensors' name of its dtype, its shape, and its slices in the order of their rows."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]

    @property
    def num_rows(self) -> int:
        return num_rows(self.shape)

    def name_of(self, key: str, piece: StoredSlice) -> str:
        """The name that a slice has in its file: the key, with the first row if it is not the whole tensor."""
        return stored_name(key, piece.start, piece.length, self.num_rows)

    def shape_of(self, piece: StoredSlice) -> tuple[int, ...]:
        """The shape that a slice has in its file."""
        return (piece.length, *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps done.
        num_ranks: number of ranks that wrote it.
        ep_size: number of slices of its experts.
        files: files by name within the checkpoint's directory.
        tensors: tensors by key.
        optimizer: hyperparameters and the names of the parameters, by group; None: there is no optimizer.
        extra: what the caller gave, the same on all ranks.
        rank_extra: what the caller gave on each rank.
        written_by: versions of packages.
    """

    step: int
    num_ranks: int
    ep_size: int
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    optimizer: dict[str, Any] | None
    extra: Any
    rank_extra: list[Any]
    written_by: dict[str, str]

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps(head | dataclasses.asdict(self), indent=1).encode() + b"\n"


def seal_of(manifest: bytes) -> bytes:
    """The content of :data:`SEAL`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def num_rows(shape: tuple[int, ...]) -> int:
    """The number of rows of a tensor; a scalar is one row."""
    return shape[0] if shape else 1


def stored_name(key: str, start: int, length: int, total: int) -> str:
    """See :meth:`StoredTensor.name_of`."""
    return key if length == total else f"{key}@{start}"


def tiling_problem(runs: list[tuple[int, int]], total: int) -> str | None:
    """What is wrong with (start, length) runs that must cover rows 0 to `total` - 1 once, or None."""
    covered = 0
    for start, length in runs:
        if start != covered:
            wrong = "there twice" if start < covered else "missing"
            return f"rows {min(start, covered)} to {max(start, covered) - 1} are {wrong}"
        covered += length
    return None if covered == total and runs else f"rows {covered} to {total - 1} are missing"


def read_sealed(folder: Path) -> bytes:
    """The manifest's bytes, which match their seal. Local.

    Raises:
        CheckpointError: one of the two files is missing, no plain file, too large, or not what was written.
    """
    manifest, seal = (read(folder / name, MAX_MANIFEST_BYTES) for name in (MANIFEST, SEAL))
    if seal != seal_of(manifest):
        raise CheckpointError(f"{folder / MANIFEST} and its {SEAL} do not match: one of them has been changed")
    return manifest


def parse(data: bytes, where: Path) -> Manifest:
    """The manifest of these bytes.

    Raises:
        CheckpointError: it is no manifest, is of a later version, or contradicts itself. The text names the field.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON: {error}") from error
    check = _Checker(where)
    content = check.mapping(content, "the manifest")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where}: format is {content.get('format')!r}, not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{where}: version is {content.get('version')!r}; this symmoe reads {VERSION}")
    names = {field.name for field in dataclasses.fields(Manifest)} | {"format", "version"}
    if content.keys() != names:
        raise CheckpointError(f"{where}: fields {sorted(content.keys() ^ names)} are missing or not known")
    files = {name: check.file(name, value) for name, value in check.mapping(content["files"], "files").items()}
    tensors = {
        key: check.tensor(key, value, files) for key, value in check.mapping(content["tensors"], "tensors").items()
    }
    check.fits(tensors, files)
    count = check.integer(content["num_ranks"], "num_ranks", low=1)
    optimizer = content["optimizer"]
    return Manifest(
        step=check.integer(content["step"], "step", low=0, high=MAX_STEP),
        num_ranks=count,
        ep_size=check.integer(content["ep_size"], "ep_size", low=1),
        files=files,
        tensors=tensors,
        optimizer=None if optimizer is None else check.mapping(optimizer, "optimizer"),
        extra=content["extra"],
        rank_extra=check.items(content["rank_extra"], "rank_extra", length=count),
        written_by=check.mapping(content["written_by"], "written_by"),
    )


class _Checker:
    """Reads typed fields of JSON that may be wrong."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def need(self, ok: bool, name: str, value: object, what: str) -> None:
        if not ok:
            raise CheckpointError(f"{self._where}: {name} is {str(value)[:80]!r}; it must be {what}")

    def mapping(self, value: Any, name: str) -> dict[str, Any]:
        self.need(isinstance(value, dict), name, value, "an object")
        known: dict[str, Any] = value
        return known

    def items(self, value: Any, name: str, *, length: int | None = None) -> list[Any]:
        what = "a list" if length is None else f"a list of {length}"
        self.need(isinstance(value, list) and length in (None, len(value)), name, value, what)
        known: list[Any] = value
        return known

    def integer(self, value: Any, name: str, *, low: int = 0, high: int = 1 << 62) -> int:
        self.need(type(value) is int and low <= value <= high, name, value, f"an integer from {low} to {high}")
        known: int = value
        return known

    def exactly(self, value: Any, name: str, readers: Mapping[str, Callable[[Any, str], Any]]) -> dict[str, Any]:
        """An object of these fields and no others, each read by its reader."""
        self.mapping(value, name)
        self.need(value.keys() == readers.keys(), name, sorted(value), f"an object of {sorted(readers)}")
        return {field: read(value[field], f"{name}.{field}") for field, read in readers.items()}

    def file(self, name: str, value: Any) -> StoredFile:
        self.need(_FILE.fullmatch(name) is not None, "a name in files", name, "like rank-00000-0000.safetensors")
        return StoredFile(**self.exactly(value, f"files[{name!r}]", {"bytes": self.integer, "sha256": self._sha256}))

    def tensor(self, key: str, value: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
        name = f"tensors[{key!r}]"
        readers: dict[str, Callable[[Any, str], Any]]
        readers = {"dtype": self._dtype, "shape": self._shape, "slices": self.items}
        stored = self.exactly(value, name, readers)
        readers = {"start": self.integer, "length": self.integer, "file": self._file_of(files)}
        slices = tuple(StoredSlice(**self.exactly(piece, f"{name}.slices", readers)) for piece in stored["slices"])
        problem = tiling_problem([(piece.start, piece.length) for piece in slices], num_rows(stored["shape"]))
        self.need(problem is None, f"{name}.slices", problem, "every row once")
        return StoredTensor(stored["dtype"], stored["shape"], slices)

    def fits(self, tensors: Mapping[str, StoredTensor], files: Mapping[str, StoredFile]) -> None:
        """Checks that no tensor is larger than the files that hold it, so that a small file allocates little memory."""
        needed = dict.fromkeys(files, 0)
        for stored in tensors.values():
            for piece in stored.slices:
                needed[piece.file] += math.prod(stored.shape_of(piece)) * DTYPES[stored.dtype].itemsize
        for name, file in files.items():
            self.need(needed[name] <= file.bytes, f"files[{name!r}].bytes", file.bytes, f"at least {needed[name]}")

    def _sha256(self, value: Any, name: str) -> str:
        self.need(isinstance(value, str) and _SHA256.fullmatch(value) is not None, name, value, "64 hex digits")
        return str(value)

    def _dtype(self, value: Any, name: str) -> str:
        self.need(isinstance(value, str) and value in DTYPES, name, value, f"one of {sorted(DTYPES)}")
        return str(value)

    def _shape(self, value: Any, name: str) -> tuple[int, ...]:
        return tuple(self.integer(size, name) for size in self.items(value, name))

    def _file_of(self, files: Mapping[str, StoredFile]) -> Callable[[Any, str], str]:
        def read(value: Any, name: str) -> str:
            self.need(isinstance(value, str) and value in files, name, value, "a name in files")
            return str(value)

        return read
