"""Programs of functions without a heap: grouped layers and standalone routers."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from symmoe.kernels.operands import require_tensor
from symmoe.kernels.select import kernel_getter, may_run_programs, program_compiler
from symmoe.program.programs import Programs
from symmoe.torch_internals import fills_memory


class _DevicePrograms(Programs):
    """The programs of one device. fills: as in Programs."""

    def __init__(self, device: torch.device, *, fills: bool) -> None:
        kernels, compiled = kernel_getter(device), program_compiler(device)
        super().__init__(device, lambda error: None, (), kernels, compiled, fills=fills)
        self.may_run, self.turn = may_run_programs(device), threading.Lock()


_programs_of = functools.cache(_DevicePrograms)


def run_program(
    key: tuple[Hashable, ...],
    function: Callable[[], Sequence[Any]],
    inputs: Sequence[torch.Tensor | None],
) -> Sequence[Any]:
    """Runs function() as a program, see Programs.run, on the device of the first input; without a program while another
    thread runs one. torch.utils.deterministic decides whether memory is filled."""
    fills = torch.are_deterministic_algorithms_enabled()
    fills = fills and fills_memory()
    programs = _programs_of(require_tensor("inputs[0]", inputs[0]).device, fills=fills)
    if not programs.may_run() or not programs.turn.acquire(blocking=False):
        return function()
    try:
        return programs.run(key, function, inputs, {})
    finally:
        programs.turn.release()
