"""Which bytes of which safetensors file hold which tensor: reading it, and laying out new files.

The format: 8 bytes, the length of the header, little endian; the header, JSON padded with spaces to a multiple of 8;
the tensors. https://huggingface.co/docs/safetensors. Headers are kept as bytes, so that files can be written again
without a change, whichever program wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from symmoe.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# In the order in which safetensors puts tensors into a file: it begins with the last of these.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        file: name within the folder.
        dtype: None if torch or this module has no such dtype.
        shape: as stored.
        start: position of its first byte in the file.
        num_bytes: contiguous, row-major.
    """

    file: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All weight files of a checkpoint.

    Attributes:
        headers: file name to the bytes before its tensors.
        file_bytes: file name to its size.
        tensors: key to where it lies.
        index: the bytes of model.safetensors.index.json, or None.
    """

    headers: dict[str, bytes]
    file_bytes: dict[str, int]
    tensors: dict[str, StoredTensor]
    index: bytes | None


def read_layout(folder: Path) -> Layout:
    """The layout of the checkpoint in a folder: the files of its index, or model.safetensors.

    Raises:
        CheckpointError: a file is missing, cut off or no safetensors file, or the index says something else.
    """
    index, expected = None, None
    if (folder / INDEX).exists():
        index = (folder / INDEX).read_bytes()
        try:
            expected = dict(json.loads(index)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of safetensors files: {error!r}") from error
    names = sorted(set(expected.values())) if expected is not None else [WEIGHTS]
    headers, file_bytes, tensors = {}, {}, {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no file {name}")
        headers[name] = header = _read_header(folder / name)
        file_bytes[name] = (folder / name).stat().st_size
        stored = _tensors_of(folder / name, header)
        end = max([tensor.start + tensor.num_bytes for tensor in stored.values()], default=len(header))
        if end != file_bytes[name]:
            raise CheckpointError(f"{folder / name} has {file_bytes[name]} bytes; its header says {end}")
        tensors.update(stored)
    if expected is not None and expected != {key: tensor.file for key, tensor in tensors.items()}:
        differing = sorted(set(expected.items()) ^ {(key, tensor.file) for key, tensor in tensors.items()})
        key, file = differing[0]
        raise CheckpointError(f"{folder / INDEX} and the files disagree on where {key} is ({file} or elsewhere)")
    return Layout(headers, file_bytes, tensors, index)


def new_layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, max_shard_bytes: int) -> Layout:
    """A layout as transformers and safetensors make it: files filled one after the other up to a size.

    Args:
        tensors: key to dtype and shape, in the order in which files are filled.
        max_shard_bytes: a file gets no more than this, unless it holds a single tensor.
    """
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = total = 0
    for key, (dtype, shape) in tensors.items():
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = (dtype, shape)
        filled += num_bytes
        total += num_bytes
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    headers, file_bytes, stored = {}, {}, {}
    for name, shard in zip(names, shards, strict=True):
        headers[name] = header = _new_header(shard)
        stored.update(_tensors_of(Path(name), header))
        file_bytes[name] = len(header) + sum(t.num_bytes for t in stored.values() if t.file == name)
    index = None
    if len(shards) > 1:
        parameters = sum(torch.Size(shape).numel() for _, shape in tensors.values())
        content = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {key: tensor.file for key, tensor in stored.items()},
        }
        index = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return Layout(headers, file_bytes, stored, index)


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(prefix := file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if len(prefix) < 8 or not length or len(header) < length:
        raise CheckpointError(f"{path} is cut off or no safetensors file")
    return prefix + header


def _tensors_of(path: Path, header: bytes) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        return {
            key: StoredTensor(
                file=path.name,
                dtype=_DTYPES.get(entry["dtype"]),
                shape=tuple(entry["shape"]),
                start=len(header) + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for key, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error


def _new_header(shard: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    order = list(_DTYPES)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(shard, key=lambda key: (-order.index(_NAMES[shard[key][0]]), key)):
        dtype, shape = shard[key]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
