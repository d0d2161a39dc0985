"""Saving: every rank writes what only it has, and its share of what others have too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import symmoe
from symmoe.checkpoint import files, folder
from symmoe.checkpoint.manifest import (
    DTYPES,
    MAX_STEP,
    NAMES,
    Manifest,
    StoredFile,
    StoredSlice,
    StoredTensor,
    num_rows,
    stored_name,
    tiling_problem,
)
from symmoe.checkpoint.optimizer_state import record_of, state_places
from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.replicas import check_replicas, digest
from symmoe.checkpoint.tensors import Place, places_of
from symmoe.errors import ArgumentError, CheckpointError

MAX_FILE_BYTES = 512 << 20  # a file is made in host memory, up to three times at once
Run = tuple[int, int]  # first row and number of rows


@torch.no_grad()
def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Saves the state after `step` steps in `directory`/step-NNNNNNNN. Synchronises the host.

    Experts are written by the ranks that have them, everything else once. Where several ranks have the same part, they
    compare its sha256 first. If anything fails or a rank dies, at any moment, earlier checkpoints do not change.
    Collective over `group`.

    Args:
        directory: the job's directory; all ranks see the same. One job at a time may save to it.
        step: a checkpoint of the same step is replaced.
        model: a module, or a nested dict of tensors, ExpertShards and modules. Tensors of a module's state dict count.
        optimizer: optimizer of the model's parameters.
        extra: fit for JSON, and the same on all ranks; loading gives it back as JSON has it (tuples are lists).
        rank_extra: fit for JSON, this rank's own, e.g. get_rng_state().
        group: all ranks that train together. None: the default group, or only this process if there is none.
        keep_last: how many checkpoints of steps up to this one stay, this one included; None: all.

    Returns:
        the checkpoint's directory.

    Raises:
        ArgumentError: on every rank: an argument does not fit.
        CheckpointError: on every rank: a rank cannot write, ranks disagree on what they all have, experts are missing,
            another job is saving to the directory; or a rank is gone, does not come within the process group's timeout,
            or has left by an interrupt (which is raised there). The text names the file, the key or the rank.
    """
    with contextlib.ExitStack() as held, Peers(group) as peers:

        def collect() -> tuple[Path, dict[str, _Part], dict[str, Any] | None]:
            _check_arguments(step, keep_last)
            place = folder.path_of(directory)
            places = places_of(model, rank=peers.rank, num_ranks=peers.num_ranks)
            if optimizer is None:
                return place, _parts(places), None
            return place, _parts([*places, *state_places(optimizer, places)]), record_of(optimizer, places)

        place, parts, record = peers.together(collect)
        tables = peers.gather_json(
            lambda: _table(parts, rank_extra, step=step, keep_last=keep_last, optimizer=record, extra=extra)
        )
        token = tables[0]["token"]
        plan = peers.together(lambda: _plan(tables))
        digests = peers.gather(lambda: b"".join(digest(parts[key].to_host()) for key in plan.compared_by(peers.rank)))
        peers.together(lambda: check_replicas(plan.replicas, digests))

        def prepare() -> None:
            if peers.rank == 0:  # rank 0 holds the lock until all ranks know the result
                held.enter_context(folder.saving(place, step, token))

        def write() -> dict[str, Any]:
            mine = {key: parts[key] for key, _ in plan.writes[peers.rank]}
            return _write(folder.temporary(place, step, token), mine, peers.rank)

        def publish() -> None:
            if peers.rank == 0:
                manifest = _manifest(plan, written, tables, step=step, optimizer=record, extra=extra)
                folder.publish(place, step, token, manifest.to_bytes())

        def prune() -> None:
            if peers.rank == 0 and keep_last is not None:
                folder.prune(place, step, keep_last)

        peers.together(prepare)
        written = peers.gather_json(write)
        peers.together(publish)
        peers.together(prune, is_last=True)
    return place / folder.name_of(step)


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's rows of one tensor: tensors that follow each other along dimension 0."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    start: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def length(self) -> int:
        return sum(len(tensor) for tensor in self.tensors)

    @property
    def run(self) -> Run:
        return self.start, self.length

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def to_host(self) -> torch.Tensor:
        """A copy that shares memory with nothing."""
        whole = torch.cat([tensor.to("cpu") for tensor in self.tensors]).contiguous()
        return whole if self.shape else whole[0].clone()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is saved, and by whom. The same on every rank.

    Attributes:
        tensors: dtype and shape by key.
        holders: by (key, run), the ranks that have it, in order.
        writes: for each rank, what it writes.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    holders: dict[tuple[str, Run], list[int]]
    writes: list[list[tuple[str, Run]]]

    @property
    def replicas(self) -> list[tuple[str, list[int]]]:
        """Keys of what several ranks have, and the ranks, in order."""
        return [(key, ranks) for (key, _), ranks in self.holders.items() if len(ranks) > 1]

    def compared_by(self, rank: int) -> list[str]:
        """Keys of the tensors that a rank has in common with others, in order."""
        return [key for key, ranks in self.replicas if rank in ranks]


def _check_arguments(step: int, keep_last: int | None) -> None:
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ArgumentError(f"step ({step!r}) must be an integer from 0 to {MAX_STEP}")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ArgumentError(f"keep_last ({keep_last!r}) must be None or an integer of at least 1")


def _parts(places: Iterable[Place]) -> dict[str, _Part]:
    by_key: dict[str, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    return {key: _part(key, here) for key, here in by_key.items()}


def _part(key: str, places: list[Place]) -> _Part:
    """What this rank has of a key: one tensor, or discrete experts one after the other."""
    first, *others = sorted(places, key=lambda place: place.first)
    if first.tensor.dtype not in NAMES:
        raise ArgumentError(f"{key} is {first.tensor.dtype}; a checkpoint holds {sorted(map(str, NAMES))}")
    tensors, end = [first.rows], first.first + len(first.rows)
    for place in others:
        if (place.tensor.dtype, place.shape) != (first.tensor.dtype, first.shape):
            raise ArgumentError(f"{key} is {first.tensor.dtype} {first.shape} and {place.tensor.dtype} {place.shape}")
        if place.start is None and first.start is None:  # e.g. the optimizer's step counts of discrete experts
            if not torch.equal(place.tensor, first.tensor):
                raise ArgumentError(
                    f"{key} has different values for experts of one layer: {first.tensor}, {place.tensor}"
                )
            continue
        if place.first != end:
            raise ArgumentError(f"{key} has rows up to {end - 1} and from {place.first} on this rank; they must follow")
        tensors.append(place.rows)
        end += len(place.rows)
    return _Part(shape=first.shape, dtype=first.tensor.dtype, start=first.first, tensors=tuple(tensors))


def _table(parts: Mapping[str, _Part], rank_extra: Any, **common: Any) -> dict[str, Any]:
    """What this rank tells the others before anything is written."""
    return {
        "token": folder.new_token(),
        "common": {name: hashlib.sha256(_json(name, value)).hexdigest() for name, value in common.items()},
        "parts": {key: [NAMES[part.dtype], part.shape, part.start, part.length] for key, part in parts.items()},
        "rank_extra": json.loads(_json("rank_extra", rank_extra)),
    }


def _json(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is not fit for JSON: {error}") from error


def _plan(tables: list[dict[str, Any]]) -> _Plan:
    for name, expected in tables[0]["common"].items():
        for rank, table in enumerate(tables):
            if table["common"][name] != expected:
                raise CheckpointError(
                    f"{name} differs between rank 0 and rank {rank}; it must be the same on all ranks"
                )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[str, Run], list[int]] = {}
    for rank, table in enumerate(tables):
        for key, (dtype, shape, start, length) in table["parts"].items():
            ours = dtype, tuple(shape)
            if tensors.setdefault(key, ours) != ours:
                raise CheckpointError(f"{key} is {ours} on rank {rank} and {tensors[key]} on another")
            holders.setdefault((key, (start, length)), []).append(rank)
    holders = dict(sorted(holders.items()))
    runs: dict[str, list[Run]] = {}
    for key, run in holders:
        runs.setdefault(key, []).append(run)
    for key, there in runs.items():
        if (problem := tiling_problem(there, num_rows(tensors[key][1]))) is not None:
            raise CheckpointError(f"{key} is not whole over the ranks that save together: {problem}")
    return _Plan(tensors, holders, _share(tensors, holders, len(tables)))


def _share(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], holders: Mapping[tuple[str, Run], list[int]], num_ranks: int
) -> list[list[tuple[str, Run]]]:
    """Which rank writes what: of the ranks that have a part, the one that has least to write so far."""
    writes: list[list[tuple[str, Run]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for (key, run), ranks in sorted(holders.items(), key=lambda item: len(item[1])):  # parts that one rank has first
        dtype, shape = tensors[key]
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        writes[writer].append((key, run))
        load[writer] += math.prod((run[1], *shape[1:])) * DTYPES[dtype].itemsize
    return writes


def _write(unfinished: Path, parts: Mapping[str, _Part], rank: int) -> dict[str, Any]:
    """Writes files of at most MAX_FILE_BYTES (a larger tensor has its own file); returns what is in them."""
    shards: list[dict[str, str]] = []  # for each file, key by name
    size = 0
    for key, part in parts.items():
        name = stored_name(key, part.start, part.length, num_rows(part.shape))
        if not shards or size + part.num_bytes > MAX_FILE_BYTES or name in shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = key
        size += part.num_bytes
    written = {}
    for number, shard in enumerate(shards):
        file = f"rank-{rank:05d}-{number:04d}.safetensors"
        data = safetensors.torch.save({name: parts[key].to_host() for name, key in shard.items()}, {"format": "pt"})
        files.write(unfinished / file, data)
        digest = hashlib.sha256(data).hexdigest()
        written[file] = {"bytes": len(data), "sha256": digest, "keys": list(shard.values())}
    return written


def _manifest(
    plan: _Plan,
    written: list[dict[str, Any]],
    tables: list[dict[str, Any]],
    *,
    step: int,
    optimizer: dict[str, Any] | None,
    extra: Any,
) -> Manifest:
    files: dict[str, StoredFile] = {}
    slices: dict[str, list[StoredSlice]] = {key: [] for key in plan.tensors}
    for rank, theirs in enumerate(written):
        runs = dict(plan.writes[rank])
        for file, content in theirs.items():
            files[file] = StoredFile(content["bytes"], content["sha256"])
            for key in content["keys"]:
                slices[key].append(StoredSlice(*runs[key], file))
    tensors = {
        key: StoredTensor(dtype, shape, tuple(sorted(slices[key], key=lambda piece: piece.start)))
        for key, (dtype, shape) in plan.tensors.items()
    }
    return Manifest(
        step=step,
        num_ranks=len(tables),
        ep_size=max([len(stored.slices) for stored in tensors.values()], default=1),
        files=files,
        tensors=tensors,
        optimizer=optimizer,
        extra=extra,
        rank_extra=[table["rank_extra"] for table in tables],
        written_by={
            "symmoe": symmoe.__version__,
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
    )
