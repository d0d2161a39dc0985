"""Grouped GEMMs of E4M3 numbers and those of bf16, on one GPU: every product and weight gradient of a layer.

    python benchmarks/fp8_gemm.py --json fp8-gemm.json

    fp8         the kernel that symmoe launches (Float8Block)
    scattered   the same with weights and scales in memory of their own, found by pointer
    add fp32    (weight gradients) added to an fp32 gradient
    add to scattered   added to gradients in memory of their own
    bf16        symmoe's kernel for bf16 operands of the same sizes
    torch rows  (products) torch._scaled_grouped_mm: the other recipe, a scale for a whole row of either operand

Experts get mildly uneven numbers of rows, the same in every run. Results of FP8 kernels are compared with float64
products of the dequantised operands on three experts before anything is timed; the error is relative to the largest
value. Times are medians of CUDA events around single calls, of all ways in turn. Without a GPU, the definition in
PyTorch is checked in the same way on a tiny shape, and nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from one_gpu import medians_in_turn_ms, parser_of, write

from symmoe import kernels
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels.gemm_parts import range_of
from symmoe.kernels.operands import Operand, ScatteredWeight
from symmoe.kernels.quantized_gemm import BLOCK, num_blocks

SHAPES = {  # experts on this rank, hidden size, FFN width, rows
    "deepseek-like": (32, 7168, 2048, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "qwen3-30b": (32, 2048, 768, 65536),
}
TINY = {"tiny": (4, 272, 144, 600)}
MAX_ERROR = 1e-2  # of bf16 results, relative to the largest value
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
Sizes = tuple[int, int, int, int]


@dataclass
class Op:
    """One product or weight gradient.

    Attributes:
        flops: of one call.
        expected: a group's result in float64.
        blank: poisons all results.
        ways: by name, runs.
        checked: by name, a group's result as that way has left it.
        kept: memory that tables only have the addresses of.
    """

    name: str
    flops: int
    expected: Callable[[int], torch.Tensor]
    blank: Callable[[], object]
    ways: dict[str, Callable[[], object]] = field(default_factory=dict)
    checked: dict[str, Callable[[int], torch.Tensor]] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)


def scattered(packed: torch.Tensor) -> list[torch.Tensor]:
    """Copies of matrices in memory of their own, the last one first."""
    return [matrix.clone() for matrix in packed.flip(0)][::-1]


class Numbers:
    """Data as quantised normal numbers have it, and scales of about one size."""

    def __init__(self, device: torch.device):
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=self.device).normal_(generator=self._generator)

    def data(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).mul_(150).clamp_(-448, 448).to(E4M3)

    def scale(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self._generator) / 150 + 1e-3


def uneven_groups(num_groups: int, num_rows: int) -> torch.Tensor:
    """The row_range of experts whose loads vary by about a quarter."""
    generator = torch.Generator().manual_seed(0)
    load = (1 + 0.25 * torch.randn(num_groups, generator=generator)).clamp(min=0.2)
    ends = (load.cumsum(0) / load.sum() * num_rows).round().int()
    return range_of(torch.cat([torch.zeros(1, dtype=torch.int32), ends]))


def dequantised(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows in float64, with a scale for BLOCK numbers."""
    return data.double() * scale.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def product(name: str, sizes: Sizes, numbers: Numbers, on_host: torch.Tensor) -> Op:
    """out [N, O] of rows [N, C] and weights [G, O, C]. sizes: G, O, C, N."""
    G, O, C, N = sizes
    ops, row_range = kernels.for_device(numbers.device), on_host.to(numbers.device)
    spans = [slice(first, end) for first, end in on_host.t().tolist()]
    rows, row_scale = numbers.data(N, C), numbers.scale(N, num_blocks(C))
    weight, weight_scale = numbers.data(G, O, C), numbers.scale(G, num_blocks(O), num_blocks(C))
    out = torch.empty(N, O, dtype=BF16, device=numbers.device)

    def expected(g: int) -> torch.Tensor:
        by_row = weight_scale[g].repeat_interleave(BLOCK, 0)[:O]
        return dequantised(rows[spans[g]], row_scale[spans[g]]) @ dequantised(weight[g], by_row).T

    op = Op(name, 2 * N * O * C, expected, lambda: out.fill_(torch.nan))
    left, right = Operand(rows, row_scale), Operand(weight, weight_scale)
    op.ways["fp8"] = lambda: ops.grouped_gemm_quantized(left, right, row_range, out)
    op.checked["fp8"] = op.checked["scattered"] = lambda g: out[spans[g]]
    weights, scales = scattered(weight), scattered(weight_scale)
    tables = ScatteredWeight(*kernel_matrices({"weight": weights, "scale": scales}))
    op.kept = [*weights, *scales]
    op.ways["scattered"] = lambda: ops.grouped_gemm_quantized(left, tables, row_range, out)
    if numbers.device.type == "cuda":
        by_rows, by_columns = row_scale[:, 0].contiguous(), numbers.scale(G, O)
        op.ways["torch rows"] = lambda: torch._scaled_grouped_mm(
            rows,
            weight.mT,
            by_rows,
            by_columns,
            offs=row_range[1],
            out_dtype=BF16,
            use_fast_accum=True,
        )
        x, y = numbers.normal(N, C), torch.empty_like(out)
        is_dgrad = name.startswith("d")
        w = numbers.normal(G, C, O) if is_dgrad else numbers.normal(G, O, C)
        in_bf16 = ops.grouped_gemm_dgrad if is_dgrad else ops.grouped_gemm
        op.ways["bf16"] = lambda: in_bf16(x, w, row_range, y)
    return op


def gradient(name: str, sizes: Sizes, numbers: Numbers, on_host: torch.Tensor) -> Op:
    """out [G, O, C] of dout [O, P] and rows [C, P], whose groups begin at multiples of BLOCK. sizes: G, O, C, N."""
    G, O, C, N = sizes
    ops, row_range = kernels.for_device(numbers.device), on_host.to(numbers.device)
    lengths = on_host[1] - on_host[0]
    tiles = (lengths + BLOCK - 1) // BLOCK
    firsts = ((tiles.cumsum(0) - tiles) * BLOCK).tolist()
    spans = [slice(first, first + n) for first, n in zip(firsts, lengths.tolist(), strict=True)]
    P = int(tiles.sum()) * BLOCK
    dout, rows = numbers.data(O, P), numbers.data(C, P)
    for span, end in zip(spans, [*firsts[1:], P], strict=True):
        for data in (dout, rows):
            data.view(torch.uint8)[:, span.stop : end] = 0
    dout_scale, rows_scale = numbers.scale(P // BLOCK, O).t(), numbers.scale(P // BLOCK, C).t()
    operands = (Operand(dout, dout_scale), Operand(rows, rows_scale), row_range)
    out = torch.empty(G, O, C, dtype=BF16, device=numbers.device)
    main_grad = torch.zeros(G, O, C, dtype=FP32, device=numbers.device)

    def expected(g: int) -> torch.Tensor:
        blocks = slice(spans[g].start // BLOCK, -(-spans[g].stop // BLOCK))
        left, right = (
            dequantised(data[:, spans[g]], scale[:, blocks])
            for data, scale in ((dout, dout_scale), (rows, rows_scale))
        )
        return left @ right.T

    def blank() -> None:
        out.fill_(torch.nan)
        for tensor in (main_grad, *main_grads):
            tensor.zero_()

    op = Op(name, 2 * N * O * C, expected, blank)
    op.ways["fp8"] = lambda: ops.grouped_gemm_wgrad_quantized(*operands, out)
    op.checked["fp8"] = lambda g: out[g]
    op.ways["add fp32"] = lambda: ops.grouped_gemm_wgrad_quantized(
        *operands, main_grad, accumulate=True
    )
    op.checked["add fp32"] = lambda g: main_grad[g]
    main_grads = scattered(main_grad)
    (table,) = kernel_matrices({"main_grad": main_grads})
    op.ways["add to scattered"] = lambda: ops.grouped_gemm_wgrad_quantized(
        *operands, table, accumulate=True
    )
    op.checked["add to scattered"] = lambda g: main_grads[g]
    if numbers.device.type == "cuda":
        x, dy, dw = numbers.normal(N, C), numbers.normal(N, O), torch.empty_like(out)
        op.ways["bf16"] = lambda: ops.grouped_gemm_wgrad(dy, x, row_range, dw)
    return op


def ops_of(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    """A layer's products and weight gradients, one after the other: each takes gigabytes. sizes: G, H, I, N."""
    G, H, I, N = sizes
    on_host, numbers = uneven_groups(G, N), Numbers(device)
    for name, widths in {
        "fc1": (2 * I, H),
        "fc2": (H, I),
        "dfc2": (I, H),
        "dfc1": (H, 2 * I),
    }.items():
        yield product(name, (G, *widths, N), numbers, on_host)
    for name, widths in {"wgrad1": (2 * I, H), "wgrad2": (H, I)}.items():
        yield gradient(name, (G, *widths, N), numbers, on_host)


def errors_of(op: Op, num_groups: int) -> dict[str, float]:
    """The error of every way that is checked, on three groups. Ends the program if one is wrong."""
    groups = {0, num_groups // 2, num_groups - 1}
    references = {g: op.expected(g) for g in groups}
    errors = {}
    for way, result in op.checked.items():
        op.blank()
        op.ways[way]()
        errors[way] = max(
            ((result(g).double() - expected).abs().max() / expected.abs().max()).item()
            for g, expected in references.items()
        )
        if not errors[way] < MAX_ERROR:  # NaN is wrong too
            sys.exit(f"{op.name}, {way} is wrong: relative error {errors[way]:.3g}")
    return errors


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = SHAPES if device.type == "cuda" else TINY
    options = parser_of(__doc__, shapes).parse_args()
    results = []
    for shape in options.shapes:
        for op in ops_of(shapes[shape], device):
            errors = errors_of(op, shapes[shape][0])
            times = (
                medians_in_turn_ms(op.ways, options.repetitions) if device.type == "cuda" else {}
            )
            for way in op.ways:
                ms, error = times.get(way), errors.get(way)
                tflops = op.flops / ms / 1e9 if ms else None
                results.append(
                    {
                        "shape": shape,
                        "op": op.name,
                        "way": way,
                        "error": error,
                        "ms": ms,
                        "tflops": tflops,
                    }
                )
                speed, wrong = (
                    f"{tflops:.0f} TFLOP/s" if tflops else "",
                    f"{error:.1e}" if error is not None else "",
                )
                print(f"{shape:14} {op.name:7} {way:16} {speed:13} {wrong}".rstrip(), flush=True)
            write(options.json, results, device)  # in case that a later kernel hangs


if __name__ == "__main__":
    main()
