"""A module that runs on a CUDA stream of its own, beside what the current stream does meanwhile."""

from __future__ import annotations

import torch
from torch import nn


def start_beside(module: nn.Module, x: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """module(x) on `stream`, from where the current stream is now; None: on the current stream.

    The result may be used after :func:`join`. Autograd runs the module's backward on `stream` too, and orders it
    against its neighbours'.
    """
    y: torch.Tensor
    if stream is None:
        y = module(x)
        return y
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        y = module(x)
    x.record_stream(stream)  # or its memory might go to somebody else while `stream` still reads it
    return y


def join(y: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """y, from :func:`start_beside`, for use on the current stream."""
    if stream is not None:
        current = torch.cuda.current_stream(y.device)
        current.wait_stream(stream)
        y.record_stream(current)
    return y
