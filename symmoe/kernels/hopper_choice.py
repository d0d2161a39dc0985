"""Where kernels for Hopper, in Gluon, replace those in Triton, with the same bits."""

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
    """Launches a kernel for Hopper, if there is one of this name for such a call; False: Triton's has to be.

    Args:
        output: device, dtype and columns of the output.
        operands: what the kernel's own condition looks at, see hopper_launchers.py.
        arguments, options: of its launcher.
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
    """The launchers of the kernels for Hopper where they can run and pay; None elsewhere.

    Triton's pipeliner keeps all warps in step, so that nothing is multiplied during an epilogue. In the kernels for
    Hopper the epilogue runs during the next tile's products (docs/decisions/0003-kernels-on-hopper.md). Triton's
    kernels remain for other devices, for what those for Hopper do not take (fp32, tables of weights, bias, interleaved
    features, narrow outputs, accumulation, weight gradients of gathered rows), and where they are slower (FC1 of
    gathered rows). Those of E4M3 numbers (low_precision) take tables and biases; weight gradients may be fp32 and
    accumulated. dtype, columns: of the output.
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
