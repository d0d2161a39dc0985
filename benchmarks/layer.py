"""Times dispatch, combine and the whole expert-parallel layer on GPUs.

    torchrun --nproc-per-node=2 benchmarks/layer.py --json results.json

Each figure is the median over `--repetitions` of CUDA-event times on rank 0 after a warm-up; the largest rank is close
by, because every trip ends in a barrier. FLOPs: 6 T H I K forward, 12 T H I K backward, per rank. Bytes: `wire` counts
rows that leave the rank, `with self` also those that stay. The ceiling is the same grouped GEMMs on the same splits
with no communication. Routing is uniform and random; the plan is made anew in every forward. Steps of the layer follow
each other without a pause, so with static capacity the host runs ahead, as it does in training.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
import torch.distributed as dist

import symmoe
from symmoe.combine.collect import collect_rows
from symmoe.dispatch.send import send_packed
from symmoe.moe.fused import expert_parallel_mlp
from symmoe.moe.experts import ExpertRows, ExpertsBackward, ExpertWeights, experts_forward

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
    records = bench_plan(case)
    plan = case.plan()
    with (
        heap.lease((plan.packed_row_capacity, case.x.shape[1]), torch.bfloat16, name="packed") as packed,
        heap.lease((plan.row_capacity, case.x.shape[1]), torch.bfloat16, name="rows") as rows,
    ):
        rows.tensor.zero_()
        records += bench_trips(case, plan, packed.tensor, rows.tensor)
        gemms = bench_gemms(case, plan, packed.tensor, rows.tensor)
    ceilings = {record["direction"]: record["tflops"] for record in gemms}
    records += gemms + bench_layer(case, ceilings)
    if args.profile:
        profile(lambda: step(case, None), args.profile, preset, heap.rank)
    return records


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
    weights = ExpertWeights(
        fc1.weight.detach(), None, fc2.weight.detach(), None, case.experts.activation.activation
    )
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
        for _ in range(3):
            step(case, capacity)
        marks = [step(case, capacity) for _ in range(case.repetitions)]
        torch.cuda.synchronize()
        times = np.array([[start.elapsed_time(mid), mid.elapsed_time(end)] for start, mid, end in marks])
        for column, direction in enumerate(("forward", "backward")):
            speed = tflops((1 + column) * case.flops, times[:, column])
            more = {"tflops": speed, "ceiling_tflops": ceilings[direction]}
            records.append(case.record(f"layer {name}", direction, times[:, column], **more))
    return records


def step(case: Case, capacity: int | None) -> list[torch.cuda.Event]:
    """One forward and one backward pass, with events before, between and after; the host does not wait for them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    y = expert_parallel_mlp(case.x, case.probs, case.experts, case.plan(capacity))
    events[1].record()
    torch.autograd.grad(y, (case.x, case.probs, *case.experts.parameters()), case.dy)
    events[2].record()
    return events


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
    heads = ("TFLOP/s", "ceiling", "wire GB/s", "with self")
    print(f"{'suite':13s} {'preset':14s} ep {'direction':11s} {'ms':>8s}" + "".join(f"{head:>10s}" for head in heads))
    for r in records:
        cells = [r.get(key, "") for key in ("tflops", "ceiling_tflops", "wire_gbs", "with_self_gbs")]
        print(
            f"{r['suite']:13s} {r['preset']:14s} {r['ep']:2d} {r['direction']:11s} {r['ms_median']:8.3f} "
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
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens per rank")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--heap-gib", type=int, default=24, help="GiB of the symmetric arena on each GPU")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--profile", help="folder for kernel times of one step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
