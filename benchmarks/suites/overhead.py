"""The suite "overhead": CPU time of calls whose GPU work is tiny, of a grouped MLP and of pointer loading. Local.

64 experts, hidden 128, ffn 128, 16 rows each, SwiGLU times a scale per row, splits on the device. Compared with a loop
over pairs of nn.Linear, whose splits are a list on the host, and with torch._grouped_mm, each with the same activation
made of torch's operations. Pointer loading puts the addresses of experts' weights, of the same sizes, on the device,
and swizzles their scales. It is compared with torch.tensor of all addresses, and with a copy for each address; both
swizzle one expert after the other.

Calls are timed on the host without waiting for the GPU. Between short blocks the host waits for it, so that its queue
never fills up; what loads pointers is timed in longer blocks of one kind too. On CPUs the work itself is inside of the
calls.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from suites.grouped import Choice, Layer, stock_variant
from suites.problem import DTYPE, Problem
from suites.records import Record, new_record, rounded
from suites.reference import expert_outputs
from suites.stock_torch import swiglu, torch_experts
from suites.timing import HostEvent, Run, Variant, host_times_ms, in_steps, measure, median_ms
from symmoe.grouped.mlp import GroupedMLP
from symmoe.pointers import (
    PackedPointers,
    Swizzle,
    copy_data_ptrs_to_device,
    copy_host_to_device,
    pack_weight_ptrs,
)

GROUPS, HIDDEN, FFN, ROWS_PER_GROUP = 64, 128, 128, 16
NUM_ROWS = GROUPS * ROWS_PER_GROUP
BLOCK = 5  # calls between two waits for the GPU
IN_A_ROW, BLOCK_MS = (
    200,
    50.0,
)  # most calls of a block of one kind, and about how long a block takes
LINEAR_LOOP, TORCH_MODULE = "nn.Linear loop", "torch._grouped_mm"

NUM_EXPERTS = (8, 64, 256)
# Layout, elements in a byte of data, elements that share a scale.
_SCALES: dict[str, tuple[Swizzle, int, int]] = {
    "mxfp8 scales": ("mxfp8_rowwise", 1, 32),
    "nvfp4 scales": ("nvfp4", 2, 16),
}
LOADED = ("one layer", "both layers", *_SCALES)
_TORCH, _COPIES = "torch.tensor", "a copy each"

Matrices = list[torch.Tensor]
Loaded = tuple[
    torch.Tensor, Matrices
]  # addresses of the weights and then of swizzled scales, and what these point at


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

    def calls() -> None:
        for _ in range(num_calls):
            variant.once()

    times_ms = host_times_ms(calls, run.ranks, min(5, run.repetitions))
    run.ranks.barrier()
    return rounded(statistics.median(times_ms) * 1e3 / num_calls)


def _time(
    run: Run, variants: Sequence[Variant], yardsticks: Sequence[str], num_groups: int
) -> list[Record]:
    """others: variants that are not ours; the first is what ours are compared with."""
    times, errors = measure(run, variants, clock=HostEvent, block=BLOCK)
    records = []
    for variant in variants:
        for column, direction in enumerate(variant.directions):
            times_ms = times[variant.name][:, column]
            figures: Record = {"error": errors[variant.name]}
            if variant.name not in yardsticks:
                figures |= {
                    "stock_ms": median_ms(times[yardsticks[0]][:, column]),
                    "yardstick": "stock_ms",
                }
            records.append(
                new_record(
                    times_ms,
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
    on_device = splits.to(device)
    experts = torch_experts(w1, w2)
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

    return layer.variant(LINEAR_LOOP, forward, [[fc.weight for fc in group] for group in linears])


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta"
    )
    layer.weight = nn.Parameter(weight)
    return layer


# -- pointer loading --------------------------------------------------------------------------------------------------


def yardsticks(loaded: str) -> tuple[str, str]:
    """The names of the variants that are not ours; torch.tensor is the first."""
    return f"{_TORCH}, {loaded}", f"{_COPIES}, {loaded}"


def pointer_variants(
    num_experts: int, shapes: Sequence[tuple[int, int]], loaded: str, device: torch.device
) -> list[Variant]:
    """All ways to load the same addresses.

    Args:
        shapes: numbers in an expert's matrix, of either layer.
        loaded: one of LOADED.
    """
    layout, in_byte, block = _SCALES.get(loaded, (None, 1, 1))
    generator = torch.Generator(device).manual_seed(0)

    def matrices(*size: int) -> Matrices:
        numbers = {"dtype": torch.uint8, "generator": generator, "device": device}
        return [torch.randint(256, size, **numbers) for _ in range(num_experts)]

    shapes = shapes[:1] if loaded == "one layer" else shapes
    weights = [matrices(rows, columns // in_byte) for rows, columns in shapes]
    scales = [matrices(rows, -(-columns // block)) for rows, columns in shapes if layout]
    all_weights, all_scales = (
        list(itertools.chain.from_iterable(tensors)) for tensors in (weights, scales)
    )
    expected = [_swizzled(scale) for scale in all_scales]

    def variant(name: str, load: Callable[[], Any], looked_at: Callable[[Any], Loaded]) -> Variant:
        def num_wrong() -> float:
            pointers, swizzled = looked_at(load())
            addresses = torch.tensor([tensor.data_ptr() for tensor in (*all_weights, *swizzled)])
            pairs = zip(swizzled, expected, strict=True)
            return float((pointers.cpu() != addresses).sum()) + sum(
                not torch.equal(*pair) for pair in pairs
            )

        return Variant(name, ("forward",), in_steps(load), num_wrong)

    def by_torch() -> Loaded:
        swizzled = [_swizzled(scale) for scale in all_scales]
        return torch.tensor(
            [tensor.data_ptr() for tensor in (*all_weights, *swizzled)], device=device
        ), swizzled

    def by_copies() -> Loaded:
        swizzled = [_swizzled(scale) for scale in all_scales]
        pointers = torch.empty(len(all_weights) + len(swizzled), dtype=torch.int64, device=device)
        for tensor, pointer in zip((*all_weights, *swizzled), pointers, strict=True):
            pointer.copy_(torch.tensor(tensor.data_ptr()))
        return pointers, swizzled

    torch_loads = zip(yardsticks(loaded), (by_torch, by_copies), strict=True)
    torch_variants = [variant(name, load, lambda result: result) for name, load in torch_loads]
    if loaded != "one layer":
        fc1_scales, fc2_scales = scales or (None, None)
        packed = variant(
            f"pack_weight_ptrs, {loaded}",
            lambda: pack_weight_ptrs(
                *weights, fc1_scales=fc1_scales, fc2_scales=fc2_scales, swizzle=layout
            ),
            lambda got: _looked_at(got, [tiles.numel() for tiles in expected]),
        )
        return [packed, *torch_variants]
    on_host = torch.tensor([tensor.data_ptr() for tensor in all_weights]).numpy().tobytes()
    destination = torch.zeros(num_experts, dtype=torch.int64, device=device)
    return [
        variant(
            f"copy_data_ptrs_to_device, {loaded}",
            lambda: copy_data_ptrs_to_device(all_weights, device),
            lambda pointers: (pointers, []),
        ),
        variant(
            f"copy_host_to_device, {loaded}",
            lambda: copy_host_to_device(on_host, destination),
            lambda _: (destination, []),
        ),
        *torch_variants,
    ]


def _looked_at(packed: PackedPointers, sizes: list[int]) -> Loaded:
    """What the addresses of swizzled scales point at is taken from the memory that holds it."""
    pointers = [packed.fc1, packed.fc2]
    if packed.swizzled is None:
        return torch.cat(pointers), []
    of_scales = torch.cat([packed.fc1_scales, packed.fc2_scales])
    memory = packed.swizzled.view(-1)
    starts = zip((of_scales - memory.data_ptr()).tolist(), sizes, strict=True)
    return torch.cat([*pointers, of_scales]), [memory[s : s + n] for s, n in starts]


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """One-byte scales [M, Q] in 128x4 tiles, zeros for padding, by torch's operators: uint8 [.]."""
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
