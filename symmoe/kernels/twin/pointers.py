"""Twins of contract/pointers.py, and of swizzle_scales."""

import ctypes
import functools
import operator
import struct

import torch

from symmoe.kernels.contract.pointers import HostBytes

TILE_ROWS, TILE_BLOCKS = 128, 4


def host_bytes(source: HostBytes) -> memoryview:
    """The memory of a contiguous CPU tensor or of any contiguous buffer, as bytes, without a copy.

    A tensor's memory is valid as long as the tensor.
    """
    if not isinstance(source, torch.Tensor):
        view = memoryview(source)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    num_bytes = source.numel() * source.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(source.data_ptr() or 1)).cast("B")


def copy_host_to_device(source: HostBytes, destination: torch.Tensor) -> None:
    data = host_bytes(source)
    host_bytes(destination)[: len(data)] = data


def read_addresses(
    tensors: list[torch.Tensor], device: torch.device, *, alignment: int, contiguous: bool
) -> bytes | None:
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except (TypeError, RuntimeError):  # not a tensor, or a sparse one
        return None
    if 0 in addresses or functools.reduce(operator.or_, addresses, 0) % alignment:
        return None
    if contiguous and not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if any(found != device for found in set(map(operator.attrgetter("device"), tensors))):
        return None
    return struct.pack(f"={len(addresses)}q", *addresses)


def swizzled_scale_bytes(num_rows: int, num_blocks: int) -> int:
    """Bytes of one swizzled scale matrix with padding; a multiple of 512."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS * -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS


def swizzle_scales(
    pointers: torch.Tensor, swizzled: torch.Tensor, num_rows: int, num_blocks: int, row_stride: int, block_stride: int
) -> None:
    swizzled.zero_()
    row, block = torch.arange(num_rows, device="cpu")[:, None], torch.arange(num_blocks, device="cpu")
    padded_blocks = -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS
    target = row // TILE_ROWS * TILE_ROWS * padded_blocks + block // TILE_BLOCKS * TILE_ROWS * TILE_BLOCKS
    target = target + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + block % TILE_BLOCKS
    num_bytes = (num_rows - 1) * row_stride + (num_blocks - 1) * block_stride + 1
    for pointer, out in zip(pointers.tolist(), swizzled, strict=True):
        memory = (ctypes.c_char * num_bytes).from_address(pointer)
        source = torch.frombuffer(memory, dtype=torch.uint8)
        out[target] = source[row * row_stride + block * block_stride]
