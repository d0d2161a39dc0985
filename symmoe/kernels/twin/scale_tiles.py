"""Twins of the scales of grouped rows in tiles, of contract/quantize.py."""

from collections.abc import Iterator

import torch

from symmoe.kernels.formats import TILE
from symmoe.kernels.twin.gemm import groups
from symmoe.kernels.twin.pointers import TILE_BLOCKS


def swizzle_group_scales(scale: torch.Tensor, row_range: torch.Tensor, swizzled: torch.Tensor) -> None:
    num_blocks = scale.shape[1]
    for span, tiles in _group_tiles(row_range, swizzled):
        padding = (0, -num_blocks % TILE_BLOCKS, 0, -(span.stop - span.start) % TILE)
        padded = torch.nn.functional.pad(scale.view(torch.uint8)[span], padding)
        # [tile, row / 32, row % 32, 4 blocks, block] -> [tile, 4 blocks, row % 32, row / 32, block]
        matrix = padded.view(-1, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
        tiles.copy_(matrix.permute(0, 3, 2, 1, 4).reshape(tiles.shape))


def unswizzle_group_scales(swizzled: torch.Tensor, row_range: torch.Tensor, scale: torch.Tensor) -> None:
    num_blocks = scale.shape[1]
    for span, tiles in _group_tiles(row_range, swizzled):
        matrix = tiles.view(tiles.shape[0], tiles.shape[1], 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
        compact = matrix.reshape(tiles.shape[0] * TILE, tiles.shape[1] * TILE_BLOCKS)
        scale.view(torch.uint8)[span] = compact[: span.stop - span.start, :num_blocks]


def _group_tiles(row_range: torch.Tensor, swizzled: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows and the tiles of every group that has rows."""
    first = 0
    for _, span in groups(row_range):
        last = first - (span.start - span.stop) // TILE
        if last > first:
            yield span, swizzled[first:last]
        first = last
