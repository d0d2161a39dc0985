"""Quantised rows on the wire: the data and the scales of each row, as one row of bytes.

The sender quantises a token once for all destination ranks; kernels that move rows do not interpret the bytes. The
receiver separates data and scales for its GEMM. The numbers are the same as if the receiver had quantised the row, so
the wire supports only recipes whose blocks lie within a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.precision.quantized import Quantized
from symmoe.precision.recipes import Recipe, check_floats

# Dtype of travelling rows: 16-bit words, which hopper/rows.py supports, too. No kernel computes with these words.
WORD = torch.bfloat16


@dataclass(frozen=True, slots=True)
class WireFormat:
    """Rows of `hidden` features: data of the recipe, its compact scales, zeros up to a multiple of 16 bytes."""

    recipe: Recipe
    hidden: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return -(-self.recipe.row_bytes(self.hidden) // control.ACCESS_BYTES) * control.ACCESS_BYTES

    @property
    def row_words(self) -> int:
        """WORDs of a row on the wire."""
        return self.row_bytes // WORD.itemsize

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """WORD [T, row_words] from x [T, H], in one launch: the result of Recipe.quantize, padded with zeros.

        Raises:
            ArgumentError: x is not contiguous bf16, fp16 or fp32 of H features, or its GPU has no E4M3 numbers.
        """
        check_floats(self.recipe, "x", x, ("T", self.hidden))
        sent = torch.empty((x.shape[0], self.row_bytes), dtype=torch.uint8, device=x.device)
        kernels.for_device(x.device).encode_rows(x, sent, self.recipe.row_format)
        return sent.view(WORD)

    def quantized(
        self, received: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None = None
    ) -> Quantized:
        """The result of Recipe.quantize for rows received[row_index[r]], or received[r] without an index."""
        num_rows = (received if row_index is None else row_index).shape[0]
        rows = self.recipe.empty("rows", num_rows, self.hidden, row_range)
        self.unpack(received, row_range, rows, row_index)
        return rows

    def unpack(
        self,
        received: torch.Tensor,
        row_range: torch.Tensor,
        rows: Quantized,
        row_index: torch.Tensor | None = None,
    ) -> None:
        """Fills the rows of row_range in a result of Recipe.empty, as `quantized` does."""
        kernels.for_device(received.device).unpack_rows(
            received.view(torch.uint8),
            row_range,
            (rows.data.view(torch.uint8), rows.scale.view(torch.uint8)),
            row_index=row_index,
        )

    def columns(
        self,
        received: torch.Tensor,
        row_range: torch.Tensor,
        dtype: torch.dtype,
        row_index: torch.Tensor | None = None,
    ) -> Quantized:
        """The result of Recipe.quantize_columns for the rows of `decode`, in one launch."""
        num_rows = (received if row_index is None else row_index).shape[0]
        columns = self.recipe.empty("columns", num_rows, self.hidden, row_range)
        kernels.for_device(received.device).requantize_columns(
            received.view(torch.uint8),
            row_range,
            columns.buffers,
            self.recipe.row_format,
            dtype,
            row_index=row_index,
        )
        return columns

    def decode(self, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows [P, H] that were sent, up to rounding. Rows that were never received have arbitrary numbers."""
        out = torch.empty((received.shape[0], self.hidden), dtype=dtype, device=received.device)
        kernels.for_device(received.device).decode_rows(
            received.view(torch.uint8), out, self.recipe.row_format
        )
        return out


def wire_problem(recipe: Recipe | None) -> ArgumentError | None:
    """Why rows of a recipe cannot travel quantised, or None if they can."""
    if recipe is None or recipe.row_format.element != "e4m3":
        return ArgumentError(
            f"precision ({recipe}) must be a recipe of E4M3 numbers where rows travel quantised"
        )
    return None
