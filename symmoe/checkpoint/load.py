"""Loading: verifies the whole checkpoint, then every rank reads its parts, whatever the checkpoint's sharding."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
from symmoe.checkpoint.tensors import (
    ModuleState,
    TensorShard,
    lists_by_key,
    rows_problem,
    shards_of,
)
from symmoe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint's values besides tensors: completed optimizer steps, the saved `extra`, and this rank's saved
    `rank_extra`, None if the number of ranks has changed."""

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
    synchronises the host. docs/checkpoints.md lists the checks before any tensor changes.

    Args:
        directory, group: as in save_checkpoint.
        model: as in save_checkpoint; filled in place. Values are not cast. Packed weights of experts load from
            discrete ones in the checkpoint, and discrete from packed.
        optimizer: optimizer of the model's parameters; receives the checkpoint's state and hyperparameters. None:
            optimizer state in the checkpoint is ignored.
        step: the checkpoint's step; None: the newest (named by `latest`; if `latest` is missing or torn, the complete
            one of the highest step, with a warning in the log).

    Raises:
        ArgumentError: on every rank: `directory` is no path, or the model or the optimizer has a value that a
            checkpoint cannot store.
        CheckpointError: on every rank: the checkpoint is missing, was changed, or does not fit the model; or a rank
            was lost, timed out, or was interrupted. The text names the file, the key or the rank. Model and optimizer
            are unchanged unless a file broke, or a rank was lost, after the verification.
    """
    with Peers(group) as peers:
        with peers.step() as chosen:
            target = folder.path_of(directory)
            if peers.rank == 0:
                newest, _, digest = folder.find(target, step)
                chosen.local = [newest.name, digest]
        name, digest = chosen.by_rank[0]
        path = target / name
        with peers.step():
            manifest, own_digest = folder.open_(path)
            if own_digest != digest:
                raise CheckpointError(f"{path / MANIFEST} is not the file that rank 0 sees")
            folder.verify(path, manifest, peers.rank, peers.num_ranks)
        with peers.step() as matched:
            reader = HuggingFaceStorageReader(str(path))
            stored = _stored(reader, path)
            shards = shards_of(model, rank=peers.rank, num_ranks=peers.num_ranks)
            filled = [shard for shard in shards if shard.is_stored]
            if optimizer is not None:
                groups = groups_of(optimizer, shards)
                record = check_record(manifest.optimizer, optimizer, groups, shards)
                state, of_optimizer, shared = empty_state(optimizer, groups, record, stored)
                filled += of_optimizer
                copies = _Rows(path, stored, [shard for _, shard in shared])
                reader.read_data(copies.plan, copies).wait()
                check_shared(shared)
            rows = _Rows(path, stored, filled)
            matched.local = sorted(
                key
                for key in stored.keys() - {shard.key for shard in shards}
                if not key.startswith(PREFIX)
            )
        with peers.step():
            for key in sorted(set.intersection(*map(set, matched.by_rank))):
                raise CheckpointError(f"{path} has {key}, which the model has not")
            reader.read_data(rows.plan, rows).wait()
        with peers.step(is_last=True):
            if optimizer is not None:
                install(optimizer, state, shared, record)
    rank_extra = manifest.rank_extra[peers.rank] if manifest.num_ranks == peers.num_ranks else None
    return LoadedCheckpoint(step=manifest.step, extra=manifest.extra, rank_extra=rank_extra)


def read_manifest(directory: str | os.PathLike[str], step: int | None = None) -> Manifest:
    """The manifest of a step's checkpoint (None: the newest) in a job's directory; reads no tensors. Local.
    ArgumentError: `directory` is no path. CheckpointError: the checkpoint is missing, or its manifest was changed.
    Does not check other files."""
    return folder.find(folder.path_of(directory), step)[1]


class _Rows(DefaultLoadPlanner):
    """The plan of reads that fill shards from the files. CheckpointError: a tensor is missing in the files, or has
    another shape or dtype in them."""

    def __init__(
        self, path: Path, stored: Mapping[str, TensorStorageMetadata], shards: Iterable[TensorShard]
    ) -> None:
        super().__init__()
        self._shards = lists_by_key((shard.key, shard) for shard in shards)
        for shard in itertools.chain(*self._shards.values()):
            if shard.key not in stored:
                raise CheckpointError(f"{path} has no {shard.key}")
            tensor = stored[shard.key]
            if (tensor.properties.dtype, tuple(tensor.size)) != (shard.tensor.dtype, shard.shape):
                raise CheckpointError(
                    f"{shard.key} is {tensor.properties.dtype} {list(tensor.size)} in {path} "
                    f"and {shard.tensor.dtype} {list(shard.shape)} in the model"
                )
        chunks = {
            key: [
                ChunkStorageMetadata(torch.Size(shard.offsets), shard.rows.shape) for shard in part
            ]
            for key, part in self._shards.items()
        }
        self.plan = LoadPlan(
            [
                item
                for key, part in chunks.items()
                for item in create_read_items_for_chunk_list(key, stored[key], part)
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of a chunk that the plan reads."""
        return self._shards[index.fqn][cast("int", index.index)].rows


def _stored(reader: HuggingFaceStorageReader, path: Path) -> dict[str, TensorStorageMetadata]:
    """A checkpoint's tensors by key, from its files' headers. CheckpointError: a row is missing or repeated."""
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        # safetensors holds nothing but tensors.
        stored = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        for key, tensor in stored.items():
            size = tensor.size
            runs = [
                (chunk.offsets[0], chunk.sizes[0]) if size else (0, 1) for chunk in tensor.chunks
            ]
            if any(
                any(chunk.offsets[1:]) or chunk.sizes[1:] != size[1:] for chunk in tensor.chunks
            ):
                raise ValueError(f"{key} is not cut into rows")
            if (problem := rows_problem(runs, size[0] if size else 1)) is not None:
                raise ValueError(f"{key} is not whole: {problem}")
    except Exception as error:  # malicious headers can cause any error
        raise CheckpointError(f"{path}: the headers of its files fit nothing: {error!r}") from error
    return stored
