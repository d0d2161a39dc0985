"""CUDA graphs of what tests compute."""

from collections.abc import Callable
from typing import TypeVar

import torch

Results = TypeVar("Results")


def captured(
    step: Callable[[], Results], *, num_warm_ups: int = 2
) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of step(), and the results that each replay writes; warm-ups compile what it launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(num_warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
