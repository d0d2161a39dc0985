"""Which kernels run where.

Tensors on a GPU have kernels in Triton, others the PyTorch twins. On Hopper, kernels in Gluon replace those in
Triton for the most common cases (hopper_choice.py). Modules of kernels are imported on first use, so that `import
symmoe` needs no Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import cast

import torch

from symmoe.kernels.contract import Kernels
from symmoe.tape.recorder import RecordedModule, recorder
from symmoe.tape.tape import Tape
from symmoe.torch_internals import num_dispatch_modes


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`: Triton on CUDA, empty ones on "meta", the PyTorch twins elsewhere.

    While a dispatch mode looks on, it sees their products (kernels/flops.py)."""
    found = _for_type(device.type)
    if recorder() is not None:  # which is a mode, too
        return cast(Kernels, RecordedModule(cast(ModuleType, found))) if device.type == "cpu" else found
    if num_dispatch_modes() > 0:
        from symmoe.kernels.flops import CountedKernels  # torch's counter, which it needs, imports Triton

        return cast(Kernels, CountedKernels(found))
    return found


@functools.cache
def _for_type(device_type: str) -> Kernels:
    if device_type == "cuda":
        from symmoe.kernels import gpu

        return gpu
    if device_type == "meta":
        from symmoe.kernels import meta_kernels

        return cast(Kernels, meta_kernels)  # a module that answers to every name
    from symmoe.kernels import twin

    return twin


def compiled_counter(device: torch.device) -> Callable[[], int]:
    """A function that says how many variants of the kernels for `device` this process has compiled so far, or found in
    a cache."""
    if device.type == "cuda":
        from symmoe.kernels.launch.launch import num_compiled

        return num_compiled
    return int  # PyTorch does not compile the twins


def watcher(device: torch.device) -> Callable[[], bool]:
    """A function that says whether somebody has to see every launch of the kernels for `device`."""
    if device.type == "cuda":
        from symmoe.kernels.launch.triton_internals import is_watched

        return is_watched
    return bool


def tape_compiler(device: torch.device) -> Callable[[Tape], Tape | None]:
    """A function that makes what is played of a tape of kernels for `device`; None where they are not played."""
    if device.type == "cuda":
        from symmoe.kernels.launch.player import compiled_tape

        return compiled_tape
    return lambda tape: tape
