"""The suite "steps": whole steps as a training loop runs them, each kind following itself.

The other suites run their variants in turn, so the host of a fast one runs ahead while a slow one keeps the GPU busy,
and launches do not show. Here one kind of step runs `STEPS` times in a row; the kinds come in an order that is
shuffled for each repetition. Its time is the wall time of a step, the wait for the GPU after the last one included, on
the slowest rank.

A step is forward and backward, to the gradients of x and of all parameters, which are not added to earlier ones.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from symmoe.moe.config import MoEConfig
from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.tools.bench.layer import Choice, make_experts
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, rounded, tflops
from symmoe.tools.bench.reference import MAX_ERROR, Reference
from symmoe.tools.bench.run import Run, case_record
from symmoe.tools.bench.step_trace import trace_step
from symmoe.tools.bench.stock_torch import STOCK, stock_layer, torch_experts
from symmoe.tools.bench.timing import WARM_UP, largest_error

STEPS = 20  # in a row
_HOST_STEPS = 10  # steps whose launches are timed

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of step of ours.

    Attributes:
        routes: the whole MoELayer with its router; otherwise plan, dispatch, experts and combine.
        static: a static capacity instead of an exact one.
        captured: a CUDA graph that is replayed.
        aux_loss_coef, z_loss_coef: factors of the router's losses.
    """

    routes: bool
    static: bool = False
    captured: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


KINDS = {
    "layer": Kind(routes=True),
    "layer, losses": Kind(routes=True, aux_loss_coef=1e-2, z_loss_coef=1e-3),
    "layer, static": Kind(routes=True, static=True),
    "layer, graph": Kind(routes=True, static=True, captured=True),
    "experts": Kind(routes=False),
    "experts, static": Kind(routes=False, static=True),
    "experts, graph": Kind(routes=False, static=True, captured=True),
}


def bench_steps(problem: Problem, run: Run) -> list[Record]:
    """Steps of the layer and of its experts, eager and replayed, and of the stock layer. Collective."""
    reference, on_gpu, steps, errors = Reference(problem), problem.device.type == "cuda", dict[str, Step](), {}
    for name, kind in KINDS.items():
        if kind.captured and not on_gpu:
            continue  # there are no graphs on CPUs
        step, checked = _make(kind, problem, run, reference)
        errors[name] = largest_error(name, checked(), MAX_ERROR, run.ranks)
        steps[name] = _captured(step) if kind.captured else step
    steps[STOCK], checked = _stock(problem, reference)
    errors[STOCK] = largest_error(STOCK, checked(), MAX_ERROR, run.ranks)
    times = times_in_a_row_ms(steps, run.ranks, run.repetitions)
    flops = 3 * problem.case.forward_flops
    records = []
    for name, step in steps.items():
        figures = figures_of_step(step, problem, run.ranks)
        against = {} if name == STOCK else {"stock_tflops": tflops(flops, times[STOCK]), "yardstick": "stock_tflops"}
        records.append(
            case_record(
                problem,
                "steps",
                name,
                "step",
                times[name],
                tflops=tflops(flops, times[name]),
                error=errors[name],
                **against,
                **figures,
            )
        )
    steps.clear()  # ends the graphs before their memory is freed
    run.heap.release_graphs()
    return records


def _config(kind: Kind, problem: Problem) -> MoEConfig:
    capacity, num_slots = problem.static_capacity if kind.static else None, problem.case.num_slots
    if capacity is not None and kind.routes:  # the layer's own router decides, whatever the case's skew is
        capacity = max(capacity, num_slots + 8 * math.isqrt(num_slots))
    return replace(
        Choice().config(problem.case.shape, capacity),
        aux_loss_coef=kind.aux_loss_coef,
        z_loss_coef=kind.z_loss_coef,
    )


def _make(kind: Kind, problem: Problem, run: Run, reference: Reference) -> tuple[Step, Callable[[], float]]:
    """The step, and one of the same experts whose results are compared with the reference: its relative error."""
    config = _config(kind, problem)
    layer = MoELayer(config, run.heap, experts=make_experts(problem), dtype=DTYPE)
    experts = RoutedExperts.of(config, run.heap, layer.experts)
    x, probs, dy = problem.tokens.x, problem.tokens.probs, problem.tokens.dy
    weights = layer.experts.fc1.weight, layer.experts.fc2.weight

    def routed() -> tuple[torch.Tensor, ...]:
        y, _, _ = experts(x, probs, problem.topk_idx, layer.experts)
        return (y, *torch.autograd.grad(y, (x, probs, *weights), dy))

    def whole() -> tuple[torch.Tensor, ...]:
        y, metrics = layer(x)
        outputs, gradients = [y], [dy]
        if kind.aux_loss_coef:
            outputs.append(metrics.aux_loss)
            gradients.append(torch.ones_like(metrics.aux_loss))
        return torch.autograd.grad(outputs, (x, *layer.parameters()), gradients)

    return whole if kind.routes else routed, lambda: reference.step_error(*routed())


def _stock(problem: Problem, reference: Reference) -> tuple[Step, Callable[[], float]]:
    """Same as _make, of the layer of stock torch parts, without a router."""
    x, probs, w1, w2 = problem.inputs
    run_experts, num_experts = torch_experts(w1, w2), problem.case.shape.num_experts

    def step() -> tuple[torch.Tensor, ...]:
        y = stock_layer(x, probs, problem.topk_idx, run_experts, num_experts, problem.num_ranks)
        return (y, *torch.autograd.grad(y, problem.inputs, problem.tokens.dy))

    return step, lambda: reference.step_error(*step())


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


def times_in_a_row_ms(steps: Mapping[str, Step], ranks: Ranks, repetitions: int) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds [repetitions] of a step, by name. Collective."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions):
        for name in random.Random(repetition).sample(sorted(steps), len(steps)):
            ranks.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            _wait(ranks)
            times[name].append((time.perf_counter() - start) * 1e3 / STEPS)
    ranks.barrier()
    return {name: ranks.gather(np.array(taken)).max(axis=0) for name, taken in times.items()}


def figures_of_step(step: Step, problem: Problem, ranks: Ranks) -> dict[str, float | int | None]:
    """What a step asks of the host: the median time until its call returns, with an idle GPU before it; on GPUs also
    its kernels, calls that wait for the GPU, copies from device to device and allocations. Collective."""
    host_us = []
    for _ in range(_HOST_STEPS):
        ranks.barrier()
        start = time.perf_counter()
        step()
        host_us.append((time.perf_counter() - start) * 1e6)
    figures: dict[str, float | int | None] = {"host_us": rounded(statistics.median(host_us))}
    counted = dict.fromkeys(("launches", "waits", "copies", "allocations"))
    if ranks.device.type != "cuda":
        return figures | counted
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    trace = trace_step(step, row_numel=problem.case.num_slots * problem.case.shape.hidden)
    copies = sum(count for name, count in trace.copies.items() if "DtoD" in name or "PtoP" in name)
    copies += trace.row_copies.total()
    counts = (trace.kernels.total(), trace.waits.total(), copies, allocations)
    return figures | dict(zip(counted, counts, strict=True))


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
