"""Low-precision formats for the GEMMs of the experts: recipes, quantised tensors, scale layouts (docs/precision.md).

Code that only MXFP8 and NVFP4 need is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from symmoe.precision.quantized import Quantized
from symmoe.precision.recipes import Float8Block, Recipe

if TYPE_CHECKING:
    from symmoe.precision.block_scaled import (
        MXFP8,
        NVFP4,
        PRECISIONS,
        draw_signs,
        hadamard,
        inverse_hadamard,
        swizzle_scales,
        unswizzle_scales,
    )

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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("symmoe.precision.block_scaled"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
