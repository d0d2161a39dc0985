"""The suite "memory": what a step keeps from its forward to its backward pass, and takes at its peak.

Of the whole layer, as it is by default and with packed rows, of its experts without a router, and of the stock layer.
Bytes beyond what was there before the step: weights, x and dy are not among them; y and all gradients are.
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import torch

from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.cases import config_of
from symmoe.tools.bench.layer import Step, make_experts, stock_step
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, case_record
from symmoe.tools.bench.reference import Reference
from symmoe.tools.bench.timing import WARM_UP, Run, largest_error

NO_TIMES = np.full(1, np.nan)


def bench_memory(problem: Problem, run: Run) -> list[Record]:
    """One record for each kind of step, with all defaults. Collective."""
    reference, shape = Reference(problem), problem.case.shape
    layers = {"layer": config_of(shape), "layer, packed": config_of(shape, layout="packed")}
    steps = [stock_step(problem, reference)]
    x, probs, dy = problem.tokens.x, problem.tokens.probs, problem.tokens.dy
    for name, config in layers.items():
        layer = MoELayer(config, run.heap, experts=make_experts(problem), dtype=DTYPE)
        experts = RoutedExperts.of(config, run.heap, layer.experts)
        steps.append(_with_a_router(name, layer, x, dy))
        weights = layer.experts.fc1.weight, layer.experts.fc2.weight
        steps.append(
            Step(
                name.replace("layer", "experts"),
                partial(_routed, experts, layer.experts, problem),
                (x, probs, *weights),
                dy,
                reference.step_error,
            )
        )
    return [step_record(problem, step, run.ranks, run.heap) for step in steps]


def _routed(experts: RoutedExperts, weights: GroupedMLP, problem: Problem) -> torch.Tensor:
    return experts(problem.tokens.x, problem.tokens.probs, problem.topk_idx, weights)[0]


def _with_a_router(name: str, layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> Step:
    """A step whose routing the layer decides: that its experts are right is found by those without a router."""
    return Step(name, lambda: layer(x)[0], (x, *layer.parameters()), dy, lambda *_: 0.0)


def step_record(problem: Problem, step: Step, ranks: Ranks, heap: SymmetricHeap | None = None) -> Record:
    """The record of a step: `held_*_bytes` and `peak_*_bytes`, of the rank that has most. Collective.

    Raises:
        WrongResult: its results are wrong.
    """
    error = largest_error(step.name, step.error(*step.results()), step.max_error, ranks)
    for _ in range(WARM_UP):
        step.results()
    found = {key: ranks.largest(value) for key, value in _bytes_of(step, heap, ranks.device).items()}
    figures: Record = {key: int(value) if value >= 0 else None for key, value in found.items()}
    return case_record(problem, "memory", step.name, "step", NO_TIMES, error=error, **figures) | {
        **dict.fromkeys(("ms_median", "ms_p10", "ms_p90")),
        "repetitions": 1,
    }


def _bytes_of(step: Step, heap: SymmetricHeap | None, device: torch.device) -> dict[str, int]:
    """Bytes of this rank; -1 where nobody counts: ordinary memory of CPUs."""
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    leased = heap.leased_bytes if heap else 0
    if heap:
        heap.memory.arena.high_water_bytes = leased
    y = step.forward()
    held = {
        "held_ordinary_bytes": torch.cuda.memory_allocated() - before if on_gpu else -1,
        "held_heap_bytes": heap.leased_bytes - leased if heap else 0,
    }
    gradients = step.backward(y)
    if on_gpu:
        torch.cuda.synchronize()
    del y, gradients
    return held | {
        "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else -1,
        "peak_heap_bytes": heap.high_water_bytes - leased if heap else 0,
    }
