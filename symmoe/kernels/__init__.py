"""Device code and its PyTorch twins, both of the type `contract.Kernels`.

May use errors, program and autograd only. Begin with `contract`, which says what every kernel computes, then `select`
(which device has which kernels, and who stands in between) and `hopper_choice` (where those for Hopper replace others).
"""

from symmoe.kernels.contract import Kernels
from symmoe.kernels.select import (
    compiled_counter,
    for_device,
    has_hook,
    hooked,
    kernel_getter,
    may_run_programs,
    program_compiler,
)

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
