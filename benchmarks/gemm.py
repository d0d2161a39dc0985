"""For the development of the grouped GEMM kernels: the ones that symmoe chooses from beside each other, on one GPU.

    python benchmarks/gemm.py --compare            Triton's and Hopper's kernels, torch, and pairs of unfused kernels
    python benchmarks/gemm.py --sweep dfc2,wgrad1  other tiles of Triton's kernels

What users see is timed by `symmoe bench gemm`. Here experts get mildly uneven numbers of rows, the same in every run;
gathered rows come from half as many packed rows, in ascending order within an expert, as after dispatch. Every output
is checked against fp32 matmul on three experts before it is timed. Times are medians of CUDA events around single
calls, of all ways in turn, so that a GPU that slows down with heat slows them alike; the tensors are larger than the L2
cache. Our kernels write into tensors that exist; torch._grouped_mm, which cannot, takes its output from the allocator's
cache.

fc1, dfc2, wgrad1, wgrad2 are the calls of the layer, which gather and fuse; names that end in -plain are contiguous
products alone, for which torch has a counterpart. forward-fusion and backward-fusion compare one fused kernel with the
three modules: with our kernels, and with torch._grouped_mm and eager bf16 SwiGLU. Their TFLOP/s count the product.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from triton.errors import TritonError

from symmoe.kernels import select
from symmoe.kernels.activation import Activation
from symmoe.kernels.parts import range_of
from symmoe.kernels.triton import activation as gpu_activation
from symmoe.kernels.triton import gemm, gemm_act, tiles
from symmoe.tools.bench.records import machine
from symmoe.tools.bench.stock import swiglu, swiglu_grad

SHAPES = {  # experts on this rank, hidden size, FFN width, rows
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
}
SWIGLU = Activation()
WARMUP, REPS = 5, 30
MAX_ERROR = 1e-2  # of bf16 results, relative to the largest value
MAX_EAGER_ERROR = 5e-2  # of torch's SwiGLU, which rounds every step to bf16

WIDE = tiles.TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8)
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
ACT_SWEEP = [
    FUSED_WIDE,
    replace(FUSED_WIDE, flatten=True),
    replace(FUSED_WIDE, num_stages=4),
    replace(FUSED_WIDE, group_m=16),
    replace(FUSED_WIDE, parts=4),
    replace(FUSED_WIDE, parts=4, flatten=True),
    replace(SQUARE, block_n=64, parts=2),
    replace(FUSED_WIDE, block_n=64, num_warps=4, programs_per_sm=2),
]
DACT = gemm_act.DactConfig(
    block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, parts=8, lead=1, flatten=True
)
FETCHED = replace(DACT, prefetch=True)
PAIR = replace(DACT, block_n=128, num_warps=4, programs_per_sm=2, max_registers=255, flatten=False)  # two per SM
FULL_PAIR = replace(PAIR, num_warps=8, max_registers=128, parts=4)
DACT_SWEEP = [
    DACT,
    *(replace(DACT, lead=lead) for lead in (0, 2)),
    *(replace(FETCHED, lead=lead) for lead in (0, 1, 2)),
    replace(DACT, flatten=False),
    replace(FETCHED, flatten=False),
    replace(DACT, load_policy="evict_first"),
    replace(DACT, load_policy="evict_first", store_policy="evict_first"),
    replace(DACT, load_policy="evict_first", store_policy="evict_last"),
    replace(FETCHED, load_policy="evict_first"),
    replace(FETCHED, group_m=16),
    replace(FETCHED, num_stages=4),
    *(replace(base, parts=4, lead=lead) for base in (DACT, FETCHED) for lead in (0, 1)),
    replace(FETCHED, block_m=256, block_n=128, parts=4),
    PAIR,
    replace(PAIR, lead=2),
    replace(PAIR, flatten=True),
    replace(PAIR, prefetch=True),
    *(replace(PAIR, parts=4, lead=lead) for lead in (0, 1)),
    replace(PAIR, parts=4, prefetch=True),
    FULL_PAIR,
    replace(FULL_PAIR, prefetch=True),
    replace(FULL_PAIR, programs_per_sm=1, num_stages=5, max_registers=None),
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
    """One measured call: run(config) writes outputs; reference(g) gives group g's outputs in fp32.

    torch_run: the same by torch._grouped_mm. others: (name, run, outputs, largest error) of ways to the same result.
    on_hopper: by name, runs of Hopper's kernels; they write into the same outputs.
    """

    flops: int
    run: Callable[[tiles.TileConfig | None], object]
    chosen: tiles.TileConfig
    sweep: Sequence[tiles.TileConfig]
    outputs: Callable[[int], list[torch.Tensor]]
    reference: Callable[[int], list[torch.Tensor]]
    torch_run: Callable[[], torch.Tensor] | None = None
    others: list["Other"] = field(default_factory=list)
    on_hopper: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass
class Other:
    """Another way to an op's outputs: run() returns them, of all groups, in the op's order."""

    name: str
    run: Callable[[], list[torch.Tensor]]
    max_error: float


def uneven_groups(num_groups: int, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """The row_range of num_groups experts whose loads vary by about a quarter."""
    load = (1 + 0.25 * torch.randn(num_groups, generator=generator)).clamp(min=0.2)
    ends = (load.cumsum(0) / load.sum() * num_rows).round().int()
    return range_of(torch.cat([torch.zeros(1, dtype=torch.int32), ends]))


def group_spans(row_range: torch.Tensor) -> list[slice]:
    """The rows of every expert."""
    return [slice(first, end) for first, end in row_range.t().tolist()]


def sorted_index(row_range: torch.Tensor, num_packed: int, generator: torch.Generator) -> torch.Tensor:
    """Packed row of every row: distinct and ascending within an expert."""
    sizes = (row_range[1] - row_range[0]).tolist()
    chosen = [torch.randperm(num_packed, generator=generator)[:size].sort().values for size in sizes]
    return torch.cat(chosen).int()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).abs().max() / expected.abs().max()).item()


def build_ops(shape: str) -> dict[str, Op]:
    """The calls of a layer's forward and backward pass, the products alone, and what fusion saves."""
    G, H, I, N = SHAPES[shape]
    P = N // 2
    host = torch.Generator().manual_seed(0)
    on_host = uneven_groups(G, N, host)
    spans = group_spans(on_host)
    index = sorted_index(on_host, P, host).cuda()
    row_range = on_host.cuda()
    torch.manual_seed(0)

    def normal(*dims, scale=1.0):
        return torch.randn(*dims, device="cuda", dtype=torch.bfloat16).mul_(scale)

    def blank(*dims, dtype=torch.bfloat16):
        return torch.full(dims, torch.nan, dtype=dtype, device="cuda")

    rows, packed = normal(N, H), normal(P, H)
    w1, w2 = normal(G, 2 * I, H, scale=H**-0.5), normal(G, H, I, scale=I**-0.5)
    h_in, scale = normal(N, 2 * I), torch.rand(N, device="cuda")
    a_in = normal(N, I)
    h, a, dh, da, out = blank(N, 2 * I), blank(N, I), blank(N, 2 * I), blank(N, I), blank(N, H)
    dscale = blank(N, dtype=torch.float32)
    workspace = blank(gemm_act.dact_workspace_numel(N, G, I, SWIGLU), dtype=torch.float32)
    dw1, dw2 = blank(G, 2 * I, H), blank(G, H, I)
    offsets = row_range[1]

    def source(gather):
        return (packed, index) if gather else (rows, None)

    def rows_in(g, gather):
        return (packed[index[spans[g]].long()] if gather else rows[spans[g]]).float()

    def rows_of(*tensors: torch.Tensor) -> Callable[[int], list[torch.Tensor]]:
        return lambda g: [t[spans[g]] for t in tensors]

    def fc1(gather):
        x, i = source(gather)
        return lambda c: gemm_act.grouped_gemm_act(x, w1, row_range, scale, h, a, SWIGLU, row_index=i, config=c)

    def fc1_reference(gather):
        def reference(g):
            hidden = rows_in(g, gather) @ w1[g].float().t()
            gate, up = hidden.bfloat16().float().chunk(2, dim=1)
            return [hidden, torch.nn.functional.silu(gate) * up * scale[spans[g], None]]

        return reference

    def unfused_fc1():
        gemm.grouped_gemm(rows, w1, row_range, h)
        gpu_activation.scaled_activation(h, scale, a, SWIGLU)
        return [h, a]

    def torch_fc1():
        hidden = torch._grouped_mm(rows, w1.transpose(1, 2), offs=offsets)
        return [hidden, swiglu(hidden, scale)]

    def dfc2(gather):
        x, i = source(gather)
        return lambda c: gemm_act.grouped_gemm_dact(
            x, w2, row_range, h_in, scale, dh, a, dscale, workspace, SWIGLU, row_index=i, config=c
        )

    def dfc2_reference(gather):
        def reference(g):
            hidden = h_in[spans[g]].float().requires_grad_()
            factor = scale[spans[g]].clone().requires_grad_()
            gate, up = hidden.chunk(2, dim=1)
            act = torch.nn.functional.silu(gate) * up * factor[:, None]
            act.backward(rows_in(g, gather) @ w2[g].float())
            return [hidden.grad, act.detach(), factor.grad]

        return reference

    def unfused_dfc2():
        gemm.grouped_gemm_dgrad(rows, w2, row_range, da)
        gpu_activation.scaled_activation_grad(da, h_in, scale, dh, dscale, SWIGLU)
        gpu_activation.scaled_activation(h_in, scale, a, SWIGLU)
        return [dh, a, dscale]

    def torch_dfc2():
        return swiglu_grad(torch._grouped_mm(rows, w2, offs=offsets), h_in, scale)

    def wgrad(left, right, dw, left_index=None, right_index=None):
        return lambda c: gemm.grouped_gemm_wgrad(
            left, right, row_range, dw, dout_index=left_index, rows_index=right_index, config=c
        )

    on_hopper = select.hopper_kernels(row_range.device, torch.bfloat16, I)
    if on_hopper is not None:
        from symmoe.kernels.hopper import act

    def special_gemm(x, w, y, k_first):
        """Runs of the product by Hopper's kernel."""
        if on_hopper is None:
            return {}
        return {
            f"hopper g{g}": functools.partial(
                on_hopper.launch_gemm, x, w, row_range, y, weight_k_first=k_first, group_m=g
            )
            for g in (8, 16)
        }

    def special_wgrad(left, right, dw):
        """Runs of the weight gradient by Hopper's kernel."""
        if on_hopper is None:
            return {}
        return {
            f"hopper g{g}": functools.partial(on_hopper.launch_wgrad, left, right, row_range, dw, group_m=g)
            for g in (8, 16)
        }

    def variants(gather):
        """Pipelines of the fused kernels."""
        if on_hopper is None:
            return {}
        if gather:
            return {"hopper": act.GATHERED, "hopper g16": {**act.GATHERED, "group_m": 16}}
        return {
            "hopper separate": act.SEPARATE,
            "hopper two": act.TWO_WARPS,
            "hopper alternate": act.ALTERNATE,
            "hopper alternate g16": {**act.ALTERNATE, "group_m": 16},
        }

    def special_fc1(gather):
        if gather or I % select.ACT_COLUMNS:
            return {}
        x, _ = source(gather)
        return {
            name: functools.partial(act.launch_act, x, w1, row_range, scale, h, a, SWIGLU, variant=variant)
            for name, variant in variants(gather).items()
            if "two" not in name
        }

    def special_dfc2(gather):
        x, i = source(gather)

        def run(variant):
            num_n_tiles = act.launch_dact(
                x, w2, row_range, h_in, scale, dh, a, workspace, SWIGLU, row_index=i, variant=variant
            )
            gemm_act.sum_dact_partials(workspace, row_range, dscale, num_n_tiles)

        return {name: functools.partial(run, variant) for name, variant in variants(gather).items()}

    two_fc1, two_fc2 = 4 * N * H * I, 2 * N * H * I
    bf16 = torch.bfloat16
    act_config, dact_config = gemm_act.act_config(I, bf16, SWIGLU), gemm_act.dact_config(I, bf16)
    wgrad1_config, wgrad2_config = gemm.wgrad_config(2 * I, H, bf16), gemm.wgrad_config(H, I, bf16)
    ops = {
        "fc1": Op(two_fc1, fc1(True), act_config, ACT_SWEEP, rows_of(h, a), fc1_reference(True)),
        "fc1-plain": Op(
            two_fc1,
            lambda c: gemm.grouped_gemm(rows, w1, row_range, h, config=c),
            gemm.gemm_config(2 * I, bf16),
            GEMM_SWEEP,
            rows_of(h),
            lambda g: [rows[spans[g]].float() @ w1[g].float().t()],
            lambda: torch._grouped_mm(rows, w1.transpose(1, 2), offs=offsets),
        ),
        "fc2-plain": Op(
            two_fc2,
            lambda c: gemm.grouped_gemm(a_in, w2, row_range, out, config=c),
            gemm.gemm_config(H, bf16),
            GEMM_SWEEP,
            rows_of(out),
            lambda g: [a_in[spans[g]].float() @ w2[g].float().t()],
            lambda: torch._grouped_mm(a_in, w2.transpose(1, 2), offs=offsets),
        ),
        "dfc2": Op(two_fc2, dfc2(True), dact_config, DACT_SWEEP, rows_of(dh, a, dscale), dfc2_reference(True)),
        "dfc2-plain": Op(
            two_fc2,
            lambda c: gemm.grouped_gemm_dgrad(rows, w2, row_range, da, config=c),
            gemm.gemm_config(I, bf16),
            GEMM_SWEEP,
            rows_of(da),
            lambda g: [rows[spans[g]].float() @ w2[g].float()],
            lambda: torch._grouped_mm(rows, w2, offs=offsets),
        ),
        "wgrad2": Op(
            two_fc2,
            wgrad(packed, a_in, dw2, left_index=index),
            wgrad2_config,
            WGRAD_SWEEP,
            lambda g: [dw2[g]],
            lambda g: [rows_in(g, True).t() @ a_in[spans[g]].float()],
        ),
        "wgrad2-plain": Op(
            two_fc2,
            wgrad(rows, a_in, dw2),
            wgrad2_config,
            WGRAD_SWEEP,
            lambda g: [dw2[g]],
            lambda g: [rows_in(g, False).t() @ a_in[spans[g]].float()],
            lambda: torch._grouped_mm(rows.t(), a_in, offs=offsets),
        ),
        "dfc1-plain": Op(
            two_fc1,
            lambda c: gemm.grouped_gemm_dgrad(h_in, w1, row_range, out, config=c),
            gemm.gemm_config(H, bf16),
            GEMM_SWEEP,
            rows_of(out),
            lambda g: [h_in[spans[g]].float() @ w1[g].float()],
            lambda: torch._grouped_mm(h_in, w1, offs=offsets),
        ),
        "wgrad1": Op(
            two_fc1,
            wgrad(h_in, packed, dw1, right_index=index),
            wgrad1_config,
            WGRAD_SWEEP,
            lambda g: [dw1[g]],
            lambda g: [h_in[spans[g]].float().t() @ rows_in(g, True)],
        ),
        "wgrad1-plain": Op(
            two_fc1,
            wgrad(h_in, rows, dw1),
            wgrad1_config,
            WGRAD_SWEEP,
            lambda g: [dw1[g]],
            lambda g: [h_in[spans[g]].float().t() @ rows_in(g, False)],
            lambda: torch._grouped_mm(h_in.t(), rows, offs=offsets),
        ),
        "forward-fusion": Op(
            two_fc1,
            fc1(False),
            act_config,
            ACT_SWEEP,
            rows_of(h, a),
            fc1_reference(False),
            others=[Other("unfused", unfused_fc1, MAX_ERROR), Other("torch", torch_fc1, MAX_EAGER_ERROR)],
        ),
        "backward-fusion": Op(
            two_fc2,
            dfc2(False),
            dact_config,
            DACT_SWEEP,
            rows_of(dh, a, dscale),
            dfc2_reference(False),
            others=[Other("unfused", unfused_dfc2, MAX_ERROR), Other("torch", torch_dfc2, MAX_EAGER_ERROR)],
        ),
    }
    ops["fc1"].on_hopper, ops["forward-fusion"].on_hopper = special_fc1(True), special_fc1(False)
    ops["dfc2"].on_hopper, ops["backward-fusion"].on_hopper = special_dfc2(True), special_dfc2(False)
    ops["fc2-plain"].on_hopper = special_gemm(a_in, w2, out, False)
    ops["dfc2-plain"].on_hopper = special_gemm(rows, w2, da, True)
    ops["dfc1-plain"].on_hopper = special_gemm(h_in, w1, out, True)
    ops["wgrad1-plain"].on_hopper = special_wgrad(h_in, rows, dw1)
    ops["wgrad2-plain"].on_hopper = special_wgrad(rows, a_in, dw2)
    return ops


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


def medians_in_turn_ms(runs: dict[str, Callable[[], object]], reps: int = REPS) -> dict[str, float]:
    """Median time of one call of each, one after the other again and again."""
    for run in runs.values():
        for _ in range(WARMUP):
            run()
    events = {name: [] for name in runs}
    for _ in range(reps):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def sample_groups(num_groups: int) -> list[int]:
    """The groups whose results are checked."""
    return sorted({0, num_groups // 2, num_groups - 1})


def worst_error(
    op: Op, run: Callable[[], object], outputs: Callable[[int], list[torch.Tensor]], references: dict
) -> float:
    """Runs the op once, on poisoned outputs, and compares some groups with fp32."""
    for g in references:
        for output in op.outputs(g):
            output.fill_(torch.nan)
    run()
    return max(
        relative_error(got, expected)
        for g, group in references.items()
        for got, expected in zip(outputs(g), group, strict=True)
    )


def label(config: tiles.TileConfig) -> str:
    text = f"{config.block_m}x{config.block_n}x{config.block_k} s{config.num_stages} w{config.num_warps}"
    text += f" g{config.group_m} p{config.programs_per_sm}"
    text += f" parts{config.parts}" if config.parts > 1 else ""
    text += f" lead{config.lead}" if getattr(config, "lead", 0) else ""
    text += "".join(f" {name}" for name in ("flatten", "prefetch") if getattr(config, name, False))
    text += "".join(
        f" {name[:-7]}:{policy}" for name in ("load_policy", "store_policy") if (policy := getattr(config, name, ""))
    )
    return text


def measure(op: Op, config: tiles.TileConfig, references: dict) -> dict[str, object]:
    """Milliseconds, TFLOP/s and error of one op with one config; 'failed' instead if it does not fit or is wrong."""
    try:
        error = worst_error(op, lambda: op.run(config), op.outputs, references)
        if not error < MAX_ERROR:
            return {"failed": f"wrong: relative error {error:.3g}"}
        ms = median_ms(lambda: op.run(config))
    except (TritonError, RuntimeError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"[:100]}
    return {"ms": ms, "tflops": op.flops / ms / 1e9, "error": error}


def sweep_shape(shape: str, swept: list[str]) -> list[dict[str, object]]:
    """Measures other tiles of one shape's ops, prints a line for each, returns the lines."""
    results = []
    for name, op in build_ops(shape).items():
        if name not in swept:
            continue
        references = {g: op.reference(g) for g in sample_groups(SHAPES[shape][0])}
        for config in dict.fromkeys([op.chosen, *op.sweep]):
            result = measure(op, config, references)
            numbers = (
                result["failed"]
                if "failed" in result
                else f"{result['ms']:8.3f} ms {result['tflops']:6.0f} TFLOP/s  error {result['error']:.1e}"
            )
            chosen = "*" if config == op.chosen else " "
            print(f"{shape:14}{name:16}{chosen}{label(config):52}{numbers}", flush=True)
            results.append({"shape": shape, "op": name, "config": label(config), "chosen": chosen == "*", **result})
    return results


def compare_op(
    op: Op, kernels: dict[str, Callable[[], object]], spans: list[slice], references: dict
) -> dict[str, dict[str, object]]:
    """By name, milliseconds, TFLOP/s and error of ways to an op's outputs; 'failed' for what fails or is wrong.

    kernels: what writes the op's outputs. The op's other ways are added.
    """
    others = list(op.others)
    if op.torch_run is not None:
        others.append(Other("torch", lambda: [op.torch_run()], MAX_ERROR))
    ways = {name: (run, None, MAX_ERROR) for name, run in kernels.items()}
    ways |= {other.name: (other.run, other, other.max_error) for other in others}
    results, runs = {}, {}
    for name, (run, other, max_error) in ways.items():
        held = []
        try:
            if other is None:
                error = worst_error(op, run, op.outputs, references)
            else:
                error = worst_error(
                    op,
                    lambda run=run, held=held: held.extend(run()),
                    lambda g, held=held: [t[g] if t.ndim == 3 else t[spans[g]] for t in held],
                    references,
                )
        except (TritonError, RuntimeError) as failure:
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:100]}
            continue
        if error < max_error:
            results[name], runs[name] = {"error": error}, run
        else:
            results[name] = {"failed": f"wrong: relative error {error:.3g}"}
    for name, ms in medians_in_turn_ms(runs).items():
        results[name] |= {"ms": ms, "tflops": op.flops / ms / 1e9}
    return results


def kernels_of(op: Op) -> dict[str, Callable[[], object]]:
    """What the package launches, and the kernels that it chooses from."""
    return {"symmoe": lambda: op.run(None), "triton": lambda: op.run(op.chosen)} | op.on_hopper


def compare_shape(shape: str, ops: list[str] | None) -> list[dict[str, object]]:
    """Compares ways to the outputs of one shape's ops, prints a line for each op, returns what it found."""
    num_groups, _, _, num_rows = SHAPES[shape]
    spans = group_spans(uneven_groups(num_groups, num_rows, torch.Generator().manual_seed(0)))
    results = []
    for name, op in build_ops(shape).items():
        if ops and name not in ops:
            continue
        references = {g: op.reference(g) for g in sample_groups(num_groups)}
        found = compare_op(op, kernels_of(op), spans, references)
        cells = [f"{way} {r['tflops']:.0f}" if "tflops" in r else f"{way}: {r['failed']}" for way, r in found.items()]
        print(f"{shape:14}{name:16} TFLOP/s  " + "   ".join(cells), flush=True)
        results += [{"shape": shape, "op": name, "way": way, **result} for way, result in found.items()]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--compare", action="store_true", help="time the kernels that symmoe chooses from")
    mode.add_argument("--sweep", nargs="?", const="dfc2", metavar="OPS", help="time other tiles of OPS (dfc2)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated shapes (%(default)s)")
    parser.add_argument("--ops", default="", help="comma-separated ops, all if empty")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    env = machine(torch.device("cuda")) | {"command": " ".join(sys.argv)}
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "triton")), flush=True)
    ops = args.ops.split(",") if args.ops else None
    results = []
    for shape in args.shapes.split(","):
        if args.sweep:
            results += sweep_shape(shape, args.sweep.split(","))
        else:
            results += compare_shape(shape, ops)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**env, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
