"""Which kernels run where, and the seam between them and who calls them.

Tensors on a GPU have kernels in Triton, others the PyTorch twins. On Hopper, kernels in Gluon replace those in
Triton for the most common cases (hopper_choice.py). Modules of kernels are imported on first use, so that `import
symmoe` needs no Triton.

Who wants to see calls of kernels, or to take their place (dry runs, recordings, counters of FLOPs, timelines, tests),
has a hook: hook(name, kernel, *args, **kwargs) is called in place of kernel(*args, **kwargs).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from symmoe.kernels.twin import Kernels
from symmoe.program.builder import builder
from symmoe.program.program import Program
from symmoe.torch_internals import current_device, num_dispatch_modes

Hook = Callable[..., Any]

_hooks: dict[str, list[Hook]] = {"cuda": []}  # by type of device, the innermost first
_current: dict[str, Kernels] = {}  # by type of device: kernels with these hooks


class _Hooked:
    """Kernels whose calls go through a hook."""

    def __init__(self, kernels: Kernels, hook: Hook) -> None:
        self._kernels, self._hook = kernels, hook

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        return functools.partial(self._hook, name, found) if callable(found) else found


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`: Triton on CUDA, empty ones on "meta", the PyTorch twins elsewhere.

    While a dispatch mode looks on, it sees their products (kernels/flops.py). Look them up where they are called: hooks
    may have come or gone."""
    found = _current.get(device.type) or _look_up(device.type)
    if not num_dispatch_modes():
        return found
    if (current := builder()) is not None:  # which is a mode, too
        return cast(Kernels, _Hooked(found, current.kernel))
    from symmoe.kernels.flops import counted  # torch's counter, which it needs, imports Triton

    return cast(Kernels, _Hooked(found, counted))


@contextmanager
def hooked(device: torch.device, hook: Hook) -> Iterator[None]:
    """In this context, calls of the kernels for this type of device go through a hook, in all threads of the process.

    On GPUs no call runs a program meanwhile; on CPUs programs look kernels up as others do.
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
    """A function that returns for_device(device), in less time, but with no mode of this thread in between."""
    _look_up(device.type)
    return functools.partial(_current.__getitem__, device.type)


def _look_up(device_type: str) -> Kernels:
    found: Any
    if device_type == "cuda":
        from symmoe.kernels import gpu as found
    else:
        from symmoe.kernels import twin as found
    hooks = [_without_memory] if device_type == "meta" else []
    for hook in (*hooks, *_hooks.get(device_type, ())):
        found = _Hooked(found, hook)
    _current[device_type] = found
    return _current[device_type]


def _without_memory(
    name: str, kernel: Callable[..., Any], /, *args: object, **options: object
) -> int | None:
    """Takes the place of kernels of tensors that have shapes and no memory. One with a result returns a number."""
    return None if name == "read_addresses" else 0


def compiled_counter(device: torch.device) -> Callable[[], int]:
    """A function that says how many variants of the kernels for `device` this process has compiled so far, or found in
    a cache."""
    if device.type == "cuda":
        from symmoe.kernels.launch.launch import num_compiled

        return num_compiled
    return int  # PyTorch does not compile the twins


def may_run_programs(device: torch.device) -> Callable[[], bool]:
    """A function that says whether programs may run on `device` now: the driver can launch them, nobody has to see
    every launch, no graph is being captured, and it is the current device."""
    if device.type != "cuda":
        return lambda: device.type == "cpu"
    from symmoe.kernels.launch import driver
    from symmoe.kernels.launch.triton_internals import is_watched

    return lambda: (
        driver.can_launch()
        and not _hooks["cuda"]
        and not is_watched()
        and not torch.cuda.is_current_stream_capturing()
        and current_device() == device.index
    )


def program_compiler(device: torch.device) -> Callable[[Program], Program]:
    """A function that makes what is run of a program of kernels for `device`."""
    if device.type == "cuda":
        from symmoe.kernels.launch.player import in_sections

        return in_sections
    return lambda program: program
