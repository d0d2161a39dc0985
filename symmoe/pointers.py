"""Loads addresses and other small host data onto a device, without a copy engine or a synchronisation.

The bytes travel as arguments of a kernel on the current stream of the target device. So the host's memory is free when
the call returns, and a CUDA graph can capture the calls. The graph then contains the bytes: a replay writes the
addresses of the capture, and the tensors must not move. On CPUs these functions make a plain copy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from symmoe import kernels
from symmoe.autograd import wrote_into
from symmoe.checks.arguments import Problem, memory_problem, stale_problem
from symmoe.errors import ArgumentError, StaleLease, raise_for
from symmoe.kernels.operands import ScaleTable
from symmoe.kernels.quantized_gemm import FORMATS, TILE_BLOCKS, TILE_BYTES, tiles_down
from symmoe.kernels.twin.pointers import HostBytes, host_bytes
from symmoe.symm_mem.memory import positions_inside

Swizzle = Literal["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"]

_FORMATS = {
    "mxfp8_rowwise": FORMATS[torch.float8_e4m3fn],
    "mxfp8_columnwise": FORMATS[torch.float8_e4m3fn],
    "nvfp4": FORMATS[torch.uint8],
}
_LAYER = {"fc1_scales": "fc1", "fc2_scales": "fc2"}
_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")
Lists = Mapping[str, Sequence[torch.Tensor]]  # by their names in texts
_Extent = tuple[int, int, int, int]  # of ScaleTable
# List, shape of the weight, shape and dtype of its scales.
_ScaleKey = tuple[str, torch.Size | None, torch.Size, torch.dtype]


def copy_host_to_device(source: HostBytes, destination: torch.Tensor) -> None:
    """Copies the bytes of `source` to the start of `destination`. Not collective, no host synchronisation.

    Meant for small data: a launch carries 4080 bytes, and more takes several launches.

    Args:
        source: bytes, another contiguous buffer (bytearray, array, NumPy array) or a contiguous CPU tensor, at most as
            large as destination. May be changed or freed as soon as the call returns.
        destination: contiguous tensor of any dtype.

    Raises:
        ArgumentError, StaleLease: an argument is wrong; no bytes have been copied.
    """
    raise_for(
        _copy_problem("destination", destination, ("cuda", "cpu"), "a CUDA device or the CPU")
    )
    if destination.requires_grad:
        raise ArgumentError(
            f"destination {list(destination.shape)} requires a gradient; it must not"
        )
    raise_for(_source_problem(source))
    data = host_bytes(source)
    if len(data) > destination.nbytes:
        raise ArgumentError(
            f"source has {len(data)} bytes; destination has only {destination.nbytes}"
        )
    if len(data) == 0:
        return
    for name, tensor in (("source", source), ("destination", destination)):
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() == 0:
            raise ArgumentError(
                f"{name} has a null data pointer (0); {len(data)} bytes are to be copied"
            )
    kernels.for_device(destination.device).copy_host_to_device(data, destination)
    wrote_into(destination)


def copy_data_ptrs_to_device(
    tensors: Sequence[torch.Tensor],
    device: torch.device | str | int,
    *,
    alignment: int = 1,
    contiguous: bool = False,
) -> torch.Tensor:
    """The addresses of N tensors, as a new tensor int64 [N] on `device`. Not collective, no host synchronisation.

    The caller keeps the tensors alive and in place while the result is used.

    Args:
        tensors: on `device`, not empty.
        device: the device of the tensors and of the result.
        alignment: a power of two that every address must be a multiple of.
        contiguous: whether the tensors must be contiguous.

    Raises:
        ArgumentError: a tensor is elsewhere, empty, misaligned or not contiguous.
        StaleLease: a tensor is memory of a lease that has been released, or whose heap was closed.
    """
    device = torch.device(device)
    lists = {"tensors": tensors}
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    payload = _addresses(lists, device, alignment=alignment, contiguous=contiguous)
    raise_for(_stale_problem(lists, payload))
    return _load(payload, device)


def load_addresses(
    lists: Lists, device: torch.device, *, alignment: int = 1, contiguous: bool = False
) -> torch.Tensor:
    """copy_data_ptrs_to_device of all named lists in sequence, without a check of leases."""
    return _load(_addresses(lists, device, alignment=alignment, contiguous=contiguous), device)


@dataclass(frozen=True, slots=True)
class PackedPointers:
    """Addresses of weights and of their scales, int64 [G] on their device; [0] for a layer without matrices, None for
    missing scales. Addresses of swizzled scales (in tiles) point into `swizzled`, uint8: keep it while they are
    used."""

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_scales: torch.Tensor | None = None
    fc2_scales: torch.Tensor | None = None
    swizzled: torch.Tensor | None = None


def pack_weight_ptrs(
    fc1: Sequence[torch.Tensor] = (),
    fc2: Sequence[torch.Tensor] = (),
    *,
    fc1_scales: Sequence[torch.Tensor] | None = None,
    fc2_scales: Sequence[torch.Tensor] | None = None,
    swizzle: Swizzle | None = None,
) -> PackedPointers:
    """All addresses that a pass through one or two layers of discrete weights needs, loaded together.

    At least one of the four lists must have tensors. A launch carries 4080 bytes: 8 for an address; for swizzled scales
    20 for a matrix, and 16 for each shape in a list. One more launch swizzles all scales. Not collective, no host
    synchronisation.

    Args:
        fc1, fc2: matrices on one device, contiguous and aligned to 16 bytes. NVFP4 data holds two elements in a byte.
        fc1_scales, fc2_scales: one scale matrix for each matrix of the layer, or any number for a layer without
            matrices. For swizzling: contiguous, with one-byte elements. Shapes may differ within a list.
        swizzle: layout of compact scales, for a weight [M, K]: "mxfp8_rowwise" [M, K / 32], "mxfp8_columnwise" [M / 32,
            K], "nvfp4" [M, K / 16], quotients rounded up, possibly padded at the end of either dimension. The scales
            are put into 128x4 tiles padded with zeros (:func:`symmoe.precision.swizzle_scales`); scales of a layer
            without matrices count as unpadded. None: scales keep their layout.

    Raises:
        ArgumentError, StaleLease: an argument is wrong; no kernel has run.
    """
    weights = {"fc1": fc1, "fc2": fc2}
    scales = {
        name: matrices
        for name, matrices in (("fc1_scales", fc1_scales), ("fc2_scales", fc2_scales))
        if matrices is not None
    }
    if swizzle is not None and swizzle not in [*_FORMATS]:
        raise ArgumentError(f"swizzle ({swizzle!r}) must be None or one of {', '.join(_FORMATS)}")
    for name, matrices in scales.items():
        if (num_weights := len(weights[_LAYER[name]])) not in (0, len(matrices)):
            raise ArgumentError(
                f"{name} has {len(matrices)} tensors; {_LAYER[name]} has {num_weights}"
            )
    if swizzle is not None and not any(map(len, scales.values())):
        raise ArgumentError(
            f"swizzle is {swizzle!r}; fc1_scales or fc2_scales must have tensors, both have 0"
        )
    lists = weights | scales
    if not any(map(len, lists.values())):
        raise ArgumentError("fc1, fc2, fc1_scales or fc2_scales must have tensors; all have 0")
    first = next(tensors[0] for tensors in lists.values() if len(tensors))
    # _addresses rejects a list without tensors.
    device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
    payload = _addresses(weights, device, alignment=16, contiguous=True)
    sources = _addresses(scales, device, contiguous=swizzle is not None)
    raise_for(_stale_problem(lists, payload + sources))
    if swizzle is None:
        pointers = _load(payload + sources, device)
        swizzled = None
    else:
        shapes, extents = _shapes_and_extents(weights, scales, swizzle)
        pointers, swizzled = _load_and_swizzle(payload, sources, shapes, extents, device)
    parts = pointers.split([len(tensors) for tensors in lists.values()])
    return PackedPointers(**dict(zip(lists, parts, strict=True)), swizzled=swizzled)


def _load_and_swizzle(
    weights: bytes, sources: bytes, shapes: list[int], extents: list[_Extent], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses of the weights and of the swizzled scales, int64; and the scales themselves, read from `sources`."""
    tiles = [(tiles_down(rows), -(-blocks // TILE_BLOCKS)) for rows, blocks, *_ in extents]
    num_bytes = np.array([down * across * TILE_BYTES for down, across in tiles])[shapes]
    ends = num_bytes.cumsum()
    swizzled = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
    starts = (ends - num_bytes + swizzled.data_ptr()).tobytes()
    sections = (
        weights,
        starts,
        sources,
        np.array(extents, np.int32).tobytes(),
        np.array(shapes, np.int32).tobytes(),
    )
    words = _load(b"".join(sections), device, torch.int32)
    _, *parts = words.split([len(section) // 4 for section in sections])
    kernels.for_device(device).swizzle_scales(
        ScaleTable(
            destinations=parts[0].view(torch.int64),
            sources=parts[1].view(torch.int64),
            extents=parts[2].view(-1, 4),
            shapes=parts[3],
            max_tiles=(max(down for down, _ in tiles), max(across for _, across in tiles)),
        ),
        None,
        swizzled,
    )
    return words[: (len(weights) + len(sources)) // 4].view(torch.int64), swizzled


def _shapes_and_extents(
    weights: Lists, scales: Lists, swizzle: Swizzle
) -> tuple[list[int], list[_Extent]]:
    """For each scale matrix the index of its extent, and the extents."""
    numbers: dict[_ScaleKey, int] = {}
    shapes: list[int] = []
    extents: list[_Extent] = []
    for name, matrices in scales.items():
        layer = weights[_LAYER[name]]
        weight_shapes = map(_SHAPE, layer) if len(layer) else itertools.repeat(None)
        keys = list(
            zip(itertools.repeat(name), weight_shapes, map(_SHAPE, matrices), map(_DTYPE, matrices))
        )
        shapes += [numbers.setdefault(key, len(numbers)) for key in keys]
        extents += [_extent(keys.index(key), *key, swizzle) for key in [*numbers][len(extents) :]]
    return shapes, extents


def _extent(
    i: int,
    name: str,
    weight: torch.Size | None,
    scale: torch.Size,
    dtype: torch.dtype,
    swizzle: Swizzle,
) -> _Extent:
    """The extent of scales[i], without padding if the shape of its weight is known."""
    block_format = _FORMATS[swizzle]
    is_columnwise = swizzle == "mxfp8_columnwise"
    packing = " (two elements in a byte of data)" if block_format.elements_per_byte == 2 else ""
    for label, shape in ((_LAYER[name], weight), (name, scale)):
        if shape is not None and len(shape) != 2:
            raise ArgumentError(
                f"{label}[{i}] has shape {list(shape)}; it must have 2 dims for {swizzle}{packing}"
            )
    if dtype.itemsize != 1:
        raise ArgumentError(
            f"{name}[{i}] has dtype {dtype} of {dtype.itemsize} bytes; {swizzle} scales have 1 byte"
        )
    num_rows, num_columns = scale
    if weight is not None:
        height = weight[0]
        width = weight[1] * block_format.elements_per_byte
        least_shape = (
            (block_format.num_blocks(height), width)
            if is_columnwise
            else (height, block_format.num_blocks(width))
        )
        if scale[0] < least_shape[0] or scale[1] < least_shape[1]:
            raise ArgumentError(
                f"{name}[{i}] has shape {list(scale)}; {swizzle} scales of {_LAYER[name]}[{i}] {list(weight)}{packing} "
                f"need at least {list(least_shape)}"
            )
        num_rows, num_columns = least_shape
    return (
        (num_columns, num_rows, 1, scale[1])
        if is_columnwise
        else (num_rows, num_columns, scale[1], 1)
    )


def _load(numbers: bytes, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Native integers as a new tensor on the device."""
    result = torch.empty(len(numbers) // dtype.itemsize, dtype=dtype, device=device)
    if numbers:
        kernels.for_device(device).copy_host_to_device(numbers, result)
    return result


def _addresses(
    lists: Lists, device: torch.device, *, alignment: int = 1, contiguous: bool = False
) -> bytes:
    """The addresses of tensors on `device`, of all named lists in sequence, as native int64."""
    tensors: list[torch.Tensor] = []
    for tensor_list in lists.values():
        tensors += tensor_list  # five times as fast as itertools.chain
    payload: bytes | None = kernels.for_device(device).read_addresses(
        tensors, device, alignment=alignment, contiguous=contiguous
    )
    if payload is None:
        raise _address_problem(lists, device, alignment)
    return payload


def _named(lists: Lists) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{name}[{i}]", tensor)
        for name, tensors in lists.items()
        for i, tensor in enumerate(tensors)
    ]


def _stale_problem(lists: Lists, addresses: bytes) -> StaleLease | None:
    """The error if one of the tensors at these addresses is memory of an ended lease, or None."""
    inside = positions_inside(addresses)
    named = _named(lists) if inside else []
    return next(filter(None, (stale_problem(*named[i]) for i in inside)), None)


def _address_problem(lists: Lists, device: torch.device, alignment: int) -> ArgumentError:
    """The error of the first tensor that read_addresses rejects."""
    named = _named(lists)
    for label, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            return ArgumentError(
                f"{label} is a {type(tensor).__name__}; it must be a tensor on {device}"
            )
        if tensor.device != device or tensor.layout != torch.strided:
            return ArgumentError(
                f"{label} is {tensor.layout} on {tensor.device}; it must be strided on {device}"
            )
        if tensor.data_ptr() == 0:
            return ArgumentError(
                f"{label} has a null data pointer (0); its shape is {list(tensor.shape)}"
            )
        if tensor.data_ptr() % alignment:
            return ArgumentError(
                f"{label} starts at address {tensor.data_ptr()}; it must be aligned to {alignment}"
            )
    # No other reason remains.
    label, tensor = next(pair for pair in named if not pair[1].is_contiguous())
    return ArgumentError(f"{label} has strides {list(tensor.stride())}; it must be contiguous")


def _copy_problem(
    name: str, tensor: torch.Tensor, device_types: tuple[str, ...], devices: str
) -> Problem:
    """The error if bytes cannot be copied from or to the tensor, or None."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return memory_problem(name, tensor)
    if tensor.device.type not in device_types:
        return ArgumentError(f"{name} is on {tensor.device}; it must be on {devices}")
    if not tensor.is_contiguous():
        return ArgumentError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    return stale_problem(name, tensor)


def _source_problem(source: HostBytes) -> Problem:
    if isinstance(source, torch.Tensor):
        return _copy_problem("source", source, ("cpu",), "the CPU")
    try:
        is_contiguous = memoryview(source).c_contiguous
    except TypeError:
        return ArgumentError(
            f"source ({type(source).__name__}) must be bytes, a buffer or a CPU tensor"
        )
    return (
        None
        if is_contiguous
        else ArgumentError("source is a buffer with strides; it must be contiguous")
    )
