"""The position of every tensor in safetensors files: reads it, and lays out new files.

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

# In the reverse order of tensors in a safetensors file: a file begins with the last of these.
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
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's position."""

    file: str  # name within the folder
    dtype: torch.dtype | None  # None if torch or this module has no such dtype
    shape: tuple[int, ...]  # as stored
    start: int  # position of its first byte in the file; it is contiguous, row-major


@dataclass(frozen=True, slots=True)
class Layout:
    """All weight files of a checkpoint."""

    files: dict[str, tuple[bytes, int]]  # file name to the bytes before its tensors, and its size
    tensors: dict[str, StoredTensor]  # key to its position
    index: bytes | None  # the bytes of model.safetensors.index.json, or None


def read_layout(folder: Path) -> Layout:
    """The layout of the checkpoint in a folder: the files of its index, or model.safetensors. CheckpointError: a file
    is missing, cut off or no safetensors file, or contradicts the index."""
    index = expected = None
    if (folder / INDEX).exists():
        index = (folder / INDEX).read_bytes()
        try:
            expected = dict(json.loads(index)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / INDEX} is no index of safetensors files: {error!r}"
            ) from error
    files, tensors = {}, {}
    for name in [WEIGHTS] if expected is None else sorted(set(expected.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no file {name}")
        header, size = _read_header(folder / name), (folder / name).stat().st_size
        stored, end = _tensors_of(folder / name, header)
        if end != size:
            raise CheckpointError(f"{folder / name} has {size} bytes; its header says {end}")
        files[name] = header, size
        tensors.update(stored)
    if expected is not None and expected != {key: tensor.file for key, tensor in tensors.items()}:
        key, file = min(
            set(expected.items()) ^ {(key, tensor.file) for key, tensor in tensors.items()}
        )
        raise CheckpointError(
            f"{folder / INDEX} and the files disagree on where {key} is ({file} or elsewhere)"
        )
    return Layout(files, tensors, index)


def new_layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, max_shard_bytes: int
) -> Layout:
    """A layout like that of transformers and safetensors, for keys in the order of the files. A file has at most
    `max_shard_bytes`, unless it holds a single tensor."""
    from huggingface_hub import split_torch_state_dict_into_shards  # a dependency of transformers

    split = split_torch_state_dict_into_shards(
        {
            key: torch.empty(shape, dtype=dtype, device="meta")
            for key, (dtype, shape) in tensors.items()
        },
        filename_pattern=WEIGHTS.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_bytes,
    )
    files, stored, index = {}, dict[str, StoredTensor](), None
    for name, keys in split.filename_to_tensors.items():
        header = _new_header({key: tensors[key] for key in keys})
        positions, end = _tensors_of(Path(name), header)
        files[name] = header, end
        stored.update(positions)
    if split.is_sharded:
        parameters = sum(torch.Size(shape).numel() for _, shape in tensors.values())
        content = {
            "metadata": {"total_parameters": parameters, **split.metadata},
            "weight_map": {key: tensor.file for key, tensor in stored.items()},
        }
        index = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return Layout(files, stored, index)


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(prefix := file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if len(prefix) < 8 or not length or len(header) < length:
        raise CheckpointError(f"{path} is cut off or no safetensors file")
    return prefix + header


def _tensors_of(path: Path, header: bytes) -> tuple[dict[str, StoredTensor], int]:
    """A file's tensors, and the end of the last one."""
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        tensors = {
            key: StoredTensor(
                file=path.name,
                dtype=_DTYPES.get(entry["dtype"]),
                shape=tuple(entry["shape"]),
                start=len(header) + entry["data_offsets"][0],
            )
            for key, entry in entries.items()
        }
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        return tensors, len(header) + end
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error


def _new_header(shard: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    names, order = list(_DTYPES), list(_DTYPES.values())
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in sorted(shard, key=lambda key: (-order.index(shard[key][0]), key)):
        dtype, shape = shard[key]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[key] = {
            "dtype": names[order.index(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
