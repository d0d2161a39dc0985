"""manifest.json: the contents of a checkpoint. Saving writes it last; loading checks its fields before use."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmoe.checks.json_values import typed
from symmoe.errors import CheckpointError

MANIFEST = "manifest.json"
SEAL = "manifest.json.sha256"  # format of sha256sum, so that `sha256sum -c` can check it
FORMAT = "symmoe-checkpoint"
VERSION = 3
_FILE = re.compile(r"rank-\d{5}-\d{4}\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and content of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of an optimizer's parameters: by name, the experts of the parameter (None: all); and hyperparameters."""

    params: dict[str, list[int] | None]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer without the tensors of its state.

    Attributes:
        name: the class.
        values: by key, states other than tensors.
        experts: by key, the experts that have the state, if not all have it.
        of_stacks: keys of states that a rank's experts share.
    """

    name: str
    groups: list[StoredGroup]
    values: dict[str, Any]
    experts: dict[str, list[int]]
    of_stacks: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint's contents: `step` completed optimizer steps, `ep_size` parts of its experts, its files by name
    within its directory, an optimizer or None, the caller's values for all ranks (`extra`) and for each, and versions
    of packages. A file's own header lists its tensors, and the part of each."""

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
        """The number of ranks that wrote the checkpoint."""
        return len(self.rank_extra)

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode() + b"\n"


def seal_of(manifest: bytes) -> bytes:
    """The content of :data:`SEAL`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def parse(data: bytes, where: Path) -> Manifest:
    """Parses a manifest. CheckpointError: the bytes are invalid, of another version, or name files elsewhere; the
    text names the field."""
    try:
        content = json.loads(data)
        head = (
            [content.get(name) for name in ("format", "version")]
            if isinstance(content, dict)
            else None
        )
        if head != [FORMAT, VERSION]:
            raise ValueError(
                f"format and version are {head}; this symmoe reads {[FORMAT, VERSION]}"
            )
        manifest: Manifest = typed(Manifest, content, "manifest")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for name in manifest.files:
        if _FILE.fullmatch(name) is None:
            raise CheckpointError(
                f"{where}: {name!r} in files is not like rank-00000-0000.safetensors"
            )
    return manifest
