"""Loading: every rank reads what it needs, however the checkpoint was cut, after all of it has been verified."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from symmoe.checkpoint import folder
from symmoe.checkpoint.manifest import MANIFEST, NAMES, Manifest, StoredSlice
from symmoe.checkpoint.optimizer_state import PREFIX, State, check_record, empty_state, install
from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.tensors import Place, places_of
from symmoe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """What a checkpoint holds in addition to its tensors.

    Attributes:
        step: optimizer steps done.
        extra: what was saved as `extra`.
        rank_extra: what this rank saved as `rank_extra`; None if another number of ranks loads than saved.
    """

    step: int
    extra: Any
    rank_extra: Any


@torch.no_grad()
def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Fills a model and an optimizer from a checkpoint, bit for bit, with any number of ranks. Synchronises the host.

    Before a tensor changes, every file's size and sha256 have been compared with the manifest (each file by one of the
    ranks), and keys, shapes and dtypes with the model. Collective over `group`.

    Args:
        directory: as in save_checkpoint; all ranks see the same.
        model: as in save_checkpoint; filled in place. Values are not cast. Weights of experts may be packed where the
            checkpoint was written with discrete ones, and the other way round.
        optimizer: optimizer of the model's parameters; gets the state and hyperparameters of the checkpoint.
            None: optimizer state in the checkpoint is ignored.
        step: which checkpoint; None: the newest (that of `latest`; if that is missing or torn, the complete one of the
            highest step, with a warning in the log).
        group: all ranks that load together; None: the default group, or only this process if there is none.

    Raises:
        ArgumentError: on every rank: `directory` is no path, or the model or the optimizer has something that has no
            place in a checkpoint.
        CheckpointError: on every rank: there is none, it is not what was written, or not that of the model; or a rank
            is gone, does not come, or has left by an interrupt. The text names the file, the key or the rank. Model and
            optimizer are untouched unless a file broke, or a rank was lost, after everything was verified.
    """
    with Peers(group) as peers:
        path, manifest = _choose(peers, directory, step)

        def match() -> list[Place]:
            places = places_of(model, rank=peers.rank, num_ranks=peers.num_ranks)
            _check_places(path, places, manifest)
            if optimizer is not None:
                check_record(optimizer, places, manifest)
            return places

        places = peers.together(match)
        keys = {place.key for place in places}
        wanted = peers.gather(lambda: bytes(key in keys or key.startswith(PREFIX) for key in manifest.tensors))
        peers.together(lambda: _check_wanted(path, manifest, wanted))

        def verify() -> None:
            folder.check_sizes(path, manifest)
            for name in _verified_by(manifest, peers.rank, peers.num_ranks):
                folder.check_content(path / name, manifest.files[name].sha256)

        peers.together(verify)

        def allocate() -> tuple[State, list[Place]]:
            state: State = {}
            of_optimizer: list[Place] = []
            if optimizer is not None:
                state, of_optimizer = empty_state(optimizer, places, manifest)
            _check_headers(path, manifest, reads := [*places, *of_optimizer])
            return state, reads

        state, reads = peers.together(allocate)
        peers.together(lambda: _read(path, manifest, reads))

        def finish() -> None:
            if optimizer is not None:
                install(optimizer, state, manifest)

        peers.together(finish, is_last=True)
    own = manifest.rank_extra[peers.rank] if manifest.num_ranks == peers.num_ranks else None
    return LoadedCheckpoint(step=manifest.step, extra=manifest.extra, rank_extra=own)


def read_manifest(directory: str | os.PathLike[str], step: int | None = None) -> Manifest:
    """What the checkpoint of a step (None: the newest) consists of. Local; reads no tensors.

    Raises:
        ArgumentError: `directory` is no path.
        CheckpointError: there is none, or its manifest is not what was written.
    """
    return folder.find(folder.path_of(directory), step)[2]


def _choose(peers: Peers, directory: str | os.PathLike[str], step: int | None) -> tuple[Path, Manifest]:
    """The checkpoint that rank 0 finds, so that all ranks load the same one."""
    found: list[Manifest] = []

    def look() -> list[str]:
        path = folder.path_of(directory)
        if peers.rank:
            return []
        path, digest, manifest = folder.find(path, step)
        found.append(manifest)
        return [path.name, digest]

    name, digest = peers.gather_json(look)[0]
    path = Path(directory) / name

    def read() -> Manifest:
        if found:
            return found[0]
        own, manifest = folder.open_(path)
        if own != digest:
            raise CheckpointError(f"{path / MANIFEST} is not the file that rank 0 sees")
        return manifest

    return path, peers.together(read)


def _check_places(path: Path, places: Iterable[Place], manifest: Manifest) -> None:
    """Checks that the checkpoint has every tensor of the model, with its shape and dtype."""
    for place in places:
        stored = manifest.tensors.get(place.key)
        if stored is None:
            raise CheckpointError(f"{path} has no {place.key}")
        dtype = NAMES.get(place.tensor.dtype)
        if (stored.dtype, stored.shape) != (dtype, place.shape):
            raise CheckpointError(
                f"{place.key} is {stored.dtype} {list(stored.shape)} in {path} "
                f"and {dtype} {list(place.shape)} in the model"
            )


def _check_wanted(path: Path, manifest: Manifest, wanted: list[bytes]) -> None:
    """Checks that every tensor of the checkpoint belongs to the model of some rank."""
    for key, *flags in zip(manifest.tensors, *wanted, strict=True):
        if not any(flags):
            raise CheckpointError(f"{path} has {key}, which the model has not")


def _verified_by(manifest: Manifest, rank: int, num_ranks: int) -> list[str]:
    """The files that this rank verifies for all ranks: divided by size, the largest first."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += manifest.files[name].bytes
    return shares[rank]


def _reads(manifest: Manifest, places: Iterable[Place]) -> dict[str, list[tuple[Place, StoredSlice]]]:
    """For each file, the slices of which this rank needs rows."""
    reads: dict[str, list[tuple[Place, StoredSlice]]] = {}
    for place in places:
        end = place.first + len(place.rows)
        for piece in manifest.tensors[place.key].slices:
            if piece.start < end and place.first < piece.start + piece.length:
                reads.setdefault(piece.file, []).append((place, piece))
    return reads


def _check_headers(path: Path, manifest: Manifest, places: Iterable[Place]) -> None:
    """Checks that the files hold what the manifest says."""
    for name, here in _reads(manifest, places).items():
        with safe_open(path / name, framework="pt") as file:
            there = set(file.keys())
            for place, piece in here:
                stored = manifest.tensors[place.key]
                own = stored.name_of(place.key, piece)
                if own not in there:
                    raise CheckpointError(f"{path / name} has no {own}")
                header = file.get_slice(own)
                found = header.get_dtype(), tuple(header.get_shape())
                if found != (stored.dtype, stored.shape_of(piece)):
                    raise CheckpointError(
                        f"{path / name}: {own} is {found}, {MANIFEST} says {stored.dtype} {stored.shape}"
                    )


def _read(path: Path, manifest: Manifest, places: Iterable[Place]) -> None:
    for name, here in _reads(manifest, places).items():
        with safe_open(path / name, framework="pt") as file:
            for place, piece in here:
                stored, rows = manifest.tensors[place.key], place.rows
                own = stored.name_of(place.key, piece)
                low, high = max(place.first, piece.start), min(place.first + len(rows), piece.start + piece.length)
                if stored.shape:
                    value = file.get_slice(own)[low - piece.start : high - piece.start]
                else:
                    value = file.get_tensor(own).reshape(1)
                rows[low - place.first : high - place.first].copy_(value)
