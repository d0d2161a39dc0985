"""The suite "memory": what a step keeps from its forward to its backward pass, and takes at its peak.

Of the whole layer, as it is by default and with packed rows, and of the stock layer, which has no router. Bytes beyond
what was there before the step: weights, x and dy are not among them; y and all gradients are.
"""

from __future__ import annotations

import gc

import numpy as np

from suites.figures import MemoryMeter
from suites.problem import Problem
from suites.records import Record, case_record
from suites.reference import Reference
from suites.steps import Choice, Step, layer_step, step_error, stock_step
from suites.timing import Run
from symmoe.tools.ranks import WARM_UP

_LAYERS = {
    "layer": Choice(static=False),
    "layer, packed": Choice(static=False, options={"layout": "packed"}),
}


def bench_memory(problem: Problem, run: Run) -> list[Record]:
    """One record for each kind of step, with exact capacity. Collective."""
    reference = Reference(problem)
    steps = [
        layer_step(name, choice, problem, run.heap, reference) for name, choice in _LAYERS.items()
    ]
    return [step_record(problem, step, run) for step in (*steps, stock_step(problem, reference))]


def step_record(problem: Problem, step: Step, run: Run) -> Record:
    """The record of a step: `held_*_bytes` and `peak_*_bytes`, of the rank that has most. Collective.

    Raises:
        WrongResult: its results are wrong.
    """
    error = step_error(step, run.ranks)
    for _ in range(WARM_UP):
        step.results()
    gc.collect()
    meter = MemoryMeter(run.ranks.device, run.heap)
    y = step.forward()
    figures = meter.held()
    gradients = step.backward(y)
    figures |= meter.peak()
    del y, gradients
    peak_record: Record = {
        key: None if value is None else int(run.ranks.largest(value))
        for key, value in figures.items()
    }
    return case_record(
        problem, "memory", step.name, "step", np.empty(0), error=error, repetitions=1, **peak_record
    )
