"""What quantising is to give, written once more with numpy and ml_dtypes: block by block, element by element. Shares no
code with the package; arithmetic is numpy's fp32, one rounding for every operation, and Python's integers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
TILE = 128
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox-4x32-10, from the paper's description."""
    word = 2**32
    key = [seed % word, (seed >> 32) % word]
    c = list(counter)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second // word) ^ c[1] ^ key[0],
            second % word,
            (first // word) ^ c[3] ^ key[1],
            first % word,
        ]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return c


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest E4M3 numbers, saturating."""
    return np.clip(x, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn)


def stochastic_e2m1(x: np.float32, word: int) -> int:
    """The code of one of x's neighbours in E2M1: the upper one if 24 random bits are below where x is between them."""
    size = min(abs(Fraction(float(x))), 6)
    lower = max(i for i, number in enumerate(E2M1_NUMBERS) if number <= size)
    if lower < 7:
        low, high = Fraction(E2M1_NUMBERS[lower]), Fraction(E2M1_NUMBERS[lower + 1])
        lower += Fraction(word >> 8, 2**24) < (size - low) / (high - low)
    return lower + 8 * bool(np.signbit(x))


def hadamard_matrix(signs: int) -> np.ndarray:
    """H D [16, 16], by the parity of the bits that two indices have in common."""
    sylvester = [[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    return np.array(sylvester) / 4 * np.array([-1 if signs >> j & 1 else 1 for j in range(16)])


def hadamard(lines: np.ndarray, signs: int) -> np.ndarray:
    """Every 16 elements of lines [L, K] times H D, in fp32: pairs at distance 1, then 2, 4, 8."""
    flip = np.array([-1.0 if signs >> j & 1 else 1.0 for j in range(16)], F32)
    out = np.empty_like(lines, F32)
    for first in range(0, lines.shape[1], 16):
        x = [lines[:, first + j].astype(F32) * flip[j] for j in range(16)]
        for bit in range(4):
            x = [
                x[j ^ (1 << bit)] - x[j] if j >> bit & 1 else x[j] + x[j ^ (1 << bit)]
                for j in range(16)
            ]
        for j in range(16):
            out[:, first + j] = x[j] * F32(0.25)
    return out


def group_amax(x: np.ndarray) -> np.float32:
    """The largest finite |x|, 0 if there is none."""
    finite = np.abs(x[np.isfinite(x)])
    return finite.max() if finite.size else F32(0)


def power_of_two_above(scale: np.float32) -> np.float32:
    """The smallest power of two that is not below scale."""
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(F32(1), exponent - 1 if mantissa == 0.5 else exponent)


def quantize_block(x: np.ndarray, kind: str, amax: np.float32) -> tuple[np.ndarray, bytes]:
    """Bytes of the codes of one block (any shape), unpacked, and of its scale; amax: of the group, for "e4m3"."""
    largest = np.abs(x).max()
    is_finite = bool(np.isfinite(largest))
    if kind == "e4m3":
        if not is_finite:
            return np.zeros(x.shape, np.uint8), b"\x7f"
        global_scale = max(F32(amax / F32(2688)), F32(2.0**-110))
        relative = F32(F32(largest / F32(6)) / global_scale)
        scale = e4m3(np.array(np.clip(relative, F32(2.0**-9), F32(448))))
        return x * F32(F32(1) / F32(scale.astype(F32) * global_scale)), scale.tobytes()
    if not is_finite:
        nan = b"\xff" if kind == "e8m0" else F32(np.nan).tobytes()
        return np.full(x.shape, 0x7F, np.uint8), nan
    scale = max(F32(largest / F32(448)), F32(2.0**-126))
    if kind != "fp32":
        scale = power_of_two_above(scale)
    codes = e4m3(x * F32(F32(1) / scale)).view(np.uint8)
    stored = np.array(scale).astype(ml_dtypes.float8_e8m0fnu) if kind == "e8m0" else F32(scale)
    return codes, stored.tobytes()


def block_scales_or_nan(bits: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and their reciprocals of blocks whose largest |x|, of fp32, has these bits; for gluon_emulator."""
    amax = bits.view(torch.float32)
    scale = (amax.where(torch.isfinite(amax), 0.0) / 448).clamp(min=2.0**-126)
    if kind == "power_of_two":
        powers = [float(power_of_two_above(number)) for number in scale.view(-1).numpy()]
        scale = torch.tensor(powers).view(scale.shape)
    scale = scale.where(torch.isfinite(amax), torch.nan)
    return scale, 1.0 / scale


def quantize_lines(
    lines: np.ndarray,
    *,
    element: str,
    kind: str,
    block: int,
    block_lines: int,
    amax,
    seed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(data as stored, scales), both bytes, of lines [L, K]."""
    num_lines, width = lines.shape
    codes = np.zeros((num_lines, width), np.uint8)
    scales = [
        [b"" for _ in range(0, width, block)] for _ in range(0, num_lines, block_lines)
    ]  # of as many bytes as there will be
    for i, line in enumerate(range(0, num_lines, block_lines)):
        for j, k in enumerate(range(0, width, block)):
            here = np.s_[line : line + block_lines, k : k + block]
            values, scales[i][j] = quantize_block(lines[here].astype(F32), kind, amax)
            if element == "e2m1" and values.dtype == F32:
                if seed is None:
                    nearest = np.clip(values, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn)
                    values = nearest.view(np.uint8) & 0xF
                else:
                    values = np.array(
                        [
                            [
                                stochastic_e2m1(
                                    x, philox(seed, ((k + c) // 4, line + r, 0, 0))[(k + c) % 4]
                                )
                                for c, x in row
                            ]
                            for r, row in (
                                (r, list(enumerate(row))) for r, row in enumerate(values)
                            )
                        ],
                        np.uint8,
                    )
            codes[here] = values
    if element == "e2m1":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes, np.array([np.frombuffer(b"".join(row), np.uint8) for row in scales])


def padded_columns(rows: np.ndarray, signs: int | None) -> np.ndarray:
    """Columns of one group's rows as lines, with zeros up to a multiple of TILE; transformed."""
    num_tokens = -(-len(rows) // TILE) * TILE
    lines = np.zeros((rows.shape[1], num_tokens), F32)
    lines[:, : len(rows)] = rows.T
    return lines if signs is None else hadamard(lines, signs)


def swizzled_offset(row: int, block: int, num_blocks: int) -> int:
    """Byte of a scale in 128x4 tiles: cuBLAS' documentation, "1D block scaling factors layout"."""
    tiles_across = -(-num_blocks // 4)
    tile = (row // 128) * tiles_across + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
