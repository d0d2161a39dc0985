"""A float64 oracle for layers that compute in a recipe's numbers. It shares no code with the package. Numbers are
rounded by numpy and ml_dtypes, as docs/precision.md says; products are float64 and loop over groups. So what it gives
differs from the package's results by the rounding of sums and results, and by a few elements that this rounding has put
on the other side of a boundary between two numbers of a format."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from quantize_reference import (
    F32,
    as_lines,
    hadamard_matrix,
    nearest,
    padded_columns,
    scaled_blocks,
)


@dataclass(frozen=True)
class Format:
    """Which numbers: of what elements, what scales, and how many elements and lines share one."""

    element: str  # "e4m3" or "e2m1"
    scale: str  # "fp32", "power", "e4m3"
    block: int
    block_lines: int = 1

    def round(self, lines: np.ndarray, amax: float | None = None) -> np.ndarray:
        """Lines [L, K] as the format has them, float64; amax: of the group, where the scale is relative to it."""
        if lines.size == 0:
            return lines.astype(np.float64)
        values, scale, *_ = scaled_blocks(lines, self.scale, self.block, self.block_lines, amax)
        numbers = nearest(values, self.element).astype(np.float64) * scale.astype(np.float64)
        return as_lines(numbers, lines.shape)


@dataclass(frozen=True)
class Numbers:
    """What a recipe makes of rows, of their columns, and of weights. signs: of the Hadamard transform along tokens."""

    rows: Format
    weights: Format
    signs: int | None = None

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """A group's rows, along features."""
        return self.rows.round(rows, np.abs(rows).max(initial=0.0))

    def of_columns(self, rows: np.ndarray) -> np.ndarray:
        """A group's columns [C, tokens], with zeros up to whole tiles; transformed, if there are signs."""
        columns = padded_columns(rows, None)
        if self.signs is not None:
            columns = (
                columns.reshape(-1, 16).astype(np.float64) @ hadamard_matrix(self.signs).T
            ).reshape(columns.shape)
            columns = columns.astype(F32)
        return self.rows.round(columns, np.abs(columns).max(initial=0.0))

    def of_weight(self, weight: np.ndarray) -> np.ndarray:
        """[O, C], along C. Of the transpose, along O."""
        return self.weights.round(weight, np.abs(weight).max())


E4M3_BLOCK = Format("e4m3", "fp32", 128), Format("e4m3", "fp32", 128, 128)
E4M3_POWERS = Format("e4m3", "power", 128), Format("e4m3", "power", 128, 128)
E4M3_MX = (Format("e4m3", "power", 32),) * 2
E2M1 = Format("e2m1", "e4m3", 16), Format("e2m1", "e4m3", 16, 16)


class Linear:
    """By group: y = q(x) q(W)^T + b scale, d_x = q(d_y) q(W^T)^T, d_W = q(d_y columns) q(x columns)^T, in float64."""

    def __init__(self, numbers: Numbers, weight: torch.Tensor, splits: tuple[int, ...]) -> None:
        self.numbers, self.weight = numbers, weight.detach().cpu().float().numpy()
        self.spans = [
            slice(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(splits)])
        ]

    def forward(
        self, x: np.ndarray, bias: np.ndarray | None = None, scale: np.ndarray | None = None
    ) -> np.ndarray:
        parts = [
            self.numbers.of_rows(x[s]) @ self.numbers.of_weight(w).T for s, w in self._groups()
        ]
        if bias is not None:
            parts = [
                part + np.outer(scale[s], b)
                for part, s, b in zip(parts, self.spans, bias, strict=True)
            ]
        return np.concatenate(parts)

    def input_gradient(self, d_y: np.ndarray) -> np.ndarray:
        parts = (
            self.numbers.of_rows(d_y[s]) @ self.numbers.of_weight(w.T).T for s, w in self._groups()
        )
        return np.concatenate(list(parts))

    def weight_gradient(self, d_y: np.ndarray, x: np.ndarray) -> np.ndarray:
        columns = self.numbers.of_columns
        return np.stack([columns(d_y[s]) @ columns(x[s]).T for s in self.spans])

    def _groups(self):
        return zip(self.spans, self.weight, strict=True)


def swiglu(h: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """silu(gate) * up of h [N, 2I], and its derivatives by gate and up, float64."""
    gate, up = np.split(h.astype(np.float64), 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return gate * sigmoid * up, sigmoid * (1 + gate * (1 - sigmoid)) * up, gate * sigmoid


def mlp(
    numbers: Numbers, x, scale, weights, d_y, splits, *, round_to=lambda values: values.astype(F32)
) -> dict[str, np.ndarray]:
    """y and gradients of FC2(swiglu(FC1(x)) * scale), rows of groups alone. round_to: the working dtype, back in fp32.
    Intermediate results are rounded to it where docs/precision.md says so."""
    used = sum(splits)
    x, d_y = (tensor.detach().cpu().float().numpy()[:used] for tensor in (x, d_y))
    scale = scale.detach().cpu().double().numpy()[:used, None]
    first, second = (Linear(numbers, weight, splits) for weight in weights)
    value, by_gate, by_up = swiglu(round_to(first.forward(x)))
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
    got, want = (
        np.asarray(t.detach().cpu().double() if isinstance(t, torch.Tensor) else t)
        for t in (got, want)
    )
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
