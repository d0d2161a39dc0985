"""Which tensor of a swapped model is which part of which key of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.experts import ExpertParallelExperts
from symmoe.integrations.transformers.families import BLOCK, Family, family_of
from symmoe.integrations.transformers.layout import Layout

_MAX_NAMED = 3  # problems that a text spells out
_KNOWN = {f"mlp.{linear}.{kind}" for linear in ("fc1", "fc2") for kind in ("weight", "bias")}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor on disk, or one expert's part of it.

    Attributes:
        key: in the checkpoint.
        shape: shape of the whole tensor on disk.
        dtype: dtype in the model.
        index: the piece's index in the first dimension; None: the piece is the whole tensor.
        tensor: the model's memory, viewed in the layout on disk; None on ranks that do not hold this expert.
        writer: the rank that saves it.
        is_everywhere: whether every rank has it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int | None
    tensor: torch.Tensor | None
    writer: int
    is_everywhere: bool = False


def pieces_of(model: nn.Module, stored: Collection[str] | None) -> list[Piece]:
    """Every piece of a swapped model, of all ranks, in the order of the model's state dict.

    Args:
        stored: keys of the checkpoint, which decide between experts one by one and fused, between the names of blocks
            on disk and in memory, and which of several tied tensors are there; None: as transformers saves it.

    Raises:
        CheckpointError: an expert has a tensor that transformers does not know, such as an adapter's.
    """
    family = family_of(model.config)
    blocks = {path: m for path, m in model.named_modules() if isinstance(m, ExpertParallelExperts)}
    names = {path: _name_on_disk(family, path, stored) for path in blocks}
    renamed = {path.rpartition(".")[0] + ".": names[path].rpartition(".")[0] + "." for path in blocks}
    tensors = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(_replace_prefix(name, renamed))
    pieces: list[Piece] = []
    for name, tensor in tensors.items():
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is not None:
            if name.removeprefix(f"{path}.") not in _KNOWN:
                raise CheckpointError(f"{name} has no place in a checkpoint of transformers; merge or remove it")
            if path in names:  # its first tensor
                pieces += _expert_pieces(family, blocks[path], names.pop(path), stored)
            continue
        key = _replace_prefix(name, renamed)
        keys = aliases[id(tensor)]
        on_disk = keys[:1] if stored is None else [k for k in keys if k in stored] or keys[:1]
        if key in on_disk:
            pieces.append(Piece(key, tuple(tensor.shape), tensor.dtype, None, tensor.detach(), 0, True))
    return pieces


def layout_problem(pieces: Iterable[Piece], layout: Layout, ignored: Iterable[str]) -> CheckpointError | None:
    """Why a checkpoint cannot be that of a model, or None.

    Args:
        ignored: patterns of keys that the checkpoint may have in addition to the model's.
    """
    problems = {}  # by key: pieces of one key have one problem
    wanted = {piece.key: piece for piece in pieces}
    for key, piece in wanted.items():
        stored = layout.tensors.get(key)
        if stored is None:
            problems[key] = f"{key} is missing (the model has shape {list(piece.shape)})"
        elif stored.shape != piece.shape:
            problems[key] = f"{key} has shape {list(stored.shape)}; the model has {list(piece.shape)}"
        elif stored.dtype is None or stored.dtype.is_floating_point != piece.dtype.is_floating_point:
            problems[key] = f"{key} has a dtype that cannot become {piece.dtype}; is the checkpoint quantised?"
    for key in keys_not_in_model(wanted, layout):
        if not any(re.search(pattern, key) for pattern in ignored):
            problems[key] = f"{key} of shape {list(layout.tensors[key].shape)} is not in the model"
    if not problems:
        return None
    named = "; ".join(list(problems.values())[:_MAX_NAMED])
    more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return CheckpointError(f"the checkpoint does not fit the model: {named}{more}")


def keys_not_in_model(wanted: Container[str], layout: Layout) -> list[str]:
    """Keys of the checkpoint that are not among the model's."""
    return [key for key in layout.tensors if key not in wanted]


def _name_on_disk(family: Family, path: str, stored: Collection[str] | None) -> str:
    """The name that an experts module at `path` has in checkpoints."""
    parent, _, experts = path.rpartition(f".{BLOCK}.")
    block = f"{parent}.{family.block_on_disk}."
    return f"{block}{experts}" if stored is None or any(key.startswith(block) for key in stored) else path


def _replace_prefix(name: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _expert_pieces(
    family: Family, module: ExpertParallelExperts, name: str, stored: Collection[str] | None
) -> Iterator[Piece]:
    """Pieces of all experts of a block; of all ranks, because every rank checks all keys."""
    mlp, heap = module.mlp, module.heap
    num_experts, hidden, ffn, dtype = module.num_experts, mlp.hidden, mlp.ffn, mlp.fc1.weight.dtype
    fused = stored is not None and f"{name}.gate_up_proj" in stored
    matrices = None if fused else family.matrices_on_disk
    for expert in range(num_experts):
        rank, i = divmod(expert, mlp.num_groups)
        here = rank == heap.rank
        w1 = mlp.fc1.weight.detach()[i] if here else None
        w2 = mlp.fc2.weight.detach()[i] if here else None
        if matrices is not None:
            gate, up, down = (f"{name}.{expert}.{matrix}.weight" for matrix in matrices)
            yield Piece(gate, (ffn, hidden), dtype, None, w1[:ffn] if w1 is not None else None, rank)
            yield Piece(up, (ffn, hidden), dtype, None, w1[ffn:] if w1 is not None else None, rank)
            yield Piece(down, (hidden, ffn), dtype, None, w2, rank)
        elif not family.clamped:
            yield Piece(f"{name}.gate_up_proj", (num_experts, 2 * ffn, hidden), dtype, expert, w1, rank)
            yield Piece(f"{name}.down_proj", (num_experts, hidden, ffn), dtype, expert, w2, rank)
        else:
            b1, b2 = (bias.detach()[i] if here and bias is not None else None for bias in (mlp.fc1.bias, mlp.fc2.bias))
            w1, w2 = (None if weight is None else weight.T for weight in (w1, w2))
            yield Piece(f"{name}.gate_up_proj", (num_experts, hidden, 2 * ffn), dtype, expert, w1, rank)
            yield Piece(f"{name}.gate_up_proj_bias", (num_experts, 2 * ffn), dtype, expert, b1, rank)
            yield Piece(f"{name}.down_proj", (num_experts, ffn, hidden), dtype, expert, w2, rank)
            yield Piece(f"{name}.down_proj_bias", (num_experts, hidden), dtype, expert, b2, rank)
