"""Which tensors a checkpoint of transformers has of a swapped model, and which part of the model each of them is.

transformers renames and converts what it saves and loads (transformers.conversion_mapping). No list of that is kept
here, it is asked. What a key has of experts shows when transformers converts small parameters of as many experts, whose
values are their own places.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.experts import ExpertParallelExperts
from symmoe.integrations.transformers.layout import Layout, StoredTensor, read_layout

_MAX_NAMED = 3  # problems that a text spells out
_FFN, _HIDDEN = 4, 6  # of small parameters: no two dimensions are equal, and no half is every other column
_SHIFT = 40  # bits of a place, below the number of the parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor on disk, or one expert's part of it."""

    key: str  # in the checkpoint
    shape: tuple[int, ...]  # shape of the whole tensor on disk
    dtype: torch.dtype  # dtype in the model
    index: int | None  # the piece's index in the first dimension; None: the piece is the whole tensor
    tensor: torch.Tensor | None  # elements in the order on disk; None: this rank does not hold the expert
    writer: int  # the rank that saves it
    is_everywhere: bool = False  # whether every rank has it
    is_converted: bool = False  # whether `tensor` is not the model's memory; `restore` puts it there


@dataclass(frozen=True, slots=True)
class _Source:
    """Whose a parameter of experts is, and a small one in its place."""

    module: ExpertParallelExperts
    linear: str
    kind: str
    small: torch.Tensor  # int64 [E, ..] in the layout of GroupedMLP; values are places


def find_pieces(model: nn.Module, folder: Path) -> tuple[Layout, list[Piece]]:
    """The layout of the checkpoint in a folder, and the pieces of a swapped model in it. CheckpointError: see
    read_layout and pieces_of, or keys, shapes or dtypes are not those of the model."""
    layout = read_layout(folder)
    either_way = [
        pattern
        for pattern, each in _converters(model).items()
        if any(getattr(op, "check_dims", False) for op in each.operations)
    ]
    pieces = [
        _as_in_file(piece, layout.tensors.get(piece.key))
        if any(re.search(each, piece.key) for each in either_way)
        else piece
        for piece in pieces_of(model, layout.tensors)
    ]
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
    # Patterns of keys that it may have in addition to its own, as in transformers.
    ignored = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"}
    for key in layout.tensors:
        if key not in wanted and not any(re.search(pattern, key) for pattern in ignored):
            problems[key] = f"{key} of shape {list(layout.tensors[key].shape)} is not in the model"
    if problems:
        named = "; ".join(list(problems.values())[:_MAX_NAMED])
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise CheckpointError(f"the checkpoint does not fit the model: {named}{more}")
    return layout, pieces


def pieces_of(model: nn.Module, stored: Collection[str] | None) -> list[Piece]:
    """Every piece of a swapped model, of all ranks.

    Args:
        stored: keys of the checkpoint, whichever transformers loads into the model: those that it saves or those in
            memory (experts one by one or fused), and any of several tied tensors. None: those that it saves, in order.

    Raises:
        CheckpointError: an expert has a tensor that transformers does not know, such as an adapter's, or transformers
            converts a tensor in a way that is not understood here.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain, sources = _unswapped(model)
    aliases: dict[int, list[str]] = {}
    for name, tensor in plain.items():
        aliases.setdefault(id(tensor), []).append(name)
    if stored is None:
        plain = {name: plain[name] for name, *_ in aliases.values()}
    stand_in = SimpleNamespace(
        config=model.config,
        base_model_prefix=model.base_model_prefix,
        named_modules=model.named_modules,
        get_parameter=plain.__getitem__,
        _weight_conversions=getattr(model, "_weight_conversions", None),  # of a model that transformers has loaded
    )
    saved: dict[str, torch.Tensor] = revert_weight_conversion(stand_in, plain)  # type: ignore[arg-type]
    if stored is not None:
        saved = _as_stored(model, plain, saved, stored, (aliases, sources))
    pieces: list[Piece] = []
    for key, tensor in saved.items():
        if (source := _source_of(tensor, sources)) is not None:
            pieces += _expert_pieces(key, tensor, sources[source])
        else:
            is_converted = id(tensor) not in aliases
            value = tensor.detach()
            pieces.append(Piece(key, tuple(value.shape), value.dtype, None, value, 0, True, is_converted))
    return pieces


def _as_in_file(piece: Piece, stored: StoredTensor | None) -> Piece:
    """The piece with its last two dimensions exchanged, if the file has them so."""
    turned = (*piece.shape[:-2], *piece.shape[:-3:-1])
    if stored is None or stored.shape == piece.shape or stored.shape != turned:
        return piece
    return replace(piece, shape=turned, tensor=None if piece.tensor is None else piece.tensor.mT)


@torch.no_grad()
def restore(model: nn.Module, pieces: Iterable[Piece]) -> None:
    """Puts pieces that are no memory of the model into it, as transformers converts them."""
    tensors, converters = model.state_dict(keep_vars=True), _converters(model)
    values = {piece.key: piece.tensor for piece in pieces if piece.is_converted}
    collected = dict[str, Any]()
    for key, (name, pattern, _) in _addresses(model, tensors, values).items():
        assert pattern is not None  # see _as_stored
        converter = collected.setdefault(name, copy.deepcopy(converters[pattern]))
        converter.add_tensor(name, key, pattern, values[key])
    for name, converter in collected.items():
        for target, value in converter.convert(name, model=model, config=model.config).items():
            tensors[target].copy_(value[0] if isinstance(value, list) else value)


def _unswapped(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, _Source]]:
    """The state dict that the unmodified model would have, with small parameters in the place of those of experts; and
    whose these are."""
    blocks = {path: m for path, m in model.named_modules() if isinstance(m, ExpertParallelExperts)}
    plain, sources = dict[str, torch.Tensor](), dict[str, _Source]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is None:
            plain[name] = tensor
            continue
        module = blocks[path]
        names = {f"{path}.{stock}": own for stock, own in module.form.parameters.items()}
        if name not in [f"{path}.mlp.{linear}.{kind}" for linear, kind in names.values()]:
            raise CheckpointError(f"{name} has no place in a checkpoint of transformers; merge or remove it")
        for stock, (linear, kind) in names.items():
            if stock not in plain:
                width = module.form.activation.hidden_width(_FFN)
                sizes = (width, _HIDDEN) if linear == "fc1" else (_HIDDEN, _FFN)
                shape = (module.num_experts, *sizes)[: 3 if kind == "weight" else 2]
                places = torch.arange(math.prod(shape), device="cpu") + (len(sources) + 1 << _SHIFT)
                sources[stock] = _Source(module, linear, kind, places.view(shape))
                plain[stock] = module.form.turned(places.view(shape))
    return plain, sources


def _as_stored(
    model: nn.Module,
    plain: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor],
    stored: Collection[str],
    known: tuple[dict[int, list[str]], dict[str, _Source]],
) -> dict[str, torch.Tensor]:
    """What a checkpoint with the keys `stored` has, by these keys: tensors of `plain` (in memory) where it has those,
    and of `saved` where not. Keys that it should have are there, too. known: names of a tensor, and sources."""
    aliases, sources = known
    key_of = {address: key for key, address in _addresses(model, plain, stored).items()}
    renamed = {id(tensor) for tensor in saved.values()}
    converted = {name for name, tensor in plain.items() if id(tensor) not in renamed}
    in_memory = {name for name in plain if (name, None, ()) in key_of}
    if (converted - sources.keys()) & in_memory:
        in_memory |= converted - sources.keys()  # all of them or none
    result = {key_of.get((name, None, ()), name): plain[name] for name in converted & in_memory}
    for key, address in _addresses(model, plain, saved).items():
        tensor = saved[key]
        names = aliases.get(id(tensor), [])  # none of converted tensors
        if names:
            is_there = address in key_of or (address[0] == names[0] and in_memory.isdisjoint(names))
        elif (source := _source_of(tensor, sources)) is not None:
            is_there = source not in in_memory
        else:
            is_there = in_memory.isdisjoint(converted - sources.keys())
            if is_there and address[1] is None:
                raise CheckpointError(f"{key}: how transformers loads what it saves there is not understood")
        if is_there:
            result[key_of.get(address, key)] = tensor
    return result


def _source_of(tensor: torch.Tensor, sources: dict[str, _Source]) -> str | None:
    """The parameter of experts, by its name in transformers, of which `tensor` is a small part, or None."""
    is_small = tensor.dtype == torch.int64 and tensor.numel() > 0
    number = int(tensor.flatten()[0]) >> _SHIFT if is_small else 0
    return list(sources)[number - 1] if 0 < number <= len(sources) else None


def _addresses(
    model: nn.Module, plain: dict[str, torch.Tensor], keys: Collection[str]
) -> dict[str, tuple[str, str | None, tuple[str, ...]]]:
    """Where transformers loads keys: the (first) name in memory, the pattern of a conversion, and the numbers in the
    key, which tell keys of one conversion apart."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    transforms = _transforms(model)  # new ones: they remember keys
    renamings, converters = ([e for e in transforms if hasattr(e, "operations") == has] for has in (False, True))
    addresses, prefix = {}, str(model.base_model_prefix)
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, plain)
        if name not in plain and key in plain:
            name, pattern = key, None
        addresses[key] = name, pattern, tuple(re.findall(r"\d+", key)) if pattern is not None else ()
    return addresses


def _transforms(model: nn.Module) -> list[Any]:
    """How transformers renames keys (WeightRenaming) and converts tensors (WeightConverter) when it loads a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)  # type: ignore[arg-type]


def _converters(model: nn.Module) -> dict[str, Any]:
    """The WeightConverters of a model by their patterns of keys."""
    return {key: each for each in _transforms(model) if hasattr(each, "operations") for key in each.source_patterns}


def _expert_pieces(key: str, tensor: torch.Tensor, source: _Source) -> Iterator[Piece]:
    """Pieces of a key that has something of experts; of all ranks, because every rank checks all keys."""
    mlp, small, rank = source.module.mlp, source.small, source.module.heap.rank
    places, size = tensor - small.flatten()[0], small[0].numel()
    is_stacked = tensor.dim() == small.dim()
    one = places[0] if is_stacked else places
    first = int(one.flatten()[0]) // size
    experts = range(len(small)) if is_stacked else [first]
    wanted = torch.stack([one - first * size + expert * size for expert in experts]).view(places.shape)
    parts = [part.reshape(-1) for part in _parts(small[first] - small[first].flatten()[0])]
    number = next((i for i, part in enumerate(parts) if torch.equal(part, one.reshape(-1) - first * size)), None)
    sizes = {_HIDDEN: mlp.hidden, _FFN: mlp.ffn, 2 * _FFN: 2 * mlp.ffn}
    if number is None or not torch.equal(wanted, places) or not sizes.keys() >= set(one.shape):
        raise CheckpointError(f"{key}: which part of experts transformers puts there is not understood")
    shape = (*places.shape[:is_stacked], *(sizes[dim] for dim in one.shape))
    own = getattr(getattr(mlp, source.linear), source.kind).detach()
    for expert in experts:
        writer, i = divmod(expert, len(own))
        part = _parts(own[i])[number] if writer == rank else None
        yield Piece(key, shape, own.dtype, expert if is_stacked else None, part, writer)


def _parts(rows: torch.Tensor) -> list[torch.Tensor]:
    """What transformers may have as a tensor of its own, of an expert's weight [W, ..] or bias [W]: it, gate and up, or
    both with their rows alternating or in halves; and their transposes. All in the memory of `rows`."""
    parts = [rows]
    if len(rows) % 2 == 0:
        parts += [*rows.chunk(2), *(rows.unflatten(0, blocks).transpose(0, 1) for blocks in ((2, -1), (-1, 2)))]
    return [turned for part in parts for turned in (part, part.movedim(-1, 0))]
