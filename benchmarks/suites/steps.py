"""The suite "steps": whole steps as a training loop runs them, each kind following itself.

(Where variants run in turn, the host of a fast one runs ahead while a slow one keeps the GPU busy, and launches do not
show.) A step is forward and backward, to the gradients of x and of all parameters, which are not added to earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from suites.cases import Case
from suites.figures import of_step
from suites.problem import DTYPE, MAX_ERROR, Problem
from suites.records import Record, case_record, tflops
from suites.reference import Reference
from suites.stock_torch import STOCK, stock_layer, torch_experts
from suites.timing import DIRECTIONS, Clock, Mark, Run, Variant, in_steps, largest_error, plan_of
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig, RouterConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.precision.recipes import Recipe
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import Ranks, times_in_a_row_ms
from symmoe.tools.shapes import Shape, config_of
from symmoe.training.memory_plan import plan_memory

Forward = Callable[[], Any]
_SPARE_BYTES = 64 << 20  # of a heap: alignment and fragments
_ROW_BUFFERS = 5  # combine has one, and two copies have four; the public parts' step has only four


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of the layer's options."""

    static: bool = True  # a static capacity instead of an exact one
    captured: bool = False  # forward and backward in a CUDA graph that is replayed
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of MoEConfig
    precision: Recipe | None = None  # of the experts
    apart: bool = (
        False  # measured after the others, by itself: it keeps as much memory as the weights take
    )
    block: Callable[[GroupedMLP], AbstractContextManager[object]] = (
        nullcontext  # in which it is measured
    )
    max_error: float = MAX_ERROR  # of its results, relative

    def config(self, shape: Shape, capacity: int | None = None) -> MoEConfig:
        """The configuration of the layer with these options."""
        return config_of(shape, capacity=capacity, precision=self.precision, **self.options)

    def forward(self, problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
        """The step forward, from the router's output."""
        x, probs, _, _ = problem.inputs
        capacity = problem.static_capacity if self.static else None
        return lambda: expert_parallel_mlp(
            x, probs, experts, plan_of(run, problem, capacity), **self.options
        )


LAYERS = {  # the whole MoELayer with its router
    "layer": Choice(static=False),
    "layer, losses": Choice(
        static=False, options={"router": RouterConfig(aux_loss_coef=1e-2, z_loss_coef=1e-3)}
    ),
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
        sizes = {"num_ranks": num_ranks, "num_tokens": case.num_tokens, "dtype": DTYPE}
        return plan_memory(choice.config(case.shape, rows), **sizes).heap_bytes

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


@dataclass(frozen=True)
class Step:
    """`forward`, whose result may have several parts, and its backward pass from `d_out` to the gradients of `inputs`;
    `error` is that of the result and of the gradients. Calls follow each other without a pause."""

    name: str
    forward: Forward
    inputs: Sequence[torch.Tensor]
    d_out: torch.Tensor | tuple[torch.Tensor, ...]
    error: Callable[..., float]
    max_error: float = MAX_ERROR

    def backward(self, y: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, self.inputs, self.d_out)

    def results(self) -> tuple[Any, ...]:
        """The result and the gradients."""
        y = self.forward()
        return (y, *self.backward(y))

    def eager(self) -> Variant:
        """The step, launched eagerly."""
        saved = list[Any]()
        call = in_steps(lambda: saved.append(self.forward()), lambda: self.backward(saved.pop()))
        return Variant(
            self.name, DIRECTIONS, call, lambda: self.error(*self.results()), self.max_error
        )

    def captured(self) -> Variant:
        """The step as a replayed CUDA graph. Runs it eagerly before the capture."""
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
            for tensor in tree_leaves((y, gradients)):
                tensor.detach().fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            return self.error(y, *gradients)

        return Variant(self.name, DIRECTIONS, call, verify, self.max_error, reuses_marks=True)


def stock_step(problem: Problem, reference: Reference) -> Step:
    """The layer of stock torch parts, without a router."""
    x, probs, w1, w2 = problem.inputs
    sizes = problem.case.shape.num_experts, problem.num_ranks
    run_experts = torch_experts(w1, w2)

    def forward() -> torch.Tensor:
        return stock_layer(x, probs, problem.topk_idx, run_experts, *sizes)

    return Step(STOCK, forward, problem.inputs, problem.tokens.dy, reference.step_error)


def bench_steps(problem: Problem, run: Run) -> list[Record]:
    """Steps of the layer and of its experts, eager and replayed, and of the stock layer. Collective."""
    reference = Reference(problem)
    errors = dict[str, float]()
    calls: dict[str, Callable[[], object]] = {}
    for name, choice in (LAYERS | EXPERTS | {STOCK: Choice()}).items():
        if choice.captured and problem.device.type != "cuda":  # there are no graphs on CPUs
            continue
        step = (
            stock_step(problem, reference)
            if name == STOCK
            else layer_step(name, choice, problem, run.heap, reference, routes=name in LAYERS)
        )
        errors[name] = step_error(step, run.ranks)
        calls[name] = step.captured().once if choice.captured else step.results
    records = records_of(problem, run, calls, errors)
    calls.clear()  # ends the graphs before their memory is freed
    run.heap.release_graphs()
    return records


def records_of(
    problem: Problem,
    run: Run,
    calls: Mapping[str, Callable[[], object]],
    errors: Mapping[str, float],
) -> list[Record]:
    """Times steps in a row, and returns a record of each. Collective."""
    times = times_in_a_row_ms(calls, run.ranks, run.repetitions)
    speeds = {name: tflops(3 * problem.case.forward_flops, ms) for name, ms in times.items()}
    records = []
    for name, call in calls.items():
        figures: Record = {"tflops": speeds[name], "error": errors[name]}
        if name != STOCK and STOCK in times:
            figures |= {"stock_tflops": speeds[STOCK], "yardstick": "stock_tflops"}
        figures |= of_step(call, problem, run.ranks)
        records.append(case_record(problem, "steps", name, "step", times[name], **figures))
    return records


def step_error(step: Step, ranks: Ranks) -> float:
    """The largest error of any rank. Collective. Raises WrongResult if it is too large."""
    return largest_error(step.name, step.error(*step.results()), step.max_error, ranks)


def layer_step(
    name: str,
    choice: Choice,
    problem: Problem,
    heap: SymmetricHeap,
    reference: Reference,
    *,
    routes: bool = True,
) -> Step:
    """A step of a layer, whose own router decides where tokens go, or only of its experts, with the case's routing.
    Checked are the experts."""
    capacity = problem.static_capacity if choice.static else None
    num_slots = problem.case.num_slots
    if (
        capacity is not None and routes
    ):  # the layer's own router decides, whatever the case's skew is
        capacity = max(capacity, num_slots + 8 * math.isqrt(num_slots))
    config = choice.config(problem.case.shape, capacity)
    layer = MoELayer(config, heap, experts=make_experts(problem, config.precision), dtype=DTYPE)
    experts = RoutedExperts.of(config, heap, layer.experts)
    x, dy, probs = problem.tokens

    def run_experts() -> torch.Tensor:
        return experts.run(x, probs, problem.topk_idx, layer.experts)[0]

    inputs = (x, probs, layer.experts.fc1.weight, layer.experts.fc2.weight)
    routed = Step(name, run_experts, inputs, dy, reference.step_error)
    if not routes:
        return routed

    def forward() -> tuple[torch.Tensor, ...]:
        y, metrics = layer(x)
        return (y, metrics.aux_loss) if config.router.aux_loss_coef else (y,)

    d_out = (dy, torch.ones((), device=heap.device))[: 2 if config.router.aux_loss_coef else 1]
    return Step(
        name,
        forward,
        (x, *layer.parameters()),
        d_out,
        lambda *_: reference.step_error(*routed.results()),
    )
