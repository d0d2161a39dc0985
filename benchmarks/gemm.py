"""Speed of the grouped GEMM kernels on one GPU, next to torch._grouped_mm where that can do the same.

    python benchmarks/gemm.py                                     chosen tiles, three shapes, under 90 s
    python benchmarks/gemm.py --configs --shapes qwen3-30b        a handful of other tiles for every kernel
    python benchmarks/gemm.py --configs --ops dfc2,wgrad1 --json out.json

Experts get mildly uneven numbers of rows, the same in every run; gathered rows come from half as many packed rows,
in ascending order within an expert, as after dispatch. Every output is checked against fp32 matmul on three experts
before it is timed. Times are medians of CUDA events around single calls; the tensors are larger than the L2 cache.
torch._grouped_mm gathers nothing and has no SwiGLU: its number is that of the bare product.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from triton.errors import TritonError

from symmoe.kernels.gpu import gemm, gemm_swiglu

SHAPES = {  # experts on this rank, hidden size, FFN width, rows
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
}
WARMUP, REPS = 5, 30
MAX_ERROR = 1e-2  # of bf16 results, relative to the largest value

WIDE = gemm.TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8)
SQUARE = replace(WIDE, block_n=128, programs_per_sm=2, max_registers=128)
GEMM_SWEEP = [
    WIDE,
    replace(WIDE, flatten=True),
    replace(WIDE, num_stages=4),
    replace(WIDE, group_m=16),
    replace(WIDE, flatten=True, group_m=16),
    replace(WIDE, block_m=256, block_n=128),
    replace(WIDE, block_n=128, num_stages=3, num_warps=4, programs_per_sm=2),
    SQUARE,
]
FUSED_WIDE = replace(WIDE, block_n=128)
SWIGLU_SWEEP = [
    FUSED_WIDE,
    replace(FUSED_WIDE, flatten=True),
    replace(FUSED_WIDE, num_stages=4),
    replace(FUSED_WIDE, group_m=16),
    replace(FUSED_WIDE, parts=4),
    replace(FUSED_WIDE, parts=4, flatten=True),
    replace(SQUARE, block_n=64, parts=2),
    replace(FUSED_WIDE, block_n=64, num_warps=4, programs_per_sm=2),
]
DSWIGLU_SWEEP = [
    replace(WIDE, parts=8),
    replace(WIDE, parts=8, flatten=True),
    replace(WIDE, parts=8, flatten=True, group_m=16),
    replace(SQUARE, parts=8),
    replace(SQUARE, parts=8, programs_per_sm=1, num_stages=5, max_registers=None),
]
WGRAD_SWEEP = [
    WIDE,
    replace(WIDE, flatten=True),
    replace(WIDE, num_stages=4),
    replace(WIDE, group_m=16),
    replace(WIDE, block_m=256, block_n=128),
    SQUARE,
]


@dataclass
class Op:
    """One measured call: run(config) writes outputs; reference(g) gives group g's outputs in fp32."""

    flops: int
    run: Callable[[gemm.TileConfig | None], None]
    chosen: gemm.TileConfig
    sweep: list[gemm.TileConfig]
    outputs: Callable[[int], list[torch.Tensor]]
    reference: Callable[[int], list[torch.Tensor]]
    torch_run: Callable[[], torch.Tensor] | None = None


def uneven_row_start(num_groups: int, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """Row starts of num_groups experts whose loads vary by about a quarter."""
    load = (1 + 0.25 * torch.randn(num_groups, generator=generator)).clamp(min=0.2)
    bounds = (load.cumsum(0) / load.sum() * num_rows).round().int()
    return torch.cat([torch.zeros(1, dtype=torch.int32), bounds])


def sorted_index(row_start: torch.Tensor, num_packed: int, generator: torch.Generator) -> torch.Tensor:
    """Packed row of every row: distinct and ascending within an expert."""
    sizes = row_start.diff().tolist()
    chosen = [torch.randperm(num_packed, generator=generator)[:size].sort().values for size in sizes]
    return torch.cat(chosen).int()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).abs().max() / expected.abs().max()).item()


def build_ops(shape: str) -> dict[str, Op]:
    """The seven calls of a layer's forward and backward pass, and FC1 without a gather."""
    G, H, I, N = SHAPES[shape]
    P = N // 2
    host = torch.Generator().manual_seed(0)
    row_start_host = uneven_row_start(G, N, host)
    spans = [slice(a, b) for a, b in zip(row_start_host.tolist(), row_start_host.tolist()[1:], strict=False)]
    index = sorted_index(row_start_host, P, host).cuda()
    row_start = row_start_host.cuda()
    torch.manual_seed(0)

    def normal(*dims, scale=1.0):
        return torch.randn(*dims, device="cuda", dtype=torch.bfloat16).mul_(scale)

    def blank(*dims, dtype=torch.bfloat16):
        return torch.full(dims, torch.nan, dtype=dtype, device="cuda")

    rows, packed = normal(N, H), normal(P, H)
    w1, w2 = normal(G, 2 * I, H, scale=H**-0.5), normal(G, H, I, scale=I**-0.5)
    h_in, probs = normal(N, 2 * I), torch.rand(N, device="cuda")
    a_in = normal(N, I)
    h, a, dh, out = blank(N, 2 * I), blank(N, I), blank(N, 2 * I), blank(N, H)
    dprob = blank(N, dtype=torch.float32)
    partials = blank(triton.cdiv(I, 64), N, dtype=torch.float32)  # enough for every swept tile
    dw1, dw2 = blank(G, 2 * I, H), blank(G, H, I)
    offsets = row_start[1:]

    def fc1(source, idx):
        return lambda c: gemm_swiglu.grouped_gemm_swiglu(source, w1, row_start, probs, h, a, row_index=idx, config=c)

    def fc1_reference(gather):
        def reference(g):
            x = packed[index[spans[g]].long()] if gather else rows[spans[g]]
            hidden = x.float() @ w1[g].float().t()
            gate, up = hidden.bfloat16().float().chunk(2, dim=1)
            return [hidden, torch.nn.functional.silu(gate) * up * probs[spans[g], None]]

        return reference

    def dfc2_reference(g):
        hidden = h_in[spans[g]].float().requires_grad_()
        prob = probs[spans[g]].clone().requires_grad_()
        gate, up = hidden.chunk(2, dim=1)
        act = torch.nn.functional.silu(gate) * up * prob[:, None]
        act.backward(packed[index[spans[g]].long()].float() @ w2[g].float())
        return [hidden.grad, act.detach(), prob.grad]

    def rows_of(*tensors: torch.Tensor) -> Callable[[int], list[torch.Tensor]]:
        return lambda g: [t[spans[g]] for t in tensors]

    two_fc1, two_fc2 = 4 * N * H * I, 2 * N * H * I
    bf16 = torch.bfloat16
    fc1_config = gemm_swiglu.swiglu_config(I, bf16)
    return {
        "fc1": Op(two_fc1, fc1(packed, index), fc1_config, SWIGLU_SWEEP, rows_of(h, a), fc1_reference(True)),
        "fc1-nogather": Op(
            two_fc1,
            fc1(rows, None),
            fc1_config,
            SWIGLU_SWEEP,
            rows_of(h, a),
            fc1_reference(False),
            lambda: torch._grouped_mm(rows, w1.transpose(1, 2), offs=offsets),
        ),
        "fc2": Op(
            two_fc2,
            lambda c: gemm.grouped_gemm(a_in, w2, row_start, out, config=c),
            gemm.gemm_config(H, bf16),
            GEMM_SWEEP,
            rows_of(out),
            lambda g: [a_in[spans[g]].float() @ w2[g].float().t()],
            lambda: torch._grouped_mm(a_in, w2.transpose(1, 2), offs=offsets),
        ),
        "dfc2": Op(
            two_fc2,
            lambda c: gemm_swiglu.grouped_gemm_dswiglu(
                packed, w2, row_start, h_in, probs, dh, a, dprob, partials, row_index=index, config=c
            ),
            gemm_swiglu.dswiglu_config(I, bf16),
            DSWIGLU_SWEEP,
            rows_of(dh, a, dprob),
            dfc2_reference,
        ),
        "wgrad2": Op(
            two_fc2,
            lambda c: gemm.grouped_gemm_wgrad(packed, a_in, row_start, dw2, dout_index=index, config=c),
            gemm.wgrad_config(H, I, bf16),
            WGRAD_SWEEP,
            lambda g: [dw2[g]],
            lambda g: [packed[index[spans[g]].long()].float().t() @ a_in[spans[g]].float()],
            lambda: torch._grouped_mm(rows.t(), a_in, offs=offsets),
        ),
        "dfc1": Op(
            two_fc1,
            lambda c: gemm.grouped_gemm_dgrad(h_in, w1, row_start, out, config=c),
            gemm.gemm_config(H, bf16),
            GEMM_SWEEP,
            rows_of(out),
            lambda g: [h_in[spans[g]].float() @ w1[g].float()],
            lambda: torch._grouped_mm(h_in, w1, offs=offsets),
        ),
        "wgrad1": Op(
            two_fc1,
            lambda c: gemm.grouped_gemm_wgrad(h_in, packed, row_start, dw1, rows_index=index, config=c),
            gemm.wgrad_config(2 * I, H, bf16),
            WGRAD_SWEEP,
            lambda g: [dw1[g]],
            lambda g: [h_in[spans[g]].float().t() @ packed[index[spans[g]].long()].float()],
            lambda: torch._grouped_mm(h_in.t(), rows, offs=offsets),
        ),
    }


def median_ms(run: Callable[[], object], reps: int = REPS) -> float:
    """Median time of one call."""
    for _ in range(WARMUP):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def worst_error(op: Op, config: gemm.TileConfig, num_groups: int) -> float:
    """Runs the op once, on poisoned outputs, and compares three groups with fp32."""
    groups = sorted({0, num_groups // 2, num_groups - 1})
    for g in groups:
        for output in op.outputs(g):
            output.fill_(torch.nan)
    op.run(config)
    return max(
        relative_error(got, expected)
        for g in groups
        for got, expected in zip(op.outputs(g), op.reference(g), strict=True)
    )


def label(config: gemm.TileConfig) -> str:
    text = f"{config.block_m}x{config.block_n}x{config.block_k} s{config.num_stages} w{config.num_warps}"
    text += f" g{config.group_m} p{config.programs_per_sm}"
    text += f" parts{config.parts}" if config.parts > 1 else ""
    text += "".join(f" {name}" for name in ("flatten",) if getattr(config, name))
    return text


def measure(op: Op, config: gemm.TileConfig, num_groups: int) -> dict[str, object]:
    """Milliseconds, TFLOP/s and error of one op with one config; 'failed' instead if it does not fit or is wrong."""
    try:
        error = worst_error(op, config, num_groups)
        if not error < MAX_ERROR:
            return {"failed": f"wrong: relative error {error:.3g}"}
        ms = median_ms(lambda: op.run(config))
    except (TritonError, RuntimeError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"[:100]}
    return {"ms": ms, "tflops": op.flops / ms / 1e9, "error": error}


def torch_tflops(op: Op) -> float | None:
    """TFLOP/s of torch._grouped_mm; None where it has no such product."""
    if op.torch_run is None:
        return None
    try:
        return op.flops / median_ms(op.torch_run) / 1e9
    except RuntimeError as failure:
        print(f"torch._grouped_mm: {failure}"[:160])
        return None


def environment() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run_shape(shape: str, ops: list[str] | None, sweep: bool) -> list[dict[str, object]]:
    """Measures the ops of one shape, prints a line for each, returns the lines."""
    num_groups = SHAPES[shape][0]
    results = []
    for name, op in build_ops(shape).items():
        if ops and name not in ops:
            continue
        yardstick = torch_tflops(op)
        configs = list(dict.fromkeys([op.chosen, *op.sweep])) if sweep else [op.chosen]
        for config in configs:
            result = measure(op, config, num_groups)
            numbers = (
                result["failed"]
                if "failed" in result
                else f"{result['ms']:8.3f} ms {result['tflops']:6.0f} TFLOP/s  error {result['error']:.1e}"
            )
            beside = f"torch {yardstick:4.0f}" if yardstick else ""
            chosen = "*" if config == op.chosen else " "
            print(f"{shape:14}{name:14}{chosen}{label(config):42}{beside:12}{numbers}", flush=True)
            about = {"shape": shape, "op": name, "config": label(config), "chosen": config == op.chosen}
            results.append({**about, "torch_tflops": yardstick, **result})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true", help="sweep other tile configs too")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated shapes (%(default)s)")
    parser.add_argument("--ops", default="", help="comma-separated ops, all if empty")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    env = environment()
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "triton")), flush=True)
    ops = args.ops.split(",") if args.ops else None
    results = []
    for shape in args.shapes.split(","):
        results += run_shape(shape, ops, args.configs)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**env, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
