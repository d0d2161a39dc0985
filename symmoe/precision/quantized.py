"""A quantised tensor: data, scales, and their description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from symmoe.errors import choice_problem, raise_for
from symmoe.kernels import formats
from symmoe.kernels.operands import Buffers, Operand, bounds_of, equal_groups, require_tensor
from symmoe.kernels.twin import quantize as twin

Layout = Literal["rows", "columns", "weight", "weight_transposed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """Quantised rows [N, C] in G groups, or quantised weights [G, O, C].

    P is the number of tokens with padding: TILE * max_tiles(N, G) (kernels/formats.py). Every group begins at the first
    multiple of TILE after the previous group. The padding of its last tile is 0; later tiles are not written.

    | layout | contracted, last in data | data | scale |
    |---|---|---|---|
    | rows | features | [N, C] | [N, C / block] |
    | columns | tokens | [C, P] | [C, P / block] |
    | weight | C | [G, O, C] | [G, O / block_lines, C / block] |
    | weight_transposed | O | [G, C, O] | [G, C / block_lines, O / block] |

    Quotients are rounded up. Rows that belong to no group are not written.

    Attributes:
        data: float8_e4m3fn numbers; or uint8 with two E2M1 numbers in a byte, half as wide.
        scale: scales, with the dtype and blocks of `block_format`; compact and row-major. Only fp32 scales of columns
            are block-major, strides (1, C): a GEMM reads scales of neighbouring features and the same tokens together.
        block_format: the format of elements, scales and blocks.
        layout: the row of the table above.
        num_rows: N for rows and columns; O or C for weights.
        amax: fp32[G], the largest finite |x| of every group, where there is a global scale; else None.
        row_range: int32[2, G], where the rows of each group begin and end; None for weights.
        signs: signs of the tokens' Hadamard transform; None: no transform.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block_format: formats.BlockFormat
    layout: Layout
    num_rows: int
    amax: torch.Tensor | None = None
    row_range: torch.Tensor | None = None
    signs: int | None = None

    def __post_init__(self) -> None:
        raise_for(choice_problem("layout", self.layout, get_args(Layout)))

    @property
    def row_start(self) -> torch.Tensor | None:
        """int32[G + 1], the groups' bounds, as a new tensor; None for weights."""
        return None if self.row_range is None else bounds_of(self.row_range)

    @property
    def global_scale(self) -> torch.Tensor | None:
        """fp32[G], the factor of a group's scales, as a new tensor; None if the format has none."""
        return None if self.amax is None else twin.global_scale_of(self.amax)

    @property
    def buffers(self) -> Buffers:
        """Data and scale, in the form that kernels fill."""
        return self.data, self.scale

    def operand(self) -> Operand:
        """The operand of grouped GEMMs: fp32 scales unchanged, other scales in tiles."""
        scale = self.scale if self.scale.dtype == torch.float32 else self.swizzled_scale()
        return Operand(self.data, scale, self.global_scale)

    def swizzled_scale(self) -> torch.Tensor:
        """The scales in 128x4 tiles, for Blackwell's matrix units (precision/block_scaled/tiles.py).

        Rows: every group begins at a new tile. Columns: one matrix, in which groups begin at tiles anyway.
        Weights: one matrix after the other, each padded to tiles, with a scale for every line of a square block.

        Returns:
            uint8 [tiles, ceil(scales of a line / 4), 512].

        Raises:
            ArgumentError: a scale is not one byte.
        """
        from symmoe.precision.block_scaled.tiles import swizzle_scales

        if self.layout == "rows":
            return swizzle_scales(self.scale, self._row_range)
        num_matrices, num_lines = (
            (1, self.data.shape[0]) if self.layout == "columns" else self.data.shape[:2]
        )
        lines = self.scale
        if self.block_format.block_lines > 1:
            lines = lines.view(torch.uint8).repeat_interleave(
                self.block_format.block_lines, dim=-2
            )[:, :num_lines]
        return swizzle_scales(
            lines.reshape(-1, lines.shape[-1]),
            equal_groups(num_matrices, num_lines, lines.device),
        )

    def dequantize(self) -> torch.Tensor:
        """The numbers in fp32, up to rounding: rows [N, C] or weights [G, O, C]; rows of no group are 0.

        For numerics and tests: temporaries are several times as large as the result. Does not synchronise the host.
        """
        if self.layout == "columns":
            return self._columns()
        if self.layout == "rows":
            groups, belongs = self._row_groups()
            return self._values((groups, None)).where(belongs[:, None], 0.0)
        values = self._values((slice(None), None, None))
        return values if self.layout == "weight" else values.mT.contiguous()

    @property
    def _row_range(self) -> torch.Tensor:
        return require_tensor("row_range", self.row_range)

    def _columns(self) -> torch.Tensor:
        groups, belongs = self._row_groups()
        begin, end = self._row_range
        tiles = (end - begin + formats.TILE - 1) // formats.TILE
        first = formats.TILE * (tiles.cumsum(0) - tiles)
        position = (first - begin)[groups] + torch.arange(self.num_rows, device=self.data.device)
        width = self.data.shape[1] * self.block_format.elements_per_byte
        token = torch.arange(width, device=self.data.device)
        # By the group of each padded token; for tiles of no group, any group.
        values = self._values((torch.searchsorted(first, token, right=True) - 1).clamp(min=0))
        if self.signs is not None:
            from symmoe.kernels.twin.block_scaled import inverse_hadamard

            values = inverse_hadamard(values, self.signs)
        return values.T[position.where(belongs, 0)].where(belongs[:, None], 0.0)

    def _row_groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The group of every row, 0 if it has none, and whether it has one."""
        row = torch.arange(self.num_rows, device=self.data.device, dtype=torch.int32)
        groups = torch.searchsorted(self._row_range[1], row, right=True)
        belongs = groups < self._row_range.shape[1]
        return groups.where(belongs, 0), belongs

    def _values(self, of_groups: Any) -> torch.Tensor:
        """data * scale, fp32; scales are spread over their blocks. of_groups: the index that spreads global scales."""
        values = twin.numbers_of(self.data, self.block_format)
        scale = self.scale.float().repeat_interleave(self.block_format.block, dim=-1)[
            ..., : values.shape[-1]
        ]
        scale = scale.repeat_interleave(self.block_format.block_lines, dim=-2)[
            ..., : values.shape[-2], :
        ]
        global_scale = self.global_scale
        return values * (scale if global_scale is None else scale * global_scale[of_groups])
