"""Megatron-Core on a machine without CUDA: stand-ins for the few names that it lacks. For examples and tests only.

Megatron-Core assumes a GPU in a few places. `install()` replaces them by their equivalents on a CPU. symmoe does not
need this file.
"""

from __future__ import annotations

import os
from typing import Any

import megatron_without_te
import torch


class _NoStream:
    """A stand-in for a CUDA stream: all work is finished at any query."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """There is nothing to wait for."""

    def record_event(self) -> _NoStream:
        """A completed event."""
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _NoStreamContext:
    def __init__(self, stream: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def install() -> None:
    """Makes megatron.core run in this process without Transformer Engine, and without a GPU on CPUs.

    Call it before building a model.
    """
    if not torch.cuda.is_available():
        _stand_in_for_cuda()
    megatron_without_te.install()


def _stand_in_for_cuda() -> None:
    os.environ.setdefault(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1"
    )  # Megatron asks for it with tensor parallelism
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.Stream = _NoStream  # a class, as annotations need one
    torch.cuda.current_stream = _NoStream
    torch.cuda.stream = _NoStreamContext
    torch.cuda.synchronize = lambda *args: None
    # Megatron keeps one generator per purpose, and switches the GPU's state between them.
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Their own versions look for a default generator of the GPU.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    token_dispatcher.maybe_move_tensor_to_cpu = _tensor_to_cpu


def _tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's function of this name forgets `as_numpy` for tensors that are on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
