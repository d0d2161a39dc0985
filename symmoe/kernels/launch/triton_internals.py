"""What symmoe reads of Triton that is not public, for the versions whose insides are known: README.md has the list.

With any other Triton nothing here is asked: kernels are launched by Triton's JIT, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import triton

from symmoe.errors import BackendUnavailable
from symmoe.kernels.architectures import TRITON_VERSIONS

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
try:
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
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

_MAP_BYTES = 128  # of a CUtensorMap; in Triton's object it begins at the first multiple of 128 behind the object's head


def mode(parameter: Any) -> int:
    """How the JIT treats arguments of a parameter of a kernel."""
    if parameter.is_constexpr:
        return CONSTANT
    name = parameter.annotation_type
    is_float_or_bool = name == "u1" or name[:2] in ("fp", "bf")
    if name and not name.startswith("*") and (parameter.do_not_specialize or is_float_or_bool):
        return NUMBER
    if parameter.do_not_specialize:
        return RANGE
    return VALUE if parameter.do_not_specialize_on_alignment else ALIGNED_VALUE


def constants_of(kernel: triton.JITFunction, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of a kernel's constants in a launch that names some of them."""
    return tuple([named.get(p.name, p.default) for p in kernel.params if p.is_constexpr])


def compiled_in(kernel: triton.JITFunction) -> list[tuple[str, dict[str, Any]]]:
    """(name, variables of its module) of the global variables that have been compiled into a kernel."""
    return [(name, module) for (name, _), (_, module) in kernel.used_global_vals.items()]


def is_watched(kernel: Any = None) -> bool:
    """Whether hooks or debugging of Triton have to see every launch; those of one kernel, if it is given."""
    if not IS_KNOWN or (kernel is not None and (kernel.debug or kernel.pre_run_hooks)):
        return True
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        _RUNTIME.get("debug", _DEBUG)  # runtime.debug without reading the environment, which takes 1 us
        or _COMPILATION.get("instrumentation_mode", _INSTRUMENTATION)
        or runtime.add_stages_inspection_hook is not None
        or (enter is not None and getattr(enter, "calls", True))  # by default an empty chain
        or (leave is not None and getattr(leave, "calls", True))
    )


def is_compiled(result: Any) -> bool:
    """Whether what a launch by the JIT returned is the compiled kernel."""
    return IS_KNOWN and isinstance(result, CompiledKernel)


def runner(compiled: Any) -> tuple[Any, Any, Any]:
    """What the JIT launches a compiled kernel by: launcher, kernel, metadata."""
    return compiled.run, compiled.function, compiled.packed_metadata


class Launcher(NamedTuple):
    """The parts of CudaLauncher for one compiled kernel.

    Attributes:
        call: the function in C, to be called with (x, y, z, stream, *head, ...).
        head: from the kernel's function to what precedes the kernel's arguments.
        takes_list: whether the arguments are one parameter.
        maps: by place, functions from a descriptor to tensor map, shape and strides.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    takes_list: bool
    maps: Mapping[int, Callable[[Any], list[Any]]]


def launcher_of(compiled: Any, places: list[int]) -> Launcher | None:
    """The launcher of a kernel; None if Triton's launcher is not built as is known, or does more.

    places: places of the arguments that are descriptors, in order.
    """
    launcher, function, metadata = runner(compiled)
    if not IS_KNOWN or type(launcher) is not CudaLauncher:
        return None
    try:
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            return None
        head = (function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        call, maps = _unwrap(launcher.launch)
        if list(maps) != places or not callable(call):
            return None
        if VERSION == (3, 6):
            return Launcher(call, (*head, None, None, metadata, None, None, None), False, maps)
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature
        return Launcher(call, (*head, metadata, None, None, None, None, None, annotations, signature), True, maps)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _unwrap(launch: Callable[..., None]) -> tuple[Callable[..., None], dict[int, Callable[[Any], list[Any]]]]:
    """The function in C behind CudaLauncher.launch, and by place the functions that encode descriptors.

    KeyError or similar if there is anything else in between.
    """
    if type(launch) is not FunctionType:
        return launch, {}
    # `inner` of triton.backends.nvidia.driver.wrap_handle_tensordesc; since 3.8 of triton.backends.driver
    cells = dict(
        zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True)
    )
    call, metadata = cells.pop("launcher"), cells.pop("tensordesc_meta")
    rest: tuple[Any, ...] = ()
    if VERSION < (3, 8):
        places, encode = sorted(cells.pop("tensordesc_indices")), launch.__globals__["make_tensordesc_arg"]
    else:
        paths, encode, rest = cells.pop("relevant_paths"), cells.pop("make_tensordesc_arg"), ((),)
        del cells["signature"]
        places = list(paths)
        if any(paths.values()):  # descriptors in tuples
            raise ValueError("an unknown launcher")
    if cells or type(call) is FunctionType or None in metadata:  # no metadata: the kernel takes no tensor map
        raise ValueError("an unknown launcher")

    def encoder(data: Any) -> Callable[[Any], list[Any]]:
        return lambda descriptor: encode(descriptor, data, *rest)

    return call, {place: encoder(data) for place, data in zip(places, metadata, strict=True)}


def launch_shape(compiled: Any) -> tuple[int, int, int, bool]:
    """(warps, CTAs of a cluster, bytes of shared memory, whether the launch has further attributes) of a kernel."""
    launcher, _, metadata = runner(compiled)
    return *metadata[:3], bool(launcher.launch_cooperative_grid or launcher.launch_pdl)


def signature_of(compiled: Any) -> list[Any]:
    """The types of a compiled kernel's parameters, as Triton writes them."""
    return list(compiled.src.signature.values())


def address_of_map(triton_map: Any) -> tuple[int, int] | None:
    """(address, bytes) of the CUtensorMap in Triton's object; None if that is built in another way."""
    if type(triton_map).__basicsize__ != 2 * _MAP_BYTES:
        return None
    return id(triton_map) + _MAP_BYTES, _MAP_BYTES


def build_module(source: str, name: str) -> ModuleType:
    """A module in C, built as Triton builds its launchers.

    Raises:
        BackendUnavailable: this Triton builds them in another way.
    """
    try:
        from triton.runtime.build import compile_module_from_src
    except ImportError:
        raise BackendUnavailable(f"Triton {triton.__version__} has no compile_module_from_src") from None
    module: ModuleType = compile_module_from_src(source, name)
    return module
