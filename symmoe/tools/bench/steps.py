"""The suite "steps": whole steps as a training loop runs them, each kind following itself.

Where variants run in turn, the host of a fast one runs ahead while a slow one keeps the GPU busy, and launches do not
show. Here one kind of step runs `STEPS` times in a row. A step is forward and backward, to the gradients of x and of
all parameters, which are not added to earlier ones.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from symmoe.moe.layer import MoELayer
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.tools.bench.layer import Choice, make_experts, stock_step
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, case_record, rounded, tflops
from symmoe.tools.bench.reference import MAX_ERROR, Reference
from symmoe.tools.bench.stock_torch import STOCK
from symmoe.tools.bench.timing import WARM_UP, Run, largest_error

STEPS = 20  # in a row
_HOST_STEPS = 10  # steps whose launches are timed

Step = Callable[[], object]


LAYERS = {  # the whole MoELayer with its router
    "layer": Choice(static=False),
    "layer, losses": Choice(static=False, options={"aux_loss_coef": 1e-2, "z_loss_coef": 1e-3}),
    "layer, static": Choice(),
    "layer, graph": Choice(captured=True),
}
EXPERTS = {  # plan, dispatch, experts and combine
    "experts": Choice(static=False),
    "experts, static": Choice(),
    "experts, graph": Choice(captured=True),
}


def host_figures(step: Step, problem: Problem, ranks: Ranks) -> Record:
    """`host_us`: the median time until a step's call returns, with an idle GPU before it. Collective."""
    host_us = []
    for _ in range(_HOST_STEPS):
        ranks.barrier()
        start = time.perf_counter()
        step()
        host_us.append((time.perf_counter() - start) * 1e6)
    return {"host_us": rounded(statistics.median(host_us))}


def bench_steps(
    problem: Problem, run: Run, figures_of: Callable[[Step, Problem, Ranks], Record] = host_figures
) -> list[Record]:
    """Steps of the layer and of its experts, eager and replayed, and of the stock layer. Collective."""
    reference, on_gpu, steps, errors = Reference(problem), problem.device.type == "cuda", dict[str, Step](), {}
    for name, choice in (LAYERS | EXPERTS).items():
        if on_gpu or not choice.captured:  # there are no graphs on CPUs
            step, checked = _make(choice, problem, run, routes=name in LAYERS)
            errors[name] = largest_error(name, reference.step_error(*checked()), MAX_ERROR, run.ranks)
            steps[name] = _captured(step) if choice.captured else step
    steps[STOCK] = stock = stock_step(problem, reference).results
    errors[STOCK] = largest_error(STOCK, reference.step_error(*stock()), MAX_ERROR, run.ranks)
    times = times_in_a_row_ms(steps, run.ranks, run.repetitions)
    flops, records = 3 * problem.case.forward_flops, []
    for name, step in steps.items():
        figures: Record = {"tflops": tflops(flops, times[name]), "error": errors[name]}
        if name != STOCK:
            figures |= {"stock_tflops": tflops(flops, times[STOCK]), "yardstick": "stock_tflops"}
        figures |= figures_of(step, problem, run.ranks)
        records.append(case_record(problem, "steps", name, "step", times[name], **figures))
    steps.clear()  # ends the graphs before their memory is freed
    run.heap.release_graphs()
    return records


def _make(
    choice: Choice, problem: Problem, run: Run, *, routes: bool
) -> tuple[Step, Callable[[], tuple[torch.Tensor, ...]]]:
    """The step, and one of the same experts whose results can be compared with the reference."""
    capacity, num_slots = problem.static_capacity if choice.static else None, problem.case.num_slots
    if capacity is not None and routes:  # the layer's own router decides, whatever the case's skew is
        capacity = max(capacity, num_slots + 8 * math.isqrt(num_slots))
    config = choice.config(problem.case.shape, capacity)
    layer = MoELayer(config, run.heap, experts=make_experts(problem), dtype=DTYPE)
    experts = RoutedExperts.of(config, run.heap, layer.experts)
    x, probs, dy = problem.tokens.x, problem.tokens.probs, problem.tokens.dy
    weights = layer.experts.fc1.weight, layer.experts.fc2.weight

    def routed() -> tuple[torch.Tensor, ...]:
        y, *_ = experts.run(x, probs, problem.topk_idx, layer.experts)
        return (y, *torch.autograd.grad(y, (x, probs, *weights), dy))

    def whole() -> tuple[torch.Tensor, ...]:
        y, metrics = layer(x)
        more = [metrics.aux_loss] if config.aux_loss_coef else []
        return torch.autograd.grad((y, *more), (x, *layer.parameters()), (dy, *map(torch.ones_like, more)))

    return whole if routes else routed, routed


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
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            times[name].append((time.perf_counter() - start) * 1e3 / STEPS)
    ranks.barrier()
    return {name: ranks.gather(np.array(taken)).max(axis=0) for name, taken in times.items()}
