"""Operands for the grouped GEMMs of quantised numbers, whose numbers the package has not made, and oracles in float64.
The exact kind has few small numbers and powers of two for scales: sums of them are exact in fp32 whatever their order,
so that results can be compared bit by bit. What must not matter is NaN: rows and tokens past the last group, scales
that pad lines, tiles of no group."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from row_ranges import spans_of, whole_groups

from symmoe.kernels.operands import Operand

TILE = 128
SENTINEL = -77.0
E4M3 = torch.float8_e4m3fn
E2M1_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
NAMES = ("fp8", "mxfp8", "nvfp4")
BLOCK = {"fp8": 128, "mxfp8": 32, "nvfp4": 16}
PER_BYTE = {"fp8": 1, "mxfp8": 1, "nvfp4": 2}
NAN = {"fp8": torch.nan, "mxfp8": 0xFF, "nvfp4": 0x7F}  # of scales


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The E4M3 numbers of codes, float64."""
    return codes.view(E4M3).double()


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The E2M1 numbers of bytes, the first in the low half, float64."""
    halves = torch.stack((codes % 16, codes // 16), -1).flatten(-2)
    return torch.cat((E2M1_SIZES, -E2M1_SIZES)).to(codes.device)[halves.long()]


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two of bytes, float64."""
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127))


def dequantised(name: str, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """data * scale in float64, with a scale for a block of a line; without global scales."""
    values = e2m1(data) if name == "nvfp4" else e4m3(data)
    scales = {"fp8": torch.Tensor.double, "mxfp8": e8m0, "nvfp4": e4m3}[name](scale)
    return values * scales.repeat_interleave(BLOCK[name], -1)[..., : values.shape[-1]]


def tiles(name: str, matrices: list[torch.Tensor], num_tiles: int) -> torch.Tensor:
    """Scales [lines, blocks] of matrices in 128x4 tiles, one matrix after the other; NaN where there are no lines."""
    num_blocks = matrices[0].shape[1]
    device = matrices[0].device
    across = cdiv(num_blocks, 4)
    result = torch.full((num_tiles, across, 512), NAN[name], dtype=torch.uint8, device=device)
    first = 0
    for matrix in matrices:
        line = torch.arange(matrix.shape[0], device=device)[:, None]
        block = torch.arange(across * 4, device=device)
        padded = torch.nn.functional.pad(matrix, (0, across * 4 - num_blocks))
        result[
            first + line // 128, block // 4, line % 32 * 16 + line % 128 // 32 * 4 + block % 4
        ] = padded
        first += cdiv(matrix.shape[0], TILE)
    return result


class Numbers:
    """Random data, scales and global scales of a format on a device. exact: see above."""

    def __init__(self, name: str = "fp8", *, exact: bool, seed: int = 0, device: str = "cpu"):
        self.name, self.exact, self.device = name, exact, device
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def data(self, *shape: int) -> torch.Tensor:
        """Data of numbers [..., width]."""
        if self.name == "nvfp4":
            codes = self.integers(0, 4 if self.exact else 8, shape) + 8 * self.integers(0, 2, shape)
            return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).to(self.device)
        if self.exact:
            return self.integers(-3, 4, shape).float().to(E4M3).to(self.device)
        return (
            (torch.randn(shape, generator=self.generator) * 120)
            .clamp(-448, 448)
            .to(E4M3)
            .to(self.device)
        )

    def scale(self, *shape: int) -> torch.Tensor:
        """Scales [..., blocks]."""
        if self.name == "fp8":
            numbers = (
                torch.exp2(self.integers(-3, 2, shape).float())
                if self.exact
                else self._positive(*shape) / 448
            )
        elif self.name == "mxfp8":
            numbers = self.integers(*((125, 129) if self.exact else (115, 130)), shape).to(
                torch.uint8
            )
        else:
            numbers = torch.exp2(self.integers(-1, 3, shape).float())
            if not self.exact:
                numbers = numbers * (1 + torch.rand(shape, generator=self.generator)) * 30
            numbers = numbers.to(E4M3).view(torch.uint8)
        return numbers.to(self.device)

    def global_scale(self, num_groups: int) -> torch.Tensor | None:
        if self.name != "nvfp4":
            return None
        if self.exact:
            return torch.exp2(self.integers(-3, 4, (num_groups,)).float()).to(self.device)
        return (self._positive(num_groups) / 100).to(self.device)

    def _positive(self, *shape: int) -> torch.Tensor:
        return torch.exp(torch.randn(shape, generator=self.generator))


class Quantised:
    """The common parts of problems of both kinds."""

    def begin(self) -> None:
        self.name, self.device = self.numbers.name, self.numbers.device
        self.row_range = whole_groups(self.splits, device=self.device)

    @property
    def global_scales(self) -> tuple[torch.Tensor, ...]:
        """Those of both operands, where there are any."""
        names = ("row", "weight") if isinstance(self, Problem) else ("dout", "rows")
        return tuple(
            getattr(self, f"{name}_global_scale") for name in names if self.name == "nvfp4"
        )

    def run(
        self,
        kernels,
        out,
        row_range: torch.Tensor | None = None,
        **options,
    ) -> None:
        """By the function of a module of kernels. row_range: some of the rows."""
        left, right, groups = self.operands
        if row_range is not None and self.name != "fp8":
            options["group_range"] = groups
        function = kernels.grouped_gemm_quantized
        if isinstance(self, WgradProblem):
            function = kernels.grouped_gemm_wgrad_quantized
        function(left, right, groups if row_range is None else row_range, out, **options)


@dataclass
class Problem(Quantised):
    """Rows of groups, and a tail of `tail` rows of NaN; weights [G, O, C]."""

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail: int = 5

    def __post_init__(self):
        self.begin()
        (out_width, in_width), groups = self.widths, len(self.splits)
        self.num_rows = sum(self.splits)
        self.spans = spans_of(self.row_range)
        self.capacity = self.num_rows + self.tail
        num_blocks = cdiv(in_width, BLOCK[self.name])
        self.rows = self.numbers.data(self.capacity, in_width)
        self.row_scale = self.numbers.scale(self.capacity, num_blocks)
        self.rows.view(torch.uint8)[self.num_rows :] = 0x7F
        if self.name == "fp8":
            self.row_scale[self.num_rows :] = torch.nan
        self.block_lines = 128 if self.name == "fp8" else 1
        self.weight = self.numbers.data(groups, out_width, in_width)
        self.weight_scale = self.numbers.scale(
            groups, cdiv(out_width, self.block_lines), num_blocks
        )
        self.row_global_scale, self.weight_global_scale = (
            self.numbers.global_scale(groups) for _ in range(2)
        )

    @property
    def operands(self) -> tuple[Operand, Operand, torch.Tensor]:
        row_scale, weight_scale, groups = self.row_scale, self.weight_scale, len(self.splits)
        if self.name != "fp8":
            lines = [row_scale[span] for span in self.spans]
            row_scale = tiles(self.name, lines, (self.capacity + 127 * groups) // TILE)
            weight_scale = tiles(
                self.name, list(weight_scale), (groups * self.widths[0] + 127 * groups) // TILE
            )
        rows = Operand(self.rows, row_scale, self.row_global_scale)
        return rows, Operand(self.weight, weight_scale, self.weight_global_scale), self.row_range

    def blank(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(
            (self.capacity, self.widths[0]), SENTINEL, dtype=dtype, device=self.device
        )

    def expected(self) -> torch.Tensor:
        """The result in float64; the sentinel in the tail."""
        result = self.blank(torch.float64)
        for g, span in enumerate(self.spans):
            lines = self.weight_scale[g].repeat_interleave(self.block_lines, 0)[: self.widths[0]]
            product = dequantised(self.name, self.rows[span], self.row_scale[span])
            product = product @ dequantised(self.name, self.weight[g], lines).T
            for scale in self.global_scales:
                product = product * scale[g].double()
            result[span] = product
        return result


@dataclass
class WgradProblem(Quantised):
    """Features by tokens [O, P], [C, P]: groups begin at multiples of TILE; after the last one everything is NaN."""

    splits: tuple[int, ...]
    widths: tuple[int, int]  # O, C
    numbers: Numbers
    tail_tiles: int = 2

    def __post_init__(self):
        self.begin()
        firsts = [0, *itertools.accumulate(cdiv(size, TILE) * TILE for size in self.splits)]
        self.spans = [
            slice(first, first + size) for first, size in zip(firsts, self.splits, strict=False)
        ]
        self.end = firsts[-1]
        self.num_tokens = firsts[-1] + self.tail_tiles * TILE
        keep = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.device)
        for span in self.spans:
            keep[span] = True
        (self.dout, self.dout_scale), (self.rows, self.rows_scale) = (
            self._side(width, keep) for width in self.widths
        )
        self.dout_global_scale, self.rows_global_scale = (
            self.numbers.global_scale(len(self.splits)) for _ in range(2)
        )
        for scale in self.global_scales:  # of groups without tokens, nobody says what it is
            scale[torch.tensor(self.splits) == 0] = torch.nan

    def _side(self, width: int, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        per_byte = PER_BYTE[self.name]
        num_blocks = self.num_tokens // BLOCK[self.name]
        data = self.numbers.data(width, self.num_tokens)
        # fp32 scales are block-major.
        scale = (
            self.numbers.scale(num_blocks, width).t()
            if self.name == "fp8"
            else self.numbers.scale(width, num_blocks)
        )
        codes = data.view(torch.uint8)
        if per_byte == 1:
            codes[:, ~keep] = 0
        else:
            mask = keep.view(-1, 2).int()
            codes &= (15 * mask[:, 0] + 240 * mask[:, 1]).to(torch.uint8)
        codes[:, self.end // per_byte :] = 0x7F
        scale[:, self.end // BLOCK[self.name] :] = NAN[self.name]
        return data, scale

    @property
    def operands(self) -> tuple[Operand, Operand, torch.Tensor]:
        left = Operand(self.dout, self.dout_scale, self.dout_global_scale)
        right = Operand(self.rows, self.rows_scale, self.rows_global_scale)
        if self.name != "fp8":
            left, right = (
                operand._replace(
                    scale=tiles(self.name, [operand.scale], cdiv(len(operand.data), TILE))
                )
                for operand in (left, right)
            )
        return left, right, self.row_range

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.splits), *self.widths

    def expected(self) -> torch.Tensor:
        """The result in float64."""
        left = dequantised(self.name, self.dout, self.dout_scale)
        right = dequantised(self.name, self.rows, self.rows_scale)
        result = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for g, span in enumerate(self.spans):
            if span.start < span.stop:
                result[g] = left[:, span] @ right[:, span].T
                for scale in self.global_scales:
                    result[g] *= scale[g].double()
        return result


def check_nan_stays_in_its_row(
    p: Problem, row: int, product: Callable[[Problem], torch.Tensor]
) -> None:
    """product(p) with a NaN in a row of p, and without."""
    clean = product(p)
    if p.name == "fp8":
        p.rows.view(torch.uint8)[row, 3] = 0x7F
    else:
        p.row_scale[row, 3] = NAN[p.name]
    dirty = product(p)
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert torch.equal(dirty, clean)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest value."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return 0.0 if largest == 0.0 else (got.double() - expected).abs().max().item() / largest
