"""A float64 oracle for layers that compute in a recipe's numbers.

What recipes make of numbers is compared bit by bit with numpy elsewhere (test_quantize.py): here it is taken as it is,
and multiplied in float64 by loops over groups. So what the oracle gives differs from a layer's results by the rounding
of sums and results, and by a few elements that this rounding has put on the other side of a boundary between two
numbers of a format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from quantized_problem import dequantised

from symmoe.precision import Quantized, Recipe

F32 = np.float32


class Linear:
    """By group: y = q(x) q(W)^T + b scale, d_x = q(d_y) q(W^T)^T, d_W = q(d_y columns) q(x columns)^T, in float64."""

    def __init__(self, recipe: Recipe, weight: torch.Tensor, splits: tuple[int, ...]) -> None:
        self.recipe, self.weight = recipe, weight.detach().cpu().float().numpy()
        self.spans = [slice(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(splits)])]

    def forward(self, x: np.ndarray, bias: np.ndarray | None = None, scale: np.ndarray | None = None) -> np.ndarray:
        parts = [rows @ weight.T for rows, weight in self._groups(x, self.weight)]
        if bias is not None:
            parts = [part + np.outer(scale[s], b) for part, s, b in zip(parts, self.spans, bias, strict=True)]
        return np.concatenate(parts)

    def input_gradient(self, d_y: np.ndarray) -> np.ndarray:
        turned = self.weight.swapaxes(1, 2)
        return np.concatenate([rows @ weight.T for rows, weight in self._groups(d_y, turned)])

    def weight_gradient(self, d_y: np.ndarray, x: np.ndarray) -> np.ndarray:
        left, right = ([numbers(self.recipe.quantize_columns, rows[s]) for s in self.spans] for rows in (d_y, x))
        return np.stack([columns @ others.T for columns, others in zip(left, right, strict=True)])

    def _groups(self, x: np.ndarray, weight: np.ndarray):
        quantize, quantize_weight = self.recipe.quantize, self.recipe.quantize_weight
        for span, matrix in zip(self.spans, weight, strict=True):
            yield numbers(quantize, x[span]), numbers(quantize_weight, matrix[None])


def numbers(quantize: Callable[[torch.Tensor], Quantized], x: np.ndarray) -> np.ndarray:
    """What a recipe makes of one group's rows, of its columns [C, tokens] (with zeros up to whole tiles, transformed if
    the recipe does so), or of one matrix; float64."""
    quantized = quantize(torch.from_numpy(np.ascontiguousarray(x)))
    is_fp8 = quantized.scale.dtype == torch.float32
    name = "fp8" if is_fp8 else "nvfp4" if quantized.block_format.element == "e2m1" else "mxfp8"
    data, scale = (part.flatten(0, -2) for part in quantized.buffers)
    scale = scale.repeat_interleave(quantized.block_format.block_lines, 0)[: len(data)]
    values = dequantised(name, data, scale if is_fp8 else scale.view(torch.uint8))
    return (values if quantized.amax is None else values * quantized.global_scale.double()).numpy()


def swiglu(h: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """silu(gate) * up of h [N, 2I], and its derivatives by gate and up, float64."""
    gate, up = np.split(h.astype(np.float64), 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return gate * sigmoid * up, sigmoid * (1 + gate * (1 - sigmoid)) * up, gate * sigmoid


def mlp(
    recipe: Recipe,
    x: torch.Tensor,
    scale: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    d_y: torch.Tensor,
    splits: tuple[int, ...],
    *,
    round_to=lambda values: values.astype(F32),
) -> dict[str, np.ndarray]:
    """y and gradients of FC2(swiglu(FC1(x)) * scale), rows of groups alone. round_to: the working dtype, back in fp32.

    Intermediate results are rounded to it where docs/precision.md says so.
    """
    used = sum(splits)
    x, d_y = (tensor.detach().cpu().float().numpy()[:used] for tensor in (x, d_y))
    scale = scale.detach().cpu().double().numpy()[:used, None]
    first, second = (Linear(recipe, weight, splits) for weight in weights)
    h = round_to(first.forward(x))
    value, by_gate, by_up = swiglu(h)
    a = round_to(value * scale)
    d_a = round_to(second.input_gradient(d_y)).astype(np.float64)
    d_h = round_to(np.concatenate([d_a * scale * by_gate, d_a * scale * by_up], axis=1))
    return {
        "y": second.forward(a),
        "d_x": first.input_gradient(d_h),
        "d_scale": (d_a * value).sum(1),
        "d_fc1.weight": first.weight_gradient(d_h, x),
        "d_fc2.weight": second.weight_gradient(d_y, a),
    }


def relative_error(got: torch.Tensor | np.ndarray, want: torch.Tensor | np.ndarray) -> float:
    """Of the whole, by the root of the sum of squares."""
    got, want = (np.asarray(t.detach().cpu().double() if isinstance(t, torch.Tensor) else t) for t in (got, want))
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
