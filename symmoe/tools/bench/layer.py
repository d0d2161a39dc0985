"""The suite "layer": a step from the router's output to y, and back to every gradient.

A step makes its plan, dispatches, runs the experts and combines; backward gives dx, dprobs and both weight gradients.
FLOPs are 6 T H I K forward and twice that backward, of the mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from symmoe.dispatch.plan import Plan
from symmoe.grouped.experts import ExpertRows, ExpertsBackward, ExpertWeights, Hidden, experts_forward
from symmoe.grouped.mlp import GroupedMLP
from symmoe.kernels.activation import Activation
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision.recipes import Recipe
from symmoe.tools.bench.cases import Case, Shape
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, case_record, gbs, median_ms, tflops
from symmoe.tools.bench.reference import MAX_ERROR, Reference
from symmoe.tools.bench.stock_torch import STOCK, stock_layer, torch_experts
from symmoe.tools.bench.timing import DIRECTIONS, Clock, Direction, Mark, Run, StreamMark, Variant, clock_for, in_steps
from symmoe.training.memory_plan import plan_memory

Forward = Callable[[], torch.Tensor]
Inputs = Sequence[torch.Tensor]  # of a step: x, probs, w1, w2 as it takes them
CEILING = "gemms alone"
_SPARE_BYTES = 64 << 20  # of a heap: alignment and fragments
_ROW_BUFFERS = 5  # combine has one, and two copies have four; the public parts' step has only four


def config_of(shape: Shape, **options: Any) -> MoEConfig:
    """The configuration of a layer of that shape."""
    sizes = {name: getattr(shape, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    return MoEConfig(**sizes, **options)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the layer."""

    static: bool = True  # a static capacity instead of an exact one
    captured: bool = False  # forward and backward in a CUDA graph that is replayed
    options: Mapping[str, Any] = field(default_factory=dict)  # of expert_parallel_mlp, and fields of MoEConfig too
    precision: Recipe | None = None  # of the experts
    max_error: float = MAX_ERROR  # of its results, relative

    def config(self, shape: Shape, capacity: int | None = None) -> MoEConfig:
        """The configuration of the layer that does the same."""
        return config_of(shape, capacity=capacity, precision=self.precision, **self.options)

    def forward(self, problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
        """The step forward."""
        x, probs, _, _ = problem.inputs
        capacity = problem.static_capacity if self.static else None
        return lambda: expert_parallel_mlp(x, probs, experts, run.plan(problem, capacity), **self.options)


SERIAL = {"schedule": "serial"}
LAYER = {
    "static": Choice(),
    "exact": Choice(static=False),
    "graph": Choice(captured=True),
    "serial": Choice(options=SERIAL),
    "serial graph": Choice(captured=True, options=SERIAL),
}


def bench_layer(problem: Problem, run: Run) -> list[Record]:
    """Eager and replayed steps, only the GEMMs, and the stock layer."""
    return bench_choices("layer", problem, run, LAYER)


def bench_choices(suite: str, problem: Problem, run: Run, choices: Mapping[str, Choice]) -> list[Record]:
    """Steps of these choices, only the GEMMs, and the stock layer. Collective."""
    reference, on_gpu, ours = Reference(problem), problem.device.type == "cuda", []
    for name, choice in choices.items():
        if choice.captured and not on_gpu:
            continue  # there are no graphs on CPUs
        make = captured_step if choice.captured else eager_step
        experts = make_experts(problem, choice.precision)
        inputs = (*problem.inputs[:2], experts.fc1.weight, experts.fc2.weight)
        forward = choice.forward(problem, run, experts)
        ours.append(make(name, problem, reference, forward, inputs, choice.max_error))
    stock = eager_step(STOCK, problem, reference, stock_forward(problem), problem.inputs)
    times, errors = run.measure([*ours, experts_alone(problem, reference), stock])
    memory = {v.name: _peak_memory(run, v) for v in ours if not v.reuses_marks}
    records = []
    for name, taken in times.items():
        for column, direction in enumerate(DIRECTIONS):
            flops = (1 + column) * problem.case.forward_flops
            figures: Record = {"tflops": tflops(flops, taken[:, column]), "error": errors[name]}
            if name in choices:
                moved = _wire_bytes(problem, run, choices[name], direction)
                precision = choices[name].precision
                figures |= {
                    "precision": "bf16" if precision is None else str(precision),
                    "ceiling_tflops": tflops(flops, times[CEILING][:, column]),
                    "stock_tflops": tflops(flops, times[STOCK][:, column]),
                    "stock_ms": median_ms(times[STOCK][:, column]),
                    "yardstick": "ceiling_tflops",
                    "wire_bytes": moved,
                    "wire_gbs": gbs(moved, taken[:, column]),
                    **memory.get(name, {}),
                }
            records.append(case_record(problem, suite, name, direction, taken[:, column], **figures))
    del ours  # ends the graphs before their memory is freed
    run.heap.release_graphs()
    return records


def heap_bytes(case: Case, num_ranks: int, num_rows: int, choices: Mapping[str, Choice] = LAYER) -> int:
    """Bytes that steps of these choices lease at one time on the busiest rank, all captured ones and one eager one.

    Args:
        num_rows: the most that any rank receives. Capacities are up to 1.2 times that, or the mean, if that is more.
    """
    rows = int(1.2 * max(num_rows, case.num_slots)) + 1

    def step_bytes(choice: Choice) -> int:
        config = choice.config(case.shape, rows)
        return plan_memory(config, num_ranks=num_ranks, num_tokens=case.num_tokens, dtype=DTYPE).heap_bytes

    # A graph's leases on one stream do not take over what was freed on another.
    captured = 2 * sum(step_bytes(choice) for choice in choices.values() if choice.captured)
    returned = (num_ranks - 1) * case.num_tokens  # sums that combine gets
    parts = (_ROW_BUFFERS * rows + returned) * case.shape.hidden * DTYPE.itemsize
    return captured + max(*map(step_bytes, choices.values()), parts) + _SPARE_BYTES


# -- steps as variants ------------------------------------------------------------------------------------------------


def make_experts(problem: Problem, precision: Recipe | None = None) -> GroupedMLP:
    """This rank's experts, over the problem's weights."""
    shape = problem.case.shape
    experts = GroupedMLP(
        problem.experts_per_rank, shape.hidden, shape.ffn, precision=precision, dtype=DTYPE, device="meta"
    )
    experts.fc1.weight = nn.Parameter(problem.w1.detach())
    experts.fc2.weight = nn.Parameter(problem.w2.detach())
    return experts


def differentiated(
    name: str,
    forward: Forward,
    inputs: Inputs,
    d_out: torch.Tensor,
    error: Callable[..., float],
    max_error: float,
) -> Variant:
    """`forward` and its backward pass from `d_out`; `error` is that of the result and of the gradients of `inputs`."""

    def call(clock: Clock) -> list[Mark]:
        marks = [clock.mark()]
        y = forward()
        marks.append(clock.mark())
        torch.autograd.grad(y, inputs, d_out)
        return [*marks, clock.mark()]

    def verify() -> float:
        y = forward()
        return error(y, *torch.autograd.grad(y, inputs, d_out))

    return Variant(name, DIRECTIONS, call, verify, max_error)


def eager_step(
    name: str, problem: Problem, reference: Reference, forward: Forward, inputs: Inputs, max_error: float = MAX_ERROR
) -> Variant:
    """`forward` and its backward pass to all inputs. Calls follow each other without a pause."""
    return differentiated(name, forward, inputs, problem.tokens.dy, reference.step_error, max_error)


def captured_step(
    name: str, problem: Problem, reference: Reference, forward: Forward, inputs: Inputs, max_error: float = MAX_ERROR
) -> Variant:
    """Same as :func:`eager_step`, but captured once and replayed. Runs the step before it captures it."""

    def backward(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, inputs, problem.tokens.dy)

    # On the current stream: a second stream would make the heap keep events in the eager steps of the same run.
    backward(forward())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # External: every replay records them anew, so that the directions can be told apart.
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
    with torch.cuda.graph(graph):
        events[0].record()
        y = forward()
        events[1].record()
        gradients = backward(y)
        events[2].record()

    def call(clock: Clock) -> list[StreamMark]:
        graph.replay()
        reached: torch.cuda.Event = clock.mark().event
        return [StreamMark(event, reached) for event in events]

    def verify() -> float:
        for tensor in (y, *gradients):
            tensor.detach().fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        return reference.step_error(y, *gradients)

    return Variant(name, DIRECTIONS, call, verify, max_error, reuses_marks=True)


def experts_alone(problem: Problem, reference: Reference) -> Variant:
    """The ceiling: the layer's own six products on the same rows, splits and weights, in its order, and nothing else.

    Rows lie in the order of the experts, also if the layer gathers them: the best that the GEMMs could do. Local.
    """
    local, num_rows = problem.local_rows, max(1, problem.num_rows)
    weights = ExpertWeights(problem.w1.detach(), None, problem.w2.detach(), None, Activation())
    received, d_out = (packed[local.row_to_packed_row] for packed in (local.packed, local.d_packed))
    rows = ExpertRows(received, local.row_range, local.row_probs)
    out = received.new_empty((num_rows, problem.case.shape.hidden))
    d_rows = torch.empty_like(out)
    kept: list[Hidden] = []

    def forward() -> None:
        kept[:] = [experts_forward(rows, weights, out, num_rows=num_rows)]

    def backward(new: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like) -> tuple[torch.Tensor, torch.Tensor]:
        dw1, dw2 = new(problem.w1), new(problem.w2)  # as large as the experts: not kept between calls
        step = ExpertsBackward(rows, weights, kept.pop(), d_out)
        step.input_gradient(d_rows)
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)
        return dw1, dw2

    def verify() -> float:
        out.fill_(torch.nan)
        d_rows.fill_(torch.nan)
        forward()
        return reference.experts_error(out, d_rows, *backward(partial(torch.full_like, fill_value=torch.nan)))

    return Variant(CEILING, DIRECTIONS, in_steps(forward, backward), verify, MAX_ERROR)


def stock_forward(problem: Problem) -> Forward:
    """The layer of stock torch parts, without a router."""
    x, probs, w1, w2 = problem.inputs
    run_experts, num_experts = torch_experts(w1, w2), problem.case.shape.num_experts
    return lambda: stock_layer(x, probs, problem.topk_idx, run_experts, num_experts, problem.num_ranks)


# -- figures ----------------------------------------------------------------------------------------------------------


def dispatch_bytes(plan: Plan, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that this rank sends to each rank, itself included."""
    return (plan.token_to_packed_row >= 0).sum(0).cpu().numpy().astype(np.int64) * row_bytes


def combine_bytes(plan: Plan, order: str, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that come to this rank from each rank in a combine, itself included."""
    if order == "rank":
        count = (plan.token_to_primary_row >= 0).sum(0)
    else:
        ranks = plan.slot_to_rank[plan.slot_to_row >= 0].long()
        count = torch.bincount(ranks, minlength=plan.heap.num_ranks)
    return count.cpu().numpy().astype(np.int64) * row_bytes


def wire_bytes(moved: npt.NDArray[np.int64], ranks: Ranks) -> int:
    """The bytes that leave a rank, from the bytes that move to or from each: the largest of all ranks. Collective."""
    return int(ranks.largest(float(moved.sum() - moved[ranks.rank])))


def _wire_bytes(problem: Problem, run: Run, choice: Choice, direction: Direction) -> int:
    """Bytes of one pass: rows that leave a rank in dispatch and arrive in combine. Collective."""
    plan, config = run.plan(problem), choice.config(problem.case.shape)
    sent = dispatch_bytes(plan, config.sent_row_bytes(direction, DTYPE.itemsize))
    received = combine_bytes(plan, config.order, problem.case.shape.hidden * DTYPE.itemsize)
    return sum(wire_bytes(each, run.ranks) for each in (sent, received))


def _peak_memory(run: Run, variant: Variant) -> dict[str, int | None]:
    """Bytes that one step takes at its peak beyond what was there before: ordinary memory of a GPU, and the heap."""
    on_gpu, heap = run.ranks.device.type == "cuda", run.heap
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    leased = heap.leased_bytes
    heap.memory.arena.high_water_bytes = leased
    variant.call(clock_for(run.ranks.device))
    if on_gpu:
        torch.cuda.synchronize()
    return {
        "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
        "peak_heap_bytes": heap.high_water_bytes - leased,
    }
