"""The internals of Triton that symmoe reads, for the supported versions: README.md lists them.

With any other Triton this module is not used: Triton's JIT launches all kernels, which is always correct.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import triton

from symmoe.errors import BackendUnavailable
from symmoe.kernels.architectures import TRITON_VERSIONS

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
try:
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
    from triton.compiler import CompiledKernel

    _RUNTIME, _COMPILATION = vars(knobs.runtime), vars(knobs.compilation)
    _DEBUG, _INSTRUMENTATION = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    IS_KNOWN = VERSION in TRITON_VERSIONS
except (AttributeError, ImportError):
    IS_KNOWN = False

# How the JIT treats an argument, by its parameter:
CONSTANT = 0  # compiled in, by its value
NUMBER = 1  # the signature fixes the type: never compiled in
RANGE = 2  # by type; integers by their range
VALUE = 3  # by type; integers by their range and whether they are 1 or a multiple of 16
ALIGNED_VALUE = 4  # like VALUE, and tensors by whether they are 16-byte aligned

MAP_BYTES = 128  # of a CUtensorMap; in Triton's object it begins at the first multiple of 128 behind the object's head


def mode(parameter: Any) -> int:
    """How the JIT treats the arguments of a kernel's parameter."""
    if parameter.is_constexpr:
        return CONSTANT
    name = parameter.annotation_type
    is_float_or_bool = name == "u1" or name[:2] in ("fp", "bf")
    if name and not name.startswith("*") and (parameter.do_not_specialize or is_float_or_bool):
        return NUMBER
    if parameter.do_not_specialize:
        return RANGE
    return VALUE if parameter.do_not_specialize_on_alignment else ALIGNED_VALUE


def is_watched(kernel: Any = None) -> bool:
    """Whether Triton's hooks or debugging must see every launch; if a kernel is given, also its own hooks.

    Environment variables (TRITON_DEBUG...) count with their values when this module was imported.
    """
    if not IS_KNOWN or (kernel is not None and (kernel.debug or kernel.pre_run_hooks)):
        return True
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        _RUNTIME.get(
            "debug", _DEBUG
        )  # runtime.debug without reading the environment, which takes 1 us
        or _COMPILATION.get("instrumentation_mode", _INSTRUMENTATION)
        or runtime.add_stages_inspection_hook is not None
        or (enter is not None and getattr(enter, "calls", True))  # by default an empty chain
        or (leave is not None and getattr(leave, "calls", True))
    )


def compiled_for(
    kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, Compiled | None]:
    """The JIT's compiled kernel for such arguments, not launched, and its data for launches; None, None if a hook of
    Triton has not compiled it, or not yet. Raises OutOfResources if it does not fit."""
    compiled = kernel.warmup(*args, grid=(1,), **options)
    if not isinstance(compiled, CompiledKernel):
        return None, None
    if isinstance(compiled.run, functools.partial):
        compiled.run()  # raises Triton's stored error if the kernel did not fit before
    return compiled, read_compiled(compiled)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The data of a compiled kernel for launches."""

    function: int  # the kernel, for the driver
    num_warps: int
    shared_bytes: int
    kinds: tuple[
        str, ...
    ]  # of all parameters, constants too, as Triton writes them; "tensordesc" for descriptors
    kernel: Any  # Triton's object; its destructor unloads the function

    @property
    def has_maps(self) -> bool:
        """Whether descriptors become tensor maps; elsewhere they become an address, sizes and strides."""
        return bool(getattr(self.kernel.metadata, "tensordesc_meta", None))


def read_compiled(kernel: Any) -> Compiled | None:
    """The kernel's data; None if its build is not supported, or if a launch must do more than pass arguments."""
    try:
        launcher, metadata = kernel.run, kernel.packed_metadata
        if not IS_KNOWN or type(launcher) is not CudaLauncher:
            return None
        num_warps, num_ctas, shared_bytes = metadata[:3]
        is_special = launcher.launch_cooperative_grid or launcher.launch_pdl or num_ctas != 1
        has_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if is_special or has_scratch or getattr(launcher, "gsan_enabled", False):
            return None
        kinds = [
            "tensordesc" if kind.startswith("tensordesc<") else kind
            for kind in kernel.src.signature.values()
        ]
        return Compiled(kernel.function, num_warps, shared_bytes, tuple(kinds), kernel)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def described_parts(
    compiled: Compiled, number: int, descriptor: Any
) -> tuple[tuple[int, ...], object] | None:
    """The kernel's values for its descriptor of this number: the address of the tensor map (0 if the kernel gets the
    tensor's address), then integers; and the map's owner. None if the build is not supported."""
    metadata = compiled.kernel.metadata.tensordesc_meta[number] if compiled.has_maps else None
    first, *integers = make_tensordesc_arg(
        descriptor, metadata, *([()] if VERSION >= (3, 8) else [])
    )
    if metadata is None:
        return (0, *map(int, integers)), None
    if type(first).__basicsize__ != 2 * MAP_BYTES:
        return None
    return (id(first) + MAP_BYTES, *map(int, integers)), first


def build_module(source: str, name: str) -> ModuleType:
    """A module in C, built in the same way as Triton's launchers. Raises BackendUnavailable if Triton's way is
    unknown."""
    try:
        from triton.runtime.build import compile_module_from_src
    except ImportError:
        raise BackendUnavailable(
            f"Triton {triton.__version__} has no compile_module_from_src"
        ) from None
    module: ModuleType = compile_module_from_src(source, name)
    return module
