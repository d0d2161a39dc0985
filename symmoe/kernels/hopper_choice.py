"""The choice of kernels for Hopper, in Gluon, in place of Triton's kernels, with the same bits."""

import functools
from types import ModuleType

import torch

from symmoe.kernels import architectures

MIN_COLUMNS = 256  # of the output of a kernel for Hopper: a whole tile


def launched(
    name: str,
    output: tuple[torch.device, torch.dtype, int],
    operands: tuple[object, ...],
    *arguments: object,
    **options: object,
) -> bool:
    """Launches a kernel for Hopper, if one of this name takes such a call; False: the caller launches Triton's.

    Args:
        output: device, dtype and columns of the output.
        operands: the inputs of the kernel's own condition, see hopper_launchers.py.
        arguments, options: for its launcher.
    """
    launchers = hopper_kernels(*output)
    if launchers is None:
        return False
    launch, takes = launchers.LAUNCHERS[name]
    is_taken: bool = takes(*operands)
    if is_taken:
        launch(*arguments, **options)
    return is_taken


@functools.cache
def hopper_kernels(device: torch.device, dtype: torch.dtype, columns: int) -> ModuleType | None:
    """The launchers of the kernels for Hopper where these run and are faster; None elsewhere.

    Triton's pipeliner keeps all warps in step, so the tensor cores are idle during an epilogue. In the kernels for
    Hopper the epilogue runs during the next tile's products (docs/decisions/0003-kernels-on-hopper.md). Triton's
    kernels remain for other devices, for operands that the kernels for Hopper do not support (fp32, tables of weights,
    bias, interleaved features, narrow outputs, accumulation, weight gradients of gathered rows), and for FC1 of
    gathered rows, where Hopper's are slower. Hopper's kernels for E4M3 numbers (low_precision) also take tables and
    biases, and fp32 and accumulated weight gradients. dtype, columns: of the output.
    """
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or columns < MIN_COLUMNS
        or architectures.capability(device) != (9, 0)
    ):
        return None
    try:
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) not in architectures.TRITON_VERSIONS:
            return None
        from symmoe.kernels import hopper_launchers
    except (ImportError, AttributeError):
        return None
    return hopper_launchers
