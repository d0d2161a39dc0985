"""Operands for the grouped GEMMs of E4M3 numbers, made without the package's quantisers, and oracles in float64.

The exact kind has whole numbers for data and powers of two for scales: sums of few of them are exact in fp32 whatever
their order, so that results can be compared bit by bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from row_ranges import spans_of, whole_groups

BLOCK = 128
SENTINEL = -77.0
E4M3 = torch.float8_e4m3fn


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


class Numbers:
    """Random data and scales on a device. exact: see above."""

    def __init__(self, *, exact: bool, seed: int = 0, device: str = "cpu"):
        self.exact, self.device = exact, device
        self.generator = torch.Generator().manual_seed(seed)

    def data(self, *shape: int) -> torch.Tensor:
        if self.exact:
            numbers = torch.randint(-3, 4, shape, generator=self.generator).float()
        else:
            numbers = torch.randn(shape, generator=self.generator) * 120
        return numbers.clamp(-448, 448).to(E4M3).to(self.device)

    def scale(self, *shape: int) -> torch.Tensor:
        if self.exact:
            numbers = torch.exp2(torch.randint(-3, 2, shape, generator=self.generator).float())
        else:
            numbers = torch.exp(torch.randn(shape, generator=self.generator)) / 448
        return numbers.to(self.device)


@dataclass
class Problem:
    """Rows of groups, and a tail of `tail` rows of NaN; weights [G, O, C]."""

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail: int = 5

    def __post_init__(self):
        out_width, in_width = self.widths
        groups, device = len(self.splits), self.numbers.device
        self.row_range = whole_groups(self.splits, device=device)
        self.num_rows, self.spans = sum(self.splits), spans_of(self.row_range)
        self.capacity = self.num_rows + self.tail
        self.rows = self.numbers.data(self.capacity, in_width)
        self.row_scale = self.numbers.scale(self.capacity, cdiv(in_width, BLOCK))
        self.rows.view(torch.uint8)[self.num_rows :] = 0x7F  # NaN
        self.row_scale[self.num_rows :] = torch.nan
        self.weight = self.numbers.data(groups, out_width, in_width)
        self.weight_scale = self.numbers.scale(groups, cdiv(out_width, BLOCK), cdiv(in_width, BLOCK))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.row_scale, self.weight, self.weight_scale, self.row_range

    def blank(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((self.capacity, self.widths[0]), SENTINEL, dtype=dtype, device=self.numbers.device)

    def expected(self) -> torch.Tensor:
        """The result in float64; the sentinel in the tail."""
        result = self.blank(torch.float64)
        for g, span in enumerate(self.spans):
            rows = dequantised_rows(self.rows[span], self.row_scale[span])
            by_row = self.weight_scale[g].repeat_interleave(BLOCK, 0)[: self.widths[0]]
            result[span] = rows @ dequantised_rows(self.weight[g], by_row).T
        return result

    def transposed_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same numbers with the features the other way round, as the input gradient wants them."""
        turned = self.weight.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3)
        return turned, self.weight_scale.transpose(1, 2).contiguous()


def dequantised_rows(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """data * scale in float64, with a scale for BLOCK numbers of a row."""
    return data.double() * scale.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


@dataclass
class WgradProblem:
    """Features by tokens [O, P], [C, P]: groups begin at multiples of BLOCK; after the last one everything is NaN.

    Scales are block-major.
    """

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail_blocks: int = 2

    def __post_init__(self):
        device = self.numbers.device
        self.row_range = whole_groups(self.splits, device=device)
        firsts = [0, *itertools.accumulate(cdiv(size, BLOCK) * BLOCK for size in self.splits)]
        self.spans = [slice(first, first + size) for first, size in zip(firsts, self.splits, strict=False)]
        self.num_tokens = firsts[-1] + self.tail_blocks * BLOCK
        self.dout, self.rows = (self.numbers.data(width, self.num_tokens) for width in self.widths)
        num_blocks = self.num_tokens // BLOCK
        self.dout_scale, self.rows_scale = (self.numbers.scale(num_blocks, width).t() for width in self.widths)
        is_filler = torch.ones(self.num_tokens, dtype=torch.bool, device=device)
        for span in self.spans:
            is_filler[span] = False
        for data in (self.dout, self.rows):
            data.view(torch.uint8)[:, is_filler] = 0
            data.view(torch.uint8)[:, firsts[-1] :] = 0x7F
        for scale in (self.dout_scale, self.rows_scale):
            scale[:, firsts[-1] // BLOCK :] = torch.nan

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return self.dout, self.dout_scale, self.rows, self.rows_scale, self.row_range

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.splits), *self.widths

    def expected(self) -> torch.Tensor:
        """The result in float64."""
        left, right = dequantised_rows(self.dout, self.dout_scale), dequantised_rows(self.rows, self.rows_scale)
        return torch.stack([left[:, span] @ right[:, span].T for span in self.spans])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest value."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return 0.0 if largest == 0.0 else (got.double() - expected).abs().max().item() / largest
