"""Recipes: small frozen records of the number formats of the experts' GEMMs (docs/precision.md)."""

from __future__ import annotations

import dataclasses
import math
import zlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

from symmoe import kernels
from symmoe.autograd import wrote_into
from symmoe.errors import ArgumentError, raise_for
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import (
    FLOATS,
    Buffers,
    TensorTable,
    check_column_scale,
    check_operand,
    checked_row_range,
    equal_groups,
)
from symmoe.precision.quantized import Layout, Quantized


class Recipe(ABC):
    """Base class of recipes, which make the operands of a layer's three products. No method is collective or
    synchronises the host; a CUDA graph can capture all of them.

        forward  rows            x weight              contracted: features in
        dgrad    gradient rows   x weight_transposed   contracted: features out
        wgrad    gradient columns x columns            contracted: a group's tokens

    Every method accepts `out=(data, scale)`, buffers to fill instead of new tensors: contiguous, except fp32 scales of
    columns, which are block-major (:class:`Quantized`). Results have no gradient.

    Attributes:
        feature_multiple: the number of features must be a multiple of it, so that a line of data has whole 16 bytes.
        token_multiple: columns of a group begin at multiples of this many tokens; rows of groups need no alignment.
        stochastic_gradients: whether gradients are rounded stochastically; if so, quantising them takes `seeds`.
        word: the name, in commands and messages, of a recipe without options.
    """

    feature_multiple: ClassVar[int] = 16
    token_multiple: ClassVar[int] = TILE
    stochastic_gradients = False
    word: ClassVar[str] = control.PRECISIONS[-1]

    __slots__ = ()

    @property
    @abstractmethod
    def row_format(self) -> BlockFormat:
        """The format of activations and gradients, along features or tokens."""

    @property
    def weight_format(self) -> BlockFormat:
        """The format of weights."""
        return self.row_format

    @property
    def column_signs(self) -> int | None:
        """Signs of the Hadamard transform of tokens before they are quantised for wgrad; None without one."""
        return None

    def row_bytes(self, features: int) -> int:
        """Bytes of one row of `features` features on the wire: data and compact scales.

        The 4 bytes of a group's global scale, if any, are not counted.
        """
        row_format = self.row_format
        return (
            row_format.data_width(features)
            + row_format.num_blocks(features) * row_format.scale_dtype.itemsize
        )

    def empty(
        self,
        layout: Literal["rows", "columns"],
        num_rows: int,
        features: int,
        row_range: torch.Tensor,
        out: Buffers | None = None,
    ) -> Quantized:
        """An uninitialised result of quantize or quantize_columns, for kernels to fill, without the data of a global
        scale."""
        return _empty(
            self.row_format,
            layout,
            (features, TILE * max_tiles(num_rows, row_range.shape[1]))
            if layout == "columns"
            else (num_rows, features),
            row_range.device,
            out,
            num_rows=num_rows,
            row_range=row_range,
        )

    @torch.no_grad()
    def quantize(
        self,
        rows: torch.Tensor,
        row_start: torch.Tensor | None = None,
        *,
        row_index: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        out: Buffers | None = None,
        dbias: torch.Tensor | None = None,
        bias_scale: torch.Tensor | None = None,
    ) -> Quantized:
        """Rows with scales along their features. One launch, or three with a global scale; dbias: one more.

        Args:
            rows: [N, C], bf16, fp16 or fp32, contiguous; C a multiple of feature_multiple.
            row_start: int32[G + 1] on their device, the groups' bounds; or int32[2, G], their begins and ends; None:
                one group of all rows. Rows past the last group's are neither read nor written.
            row_index: int32[N], row r of the groups is rows[row_index[r]]; None: rows[r].
            seeds: int64[G]; random words from the group's seed and the place in the group round numbers up or down, so
                that the mean is preserved. Equal seeds and rows give equal bits at any place of the group.
            out: buffers for data and scale, with the shapes and dtypes of :class:`Quantized`.
            dbias: [G, C], bf16, fp16 or fp32: gets the sum of every group's rows, each times bias_scale, fp32[N], if
                given: the gradient of a bias, from the pass that quantises. Its bits do not depend on the recipe.

        Raises:
            ArgumentError: an argument is not as described, or there are seeds without stochastic_gradients.
        """
        row_range, num_rows = _row_range(self, rows, row_start, seeds, row_index)
        row_format = self.row_format
        result = self.empty("rows", num_rows, rows.shape[1], row_range, out)
        ops = kernels.for_device(rows.device)
        amax, sums = _amax(row_format, rows, row_range, row_index), None
        if dbias is not None:
            check_operand("dbias", dbias, (row_range.shape[1], rows.shape[1]), FLOATS)
            if bias_scale is not None:
                check_operand("bias_scale", bias_scale, (num_rows,), (torch.float32,))
            sums = empty_row_sums(num_rows, dbias), bias_scale
        ops.quantize_rows(
            rows,
            row_range,
            result.buffers,
            row_format,
            sums=sums,
            row_index=row_index,
            amax=amax,
            seeds=seeds,
        )
        if dbias is not None and sums is not None:
            ops.sum_dbias(sums[0], row_range, dbias)
        return result if amax is None else dataclasses.replace(result, amax=amax)

    @torch.no_grad()
    def quantize_columns(
        self,
        rows: torch.Tensor,
        row_start: torch.Tensor | None = None,
        *,
        row_index: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        out: Buffers | None = None,
    ) -> Quantized:
        """Transposed rows with scales along the tokens of a group: an operand of wgrad. Arguments, errors: quantize."""
        row_range, num_rows = _row_range(self, rows, row_start, seeds, row_index)
        row_format, signs = self.row_format, self.column_signs
        result = self.empty("columns", num_rows, rows.shape[1], row_range, out)
        amax = _amax(row_format, rows, row_range, row_index, signs)
        kernels.for_device(rows.device).quantize_columns(
            rows,
            row_range,
            result.buffers,
            row_format,
            signs=signs,
            row_index=row_index,
            amax=amax,
            seeds=seeds,
        )
        return (
            result
            if amax is None and signs is None
            else dataclasses.replace(result, amax=amax, signs=signs)
        )

    def quantize_weight(
        self, weight: torch.Tensor | TensorTable, *, out: Buffers | None = None
    ) -> Quantized:
        """Weights for the forward product.

        Args:
            weight: [G, O, C], bf16, fp16 or fp32, contiguous, or a table of such matrices; O and C multiples of
                feature_multiple.
            out: as in quantize.

        Raises:
            ArgumentError: an argument is not as described.
        """
        return _quantize_weights(self, weight, {"weight": out})[0]

    def quantize_weight_transposed(
        self, weight: torch.Tensor, *, out: Buffers | None = None
    ) -> Quantized:
        """Weights for dgrad: data [G, C, O]. Arguments as in quantize_weight.

        With square blocks, the numbers are the same as from quantize_weight: both products use the same weight.
        """
        return _quantize_weights(self, weight, {"weight_transposed": out})[0]

    def quantize_weight_pair(
        self, weight: torch.Tensor | TensorTable
    ) -> tuple[Quantized, Quantized]:
        """Results of quantize_weight and quantize_weight_transposed, in one read. Arguments as in quantize_weight."""
        forward, transposed = _quantize_weights(
            self, weight, {"weight": None, "weight_transposed": None}
        )
        return forward, transposed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Float8Block(Recipe):
    """E4M3 with an fp32 scale for 128 features (or tokens) of a row, and for 128 x 128 of a weight (DeepSeek-V3, 2024).

    power_of_two: whether scales are rounded up to powers of two, so that scaling is exact.
    """

    word: ClassVar[str] = "float8-block"
    power_of_two: bool = False

    @property
    def row_format(self) -> BlockFormat:
        return BlockFormat(
            element="e4m3", scale="power_of_two" if self.power_of_two else "fp32", block=128
        )

    @property
    def weight_format(self) -> BlockFormat:
        return BlockFormat(element="e4m3", scale=self.row_format.scale, block=128, block_lines=128)


def precision_word(recipe: Recipe | None) -> int:
    """31 bits, equal for equal recipes: the index in control.PRECISIONS, and a checksum of the recipe's fields if it
    has options or a class from outside of symmoe. -1 for None."""
    if recipe is None:
        return -1
    # A subclass is another recipe, and a class from outside of symmoe has no word.
    of_class = vars(type(recipe)) if type(recipe).__module__.startswith("symmoe.") else {}
    word = of_class.get("word", Recipe.word)
    index = control.PRECISIONS.index(word)
    if word != Recipe.word and recipe == type(recipe)():
        return index
    # The repr of a class from outside of symmoe may contain an address.
    text = repr(recipe) if dataclasses.is_dataclass(recipe) else type(recipe).__qualname__
    checksum = max(1, zlib.crc32(text.encode()) >> (control.PRECISION_BITS + 1))
    return checksum << control.PRECISION_BITS | index


def precision_problem(precision: object, **widths: int) -> ArgumentError | None:
    """Why a layer with these numbers of features cannot compute with a precision, or None if it can."""
    if precision is None:
        return None
    if not isinstance(precision, Recipe):
        return ArgumentError(
            f"precision ({precision!r}) must be a recipe of symmoe.precision "
            "(Float8Block(), MXFP8(), NVFP4()), or None"
        )
    for name, width in widths.items():
        if width % precision.feature_multiple:
            return ArgumentError(
                f"{name} ({width}) must be a multiple of {precision.feature_multiple} for {precision}"
            )
    return None


@torch.no_grad()
def _quantize_weights(
    recipe: Recipe, weight: torch.Tensor | TensorTable, layout_to_out: dict[Layout, Buffers | None]
) -> list[Quantized]:
    """Weights in one layout, or in both by one read, in the caller's buffers if given."""
    check_floats(recipe, "weight", weight, ("G", "O", "C"))
    ops, weight_format, amax = kernels.for_device(weight.device), recipe.weight_format, None
    if weight_format.has_global_scale:
        amax = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        ops.weight_amax(weight, amax)
    num_groups, rows, columns = weight.shape
    shapes = {
        "weight": (num_groups, rows, columns),
        "weight_transposed": (num_groups, columns, rows),
    }
    results = [
        _empty(
            weight_format,
            layout,
            shapes[layout],
            weight.device,
            out,
            num_rows=shapes[layout][1],
            amax=amax,
        )
        for layout, out in layout_to_out.items()
    ]
    first, last = results[0], results[-1]
    if math.prod(weight.shape) and first is not last:
        ops.quantize_weight_pairs(weight, first.buffers, last.buffers, weight_format, amax=amax)
    elif math.prod(weight.shape):
        lines = (
            weight.mT
            if isinstance(weight, torch.Tensor) and first.layout == "weight_transposed"
            else weight
        )
        ops.quantize_weights(lines, first.buffers, weight_format, amax=amax)
    return results


def _row_range(
    recipe: Recipe,
    rows: torch.Tensor,
    row_start: torch.Tensor | None,
    seeds: torch.Tensor | None,
    row_index: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """Begin and end of every group's rows, and the number of rows; ArgumentError if an argument is not as described."""
    check_floats(recipe, "rows", rows, ("N", "C"))
    if row_index is not None:
        check_operand("row_index", row_index, (row_index.numel(),), (torch.int32,), rows.device)
    num_rows = (rows if row_index is None else row_index).shape[0]
    row_range = checked_row_range(
        equal_groups(1, num_rows, rows.device) if row_start is None else row_start, rows
    )
    if seeds is not None:
        if not recipe.stochastic_gradients:
            raise ArgumentError(f"seeds are given; {recipe} rounds to nearest")
        check_operand(
            "seeds", seeds, (row_range.shape[1],), (torch.int64,), rows.device, any_strides=True
        )
    return row_range, num_rows


def check_floats(
    recipe: Recipe, name: str, tensor: torch.Tensor | TensorTable, shape: tuple[str | int, ...]
) -> None:
    """ArgumentError unless a recipe can quantise the tensor: contiguous, of this shape (sizes for letters after the
    first are multiples of feature_multiple), on a device that supports the recipe."""
    is_contiguous = isinstance(tensor, TensorTable) or tensor.is_contiguous()
    fits = len(tensor.shape) == len(shape) and all(
        isinstance(word, str) or word == size
        for word, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in FLOATS or not is_contiguous:
        raise ArgumentError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be contiguous "
            f"[{', '.join(map(str, shape))}] of one of {FLOATS}"
        )
    for word, width in zip(shape[1:], tensor.shape[1:], strict=True):
        if isinstance(word, str) and (width == 0 or width % recipe.feature_multiple):
            raise ArgumentError(
                f"{word} of {name} ({width}) must be a multiple of {recipe.feature_multiple} for {recipe}"
            )
    raise_for(e4m3_problem(recipe, tensor.device))


def _amax(
    block_format: BlockFormat,
    rows: torch.Tensor,
    row_range: torch.Tensor,
    row_index: torch.Tensor | None,
    signs: int | None = None,
) -> torch.Tensor | None:
    """The largest finite |x| of every group, if the format has a global scale."""
    if not block_format.has_global_scale:
        return None
    amax = torch.empty(row_range.shape[1], dtype=torch.float32, device=rows.device)
    kernels.for_device(rows.device).group_amax(
        rows, row_range, amax, row_index=row_index, signs=signs
    )
    return amax


def _empty(
    block_format: BlockFormat,
    layout: Layout,
    shape: tuple[int, ...],
    device: torch.device,
    out: Buffers | None,
    **fields: Any,
) -> Quantized:
    """Numbers [..., lines, length] in the caller's buffers, checked, or in new ones. fields: other result fields."""
    *groups, lines, length = shape
    data_shape = *groups, lines, block_format.data_width(length)
    scale_shape = *groups, -(-lines // block_format.block_lines), block_format.num_blocks(length)
    data_dtype, scale_dtype, of_columns = (
        block_format.data_dtype,
        block_format.scale_dtype,
        layout == "columns",
    )
    if out is None:
        data = torch.empty(data_shape, dtype=data_dtype, device=device)
        is_turned = of_columns and scale_dtype == torch.float32  # block-major
        scale = torch.empty(
            scale_shape[::-1] if is_turned else scale_shape, dtype=scale_dtype, device=device
        )
        scale = scale.t() if is_turned else scale
    else:
        data, scale = out
        check_operand("data of out", data, data_shape, (data_dtype,), device)
        check_operand(
            "scale of out", scale, scale_shape, (scale_dtype,), device, any_strides=of_columns
        )
        if of_columns:
            check_column_scale("scale of out", scale)
        for buffer in out:
            wrote_into(buffer)
    return Quantized(data=data, scale=scale, block_format=block_format, layout=layout, **fields)
