"""The suite "overhead": CPU time of calls whose GPU work is tiny, of a grouped MLP and of pointer loading. Local.

64 experts, hidden 128, ffn 128, 16 rows each, SwiGLU times a scale per row, splits on the device. Compared with a loop
over pairs of nn.Linear, whose splits are a list on the host, and with torch._grouped_mm, each with the same activation
made of torch's operations. Calls are timed on the host without waiting for the GPU. Between short blocks the host waits
for it, so that its queue never fills up. On CPUs the work itself is inside of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.pointers import copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs
from symmoe.tools.bench.problem import DTYPE
from symmoe.tools.bench.records import Record, median_ms, new_record
from symmoe.tools.bench.reference import MAX_ERROR, largest, relative_error
from symmoe.tools.bench.run import Run
from symmoe.tools.bench.stock_torch import grouped_mm, swiglu
from symmoe.tools.bench.timing import Clock, HostClock, Mark, Variant, in_steps, measure, verify

GROUPS, HIDDEN, FFN, ROWS_PER_GROUP = 64, 128, 128, 16
NUM_ROWS = GROUPS * ROWS_PER_GROUP
NUM_POINTERS = 256
BLOCK = 5  # calls between two waits for the GPU
LINEAR_LOOP, TORCH_MODULE, TORCH_POINTERS = "nn.Linear loop", "torch._grouped_mm", "torch.tensor of pointers"


class LinearLoop(nn.Module):
    """One pair of nn.Linear per expert; reads the splits on the host."""

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.fc1, self.fc2 = (nn.ModuleList(_linear(matrix) for matrix in weight) for weight in (w1, w2))

    def forward(self, rows: torch.Tensor, splits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        sizes = [ROWS_PER_GROUP] * GROUPS
        parts = zip(self.fc1, self.fc2, rows.split(sizes), scale.split(sizes), strict=True)
        return torch.cat([fc2(swiglu(fc1(x), s)) for fc1, fc2, x, s in parts])


class TorchGroupedMM(nn.Module):
    """torch._grouped_mm for both layers."""

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())

    def forward(self, rows: torch.Tensor, splits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
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


def bench_overhead(run: Run) -> list[Record]:
    """Modules forward and backward, and the calls that load pointers."""
    device = run.ranks.device
    inputs = _inputs(device)
    modules = [_module_variant(name, module, inputs) for name, module in _modules(inputs).items()]
    return _time(run, modules, TORCH_MODULE) + _time(run, _pointer_variants(device), TORCH_POINTERS)


def _time(run: Run, variants: Sequence[Variant], stock: str) -> list[Record]:
    errors = {variant.name: verify(variant, run.ranks) for variant in variants}
    times = measure(variants, run.ranks, HostClock(), repetitions=run.repetitions, block=BLOCK)
    records = []
    for variant in variants:
        for column, direction in enumerate(variant.directions):
            taken = times[variant.name][:, column]
            figures: Record = {"error": errors[variant.name]}
            if variant.name not in (LINEAR_LOOP, stock):
                figures |= {"stock_ms": median_ms(times[stock][:, column]), "yardstick": "stock_ms"}
            records.append(
                new_record(
                    taken,
                    suite="overhead",
                    variant=variant.name,
                    preset=f"{GROUPS}x{HIDDEN}x{FFN}",
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
    grouped = {name: GroupedMLP(GROUPS, HIDDEN, FFN, weights=name, device="meta") for name in ("packed", "discrete")}
    for mlp in grouped.values():
        mlp.to_empty(device=inputs.rows.device).to(DTYPE)
        for layer, weight in ((mlp.fc1, inputs.w1), (mlp.fc2, inputs.w2)):
            for parameter, value in zip(layer.weight_parameters(), _as_parameters(layer, weight), strict=True):
                parameter.data.copy_(value)
    return {
        **{f"GroupedMLP {name}": mlp for name, mlp in grouped.items()},
        LINEAR_LOOP: LinearLoop(inputs.w1, inputs.w2),
        TORCH_MODULE: TorchGroupedMM(inputs.w1, inputs.w2),
    }


def _as_parameters(layer: nn.Module, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return (weight,) if layer.is_packed else weight.unbind()


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
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
        marks = [clock.mark()]
        y = module(inputs.rows, inputs.splits, inputs.scale)
        marks.append(clock.mark())
        y.backward(inputs.d_out)
        return [*marks, clock.mark()]

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


def _pointer_variants(device: torch.device) -> list[Variant]:
    tensors = [nn.Parameter(torch.zeros(8, 8, device=device)) for _ in range(NUM_POINTERS)]
    data = torch.tensor([tensor.data_ptr() for tensor in tensors])
    host_bytes = data.numpy().tobytes()
    destination = torch.zeros(NUM_POINTERS, dtype=torch.int64, device=device)
    fc1, fc2 = tensors[:GROUPS], tensors[GROUPS : 2 * GROUPS]

    def variant(name: str, call: Callable[[], object], pointers: Callable[[], torch.Tensor]) -> Variant:
        def wrong() -> float:
            got = pointers().cpu()
            return float((got != data[: len(got)]).sum())

        return Variant(name, ("forward",), in_steps(call), wrong)

    def copied() -> torch.Tensor:
        copy_host_to_device(host_bytes, destination)
        return destination

    def loaded() -> torch.Tensor:
        return copy_data_ptrs_to_device(tensors, device)

    def by_torch() -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

    def packed() -> torch.Tensor:
        pointers = pack_weight_ptrs(fc1, fc2)
        return torch.cat([pointers.fc1, pointers.fc2])

    return [
        variant(f"copy_host_to_device, {len(host_bytes)} bytes", copied, copied),
        variant(f"copy_data_ptrs_to_device, {NUM_POINTERS}", loaded, loaded),
        variant(f"pack_weight_ptrs, {GROUPS} + {GROUPS}", lambda: pack_weight_ptrs(fc1, fc2), packed),
        variant(TORCH_POINTERS, by_torch, by_torch),
    ]
