"""The operands of grouped GEMMs in a recipe's numbers, and their two products, for all kernels.

    forward  rows, along features      x  weight               multiply          y
    dgrad    d_y, along features       x  transposed weight    multiply          d_x
    wgrad    d_y, along tokens         x  rows, along tokens   multiply_columns  d_weight

An operand has its scales as the kernel reads them: compact fp32 ones for E4M3 in blocks of 128, one-byte ones in 128x4
tiles (kernels/quantized_gemm.py). The weight is quantised in forward, for both directions; backward takes what forward
has made. Gradients may be rounded stochastically (Recipe). No function synchronises the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.quantized import Quantized
from symmoe.precision.recipes import Recipe
from symmoe.symm_mem.streams import capture_id
from symmoe.torch_internals import version_of


class Operand(NamedTuple):
    """Quantised rows, columns or weights, ready for a grouped GEMM.

    Attributes:
        data: quantised numbers, as in Quantized.
        scale: compact fp32 scales, or tiles of uint8 scales.
        global_scale: fp32[G], or None where the format has none.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


class ScatteredWeight(NamedTuple):
    """Quantised weights of G experts, each with memory of its own, e.g. from :func:`pack_weight_ptrs`. Nothing here
    keeps that memory alive.

    Attributes:
        data: the matrices of Quantized.data.
        scale: the matrices of its compact fp32 scales; or of uint8 scales in tiles, [tiles down, tiles across * 512].
        global_scale: as in Operand.
    """

    data: TensorTable
    scale: TensorTable
    global_scale: torch.Tensor | None


def operand(quantized: Quantized) -> Operand:
    """The numbers of a recipe with their scales laid out."""
    if quantized.scale.dtype != torch.float32:
        return Operand(quantized.data, quantized.swizzled_scale(), quantized.global_scale)
    return Operand(quantized.data, quantized.scale, None)


def multiply(
    rows: Operand,
    weight: Operand | ScatteredWeight,
    row_range: torch.Tensor,
    out: torch.Tensor,
    *,
    group_range: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = rows[r] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g, same as grouped_gemm.

    Rounded once. out [N, O], bias [G, O]: bf16, fp16 or fp32; bias_scale fp32[N], None: 1. group_range: the row_range
    of the whole groups, by which scales lie in tiles, if row_range has only some of their rows; else None.
    """
    ops, operands = kernels.for_device(out.device), (rows.data, rows.scale, weight.data, weight.scale, row_range, out)
    if rows.scale.dtype == torch.float32:
        ops.grouped_gemm_fp8(*operands, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail, num_sms=num_sms)
        return
    ops.grouped_gemm_scaled(
        *operands,
        row_global_scale=rows.global_scale,
        weight_global_scale=weight.global_scale,
        group_range=group_range,
        bias=bias,
        bias_scale=bias_scale,
        zero_tail=zero_tail,
        num_sms=num_sms,
    )


def multiply_columns(
    dout: Operand,
    rows: Operand,
    row_range: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    accumulate: bool,
    num_sms: int | None = None,
) -> None:
    """out[g] (+)= dout_g @ rows_g^T over the tokens of group g, same as grouped_gemm_wgrad; out [G, O, C]."""
    ops, operands = kernels.for_device(out.device), (dout.data, dout.scale, rows.data, rows.scale, row_range, out)
    if rows.scale.dtype == torch.float32:
        ops.grouped_gemm_wgrad_fp8(*operands, accumulate=accumulate, num_sms=num_sms)
        return
    ops.grouped_gemm_wgrad_scaled(
        *operands,
        dout_global_scale=dout.global_scale,
        rows_global_scale=rows.global_scale,
        accumulate=accumulate,
        num_sms=num_sms,
    )


def gradient_seeds(
    recipe: Recipe, rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None
) -> torch.Tensor | None:
    """int64[G]: seeds of the stochastic rounding of every group's gradients [N, C]; None if rounding is not stochastic.

    A seed is the sum of the bits of a group's rows. So different steps are rounded differently; equal gradients are
    rounded equally, on any number of ranks and however often; and there is no state to save or to replay.
    """
    if not recipe.stochastic_gradients:
        return None
    if rows.numel() == 0:
        return torch.zeros(row_range.shape[1], dtype=torch.int64, device=rows.device)
    words = rows.view(torch.int64).sum(1)  # wraps around
    words = words if row_index is None else words.index_select(0, row_index)
    up_to = torch.nn.functional.pad(words.cumsum(0), (1, 0))  # includes rows of the tail, but these cancel
    return up_to[row_range].diff(dim=0)[0]


def gradient_rows(
    recipe: Recipe,
    d_rows: torch.Tensor,
    row_range: torch.Tensor,
    row_index: torch.Tensor | None = None,
    *,
    dbias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
) -> Operand:
    """The gradient rows of dgrad. row_index, dbias [G, O], bias_scale fp32[N]: as in Recipe.quantize."""
    seeds = gradient_seeds(recipe, d_rows, row_range, row_index)
    return operand(
        recipe.quantize(d_rows, row_range, row_index=row_index, seeds=seeds, dbias=dbias, bias_scale=bias_scale)
    )


def gradient_columns(
    recipe: Recipe, d_rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None = None
) -> Operand:
    """The gradient columns of wgrad."""
    seeds = gradient_seeds(recipe, d_rows, row_range, row_index)
    # Other random words than those that rounded the rows.
    seeds = None if seeds is None else seeds + 1
    return operand(recipe.quantize_columns(d_rows, row_range, row_index=row_index, seeds=seeds))


Directions = tuple[Operand, Operand | None]


def weight_operands(
    recipe: Recipe, weight: torch.Tensor | TensorTable, *, transposed: bool, held: HeldWeight | None = None
) -> Directions:
    """Operands of forward, and of dgrad if `transposed`, from a weight [G, O, C] in the working dtype, packed or a
    table.

    held: the cache, which is searched first and then filled; None: the operands are made.
    """
    if held is not None:
        return held.operands(recipe, weight, transposed=transposed)
    if not transposed:
        return operand(recipe.quantize_weight(weight)), None
    forward, transposed_weight = recipe.quantize_weight_pair(weight)
    return operand(forward), operand(transposed_weight)


class _Made(NamedTuple):
    directions: Directions
    stream: torch.cuda.Stream | None
    is_there: torch.cuda.Event | None


class HeldWeight:
    """Operands of one layer's weight while it does not change: made when they are first asked for, until `close`.

    A reader on another stream than the one they were made on waits for them there. A copied or pickled layer holds
    nothing, because nobody would close it.

    Args:
        parameters: the weight, packed or discrete; DTensors themselves, since their local parts have no version of
            their own, and what FSDP gathers them into has none that changes. The CUDA graph that the current stream of
            their device captures, if any, is the only one whose calls get the operands: to another graph, or outside,
            the memory would mean nothing.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters, self._device = parameters, parameters[0].device
        self._capture = capture_id(self._device)
        self._is_open = True
        self._versions: list[int] | None = None
        self._dtype_to_made: dict[torch.dtype, _Made] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def close(self) -> None:
        """Lets go of the operands; calls that come later, e.g. of a backward pass, make their own."""
        self._is_open = False
        self._dtype_to_made.clear()

    def problem(self) -> ArgumentError | None:
        """What keeps a forward pass from taking what is held: the parameters have been written to since it was made, or
        the call is captured and the block is not, or the other way round. Does not synchronise the host."""
        if not self._is_open:
            return None
        if capture_id(self._device) != self._capture:
            return ArgumentError(
                f"constant_weights was entered {_where(self._capture)}, and this call is "
                f"{_where(capture_id(self._device))}: enter and leave it in one CUDA graph, or outside of all"
            )
        if self._versions is None:
            return None
        # Versions do not say which of the discrete weights it was: those made in one storage share a counter.
        for parameter, found, first in zip(self._parameters, self._versions_now(), self._versions, strict=True):
            if found != first:
                return ArgumentError(
                    f"a weight {list(parameter.shape)} is at version {found}, and was at version {first} when it was "
                    "quantised: it has been written to inside constant_weights"
                )
        return None

    def operands(self, recipe: Recipe, weight: torch.Tensor | TensorTable, *, transposed: bool) -> Directions:
        """Same as weight_operands."""
        if not self._is_open or capture_id(self._device) != self._capture:
            return weight_operands(recipe, weight, transposed=transposed)
        if self._versions is None:
            self._versions = self._versions_now()
        made = self._dtype_to_made.get(weight.dtype)
        if made is None or (transposed and made.directions[1] is None):
            made = self._dtype_to_made[weight.dtype] = _make(recipe, weight, transposed)
        _read_here(made)
        forward, transposed_operand = made.directions
        return forward, transposed_operand if transposed else None

    def _versions_now(self) -> list[int]:
        return [0 if parameter.is_inference() else version_of(parameter) for parameter in self._parameters]


def _make(recipe: Recipe, weight: torch.Tensor | TensorTable, transposed: bool) -> _Made:
    directions = weight_operands(recipe, weight, transposed=transposed)
    if weight.device.type != "cuda":
        return _Made(directions, None, None)
    stream, is_there = torch.cuda.current_stream(weight.device), torch.cuda.Event()
    is_there.record(stream)
    return _Made(directions, stream, is_there)


def _read_here(made: _Made) -> None:
    """Makes the current stream wait for operands of another one, and their memory for the current stream."""
    if made.stream is None or made.is_there is None:
        return
    stream = torch.cuda.current_stream(made.stream.device)
    if stream == made.stream:
        return
    stream.wait_event(made.is_there)
    for operand in made.directions:
        for tensor in operand or ():
            if tensor is not None:
                tensor.record_stream(stream)


def _where(capture: int) -> str:
    return f"inside the capture of CUDA graph {capture}" if capture else "outside of a capture"
