"""For the development of the grouped GEMMs of E4M3 numbers: kernels and variants beside each other, on one GPU.

    python benchmarks/fp8_gemm.py --json fp8.json

For every product and weight gradient of a layer's experts, of three shapes:

    hopper      the kernel that symmoe launches; wgrads in bf16
    3 stages    (wgrads) with one stage less of operands, and more memory to store results from
    add fp32    (wgrads) added to an fp32 gradient
    g8          with 8 tiles of M that share a column of tiles; only by --ways
    triton      the general kernel; only by --ways
    then act    (fc1) the product and act_quantize: SwiGLU, whose result is quantised
    bf16        symmoe's kernel for bf16 operands of the same sizes
    torch rows  torch._scaled_grouped_mm: the other recipe, a scale for a whole row of either operand; allocates

Experts get mildly uneven numbers of rows, as in gemm.py. Results of symmoe's FP8 kernels are compared with float64
products of the dequantised operands on three experts before anything is timed; the error is relative to the largest
value. Times are medians of CUDA events around single calls, of all ways in turn. Nothing is begun after --seconds, most
of which is compilation: with --check nothing is timed, so several processes can share a GPU and leave what they have
compiled to the run that counts. Without a GPU, the definition in PyTorch is checked in the same way on a tiny shape.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from gemm import SHAPES, group_spans, medians_in_turn_ms, sample_groups, uneven_groups
from triton.errors import TritonError

from symmoe.kernels.activation import Activation
from symmoe.kernels.fp8 import BLOCK, num_blocks
from symmoe.kernels.twin import fp8 as twin
from symmoe.precision import Float8Block
from symmoe.tools.bench.records import machine

TINY = {"tiny": (4, 272, 144, 600)}
ORDER = ["deepseek-like", "mixtral-8x7b", "qwen3-30b"]
MAX_ERROR = 1e-2  # of bf16 results, relative to the largest value
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
SLOW_OR_RARE = ("g8", "triton")  # not by default, to end in time
VARIANTS = {"hopper": {}, "g8": {"group_m": 8}}
WGRAD_VARIANTS = {
    "hopper": {},
    "3 stages": {"stages": 3, "batch": 4},
    "g8": {"group_m": 8},
}


@dataclass
class Op:
    """One product or weight gradient.

    ways: by name, runs. checked: by name, the result of one of three groups as that way has left it.
    expected(g): float64. blank: poisons all results.
    """

    name: str
    flops: int
    expected: Callable[[int], torch.Tensor]
    blank: Callable[[], None]
    ways: dict[str, Callable[[], object]] = field(default_factory=dict)
    checked: dict[str, Callable[[int], torch.Tensor]] = field(default_factory=dict)


class Numbers:
    """Data as quantised normal numbers have it, and scales of about one size."""

    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=self.device).normal_(generator=self.generator)

    def data(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).mul_(150).clamp_(-448, 448).to(E4M3)

    def scale(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator) / 150 + 1e-3


def dequantised(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows in float64, with a scale for BLOCK numbers."""
    return data.double() * scale.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def product(name: str, sizes: tuple[int, int, int, int], numbers: Numbers, on_host: torch.Tensor) -> Op:
    """out [N, O] of rows [N, C] and weights [G, O, C]. sizes: G, O, C, N."""
    G, O, C, N = sizes
    spans, row_range = group_spans(on_host), on_host.to(numbers.device)
    rows, row_scale = numbers.data(N, C), numbers.scale(N, num_blocks(C))
    weight, weight_scale = numbers.data(G, O, C), numbers.scale(G, num_blocks(O), num_blocks(C))
    operands = (rows, row_scale, weight, weight_scale, row_range)
    out = torch.empty(N, O, dtype=BF16, device=numbers.device)

    def expected(g: int) -> torch.Tensor:
        by_row = weight_scale[g].repeat_interleave(BLOCK, 0)[:O]
        return dequantised(rows[spans[g]], row_scale[spans[g]]) @ dequantised(weight[g], by_row).T

    op = Op(name, 2 * N * O * C, expected, lambda: out.fill_(torch.nan))
    if numbers.device.type == "cpu":
        op.ways["twin"] = lambda: twin.grouped_gemm_fp8(*operands, out)
    else:
        from symmoe.kernels.hopper import launchers
        from symmoe.kernels.low_precision import fp8
        from symmoe.kernels.triton import gemm

        for way, options in VARIANTS.items():
            op.ways[way] = lambda options=options: launchers.launch_fp8_gemm(*operands, out, **options)
        op.ways["triton"] = lambda: fp8.grouped_gemm_fp8(*operands, out, config=fp8.CONFIG)
        if name == "fc1":
            op.ways["then act"] = product_then_act(operands, out, torch.rand(N, device=numbers.device))
    op.checked = dict.fromkeys(op.ways, lambda g: out[spans[g]])
    if numbers.device.type == "cuda":
        by_rows, by_columns = row_scale[:, 0].contiguous(), numbers.scale(G, O)
        op.ways["torch rows"] = lambda: torch._scaled_grouped_mm(
            rows, weight.mT, by_rows, by_columns, offs=row_range[1], out_dtype=BF16, use_fast_accum=True
        )
        x, y = numbers.normal(N, C), torch.empty_like(out)
        is_dgrad = name.startswith("d")
        w = numbers.normal(G, C, O) if is_dgrad else numbers.normal(G, O, C)
        call = gemm.grouped_gemm_dgrad if is_dgrad else gemm.grouped_gemm
        op.ways["bf16"] = lambda: call(x, w, row_range, y)
    return op


def product_then_act(
    operands: tuple[torch.Tensor, ...], out: torch.Tensor, row_factor: torch.Tensor
) -> Callable[[], None]:
    """The product into out, then SwiGLU, whose result is quantised."""
    from symmoe.kernels.gpu import act_quantize
    from symmoe.kernels.hopper import launchers

    activation, row_range, row_format = Activation(), operands[-1], Float8Block().row_format
    num_rows, ffn = out.shape[0], out.shape[1] // 2
    data = torch.empty(num_rows, ffn, dtype=E4M3, device=out.device)
    scale = torch.empty(num_rows, num_blocks(ffn), device=out.device)

    def then_act() -> None:
        launchers.launch_fp8_gemm(*operands, out)
        act_quantize(out, row_factor, row_range, activation, row_format, rows=(data, scale))

    return then_act


def gradient(name: str, sizes: tuple[int, int, int, int], numbers: Numbers, on_host: torch.Tensor) -> Op:
    """out [G, O, C] of dout [O, P] and rows [C, P], whose groups begin at multiples of BLOCK. sizes: G, O, C, N."""
    G, O, C, N = sizes
    row_range = on_host.to(numbers.device)
    lengths = on_host[1] - on_host[0]
    tiles = (lengths + BLOCK - 1) // BLOCK
    firsts = ((tiles.cumsum(0) - tiles) * BLOCK).tolist()
    spans = [slice(first, first + n) for first, n in zip(firsts, lengths.tolist(), strict=True)]
    P = int(tiles.sum()) * BLOCK
    dout, rows = numbers.data(O, P), numbers.data(C, P)
    for first, n, end in zip(firsts, lengths.tolist(), [*firsts[1:], P], strict=True):
        for data in (dout, rows):
            data.view(torch.uint8)[:, first + n : end] = 0
    dout_scale, rows_scale = numbers.scale(P // BLOCK, O).t(), numbers.scale(P // BLOCK, C).t()
    operands = (dout, dout_scale, rows, rows_scale, row_range)
    out = torch.empty(G, O, C, dtype=BF16, device=numbers.device)
    main_grad = torch.zeros(G, O, C, dtype=FP32, device=numbers.device)

    def expected(g: int) -> torch.Tensor:
        blocks = slice(spans[g].start // BLOCK, -(-spans[g].stop // BLOCK))
        left, right = (
            (data[:, spans[g]], scale[:, blocks]) for data, scale in ((dout, dout_scale), (rows, rows_scale))
        )
        return dequantised(*left) @ dequantised(*right).T

    def blank() -> None:
        out.fill_(torch.nan)
        main_grad.zero_()

    op = Op(name, 2 * N * O * C, expected, blank)
    if numbers.device.type == "cpu":
        op.ways["twin"] = lambda: twin.grouped_gemm_wgrad_fp8(*operands, out)
        op.ways["twin add fp32"] = lambda: twin.grouped_gemm_wgrad_fp8(*operands, main_grad, accumulate=True)
    else:
        from symmoe.kernels.hopper import launchers
        from symmoe.kernels.low_precision import fp8
        from symmoe.kernels.triton import gemm

        for way, options in WGRAD_VARIANTS.items():
            op.ways[way] = lambda options=options: launchers.launch_fp8_wgrad(*operands, out, **options)
        op.ways["triton"] = lambda: fp8.grouped_gemm_wgrad_fp8(*operands, out, config=fp8.CONFIG)
        op.ways["add fp32"] = lambda: launchers.launch_fp8_wgrad(*operands, main_grad, accumulate=True)
    for way in op.ways:
        result = main_grad if way.endswith("fp32") else out
        op.checked[way] = lambda g, result=result: result[g]
    if numbers.device.type == "cuda":
        x, dy, dw = numbers.normal(N, C), numbers.normal(N, O), torch.empty_like(out)
        op.ways["bf16"] = lambda: gemm.grouped_gemm_wgrad(dy, x, row_range, dw)
    return op


def ops_of(sizes: tuple[int, int, int, int], device: torch.device) -> Iterator[Op]:
    """A layer's products and weight gradients, one after the other: each takes gigabytes. sizes: G, H, I, N."""
    G, H, I, N = sizes
    on_host = uneven_groups(G, N, torch.Generator().manual_seed(0))
    numbers = Numbers(device)
    for name, widths in {"fc1": (2 * I, H), "fc2": (H, I), "dfc2": (I, H), "dfc1": (H, 2 * I)}.items():
        yield product(name, (G, *widths, N), numbers, on_host)
    for name, widths in {"wgrad1": (2 * I, H), "wgrad2": (H, I)}.items():
        yield gradient(name, (G, *widths, N), numbers, on_host)


def check(op: Op, num_groups: int, ways: list[str]) -> dict[str, dict[str, object]]:
    """Runs every way once: its error, None where nothing is checked; 'failed' if it raises or is wrong."""
    references = {g: op.expected(g) for g in sample_groups(num_groups)}
    results = {}
    for way in ways:
        print(f"checking {op.name} {way}", file=sys.stderr, flush=True)  # the last line if a kernel hangs
        op.blank()
        try:
            op.ways[way]()
        except (TritonError, RuntimeError, TypeError, ValueError) as failure:
            results[way] = {"failed": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        if way not in op.checked:
            results[way] = {"error": None}
            continue
        error = max(
            ((op.checked[way](g).double() - expected).abs().max() / expected.abs().max()).item()
            for g, expected in references.items()
        )
        is_right = error < MAX_ERROR  # not of NaN
        results[way] = {"error": error} if is_right else {"failed": f"wrong: relative error {error:.3g}"}
    return results


def measure(op: Op, num_groups: int, ways: list[str], device: torch.device) -> dict[str, dict[str, object]]:
    """By way, error, milliseconds and TFLOP/s; no times on CPUs."""
    results = check(op, num_groups, ways)
    runs = {way: op.ways[way] for way, result in results.items() if "failed" not in result}
    if device.type == "cuda":
        for way, ms in medians_in_turn_ms(runs).items():
            results[way] |= {"ms": ms, "tflops": op.flops / ms / 1e9}
    return results


def cell(way: str, result: dict[str, object]) -> str:
    if "failed" in result:
        return f"{way}: {result['failed']}"
    speed = f" {result['tflops']:.0f}" if "tflops" in result else ""
    error = f" ({result['error']:.1e})" if result["error"] is not None else ""
    return f"{way}{speed}{error}"


def write(path: str | None, record: dict[str, object]) -> None:
    """The record as JSON, if there is a path."""
    if path:
        with open(path, "w") as file:
            json.dump(record, file, indent=1)


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = SHAPES if device.type == "cuda" else TINY
    default = ORDER if device.type == "cuda" else list(TINY)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(default), help="comma-separated shapes (%(default)s)")
    parser.add_argument("--ops", default="", help="comma-separated ops, all if empty")
    parser.add_argument("--ways", default="", help="comma-separated ways; if empty all but g8 and triton")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin nothing after that (%(default)s)")
    parser.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    env = machine(device) | {"command": " ".join(sys.argv)}
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "triton")), flush=True)
    print("TFLOP/s (largest error relative to the largest value)")
    results, skipped, failed = [], [], 0
    for shape in args.shapes.split(","):
        for op in ops_of(shapes[shape], device):
            if args.ops and op.name not in args.ops.split(","):
                continue
            if time.monotonic() > deadline:
                skipped.append(f"{shape} {op.name}")
                continue
            chosen = [way for way in op.ways if (way in args.ways.split(",") if args.ways else way not in SLOW_OR_RARE)]
            num_groups = shapes[shape][0]
            found = check(op, num_groups, chosen) if args.check else measure(op, num_groups, chosen, device)
            print(f"{shape:14}{op.name:8}" + "  ".join(cell(way, result) for way, result in found.items()), flush=True)
            results += [{"shape": shape, "op": op.name, "way": way, **result} for way, result in found.items()]
            failed += sum("failed" in result for way, result in found.items() if way != "torch rows")
            write(args.json, {**env, "results": results})  # in case that a later kernel hangs
    if skipped:
        print("no time left for " + ", ".join(skipped))
    write(args.json, {**env, "results": results, "skipped": skipped})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
