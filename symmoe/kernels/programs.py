"""Programs of what needs no heap: grouped layers and routers by themselves."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from symmoe.kernels.select import kernel_getter, may_run_programs, program_compiler
from symmoe.program.programs import Programs
from symmoe.torch_internals import fills_memory


class _DevicePrograms(Programs):
    """Those of one device. fills: as in Programs."""

    def __init__(self, device: torch.device, *, fills: bool) -> None:
        kernels, compiled = kernel_getter(device), program_compiler(device)
        super().__init__(device, lambda error: None, (), kernels, compiled, fills=fills)
        self.may_run, self.turn = may_run_programs(device), threading.Lock()


_programs_of = functools.cache(_DevicePrograms)


def run_program(
    key: tuple[Hashable, ...], function: Callable[[], Sequence[Any]], inputs: Sequence[torch.Tensor]
) -> Sequence[Any]:
    """What function() does and returns, see Programs.run, on the device of the inputs; by itself where another thread
    runs one. torch decides whether memory is filled (torch.utils.deterministic)."""
    fills = torch.are_deterministic_algorithms_enabled()
    fills = fills and fills_memory()
    programs = _programs_of(inputs[0].device, fills=fills)
    if not programs.may_run() or not programs.turn.acquire(blocking=False):
        return function()
    try:
        return programs.run(key, function, inputs, {})
    finally:
        programs.turn.release()
