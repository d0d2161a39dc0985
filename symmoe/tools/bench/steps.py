"""A differentiable step as a variant: eager, or captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.reference import MAX_ERROR, Reference
from symmoe.tools.bench.timing import DIRECTIONS, Clock, Mark, StreamMark, Variant

Forward = Callable[[], torch.Tensor]
Inputs = Sequence[torch.Tensor]  # of a step: x, probs, w1, w2 as it takes them


def eager_step(
    name: str,
    problem: Problem,
    reference: Reference,
    forward: Forward,
    inputs: Inputs,
    max_error: float = MAX_ERROR,
) -> Variant:
    """`forward` and its backward pass to all inputs. Calls follow each other without a pause."""
    return differentiated(name, forward, inputs, problem.tokens.dy, reference.step_error, max_error)


def differentiated(
    name: str,
    forward: Forward,
    inputs: Inputs,
    d_out: torch.Tensor,
    error: Callable[..., float],
    max_error: float,
) -> Variant:
    """`forward` and its backward pass from `d_out`; `error` is that of the result and of the gradients of `inputs`."""

    def call(clock: Clock) -> list[Mark]:
        marks = [clock.mark()]
        y = forward()
        marks.append(clock.mark())
        torch.autograd.grad(y, inputs, d_out)
        return [*marks, clock.mark()]

    def verify() -> float:
        y = forward()
        return error(y, *torch.autograd.grad(y, inputs, d_out))

    return Variant(name, DIRECTIONS, call, verify, max_error)


def captured_step(
    name: str,
    problem: Problem,
    reference: Reference,
    forward: Forward,
    inputs: Inputs,
    max_error: float = MAX_ERROR,
) -> Variant:
    """Same as :func:`eager_step`, but captured once and replayed. Runs the step before it captures it."""
    dy = problem.tokens.dy

    def backward(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, inputs, dy)

    # On the current stream: a second stream would make the heap keep events in the eager steps of the same run.
    backward(forward())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # External: every replay records them anew, so that the directions can be told apart.
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
    with torch.cuda.graph(graph):
        events[0].record()
        y = forward()
        events[1].record()
        gradients = backward(y)
        events[2].record()

    def call(clock: Clock) -> list[StreamMark]:
        graph.replay()
        reached: torch.cuda.Event = clock.mark().event
        return [StreamMark(event, reached) for event in events]

    def verify() -> float:
        for tensor in (y, *gradients):
            tensor.detach().fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        return reference.step_error(y, *gradients)

    return Variant(name, DIRECTIONS, call, verify, max_error, reuses_marks=True)
