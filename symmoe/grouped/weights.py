"""Weights of a layer, packed in one tensor or scattered in G, as kernels take them.

G groups, O output features, C input features. Kernels read a packed tensor by TMA. Of matrices that may lie anywhere
they have only the addresses (TensorTable); in the working dtype only the general kernels take those. So every call
looks at the list, in forward and in backward, and passes it on as a packed tensor if it lies like one. Nothing is
cached, because trainers move parameters with `.data =`.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.grouped.pointers import load_addresses
from symmoe.kernels import control
from symmoe.kernels.tensor_table import TensorTable


def kernel_matrices(lists: Mapping[str, Sequence[torch.Tensor]]) -> list[torch.Tensor | TensorTable]:
    """Each named list as kernels take it: one packed tensor, or a table of G tensors that do not lie like one.

    The addresses of all tables are loaded in one launch. Does not synchronise the host.

    Args:
        lists: one tensor [G, O, C] or G of [O, C] each, all on one device.

    Raises:
        ArgumentError: discrete weights differ in shape or dtype; a packed tensor is not aligned to 16 bytes; tensors in
            a table are not contiguous and aligned so.
    """
    found: dict[str, torch.Tensor | TensorTable | None] = {}
    for name, matrices in lists.items():
        if matrices[0].dim() == 3:
            packed: torch.Tensor | None = matrices[0].contiguous()
        else:
            check_uniform(matrices)
            packed = packed_view(matrices)
        found[name] = packed
        if packed is not None and (address := packed.data_ptr()) % control.ACCESS_BYTES:
            raise ArgumentError(f"{name} starts at address {address}; it must be aligned to {control.ACCESS_BYTES}")
    scattered = {name: lists[name] for name, packed in found.items() if packed is None}
    if scattered:
        device = next(iter(scattered.values()))[0].device
        addresses = load_addresses(scattered, device, alignment=control.ACCESS_BYTES, contiguous=True)
        parts = addresses.split([len(matrices) for matrices in scattered.values()])
        for (name, matrices), part in zip(scattered.items(), parts, strict=True):
            found[name] = TensorTable(part, packed_shape(matrices), matrices[0].dtype)
    return [matrices for matrices in found.values() if matrices is not None]


def packed_shape(weights: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """(G, O, C) of one packed weight or of G single ones."""
    first = weights[0]
    num_groups, out_features, in_features = first.shape if first.dim() == 3 else (len(weights), *first.shape)
    return num_groups, out_features, in_features


def packed_view(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[G, O, C] over the memory of G matrices, if each begins where the one before it ends; None otherwise.

    Copies nothing, does not synchronise the host. The view has no history and does not share version counters.

    Args:
        matrices: [O, C] each, of one shape and dtype.

    Returns:
        None too if they are not contiguous, aligned and on one device, or if the first one's storage ends before the
        last of them: then they are neighbours by chance, and nothing would keep the others alive.
    """
    first = matrices[0]
    # The first two tell most lists that are not adjacent, at the cost of two addresses.
    if not (_are_adjacent(matrices[:2]) and _are_adjacent(matrices)):
        return None
    storage = first.untyped_storage()
    if first.data_ptr() + len(matrices) * first.nbytes > storage.data_ptr() + storage.nbytes():
        return None
    num_rows, num_columns = first.shape
    shape = (len(matrices), num_rows, num_columns)
    return first.detach().as_strided(shape, (num_rows * num_columns, num_columns, 1))


def check_uniform(weights: Sequence[torch.Tensor]) -> None:
    """ArgumentError if discrete weights differ in shape or dtype: a layer has one of each, as a packed weight has."""
    for name in ("shape", "dtype"):
        found = list(map(operator.attrgetter(name), weights))
        if found.count(found[0]) != len(found):
            g = next(g for g, value in enumerate(found) if value != found[0])
            raise ArgumentError(f"weight{g} has {name} {found[g]}; weight0 has {found[0]}, and all must have one")


def lay_side_by_side(parameters: Sequence[torch.Tensor]) -> None:
    """Moves G parameters [O, C] into one storage, one after the other, where packed_view finds them. Copies them.

    Leaves them where they are if they lie so already, or are no plain tensors of one shape, dtype and device.
    """
    first = parameters[0]
    looks = {(type(p), p.shape, p.dtype, p.device, p.layout) for p in parameters}
    if looks != {(nn.Parameter, first.shape, first.dtype, first.device, torch.strided)}:
        return
    if packed_view(parameters) is None:
        for parameter, part in zip(parameters, torch.stack([p.data for p in parameters]), strict=True):
            parameter.data = part


def addresses(matrices: Sequence[torch.Tensor]) -> list[int] | None:
    """The addresses of G tensors; None if they have no memory with an address, or are not on one device."""
    payload = _read(matrices, alignment=1, contiguous=False)
    return None if payload is None else memoryview(payload).cast("q").tolist()


def _are_adjacent(matrices: Sequence[torch.Tensor]) -> bool:
    first = matrices[0]
    payload = _read(matrices, alignment=control.ACCESS_BYTES, contiguous=True)
    return payload is not None and payload == _side_by_side(first.data_ptr(), first.nbytes, len(matrices))


@functools.lru_cache(maxsize=1024)  # a layer asks with the same numbers in every call
def _side_by_side(start: int, num_bytes: int, count: int) -> bytes:
    """Addresses of `count` matrices, each of which begins where the one before it ends, as native int64."""
    return struct.pack(f"={count}q", *range(start, start + count * num_bytes, num_bytes))


def _read(matrices: Sequence[torch.Tensor], *, alignment: int, contiguous: bool) -> bytes | None:
    device = matrices[0].device
    read = kernels.for_device(device).read_addresses
    addresses: bytes | None = read(list(matrices), device, alignment=alignment, contiguous=contiguous)
    return addresses
