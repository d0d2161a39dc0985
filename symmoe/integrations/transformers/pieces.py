"""Maps the tensors of a transformers checkpoint to parts of a swapped model.

transformers renames and converts tensors that it saves and loads (transformers.conversion_mapping). This module keeps
no copy of those rules. transformers converts small stand-ins of the experts' parameters, whose values
are their positions: the result shows which part of the experts each key has.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint.tensors import COMPILED, lists_by_key
from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.experts import ExpertParallelExperts
from symmoe.integrations.transformers.layout import Layout, StoredTensor, read_layout

_MAX_NAMED = 3  # problems that a text lists
_FFN, _HIDDEN = (
    4,
    6,
)  # small parameters' sizes: dimensions differ, and a half is never every other column


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor on disk, or one expert's part of it."""

    key: str  # in the checkpoint
    shape: tuple[int, ...]  # shape of the whole tensor on disk
    dtype: torch.dtype  # dtype in the model
    index: (
        int | None
    )  # the piece's index in the first dimension; None: the piece is the whole tensor
    tensor: torch.Tensor | None  # elements in the order on disk; None: another rank's expert
    is_expert: bool  # otherwise all ranks have it
    conversion: tuple[str, str, Any] | None = None  # for memory outside the model: see `restore`


@dataclass(frozen=True, slots=True)
class _Source:
    """A parameter of experts, and its small stand-in."""

    module: ExpertParallelExperts
    weight: torch.Tensor  # of this rank, [e, ..] in the layout of GroupedMLP
    positions: torch.Tensor  # int64 [E, ..] in that layout: the position of every element


def find_pieces(model: nn.Module, folder: Path) -> tuple[Layout, list[Piece]]:
    """The layout of the checkpoint in a folder, and the pieces of a swapped model in it. CheckpointError: see
    read_layout and pieces_of, or keys, shapes or dtypes do not match the model."""
    layout = read_layout(folder)
    pieces = pieces_of(model, layout.tensors)
    pieces_by_key = {piece.key: piece for piece in pieces}  # the pieces of a key share one problem
    # Patterns of allowed additional keys, as in transformers.
    ignored = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        r"rotary_emb\.inv_freq",
    }
    misfits = (_misfit(piece, layout.tensors.get(key)) for key, piece in pieces_by_key.items())
    problems = [text for text in misfits if text]
    problems += [
        f"{key} of shape {list(tensor.shape)} is not in the model"
        for key, tensor in layout.tensors.items()
        if key not in pieces_by_key and not any(re.search(pattern, key) for pattern in ignored)
    ]
    if problems:
        suffix = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise CheckpointError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:_MAX_NAMED])}{suffix}"
        )
    return layout, pieces


def _misfit(piece: Piece, stored: StoredTensor | None) -> str:
    if stored is None:
        return f"{piece.key} is missing (the model has shape {list(piece.shape)})"
    if stored.shape != piece.shape:
        return f"{piece.key} has shape {list(stored.shape)}; the model has {list(piece.shape)}"
    if stored.dtype is None or stored.dtype.is_floating_point != piece.dtype.is_floating_point:
        return f"{piece.key} has a dtype that cannot become {piece.dtype}; is the checkpoint quantised?"
    return ""


def pieces_of(model: nn.Module, stored: Mapping[str, StoredTensor] | None) -> list[Piece]:
    """Every piece of a swapped model, of all ranks.

    Args:
        stored: tensors of a checkpoint by any keys that transformers loads into the model: saved names or names in
            memory (experts one by one or fused), and any of several tied tensors; pieces have these keys, and
            the missing keys. None: the keys that transformers saves, in order.

    Raises:
        CheckpointError: an expert has a tensor that transformers lacks, such as an adapter's, or transformers converts
            a tensor in a way that symmoe does not support.
    """
    plain, sources = _unswapped(model)
    plain_ids, pieces = {id(tensor) for tensor in plain.values()}, list[Piece]()
    for key, tensor, conversion in _saved(model, plain, stored):
        if tensor.is_complex():
            key_pieces = list(_expert_pieces(key, tensor, sources[int(tensor.flatten()[0].imag)]))
        else:
            value, is_converted = tensor.detach(), id(tensor) not in plain_ids
            if stored is not None and is_converted and conversion is None:
                raise CheckpointError(
                    f"{key}: how transformers loads what it saves there is not understood"
                )
            shape, loads = tuple(value.shape), conversion if is_converted else None
            key_pieces = [
                Piece(key, shape, value.dtype, None, value, is_expert=False, conversion=loads)
            ]
        operations = () if conversion is None else conversion[2].operations
        if (
            stored
            and key in stored
            and any(getattr(operation, "check_dims", False) for operation in operations)
        ):
            key_pieces = [_as_in_file(piece, stored[key]) for piece in key_pieces]
        pieces += key_pieces
    return pieces


def _saved(
    model: nn.Module, plain: dict[str, torch.Tensor], stored: Mapping[str, StoredTensor] | None
) -> Iterator[tuple[str, torch.Tensor, tuple[str, str, Any] | None]]:
    """transformers' conversion of `plain`: keys, tensors, and the conversion that loads a key of `stored`, if any."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]  # new ones: they remember keys
    converters = {
        key: transform
        for transform in transforms
        if hasattr(transform, "operations")
        for key in transform.source_patterns
    }
    addresses = _addresses(model, transforms, plain, stored or ())
    stand_in: Any = copy.copy(model)
    vars(stand_in)["get_parameter"] = plain.__getitem__
    if stored is not None:  # transformers saves a model with the conversions that loaded it
        vars(stand_in)["_weight_conversions"] = [
            transform for transform in transforms if transform.was_used()
        ]
    names = lists_by_key((id(tensor), name) for name, tensor in plain.items())  # several if tied
    in_file = {name for name, *_ in addresses.values()}
    chosen = [[name for name in tied if name in in_file] or tied[:1] for tied in names.values()]
    saved: dict[str, torch.Tensor] = revert_weight_conversion(
        stand_in, {n: plain[n] for tied in chosen for n in tied}
    )
    if stored is None:
        yield from ((key, tensor, None) for key, tensor in saved.items())
        return
    key_of = {address: key for key, address in addresses.items()}
    for key, address in _addresses(model, transforms, plain, saved).items():
        name, pattern, _ = address
        conversion = None if pattern is None else (name, pattern, converters[pattern])
        yield key_of.get(address, key), saved[key], conversion


def _as_in_file(piece: Piece, stored: StoredTensor) -> Piece:
    """The piece, with its last two dimensions exchanged if they are so in the file."""
    transposed = (*piece.shape[:-2], *piece.shape[:-3:-1])
    if stored.shape == piece.shape or stored.shape != transposed:
        return piece
    return replace(
        piece, shape=transposed, tensor=None if piece.tensor is None else piece.tensor.mT
    )


@torch.no_grad()
def restore(model: nn.Module, pieces: Iterable[Piece]) -> None:
    """Copies pieces outside the model's memory into it, with transformers' conversion: by the name in memory, the
    pattern of the key and the WeightConverter."""
    from transformers.core_model_loading import dot_natural_key

    tensors, collected = _plain_state(model), dict[str, Any]()
    for piece in sorted(pieces, key=lambda piece: dot_natural_key(piece.key)):
        if piece.conversion is not None:
            name, pattern, converter = piece.conversion
            collected.setdefault(name, copy.deepcopy(converter)).add_tensor(
                name, piece.key, pattern, piece.tensor
            )
    for name, converter in collected.items():
        for target, value in converter.convert(name, model=model, config=model.config).items():
            tensors[target].copy_(value[0] if isinstance(value, list) else value)


def _unswapped(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[_Source]]:
    """The unmodified model's state dict, with small stand-ins for the experts' parameters; and their sources. Stand-ins
    are complex, unlike any model's: the real part is the position, the imaginary part the source's number."""
    plain, sources = dict[str, torch.Tensor](), list[_Source]()
    blocks = {
        f"{path}.".replace(COMPILED, "")[:-1]: module
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelExperts)
    }
    stock_names = {
        f"{path}.mlp.{grouped_name}": (path, f"{path}.{stock}")
        for path, module in blocks.items()
        for stock, grouped_name in module.form.parameters.items()
    }
    for name, tensor in _plain_state(model).items():
        if name in stock_names:
            path, stock = stock_names[name]
            form = blocks[path].form
            sizes = (
                (form.activation.hidden_width(_FFN), _HIDDEN)
                if ".fc1." in name
                else (_HIDDEN, _FFN)
            )
            shape = (blocks[path].num_experts, *sizes)[: tensor.dim()]
            positions = torch.arange(math.prod(shape), device="cpu").view(shape)
            plain[stock] = form.convert_layout(positions.to(torch.complex128) + len(sources) * 1j)
            sources.append(_Source(blocks[path], tensor.detach(), positions))
        elif any(name.startswith(f"{path}.") for path in blocks):
            raise CheckpointError(
                f"{name} has no place in a checkpoint of transformers; merge or remove it"
            )
        else:
            plain[name] = tensor
    return plain, sources


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model by their names without torch.compile."""
    return {
        name.replace(COMPILED, ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _addresses(
    model: nn.Module, transforms: list[Any], plain: dict[str, torch.Tensor], keys: Iterable[str]
) -> dict[str, tuple[str, str | None, tuple[str, ...]]]:
    """transformers' targets of keys: the (first) name in memory, the pattern of a conversion, and the numbers in the
    key, which distinguish keys of one conversion. transforms: its renamings (WeightRenaming) and conversions
    (WeightConverter)."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = (
        [e for e in transforms if hasattr(e, "operations") == has_operations]
        for has_operations in (False, True)
    )
    addresses, prefix = {}, str(model.base_model_prefix)
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, plain)
        if name not in plain and key in plain:
            name, pattern = key, None
        addresses[key] = (
            name,
            pattern,
            tuple(re.findall(r"\d+", key)) if pattern is not None else (),
        )
    return addresses


def _expert_pieces(key: str, values: torch.Tensor, source: _Source) -> Iterator[Piece]:
    """Pieces of a key with parts of experts, for all ranks: every rank checks all keys."""
    mlp, positions, rank = source.module.mlp, source.positions, source.module.heap.rank
    sizes = {_HIDDEN: mlp.hidden, _FFN: mlp.ffn, 2 * _FFN: 2 * mlp.ffn}
    is_stacked = values.dim() == positions.dim()
    for index, row in enumerate(
        values.real.long().view(-1 if is_stacked else 1, *values.shape[is_stacked:])
    ):
        expert = int(row.flatten()[0]) // positions[0].numel()
        parts = (part.reshape(-1) for part in _parts(positions[expert]))
        number = next(
            (i for i, part in enumerate(parts) if torch.equal(part, row.reshape(-1))), None
        )
        if number is None or not sizes.keys() >= set(row.shape):
            raise CheckpointError(
                f"{key}: which part of experts transformers puts there is not understood"
            )
        shape = (*values.shape[:is_stacked], *(sizes[dim] for dim in row.shape))
        i = expert - rank * len(source.weight)
        part = _parts(source.weight[i])[number] if 0 <= i < len(source.weight) else None
        yield Piece(
            key, shape, source.weight.dtype, index if is_stacked else None, part, is_expert=True
        )


def _parts(rows: torch.Tensor) -> list[torch.Tensor]:
    """Possible transformers tensors of an expert's weight [W, ..] or bias [W]: the whole, gate and up, or both with
    rows alternating or in halves; and their transposes. All are views of `rows`."""
    parts = [rows]
    if len(rows) % 2 == 0:
        parts += [
            *rows.chunk(2),
            *(rows.unflatten(0, blocks).transpose(0, 1) for blocks in ((2, -1), (-1, 2))),
        ]
    return [view for part in parts for view in (part, part.movedim(-1, 0))]
