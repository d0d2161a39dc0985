"""The randomised Hadamard transform of 16 neighbours, in PyTorch.

y = H D x: D changes signs, H is Sylvester's Hadamard matrix of size 16 over 4. It is orthonormal, so a contraction of
two matrices that are both transformed along it stays the same up to rounding; an outlier is spread over its block.
"""

import torch

from symmoe.kernels.formats import HADAMARD_SIZE


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """H D x for every 16 elements of the last dimension, in fp32; bit i of `signs` changes the sign of element i."""
    blocks = x.float().unflatten(-1, (-1, HADAMARD_SIZE))
    return _butterflies(blocks * _sign_vector(signs, x.device)).flatten(-2)


def inverse_hadamard(y: torch.Tensor, signs: int) -> torch.Tensor:
    """D H y: the inverse of `hadamard`, up to the rounding of its sums."""
    return (_butterflies(y.float().unflatten(-1, (-1, HADAMARD_SIZE))) * _sign_vector(signs, y.device)).flatten(-2)


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """H x by sums and differences of elements at distances 1, 2, 4 and 8; then a quarter of it."""
    step = 1
    while step < HADAMARD_SIZE:
        left, right = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        step *= 2
    return x * 0.25


def _sign_vector(signs: int, device: torch.device) -> torch.Tensor:
    return 1.0 - 2.0 * (signs >> torch.arange(HADAMARD_SIZE, device=device) & 1)
