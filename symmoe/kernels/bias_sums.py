"""The order in which gradients of biases are summed over the rows of a group, and room for parts of such a sum.

A group's rows are taken in tiles of TILE, from its first row on, with zeros past its last one. Values (times the row's
scale, if there is one: rounded to fp32) are added in fp32: in a tile neighbours, then neighbouring sums, and so on; the
tiles' sums from first to last. So a kernel that has a tile for another reason gives the bits of one that only sums,
and they do not depend on where the group lies, on the tail, on formats or on the grid.

Only grouped_gemm_dact has another order: that of its product's tiles and instructions.
"""

from __future__ import annotations

from symmoe.kernels.formats import TILE


def bias_slots(num_rows: int, num_groups: int, tile_rows: int = TILE) -> int:
    """Slots for the sums of row tiles. The tile of group g that begins at row r has slot r // tile_rows + g."""
    return num_rows // tile_rows + num_groups
