"""The suite "layer": a step from the router's output to y, and back to every gradient.

A step makes its plan, dispatches, runs the experts and combines; backward gives dx, dprobs and both weight gradients.
FLOPs are 6 T H I K forward and twice that backward, of the mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from suites import steps
from suites.problem import MAX_ERROR, Problem, row_error
from suites.records import Record, case_record, tflops
from suites.reference import Reference
from suites.rows import all_tokens, rows_of
from suites.steps import make_experts, stock_forward
from suites.stock_torch import STOCK
from suites.timing import (
    DIRECTIONS,
    Clock,
    Mark,
    Run,
    Variant,
    in_steps,
    largest,
    measure,
    median_ms,
    plan_of,
)
from symmoe.grouped.experts import ExpertsBackward, ExpertWeights, Hidden
from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.rows_function import ExpertRows
from symmoe.grouped.weights import LayerWeights
from symmoe.kernels.activation import Activation
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision.recipes import Recipe
from symmoe.tools.shapes import Shape, config_of

Forward = Callable[[], torch.Tensor]
CEILING = "gemms alone"


@dataclass(frozen=True, kw_only=True)
class Choice(steps.Choice):
    """One way to run the layer."""

    precision: Recipe | None = None  # of the experts
    apart: bool = (
        False  # measured after the others, by itself: it keeps as much memory as the weights take
    )
    block: Callable[[GroupedMLP], AbstractContextManager[object]] = (
        nullcontext  # in which it is measured
    )
    max_error: float = MAX_ERROR  # of its results, relative

    def config(self, shape: Shape, capacity: int | None = None) -> MoEConfig:
        return config_of(shape, capacity=capacity, precision=self.precision, **self.options)

    def forward(self, problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
        """The step forward."""
        x, probs, _, _ = problem.inputs
        capacity = problem.static_capacity if self.static else None
        return lambda: expert_parallel_mlp(
            x, probs, experts, plan_of(run, problem, capacity), **self.options
        )


SERIAL = {"schedule": "serial"}
LAYER = {
    "static": Choice(),
    "exact": Choice(static=False),
    "graph": Choice(captured=True),
    "serial": Choice(options=SERIAL),
    "serial graph": Choice(captured=True, options=SERIAL),
}
# More figures of a choice: (forward's, backward's), from what runs it. Collective.
Figures = Callable[[Problem, Run, Choice, Variant], Sequence[Record]]


def bench_layer(
    problem: Problem,
    run: Run,
    choices: Mapping[str, Choice] = LAYER,
    suite: str = "layer",
    more: Figures = lambda *_: ({}, {}),
) -> list[Record]:
    """Eager and replayed steps of these choices, only the GEMMs, and the stock layer. Collective."""
    reference, on_gpu, records = Reference(problem), problem.device.type == "cuda", list[Record]()
    possible = {
        name: choice for name, choice in choices.items() if on_gpu or not choice.captured
    }  # no graphs on CPUs
    together = [name for name, choice in possible.items() if not choice.apart]
    times, errors, figures_of = dict[str, Any](), dict[str, float](), dict[str, Sequence[Record]]()
    for names in (together, *([name] for name, choice in possible.items() if choice.apart)):
        yardsticks = (
            [experts_only(problem, reference), stock_step(problem, reference).eager()]
            if not times
            else []
        )
        with ExitStack() as blocks:
            ours = {
                name: _variant(name, possible[name], problem, run, reference, blocks)
                for name in names
            }
            measured = measure(run, [*ours.values(), *yardsticks])
            figures_of |= {
                name: more(problem, run, possible[name], variant) for name, variant in ours.items()
            }
            times, errors = times | measured[0], errors | measured[1]
        ours.clear()  # ends the graphs before their memory is freed
        run.heap.release_graphs()
    for name, taken in times.items():
        for column, direction in enumerate(DIRECTIONS):
            flops = (1 + column) * problem.case.forward_flops
            figures: Record = {"tflops": tflops(flops, taken[:, column]), "error": errors[name]}
            if name in figures_of:
                precision = choices[name].precision
                figures |= {
                    "precision": "bf16" if precision is None else str(precision),
                    "ceiling_tflops": tflops(flops, times[CEILING][:, column]),
                    "stock_tflops": tflops(flops, times[STOCK][:, column]),
                    "stock_ms": median_ms(times[STOCK][:, column]),
                    "yardstick": "ceiling_tflops",
                    **figures_of[name][column],
                }
            records.append(
                case_record(problem, suite, name, direction, taken[:, column], **figures)
            )
    return records


def _variant(
    name: str, choice: Choice, problem: Problem, run: Run, reference: Reference, blocks: ExitStack
) -> Variant:
    experts = make_experts(problem, choice.precision)
    blocks.enter_context(choice.block(experts))
    forward = choice.forward(problem, run, experts)
    inputs = (*problem.inputs[:2], experts.fc1.weight, experts.fc2.weight)
    step = Step(name, forward, inputs, problem.tokens.dy, reference.step_error, choice.max_error)
    return step.captured() if choice.captured else step.eager()


@dataclass(frozen=True)
class Step:
    """`forward` and its backward pass from `d_out` to the gradients of `inputs`; `error` is that of the result and of
    the gradients. Calls follow each other without a pause."""

    name: str
    forward: Forward
    inputs: Sequence[torch.Tensor]
    d_out: torch.Tensor
    error: Callable[..., float]
    max_error: float = MAX_ERROR

    def backward(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, self.inputs, self.d_out)

    def results(self) -> tuple[torch.Tensor, ...]:
        """What it gives: the result, and the gradients."""
        y = self.forward()
        return (y, *self.backward(y))

    def eager(self) -> Variant:
        """The step as the host launches it."""
        kept = list[torch.Tensor]()
        call = in_steps(lambda: kept.append(self.forward()), lambda: self.backward(kept.pop()))
        return Variant(
            self.name, DIRECTIONS, call, lambda: self.error(*self.results()), self.max_error
        )

    def captured(self) -> Variant:
        """Captured once and replayed. Runs the step before it captures it."""
        # On the current stream: a second stream would make the heap keep events in the eager steps of the same run.
        self.results()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # External: every replay records them anew, so that the directions can be told apart.
        events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
        with torch.cuda.graph(graph):
            events[0].record()
            y = self.forward()
            events[1].record()
            gradients = self.backward(y)
            events[2].record()

        def call(clock: Clock) -> list[Mark]:
            graph.replay()
            # The host cannot wait for an event of the graph: until the replay gets there, it is that of the last one.
            return [*events, clock()]

        def verify() -> float:
            for tensor in (y, *gradients):
                tensor.detach().fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            return self.error(y, *gradients)

        return Variant(self.name, DIRECTIONS, call, verify, self.max_error, reuses_marks=True)


def experts_only(problem: Problem, reference: Reference) -> Variant:
    """The ceiling: the layer's own six products on the same rows, splits and weights, in its order, and nothing else.

    Rows lie in the order of the experts, also if the layer gathers them: the best that the GEMMs could do. Local.
    """
    num_rows, splits = max(1, problem.num_rows), problem.routing.splits[problem.rank]
    token, slot = (index.to(problem.device) for index in rows_of(problem.routing, problem.rank))
    row_range = torch.stack((splits.cumsum(0) - splits, splits.cumsum(0))).int().to(problem.device)
    received, d_out, probs = all_tokens(problem)
    fc1, fc2 = LayerWeights(problem.w1.detach()), LayerWeights(problem.w2.detach())
    weights = ExpertWeights(fc1, fc2, Activation())
    rows = ExpertRows(received[token], row_range, probs.reshape(-1)[slot])
    d_out, kept = d_out[token], list[Hidden]()
    out = received.new_empty((num_rows, problem.case.shape.hidden))
    d_rows = torch.empty_like(out)

    def forward() -> None:
        hidden, a = weights.first_layer(rows, num_rows=num_rows)
        weights.second_layer(a, rows, out)
        kept[:] = [hidden]

    def backward(
        new: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dw1, dw2 = (
            new(problem.w1),
            new(problem.w2),
        )  # as large as the experts: not kept between calls
        step = ExpertsBackward(rows, weights, kept.pop(), d_out)
        step.input_gradient(d_rows)
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)
        return dw1, dw2

    def verify() -> float:
        out.fill_(torch.nan)
        d_rows.fill_(torch.nan)
        forward()
        return experts_error(
            reference, out, d_rows, *backward(partial(torch.full_like, fill_value=torch.nan))
        )

    return Variant(CEILING, DIRECTIONS, in_steps(forward, backward), verify, MAX_ERROR)


def experts_error(
    reference: Reference,
    out: torch.Tensor,
    d_rows: torch.Tensor,
    dw1: torch.Tensor,
    dw2: torch.Tensor,
) -> float:
    """The largest relative error of the experts' results: of rows before they are summed, and of any dw."""
    pairs = [
        pair
        for e in reference.experts
        for pair in ((out[e.rows], e.out), (d_rows[e.rows], e.d_rows))
    ]
    return largest([*(row_error(*pair) for pair in pairs), reference.weight_error(dw1, dw2)])


def stock_step(problem: Problem, reference: Reference) -> Step:
    """The layer of stock torch parts, without a router."""
    return Step(
        STOCK, stock_forward(problem), problem.inputs, problem.tokens.dy, reference.step_error
    )
