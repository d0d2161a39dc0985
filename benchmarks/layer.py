"""Times dispatch, combine and the whole expert-parallel layer on GPUs.

    torchrun --nproc-per-node=2 benchmarks/layer.py --json results.json

Each figure is the median over `--repetitions` of CUDA-event times on rank 0 after a warm-up; the largest rank is close
by, because every trip ends in a barrier. FLOPs: 6 T H I K forward, 12 T H I K backward, per rank. Bytes: `wire` counts
rows that leave the rank, `with self` also those that stay. The ceiling is the same grouped GEMMs on the same splits
with no communication. Routing is uniform and random; the plan is made anew in every forward. Steps of the layer follow
each other without a pause, so with static capacity the host runs ahead, as it does in training.

The suite "variants" compares, all with static capacity and in one run: zero copy; a staged layer, whose experts write
to ordinary memory that is then copied to the heap; the choices of MoEConfig.stash; the expert-major path (the public
parts with buffers); and the zero-copy step as a CUDA graph. With each goes the peak of the
memory that a step takes, ordinary and on the heap.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
import torch.distributed as dist

import symmoe
from symmoe.combine.collect import collect_rows
from symmoe.dispatch.send import send_packed
from symmoe.moe import fused
from symmoe.moe.experts import ExpertRows, ExpertsBackward, ExpertWeights, experts_forward
from symmoe.moe.fused import expert_parallel_mlp

# name: hidden, ffn, experts, top_k (the "deepseek-like" layer has a quarter of DeepSeek-V3's experts)
PRESETS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "deepseek-like": (7168, 2048, 64, 8),
}


def main() -> None:
    args = _parse()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    heap = symmoe.SymmetricHeap(num_bytes=args.heap_gib << 30)
    records = []
    for preset in args.presets.split(","):
        records += bench_preset(preset, heap, args)
        torch.cuda.empty_cache()
    if rank == 0:
        print_table(records)
        if args.json:
            with open(args.json, "w") as file:
                json.dump([{**record, **machine()} for record in records], file, indent=1)
    heap.close()
    dist.destroy_process_group()


@dataclass
class Case:
    """One layer's tensors on this rank."""

    heap: symmoe.SymmetricHeap
    preset: str
    x: torch.Tensor
    dy: torch.Tensor
    probs: torch.Tensor
    topk_idx: torch.Tensor
    experts: symmoe.GroupedMLP
    num_experts: int
    repetitions: int

    @property
    def static_capacity(self) -> int:
        return int(1.2 * self.topk_idx.numel())

    @property
    def flops(self) -> int:
        """Of a forward pass; backward has twice as many."""
        return 6 * self.topk_idx.numel() * self.x.shape[1] * self.experts.ffn

    def plan(self, capacity: int | None = None) -> symmoe.Plan:
        return symmoe.make_plan(self.topk_idx, num_experts=self.num_experts, heap=self.heap, capacity=capacity)

    def record(self, suite: str, direction: str, times_ms: np.ndarray, **more: object) -> dict:
        low, median, high = (round(value, 4) for value in np.percentile(times_ms, [10, 50, 90]))
        return {
            "suite": suite,
            "preset": self.preset,
            "ep": self.heap.num_ranks,
            "tokens": self.x.shape[0],
            "skew": "uniform",
            "direction": direction,
            "ms_median": median,
            "ms_p10": low,
            "ms_p90": high,
            **more,
        }


def make_case(preset: str, heap: symmoe.SymmetricHeap, args: argparse.Namespace) -> Case:
    hidden, ffn, num_experts, top_k = PRESETS[preset]
    num_local = num_experts // heap.num_ranks
    torch.manual_seed(heap.rank)
    made = {"device": heap.device, "dtype": torch.bfloat16}
    probs, topk_idx = torch.rand(args.tokens, num_experts, device=heap.device).topk(top_k)
    return Case(
        heap=heap,
        preset=preset,
        x=torch.randn(args.tokens, hidden, **made).requires_grad_(),
        dy=torch.randn(args.tokens, hidden, **made),
        probs=(probs / probs.sum(1, keepdim=True)).requires_grad_(),
        topk_idx=topk_idx.int(),
        experts=symmoe.GroupedMLP(num_local, hidden, ffn, **made),
        num_experts=num_experts,
        repetitions=args.repetitions,
    )


def bench_preset(preset: str, heap: symmoe.SymmetricHeap, args: argparse.Namespace) -> list[dict]:
    case = make_case(preset, heap, args)
    records = bench_parts(case) if "layer" in args.suites else []
    if "variants" in args.suites:
        records += bench_variants(case)
    if args.profile:
        profile(lambda: step(case, None), args.profile, preset, heap.rank)
    return records


def bench_parts(case: Case) -> list[dict]:
    heap, records = case.heap, bench_plan(case)
    plan = case.plan()
    with (
        heap.lease((plan.packed_row_capacity, case.x.shape[1]), torch.bfloat16, name="packed") as packed,
        heap.lease((plan.row_capacity, case.x.shape[1]), torch.bfloat16, name="rows") as rows,
    ):
        rows.tensor.zero_()
        records += bench_trips(case, plan, packed.tensor, rows.tensor)
        gemms = bench_gemms(case, plan, packed.tensor, rows.tensor)
    ceilings = {record["direction"]: record["tflops"] for record in gemms}
    return records + gemms + bench_layer(case, ceilings)


def bench_plan(case: Case) -> list[dict]:
    kinds = (("exact", None), ("static", case.static_capacity))
    return [case.record("plan", name, timed(lambda c=c: case.plan(c), case.repetitions)) for name, c in kinds]


def bench_trips(case: Case, plan: symmoe.Plan, packed: torch.Tensor, rows: torch.Tensor) -> list[dict]:
    records, hidden = [], case.x.shape[1]
    x, probs = case.x.detach(), case.probs.detach()
    sent = (plan.token_to_packed_row >= 0).sum(0)
    counted = (int(sent.sum() - sent[case.heap.rank]) * hidden * 2, int(sent.sum()) * hidden * 2)
    for direction, carried in (("forward", probs), ("backward", None)):
        times = timed(lambda p=carried: send_packed(x, plan, packed, p), case.repetitions)
        records.append(case.record("dispatch", direction, times, **speeds(times, *counted)))
    for order in ("rank", "slot"):
        times = timed(lambda o=order: collect_rows(rows, plan, order=o), case.repetitions)
        counted = combine_bytes(plan, order, hidden)
        records.append(case.record("combine", f"order={order}", times, **speeds(times, *counted)))
    return records


def bench_gemms(case: Case, plan: symmoe.Plan, packed: torch.Tensor, out: torch.Tensor) -> list[dict]:
    """The layer's own GEMMs on the same splits with no communication."""
    row_probs = send_packed(case.x.detach(), plan, packed, case.probs.detach())
    fc1, fc2 = case.experts.fc1, case.experts.fc2
    weights = ExpertWeights(fc1.weight.detach(), None, fc2.weight.detach(), None, case.experts.activation.activation)
    rows = ExpertRows(packed, plan.row_start, row_probs, None, plan.row_to_packed_row)
    d_rows, dw1, dw2 = torch.empty_like(out), torch.empty_like(fc1.weight), torch.empty_like(fc2.weight)

    def forward() -> torch.Tensor:
        return experts_forward(rows, weights, out, num_rows=plan.num_rows)

    h = forward()

    def backward() -> None:
        step = ExpertsBackward(rows, weights, h, packed)
        step.input_gradient(d_rows)
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)

    flops = 6 * plan.num_rows * case.experts.hidden * case.experts.ffn
    forward_ms, backward_ms = timed(forward, case.repetitions), timed(backward, case.repetitions)
    return [
        case.record("gemm", "forward", forward_ms, tflops=tflops(flops, forward_ms)),
        case.record("gemm", "backward", backward_ms, tflops=tflops(2 * flops, backward_ms)),
    ]


def bench_layer(case: Case, ceilings: dict[str, float]) -> list[dict]:
    """From the router's output to y, and back to every gradient; steps follow each other as in training."""
    records = []
    for name, capacity in (("exact", None), ("static", case.static_capacity)):
        times = step_times(lambda c=capacity: step(case, c), case.repetitions)
        for column, direction in enumerate(("forward", "backward")):
            speed = tflops((1 + column) * case.flops, times[:, column])
            more = {"tflops": speed, "ceiling_tflops": ceilings[direction]}
            records.append(case.record(f"layer {name}", direction, times[:, column], **more))
    return records


def step(case: Case, capacity: int | None, stash: str = "all") -> list[torch.cuda.Event]:
    """One forward and one backward pass, with events before, between and after; the host does not wait for them."""
    return marked(case, lambda: expert_parallel_mlp(case.x, case.probs, case.experts, case.plan(capacity), stash=stash))


def marked(case: Case, forward: Callable[[], torch.Tensor]) -> list[torch.cuda.Event]:
    """`forward` and its backward pass, with events before, between and after."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    y = forward()
    events[1].record()
    torch.autograd.grad(y, (case.x, case.probs, *case.experts.parameters()), case.dy)
    events[2].record()
    return events


def step_times(call: Callable[[], list[torch.cuda.Event]], repetitions: int) -> np.ndarray:
    """Milliseconds [repetitions, 2] of forward and backward of steps that follow each other without a pause."""
    for _ in range(3):
        call()
    marks = [call() for _ in range(repetitions)]
    torch.cuda.synchronize()
    return np.array([[start.elapsed_time(mid), mid.elapsed_time(end)] for start, mid, end in marks])


def bench_variants(case: Case) -> list[dict]:
    """The layer's choices beside each other: time and peak memory."""
    capacity, calls = case.static_capacity, {}
    calls["zero copy"] = lambda: step(case, capacity)
    calls["staged"] = lambda: staged_step(case, capacity)
    for stash in ("rows", "hidden", "none"):
        calls[f"stash={stash}"] = lambda stash=stash: step(case, capacity, stash)
    calls["expert-major"] = lambda: expert_major_step(case, capacity)
    records = []
    for name, call in calls.items():
        times = step_times(call, case.repetitions)
        memory = peak_memory(case, call)
        for column, direction in enumerate(("forward", "backward")):
            speed = tflops((1 + column) * case.flops, times[:, column])
            records.append(case.record(f"variant {name}", direction, times[:, column], tflops=speed, **memory))
    times = graph_times(case, lambda: step_without_events(case, capacity))
    return [*records, case.record("variant graph", "both", times, tflops=tflops(3 * case.flops, times))]


def peak_memory(case: Case, call: Callable[[], object]) -> dict[str, int]:
    """Bytes that one step takes at its peak beyond what was there before: ordinary memory, and the heap."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.heap._arena.high_water_bytes = case.heap.leased_bytes
    call()
    torch.cuda.synchronize()
    return {
        "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - before,
        "peak_heap_bytes": case.heap.high_water_bytes,
    }


@contextlib.contextmanager
def staged_experts() -> Iterator[None]:
    """Experts that write outputs and input gradients to ordinary memory, from where they are copied to the heap."""
    second_layer, input_gradient = fused.second_layer, ExpertsBackward.input_gradient

    def staged_second_layer(a, rows, experts, out):
        staging = torch.empty_like(out)
        second_layer(a, rows, experts, staging)
        out.copy_(staging)

    def staged_input_gradient(self, d_rows):
        staging = torch.empty_like(d_rows)
        input_gradient(self, staging)
        d_rows.copy_(staging)

    fused.second_layer, ExpertsBackward.input_gradient = staged_second_layer, staged_input_gradient
    try:
        yield
    finally:
        fused.second_layer, ExpertsBackward.input_gradient = second_layer, input_gradient


def staged_step(case: Case, capacity: int) -> list[torch.cuda.Event]:
    with staged_experts():
        return step(case, capacity)


def expert_major_step(case: Case, capacity: int) -> list[torch.cuda.Event]:
    """The public parts with caller buffers: rows arrive one per slot, in the order of the experts."""
    heap = case.heap

    def forward() -> torch.Tensor:
        plan = case.plan(capacity)
        shape = (plan.row_capacity, case.x.shape[1])
        buffers = [heap.lease(shape, torch.bfloat16, name=name).tensor for name in ("rows", "out", "d_out", "d_rows")]
        received, out, d_out, d_rows = buffers
        rows, row_probs = symmoe.dispatch_tokens(case.x, plan, probs=case.probs, out=received)
        y = case.experts(rows, plan.splits, row_probs, out=out, grad_input_out=d_rows)
        return symmoe.combine_tokens(y, plan, grad_out=d_out)

    return marked(case, forward)


def step_without_events(case: Case, capacity: int) -> None:
    y = expert_parallel_mlp(case.x, case.probs, case.experts, case.plan(capacity))
    torch.autograd.grad(y, (case.x, case.probs, *case.experts.parameters()), case.dy)


def graph_times(case: Case, call: Callable[[], object]) -> np.ndarray:
    """Milliseconds of each replay of `call`, captured once; replays follow each other without a pause."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(case.repetitions + 4)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    del graph
    case.heap.release_graphs()
    return np.array([one.elapsed_time(other) for one, other in itertools.pairwise(marks[3:])])


def timed(call, repetitions: int) -> np.ndarray:
    """Milliseconds of each repetition, between CUDA events on this rank's stream."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return np.array(times)


def combine_bytes(plan: symmoe.Plan, order: str, hidden: int) -> tuple[int, int]:
    """(wire bytes, bytes with self) that this rank reads in one combine."""
    ranks = plan.slot_to_rank if order == "slot" else torch.arange(plan.heap.num_ranks, device=plan.splits.device)
    present = (plan.slot_to_row if order == "slot" else plan.token_to_primary_row) >= 0
    remote = present & (ranks != plan.heap.rank)
    return int(remote.sum()) * hidden * 2, int(present.sum()) * hidden * 2


def speeds(times_ms: np.ndarray, wire_bytes: int, all_bytes: int) -> dict:
    seconds = np.median(times_ms) / 1e3
    return {
        "wire_bytes": wire_bytes,
        "wire_gbs": round(wire_bytes / seconds / 1e9, 1),
        "with_self_gbs": round(all_bytes / seconds / 1e9, 1),
    }


def tflops(flops: int, times_ms: np.ndarray) -> float:
    return round(flops / np.median(times_ms) / 1e9, 1)


def profile(call, folder: str, preset: str, rank: int) -> None:
    """Kernel times of one step of rank 0, largest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        for _ in range(3):
            call()
    if rank == 0:
        rows = [
            (e.self_device_time_total / 3, e.count // 3, e.key) for e in prof.key_averages() if e.self_device_time_total
        ]
        with open(os.path.join(folder, f"kernels-{preset}.txt"), "w") as file:
            for time_us, count, name in sorted(rows, reverse=True)[:40]:
                print(f"{time_us:10.1f} us {count:4d}x  {name[:90]}", file=file)


def print_table(records: list[dict]) -> None:
    heads = ("TFLOP/s", "ceiling", "wire GB/s", "with self", "MiB", "heap MiB")
    print(f"{'suite':20s} {'preset':14s} ep {'direction':11s} {'ms':>8s}" + "".join(f"{head:>10s}" for head in heads))
    for r in records:
        cells = [r.get(key, "") for key in ("tflops", "ceiling_tflops", "wire_gbs", "with_self_gbs")]
        cells += [r[key] >> 20 if key in r else "" for key in ("peak_ordinary_bytes", "peak_heap_bytes")]
        print(
            f"{r['suite']:20s} {r['preset']:14s} {r['ep']:2d} {r['direction']:11s} {r['ms_median']:8.3f} "
            + "".join(f"{cell:>10}" for cell in cells)
        )


def machine() -> dict:
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nvshmem": nvshmem_version(),
        "command": " ".join(["torchrun", f"--nproc-per-node={dist.get_world_size()}", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }


def nvshmem_version() -> str:
    return f"{version('nvidia-nvshmem-cu13')}, nvshmem4py {version('nvshmem4py-cu13')}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma-separated names of PRESETS")
    parser.add_argument("--suites", default="layer,variants", help="comma-separated: layer, variants")
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens per rank")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--heap-gib", type=int, default=24, help="GiB of the symmetric arena on each GPU")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--profile", help="folder for kernel times of one step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
