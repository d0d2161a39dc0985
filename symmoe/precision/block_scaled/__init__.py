"""Code for MXFP8 and NVFP4 only: recipes, 128x4 tiles of scales, and the randomised Hadamard transform.

Imported on first use.
"""

from symmoe.kernels.twin.block_scaled import hadamard, inverse_hadamard
from symmoe.precision.block_scaled.recipes import MXFP8, NVFP4, PRECISIONS, draw_signs
from symmoe.precision.block_scaled.tiles import swizzle_scales, unswizzle_scales

__all__ = [
    "MXFP8",
    "NVFP4",
    "PRECISIONS",
    "draw_signs",
    "hadamard",
    "inverse_hadamard",
    "swizzle_scales",
    "unswizzle_scales",
]
