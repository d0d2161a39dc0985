"""Numbers as the codes of low-precision formats, and the scales of their blocks (Triton)."""

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats
from symmoe.kernels.triton.tiles import constants_of

TILE = tl.constexpr(formats.TILE)
FORMATS = constants_of(formats)
INFINITY_BITS = tl.constexpr(0x7F800000)
MANTISSA_BITS = tl.constexpr(0x7FFFFF)
E4M3_MAX_EXPONENT, E4M3_MAX_MANTISSA = (
    tl.constexpr(8),
    tl.constexpr(0x600000),
)  # 448 as the bits of fp32
RANDOM_UNIT = tl.constexpr(2.0**-24)  # unit of the 24 bits of a word that are used


@triton.jit
def magnitude_bits(x):
    """|x| as an integer; numbers come first in its order, then Inf, then NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e4m3_code(x):
    """The nearest E4M3 number, ties to even, saturating, as uint8."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """The E4M3 number of a code in fp32."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def global_scale_of(amax, group):
    """The global scale of a group, 1 if the format has none."""
    return (
        1.0
        if amax is None
        else tl.maximum(
            tl.div_rn(tl.load(amax + group), FORMATS.GLOBAL_MAX), FORMATS.MIN_GLOBAL_SCALE
        )
    )


@triton.jit
def block_scales(bits, global_scale, SCALE: tl.constexpr):
    """The stored scales of blocks, and the multipliers of their elements, from the bits of the largest |x|."""
    is_finite = bits < INFINITY_BITS
    finite_bits = tl.where(is_finite, bits, 0)
    amax = finite_bits.to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        relative = tl.div_rn(tl.div_rn(amax, FORMATS.E2M1_MAX), global_scale)
        code = e4m3_code(
            tl.minimum(tl.maximum(relative, FORMATS.MIN_BLOCK_SCALE), FORMATS.E4M3_MAX)
        )
        multiplier = tl.div_rn(1.0, e4m3_value(code) * global_scale)
        stored = tl.where(is_finite, code, FORMATS.E4M3_NAN).to(tl.uint8)
    elif SCALE == "fp32":
        scale = tl.maximum(tl.div_rn(amax, FORMATS.E4M3_MAX), FORMATS.MIN_SCALE)
        multiplier = tl.div_rn(1.0, scale)
        stored = tl.where(is_finite, scale, float("nan"))
    else:
        # Without a division: 448 is 1.75 * 2^8, so amax = m * 2^a needs 2^(a - 8), or the next power if m > 1.75. In
        # that case the quotient exceeds the power of two by more than half of the last place, so rounding keeps it
        # above.
        exponent = tl.maximum(
            ((finite_bits + (MANTISSA_BITS - E4M3_MAX_MANTISSA)) >> 23) - E4M3_MAX_EXPONENT, 1
        )
        multiplier = ((254 - exponent) << 23).to(
            tl.float32, bitcast=True
        )  # normal: no scale is above 2^120
        stored = (
            tl.where(is_finite, exponent, FORMATS.E8M0_NAN).to(tl.uint8)
            if SCALE == "e8m0"
            else tl.where(is_finite, (exponent << 23).to(tl.float32, bitcast=True), float("nan"))
        )
    return stored, multiplier


@triton.jit
def block_scales_or_nan(bits, SCALE: tl.constexpr):
    """block_scales without a global scale; the multiplier of a block that is not finite is NaN.

    So all of the block's E4M3 codes are NaN without a test of every number.
    """
    stored, multiplier = block_scales(bits, 1.0, SCALE)
    return stored, tl.where(bits < INFINITY_BITS, multiplier, float("nan"))


@triton.jit
def e2m1_code(x, words):
    """As to_e2m1 of the twins: x [LINES, WIDTH] to codes uint8; words: random words of the same shape, or None."""
    size = tl.minimum(tl.abs(x), FORMATS.E2M1_MAX)
    per_unit = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    base = tl.where(size < 2.0, 0, tl.where(size < 4.0, 2, 4))
    units = size * per_unit
    code = units.to(tl.int32)
    fraction = units - code.to(tl.float32)
    is_up = (
        (fraction > 0.5) | ((fraction == 0.5) & (code % 2 == 1))
        if words is None
        else (words >> 8).to(tl.int32).to(tl.float32) * RANDOM_UNIT < fraction
    )
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (base + code + is_up.to(tl.int32) + sign).to(tl.uint8)


@triton.jit
def random_words(seeds, group, line, first, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """The random words of lines [LINES] and elements first + [WIDTH]; 4 divides WIDTH and first. None without seeds."""
    if seeds is None:
        words = None
    else:
        zeros = tl.zeros((LINES, WIDTH // 4), tl.int32)
        quad = (first // 4 + tl.arange(0, WIDTH // 4))[None, :] + zeros
        lines = line[:, None] + zeros
        w0, w1, w2, w3 = tl.philox(tl.load(seeds + group), quad, lines, zeros, zeros)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(LINES, WIDTH)
    return words


@triton.jit
def element_codes(x, is_finite, multiplier, words, ELEMENT: tl.constexpr):
    """One byte for every number of x; the other tensors have x's shape, words may be None."""
    scaled = tl.where(is_finite, x, 0.0) * multiplier
    return (
        tl.where(is_finite, e4m3_code(scaled), FORMATS.E4M3_NAN).to(tl.uint8)
        if ELEMENT == "e4m3"
        else e2m1_code(scaled, words)
    )


@triton.jit
def pack(codes, ELEMENT: tl.constexpr):
    """Codes in their stored form: of the same shape, or of half the width."""
    packed = codes
    if ELEMENT == "e2m1":
        first, second = tl.split(codes.reshape(codes.shape[0], codes.shape[1] // 2, 2))
        packed = first | (second << 4)
    return packed


@triton.jit
def spread(blocks, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """[blocks of lines, blocks] to [LINES, WIDTH]: every element gets the value of its block."""
    num_lines: tl.constexpr = blocks.shape[0]
    num_blocks: tl.constexpr = blocks.shape[1]
    return tl.broadcast_to(
        blocks[:, None, :, None],
        (num_lines, LINES // num_lines, num_blocks, WIDTH // num_blocks),
    ).reshape(LINES, WIDTH)


@triton.jit
def hadamard(x, signs):
    """H D x for every 16 elements of the last dimension of x fp32 [LINES, WIDTH]; signs: as in twin/quantize.py."""
    lines: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = width // FORMATS.HADAMARD_SIZE
    bit = (signs >> (tl.arange(0, width) % FORMATS.HADAMARD_SIZE)) & 1
    # A product, because Triton's -x is 0 - x, which turns 0 into 0, not -0.
    y = (x * tl.where(bit == 1, -1.0, 1.0)[None, :]).reshape(lines, blocks, FORMATS.HADAMARD_SIZE)
    # Sums and differences of neighbours go to the two halves. After four times all elements are back in their places.
    for _ in tl.static_range(4):
        first, second = tl.split(y.reshape(lines, blocks, FORMATS.HADAMARD_SIZE // 2, 2))
        y = (
            tl.join(first + second, first - second)
            .permute(0, 1, 3, 2)
            .reshape(lines, blocks, FORMATS.HADAMARD_SIZE)
        )
    return y.reshape(lines, width) * 0.25


def column_scale(scale: torch.Tensor) -> torch.Tensor:
    """Scales of columns in memory order, in which kernels store them."""
    return scale.t() if scale.dtype == torch.float32 else scale.view(torch.uint8)
