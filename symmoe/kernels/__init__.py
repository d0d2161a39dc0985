"""Device code and its PyTorch twins, both of the type `twin.Kernels`.

May use errors, program and autograd only. Begin with `twin`, which defines what every kernel computes, then `select`
(which device has which kernels, and who stands in between) and `hopper_choice` (where those for Hopper replace others).
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
