"""What one step launches, from torch.profiler: kernels, copies and calls that wait for the GPU; and what it copies.

A copy from device to device, or any call that makes the host wait, is a finding where a step shall be zero-copy; so
is a torch operator that copies a tensor of row size by a kernel (clone, copy_).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.torch_internals import TorchDispatchMode, pytree

STEP = "traced step"
# CUDA runtime and driver calls that return only when the GPU has got somewhere.
WAITING_CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
)
COPYING_OPERATORS = ("aten::copy_", "aten::clone", "aten::contiguous")
_DISPATCHED_COPIES = tuple(getattr(torch.ops.aten, name) for name in ("copy_", "clone", "cat", "stack"))


@dataclass(frozen=True)
class StepTrace:
    """One step as the profiler saw it.

    Attributes:
        kernels: name to launches.
        copies: kind ("Memcpy DtoD (Device -> Device)", "Memset (Device)", ...) to launches.
        waits: waiting call to how often it was made.
        row_copies: copying operator and shape to how often, for tensors of at least `row_numel` elements.
    """

    kernels: Counter[str]
    copies: Counter[str]
    waits: Counter[str]
    row_copies: Counter[str]

    @property
    def findings(self) -> list[str]:
        """What a zero-copy step with static capacity must not have."""
        found = [f"{count} x {name}" for name, count in self.copies.items() if "DtoD" in name or "PtoP" in name]
        found += [f"{count} x {name}" for name, count in self.waits.items()]
        return found + [f"{count} x {name}" for name, count in self.row_copies.items()]


def trace_step(step: Callable[[], object], *, row_numel: int) -> StepTrace:
    """Profiles one call of `step`, which has run before. Synchronises.

    Args:
        row_numel: elements from which a copy by a torch operator counts.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        with torch.profiler.record_function(STEP):
            step()
        torch.cuda.synchronize()  # outside of the step: everything it launched is in the trace
    events = profiler.events()
    whole = next(e.time_range for e in events if e.name == STEP and e.device_type.name == "CPU")
    kernels, copies, waits, row_copies = (Counter[str]() for _ in range(4))
    for event in events:
        if event.device_type.name == "CUDA":
            if event.name.startswith(("Memcpy", "Memset")):
                copies[event.name] += 1
            elif event.name != STEP:
                kernels[event.name] += 1
        elif whole.start <= event.time_range.start <= whole.end:
            if event.name in WAITING_CALLS:
                waits[event.name] += 1
            elif event.name in COPYING_OPERATORS and event.input_shapes and event.input_shapes[0]:
                shape = event.input_shapes[0]
                if torch.Size(shape).numel() >= row_numel:
                    row_copies[f"{event.name} {shape}"] += 1
    return StepTrace(kernels, copies, waits, row_copies)


def copied_bytes(step: Callable[[], object], tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of these tensors' memory that torch's operators copy in one call of `step`, on any device.

    Counts copy_, clone, cat and stack; no casts, and not what kernels of this package or of others copy.
    """
    copies = _CopiesOf(tensors)
    with copies:
        step()
    return copies.num_bytes


class _CopiesOf(TorchDispatchMode):
    """Adds up the bytes of copies of some tensors. It is passed on to the threads in which autograd runs backward."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _DISPATCHED_COPIES:
            sources = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.num_bytes += sum(s.nbytes for s in sources if s.untyped_storage().data_ptr() in self._storages)
        return func(*args, **(kwargs or {}))
