"""Loads and saves swapped models in transformers' checkpoints; each rank handles its own experts.

All ranks of a heap's group must see the same folders, as they do on one node.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from symmoe.checkpoint.folder import sync
from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.tensors import REPLICAS, agreed, bare, digest, lists_by_key
from symmoe.checks.extras import extra
from symmoe.errors import CheckpointError, SymmoeError
from symmoe.integrations.transformers.layout import INDEX, WEIGHTS, Layout, new_layout
from symmoe.integrations.transformers.pieces import Piece, find_pieces, pieces_of, restore
from symmoe.integrations.transformers.swap import heap_of

with extra("transformers"):
    from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SHARD_BYTES = 5_000_000_000  # of a new file
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@torch.no_grad()
def load_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fills a swapped model from a checkpoint of transformers. Reads only this rank's experts.

    Keys may be any that transformers loads: one per expert, as mostly on the hub, or fused; values are cast to the
    model's dtypes. Reads one expert at a time. Collective over the heap's process group.

    Args:
        model: swapped, on any device but meta; the same on every rank.
        folder: has model.safetensors, or model.safetensors.index.json and its files.

    Raises:
        ArgumentError: the model is not swapped.
        CheckpointError: on every rank, if any rank cannot read it, or if keys are missing, not in the model or of
            another shape. The model is unchanged unless a file broke during the reading.
    """
    folder = Path(folder)
    model = bare(model)
    with Peers(heap_of(model).bootstrap) as peers:
        layout, pieces = peers.run(lambda: find_pieces(model, folder))
        peers.run(lambda: _read(folder, layout, pieces))
        peers.run(lambda: restore(model, pieces), is_last=True)


@torch.no_grad()
def save_checkpoint(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Saves a swapped model as a checkpoint of transformers.

    Rank 0 lays out the files, then every rank writes its own experts at their offsets, one at a time. Collective over
    the heap's process group; if several EP groups train together, only one of them calls it.

    The files go into `folder` + ".partial", renamed when they are on disk. A checkpoint in `folder` is replaced whole,
    other files stay. A kill at any moment leaves the old weights or the new, never a mixture; if old and new shards
    have the same names, transformers may find no checkpoint.

    Args:
        model: swapped; the same on every rank, after the same number of steps.
        folder: new, empty or not.
        like: a checkpoint of the same model. The new one copies its files, keys, dtypes and index, byte for byte except
            for the weights' values; keys that are not in the model, and other files (config, tokenizer), are copied.
            None: the keys of the hub, the model's dtypes, and its config.
        max_shard_bytes: largest size of one file, without `like`.

    Raises:
        ArgumentError: the model is not swapped.
        CheckpointError: on every rank, if `like` is not a checkpoint of this model, `folder` is a file, replicated
            tensors differ between ranks, or any rank cannot write. `folder` is unchanged, unless renaming failed.
    """
    folder, heap = (
        Path(folder).absolute(),
        heap_of(model),
    )  # "." has no name to append ".partial" to
    model = bare(model)
    like = None if like is None else Path(like)
    partial = folder.with_name(folder.name + ".partial")
    with Peers(heap.bootstrap) as peers:
        with peers.step():
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{folder} is a file; a checkpoint is written to a folder")
            if like is None:
                pieces = pieces_of(model, None)
                tensors = {piece.key: (piece.dtype, piece.shape) for piece in pieces}
                layout = new_layout(tensors, max_shard_bytes=max_shard_bytes)
            else:
                layout, pieces = find_pieces(model, like)
        compare(
            peers,
            {
                piece.key: piece.tensor
                for piece in pieces
                if not piece.is_expert and piece.tensor is not None
            },
        )
        try:
            peers.run(
                lambda: None if heap.rank else _create_files(partial, layout, pieces, model, like)
            )
            local_pieces = [piece for piece in pieces if piece.is_expert or heap.rank == 0]
            peers.run(lambda: _write(partial, layout, local_pieces))
        except SymmoeError:
            if heap.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        # A failure here leaves files without their names in `folder`.
        peers.run(lambda: None if heap.rank else _publish(partial, folder), is_last=True)


def compare(peers: Peers, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError on every rank if replicated tensors differ. Collective."""
    with peers.step() as compared:
        compared.local = {key: digest(tensor) for key, tensor in tensors.items()}
    agreed(compared.by_rank, REPLICAS)


def _read(folder: Path, layout: Layout, pieces: Iterable[Piece]) -> None:
    for name, local_pieces in _by_file(layout, pieces).items():
        with safe_open(folder / name, framework="pt") as file:
            for piece, tensor in local_pieces:
                if piece.index is None:
                    value = file.get_tensor(piece.key)
                else:
                    value = file.get_slice(piece.key)[piece.index : piece.index + 1]
                tensor.copy_(value.view(tensor.shape))


def _by_file(
    layout: Layout, pieces: Iterable[Piece]
) -> dict[str, list[tuple[Piece, torch.Tensor]]]:
    """This rank's pieces, by file."""
    return lists_by_key(
        (layout.tensors[piece.key].file, (piece, piece.tensor))
        for piece in pieces
        if piece.tensor is not None
    )


def _create_files(
    partial: Path,
    layout: Layout,
    pieces: Iterable[Piece],
    model: PreTrainedModel,
    like: Path | None,
) -> None:
    """Creates the weight files, with a header and no values, or as copies if they have tensors that the model does not
    use; and the other files: config and tokenizer."""
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    partial.mkdir(parents=True)
    keys = {piece.key for piece in pieces}
    with_others = {stored.file for key, stored in layout.tensors.items() if key not in keys}
    for name, (header, size) in layout.files.items():
        if like is not None and name in with_others:
            shutil.copyfile(like / name, partial / name)
        else:
            (partial / name).write_bytes(header)
            os.truncate(partial / name, size)
    if layout.index is not None:
        (partial / INDEX).write_bytes(layout.index)
    if like is None:
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = (
            [type(model).__name__],
            str(model.dtype).removeprefix("torch."),
        )
        config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
    for path in () if like is None else like.iterdir():
        if path.is_file() and path.name not in (*layout.files, INDEX, WEIGHTS):
            shutil.copyfile(path, partial / path.name)


def _write(partial: Path, layout: Layout, pieces: Iterable[Piece]) -> None:
    for name, local_pieces in _by_file(layout, pieces).items():
        with (partial / name).open("r+b") as file:
            for piece, tensor in local_pieces:
                stored = layout.tensors[piece.key]
                value = tensor.to(stored.dtype).contiguous().reshape(-1).cpu().view(torch.uint8)
                file.seek(stored.start + (piece.index or 0) * value.numel())
                file.write(value.numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _publish(partial: Path, folder: Path) -> None:
    """Moves the files of `partial` into `folder`, in place of its checkpoint."""
    if not folder.exists() or not any(folder.iterdir()):  # rename can replace an empty one
        partial.rename(folder)
        sync(folder.parent)
        return
    old_names = {
        path.name
        for path in folder.iterdir()
        if path.name == INDEX or _WEIGHTS.fullmatch(path.name)
    }
    new_names = {path.name for path in partial.iterdir()}
    last = INDEX if INDEX in new_names else WEIGHTS  # what transformers looks for
    if old_names & new_names - {last}:  # shards of equal names are replaced one by one
        (folder / INDEX).unlink(missing_ok=True)
        sync(folder)
    for name in sorted(new_names, key=lambda name: name == last):
        (partial / name).replace(folder / name)
    sync(folder)
    for name in old_names - new_names:
        (folder / name).unlink()
    partial.rmdir()
