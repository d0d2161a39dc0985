"""Low-precision formats for the GEMMs of the experts: recipes, quantised tensors, scale layouts (docs/precision.md)."""

from symmoe.precision.block_scaled import (
    draw_signs,
    hadamard,
    inverse_hadamard,
    swizzle_scales,
    unswizzle_scales,
)
from symmoe.precision.quantized import Quantized
from symmoe.precision.recipes import MXFP8, NVFP4, PRECISIONS, Float8Block, Recipe

__all__ = [
    "MXFP8",
    "NVFP4",
    "PRECISIONS",
    "Float8Block",
    "Quantized",
    "Recipe",
    "draw_signs",
    "hadamard",
    "inverse_hadamard",
    "swizzle_scales",
    "unswizzle_scales",
]
