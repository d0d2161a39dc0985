"""Operands for the grouped GEMMs of MXFP8 and NVFP4 numbers, made without the package, and oracles in float64.

The exact kind has few small numbers and powers of two for scales: sums of them are exact in fp32 whatever their order,
so that results can be compared bit by bit. What must not matter is NaN: scales that pad lines, tiles of no group, rows
and tokens past the last group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from fp8_problem import SENTINEL, cdiv
from quantize_cases import Scattered
from row_ranges import spans_of, whole_groups

TILE = 128
NAN = {"mxfp8": 0xFF, "nvfp4": 0x7F}  # of scales
BLOCK = {"mxfp8": 32, "nvfp4": 16}
PER_BYTE = {"mxfp8": 1, "nvfp4": 2}
NAMES = ("mxfp8", "nvfp4")


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The E4M3 numbers of codes, float64."""
    codes = codes.view(torch.uint8).long()
    exponent, mantissa = codes >> 3 & 15, (codes & 7).double()
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * torch.exp2(exponent.double() - 10))
    size = torch.where(codes & 0x7F == 0x7F, torch.nan, size)
    return torch.where(codes >= 128, -size, size)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The E2M1 numbers of bytes, the first in the low half, float64."""
    codes = torch.stack((codes % 16, codes // 16), -1).flatten(-2).long()
    exponent, mantissa = codes >> 1 & 3, (codes & 1).double()
    size = torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * torch.exp2(exponent.double() - 2))
    return torch.where(codes >= 8, -size, size)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two of bytes, float64."""
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127))


def dequantised(name: str, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """data * scale in float64, with a scale for a block of a line; without global scales."""
    values = e4m3(data) if name == "mxfp8" else e2m1(data)
    scales = e8m0(scale) if name == "mxfp8" else e4m3(scale)
    return values * scales.repeat_interleave(BLOCK[name], -1)[..., : values.shape[-1]]


def tiles(name: str, matrices: list[torch.Tensor], num_tiles: int) -> torch.Tensor:
    """Scales [lines, blocks] of matrices in 128x4 tiles, one matrix after the other; NaN where there are no lines."""
    num_blocks = matrices[0].shape[1]
    across = cdiv(num_blocks, 4)
    result = torch.full((num_tiles, across, 512), NAN[name], dtype=torch.uint8)
    first = 0
    for matrix in matrices:
        line = torch.arange(matrix.shape[0])[:, None]
        block = torch.arange(across * 4)
        padded = torch.zeros(matrix.shape[0], across * 4, dtype=torch.uint8)
        padded[:, :num_blocks] = matrix
        result[first + line // 128, block // 4, line % 32 * 16 + line % 128 // 32 * 4 + block % 4] = padded
        first += cdiv(matrix.shape[0], TILE)
    return result


class Numbers:
    """Random data, scales and global scales of a format. exact: see above."""

    def __init__(self, name: str, *, exact: bool, seed: int = 0, device: str = "cpu"):
        self.name, self.exact, self.device = name, exact, device
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def data(self, *shape: int) -> torch.Tensor:
        """Data of numbers [..., width]."""
        if self.name == "nvfp4":
            low, high = ((0, 4) if self.exact else (0, 8), 2)
            codes = self.integers(*low, shape) + 8 * self.integers(0, high, shape)
            return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        if self.exact:
            return self.integers(-3, 4, shape).float().to(torch.float8_e4m3fn)
        return (torch.randn(shape, generator=self.generator) * 120).clamp(-448, 448).to(torch.float8_e4m3fn)

    def scale(self, *shape: int) -> torch.Tensor:
        """Scales [..., blocks]."""
        if self.name == "mxfp8":
            low, high = (125, 129) if self.exact else (115, 130)
            return self.integers(low, high, shape).to(torch.uint8)
        numbers = torch.exp2(self.integers(-1, 3, shape).float())
        if not self.exact:
            numbers = numbers * (1 + torch.rand(shape, generator=self.generator)) * 30
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)

    def global_scale(self, num_groups: int) -> torch.Tensor | None:
        if self.name == "mxfp8":
            return None
        if self.exact:
            return torch.exp2(self.integers(-3, 4, (num_groups,)).float()).to(self.device)
        return (torch.exp(torch.randn(num_groups, generator=self.generator)) / 100).to(self.device)


@dataclass
class Problem:
    """Rows of groups, and a tail of `tail` rows; weights [G, O, C]."""

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail: int = 5

    def __post_init__(self):
        self.name, self.device = self.numbers.name, self.numbers.device
        (out_width, in_width), groups = self.widths, len(self.splits)
        self.row_range = whole_groups(self.splits, device=self.device)
        self.num_rows, self.spans = sum(self.splits), spans_of(self.row_range)
        self.capacity = self.num_rows + self.tail
        num_blocks = cdiv(in_width, BLOCK[self.name])
        self.rows, self.row_scale = (
            self.numbers.data(self.capacity, in_width),
            self.numbers.scale(self.capacity, num_blocks),
        )
        self.rows.view(torch.uint8)[self.num_rows :] = 0x7F
        self.weight = self.numbers.data(groups, out_width, in_width)
        self.weight_scale = self.numbers.scale(groups, out_width, num_blocks)
        self.row_global_scale, self.weight_global_scale = (self.numbers.global_scale(groups) for _ in range(2))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        groups, out_width = len(self.splits), self.widths[0]
        row_tiles = (self.capacity + 127 * groups) // TILE
        weight_tiles = (groups * out_width + 127 * groups) // TILE
        given = (
            self.rows,
            tiles(self.name, [self.row_scale[span] for span in self.spans], row_tiles),
            self.weight,
            tiles(self.name, list(self.weight_scale), weight_tiles),
            self.row_range,
        )
        return tuple(tensor.to(self.device) for tensor in given)

    @property
    def scattered(self) -> tuple[Scattered, Scattered]:
        """The weights, and their scales in tiles, as matrices in memory of their own."""
        _, _, weight, packed, _ = self.operands
        groups, down = len(self.splits), cdiv(self.widths[0], TILE)
        return Scattered(weight), Scattered(packed[: groups * down].reshape(groups, down, -1))

    @property
    def options(self) -> dict[str, torch.Tensor]:
        """Global scales, where there are any."""
        options = {"row_global_scale": self.row_global_scale, "weight_global_scale": self.weight_global_scale}
        return options if self.name == "nvfp4" else {}

    def blank(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((self.capacity, self.widths[0]), SENTINEL, dtype=dtype, device=self.device)

    def expected(self) -> torch.Tensor:
        """The result in float64; the sentinel in the tail."""
        result = self.blank(torch.float64)
        for g, span in enumerate(self.spans):
            left = dequantised(self.name, self.rows[span], self.row_scale[span]).to(self.device)
            right = dequantised(self.name, self.weight[g], self.weight_scale[g]).to(self.device)
            product = left @ right.T
            for scale in self.options.values():
                product = product * scale[g].double()
            result[span] = product
        return result


@dataclass
class WgradProblem:
    """Features by tokens [O, P], [C, P]: groups begin at multiples of TILE; after the last one there is anything."""

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail_tiles: int = 2

    def __post_init__(self):
        self.name, self.device = self.numbers.name, self.numbers.device
        self.row_range = whole_groups(self.splits, device=self.device)
        firsts = [0, *itertools.accumulate(cdiv(size, TILE) * TILE for size in self.splits)]
        self.spans = [slice(first, first + size) for first, size in zip(firsts, self.splits, strict=False)]
        self.end, self.num_tokens = firsts[-1], firsts[-1] + self.tail_tiles * TILE
        keep = torch.zeros(self.num_tokens, dtype=torch.bool)
        for span in self.spans:
            keep[span] = True
        (self.dout, self.dout_scale), (self.rows, self.rows_scale) = (self._side(width, keep) for width in self.widths)
        self.dout_global_scale, self.rows_global_scale = (self.numbers.global_scale(len(self.splits)) for _ in range(2))
        for scale in self.options.values():  # of groups without tokens, nobody says what it is
            scale[torch.tensor(self.splits) == 0] = torch.nan

    def _side(self, width: int, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        per_byte, block = PER_BYTE[self.name], BLOCK[self.name]
        data, scale = self.numbers.data(width, self.num_tokens), self.numbers.scale(width, self.num_tokens // block)
        codes = data.view(torch.uint8)
        if per_byte == 1:
            codes[:, ~keep] = 0
        else:
            mask = keep.view(-1, 2).int()
            codes &= (15 * mask[:, 0] + 240 * mask[:, 1]).to(torch.uint8)
        codes[:, self.end // per_byte :] = 0x7F
        scale[:, self.end // block :] = NAN[self.name]
        return data, scale

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        sides = [
            (data, tiles(self.name, [scale], cdiv(data.shape[0], TILE)))
            for data, scale in ((self.dout, self.dout_scale), (self.rows, self.rows_scale))
        ]
        return tuple(tensor.to(self.device) for tensor in (*sides[0], *sides[1], self.row_range))

    @property
    def options(self) -> dict[str, torch.Tensor]:
        options = {"dout_global_scale": self.dout_global_scale, "rows_global_scale": self.rows_global_scale}
        return options if self.name == "nvfp4" else {}

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.splits), *self.widths

    def expected(self) -> torch.Tensor:
        """The result in float64."""
        left = dequantised(self.name, self.dout, self.dout_scale).to(self.device)
        right = dequantised(self.name, self.rows, self.rows_scale).to(self.device)
        result = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for g, span in enumerate(self.spans):
            if span.start < span.stop:
                result[g] = left[:, span] @ right[:, span].T
                for scale in self.options.values():
                    result[g] *= scale[g].double()
        return result
