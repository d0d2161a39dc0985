"""The suites "variants" and "precision": the step of the layer with every choice, and FP8 steps against bf16 ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from suites.cases import Case
from suites.layer import LAYER, SERIAL, bench_layer
from suites.problem import MAX_ERROR, Problem
from suites.records import Record
from suites.steps import Choice, Forward, heap_bytes
from suites.timing import Run, plan_of
from symmoe.dispatch.plan import Plan
from symmoe.grouped.linear import cache_quantized_weights
from symmoe.grouped.mlp import GroupedMLP
from symmoe.precision.recipes import Float8Block
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.training.precision_choice import AUTO, choose_precision

# An E4M3 number is off by 2.6 % of itself (root of the mean square), a product of two by 4, what two layers of them and
# their gradients make by 5 to 9.
E4M3_ERROR = 0.15


class PublicParts(Choice):
    """dispatch_tokens, GroupedMLP and combine_tokens: rows arrive one per slot, in the order of the experts."""

    def forward(self, problem: Problem, run: Run, experts: GroupedMLP) -> Forward:
        x, probs, _, _ = problem.inputs

        def buffer(plan: Plan, name: str) -> torch.Tensor:
            return run.heap.lease((plan.row_capacity, x.shape[1]), x.dtype, name=name).tensor

        def forward() -> torch.Tensor:
            plan = plan_of(run, problem, problem.static_capacity)
            received, out, d_out, d_rows = (
                buffer(plan, name) for name in ("rows", "out", "d_out", "d_rows")
            )
            rows, row_probs = dispatch_tokens(x, plan, probs=probs, out=received)
            y = experts(rows, plan.splits, row_probs, out=out, grad_input_out=d_rows)
            return combine_tokens(y, plan, grad_out=d_out)

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
    choices = PRECISION | {AUTO: picked(PRECISION[AUTO], problem)}
    return bench_layer(problem, run, choices, "precision")


def picked(choice: Choice, problem: Problem) -> Choice:
    """The choice with the precision that choose_precision decides on."""
    numbers = {"num_ranks": problem.num_ranks, "num_tokens": problem.case.num_tokens}
    config = choose_precision(choice.config(problem.case.shape), **numbers, device=problem.device)
    options = {**choice.options, "quantized_wire": config.quantized_wire}
    max_error = MAX_ERROR if config.precision is None else choice.max_error
    return replace(choice, precision=config.precision, options=options, max_error=max_error)
