"""Random numbers that are a function of a seed and a position: Philox-4x32-10 (Salmon et al. 2011), in PyTorch.

The words are those of Triton's tl.philox.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(seed: int, counter: Words) -> Words:
    """Four random words for every counter of four words; words are int64 tensors of numbers below 2^32."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + _KEY_STEPS[0] & _MASK, key1 + _KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3


def random_words(seed: int, num_lines: int, width: int) -> torch.Tensor:
    """int64 [num_lines, width]: the word of element (line, k) is number k % 4 of counter (k // 4, line, 0, 0)."""
    quads = torch.arange(-(-width // 4), device="cpu").expand(num_lines, -1)
    lines = torch.arange(num_lines, device="cpu")[:, None].expand_as(quads)
    zeros = torch.zeros_like(quads)
    words = philox(seed, (quads, lines, zeros, zeros))
    return torch.stack(words, dim=2).flatten(1)[:, :width]


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a * b, in steps that fit into int64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _MASK
