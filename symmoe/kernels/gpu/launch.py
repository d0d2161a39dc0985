"""Launches of Triton kernels that skip what the JIT would work out again in every call.

A launch through the JIT costs an H200's host about 34 us for a grouped GEMM, most of it spent on finding out which of
the compiled variants is meant and on asking the driver about every pointer; calling that variant itself costs 7 us.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

# What the JIT makes of an argument is decided by its parameter:
CONSTANT = 0  # compiled in, by its value
NUMBER = 1  # of a type that the signature fixes: never compiled in
VALUE = 2  # by type; integers by their range and whether they are 1 or a multiple of 16
ALIGNED_VALUE = 3  # like VALUE, and tensors by whether they are 16-byte aligned

NUMBER_TYPES = (int, bool, float)
CONSTANT_TYPES = (int, bool, float, str, type(None), tl.dtype)
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def fast_launch(kernel: Any) -> Any:
    """Decorator of an entry kernel, above `@triton.jit(...)`: `kernel[grid](*args, **kwargs)` as before, in less time.

    What is not a JITFunction (the interpreter's kernels) is returned as it is.
    """
    return FastLaunch(kernel) if isinstance(kernel, JITFunction) else kernel


class FastLaunch:
    """A Triton kernel that remembers the compiled variant of every kind of call.

    A call's key holds all that the JIT would look at: per parameter what `_mode` says, constants and options by type
    and value, the device. An unknown key goes through the JIT, which compiles if it has to. So does, every time, a call
    with something this class does not know (a tuple for an argument, a tensor on another device, a callable grid), and
    any call while somebody wants to see or change launches (hooks, debugging) or when a global that was compiled in
    has changed.

    Attributes:
        kernel: the JITFunction; `fn` is the same, as in Triton's own wrappers. All other attributes are the kernel's.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = self.fn = kernel
        self._modes = tuple(_mode(parameter) for parameter in kernel.params)
        self._forms: dict[tuple, _Form] = {}
        self._variants: dict[tuple, _Variant] = {}
        self._globals: tuple[_Globals, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # copied without __init__
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel | None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> CompiledKernel | None:
        form = self._forms.get((len(args), *kwargs)) or self._new_form(len(args), kwargs)
        if form is None or type(grid) is not tuple or _is_watched(self.kernel):
            return self.kernel[grid](*args, **kwargs)
        active = driver.active
        device = active.get_current_device()
        values = [*args, *form.rest(kwargs)]
        key = _bind(form, device, values, form.fixed(kwargs))
        try:
            variant = self._variants.get(key)
        except TypeError:  # a constant that cannot be hashed
            return self.kernel[grid](*args, **kwargs)
        if variant is None or not all(part.are_unchanged() for part in self._globals):
            compiled = self.kernel[grid](*args, **kwargs)
            if isinstance(compiled, CompiledKernel) and _is_understood(form, device, args, kwargs):
                self._learn(key, compiled)
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        variant.run(x, y, z, stream, variant.function, variant.metadata, None, None, None, *values)
        return variant.compiled

    def _new_form(self, num_args: int, kwargs: Mapping[str, Any]) -> "_Form | None":
        """The form of a call, remembered; None if arguments are missing or doubled."""
        names = self.kernel.arg_names
        by_position, rest = names[:num_args], names[num_args:]
        defaults = {p.name: p.default for p in self.kernel.params if p.has_default and p.name not in kwargs}
        if num_args > len(names) or not set(rest) <= {*kwargs, *defaults} or set(by_position) & set(kwargs):
            return None
        constants = {name for name, mode in zip(names, self._modes, strict=True) if mode == CONSTANT}
        options = [name for name in kwargs if name not in names]
        form = _Form(
            rest=_getter(rest, defaults),
            fixed=_getter([*(name for name in rest if name in constants), *options], defaults),
            looked_at=tuple(
                (i, mode) for i, mode in enumerate(self._modes) if i < num_args or names[i] not in constants
            ),
        )
        self._forms[(num_args, *kwargs)] = form
        return form

    def _learn(self, key: tuple, compiled: CompiledKernel) -> None:
        # The JIT has just compared the globals with what it had compiled in.
        self._globals = tuple(_Globals.of_kernel(self.kernel))
        self._variants[key] = _Variant(compiled, compiled.run, compiled.function, compiled.packed_metadata)


class _Variant(NamedTuple):
    """A compiled kernel and what its launcher is called with."""

    compiled: CompiledKernel
    run: Callable[..., None]
    function: int
    metadata: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """How calls with so many positional arguments and these keywords are read. Compared by identity.

    Attributes:
        rest: from the keywords, the arguments that were not given by position, in the kernel's order.
        fixed: from the keywords, constants of the kernel and options of the launch.
        looked_at: (index, mode) of every other argument.
    """

    rest: Callable[[Mapping[str, Any]], tuple]
    fixed: Callable[[Mapping[str, Any]], tuple]
    looked_at: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Globals:
    """Global variables of one module that are compiled into a kernel.

    Their identity is compared, not their value: a comparison of two tl.constexpr costs as much as the whole launch.
    """

    module: dict[str, Any]
    read: Callable[[Mapping[str, Any]], tuple]
    values: tuple

    @staticmethod
    def of_kernel(kernel: JITFunction) -> "list[_Globals]":
        names: dict[int, list[str]] = {}
        modules: dict[int, dict[str, Any]] = {}
        for (name, _), (_, module) in kernel.used_global_vals.items():
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
        reads = {key: _getter(names[key], {}) for key in names}
        return [_Globals(modules[key], read, read(modules[key])) for key, read in reads.items()]

    def are_unchanged(self) -> bool:
        try:
            return all(map(operator.is_, self.read(self.module), self.values))
        except KeyError:
            return False


def _mode(parameter: KernelParam) -> int:
    """How the JIT looks at arguments of a parameter."""
    if parameter.is_constexpr:
        return CONSTANT
    name = parameter.annotation_type
    is_float_or_bool = name == "u1" or name[:2] in ("fp", "bf")
    if name and not name.startswith("*") and (parameter.do_not_specialize or is_float_or_bool):
        return NUMBER
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return VALUE
    return ALIGNED_VALUE


def _bind(form: _Form, device: int, values: list[Any], fixed: tuple) -> tuple:
    """The key of a call. Puts addresses in the place of tensors: the launcher would look up each tensor's address.

    An argument's part of the key begins with its dtype or its type, which says how long the part is.
    """
    key = [form, device, *fixed, *map(type, fixed)]
    for i, mode in form.looked_at:
        value = values[i]
        kind = type(value)
        if kind in TENSOR_TYPES and mode >= VALUE:
            values[i] = address = value.data_ptr()
            key += (value.dtype, value.get_device())
            if mode == ALIGNED_VALUE:
                key.append(address % 16 == 0)
        elif kind is TensorDescriptor:
            key += (kind, value.base.dtype, value.base.get_device(), tuple(value.block_shape))
        elif mode == CONSTANT:
            key += (kind, value)
        elif kind is int and mode >= VALUE:
            key += (kind, _integer_class(value))
        else:
            key.append(kind)
    return tuple(key)


def _integer_class(value: int) -> tuple[bool, ...]:
    """What the JIT may compile in of an integer: 1 itself, that it is a multiple of 16, its type (i32, i64 or u64)."""
    return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63


def _is_understood(form: _Form, device: int, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether the key of a call holds all that the compiled code depends on, and the launcher needs no tensor."""
    values = [*args, *form.rest(kwargs)]
    return all(map(_is_constant, form.fixed(kwargs))) and all(
        _is_argument(values[i], mode, device) for i, mode in form.looked_at
    )


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else type(value) in CONSTANT_TYPES


def _is_argument(value: Any, mode: int, device: int) -> bool:
    if mode == CONSTANT:
        return _is_constant(value)
    if mode == NUMBER:
        return type(value) in NUMBER_TYPES
    tensor = value.base if type(value) is TensorDescriptor else value
    if type(tensor) in TENSOR_TYPES:  # the JIT's launcher refuses host memory
        return tensor.get_device() == device
    return value is None or type(value) in NUMBER_TYPES


def _is_watched(kernel: JITFunction) -> bool:
    """Whether somebody wants to see or change launches or compilations, which the JIT has to tell them."""
    runtime = knobs.runtime
    return bool(
        runtime.debug
        or kernel.debug
        or kernel.pre_run_hooks
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
        or _has_hooks(runtime.launch_enter_hook)
        or _has_hooks(runtime.launch_exit_hook)
    )


def _has_hooks(hook: Any) -> bool:
    """Whether a launch hook of triton.knobs would do anything; by default it is an empty chain."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _getter(names: list[str], defaults: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple]:
    """Function from a mapping to the tuple of its values under `names`; it lacks those that have defaults."""
    if len(names) > 1 and not set(names) & set(defaults):
        return operator.itemgetter(*names)  # which for one name would return no tuple
    return lambda mapping: tuple([defaults[name] if name in defaults else mapping[name] for name in names])
