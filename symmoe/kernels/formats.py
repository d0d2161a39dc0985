"""Low-precision formats and the places of their groups, as data for kernels and recipes.

A GEMM contracts lines: a row of rows, a feature's column of a group's rows, or a row of a weight. The elements of a
block share one scale: `block` elements of each of `block_lines` lines. x is approximately data * scale, in NVFP4 data *
scale * global scale.

    amax       the largest |x| of a block; NaN or Inf anywhere in it makes the block not finite
    fp32       scale = max(amax / 448, 2^-126)
    power_of_two, e8m0  scale of fp32, rounded up to a power of two
    e4m3       scale = amax / 6 / global scale, within [2^-9, 448], to the nearest E4M3 number, where
               global scale = max(the largest finite |x| of the group / (6 * 448), 2^-110)
    data       x * (1 / scale) to the nearest number of the format, ties to even, saturating; -0 stays -0

Every operation rounds once, to the nearest fp32 number. A block that is not finite has the scale NaN (E8M0: 255). Its
data is NaN in E4M3 and 0 in E2M1, which has no NaN. When dequantised, the whole block is NaN again; other blocks are
unaffected. A block of zeros has the smallest scale.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from symmoe.errors import choice_problem, raise_for

TILE = 128  # padded groups (tokens for wgrad, rows of swizzled scales) begin at multiples of it

E4M3_MAX, E2M1_MAX = 448.0, 6.0
GLOBAL_MAX = E2M1_MAX * E4M3_MAX  # the largest number of a group in units of its global scale
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF
MIN_SCALE = 2.0**-126  # reciprocals of this and of all larger scales are normal numbers
MIN_BLOCK_SCALE = 2.0**-9  # the smallest E4M3 number above 0
MIN_GLOBAL_SCALE = 2.0**-110
HADAMARD_SIZE = 16

Element = Literal["e4m3", "e2m1"]
ScaleKind = Literal["fp32", "power_of_two", "e8m0", "e4m3"]

_SCALE_DTYPES = {
    "fp32": torch.float32,
    "power_of_two": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """How elements and their scales are stored.

    Attributes:
        element: "e4m3", or "e2m1": two in a byte, the first in the low half.
        scale: "fp32"; "power_of_two", in fp32; "e8m0", a power of two in a byte; "e4m3", with a global scale.
        block: elements of a line that share a scale.
        block_lines: lines that share a scale; 1 except in weights.
    """

    element: Element
    scale: ScaleKind
    block: int
    block_lines: int = 1

    def __post_init__(self) -> None:
        raise_for(choice_problem("element", self.element, get_args(Element)))
        raise_for(choice_problem("scale", self.scale, get_args(ScaleKind)))

    @property
    def data_dtype(self) -> torch.dtype:
        """float8_e4m3fn, or uint8 for packed E2M1 (torch's own GEMMs take it viewed as float4_e2m1fn_x2)."""
        return torch.float8_e4m3fn if self.element == "e4m3" else torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype in which scales are stored."""
        return _SCALE_DTYPES[self.scale]

    @property
    def elements_per_byte(self) -> int:
        """2 for E2M1, otherwise 1."""
        return 1 if self.element == "e4m3" else 2

    @property
    def has_global_scale(self) -> bool:
        """Whether a block's scale is relative to a global scale of its group."""
        return self.scale == "e4m3"

    def data_width(self, width: int) -> int:
        """Columns of data for `width` elements of a line."""
        return width // self.elements_per_byte

    def num_blocks(self, width: int) -> int:
        """Number of scales for `width` elements of a line; the last block may be shorter."""
        return -(-width // self.block)


def max_tiles(num_rows: int, num_groups: int) -> int:
    """The most tiles of TILE rows that num_rows rows in num_groups groups need, if every group begins at a new tile.

    The first tile of a group follows the last tile of the group before; tiles past the last one stay unused.
    """
    return (num_rows + num_groups * (TILE - 1)) // TILE


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that indexing and kernels support for every format: uint8 where a number has one byte."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
