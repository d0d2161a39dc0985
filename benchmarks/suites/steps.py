"""The suite "steps": whole steps as a training loop runs them, each kind following itself.

(Where variants run in turn, the host of a fast one runs ahead while a slow one keeps the GPU busy, and launches do not
show.) A step is forward and backward, to the gradients of x and of all parameters, which are not added to earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from suites.cases import Case
from suites.problem import DTYPE, MAX_ERROR, Problem, relative_error, row_error
from suites.records import Record, case_record, tflops
from suites.stock_torch import STOCK, stock_layer, torch_experts
from suites.timing import Run, largest_error
from suites.traced import of_step
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig
from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.precision.recipes import Recipe
from symmoe.tools.shapes import Shape, config_of
from symmoe.tools.timing import Step, times_in_a_row_ms
from symmoe.training.memory_plan import plan_memory

_SPARE_BYTES = 64 << 20  # of a heap: alignment and fragments
_ROW_BUFFERS = 5  # combine has one, and two copies have four; the public parts' step has only four


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the layer."""

    static: bool = True  # a static capacity instead of an exact one
    captured: bool = False  # forward and backward in a CUDA graph that is replayed
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of MoEConfig

    def config(self, shape: Shape, capacity: int | None = None) -> MoEConfig:
        """The configuration of the layer that does the same."""
        return config_of(shape, capacity=capacity, **self.options)


LAYERS = {  # the whole MoELayer with its router
    "layer": Choice(static=False),
    "layer, losses": Choice(static=False, options={"aux_loss_coef": 1e-2, "z_loss_coef": 1e-3}),
    "layer, static": Choice(),
    "layer, graph": Choice(captured=True),
}
EXPERTS = {  # plan, dispatch, experts and combine
    "experts": Choice(static=False),
    "experts, static": Choice(),
    "experts, graph": Choice(captured=True),
}


def heap_bytes(
    case: Case, num_ranks: int, num_rows: int, choices: Mapping[str, Choice] = LAYERS | EXPERTS
) -> int:
    """Bytes that steps of these choices lease at one time on the busiest rank: all captured ones, and one eager one.
    num_rows: the most that any rank receives; capacities are up to 1.2 times that, or the mean, if that is more."""
    rows = int(1.2 * max(num_rows, case.num_slots)) + 1

    def step_bytes(choice: Choice) -> int:
        config = choice.config(case.shape, rows)
        return plan_memory(
            config, num_ranks=num_ranks, num_tokens=case.num_tokens, dtype=DTYPE
        ).heap_bytes

    # A graph's leases on one stream do not take over what was freed on another.
    captured = 2 * sum(step_bytes(choice) for choice in choices.values() if choice.captured)
    returned = (num_ranks - 1) * case.num_tokens  # sums that combine gets
    parts = (_ROW_BUFFERS * rows + returned) * case.shape.hidden * DTYPE.itemsize
    return captured + max(*map(step_bytes, choices.values()), parts) + _SPARE_BYTES


def make_experts(problem: Problem, precision: Recipe | None = None) -> GroupedMLP:
    """This rank's experts, over the problem's weights."""
    sizes = problem.experts_per_rank, problem.case.shape.hidden, problem.case.shape.ffn
    experts = GroupedMLP(*sizes, precision=precision, dtype=DTYPE, device="meta")
    experts.fc1.weight, experts.fc2.weight = (
        nn.Parameter(w.detach()) for w in (problem.w1, problem.w2)
    )
    return experts


def stock_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """The layer of stock torch parts, without a router."""
    x, probs, w1, w2 = problem.inputs
    run_experts, num_experts = torch_experts(w1, w2), problem.case.shape.num_experts
    return lambda: stock_layer(
        x, probs, problem.topk_idx, run_experts, num_experts, problem.num_ranks
    )


def bench_steps(problem: Problem, run: Run) -> list[Record]:
    """Steps of the layer and of its experts, eager and replayed, and of the stock layer. Collective."""
    steps, errors, choices = dict[str, Step](), {STOCK: 0.0}, LAYERS | EXPERTS
    stock_y = stock_forward(problem)

    def stock() -> tuple[torch.Tensor, ...]:
        y = stock_y()
        return (y, *torch.autograd.grad(y, problem.inputs, problem.tokens.dy))

    expected = stock()
    for name, choice in choices.items():
        if problem.device.type == "cuda" or not choice.captured:  # there are no graphs on CPUs
            steps[name], checked = _make(choice, problem, run, routes=name in LAYERS)
            errors[name] = largest_error(
                name, _difference(problem, checked(), expected), MAX_ERROR, run.ranks
            )
    del expected
    steps = {
        name: _captured(step) if choices[name].captured else step for name, step in steps.items()
    } | {STOCK: stock}
    times = times_in_a_row_ms(steps, run.ranks, run.repetitions)
    flops, records = 3 * problem.case.forward_flops, []
    for name, step in steps.items():
        figures: Record = {"tflops": tflops(flops, times[name]), "error": errors[name]}
        if name != STOCK:
            figures |= {"stock_tflops": tflops(flops, times[STOCK]), "yardstick": "stock_tflops"}
        figures |= of_step(step, problem, run.ranks)
        records.append(case_record(problem, "steps", name, "step", times[name], **figures))
    steps.clear()  # ends the graphs before their memory is freed
    run.heap.release_graphs()
    return records


def _make(
    choice: Choice, problem: Problem, run: Run, *, routes: bool
) -> tuple[Step, Callable[[], tuple[torch.Tensor, ...]]]:
    """The step, and one of the same experts whose results can be compared with those of stock torch."""
    capacity, num_slots = problem.static_capacity if choice.static else None, problem.case.num_slots
    if (
        capacity is not None and routes
    ):  # the layer's own router decides, whatever the case's skew is
        capacity = max(capacity, num_slots + 8 * math.isqrt(num_slots))
    config = choice.config(problem.case.shape, capacity)
    layer = MoELayer(config, run.heap, experts=make_experts(problem), dtype=DTYPE)
    experts = RoutedExperts.of(config, run.heap, layer.experts)
    x, probs, dy = problem.tokens.x, problem.tokens.probs, problem.tokens.dy
    weights = layer.experts.fc1.weight, layer.experts.fc2.weight

    def routed() -> tuple[torch.Tensor, ...]:
        y, *_ = experts.run(x, probs, problem.topk_idx, layer.experts)
        return (y, *torch.autograd.grad(y, (x, probs, *weights), dy))

    def whole() -> tuple[torch.Tensor, ...]:
        y, metrics = layer(x)
        more = [metrics.aux_loss] if config.aux_loss_coef else []
        return torch.autograd.grad(
            (y, *more), (x, *layer.parameters()), (dy, *map(torch.ones_like, more))
        )

    return whole if routes else routed, routed


def _difference(
    problem: Problem, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> float:
    """The largest relative error of a step's results, to those of stock torch, which shares nothing with it: of any row
    of y and dx, of dprobs, and of the gradients of the busiest and of the last expert's weights."""
    splits = problem.routing.splits[problem.rank]
    pairs = list(zip(results, expected, strict=True))
    some = [(ours[e], stock[e]) for ours, stock in pairs[3:] for e in (int(splits.argmax()), -1)]
    errors = [
        *(row_error(*pair) for pair in pairs[:2]),
        *(relative_error(*pair) for pair in (pairs[2], *some)),
    ]
    return float(np.max(errors))  # NaN if any is


def _captured(step: Step) -> Step:
    """A step that replays a graph."""
    step()  # compiles its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> object:
        graph.replay()
        return step, results  # as long as the graph, what it reads and writes lives too

    return replay
