"""Which bytes of which safetensors file hold which tensor of a swapped model: reading it, and laying out new files.

The format: 8 bytes, the length of the header, little endian; the header, JSON padded with spaces to a multiple of 8;
the tensors. https://huggingface.co/docs/safetensors. Headers are kept as bytes, so that files can be written again
without a change, whichever program wrote them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.experts import ExpertParallelExperts
from symmoe.integrations.transformers.families import BLOCK, Family, family_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# In the order in which safetensors puts tensors into a file: it begins with the last of these.
_PAIRS = "BOOL:bool U8:uint8 I8:int8 I16:int16 F16:float16 BF16:bfloat16 I32:int32 F32:float32 F64:float64 I64:int64"
_DTYPES = {name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _PAIRS.split())}
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_MAX_NAMED = 3  # problems that a text spells out
_KNOWN = {f"mlp.{linear}.{kind}" for linear in ("fc1", "fc2") for kind in ("weight", "bias")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    file: str  # name within the folder
    dtype: torch.dtype | None  # None if torch or this module has no such dtype
    shape: tuple[int, ...]  # as stored
    start: int  # position of its first byte in the file
    num_bytes: int  # contiguous, row-major


@dataclass(frozen=True, slots=True)
class Layout:
    """All weight files of a checkpoint."""

    files: dict[str, tuple[bytes, int]]  # file name to the bytes before its tensors, and its size
    tensors: dict[str, StoredTensor]  # key to where it lies
    index: bytes | None  # the bytes of model.safetensors.index.json, or None


def find_pieces(model: nn.Module, folder: Path) -> tuple[Layout, list[Piece]]:
    """The layout of the checkpoint in a folder (the files of its index, or model.safetensors), and the pieces of a
    swapped model in it. CheckpointError: a file is missing, cut off or no safetensors file, the index says something
    else, or keys, shapes or dtypes are not those of the model."""
    layout = _read_layout(folder)
    pieces = pieces_of(model, layout.tensors)
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


def _read_layout(folder: Path) -> Layout:
    index, expected = None, None
    if (folder / INDEX).exists():
        index = (folder / INDEX).read_bytes()
        try:
            expected = dict(json.loads(index)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of safetensors files: {error!r}") from error
    names = sorted(set(expected.values())) if expected is not None else [WEIGHTS]
    files, tensors = {}, {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no file {name}")
        header, size = _read_header(folder / name), (folder / name).stat().st_size
        stored, end = _tensors_of(folder / name, header)
        if end != size:
            raise CheckpointError(f"{folder / name} has {size} bytes; its header says {end}")
        files[name] = header, size
        tensors.update(stored)
    if expected is not None and expected != {key: tensor.file for key, tensor in tensors.items()}:
        key, file = min(set(expected.items()) ^ {(key, tensor.file) for key, tensor in tensors.items()})
        raise CheckpointError(f"{folder / INDEX} and the files disagree on where {key} is ({file} or elsewhere)")
    return Layout(files, tensors, index)


def new_layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, max_shard_bytes: int) -> Layout:
    """A layout as transformers and safetensors make it, of keys in the order in which files are filled. A file gets no
    more than `max_shard_bytes`, unless it holds a single tensor."""
    from huggingface_hub import split_torch_state_dict_into_shards  # which transformers has brought

    split = split_torch_state_dict_into_shards(
        {key: torch.empty(shape, dtype=dtype, device="meta") for key, (dtype, shape) in tensors.items()},
        filename_pattern=WEIGHTS.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_bytes,
    )
    files, stored, index = {}, dict[str, StoredTensor](), None
    for name, keys in split.filename_to_tensors.items():
        header = _new_header({key: tensors[key] for key in keys})
        there, end = _tensors_of(Path(name), header)
        files[name] = header, end
        stored.update(there)
    if split.is_sharded:
        parameters = sum(torch.Size(shape).numel() for _, shape in tensors.values())
        weight_map = {key: tensor.file for key, tensor in stored.items()}
        content = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": weight_map}
        index = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return Layout(files, stored, index)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor on disk, or one expert's part of it."""

    key: str  # in the checkpoint
    shape: tuple[int, ...]  # shape of the whole tensor on disk
    dtype: torch.dtype  # dtype in the model
    index: int | None  # the piece's index in the first dimension; None: the piece is the whole tensor
    tensor: torch.Tensor | None  # the model's memory in the layout on disk; None: this rank does not hold the expert
    writer: int  # the rank that saves it
    is_everywhere: bool = False  # whether every rank has it


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
    names, renamed = dict[str, str](), dict[str, str]()  # of experts modules, and prefixes, in checkpoints
    for path in blocks:
        parent, _, experts = path.rpartition(f".{BLOCK}.")
        block = f"{parent}.{family.block_on_disk}."
        names[path] = f"{block}{experts}" if stored is None or any(key.startswith(block) for key in stored) else path
        renamed[path.rpartition(".")[0] + "."] = names[path].rpartition(".")[0] + "."
    tensors, keys, aliases = model.state_dict(keep_vars=True), dict[str, str](), defaultdict[int, list[str]](list)
    for name, tensor in tensors.items():
        keys[name] = next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name)
        aliases[id(tensor)].append(keys[name])
    pieces: list[Piece] = []
    for name, tensor in tensors.items():
        if (path := next((path for path in blocks if name.startswith(f"{path}.")), None)) is not None:
            if name.removeprefix(f"{path}.") not in _KNOWN:
                raise CheckpointError(f"{name} has no place in a checkpoint of transformers; merge or remove it")
            if path in names:  # its first tensor
                pieces += _expert_pieces(family, blocks[path], names.pop(path), stored)
            continue
        its = aliases[id(tensor)]
        if keys[name] in ([key for key in its if key in (stored or ())] or its[:1]):
            pieces.append(Piece(keys[name], tuple(tensor.shape), tensor.dtype, None, tensor.detach(), 0, True))
    return pieces


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(prefix := file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if len(prefix) < 8 or not length or len(header) < length:
        raise CheckpointError(f"{path} is cut off or no safetensors file")
    return prefix + header


def _tensors_of(path: Path, header: bytes) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a file, and where the last one ends."""
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        tensors = {
            key: StoredTensor(
                file=path.name,
                dtype=_DTYPES.get(entry["dtype"]),
                shape=tuple(entry["shape"]),
                start=len(header) + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for key, entry in entries.items()
        }
        return tensors, max((each.start + each.num_bytes for each in tensors.values()), default=len(header))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error


def _new_header(shard: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    names, order = list(_DTYPES), list(_DTYPES.values())
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(shard, key=lambda key: (-order.index(shard[key][0]), key)):
        dtype, shape = shard[key]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[key] = {"dtype": names[order.index(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _expert_pieces(
    family: Family, module: ExpertParallelExperts, name: str, stored: Collection[str] | None
) -> Iterator[Piece]:
    """Pieces of all experts of a block; of all ranks, because every rank checks all keys."""
    fc1, fc2, num_local = module.mlp.fc1, module.mlp.fc2, module.mlp.num_groups
    fused = stored is not None and f"{name}.gate_up_proj" in stored
    matrices = None if fused else family.matrices_on_disk
    for expert in range(module.num_experts):
        rank, i = divmod(expert, num_local)
        w1, w2 = fc1.weight.detach()[i], fc2.weight.detach()[i]  # on other ranks only their shapes count
        if matrices is not None:
            parts = dict(zip((f"{expert}.{matrix}.weight" for matrix in matrices), (*w1.chunk(2), w2), strict=True))
        elif not family.clamped:
            parts = {"gate_up_proj": w1, "down_proj": w2}
        else:
            b1, b2 = (bias.detach()[i] for bias in (fc1.bias, fc2.bias) if bias is not None)
            parts = {"gate_up_proj": w1.T, "gate_up_proj_bias": b1, "down_proj": w2.T, "down_proj_bias": b2}
        for key, part in parts.items():
            index, whole = (None, ()) if matrices is not None else (expert, (module.num_experts,))
            own = part if rank == module.heap.rank else None
            yield Piece(f"{name}.{key}", (*whole, *part.shape), part.dtype, index, own, rank)
