"""The suites "layer", "variants" and "precision": a step from the router's output to y, and back to every gradient.

A step makes its plan, dispatches, runs the experts and combines; backward gives dx, dprobs and both weight gradients.
FLOPs are 6 T H I K forward and twice that backward, of the mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from symmoe.dispatch.plan import Plan
from symmoe.grouped.constant_weights import constant_weights
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision.recipes import Float8Block, Recipe
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.tools.bench.cases import Shape
from symmoe.tools.bench.experts_alone import experts_alone
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.records import Record, gbs, median_ms, tflops
from symmoe.tools.bench.reference import E4M3_ERROR, MAX_ERROR, Reference
from symmoe.tools.bench.run import Run, case_record
from symmoe.tools.bench.steps import Forward, Inputs, captured_step, eager_step
from symmoe.tools.bench.stock_torch import STOCK, stock_layer, torch_experts
from symmoe.tools.bench.timing import DIRECTIONS, Direction, Variant, clock_for
from symmoe.tools.bench.traffic import combine_bytes, dispatch_bytes, wire_bytes
from symmoe.training.precision_choice import AUTO, choose_precision

PartsOf = Callable[[Problem, Run, GroupedMLP], Forward]
CEILING = "gemms alone"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the layer.

    Attributes:
        static: a static capacity instead of an exact one.
        captured: forward and backward in a CUDA graph that is replayed.
        options: keyword arguments of expert_parallel_mlp, which are fields of MoEConfig too.
        precision: precision of the experts.
        max_error: largest relative error of its results.
        picks_precision: whether choose_precision decides on the precision.
        constant_weights: whether weights are quantised once, before the timed calls.
    """

    static: bool = True
    captured: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: Recipe | None = None
    max_error: float = MAX_ERROR
    picks_precision: bool = False
    constant_weights: bool = False

    def picked(self, problem: Problem) -> Choice:
        """This choice, after choose_precision if it picks its precision."""
        if not self.picks_precision:
            return self
        case = problem.case
        numbers = {"num_ranks": problem.num_ranks, "num_tokens": case.num_tokens}
        config = choose_precision(self.config(case.shape), **numbers, device=problem.device)
        options = {**self.options, "quantized_wire": config.quantized_wire}
        max_error = MAX_ERROR if config.precision is None else self.max_error
        return replace(self, precision=config.precision, options=options, max_error=max_error)

    def config(self, shape: Shape, capacity: int | None = None) -> MoEConfig:
        """The configuration of the layer that does the same."""
        return MoEConfig(
            hidden=shape.hidden,
            ffn=shape.ffn,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            capacity=capacity,
            precision=self.precision,
            **self.options,
        )


SERIAL = {"schedule": "serial"}
LAYER = {
    "static": Choice(),
    "exact": Choice(static=False),
    "graph": Choice(captured=True),
    "serial": Choice(options=SERIAL),
    "serial graph": Choice(captured=True, options=SERIAL),
}
VARIANTS = {
    **LAYER,
    "order=slot": Choice(options={"order": "slot"}),
    "stash=rows": Choice(options={"stash": "rows"}),
    "stash=hidden": Choice(options={"stash": "hidden"}),
    "stash=none": Choice(options={"stash": "none"}),
    "packed": Choice(options={"layout": "packed"}),
    "expert-major": Choice(options={"layout": "expert-major"}),
    "serial packed": Choice(options={"layout": "packed", **SERIAL}),
    "serial expert-major": Choice(options={"layout": "expert-major", **SERIAL}),
}
_WIRE = {"quantized_wire": "both"}
PRECISION = {
    "static": Choice(),
    "graph": Choice(captured=True),
    "float8-block": Choice(precision=Float8Block(), max_error=E4M3_ERROR),
    "float8-block, wire": Choice(precision=Float8Block(), options=_WIRE, max_error=E4M3_ERROR),
    "float8-block, wire, graph": Choice(captured=True, precision=Float8Block(), options=_WIRE, max_error=E4M3_ERROR),
    "float8-block, wire, constant weights": Choice(
        precision=Float8Block(), options=_WIRE, max_error=E4M3_ERROR, constant_weights=True
    ),
    AUTO: Choice(precision=Float8Block(), options=_WIRE, max_error=E4M3_ERROR, picks_precision=True),
}


def bench_layer(problem: Problem, run: Run) -> list[Record]:
    """Eager and replayed steps, only the GEMMs, and the stock layer."""
    return _bench("layer", problem, run, LAYER, {})


def bench_variants(problem: Problem, run: Run) -> list[Record]:
    """The layer's choices, and the public parts with buffers of the caller."""
    return _bench("variants", problem, run, VARIANTS, {"public parts": _public_parts})


def bench_precision(problem: Problem, run: Run) -> list[Record]:
    """FP8 steps and bf16 steps. A graph holds gradients of all experts and their weights in FP8: each is measured after
    the eager steps, beside the yardsticks, so that large layers fit."""
    eager = {name: choice for name, choice in PRECISION.items() if not choice.captured}
    records = _bench("precision", problem, run, eager, {})
    graphs = [name for name in PRECISION if name not in eager and problem.device.type == "cuda"]
    for name in graphs:
        of_graph = _bench("precision", problem, run, {name: PRECISION[name]}, {})
        records += [record for record in of_graph if record["variant"] == name]
    return records


def _bench(
    suite: str, problem: Problem, run: Run, choices: Mapping[str, Choice], parts: Mapping[str, PartsOf]
) -> list[Record]:
    choices = {name: choice.picked(problem) for name, choice in choices.items()}
    with ExitStack() as blocks:
        return _bench_choices(suite, problem, run, choices, parts, blocks)


def _bench_choices(
    suite: str,
    problem: Problem,
    run: Run,
    choices: Mapping[str, Choice],
    parts: Mapping[str, PartsOf],
    blocks: ExitStack,
) -> list[Record]:
    reference, ours = Reference(problem), []
    for name, choice in choices.items():
        if choice.captured and problem.device.type != "cuda":
            continue  # there are no graphs on CPUs
        make = captured_step if choice.captured else eager_step
        experts = make_experts(problem, choice.precision)
        if choice.constant_weights:
            blocks.enter_context(constant_weights(experts))
        forward, inputs = _fused(problem, run, experts, choice), _inputs(problem, experts)
        ours.append(make(name, problem, reference, forward, inputs, choice.max_error))
    for name, of_parts in parts.items():
        experts = make_experts(problem)
        ours.append(eager_step(name, problem, reference, of_parts(problem, run, experts), _inputs(problem, experts)))
    times, errors = run.measure([*ours, experts_alone(CEILING, problem, reference), stock_step(problem, reference)])
    memory = {v.name: _peak_memory(run, v) for v in ours if not v.reuses_marks}
    records = []
    for name, taken in times.items():
        for column, direction in enumerate(DIRECTIONS):
            flops = (1 + column) * problem.case.forward_flops
            figures: Record = {"tflops": tflops(flops, taken[:, column]), "error": errors[name]}
            if name not in (CEILING, STOCK):
                choice = choices.get(name, Choice())
                moved = _wire_bytes(problem, run, choice, direction)
                figures |= {
                    "precision": "bf16" if choice.precision is None else str(choice.precision),
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


def _inputs(problem: Problem, experts: GroupedMLP) -> Inputs:
    return (*problem.inputs[:2], experts.fc1.weight, experts.fc2.weight)


def make_experts(problem: Problem, precision: Recipe | None = None) -> GroupedMLP:
    """This rank's experts, over the problem's weights."""
    shape = problem.case.shape
    experts = GroupedMLP(
        problem.experts_per_rank, shape.hidden, shape.ffn, precision=precision, dtype=DTYPE, device="meta"
    )
    experts.fc1.weight = nn.Parameter(problem.w1.detach())
    experts.fc2.weight = nn.Parameter(problem.w2.detach())
    return experts


def stock_step(problem: Problem, reference: Reference) -> Variant:
    """The layer of stock torch parts."""
    x, probs, w1, w2 = problem.inputs
    run_experts, num_experts = torch_experts(w1, w2), problem.case.shape.num_experts

    def forward() -> torch.Tensor:
        return stock_layer(x, probs, problem.topk_idx, run_experts, num_experts, problem.num_ranks)

    return eager_step(STOCK, problem, reference, forward, problem.inputs)


def _fused(problem: Problem, run: Run, experts: GroupedMLP, choice: Choice) -> Forward:
    x, probs, _, _ = problem.inputs
    capacity = problem.static_capacity if choice.static else None
    return lambda: expert_parallel_mlp(x, probs, experts, run.plan(problem, capacity), **choice.options)


def _public_parts(problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
    """dispatch_tokens, GroupedMLP and combine_tokens: rows arrive one per slot, in the order of the experts."""
    x, probs, _, _ = problem.inputs

    def buffer(plan: Plan, name: str) -> torch.Tensor:
        return run.heap.lease((plan.row_capacity, x.shape[1]), x.dtype, name=name).tensor

    def forward() -> torch.Tensor:
        plan = run.plan(problem, problem.static_capacity)
        received, out, d_out, d_rows = (buffer(plan, name) for name in ("rows", "out", "d_out", "d_rows"))
        rows, row_probs = dispatch_tokens(x, plan, probs=probs, out=received)
        y = experts(rows, plan.splits, row_probs, out=out, grad_input_out=d_rows)
        return combine_tokens(y, plan, grad_out=d_out)

    return forward


def _wire_bytes(problem: Problem, run: Run, choice: Choice, direction: Direction) -> int:
    """Bytes of one pass: rows that leave a rank in dispatch and arrive in combine. Collective."""
    plan, row_bytes = run.plan(problem), problem.case.shape.hidden * DTYPE.itemsize
    config = choice.config(problem.case.shape)
    sent_bytes = config.sent_row_bytes(direction, DTYPE.itemsize)
    moved = (dispatch_bytes(plan, sent_bytes), combine_bytes(plan, config.order, row_bytes))
    return sum(wire_bytes(each, run.ranks) for each in moved)


def _peak_memory(run: Run, variant: Variant) -> dict[str, int | None]:
    """Bytes that one step takes at its peak beyond what was there before: ordinary memory of a GPU, and the heap."""
    on_gpu, heap = run.ranks.device.type == "cuda", run.heap
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    leased = heap.leased_bytes
    heap._memory.arena.high_water_bytes = leased
    variant.call(clock_for(run.ranks.device))
    if on_gpu:
        torch.cuda.synchronize()
    return {
        "peak_ordinary_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
        "peak_heap_bytes": heap.high_water_bytes - leased,
    }
