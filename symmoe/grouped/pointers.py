"""Pointer loading: addresses and other small host data onto a device, without a copy engine or a synchronisation.

The bytes travel as arguments of a kernel on the current stream of the target device. So the host's memory is free when
the call returns, and the calls can be captured in a CUDA graph, which then holds the bytes: a graph that is replayed
writes the addresses of the capture, and the tensors must stay where they were. On CPUs all of it is a plain copy.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from symmoe import kernels
from symmoe.autograd import wrote_into
from symmoe.checks.buffers import memory_problem, stale_problem
from symmoe.errors import ArgumentError, StaleLease, raise_for
from symmoe.kernels.contract.pointers import HostBytes
from symmoe.kernels.twin.pointers import host_bytes, swizzled_scale_bytes

ScaleLayout = Literal["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"]

_BLOCK = {"mxfp8_rowwise": 32, "mxfp8_columnwise": 32, "nvfp4": 16}  # elements that share a scale
_PACKED_ELEMENTS = {"nvfp4": 2}  # elements in one byte of data


def copy_host_to_device(source: HostBytes, destination: torch.Tensor) -> None:
    """Copies the bytes of `source` to the start of `destination`. Not collective, no host synchronisation.

    Meant for small data: a launch carries 4080 bytes, and more takes several launches.

    Args:
        source: bytes, another contiguous buffer (bytearray, array, NumPy array) or a contiguous CPU tensor, at most as
            large as destination. May be changed or freed as soon as the call returns.
        destination: contiguous tensor of any dtype.

    Raises:
        ArgumentError, StaleLease: an argument is wrong; nothing has been copied.
    """
    raise_for(_destination_problem(destination) or _source_problem(source))
    data = host_bytes(source)
    num_bytes = destination.numel() * destination.element_size()
    if len(data) > num_bytes:
        raise ArgumentError(f"source has {len(data)} bytes; destination has only {num_bytes}")
    if len(data) == 0:
        return
    for name, tensor in (("source", source), ("destination", destination)):
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() == 0:
            raise ArgumentError(f"{name} has a null data pointer (0); {len(data)} bytes are to be copied")
    kernels.for_device(destination.device).copy_host_to_device(data, destination)
    wrote_into(destination)


def copy_data_ptrs_to_device(
    tensors: Sequence[torch.Tensor],
    device: torch.device | str | int,
    *,
    alignment: int = 1,
    contiguous: bool = False,
) -> torch.Tensor:
    """The addresses of any number of tensors, as a new tensor on `device`. Not collective, no host synchronisation.

    The caller keeps the tensors alive and where they are while the result is used.

    Args:
        tensors: on `device`, not empty.
        device: the device of the tensors and of the result.
        alignment: a power of two that every address must be a multiple of.
        contiguous: whether the tensors must be contiguous.

    Returns:
        int64 [N].

    Raises:
        ArgumentError: a tensor is elsewhere, empty, misaligned or not contiguous.
        StaleLease: a tensor is memory of a lease that has been released.
    """
    raise_for(_stale_problem({"tensors": tensors}))
    return load_addresses({"tensors": tensors}, _with_index(device), alignment=alignment, contiguous=contiguous)


def load_addresses(
    lists: Mapping[str, Sequence[torch.Tensor]], device: torch.device, *, alignment: int = 1, contiguous: bool = False
) -> torch.Tensor:
    """The addresses of all named lists, one after the other, as int64 [N] on `device`. Does not look at leases.

    Raises:
        ArgumentError: as in :func:`copy_data_ptrs_to_device`.
    """
    payload = _addresses(lists, device, alignment=alignment, contiguous=contiguous)
    pointers = torch.empty(sum(map(len, lists.values())), dtype=torch.int64, device=device)
    if payload:
        kernels.for_device(device).copy_host_to_device(payload, pointers)
    return pointers


@dataclass(frozen=True, slots=True)
class PackedPointers:
    """Addresses of the weights of two layers, on their device.

    Attributes:
        fc1, fc2: int64 [G], of the matrices.
        fc1_scales, fc2_scales: int64 [G], of the matrices' scales, swizzled if a layout was given; None without scales.
        swizzled: uint8, what the addresses of swizzled scales point into: keep it as long as they are used.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_scales: torch.Tensor | None = None
    fc2_scales: torch.Tensor | None = None
    swizzled: torch.Tensor | None = None


def pack_weight_ptrs(
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    *,
    fc1_scales: Sequence[torch.Tensor] | None = None,
    fc2_scales: Sequence[torch.Tensor] | None = None,
    scale_layout: ScaleLayout | None = None,
) -> PackedPointers:
    """All addresses that a pass through two layers of discrete weights needs, loaded together.

    One launch for up to 510 addresses; one more for each layer whose scales are swizzled. Not collective, no host
    synchronisation.

    Args:
        fc1, fc2: G matrices each, on one device, contiguous and aligned to 16 bytes. NVFP4 data holds two elements in
            a byte.
        fc1_scales, fc2_scales: G scale matrices each, both or none. To be swizzled: contiguous, of one-byte elements,
            all of a layer of one shape.
        scale_layout: how compact scales lie, for a weight [M, K]: "mxfp8_rowwise" [M, K / 32], "mxfp8_columnwise"
            [M / 32, K], "nvfp4" [M, K / 16], quotients rounded up, possibly padded at the end of either dimension. They
            are swizzled into 128x4 tiles with zeros for padding. None: scales are passed on as they lie.

    Raises:
        ArgumentError, StaleLease: an argument is wrong; nothing has been computed.
    """
    if not fc1 or not fc2:
        raise ArgumentError(f"fc1 ({len(fc1)} matrices) and fc2 ({len(fc2)} matrices) must not be empty")
    _check_scales_go_together(fc1, fc2, fc1_scales, fc2_scales, scale_layout)
    weights, scales = {"fc1": fc1, "fc2": fc2}, {"fc1_scales": fc1_scales or (), "fc2_scales": fc2_scales or ()}
    raise_for(_stale_problem(weights | scales))
    device = fc1[0].device
    if fc1_scales is None or fc2_scales is None:  # both
        pointers = load_addresses(weights, device, alignment=16, contiguous=True)
        return PackedPointers(*pointers.split([len(fc1), len(fc2)]))
    payload = _addresses(weights, device, alignment=16, contiguous=True)
    payload += _addresses({"fc1_scales": fc1_scales, "fc2_scales": fc2_scales}, device)
    sizes = [len(fc1), len(fc2), len(fc1_scales), len(fc2_scales)]
    if scale_layout is None:
        pointers = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        kernels.for_device(device).copy_host_to_device(payload, pointers)
        return PackedPointers(*pointers.split(sizes))
    return _pack_swizzled(payload, sizes, (fc1, fc2), (fc1_scales, fc2_scales), scale_layout)


def _pack_swizzled(
    payload: bytes,
    sizes: list[int],
    weights: tuple[Sequence[torch.Tensor], ...],
    scales: tuple[Sequence[torch.Tensor], ...],
    layout: ScaleLayout,
) -> PackedPointers:
    """Pointers of data and compact scales are in `payload`; those of the swizzled scales are added to the same copy."""
    names = ("fc1", "fc2")
    extents = [_scale_extents(*each, layout) for each in zip(names, weights, scales, strict=True)]
    num_bytes = [swizzled_scale_bytes(rows, blocks) for rows, blocks, *_ in extents]
    device = weights[0][0].device
    swizzled = torch.empty(
        sum(len(w) * n for w, n in zip(weights, num_bytes, strict=True)), dtype=torch.uint8, device=device
    )
    counts = [len(each) for each in weights]
    steps = itertools.chain.from_iterable(itertools.repeat(n, c) for n, c in zip(num_bytes, counts, strict=True))
    starts = list(itertools.accumulate(steps, initial=swizzled.data_ptr()))[:-1]
    sizes = [*sizes, *counts]
    pointers = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    ops = kernels.for_device(device)
    ops.copy_host_to_device(payload + _to_bytes(starts), pointers)
    fc1, fc2, compact1, compact2, scales1, scales2 = pointers.split(sizes)
    parts = swizzled.split([c * n for c, n in zip(counts, num_bytes, strict=True)])
    for compact, part, count, extent in zip((compact1, compact2), parts, counts, extents, strict=True):
        ops.swizzle_scales(compact, part.view(count, -1), *extent)
    return PackedPointers(fc1, fc2, scales1, scales2, swizzled)


def _scale_extents(
    name: str, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], layout: ScaleLayout
) -> tuple[int, int, int, int]:
    """(rows, blocks, row stride, block stride) of one layer's compact scales, as the kernel takes them."""
    for what, tensors in ((name, weights), (f"{name}_scales", scales)):
        shapes = set(map(operator.attrgetter("shape"), tensors))
        if len(shapes) > 1 or tensors[0].dim() != 2:
            found = sorted(map(list, shapes))
            raise ArgumentError(
                f"{what} has shapes {found}; for scale_layout {layout!r} all must have one, with 2 dims"
            )
    if set(map(torch.Tensor.element_size, scales)) != {1} or not all(map(torch.Tensor.is_contiguous, scales)):
        raise ArgumentError(f"{name}_scales ({scales[0].dtype}) must be contiguous matrices of one-byte scales")
    num_rows, num_columns = weights[0].shape
    num_columns *= _PACKED_ELEMENTS.get(layout, 1)
    is_columnwise = layout == "mxfp8_columnwise"
    num_blocks = -(-(num_rows if is_columnwise else num_columns) // _BLOCK[layout])
    wanted = (num_blocks, num_columns) if is_columnwise else (num_rows, num_blocks)
    shape = tuple(scales[0].shape)
    if shape[0] < wanted[0] or shape[1] < wanted[1]:
        raise ArgumentError(
            f"{name}_scales has shape {list(shape)}; {layout} scales of [{num_rows}, {num_columns}] need at least "
            f"{list(wanted)}"
        )
    return (num_columns, num_blocks, 1, shape[1]) if is_columnwise else (num_rows, num_blocks, shape[1], 1)


def _check_scales_go_together(
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
    fc1_scales: Sequence[torch.Tensor] | None,
    fc2_scales: Sequence[torch.Tensor] | None,
    scale_layout: str | None,
) -> None:
    if scale_layout is not None and scale_layout not in _BLOCK:
        raise ArgumentError(f"scale_layout ({scale_layout!r}) must be None or one of {', '.join(_BLOCK)}")
    if (fc1_scales is None) != (fc2_scales is None) or (fc1_scales is None and scale_layout is not None):
        given = [name for name, s in (("fc1_scales", fc1_scales), ("fc2_scales", fc2_scales)) if s is not None]
        raise ArgumentError(
            f"fc1_scales and fc2_scales must both be given (scale_layout is {scale_layout!r}); given: {given}"
        )
    for name, weights, scales in (("fc1", fc1, fc1_scales), ("fc2", fc2, fc2_scales)):
        if scales is not None and len(scales) != len(weights):
            raise ArgumentError(f"{name}_scales has {len(scales)} tensors; {name} has {len(weights)}")


def _addresses(
    lists: Mapping[str, Sequence[torch.Tensor]], device: torch.device, *, alignment: int = 1, contiguous: bool = False
) -> bytes:
    """The addresses of tensors on `device`, of all named lists one after the other, as native int64."""
    tensors = list(itertools.chain.from_iterable(lists.values()))
    read = kernels.for_device(device).read_addresses
    payload: bytes | None = read(tensors, device, alignment=alignment, contiguous=contiguous)
    if payload is None:
        raise _address_problem(lists, tensors, device, alignment)
    return payload


def _stale_problem(lists: Mapping[str, Sequence[object]]) -> StaleLease | None:
    """The error if one of the tensors is memory of a released lease, or None."""
    tensors = list(itertools.chain.from_iterable(lists.values()))
    found = (i for i, tensor in enumerate(tensors) if stale_problem("", tensor) is not None)
    i = next(found, None)
    return None if i is None else stale_problem(_label(lists, i), tensors[i])


def _address_problem(
    lists: Mapping[str, Sequence[object]], tensors: Sequence[object], device: torch.device, alignment: int
) -> ArgumentError:
    """Why read_addresses has refused the tensors."""
    for i, tensor in enumerate(tensors):
        label = _label(lists, i)
        if not isinstance(tensor, torch.Tensor):
            return ArgumentError(f"{label} is a {type(tensor).__name__}; it must be a tensor on {device}")
        if tensor.device != device or tensor.layout != torch.strided:
            return ArgumentError(f"{label} is {tensor.layout} on {tensor.device}; it must be strided on {device}")
        if tensor.data_ptr() == 0:
            return ArgumentError(f"{label} has a null data pointer (0); its shape is {list(tensor.shape)}")
        if tensor.data_ptr() % alignment:
            return ArgumentError(f"{label} starts at address {tensor.data_ptr()}; it must be aligned to {alignment}")
    # Only contiguity is left.
    strides = ((i, t.stride()) for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and not t.is_contiguous())
    i, stride = next(strides)
    return ArgumentError(f"{_label(lists, i)} has strides {list(stride)}; it must be contiguous")


def _label(lists: Mapping[str, Sequence[object]], position: int) -> str:
    """The name of the tensor at a position in the concatenated lists."""
    for name, tensors in lists.items():
        if position < len(tensors):
            return f"{name}[{position}]"
        position -= len(tensors)
    raise IndexError(position)


def _to_bytes(addresses: list[int]) -> bytes:
    return struct.pack(f"={len(addresses)}q", *addresses)


def _with_index(device: torch.device | str | int) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _destination_problem(destination: object) -> ArgumentError | StaleLease | None:
    if not isinstance(destination, torch.Tensor) or destination.layout is not torch.strided:
        return memory_problem("destination", destination)
    if destination.device.type not in ("cuda", "cpu"):
        return ArgumentError(f"destination is on {destination.device}; it must be on a CUDA device or the CPU")
    if not destination.is_contiguous():
        return ArgumentError(f"destination has strides {list(destination.stride())}; it must be contiguous")
    if destination.requires_grad:
        return ArgumentError(f"destination {list(destination.shape)} requires a gradient; it must not")
    return stale_problem("destination", destination)


def _source_problem(source: HostBytes) -> ArgumentError | StaleLease | None:
    if isinstance(source, torch.Tensor):
        if source.layout is not torch.strided:
            return memory_problem("source", source)
        if source.device.type != "cpu":
            return ArgumentError(f"source is on {source.device}; it must be on the CPU")
        if not source.is_contiguous():
            return ArgumentError(f"source has strides {list(source.stride())}; it must be contiguous")
        return stale_problem("source", source)
    try:
        is_contiguous = memoryview(source).c_contiguous
    except TypeError:
        return ArgumentError(f"source ({type(source).__name__}) must be bytes, a buffer or a CPU tensor")
    return None if is_contiguous else ArgumentError("source is a buffer with strides; it must be contiguous")
