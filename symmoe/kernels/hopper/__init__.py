"""The grouped GEMMs again, for Hopper alone: warp-specialised kernels in Gluon, with the bits of Triton's kernels.

Triton's pipeliner keeps all warps in step, so that nothing is multiplied during an epilogue. Here it runs beside the
next tile's products; docs/performance.md has the numbers. What these kernels do not take (fp32, tables of weights,
bias, interleaved features, narrow outputs, results added to others, weight gradients of gathered rows), where they do
not pay (FC1 of gathered rows), and other devices stay with triton/gemm.py and triton/gemm_act.py. Weight gradients of
E4M3 numbers are taken in fp32, too, and added to others (low_precision/hopper_fp8_wgrad.py: fp32 by TMA).
"""

import functools
from types import ModuleType

import torch
import triton

from symmoe.kernels.activation import Activation

VERSIONS = ((3, 6), (3, 7))  # of Triton: Gluon is experimental, and changes
MIN_COLUMNS = 256  # of the output: a whole tile
ACT_COLUMNS = 128  # of a tile of grouped_gemm_act
MAX_ROWS = 2**30  # of an output that is stored by TMA


@functools.cache
def kernels(device: torch.device, dtype: torch.dtype, columns: int) -> ModuleType | None:
    """The module of the launchers where their kernels can run and pay; None elsewhere."""
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or columns < MIN_COLUMNS
        or tuple(map(int, triton.__version__.split(".")[:2])) not in VERSIONS
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return None
    try:
        from symmoe.kernels.hopper import launchers
    except (ImportError, AttributeError):
        return None
    return launchers


def takes_act(num_rows: int, ffn: int, activation: Activation) -> bool:
    """Whether grouped_gemm_act has a kernel for this: gates and ups in halves that whole tiles fill."""
    return activation.is_gated and activation.interleave is None and ffn % ACT_COLUMNS == 0 and num_rows <= MAX_ROWS
