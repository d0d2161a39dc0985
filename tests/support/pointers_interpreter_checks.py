"""Run by test_interpreted.py with TRITON_INTERPRET=1: the swizzle kernel against its twin, byte for byte. The tables
are those of pack_weight_ptrs: matrices of different shapes in one launch."""

from functools import partial

import torch

from symmoe.kernels import twin
from symmoe.kernels.low_precision.block_scaled import scale_tiles
from symmoe.pointers import pack_weight_ptrs

# rows and blocks of the scales, and of the matrix in memory
CASES = [
    ((1, 1), (1, 1)),
    ((128, 4), (128, 4)),
    ((160, 3), (256, 4)),
    ((300, 9), (301, 40)),
    ((70, 133), (128, 136)),
]


def swizzle_by_both(table, row_range, swizzled):
    """The twin does it, then the kernel over other bytes."""
    twin_swizzle(table, row_range, swizzled)
    expected = swizzled.clone()
    scale_tiles.swizzle_scales(table, row_range, swizzled.fill_(0x5A))
    assert torch.equal(swizzled, expected), table.extents.tolist()


twin_swizzle, twin.swizzle_scales = twin.swizzle_scales, swizzle_by_both


def check_tables(swizzle):
    weights, scales = [], []
    for (rows, blocks), padded in CASES:
        width = blocks * 16 // 2 if swizzle == "nvfp4" else blocks * 32
        is_columnwise = swizzle == "mxfp8_columnwise"
        weights.append(
            torch.zeros((width, rows) if is_columnwise else (rows, width), dtype=torch.uint8)
        )
        scales.append(
            torch.randint(1, 256, padded[::-1] if is_columnwise else padded).to(torch.uint8)
        )
    for lists in (
        {"fc1": weights, "fc1_scales": scales, "fc2_scales": scales[::-1]},
        {"fc2_scales": scales[:1]},
        {"fc2": weights[1:2] * 3, "fc2_scales": scales[1:2] * 3},
    ):
        assert pack_weight_ptrs(**lists, swizzle=swizzle).swizzled.any()


def checks():
    """Names, and what checks them."""
    torch.manual_seed(0)
    for swizzle in ("mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"):
        yield f"swizzle_scales, {swizzle}", partial(check_tables, swizzle)
