"""Times MoE layers in turn: forward and backward, one repetition of each, on all ranks at once."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WARM_UP = 5  # kernels are compiled, buffers grow
# The largest rounding difference between the results of two layers, relative to the first one's norm.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: list[float]) -> Summary:
        """The summary of one or more values."""
        p10, median, p90 = (float(round(value, 4)) for value in np.percentile(values, (10, 50, 90)))
        return cls(median, p10, p90)


def time_layers(
    layers: dict[str, Any],
    x: torch.Tensor,
    dy: torch.Tensor,
    *,
    repetitions: int,
    reseed: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each MoE layer, {name: {"forward_ms", "backward_ms", "total_ms"}}. Collective.

    First the results of all layers are compared. In the timed part steps follow each other without a pause, as in
    training: before each the ranks' streams are aligned, not their hosts. A repetition takes as long as on its slowest
    rank. Each repetition makes new weight gradients.

    Args:
        layers: Megatron MoE layers with the same numbers.
        x, dy: [S, B, H], input and gradient of the output.
        repetitions: timed ones of each layer, after WARM_UP.
        reseed: sets Megatron's generators, so that random routing repeats.

    Raises:
        RuntimeError: two layers differ by more than rounding errors.
    """
    _compare(layers, x, dy, reseed)
    marks: dict[str, list[list[Any]]] = {name: [] for name in layers}
    for repetition in range(WARM_UP + repetitions):
        for name, layer in layers.items():
            _align(x.device)
            start = _now(x.device)
            y = layer(leaf := x.detach().requires_grad_())[0]
            middle = _now(x.device)
            y.backward(dy)
            end = _now(x.device)
            del y, leaf
            layer.zero_grad(set_to_none=True)
            if repetition >= WARM_UP:
                marks[name].append([start, middle, end])
    times = {}
    for name, points in marks.items():
        phases = torch.tensor(
            [_phases_ms(*point) for point in points], dtype=torch.float64, device=x.device
        )
        phases = torch.cat([phases, phases.sum(1, keepdim=True)], dim=1)
        dist.all_reduce(
            phases, op=dist.ReduceOp.MAX
        )  # of each repetition, the time on its slowest rank
        times[name] = {
            f"{phase}_ms": dataclasses.asdict(Summary.of(values))
            for phase, values in zip(
                ("forward", "backward", "total"), phases.T.tolist(), strict=True
            )
        }
    return times


def _compare(
    layers: dict[str, Any], x: torch.Tensor, dy: torch.Tensor, reseed: Callable[[], None]
) -> None:
    results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, layer in layers.items():
        reseed()
        leaf = x.detach().requires_grad_()
        y = layer(leaf)[0]
        y.backward(dy)
        results[name] = y.detach(), leaf.grad
        layer.zero_grad(set_to_none=True)
    for (first, want), (second, got) in itertools.pairwise(results.items()):
        for label, a, b in (("output", want[0], got[0]), ("input gradient", want[1], got[1])):
            worst = (
                ((b.float() - a.float()).norm() / a.float().norm())
                .reshape(1)
                .nan_to_num(nan=torch.inf)
            )
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # one rank's error ends all of them
            if worst.item() > TOLERANCE[x.dtype]:
                raise RuntimeError(
                    f"{label} of {second} differs from that of {first} by {worst.item():.2e} of its norm"
                )


def _now(device: torch.device) -> Any:
    """A point in time: of the current stream, on CPUs of the host."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _phases_ms(start: Any, middle: Any, end: Any) -> tuple[float, float]:
    if isinstance(end, float):
        return (middle - start) * 1e3, (end - middle) * 1e3
    end.synchronize()
    return start.elapsed_time(middle), middle.elapsed_time(end)


def _align(device: torch.device) -> None:
    """Aligns the ranks' streams; hosts of GPUs do not wait."""
    dist.all_reduce(torch.zeros(1, device=device))
