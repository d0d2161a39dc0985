"""The order in which gradients of biases are summed over the rows of a group, and room for parts of such a sum.

A group's rows are taken in tiles of TILE, from its first row on, with zeros past its last one. Values (times the row's
scale, if there is one: rounded to fp32) are added in fp32: in a tile neighbours, then neighbouring sums, and so on; the
tiles' sums from first to last. So a kernel that has a tile for another reason, or 16 rows of one, gives the bits of one
that only sums, and they do not depend on where the group lies, on the tail, on formats or on the grid.

Only grouped_gemm_dact has another order: that of its product's tiles and instructions.
"""

import torch

from symmoe.kernels.formats import TILE

SLOT_ROWS = 16  # rows of a slot of quantize_rows, which has tiles of so many


def bias_slots(num_rows: int, num_groups: int, tile_rows: int = TILE) -> int:
    """Slots for the sums of row tiles. The tile of group g that begins at row r has slot r // tile_rows + g."""
    return num_rows // tile_rows + num_groups


def empty_row_sums(num_rows: int, dbias: torch.Tensor) -> torch.Tensor:
    """Memory for the sums that quantize_rows leaves for dbias [G, C]: fp32 [slots, C]."""
    num_groups, width = dbias.shape
    return dbias.new_empty(
        (bias_slots(num_rows, num_groups, SLOT_ROWS), width), dtype=torch.float32
    )
