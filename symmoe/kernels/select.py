"""The choice of kernels for a device, and hooks between kernels and their callers.

Tensors on a GPU use kernels in Triton, other tensors the PyTorch twins. On Hopper, kernels in Gluon replace Triton's in
the most common cases (hopper_choice.py). Modules of kernels are imported on first use, so that `import symmoe` needs no
Triton.

Tools that observe or replace calls of kernels (dry runs, recordings, counters of FLOPs, timelines, tests) add a hook:
hook(name, kernel, *args, **kwargs) is called instead of kernel(*args, **kwargs).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from symmoe.kernels.twin import Kernels
from symmoe.program.builder import builder
from symmoe.program.program import Program
from symmoe.torch_internals import current_device, is_capturing, num_dispatch_modes

Hook = Callable[..., Any]

_hooks: dict[str, list[Hook]] = {"cuda": []}  # by type of device, the innermost first
_current: dict[str, Kernels] = {}  # by type of device: kernels with these hooks


class _Hooked:
    """Kernels whose calls go through a hook."""

    def __init__(self, kernels: Kernels, hook: Hook) -> None:
        self._kernels, self._hook = kernels, hook

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)
        return functools.partial(self._hook, name, kernel) if callable(kernel) else kernel


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`: Triton on CUDA, empty kernels on "meta", the PyTorch twins elsewhere.

    An active dispatch mode sees their products (kernels/flops.py). Look kernels up at each call: hooks change."""
    kernels = _current.get(device.type) or _look_up(device.type)
    if not num_dispatch_modes():
        return kernels
    if (current := builder()) is not None:  # a builder is a mode, too
        return cast(Kernels, _Hooked(kernels, current.kernel))
    from symmoe.kernels.flops import counted  # flops imports torch's counter, which imports Triton

    return cast(Kernels, _Hooked(kernels, counted))


@contextmanager
def hooked(device: torch.device, hook: Hook) -> Iterator[None]:
    """In this context, calls of the kernels for this type of device go through a hook, in all threads of the process.

    Meanwhile, no call on GPUs runs a program; on CPUs programs look kernels up at each call.
    """
    hooks = _hooks.setdefault(device.type, [])
    hooks.append(hook)
    _look_up(device.type)
    try:
        yield
    finally:
        hooks.remove(hook)
        _look_up(device.type)


def has_hook(device: torch.device, hook: Hook) -> bool:
    """Whether calls go through this hook."""
    return hook in _hooks.get(device.type, ())


def kernel_getter(device: torch.device) -> Callable[[], Kernels]:
    """A faster function for for_device(device) that ignores this thread's modes."""
    _look_up(device.type)
    return functools.partial(_current.__getitem__, device.type)


def _look_up(device_type: str) -> Kernels:
    kernels: Any
    if device_type == "cuda":
        from symmoe.kernels import gpu as kernels
    else:
        from symmoe.kernels import twin as kernels
    hooks = [_without_memory] if device_type == "meta" else []
    for hook in (*hooks, *_hooks.get(device_type, ())):
        kernels = _Hooked(kernels, hook)
    _current[device_type] = kernels
    return _current[device_type]


def _without_memory(
    name: str, kernel: Callable[..., Any], /, *args: object, **options: object
) -> int | None:
    """Replaces kernels for tensors without memory. A kernel with a result returns a number."""
    return None if name == "read_addresses" else 0


def compiled_counter(device: torch.device) -> Callable[[], int]:
    """A function that returns how many variants of the kernels for `device` this process has compiled, or loaded from a
    cache."""
    if device.type == "cuda":
        from symmoe.kernels.launch.launch import num_compiled

        return num_compiled
    return int  # PyTorch does not compile the twins


def may_run_programs(device: torch.device) -> Callable[[], bool]:
    """A function that returns whether programs may run on `device` now: the driver can launch them, no hook must see
    every launch, no graph is being captured, and `device` is the current device."""
    if device.type != "cuda":
        return functools.partial(bool, device.type == "cpu")  # without a frame
    from symmoe.kernels.launch import driver
    from symmoe.kernels.launch.triton_internals import is_watched

    return lambda: (
        driver.can_launch()
        and not _hooks["cuda"]
        and not is_watched()
        and not is_capturing()
        and current_device() == device.index
    )


def program_compiler(device: torch.device) -> Callable[[Program], Program]:
    """A function that compiles a program of kernels for `device`."""
    if device.type == "cuda":
        from symmoe.kernels.launch.player import in_sections

        return in_sections
    return lambda program: program
