"""The suite "balance": whole steps of a layer with and without replicas, for routings that give rank 0 more rows.

Every token chooses the first `hot` experts and others at random; the layer has no router. "load" is how many times the
mean of the ranks' rows rank 0 gets. Steps follow each other as in the suite "steps". Memory is that of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from suites.cases import Case
from suites.figures import MemoryMeter
from suites.problem import DTYPE, Problem
from suites.records import Record, case_record
from suites.steps import Choice, heap_bytes, make_experts
from suites.timing import Run
from symmoe.moe.layer import MoELayer
from symmoe.tools.ranks import times_in_a_row_ms

NUM_REPLICA_SLOTS = 4  # of a rank
BALANCES = {
    "none": Choice(static=False, options={"router": None}),
    "replicas": Choice(
        static=False,
        options={"router": None, "balance": "replicas", "replicas_per_rank": NUM_REPLICA_SLOTS},
    ),
}


def balance_heap_bytes(case: Case, num_ranks: int, num_rows: int) -> int:
    """Bytes of the heap if all tokens choose experts of one rank."""
    return heap_bytes(case, num_ranks, num_ranks * case.num_slots, BALANCES)


def bench_balance(problem: Problem, run: Run) -> list[Record]:
    """Measures steps with each load, with and without replicas; ignores the problem's routing. Collective."""
    shape, ranks = problem.case.shape, run.ranks
    layers = {
        name: MoELayer(choice.config(shape), run.heap, experts=make_experts(problem), dtype=DTYPE)
        for name, choice in BALANCES.items()
    }
    records = []
    generator = torch.Generator().manual_seed(ranks.rank)
    for num_hot in sorted({0, shape.top_k // 4, shape.top_k // 2, shape.top_k}):
        ids = _choose(problem.case, num_hot, generator)
        rows = torch.bincount(ids.flatten(), minlength=shape.num_experts).numpy()
        of_ranks = ranks.gather(rows).sum(0).reshape(ranks.num_ranks, -1).sum(1)
        load = float(of_ranks[0] / of_ranks.mean())
        steps = {name: _step_of(layer, problem, ids) for name, layer in layers.items()}
        for name, times in times_in_a_row_ms(steps, ranks, run.repetitions).items():
            meter = MemoryMeter(ranks.device, run.heap)
            steps[name]()
            figures: Record = {
                "skew": f"{load:.2f}",
                "load": round(load, 3),
                "num_replica_slots": NUM_REPLICA_SLOTS,
            }
            figures |= meter.peak()
            records.append(case_record(problem, "balance", name, "step", times, **figures))
    return records


def _choose(case: Case, num_hot: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [T, K] on the CPU: the first experts, and random other experts."""
    first = torch.arange(num_hot).expand(case.num_tokens, num_hot)
    if num_hot == case.shape.top_k:
        return first
    weights = (torch.arange(case.shape.num_experts) >= num_hot).float().repeat(case.num_tokens, 1)
    random_ids = torch.multinomial(weights, case.shape.top_k - num_hot, generator=generator)
    return torch.cat([first, random_ids], 1)


def _step_of(layer: MoELayer, problem: Problem, ids: torch.Tensor) -> Callable[[], object]:
    """A step: forward and backward; gradients are discarded."""
    x, dy, probs = problem.tokens
    ids = ids.int().to(problem.device)

    def step() -> object:
        y, _ = layer(x, topk_idx=ids, probs=probs)
        return torch.autograd.grad(y, (x, probs, *layer.parameters()), dy)

    return step
