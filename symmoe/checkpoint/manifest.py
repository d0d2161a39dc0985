"""manifest.json: what a checkpoint consists of. Written last, and believed only after its fields have been checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from symmoe.errors import CheckpointError

MANIFEST = "manifest.json"
SEAL = "manifest.json.sha256"  # as sha256sum writes it, so that `sha256sum -c` can check it
FORMAT, VERSION = "symmoe-checkpoint", 2
_FILE = re.compile(r"rank-\d{5}-\d{4}\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and content of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of an optimizer's parameters: their names, and its hyperparameters."""

    params: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer without the tensors of its state: its class, and by parameter the state that is no tensors."""

    name: str
    groups: list[StoredGroup]
    values: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint consists of. Which tensors a file holds, and which part of each, is in its own header.

    Attributes:
        format, version: of the checkpoint.
        step: optimizer steps done.
        ep_size: number of parts of its experts.
        files: files by name within the checkpoint's directory.
        optimizer: None: there is no optimizer.
        extra: what the caller gave, the same on all ranks.
        rank_extra: what the caller gave on each rank.
        written_by: versions of packages.
    """

    format: str = FORMAT
    version: int = VERSION
    step: int
    ep_size: int
    files: dict[str, StoredFile]
    optimizer: StoredOptimizer | None
    extra: Any
    rank_extra: list[Any]
    written_by: dict[str, str]

    @property
    def num_ranks(self) -> int:
        """The number of ranks that wrote it."""
        return len(self.rank_extra)

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode() + b"\n"


def seal_of(manifest: bytes) -> bytes:
    """The content of :data:`SEAL`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def parse(data: bytes, where: Path) -> Manifest:
    """The manifest of these bytes. CheckpointError: it is none, is of another version, or names files elsewhere; the
    text names the field."""
    try:
        content = json.loads(data)
        head = [content.get(name) for name in ("format", "version")] if isinstance(content, dict) else None
        if head != [FORMAT, VERSION]:
            raise ValueError(f"format and version are {head}; this symmoe reads {[FORMAT, VERSION]}")
        manifest: Manifest = _typed(Manifest, content, "manifest")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for name in manifest.files:
        if _FILE.fullmatch(name) is None:
            raise CheckpointError(f"{where}: {name!r} in files is not like rank-00000-0000.safetensors")
    return manifest


def _typed(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as a dataclass with exactly its fields, a list, a dict or a plain value, all the way down."""
    of = get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):  # with None
        return None if value is None else _typed(of[0], value, name)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        hints = get_type_hints(kind)
        if value.keys() != hints.keys():
            raise ValueError(f"fields {sorted(value.keys() ^ hints.keys())} of {name} are missing or not known")
        return kind(**{field: _typed(hint, value[field], f"{name}.{field}") for field, hint in hints.items()})
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _typed(of[1], item, f"{name}[{key!r}]") for key, item in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        return [_typed(of[0], item, name) for item in value]
    if type(value) is not kind:
        raise ValueError(f"{name} is {str(value)[:80]!r}; it must be {kind}")
    return value
