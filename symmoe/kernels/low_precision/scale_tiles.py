"""Scales of grouped rows into the 128x4 tiles of block-scaled matrix units, and back (Triton)."""

import functools

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats
from symmoe.kernels.launch.integers import next_power_of_2
from symmoe.kernels.launch.launch import Constants, fast_launch, launch
from symmoe.kernels.triton.pointers import TILE_BLOCKS, TILE_BYTES
from symmoe.kernels.triton.tiles import locate_tile, row_tile_prefix

TILE = tl.constexpr(formats.TILE)
NUM_WARPS = 4


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["scale", "row_range"])
def swizzle_group_scales_kernel(
    scale,  # uint8[N, Q]
    row_range,
    swizzled,
    NUM_BLOCKS: tl.constexpr,
    TILES_ACROSS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
):
    """Grid (tiles of rows, tiles across)."""
    across = tl.program_id(1)
    prefix, num_tiles = row_tile_prefix(row_range, NUM_GROUPS, GROUP_LANES, TILE)
    if tl.program_id(0) < num_tiles:
        _, first_row, end, _ = locate_tile(tl.program_id(0), prefix, row_range, NUM_GROUPS, 1, 1, TILE)
        byte = tl.arange(0, TILE_BYTES)
        row, block = tile_element(byte, first_row, across)
        mask = (row < end) & (block < NUM_BLOCKS)
        value = tl.load(scale + row.to(tl.int64) * NUM_BLOCKS + block, mask=mask, other=0)
        tl.store(swizzled + tile_start(TILES_ACROSS) + byte, value)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["scale", "row_range"])
def unswizzle_group_scales_kernel(
    swizzled,
    row_range,
    scale,  # uint8[N, Q]
    NUM_BLOCKS: tl.constexpr,
    TILES_ACROSS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
):
    """Grid (tiles of rows, tiles across)."""
    across = tl.program_id(1)
    prefix, num_tiles = row_tile_prefix(row_range, NUM_GROUPS, GROUP_LANES, TILE)
    if tl.program_id(0) < num_tiles:
        _, first_row, end, _ = locate_tile(tl.program_id(0), prefix, row_range, NUM_GROUPS, 1, 1, TILE)
        byte = tl.arange(0, TILE_BYTES)
        row, block = tile_element(byte, first_row, across)
        value = tl.load(swizzled + tile_start(TILES_ACROSS) + byte)
        mask = (row < end) & (block < NUM_BLOCKS)
        tl.store(scale + row.to(tl.int64) * NUM_BLOCKS + block, value, mask=mask)


@triton.jit
def tile_element(byte, first_row, across):
    """Row and block of the scale that a byte of a tile holds."""
    return first_row + byte // 16 + byte // 4 % 4 * 32, across * TILE_BLOCKS + byte % 4


@triton.jit
def tile_start(TILES_ACROSS: tl.constexpr):
    """Where this program's tile begins."""
    return (tl.program_id(0).to(tl.int64) * TILES_ACROSS + tl.program_id(1)) * TILE_BYTES


def swizzle_group_scales(scale: torch.Tensor, row_range: torch.Tensor, swizzled: torch.Tensor) -> None:
    constants = _constants(scale.shape[1], swizzled.shape[1], row_range.shape[1])
    launch(
        swizzle_group_scales_kernel,
        tuple(swizzled.shape[:2]),
        constants,
        scale.view(torch.uint8),
        row_range,
        swizzled,
    )


def unswizzle_group_scales(swizzled: torch.Tensor, row_range: torch.Tensor, scale: torch.Tensor) -> None:
    constants = _constants(scale.shape[1], swizzled.shape[1], row_range.shape[1])
    launch(
        unswizzle_group_scales_kernel,
        tuple(swizzled.shape[:2]),
        constants,
        swizzled,
        row_range,
        scale.view(torch.uint8),
    )


@functools.cache
def _constants(num_blocks: int, tiles_across: int, num_groups: int) -> Constants:
    return Constants(
        {
            "NUM_BLOCKS": num_blocks,
            "TILES_ACROSS": tiles_across,
            "NUM_GROUPS": num_groups,
            "GROUP_LANES": next_power_of_2(num_groups),
            "num_warps": NUM_WARPS,
        }
    )
