"""The suite "overhead": CPU time of calls whose GPU work is tiny, of a grouped MLP and of pointer loading. Local.

64 experts, hidden 128, ffn 128, 16 rows each, SwiGLU times a scale per row, splits on the device. Compared with a loop
over pairs of nn.Linear, whose splits are a list on the host, and with torch._grouped_mm, each with the same activation
made of torch's operations. pointer_loading.py has what loads pointers, for matrices of the same sizes.

Calls are timed on the host without waiting for the GPU. Between short blocks the host waits for it, so that its queue
never fills up; what loads pointers is timed in longer blocks of one kind too. On CPUs the work itself is inside of the
calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from suites.pointer_loading import LOADED, NUM_EXPERTS, pointer_variants, yardsticks
from suites.problem import DTYPE, MAX_ERROR, Problem, relative_error
from suites.records import Record, new_record, rounded
from suites.stock_torch import grouped_mm, swiglu
from suites.timing import Clock, HostEvent, Mark, Run, Variant, largest, measure, median_ms
from symmoe.grouped.mlp import GroupedMLP

GROUPS, HIDDEN, FFN, ROWS_PER_GROUP = 64, 128, 128, 16
NUM_ROWS = GROUPS * ROWS_PER_GROUP
BLOCK = 5  # calls between two waits for the GPU
IN_A_ROW, BLOCK_MS = (
    200,
    50.0,
)  # most calls of a block of one kind, and about how long a block takes
LINEAR_LOOP, TORCH_MODULE = "nn.Linear loop", "torch._grouped_mm"


class LinearLoop(nn.Module):
    """One pair of nn.Linear per expert; reads the splits on the host."""

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.fc1, self.fc2 = (
            nn.ModuleList(_linear(matrix) for matrix in weight) for weight in (w1, w2)
        )

    def forward(
        self, rows: torch.Tensor, splits: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        sizes = [ROWS_PER_GROUP] * GROUPS
        parts = zip(self.fc1, self.fc2, rows.split(sizes), scale.split(sizes), strict=True)
        return torch.cat([fc2(swiglu(fc1(x), s)) for fc1, fc2, x, s in parts])


class TorchGroupedMM(nn.Module):
    """torch._grouped_mm for both layers."""

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())

    def forward(
        self, rows: torch.Tensor, splits: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        ends = splits.cumsum(0, dtype=torch.int32)
        h = grouped_mm(rows, self.w1.transpose(1, 2), ends)
        return grouped_mm(swiglu(h, scale), self.w2.transpose(1, 2), ends)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """rows bf16 [N, H] and scale fp32 [N] require gradients; splits int64 [G]; w1 [G, 2I, H], w2 [G, H, I]."""

    rows: torch.Tensor
    scale: torch.Tensor
    splits: torch.Tensor
    d_out: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


def bench_overhead(problem: Problem, run: Run) -> list[Record]:
    """Modules forward and backward, and the calls that load pointers, whatever the problem is."""
    device = run.ranks.device
    inputs = _inputs(device)
    modules = [_module_variant(name, module, inputs) for name, module in _modules(inputs).items()]
    records = _time(run, modules, (TORCH_MODULE, LINEAR_LOOP), GROUPS)
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


def _inputs(device: torch.device) -> _Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=DTYPE, device=device)

    return _Inputs(
        rows=normal(NUM_ROWS, HIDDEN).requires_grad_(),
        scale=torch.rand(NUM_ROWS, generator=generator, device=device).requires_grad_(),
        splits=torch.full((GROUPS,), ROWS_PER_GROUP, device=device),
        d_out=normal(NUM_ROWS, HIDDEN),
        w1=normal(GROUPS, 2 * FFN, HIDDEN) * HIDDEN**-0.5,
        w2=normal(GROUPS, HIDDEN, FFN) * FFN**-0.5,
    )


def _modules(inputs: _Inputs) -> dict[str, nn.Module]:
    grouped = {
        name: GroupedMLP(GROUPS, HIDDEN, FFN, weights=name, device="meta")
        for name in ("packed", "discrete")
    }
    for mlp in grouped.values():
        mlp.to_empty(device=inputs.rows.device).to(DTYPE)
        for layer, weight in ((mlp.fc1, inputs.w1), (mlp.fc2, inputs.w2)):
            for parameter, value in zip(
                layer.weight_parameters(), _as_parameters(layer, weight), strict=True
            ):
                parameter.data.copy_(value)
    return {
        **{f"GroupedMLP {name}": mlp for name, mlp in grouped.items()},
        LINEAR_LOOP: LinearLoop(inputs.w1, inputs.w2),
        TORCH_MODULE: TorchGroupedMM(inputs.w1, inputs.w2),
    }


def _as_parameters(layer: nn.Module, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return (weight,) if layer.is_packed else weight.unbind()


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta"
    )
    layer.weight = nn.Parameter(weight.clone())
    return layer


def _module_variant(name: str, module: nn.Module, inputs: _Inputs) -> Variant:
    """Gradients are accumulated as in training; they are dropped between calls, outside of what is timed."""
    parameters = [inputs.rows, inputs.scale, *module.parameters()]

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    def call(clock: Clock) -> list[Mark]:
        drop_gradients()
        marks = [clock()]
        y = module(inputs.rows, inputs.splits, inputs.scale)
        marks.append(clock())
        y.backward(inputs.d_out)
        return [*marks, clock()]

    def check() -> float:
        drop_gradients()
        y = module(inputs.rows, inputs.splits, inputs.scale)
        y.backward(inputs.d_out)
        expected = _reference(inputs)
        got = (y, inputs.rows.grad, inputs.scale.grad)
        return largest([relative_error(g, e) for g, e in zip(got, expected, strict=True)])

    return Variant(name, ("forward", "backward"), call, check, MAX_ERROR)


def _reference(inputs: _Inputs) -> list[torch.Tensor]:
    """y, the gradient of the rows, and that of the scale, in fp32."""
    rows = inputs.rows.detach().float().view(GROUPS, ROWS_PER_GROUP, HIDDEN).requires_grad_()
    scale = inputs.scale.detach().view(GROUPS, ROWS_PER_GROUP, 1).requires_grad_()
    gate, up = torch.bmm(rows, inputs.w1.float().transpose(1, 2)).chunk(2, dim=2)
    y = torch.bmm(nn.functional.silu(gate) * up * scale, inputs.w2.float().transpose(1, 2))
    gradients = torch.autograd.grad(y, (rows, scale), inputs.d_out.float().view_as(y))
    return [tensor.detach().reshape(NUM_ROWS, -1).squeeze(1) for tensor in (y, *gradients)]
