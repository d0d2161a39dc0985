"""The three products of a grouped linear layer in a recipe's numbers, from rows and weights in the working dtype.

    forward  rows, along features      x  weight               y
    dgrad    d_y, along features       x  transposed weight    d_x
    wgrad    d_y, along tokens         x  rows, along tokens   d_weight

G groups, C input features, O output features, N rows sorted by group. The weight is quantised in forward, for both
directions; backward takes what forward has made. Gradients may be rounded stochastically (Recipe).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.operands import Operand, gradient_seeds, operand
from symmoe.precision.recipes import Recipe


@dataclass(frozen=True, slots=True)
class LowPrecision:
    """Operands and products of one recipe. row_index: int32[N], row r is rows[row_index[r]]; None: rows[r]."""

    recipe: Recipe

    def rows(self, rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None = None) -> Operand:
        """The rows of the forward product."""
        return operand(self.recipe.quantize(rows, row_range, row_index=row_index))

    def weight(self, weight: torch.Tensor | TensorTable) -> Operand:
        """The weight of the forward product, from [G, O, C]."""
        return operand(self.recipe.quantize_weight(weight))

    def weight_pair(self, weight: torch.Tensor | TensorTable) -> tuple[Operand, Operand]:
        """The weights of forward and of dgrad, from [G, O, C], which is read only once where the recipe allows it."""
        weight_operand, transposed = map(operand, self.recipe.quantize_weight_pair(weight))
        return weight_operand, transposed

    def gradient_rows(
        self,
        d_rows: torch.Tensor,
        row_range: torch.Tensor,
        row_index: torch.Tensor | None = None,
        *,
        dbias: torch.Tensor | None = None,
        bias_scale: torch.Tensor | None = None,
    ) -> Operand:
        """The gradient rows of dgrad. dbias [G, O], bias_scale fp32[N]: as in Recipe.quantize."""
        seeds = gradient_seeds(self.recipe, d_rows, row_range, row_index)
        quantized = self.recipe.quantize(
            d_rows, row_range, row_index=row_index, seeds=seeds, dbias=dbias, bias_scale=bias_scale
        )
        return operand(quantized)

    def columns(self, rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None = None) -> Operand:
        """The columns of wgrad, from rows or activations."""
        return operand(self.recipe.quantize_columns(rows, row_range, row_index=row_index))

    def gradient_columns(
        self, d_rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None = None
    ) -> Operand:
        """The gradient columns of wgrad."""
        seeds = gradient_seeds(self.recipe, d_rows, row_range, row_index)
        # Other random words than those that rounded the rows.
        seeds = None if seeds is None else seeds + 1
        return operand(self.recipe.quantize_columns(d_rows, row_range, row_index=row_index, seeds=seeds))
