"""Operands of grouped GEMMs in a recipe's numbers: gradients with their seeds, and cached weights.

    forward  rows, along features      x  weight               grouped_gemm_quantized        y
    dgrad    d_y, along features       x  transposed weight    grouped_gemm_quantized        d_x
    wgrad    d_y, along tokens         x  rows, along tokens   grouped_gemm_wgrad_quantized  d_weight

Forward quantises the weight for both directions; backward reuses the result. No function synchronises the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.operands import Operand, TensorTable
from symmoe.precision.recipes import Recipe
from symmoe.symm_mem.streams import capture_id
from symmoe.torch_internals import version_of


def gradient_seeds(
    recipe: Recipe, rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None
) -> torch.Tensor | None:
    """int64[G]: seeds of the stochastic rounding of every group's gradients [N, C]; None if rounding is to nearest.

    A seed is the sum of the bits of a group's rows. So different steps round differently, but equal gradients round
    equally, on any number of ranks and in every repetition. There is no state to save or to replay.
    """
    if not recipe.stochastic_gradients:
        return None
    if rows.numel() == 0:
        return torch.zeros(row_range.shape[1], dtype=torch.int64, device=rows.device)
    words = rows.view(torch.int64).sum(1)  # wraps around
    words = words if row_index is None else words.index_select(0, row_index)
    up_to = torch.nn.functional.pad(
        words.cumsum(0), (1, 0)
    )  # includes the tail's rows, but they cancel
    return up_to[row_range].diff(dim=0)[0]


def gradient_rows(
    recipe: Recipe, d_rows: torch.Tensor, row_range: torch.Tensor, **options: Any
) -> Operand:
    """The gradient rows of dgrad. options: row_index, dbias and bias_scale of Recipe.quantize."""
    seeds = gradient_seeds(recipe, d_rows, row_range, options.get("row_index"))
    return recipe.quantize(d_rows, row_range, seeds=seeds, **options).operand()


def gradient_columns(
    recipe: Recipe,
    d_rows: torch.Tensor,
    row_range: torch.Tensor,
    row_index: torch.Tensor | None = None,
) -> Operand:
    """The gradient columns of wgrad."""
    seeds = gradient_seeds(recipe, d_rows, row_range, row_index)
    return recipe.quantize_columns(
        d_rows,
        row_range,
        row_index=row_index,
        seeds=None if seeds is None else seeds + 1,  # not the random words of the rows
    ).operand()


Directions = tuple[Operand, Operand | None]


def weight_operands(
    recipe: Recipe, weight: torch.Tensor | TensorTable, *, transposed: bool
) -> Directions:
    """Operands of forward, and of dgrad if `transposed`, from a weight [G, O, C] in the working dtype, packed or a
    table."""
    if not transposed:
        return recipe.quantize_weight(weight).operand(), None
    forward, transposed_weight = recipe.quantize_weight_pair(weight)
    return forward.operand(), transposed_weight.operand()


class _CachedOperands(NamedTuple):
    directions: Directions
    stream: torch.cuda.Stream | None  # on which the operands were computed
    ready: torch.cuda.Event | None


class CachedWeight:
    """Operands of one layer's weight while it does not change: computed on first use, cached until `close`.

    If a reader's stream is not the stream that computed them, the reader's stream waits. A copied or pickled layer has
    an empty cache, because no caller would close it.

    Args:
        parameters: the weight, packed or discrete. DTensors stay DTensors: their local parts have no version of their
            own, and the version of FSDP's gathered tensors does not change. If the current stream of their device
            captures a CUDA graph, only calls in this graph get the operands: elsewhere their memory is invalid.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters, self._device = parameters, parameters[0].device
        self._capture = capture_id(self._device)
        self._is_open = True
        self._versions: list[int] | None = None
        self._dtype_to_operands: dict[torch.dtype, _CachedOperands] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def close(self) -> None:
        """Releases the operands; later calls, e.g. of a backward pass, make their own."""
        self._is_open = False
        self._dtype_to_operands.clear()

    def problem(self, current: Iterable[torch.Tensor | None] = ()) -> ArgumentError | None:
        """Why a forward pass cannot use the cached operands, or None: the parameters were written to later, or replaced
        (by those in `current`); or only the call is captured, or only the block. Does not synchronise the
        host."""
        if not self._is_open:
            return None
        if capture_id(self._device) != self._capture:
            return ArgumentError(
                f"cache_quantized_weights was entered {_where(self._capture)}, and this call is "
                f"{_where(capture_id(self._device))}: enter and leave it in one CUDA graph, or outside of all"
            )
        if self._versions is None:
            return None
        for parameter, current_parameter in zip(self._parameters, current, strict=False):
            if current_parameter is not parameter:
                return ArgumentError(
                    f"a weight {list(parameter.shape)} has been replaced by another inside cache_quantized_weights"
                )
        # Versions do not show which discrete weight changed: weights in one storage share a counter.
        for parameter, version, first in zip(
            self._parameters, self._versions_now(), self._versions, strict=True
        ):
            if version != first:
                return ArgumentError(
                    f"a weight {list(parameter.shape)} is at version {version}, and was at version {first} when it was "
                    "quantised: it has been written to inside cache_quantized_weights"
                )
        return None

    def operands(
        self, recipe: Recipe, weight: torch.Tensor | TensorTable, *, transposed: bool
    ) -> Directions | None:
        """As weight_operands; None if calls on the current stream must not use the cached operands."""
        if not (self._is_open and capture_id(self._device) == self._capture):
            return None
        if self._versions is None:
            self._versions = self._versions_now()
        cached = self._dtype_to_operands.get(weight.dtype)
        stream = torch.cuda.current_stream(weight.device) if weight.device.type == "cuda" else None
        if cached is None or (transposed and cached.directions[1] is None):
            directions = weight_operands(recipe, weight, transposed=transposed)
            cached = _CachedOperands(
                directions, stream, None if stream is None else stream.record_event()
            )
            self._dtype_to_operands[weight.dtype] = cached
        if cached.ready is not None and stream is not None and stream != cached.stream:
            stream.wait_event(cached.ready)
            for tensor in (*cached.directions[0], *(cached.directions[1] or ())):
                if tensor is not None:
                    tensor.record_stream(stream)
        return cached.directions[0], cached.directions[1] if transposed else None

    def _versions_now(self) -> list[int]:
        return [
            0 if parameter.is_inference() else version_of(parameter)
            for parameter in self._parameters
        ]


def _where(capture: int) -> str:
    return f"inside the capture of CUDA graph {capture}" if capture else "outside of a capture"
