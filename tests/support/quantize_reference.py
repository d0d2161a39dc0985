"""What quantising is to give, written once more with numpy and ml_dtypes: block by block, element by element. Shares no
code with the package; arithmetic is numpy's fp32, one rounding for every operation, and Python's integers."""

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
        first = 0xD2511F53 * c[0]
        second = 0xCD9E8D57 * c[2]
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


def stochastic_e2m1(x: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Codes of x's neighbours in E2M1: the upper one if 24 random bits are below where x is between them, which float64
    has exactly."""
    numbers = np.array(E2M1_NUMBERS)
    size = np.minimum(np.abs(x).astype(np.float64), 6)
    lower = np.searchsorted(numbers, size, side="right") - 1
    gap = np.append(np.diff(numbers), 1)[lower]
    goes_up = (words >> 8) / 2**24 < (size - numbers[lower]) / gap
    return (lower + goes_up + 8 * np.signbit(x)).astype(np.uint8)


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


def power_of_two_above(scale: np.ndarray) -> np.ndarray:
    """The smallest powers of two that are not below scales."""
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(F32(1), np.where(mantissa == 0.5, exponent - 1, exponent))


def scaled_blocks(
    lines: np.ndarray, kind: str, block: int, block_lines: int, amax: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lines [L, K] in blocks [., block_lines, ., block], with zeros behind their ends and in blocks that are not
    finite: numbers over their block's scale, the scale, the same as it is stored, and which blocks are finite.
    amax: of the group, for "e4m3"."""
    num_lines, width = lines.shape
    padded = np.pad(lines.astype(F32), ((0, -num_lines % block_lines), (0, -width % block)))
    shape = padded.shape[0] // block_lines, block_lines, padded.shape[1] // block, block
    blocks = padded.reshape(shape)
    largest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    is_finite = np.isfinite(largest)
    blocks, largest = (np.where(is_finite, numbers, F32(0)) for numbers in (blocks, largest))
    if kind == "e4m3":
        global_scale = max(F32(F32(amax) / F32(2688)), F32(2.0**-110))
        stored = e4m3(np.clip(largest / F32(6) / global_scale, F32(2.0**-9), F32(448)))
        scale = stored.astype(F32) * global_scale
    else:
        scale = np.maximum(largest / F32(448), F32(2.0**-126))
        if kind != "fp32":
            scale = power_of_two_above(scale)
        stored = scale.astype(ml_dtypes.float8_e8m0fnu) if kind == "e8m0" else scale
    return blocks * (F32(1) / scale), scale, stored, is_finite


def as_lines(blocks: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Lines [L, K] that scaled_blocks has taken apart."""
    rows, block_lines, columns, block = blocks.shape
    return blocks.reshape(rows * block_lines, columns * block)[: shape[0], : shape[1]]


def nearest(values: np.ndarray, element: str) -> np.ndarray:
    """The nearest numbers of E4M3 or E2M1, saturating."""
    if element == "e4m3":
        return e4m3(values)
    return np.clip(values, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn)


def block_scales_or_nan(bits: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and their reciprocals of blocks whose largest |x|, of fp32, has these bits; for gluon_emulator."""
    amax = bits.view(torch.float32)
    scale = (amax.where(torch.isfinite(amax), 0.0) / 448).clamp(min=2.0**-126)
    if kind == "power_of_two":
        scale = torch.as_tensor(power_of_two_above(scale.numpy()))
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
    values, _, stored, is_finite = scaled_blocks(lines, kind, block, block_lines, amax)
    codes = nearest(values, element).view(np.uint8) & (0xF if element == "e2m1" else 0xFF)
    if seed is not None and element == "e2m1":
        codes = stochastic_codes(as_lines(values, lines.shape), seed).reshape(values.shape)
    codes = as_lines(np.where(is_finite, codes, 0 if kind == "e4m3" else 0x7F), lines.shape)
    if element == "e2m1":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    stored = np.where(is_finite, stored.astype(F32), F32(np.nan)).astype(stored.dtype)
    return codes.astype(np.uint8), np.ascontiguousarray(stored[:, 0, :, 0]).view(np.uint8)


def stochastic_codes(lines: np.ndarray, seed: int) -> np.ndarray:
    """Codes of E2M1 of lines [L, K], whole blocks."""
    words = [
        [word for k in range(0, lines.shape[1], 4) for word in philox(seed, (k // 4, line, 0, 0))]
        for line in range(len(lines))
    ]
    return stochastic_e2m1(lines, np.array(words))


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
