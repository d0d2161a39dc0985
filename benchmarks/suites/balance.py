"""Whole steps of a layer with and without replicas, for routings that give rank 0 more rows than the others.

    torchrun --nproc-per-node=2 benchmarks/balance.py --preset qwen3-30b,deepseek-like --json balance.json

Every token chooses the first `hot` experts and others at random; the layer has no router. "load" is how many times the
mean of the ranks' rows rank 0 gets. Steps follow each other as in the suite "steps" (docs/benchmarking.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from suites.cases import shapes_of
from suites.records import Record, measured_on, new_record, show

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.tools.ranks import Ranks, join
from symmoe.tools.shapes import Shape, add_shape_arguments
from symmoe.tools.timing import times_in_a_row_ms

BALANCES = ("none", "replicas")


def bench(
    shape: Shape, heap: SymmetricHeap, ranks: Ranks, options: argparse.Namespace
) -> list[Record]:
    """Records of one layer: its steps with each load, with and without replicas. Collective."""
    generator = torch.Generator().manual_seed(ranks.rank)
    num_tokens, hidden, num_experts, top_k = (
        options.tokens,
        shape.hidden,
        shape.num_experts,
        shape.top_k,
    )
    config = {
        "hidden": hidden,
        "ffn": shape.ffn,
        "num_experts": num_experts,
        "top_k": top_k,
        "router": "none",
    }
    layers = {}
    for balance in BALANCES:
        torch.manual_seed(ranks.rank)
        more = {"replica_places": options.places} if balance == "replicas" else {}
        layers[balance] = MoELayer(
            MoEConfig(**config, balance=balance, **more), heap, dtype=torch.bfloat16
        )
    x, dy = torch.randn(2, num_tokens, hidden, generator=generator).bfloat16().to(heap.device)
    probs = torch.rand(num_tokens, top_k, generator=generator).to(heap.device).requires_grad_()
    x.requires_grad_()
    records = []
    for num_hot in sorted({0, top_k // 4, top_k // 2, top_k}):
        heat = torch.ones(num_tokens, num_experts)
        heat[:, :num_hot] = 0
        first = torch.arange(num_hot).expand(num_tokens, num_hot)
        others = (
            [torch.multinomial(heat, top_k - num_hot, generator=generator)]
            if num_hot < top_k
            else []
        )
        ids = torch.cat([first, *others], 1).int().to(heap.device)
        rows = torch.from_numpy(
            ranks.gather(torch.bincount(ids.flatten().cpu(), minlength=num_experts).numpy()).sum(0)
        )
        of_ranks = rows.view(ranks.num_ranks, -1).sum(1)
        load = float(of_ranks[0] / of_ranks.double().mean())
        steps = {balance: step_of(layer, x, ids, probs, dy) for balance, layer in layers.items()}
        times = times_in_a_row_ms(steps, ranks, options.repetitions)
        for balance, taken in times.items():
            found = {
                "preset": shape.name,
                "ep": ranks.num_ranks,
                "tokens": num_tokens,
                "direction": "step",
            }
            peaks = ranks.gather(np.array(peak_bytes(steps[balance], heap)))[
                0
            ]  # of the busiest rank
            more = {"load": round(load, 3), "places": options.places}
            more |= {"peak_ordinary_bytes": int(peaks[0]), "peak_heap_bytes": int(peaks[1])}
            records.append(
                new_record(
                    taken, suite="balance", variant=balance, skew=f"{load:.2f}", **found, **more
                )
            )
    return records


def step_of(
    layer: MoELayer, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor
) -> Callable[[], None]:
    """Forward and backward; gradients are dropped."""

    def step() -> None:
        y, _ = layer(x, topk_idx=ids, probs=probs)
        y.backward(dy)
        for tensor in (x, probs, *layer.parameters()):
            tensor.grad = None

    return step


def peak_bytes(step: Callable[[], None], heap: SymmetricHeap) -> tuple[int, int]:
    """The most ordinary memory (0 on CPUs) and the most of the heap during a step, with what was there before."""
    on_gpu, arena = heap.device.type == "cuda", heap.memory.arena
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    arena.high_water_bytes = arena.used_bytes
    step()
    heap.synchronize()
    return torch.cuda.max_memory_allocated() if on_gpu else 0, arena.high_water_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank (%(default)s)")
    parser.add_argument(
        "--places", type=int, default=4, help="of a rank, for replicas (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="of every variant (%(default)s)")
    parser.add_argument("--heap-gib", type=float, default=16.0, help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")
    options = parser.parse_args()
    with join() as ranks:
        about = measured_on(ranks)
        with SymmetricHeap(num_bytes=int(options.heap_gib * 2**30)) as heap:
            records = [
                one | about
                for shape in shapes_of(options)
                for one in bench(shape, heap, ranks, options)
            ]
    if ranks.rank == 0:
        show(records, options.json)


if __name__ == "__main__":
    main()
