"""Twins of the scales in tiles, of contract/quantize.py."""

import ctypes
from collections.abc import Iterator

import torch

from symmoe.kernels.formats import TILE
from symmoe.kernels.operands import given
from symmoe.kernels.scaled import TILE_BLOCKS, TILE_BYTES, tiles_down
from symmoe.kernels.tensor_table import ScaleTable
from symmoe.kernels.twin.gemm import groups


def swizzle_scales(scale: torch.Tensor | ScaleTable, row_range: torch.Tensor | None, swizzled: torch.Tensor) -> None:
    for matrix, tiles in _matrices(scale, row_range, swizzled):
        padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % TILE_BLOCKS, 0, -matrix.shape[0] % TILE))
        # [tile, row / 32, row % 32, 4 blocks, block] -> [tile, 4 blocks, row % 32, row / 32, block]
        parts = padded.reshape(-1, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
        tiles.copy_(parts.permute(0, 3, 2, 1, 4).reshape(tiles.shape))


def unswizzle_scales(swizzled: torch.Tensor, row_range: torch.Tensor, scale: torch.Tensor) -> None:
    for matrix, tiles in _matrices(scale, row_range, swizzled):
        parts = tiles.view(tiles.shape[0], tiles.shape[1], 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
        compact = parts.reshape(tiles.shape[0] * TILE, tiles.shape[1] * TILE_BLOCKS)
        matrix.copy_(compact[: matrix.shape[0], : matrix.shape[1]])


def _matrices(
    scale: torch.Tensor | ScaleTable, row_range: torch.Tensor | None, swizzled: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the scales of every matrix that has rows [M, Q], and of its tiles [tiles down, tiles across, 512]."""
    if isinstance(scale, ScaleTable):
        yield from _matrices_of_table(scale, swizzled)
        return
    first = 0
    for _, span in groups(given("row_range", row_range)):
        last = first + tiles_down(span.stop - span.start)
        if last > first:
            yield scale.view(torch.uint8)[span], swizzled[first:last]
        first = last


def _matrices_of_table(table: ScaleTable, swizzled: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    extents, start = table.extents.tolist(), swizzled.data_ptr()
    columns = table.sources.tolist(), table.destinations.tolist(), table.shapes.tolist()
    for source, destination, shape in zip(*columns, strict=True):
        num_rows, num_blocks, *strides = extents[shape]
        num_bytes = (num_rows - 1) * strides[0] + (num_blocks - 1) * strides[1] + 1
        memory = torch.frombuffer((ctypes.c_char * num_bytes).from_address(source), dtype=torch.uint8)
        down, across = tiles_down(num_rows), -(-num_blocks // TILE_BLOCKS)
        tiles = swizzled.flatten()[destination - start :][: down * across * TILE_BYTES]
        yield memory.as_strided((num_rows, num_blocks), strides), tiles.view(down, across, TILE_BYTES)
