"""The randomised Hadamard transform that NVFP4 puts tokens through before they are quantised for a weight gradient."""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.formats import HADAMARD_SIZE
from symmoe.kernels.twin import hadamard as twin


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """H D x of every 16 elements of the last dimension, as the quantising kernels transform tokens.

    D changes signs, H is Sylvester's Hadamard matrix of size 16 over 4: orthonormal.

    Args:
        x: floating point [..., K], K a multiple of 16.
        signs: 16 bits; bit i set: the sign of element i of every 16 is changed.

    Returns:
        fp32 [..., K].

    Raises:
        ArgumentError: K is not a multiple of 16, or signs has other bits.
    """
    _check(x, signs)
    return twin.hadamard(x, signs)


def inverse_hadamard(y: torch.Tensor, signs: int) -> torch.Tensor:
    """D H y: the inverse of :func:`hadamard` up to rounding, with its arguments, result and errors."""
    _check(y, signs)
    return twin.inverse_hadamard(y, signs)


def draw_signs(generator: torch.Generator | None = None) -> int:
    """16 random signs for :func:`hadamard`, from a generator on the CPU."""
    return int(torch.randint(1 << HADAMARD_SIZE, (), generator=generator, device="cpu"))


def check_signs(signs: int) -> None:
    """ArgumentError if signs is not 16 bits."""
    if not 0 <= signs < 1 << HADAMARD_SIZE:
        raise ArgumentError(f"signs ({signs}) must have {HADAMARD_SIZE} bits: 0 to {(1 << HADAMARD_SIZE) - 1}")


def _check(x: torch.Tensor, signs: int) -> None:
    check_signs(signs)
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % HADAMARD_SIZE:
        raise ArgumentError(
            f"x is {x.dtype} {list(x.shape)}; it must be floating point [..., K], K a multiple of {HADAMARD_SIZE}"
        )
