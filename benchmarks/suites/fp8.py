"""The suite "fp8": every product and weight gradient of a layer, of E4M3 numbers and of bf16. Local.

    fp8         the kernel that symmoe launches (Float8Block)
    scattered   the same with weights and scales in memory of their own, found by pointer
    add fp32    (weight gradients) added to an fp32 gradient
    add to scattered   added to gradients in memory of their own
    bf16        (GPUs) symmoe's kernel for bf16 operands of the same sizes
    torch rows  (GPUs, products) torch._scaled_grouped_mm: the other recipe, a scale for a whole row of either operand

Results of FP8 kernels are compared with float64 products of the dequantised operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from suites.gemm import Product, bench_products, groups_error, spans_of
from suites.problem import Problem
from suites.records import Record
from suites.timing import Run, Variant, in_steps
from symmoe import kernels
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels.operands import Operand, ScatteredWeight, range_of
from symmoe.kernels.quantized_gemm import BLOCK, num_blocks

MAX_ERROR = 1e-2  # of bf16 results, relative
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
PerGroup = Callable[[int], torch.Tensor]


def bench_fp8(problem: Problem, run: Run) -> list[Record]:
    """Products and weight gradients, one after the other: each takes gigabytes."""
    return bench_products("fp8", products(problem), problem, run)


def products(problem: Problem) -> Iterator[Product]:
    """On the rows and experts of this rank."""
    hidden, ffn = problem.case.shape.hidden, problem.case.shape.ffn
    rows = Rows(problem)
    for name, make, direction, widths in (
        ("fc1", product, "forward", (2 * ffn, hidden)),
        ("fc2", product, "forward", (hidden, ffn)),
        ("dfc2", product, "backward", (ffn, hidden)),
        ("dfc1", product, "backward", (hidden, 2 * ffn)),
        ("wgrad1", gradient, "backward", (2 * ffn, hidden)),
        ("wgrad2", gradient, "backward", (hidden, ffn)),
    ):
        variants = make(name, *widths, rows)
        yield Product(direction, 2 * problem.num_rows * math.prod(widths), variants, None)


class Rows:
    """The ranges of the experts' rows, and numbers for them: data as quantised normal numbers have it, and scales of
    about one size."""

    def __init__(self, problem: Problem) -> None:
        self.device = problem.device
        self.ops = kernels.for_device(problem.device)
        self.lengths = problem.routing.splits[problem.rank]
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), self.lengths.cumsum(0).int()])
        self.range_on_host = range_of(ends)
        self.range = self.range_on_host.to(problem.device)
        self.sizes = len(self.lengths), problem.num_rows  # groups, rows
        self._generator = torch.Generator(problem.device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=self.device).normal_(generator=self._generator)

    def data(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).mul_(150).clamp_(-448, 448).to(E4M3)

    def scale(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self._generator) / 150 + 1e-3


def scattered(packed: torch.Tensor) -> list[torch.Tensor]:
    """Copies of matrices in memory of their own, the last one first."""
    return [matrix.clone() for matrix in packed.flip(0)][::-1]


def dequantised(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows in float64, with a scale for BLOCK numbers."""
    return data.double() * scale.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def product(name: str, O: int, C: int, local_rows: Rows) -> list[Variant]:
    """out [N, O] of rows [N, C] and weights [G, O, C]."""
    G, N = local_rows.sizes
    ops = local_rows.ops
    spans = spans_of(local_rows.range_on_host)
    rows = local_rows.data(N, C)
    row_scale = local_rows.scale(N, num_blocks(C))
    weight = local_rows.data(G, O, C)
    weight_scale = local_rows.scale(G, num_blocks(O), num_blocks(C))
    out = torch.empty(N, O, dtype=BF16, device=local_rows.device)

    def expected(g: int) -> torch.Tensor:
        by_row = weight_scale[g].repeat_interleave(BLOCK, 0)[:O]
        return dequantised(rows[spans[g]], row_scale[spans[g]]) @ dequantised(weight[g], by_row).T

    lhs = Operand(rows, row_scale)
    copies = {"weight": scattered(weight), "scale": scattered(weight_scale)}
    ways = {
        "fp8": Operand(weight, weight_scale),
        "scattered": ScatteredWeight(*kernel_matrices(copies)),
    }

    def multiply(weights: Operand | ScatteredWeight) -> None:
        assert copies  # tables only have the addresses
        ops.grouped_gemm_quantized(lhs, weights, local_rows.range, out)

    variants = [
        _checked(f"{name}, {variant}", partial(multiply, weights), out, expected, spans)
        for variant, weights in ways.items()
    ]
    if local_rows.device.type == "cuda":
        by_rows = row_scale[:, 0].contiguous()
        by_columns = local_rows.scale(G, O)
        options = {"offs": local_rows.range[1], "out_dtype": BF16, "use_fast_accum": True}
        x = local_rows.normal(N, C)
        y = torch.empty_like(out)
        is_dgrad = name.startswith("d")
        w = local_rows.normal(*((G, C, O) if is_dgrad else (G, O, C)))
        in_bf16 = ops.grouped_gemm_dgrad if is_dgrad else ops.grouped_gemm
        variants += [
            _unchecked(
                f"{name}, torch rows",
                lambda: torch._scaled_grouped_mm(rows, weight.mT, by_rows, by_columns, **options),
            ),
            _unchecked(f"{name}, bf16", lambda: in_bf16(x, w, local_rows.range, y)),
        ]
    return variants


def gradient(name: str, O: int, C: int, local_rows: Rows) -> list[Variant]:
    """out [G, O, C] of dout [O, P] and rows [C, P], whose groups begin at multiples of BLOCK."""
    G, N = local_rows.sizes
    ops = local_rows.ops
    tiles = (local_rows.lengths + BLOCK - 1) // BLOCK
    firsts = (tiles.cumsum(0) - tiles) * BLOCK
    spans = spans_of(torch.stack([firsts, firsts + local_rows.lengths]))
    P = int(tiles.sum()) * BLOCK
    dout = local_rows.data(O, P)
    rows = local_rows.data(C, P)
    for span, end in zip(spans, [*firsts[1:].tolist(), P], strict=True):
        for data in (dout, rows):
            data.view(torch.uint8)[:, span.stop : end] = 0
    dout_scale = local_rows.scale(P // BLOCK, O).t()
    rows_scale = local_rows.scale(P // BLOCK, C).t()
    operands = (Operand(dout, dout_scale), Operand(rows, rows_scale), local_rows.range)
    out = torch.empty(G, O, C, dtype=BF16, device=local_rows.device)
    main_grad = torch.zeros(G, O, C, dtype=FP32, device=local_rows.device)
    main_grads = scattered(main_grad)
    (table,) = kernel_matrices({"main_grad": main_grads})

    def expected(g: int) -> torch.Tensor:
        blocks = slice(spans[g].start // BLOCK, -(-spans[g].stop // BLOCK))
        lhs, rhs = (
            dequantised(data[:, spans[g]], scale[:, blocks])
            for data, scale in ((dout, dout_scale), (rows, rows_scale))
        )
        return lhs @ rhs.T

    def add_to(gradients: object) -> Callable[[], object]:
        return lambda: ops.grouped_gemm_wgrad_quantized(*operands, gradients, accumulate=True)

    variants = [
        _checked(
            f"{name}, fp8",
            lambda: ops.grouped_gemm_wgrad_quantized(*operands, out),
            out,
            expected,
            spans,
        ),
        _checked(f"{name}, add fp32", add_to(main_grad), main_grad, expected, spans),
        _checked(f"{name}, add to scattered", add_to(table), main_grads, expected, spans),
    ]
    if local_rows.device.type == "cuda":
        x, dy = local_rows.normal(N, C), local_rows.normal(N, O)
        dw = torch.empty_like(out)
        variants.append(
            _unchecked(f"{name}, bf16", lambda: ops.grouped_gemm_wgrad(dy, x, local_rows.range, dw))
        )
    return variants


def _checked(
    name: str,
    call: Callable[[], object],
    out: torch.Tensor | Sequence[torch.Tensor],
    expected: PerGroup,
    spans: list[slice],
) -> Variant:
    """out: one tensor, or one for each group. In fp32 it is added to."""

    def verify() -> float:
        for tensor in out:
            tensor.fill_(0.0 if tensor.dtype == FP32 else torch.nan)
        call()
        stacked = out if isinstance(out, torch.Tensor) else torch.stack([*out])
        return groups_error(lambda g: [expected(g)], [stacked], spans)

    return Variant(name, ("forward",), in_steps(call), verify, MAX_ERROR)


def _unchecked(name: str, call: Callable[[], object]) -> Variant:
    """A yardstick."""
    return Variant(name, ("forward",), in_steps(call), lambda: 0.0)
