"""The suite "memory": what a step keeps from its forward to its backward pass, and takes at its peak.

Of the whole layer, as it is by default and with packed rows, and of the stock layer, which has no router. Bytes beyond
what was there before the step: weights, x and dy are not among them; y and all gradients are.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from suites.figures import MemoryMeter
from suites.layer import Step, stock_step
from suites.problem import DTYPE, Problem
from suites.records import Record, case_record
from suites.reference import Reference
from suites.steps import make_experts
from suites.timing import Run, largest_error
from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import Ranks
from symmoe.tools.shapes import config_of
from symmoe.tools.timing import WARM_UP

_LAYERS = {"layer": "auto", "layer, packed": "packed"}  # by name, the layout


def bench_memory(problem: Problem, run: Run) -> list[Record]:
    """One record for each kind of step, with exact capacity. Collective."""
    reference = Reference(problem)
    steps = [_layer_step(name, layout, problem, run, reference) for name, layout in _LAYERS.items()]
    return [
        step_record(problem, step, run.ranks, run.heap)
        for step in (*steps, stock_step(problem, reference))
    ]


def _layer_step(name: str, layout: str, problem: Problem, run: Run, reference: Reference) -> Step:
    """A step of a layer. Its own router decides where tokens go: checked are its experts, with the case's routing."""
    config = config_of(problem.case.shape, layout=layout)
    layer = MoELayer(config, run.heap, experts=make_experts(problem), dtype=DTYPE)
    routed = RoutedExperts.of(config, run.heap, layer.experts)
    x, probs, dy = problem.tokens.x, problem.tokens.probs, problem.tokens.dy
    weights = layer.experts.fc1.weight, layer.experts.fc2.weight

    def error(*_: torch.Tensor) -> float:
        y = routed.run(x, probs, problem.topk_idx, layer.experts)[0]
        return reference.step_error(y, *torch.autograd.grad(y, (x, probs, *weights), dy))

    return Step(name, lambda: layer(x)[0], (x, *layer.parameters()), dy, error)


def step_record(
    problem: Problem, step: Step, ranks: Ranks, heap: SymmetricHeap | None = None
) -> Record:
    """The record of a step: `held_*_bytes` and `peak_*_bytes`, of the rank that has most. Collective.

    Raises:
        WrongResult: its results are wrong.
    """
    error = largest_error(step.name, step.error(*step.results()), step.max_error, ranks)
    for _ in range(WARM_UP):
        step.results()
    gc.collect()
    meter = MemoryMeter(ranks.device, heap)
    y = step.forward()
    figures = meter.held()
    gradients = step.backward(y)
    figures |= meter.peak()
    del y, gradients
    most: Record = {
        key: None if value is None else int(ranks.largest(value)) for key, value in figures.items()
    }
    return case_record(
        problem, "memory", step.name, "step", np.empty(0), error=error, repetitions=1, **most
    )
