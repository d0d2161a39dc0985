"""The order in which bias gradients are summed over the rows of a group, and the memory for partial sums.

A group's rows are cut into tiles of TILE rows, from its first row on, with zeros past its last one. Sums are fp32.
Values (times the row's scale, if given, rounded to fp32) are added in a tile: neighbours, then neighbouring sums, and
so on. The tiles' sums are added from first to last. So a fused kernel with a whole tile, or 16 rows of one, gives the
bits of a kernel that only sums. Bits do not depend on the group's place, the tail, formats or the grid.

Only grouped_gemm_dact has another order: the order of its product's tiles and instructions.
"""

import torch

from symmoe.kernels.formats import TILE

SLOT_ROWS = 16  # rows of a slot of quantize_rows, whose tiles have 16 rows


def bias_slots(num_rows: int, num_groups: int, tile_rows: int = TILE) -> int:
    """Slots for the sums of row tiles. The tile of group g that begins at row r has slot r // tile_rows + g."""
    return num_rows // tile_rows + num_groups


def empty_row_sums(num_rows: int, dbias: torch.Tensor) -> torch.Tensor:
    """Memory for the partial sums of dbias [G, C] from quantize_rows: fp32 [slots, C]."""
    num_groups, width = dbias.shape
    return dbias.new_empty(
        (bias_slots(num_rows, num_groups, SLOT_ROWS), width), dtype=torch.float32
    )
