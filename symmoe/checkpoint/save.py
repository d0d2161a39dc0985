"""Saving: every rank writes its own parts, and its share of the replicated parts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import symmoe
from symmoe.checkpoint import folder
from symmoe.checkpoint.manifest import Manifest, StoredFile
from symmoe.checkpoint.optimizer_state import (
    description_of,
    groups_of,
    record_of,
    settings_of,
    state_shards,
)
from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.tensors import (
    REPLICAS,
    ModuleState,
    TensorShard,
    agreed,
    digest,
    lists_by_key,
    rows_problem,
    shards_of,
)
from symmoe.checks.extras import extra
from symmoe.errors import ArgumentError, CheckpointError, first_problem, raise_for

with extra("checkpoint"):
    import safetensors.torch

MAX_FILE_BYTES = 512 << 20  # host memory has up to three copies of a file
MAX_STEP = 99_999_999


@torch.no_grad()
def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | ModuleState | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Saves the state after `step` steps in `directory`/step-NNNNNNNN, and returns the path. Synchronises the host.

    Each rank writes its own experts; everything else is written once. Ranks with the same part compare its sha256
    first. If anything fails or a rank dies, at any moment, earlier checkpoints do not change.
    Collective over `group`.

    Args:
        directory: the job's directory, the same on all ranks. Only one job at a time may save to it.
        step: replaces a checkpoint of the same step.
        model: a module, a ModuleState, or a nested dict of tensors, ExpertShards and these. A module's tensors are
            those of its state dict.
        optimizer: optimizer of the model's parameters.
        extra: JSON values, equal on all ranks; loading returns them in JSON's types (tuples become lists).
        rank_extra: JSON values of this rank, e.g. get_rng_state().
        group: all ranks that train together. None: the default group, or only this process if there is none.
        keep_last: how many checkpoints of steps up to this one stay, this one included; None: all.

    Raises:
        ArgumentError: on every rank: an argument is invalid.
        CheckpointError: on every rank: a rank cannot write, replicated parts differ, experts are missing, another job
            is saving to the directory; or a rank was lost, did not arrive within the process group's timeout, or was
            interrupted (that rank raises the interrupt). The text names the file, the key or the rank.
    """
    with contextlib.ExitStack() as resources, Peers(group) as peers:
        with peers.step() as described:
            raise_for(
                first_problem(
                    (
                        type(step) is not int or not 0 <= step <= MAX_STEP,
                        f"step ({step!r}) must be an integer from 0 to {MAX_STEP}",
                    ),
                    (
                        keep_last is not None and (type(keep_last) is not int or keep_last < 1),
                        f"keep_last ({keep_last!r}) must be None or an integer of at least 1",
                    ),
                )
            )
            target = folder.path_of(directory)
            shards = shards_of(model, rank=peers.rank, num_ranks=peers.num_ranks)
            groups = [] if optimizer is None else groups_of(optimizer, shards)
            common = {
                "step": step,
                "keep_last": keep_last,
                "extra": extra,
                "a setting of optimizer": optimizer and settings_of(optimizer, groups),
            }
            described.local = {
                "common": {name: _json(name, value) for name, value in common.items()},
                "optimizer": _json(
                    "the state of optimizer", optimizer and description_of(optimizer, groups)
                ),
                "rank_extra": _json("rank_extra", rank_extra),
            }
        with peers.step() as announced:
            agreed(
                [table["common"] for table in described.by_rank], "; it must be the same everywhere"
            )
            stored = [shard for shard in shards if shard.is_stored]
            record = None
            if optimizer is not None:
                descriptions = [json.loads(table["optimizer"]) for table in described.by_rank]
                record = record_of(settings_of(optimizer, groups), descriptions)
                stored += state_shards(optimizer, groups, record)
            parts = _parts(stored)
            announced.local = {key: _entry_of(part) for key, part in parts.items()}
        with peers.step() as compared:
            holders = _holders(announced.by_rank)
            compared.local = {
                f"{key} from row {start}" if start else key: digest(_to_host(parts[key]))
                for (key, start, _), ranks in holders.items()
                if len(ranks) > 1 and peers.rank in ranks
            }
        with peers.step() as prepared:
            agreed(compared.by_rank, REPLICAS)
            if peers.rank == 0:  # keeps the lock until all ranks know the result
                prepared.local = resources.enter_context(folder.saving(target, step)).name
        unfinished = target / prepared.by_rank[0]
        with peers.step() as written:
            keys = _shares(holders, announced.by_rank)[peers.rank]
            written.local = _write(unfinished, {key: parts[key] for key in keys}, peers.rank)
        with peers.step(is_last=True):
            if peers.rank == 0:
                manifest = Manifest(
                    step=step,
                    ep_size=max(Counter(key for key, _, _ in holders).values(), default=1),
                    files={
                        name: StoredFile(**file)
                        for files in written.by_rank
                        for name, file in files.items()
                    },
                    optimizer=record,
                    extra=extra,
                    rank_extra=[json.loads(table["rank_extra"]) for table in described.by_rank],
                    written_by={
                        module.__name__: module.__version__
                        for module in (symmoe, torch, safetensors)
                    },
                )
                folder.publish(unfinished, step, manifest.to_bytes())
                if keep_last is not None:
                    folder.prune(target, step, keep_last)
    return target / folder.name_of(step)


_Parts = dict[str, list[TensorShard]]  # this rank's parts by key: shards with consecutive rows
_Holders = dict[tuple[str, int, int], list[int]]  # ranks, by key, first row and number of rows


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is not fit for JSON: {error}") from error


def _parts(shards: Iterable[TensorShard]) -> _Parts:
    parts: _Parts = lists_by_key(
        (shard.key, shard)
        for shard in sorted(shards, key=lambda shard: (shard.key, shard.start or 0))
    )
    for key, part in parts.items():
        kinds = [(shard.tensor.dtype, shard.shape) for shard in part]
        for dtype, shape in kinds:
            raise_for(
                first_problem(
                    (not _fits_file(dtype), f"{key} is {dtype}, which safetensors does not hold"),
                    (
                        (dtype, shape) != kinds[0],
                        f"{key} is {kinds[0][0]} {kinds[0][1]} and {dtype} {shape}",
                    ),
                )
            )
        for last, shard in itertools.pairwise(part):
            if last.start is None or shard.start != last.start + len(last.rows):
                raise ArgumentError(
                    f"{key} has rows from {last.start} and from {shard.start}; they must follow"
                )
    return parts


@functools.cache
def _fits_file(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype, device="cpu")})
    except Exception:  # noqa: BLE001 - errors differ by package
        return False
    return True


def _entry_of(part: list[TensorShard]) -> list[Any]:
    """The description of a part for peers: dtype, global shape, first row, number of rows, bytes."""
    first = part[0]
    length = sum(len(shard.rows) for shard in part) if first.shape else 1
    return [
        str(first.tensor.dtype),
        first.shape,
        first.start or 0,
        length,
        sum(shard.tensor.nbytes for shard in part),
    ]


def _to_host(part: list[TensorShard]) -> torch.Tensor:
    """A copy of a part in contiguous host memory."""
    rows = [
        shard.rows.to("cpu", copy=True, memory_format=torch.contiguous_format) for shard in part
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _holders(announced: list[dict[str, Any]]) -> _Holders:
    """The ranks that have each part. CheckpointError: ranks disagree on a tensor, or rows are missing."""
    tensors = agreed([{key: entry[:2] for key, entry in parts.items()} for parts in announced])
    holders: _Holders = lists_by_key(
        ((key, start, length), rank)
        for rank, parts in enumerate(announced)
        for key, (_, shape, start, length, _) in parts.items()
        if length or 0 in shape[:1]  # a part without rows counts only if the global tensor has none
    )
    runs = lists_by_key((key, (start, length)) for key, start, length in holders)
    for key, (_, shape) in tensors.items():
        if (problem := rows_problem(runs.get(key, []), shape[0] if shape else 1)) is not None:
            raise CheckpointError(
                f"{key} is not whole over the ranks that save together: {problem}"
            )
    return dict(sorted(holders.items()))


def _shares(holders: _Holders, announced: list[dict[str, Any]]) -> list[list[str]]:
    """The keys that each rank writes: a part goes to its rank with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in announced]
    loads = [0] * len(announced)
    for (key, _, _), ranks in sorted(
        holders.items(), key=lambda item: len(item[1])
    ):  # first the parts of one rank
        writer = min(ranks, key=loads.__getitem__)
        shares[writer].append(key)
        loads[writer] += announced[writer][key][-1]
    return shares


def _write(unfinished: Path, parts: _Parts, rank: int) -> dict[str, dict[str, Any]]:
    """Writes files of at most MAX_FILE_BYTES (a larger tensor has its own file), in the format of torch's
    HuggingFaceStorageReader. Returns each file's entry in the manifest."""
    shards: list[list[str]] = []
    size = 0
    for key, part in parts.items():
        size += (num_bytes := _entry_of(part)[-1])
        if not shards or size > MAX_FILE_BYTES:
            shards.append([])
            size = num_bytes
        shards[-1].append(key)
    written = {}
    for number, keys in enumerate(shards):
        name = f"rank-{rank:05d}-{number:04d}.safetensors"
        offsets = {key: {"saved_offsets": parts[key][0].offsets} for key in keys}
        data = safetensors.torch.save(
            {key: _to_host(parts[key]) for key in keys},
            {"DCP_SHARDING_INFO": json.dumps(offsets)},  # one: safetensors does not order several
        )
        folder.write(unfinished / name, data)
        written[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return written
