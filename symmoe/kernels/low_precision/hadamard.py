"""The randomised Hadamard transform of 16 neighbours (Triton), for kernels that quantise. See twin/hadamard.py."""

import triton
import triton.language as tl

from symmoe.kernels import formats

SIZE = tl.constexpr(formats.HADAMARD_SIZE)


@triton.jit
def hadamard(x, signs):
    """H D x for every 16 elements of the last dimension of x fp32 [LINES, WIDTH]; signs: as in twin/hadamard.py."""
    lines: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    bit = (signs >> (tl.arange(0, width) % SIZE)) & 1
    # A product, because -x would be 0 - x, which turns 0 into 0 and not -0.
    y = (x * tl.where(bit == 1, -1.0, 1.0)[None, :]).reshape(lines, width // SIZE, SIZE)
    # Sums and differences of neighbours go to the two halves: four times, and all elements are back in their places.
    for _ in tl.static_range(4):
        left, right = tl.split(y.reshape(lines, width // SIZE, SIZE // 2, 2))
        y = tl.join(left + right, left - right).permute(0, 1, 3, 2).reshape(lines, width // SIZE, SIZE)
    return y.reshape(lines, width) * 0.25
