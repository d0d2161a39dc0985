"""Which kernels run where: the only file that chooses.

Tensors on a GPU have kernels in Triton, others the PyTorch twins. On Hopper, kernels in Gluon replace those in
Triton for the most common cases, with the same bits. Modules of kernels are imported on first use, so that `import
symmoe` needs no Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import cast

import torch

from symmoe.kernels.activation import Activation
from symmoe.kernels.contract import Kernels
from symmoe.tape.recorder import RecordedModule, recorder
from symmoe.tape.tape import Tape
from symmoe.torch_internals import num_dispatch_modes

TRITON_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))  # whose insides and Gluon are known; they change in every one
MIN_COLUMNS = 256  # of the output of a kernel for Hopper: a whole tile
ACT_COLUMNS = 128  # of a tile of grouped_gemm_act for Hopper
MAX_ROWS = 2**30  # of an output that is stored by TMA


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


def tape_compiler(device: torch.device) -> Callable[[Tape], Tape]:
    """A function that makes a tape of kernels for `device` play in less time, if it can."""
    if device.type == "cuda":
        from symmoe.kernels.launch.player import compiled_tape

        return compiled_tape
    return lambda tape: tape


@functools.cache
def hopper_kernels(device: torch.device, dtype: torch.dtype, columns: int) -> ModuleType | None:
    """The launchers of the kernels for Hopper where they can run and pay; None elsewhere.

    Triton's pipeliner keeps all warps in step, so that nothing is multiplied during an epilogue. In the kernels for
    Hopper the epilogue runs during the next tile's products; docs/performance.md has the numbers. Triton's kernels
    remain for other devices, for what those for Hopper do not take (fp32, tables of weights, bias, interleaved
    features, narrow outputs, accumulation, weight gradients of gathered rows), and where they are slower (FC1 of
    gathered rows). Those of E4M3 numbers (low_precision) take tables and biases; weight gradients may be fp32 and
    accumulated.

    Args:
        dtype: dtype of the output.
        columns: columns of the output.
    """
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or columns < MIN_COLUMNS
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return None
    try:
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) not in TRITON_VERSIONS:
            return None
        from symmoe.kernels.hopper import launchers
    except (ImportError, AttributeError):
        return None
    return launchers


def takes_act(num_rows: int, ffn: int, activation: Activation) -> bool:
    """Whether grouped_gemm_act has a kernel for Hopper: gates and ups in halves that whole tiles fill."""
    return activation.is_gated and activation.interleave is None and ffn % ACT_COLUMNS == 0 and num_rows <= MAX_ROWS
