"""Device code and its PyTorch twins. Both have the type `twin.Kernels`.

This package may import errors, program and autograd only. Begin with `twin`, which defines what every kernel computes,
then `select` (kernels by device, hooks) and `hopper_choice` (where kernels for Hopper replace Triton's).
"""

from symmoe.kernels.select import (
    compiled_counter,
    for_device,
    has_hook,
    hooked,
    kernel_getter,
    may_run_programs,
    program_compiler,
)
from symmoe.kernels.twin import Kernels

__all__ = [
    "Kernels",
    "compiled_counter",
    "for_device",
    "has_hook",
    "hooked",
    "kernel_getter",
    "may_run_programs",
    "program_compiler",
]
