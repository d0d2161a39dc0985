"""The recipes MXFP8 and NVFP4, and all recipes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from symmoe.kernels.formats import HADAMARD_SIZE, BlockFormat
from symmoe.kernels.twin.block_scaled import check_signs
from symmoe.precision.recipes import Float8Block, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP8(Recipe):
    """E4M3 with an E8M0 scale for 32 contracted elements, of rows and weights (OCP Microscaling Formats 1.0, 2023).

    The scale is rounded up, as in NVIDIA's recipe; OCP's formula would saturate the largest elements.
    """

    feature_multiple: ClassVar[int] = 32
    word: ClassVar[str] = "mxfp8"
    row_format = BlockFormat(element="e4m3", scale="e8m0", block=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4(Recipe):
    """E2M1 with an E4M3 scale for 16 contracted elements and an fp32 scale for a group (NVIDIA 2025, arXiv:2509.25149).

    Weights have 16 x 16 blocks. A byte of data has two elements, the first in the low half.

    Attributes:
        hadamard_signs: signs of the Hadamard transform of both operands of wgrad, 16 bits (:func:`hadamard`); None: no
            transform.
        stochastic_gradients: whether gradients are rounded stochastically; if so, seeds are accepted.
    """

    feature_multiple: ClassVar[int] = 32
    word: ClassVar[str] = "nvfp4"
    row_format = BlockFormat(element="e2m1", scale="e4m3", block=16)
    weight_format = BlockFormat(element="e2m1", scale="e4m3", block=16, block_lines=16)

    hadamard_signs: int | None = 0x9A5C  # any irregular pattern; both operands need the same one
    stochastic_gradients: bool = True

    def __post_init__(self) -> None:
        if self.hadamard_signs is not None:
            check_signs(self.hadamard_signs)

    @property
    def column_signs(self) -> int | None:
        return self.hadamard_signs


PRECISIONS: dict[str, Recipe] = {
    recipe.word: recipe for recipe in (Float8Block(), MXFP8(), NVFP4())
}
"""Recipes without options, by the names that commands and messages have for them."""


def draw_signs(generator: torch.Generator | None = None) -> int:
    """16 random signs for :func:`hadamard`, from a generator on the CPU."""
    return int(torch.randint(1 << HADAMARD_SIZE, (), generator=generator, device="cpu"))
