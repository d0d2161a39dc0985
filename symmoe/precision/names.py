"""Recipes by the names that commands and messages have for them, and the word by which ranks compare theirs."""

from __future__ import annotations

import dataclasses
import zlib

from symmoe.kernels import control
from symmoe.precision.recipes import MXFP8, NVFP4, Float8Block, Recipe

PRECISIONS: dict[str, Recipe] = {
    "float8-block": Float8Block(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
}
"""Recipes by name, without options."""


def precision_word(recipe: Recipe | None) -> int:
    """31 bits that are equal for equal recipes: the index in control.PRECISIONS, and a checksum of the recipe's fields
    if it is not one of PRECISIONS. -1 for None."""
    if recipe is None:
        return -1
    name = next((name for name, known in PRECISIONS.items() if type(known) is type(recipe)), control.PRECISIONS[-1])
    index = control.PRECISIONS.index(name)
    if recipe == PRECISIONS.get(name):
        return index
    # The text of a class that is not symmoe's may hold an address.
    text = repr(recipe) if dataclasses.is_dataclass(recipe) else type(recipe).__qualname__
    checksum = max(1, zlib.crc32(text.encode()) >> (control.PRECISION_BITS + 1))
    return checksum << control.PRECISION_BITS | index
