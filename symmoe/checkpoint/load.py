"""Loading: every rank reads what it needs, however the checkpoint was cut, after all of it has been verified."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from symmoe.checkpoint import folder
from symmoe.checkpoint.manifest import MANIFEST, Manifest
from symmoe.checkpoint.optimizer_state import (
    PREFIX,
    check_record,
    check_shared,
    empty_state,
    groups_of,
    install,
)
from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.tensors import ModuleState, Place, places_of, rows_problem
from symmoe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """What a checkpoint holds in addition to its tensors: optimizer steps done, what was saved as `extra`, and what
    this rank saved as `rank_extra`, None if another number of ranks loads than saved."""

    step: int
    extra: Any
    rank_extra: Any


@torch.no_grad()
def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | ModuleState | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Fills a model and an optimizer from a checkpoint, bit for bit, with any number of ranks. Collective over `group`;
    synchronises the host. What is verified before a tensor changes: docs/checkpoints.md.

    Args:
        directory, group: as in save_checkpoint.
        model: as in save_checkpoint; filled in place. Values are not cast. Weights of experts may be packed where the
            checkpoint was written with discrete ones, and the other way round.
        optimizer: optimizer of the model's parameters; gets the state and hyperparameters of the checkpoint. None:
            optimizer state in the checkpoint is ignored.
        step: which checkpoint; None: the newest (that of `latest`; if that is missing or torn, the complete one of the
            highest step, with a warning in the log).

    Raises:
        ArgumentError: on every rank: `directory` is no path, or the model or the optimizer has something that has no
            place in a checkpoint.
        CheckpointError: on every rank: there is none, it is not what was written, or not that of the model; or a rank
            is gone, does not come, or has left by an interrupt. The text names the file, the key or the rank. Model and
            optimizer are untouched unless a file broke, or a rank was lost, after everything was verified.
    """
    with Peers(group) as peers:
        with peers.step() as chosen:
            place = folder.path_of(directory)
            if peers.rank == 0:
                newest, _, digest = folder.find(place, step)
                chosen.mine = [newest.name, digest]
        name, digest = chosen.by_rank[0]
        path = place / name
        with peers.step():
            manifest, own_digest = folder.open_(path)
            if own_digest != digest:
                raise CheckpointError(f"{path / MANIFEST} is not the file that rank 0 sees")
            folder.verify(path, manifest, peers.rank, peers.num_ranks)
        with peers.step() as matched:
            reader = HuggingFaceStorageReader(str(path))
            stored = _stored(reader, path)
            places = places_of(model, rank=peers.rank, num_ranks=peers.num_ranks)
            filled = [place for place in places if place.is_stored]
            if optimizer is not None:
                groups = groups_of(optimizer, places)
                record = check_record(manifest.optimizer, optimizer, groups, places)
                state, of_optimizer, shared = empty_state(optimizer, groups, record, stored)
                filled += of_optimizer
                copies = _Rows(path, stored, [place for _, place in shared])
                reader.read_data(copies.plan, copies).wait()
                check_shared(shared)
            rows = _Rows(path, stored, filled)
            unknown = stored.keys() - {place.key for place in places}
            matched.mine = sorted(key for key in unknown if not key.startswith(PREFIX))
        with peers.step():
            for key in sorted(set.intersection(*map(set, matched.by_rank))):
                raise CheckpointError(f"{path} has {key}, which the model has not")
            reader.read_data(rows.plan, rows).wait()
        with peers.step(is_last=True):
            if optimizer is not None:
                install(optimizer, state, shared, record)
    own = manifest.rank_extra[peers.rank] if manifest.num_ranks == peers.num_ranks else None
    return LoadedCheckpoint(step=manifest.step, extra=manifest.extra, rank_extra=own)


def read_manifest(directory: str | os.PathLike[str], step: int | None = None) -> Manifest:
    """What the checkpoint of a step (None: the newest) in a job's directory holds, without reading tensors. Local.
    ArgumentError: `directory` is no path. CheckpointError: there is none, or its manifest is not what was written.
    Other files are not looked at."""
    return folder.find(folder.path_of(directory), step)[1]


class _Rows(DefaultLoadPlanner):
    """Where this rank's rows are in the files, and the tensors that they fill. CheckpointError: the files have no such
    tensor, or one of another shape or dtype."""

    def __init__(
        self, path: Path, stored: Mapping[str, TensorStorageMetadata], places: Iterable[Place]
    ) -> None:
        super().__init__()
        self._rows: dict[tuple[str, int | None], torch.Tensor] = {}
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for place in places:
            if place.key not in stored:
                raise CheckpointError(f"{path} has no {place.key}")
            there = stored[place.key]
            here = place.tensor.dtype
            if (there.properties.dtype, tuple(there.size)) != (here, place.shape):
                raise CheckpointError(
                    f"{place.key} is {there.properties.dtype} {list(there.size)} in {path} "
                    f"and {here} {list(place.shape)} in the model"
                )
            own = chunks.setdefault(place.key, [])
            self._rows[place.key, len(own)] = place.rows
            own.append(ChunkStorageMetadata(torch.Size(place.offsets), place.rows.shape))
        self.plan = LoadPlan(
            [
                item
                for key, own in chunks.items()
                for item in create_read_items_for_chunk_list(key, stored[key], own)
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of a chunk that the plan reads."""
        return self._rows[index.fqn, index.index]


def _stored(reader: HuggingFaceStorageReader, path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by key, from the headers of its files. CheckpointError: a row is not there once."""
    stored = {}
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        for key, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{key} is no tensor")
            size = tensor.size
            chunks = tensor.chunks
            runs = [(chunk.offsets[0], chunk.sizes[0]) if size else (0, 1) for chunk in chunks]
            if any(any(chunk.offsets[1:]) or chunk.sizes[1:] != size[1:] for chunk in chunks):
                raise ValueError(f"{key} is not cut into rows")
            if (problem := rows_problem(runs, size[0] if size else 1)) is not None:
                raise ValueError(f"{key} is not whole: {problem}")
            stored[key] = tensor
    except Exception as error:  # whatever headers made in bad faith lead to
        raise CheckpointError(f"{path}: the headers of its files fit nothing: {error!r}") from error
    return stored
