"""The suite "overhead": CPU time of calls whose GPU work is tiny, of a grouped MLP and of pointer loading. Local.

64 experts, hidden 128, ffn 128, 16 rows each, SwiGLU times a scale per row, splits on the device. Compared with a loop
over pairs of nn.Linear, whose splits are a list on the host, and with torch._grouped_mm, each with the same activation
made of torch's operations. pointer_loading.py has what loads pointers, for matrices of the same sizes.

Calls are timed on the host without waiting for the GPU. Between short blocks the host waits for it, so that its queue
never fills up; what loads pointers is timed in longer blocks of one kind too. On CPUs the work itself is inside of the
calls.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from suites.grouped import Choice, Layer, stock_variant
from suites.pointer_loading import LOADED, NUM_EXPERTS, pointer_variants, yardsticks
from suites.problem import DTYPE, Problem
from suites.records import Record, new_record, rounded
from suites.reference import expert_outputs
from suites.stock_torch import swiglu, torch_experts
from suites.timing import HostEvent, Run, Variant, measure, median_ms
from symmoe.grouped.mlp import GroupedMLP

GROUPS, HIDDEN, FFN, ROWS_PER_GROUP = 64, 128, 128, 16
NUM_ROWS = GROUPS * ROWS_PER_GROUP
BLOCK = 5  # calls between two waits for the GPU
IN_A_ROW, BLOCK_MS = (
    200,
    50.0,
)  # most calls of a block of one kind, and about how long a block takes
LINEAR_LOOP, TORCH_MODULE = "nn.Linear loop", "torch._grouped_mm"


def bench_overhead(problem: Problem, run: Run) -> list[Record]:
    """Modules forward and backward, and the calls that load pointers, whatever the problem is."""
    device = run.ranks.device
    records = _time(run, _modules(_layer(device)), (TORCH_MODULE, LINEAR_LOOP), GROUPS)
    shapes = ((2 * FFN, HIDDEN), (HIDDEN, FFN))
    for num_experts, loaded in itertools.product(NUM_EXPERTS, LOADED):
        variants = pointer_variants(num_experts, shapes, loaded, device)
        of_kind = _time(run, variants, yardsticks(loaded), num_experts)
        for record, variant in zip(of_kind, variants, strict=True):  # one direction each
            num_calls = max(1, min(IN_A_ROW, int(BLOCK_MS / record["ms_median"])))
            record["in_a_row_us"] = _in_a_row_us(variant, run, num_calls)
        records += of_kind
    return records


def _in_a_row_us(variant: Variant, run: Run, num_calls: int) -> float:
    """Host time of a call that follows others of its kind: the median of blocks."""
    times_us = []
    for _ in range(min(5, run.repetitions)):
        run.ranks.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            variant.call(HostEvent)
        times_us.append((time.perf_counter() - start) * 1e6 / num_calls)
    run.ranks.barrier()
    return rounded(statistics.median(times_us))


def _time(
    run: Run, variants: Sequence[Variant], others: Sequence[str], num_groups: int
) -> list[Record]:
    """others: variants that are not ours; the first is what ours are compared with."""
    times, errors = measure(run, variants, clock=HostEvent, block=BLOCK)
    records = []
    for variant in variants:
        for column, direction in enumerate(variant.directions):
            taken = times[variant.name][:, column]
            figures: Record = {"error": errors[variant.name]}
            if variant.name not in others:
                figures |= {
                    "stock_ms": median_ms(times[others[0]][:, column]),
                    "yardstick": "stock_ms",
                }
            records.append(
                new_record(
                    taken,
                    suite="overhead",
                    variant=variant.name,
                    preset=f"{num_groups}x{HIDDEN}x{FFN}",
                    ep=run.ranks.num_ranks,
                    tokens=NUM_ROWS,
                    skew="uniform",
                    direction=direction,
                    **figures,
                    dtype=str(DTYPE).removeprefix("torch."),
                )
            )
    return records


def _layer(device: torch.device) -> Layer:
    """The grouped MLP, and what it computes with."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=DTYPE, device=device) * scale

    rows = normal(NUM_ROWS, HIDDEN).requires_grad_()
    scale = torch.rand(NUM_ROWS, generator=generator, device=device).requires_grad_()
    w1 = normal(GROUPS, 2 * FFN, HIDDEN, scale=HIDDEN**-0.5).requires_grad_()
    w2 = normal(GROUPS, HIDDEN, FFN, scale=FFN**-0.5).requires_grad_()
    splits = torch.full((GROUPS,), ROWS_PER_GROUP)
    on_device, experts = splits.to(device), torch_experts(w1, w2)
    return Layer(
        name="GroupedMLP",
        make=functools.partial(GroupedMLP, GROUPS, HIDDEN, FFN),
        inputs=(rows, scale),
        weights=(w1, w2),
        d_out=normal(NUM_ROWS, HIDDEN),
        splits=splits,
        spans=[
            slice(first, first + ROWS_PER_GROUP) for first in range(0, NUM_ROWS, ROWS_PER_GROUP)
        ],
        expected=expert_outputs,
        stock=lambda: experts(rows, scale, on_device.cumsum(0, dtype=torch.int32)),
        flops=6 * NUM_ROWS * HIDDEN * FFN,
    )


def _modules(layer: Layer) -> list[Variant]:
    """Ours, and others."""
    return [
        layer.ours("GroupedMLP packed", Choice())[0],
        layer.ours("GroupedMLP discrete", Choice(scattered=True))[0],
        _linear_loop(layer),
        stock_variant(TORCH_MODULE, layer),
    ]


def _linear_loop(layer: Layer) -> Variant:
    """One pair of nn.Linear per expert; the splits are on the host."""
    linears = [[_linear(matrix) for matrix in of_layer] for of_layer in layer.scattered]
    sizes = layer.splits.tolist()

    def forward() -> torch.Tensor:
        parts = zip(*linears, *(tensor.split(sizes) for tensor in layer.inputs), strict=True)
        return torch.cat([fc2(swiglu(fc1(x), s)) for fc1, fc2, x, s in parts])

    weights = [[linear.weight for linear in of_layer] for of_layer in linears]
    return layer.variant(LINEAR_LOOP, forward, weights)


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta"
    )
    layer.weight = nn.Parameter(weight)
    return layer
