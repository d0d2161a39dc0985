"""The suite "layer": a step from the router's output to y, and back to every gradient. The suites "variants" and
"precision": such steps with every choice, and FP8 steps against bf16 ones.

A step makes its plan, dispatches, runs the experts and combines; backward gives dx, dprobs and both weight gradients.
FLOPs are 6 T H I K forward and twice that backward, of the mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from suites.cases import Case
from suites.figures import MemoryMeter, combine_bytes, dispatch_bytes, wire_bytes
from suites.problem import DTYPE, MAX_ERROR, LocalRows, Problem, row_error
from suites.records import Record, tflops
from suites.reference import Reference
from suites.steps import Choice, Forward, Step, heap_bytes, make_experts, stock_step
from suites.stock_torch import STOCK
from suites.timing import (
    DIRECTIONS,
    Run,
    Times,
    Variant,
    in_steps,
    largest,
    measure,
    median_ms,
    plan_of,
    timed_records,
)
from symmoe.grouped.experts import ExpertsBackward, ExpertWeights, SavedActivations
from symmoe.grouped.linear import cache_quantized_weights
from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.rows_function import ExpertRows
from symmoe.grouped.weights import LayerWeights
from symmoe.kernels.activation import Activation
from symmoe.precision.recipes import Float8Block
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.training.precision_choice import AUTO, choose_precision

CEILING = "gemms alone"
# An E4M3 number is off by 2.6 % of itself (root of the mean square), a product of two by 4, what two layers of them and
# their gradients make by 5 to 9.
E4M3_ERROR = 0.15

SERIAL = {"schedule": "serial"}
LAYER = {
    "static": Choice(),
    "exact": Choice(static=False),
    "graph": Choice(captured=True),
    "serial": Choice(options=SERIAL),
    "serial graph": Choice(captured=True, options=SERIAL),
}


def bench_layer(
    problem: Problem,
    run: Run,
    choices: Mapping[str, Choice] = LAYER,
    suite: str = "layer",
) -> list[Record]:
    """Eager and replayed steps of these choices, only the GEMMs, and the stock layer. Collective."""
    reference = Reference(problem)
    possible = {  # no graphs on CPUs
        name: choice
        for name, choice in choices.items()
        if problem.device.type == "cuda" or not choice.captured
    }
    together = [name for name, choice in possible.items() if not choice.apart]
    times: Times = {}
    errors = dict[str, float]()
    figures_of = dict[str, Sequence[Record]]()
    yardsticks = [experts_only(problem, reference), stock_step(problem, reference).eager()]
    for names in (together, *([name] for name, choice in possible.items() if choice.apart)):
        with ExitStack() as blocks:
            variants = {
                name: _variant(name, possible[name], problem, run, reference, blocks)
                for name in names
            }
            its_times, its_errors = measure(run, [*variants.values(), *yardsticks])
            figures_of |= {
                name: of_choice(problem, run, possible[name], variant)
                for name, variant in variants.items()
            }
            times |= its_times
            errors |= its_errors
        yardsticks = []  # once is enough
        variants.clear()  # ends the graphs before their memory is freed
        run.heap.release_graphs()

    def figures(name: str, column: int) -> Record:
        times_ms, ceiling, stock = (times[label][:, column] for label in (name, CEILING, STOCK))
        flops = (1 + column) * problem.case.forward_flops
        record: Record = {"tflops": tflops(flops, times_ms), "error": errors[name]}
        if name not in figures_of:
            return record
        precision = choices[name].precision
        return record | {
            "precision": "bf16" if precision is None else str(precision),
            "ceiling_tflops": tflops(flops, ceiling),
            "stock_tflops": tflops(flops, stock),
            "stock_ms": median_ms(stock),
            "yardstick": "ceiling_tflops",
            **figures_of[name][column],
        }

    return timed_records(problem, suite, times, figures)


def of_choice(problem: Problem, run: Run, choice: Choice, variant: Variant) -> list[Record]:
    """Bytes that travel forward and backward, and the peak of memory if the host launches the step. Collective."""
    memory: dict[str, int | None] = {}
    if not variant.reuses_marks:
        meter = MemoryMeter(run.ranks.device, run.heap)
        variant.once()
        memory = meter.peak()
    plan = plan_of(run, problem)
    config = choice.config(problem.case.shape)
    received = combine_bytes(plan, config.order, problem.case.shape.hidden * DTYPE.itemsize)
    # Rows that leave a rank in dispatch and arrive in combine.
    moved = (
        (dispatch_bytes(plan, config.sent_row_bytes(direction, DTYPE.itemsize)), received)
        for direction in DIRECTIONS
    )
    return [
        {"wire_bytes": sum(wire_bytes(byte_counts, run.ranks) for byte_counts in both), **memory}
        for both in moved
    ]


def _variant(
    name: str, choice: Choice, problem: Problem, run: Run, reference: Reference, blocks: ExitStack
) -> Variant:
    experts = make_experts(problem, choice.precision)
    blocks.enter_context(choice.block(experts))
    step = Step(
        name,
        choice.forward(problem, run, experts),
        (*problem.inputs[:2], experts.fc1.weight, experts.fc2.weight),
        problem.tokens.dy,
        reference.step_error,
        choice.max_error,
    )
    return step.captured() if choice.captured else step.eager()


def experts_only(problem: Problem, reference: Reference) -> Variant:
    """The ceiling: the layer's own six products on the same rows, splits and weights, in its order, and nothing else.

    Rows lie in the order of the experts, also if the layer gathers them: the best that the GEMMs could do. Local.
    """
    num_rows = max(1, problem.num_rows)
    fc1, fc2 = (LayerWeights(weight.detach()) for weight in (problem.w1, problem.w2))
    weights = ExpertWeights(fc1, fc2, Activation())
    local = LocalRows.of(problem)
    rows = ExpertRows(local.in_order(local.packed), local.row_range, local.row_probs)
    d_out = local.in_order(local.d_packed)
    saved = list[SavedActivations]()
    out = local.packed.new_empty((num_rows, problem.case.shape.hidden))
    d_rows = torch.empty_like(out)

    def forward() -> None:
        hidden, a = weights.first_layer(rows, num_rows=num_rows)
        weights.second_layer(a, rows, out)
        saved[:] = [hidden]

    def backward(
        allocate: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # As large as the experts: not kept between calls.
        dw1, dw2 = (allocate(weight) for weight in (problem.w1, problem.w2))
        step = ExpertsBackward(rows, weights, saved.pop(), d_out)
        step.input_gradient(d_rows)
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)
        return dw1, dw2

    def verify() -> float:
        out.fill_(torch.nan)
        d_rows.fill_(torch.nan)
        forward()
        gradients = backward(partial(torch.full_like, fill_value=torch.nan))
        errors = [  # of rows, before they are summed
            row_error(got[e.rows], expected)
            for e in reference.experts
            for got, expected in ((out, e.out), (d_rows, e.d_rows))
        ]
        return largest([*errors, reference.weight_error(*gradients)])

    return Variant(CEILING, DIRECTIONS, in_steps(forward, backward), verify, MAX_ERROR)


# -- other choices -----------------------------------------------------------------------------------------------------


class PublicParts(Choice):
    """dispatch_tokens, GroupedMLP and combine_tokens: rows arrive one per slot, in the order of the experts."""

    def forward(self, problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
        x, probs, _, _ = problem.inputs

        def forward() -> torch.Tensor:
            plan = plan_of(run, problem, problem.static_capacity)
            received, out, d_out, d_rows = (
                run.heap.lease((plan.row_capacity, x.shape[1]), x.dtype, name=name).tensor
                for name in ("rows", "out", "d_out", "d_rows")
            )
            rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs, out=received)
            y = experts(rows, plan.splits, row_probs, out=out, grad_input_out=d_rows)
            return combine_tokens(y, handle, grad_out=d_out)

        return forward


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
    "public parts": PublicParts(),
}
_FP8 = {"precision": Float8Block(), "max_error": E4M3_ERROR}
_WIRE = _FP8 | {"options": {"quantized_wire": "both"}}
PRECISION = {
    "static": Choice(),
    "graph": Choice(captured=True, apart=True),
    "float8-block": Choice(**_FP8),
    "float8-block, wire": Choice(**_WIRE),
    "float8-block, wire, graph": Choice(captured=True, apart=True, **_WIRE),
    "float8-block, wire, constant weights": Choice(
        apart=True, block=cache_quantized_weights, **_WIRE
    ),
    AUTO: Choice(**_WIRE),  # what choose_precision makes of it
}


def precision_heap_bytes(case: Case, num_ranks: int, num_rows: int) -> int:
    """Bytes of the heap for the largest of what is measured apart, and everything else."""
    together = {name: choice for name, choice in PRECISION.items() if not choice.apart}
    apart = (together | {name: choice} for name, choice in PRECISION.items() if choice.apart)
    return max(heap_bytes(case, num_ranks, num_rows, choices) for choices in apart)


def bench_precision(problem: Problem, run: Run) -> list[Record]:
    """FP8 steps and bf16 steps."""
    auto = picked(PRECISION[AUTO], problem)
    return bench_layer(problem, run, PRECISION | {AUTO: auto}, "precision")


def picked(choice: Choice, problem: Problem) -> Choice:
    """The choice with the precision that choose_precision decides on."""
    config = choose_precision(
        choice.config(problem.case.shape),
        num_ranks=problem.num_ranks,
        num_tokens=problem.case.num_tokens,
        device=problem.device,
    )
    options = {**choice.options, "quantized_wire": config.quantized_wire}
    max_error = MAX_ERROR if config.precision is None else choice.max_error
    return replace(choice, precision=config.precision, options=options, max_error=max_error)
