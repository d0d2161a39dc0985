"""Launches of Triton kernels that skip what the JIT would work out again in every call.

A launch through the JIT costs an H200's host about 34 us for a grouped GEMM: for finding out which of the compiled
variants is meant, for asking the driver about every pointer, and for encoding tensor maps that have not changed.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, KernelParam

from symmoe.kernels.launch import driver
from symmoe.kernels.launch.compiled import Describe, Launch, compiled_launch, picker

# What the JIT makes of an argument is decided by its parameter:
CONSTANT = 0  # compiled in, by its value
NUMBER = 1  # of a type that the signature fixes: never compiled in
RANGE = 2  # by type; integers by their range
VALUE = 3  # by type; integers by their range and whether they are 1 or a multiple of 16
ALIGNED_VALUE = 4  # like VALUE, and tensors by whether they are 16-byte aligned

NUMBER_TYPES = (int, bool, float)
CONSTANT_TYPES = (int, bool, float, str, NoneType, tl.dtype)
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)

_ADDRESS, _DEVICE, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.get_device, operator.attrgetter("dtype")

# What torch.cuda.current_device does if CUDA is in use, in a fifth of its time.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
CPU = -1  # what Tensor.get_device says
_RUNTIME, _COMPILATION = vars(knobs.runtime), vars(knobs.compilation)
_DEBUG, _INSTRUMENTATION = knobs.runtime.debug, knobs.compilation.instrumentation_mode


class Constants:
    """What many calls of one kernel have in common. Compared by identity: make one, keep it, and use it for all calls.

    Attributes:
        named: the kernel's constants and the launch's options.
        descriptors: by position, functions from a tensor to its descriptor: there a call gives the contiguous tensor,
            or None. The result must depend on the tensor's address, dtype and shape, and on nothing else.
    """

    __slots__ = ("descriptors", "named")

    def __init__(self, named: Mapping[str, Any], descriptors: Mapping[int, Describe] | None = None) -> None:
        self.named = named
        self.descriptors = descriptors or {}

    def described(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as Triton wants them, with tensor descriptors."""
        if not self.descriptors:
            return args
        result = [*args]
        for i, describe in self.descriptors.items():
            if args[i] is not None:
                result[i] = describe(args[i])
        return tuple(result)


def fast_launch(kernel: Any) -> Any:
    """Decorator of an entry kernel, above `@triton.jit(...)`: `kernel[grid](*args, **kwargs)` as before, in less time.

    The kernel's constants must be its last parameters. What is not a JITFunction (the interpreter's kernels) is
    returned as it is.
    """
    return FastLaunch(kernel) if isinstance(kernel, JITFunction) else kernel


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants, *args: Any) -> None:
    """kernel[grid](*args, **constants.named) on the device of the first tensor, in the least time.

    args: one for each parameter that is no constant.
    """
    if type(kernel) is FastLaunch:
        kernel.launch(grid, constants, args, switch=True)
    else:
        kernel[grid](*constants.described(args), **constants.named)


def num_compiled() -> int:
    """How many variants of kernels this process has compiled so far, or found in a cache."""
    return FastLaunch.num_compiled


class FastLaunch:
    """A Triton kernel that remembers the compiled variant of every kind of call.

    A call's key holds all that the JIT would look at: per parameter what `_mode` says, constants and options by type
    and value, the device. An unknown key goes through the JIT, which compiles if it has to. So does, every time, a call
    with something this class does not know (a tuple for an argument, a tensor on another device, a callable grid), and
    any call while somebody wants to see or change launches (hooks, debugging) or when a global that was compiled in
    has changed.

    Attributes:
        kernel: the JITFunction; `fn` is the same, as in Triton's own wrappers. All other attributes are the kernel's.
        num_compiled: variants that all kernels of this process remember.
    """

    num_compiled = 0

    def __init__(self, kernel: JITFunction) -> None:
        modes = [_mode(parameter) for parameter in kernel.params]
        self.kernel = self.fn = kernel
        self._modes = [mode for mode in modes if mode != CONSTANT]
        if CONSTANT in modes[: len(self._modes)]:
            raise TypeError(f"the constants of {kernel.__name__} must be its last parameters")
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._constants: dict[tuple[Any, ...], Constants] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._globals: list[_Globals] = []

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # copied without __init__
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledKernel | None]:
        return functools.partial(self._launch_form, grid)

    def _launch_form(self, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> CompiledKernel | None:
        """A call like one of the JIT's: finds its Constants."""
        form = self._forms.get((len(args), *kwargs)) or self._new_form(len(args), kwargs)
        if form is None or type(grid) is not tuple:
            return self._compile(grid, args, kwargs)
        fixed = (*args[len(self._modes) :], *form.fixed(kwargs))
        key = (form, fixed, *map(type, fixed))
        try:
            constants = self._constants.get(key)
        except TypeError:  # a constant that cannot be hashed
            return self._compile(grid, args, kwargs)
        if constants is None:
            if not all(map(_is_constant, fixed)):
                return self._compile(grid, args, kwargs)
            constants = Constants(dict(zip(form.names, fixed, strict=True)))
            self._constants[key] = constants
        return self.launch(grid, constants, (*args[: len(self._modes)], *form.arguments(kwargs)), switch=False)

    def _new_form(self, num_args: int, kwargs: Mapping[str, Any]) -> "_Form | None":
        """The form of a call, remembered; None if arguments are missing or doubled."""
        names = self.kernel.arg_names
        by_position, rest = names[:num_args], names[num_args:]
        defaults = {p.name: p.default for p in self.kernel.params if p.has_default and p.name not in kwargs}
        if num_args > len(names) or not set(rest) <= {*kwargs, *defaults} or set(by_position) & set(kwargs):
            return None
        arguments = [name for name in rest if name in names[: len(self._modes)]]
        fixed = [name for name in kwargs if name not in arguments]
        form = _Form(
            arguments=_getter(arguments, defaults),
            fixed=_getter(fixed, {}),
            names=(*by_position[len(self._modes) :], *fixed),
        )
        key = (num_args, *kwargs)
        self._forms[key] = form
        return form

    def launch(
        self, grid: tuple[int, ...], constants: Constants, args: tuple[Any, ...], *, switch: bool
    ) -> CompiledKernel | None:
        """A call with one argument for each parameter that is no constant. switch: to the first tensor's device."""
        call = self._calls.get((constants, *map(type, args))) or self._new_call(constants, args)
        if call is None or self._is_watched():
            return self._launch_by_jit(grid, constants, args, switch)
        tensors = call.tensors(args)
        addresses = tuple(map(_ADDRESS, tensors))
        device = current_device()
        key = (
            device,
            *map(_DTYPE, tensors),
            *map(_DEVICE, tensors),
            call.aligned is None or _alignment(call.aligned(addresses)),
            call.numbers and tuple([look(args[i]) for i, look in call.numbers]),
        )
        variant = call.variants.get(key)
        if variant is None:
            compiled = self._launch_by_jit(grid, constants, args, switch)
            # The JIT's launcher refuses host memory and that of other devices, which addresses do not show.
            if isinstance(compiled, CompiledKernel) and all(tensor.get_device() == device for tensor in tensors):
                FastLaunch.num_compiled += 1
                call.variants[key] = (compiled, self._learn(compiled, constants, args, call))
            return compiled
        compiled, run = variant
        run(grid, current_stream(device), tensors, addresses, args)
        return compiled

    def _learn(self, compiled: CompiledKernel, constants: Constants, args: tuple[Any, ...], call: "_Call") -> Launch:
        """How to launch what the JIT has just launched."""
        self._globals = _Globals.of_kernel(self.kernel)  # which the JIT has compared with what it had compiled in
        values = tuple([constants.named.get(p.name, p.default) for p in self.kernel.params if p.is_constexpr])
        return compiled_launch(compiled, args, values, call.places, constants.descriptors)

    def _new_call(self, constants: Constants, args: tuple[Any, ...]) -> "_Call | None":
        """How to look at calls with arguments of these types, remembered; None if they are not understood."""
        if len(args) != len(self._modes) or not all(map(_is_argument, args, self._modes)):
            return None
        tensors = [i for i, value in enumerate(args) if type(value) in TENSOR_TYPES]
        if not all(args[i] is None or i in tensors for i in constants.descriptors):
            return None
        aligned = [
            n for n, i in enumerate(tensors) if self._modes[i] == ALIGNED_VALUE and i not in constants.descriptors
        ]
        numbers = [
            (i, _integer_range if mode == RANGE else _integer_class)
            for i, mode in enumerate(self._modes)
            if type(args[i]) is int and mode != NUMBER
        ]
        call = _Call(tensors, picker(tensors), picker(aligned) if aligned else None, tuple(numbers), {})
        key = (constants, *map(type, args))
        self._calls[key] = call
        return call

    def _launch_by_jit(
        self, grid: tuple[int, ...], constants: Constants, args: tuple[Any, ...], switch: bool
    ) -> CompiledKernel | None:
        """A launch in the ordinary way, or, on another device, the whole launch again."""
        home = next((value.get_device() for value in args if isinstance(value, torch.Tensor)), CPU)
        if switch and home not in (current_device(), CPU):
            with torch.cuda.device(home):
                return self.launch(grid, constants, args, switch=False)
        return self._compile(grid, constants.described(args), constants.named)

    def _compile(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompiledKernel | None:
        """A launch through the JIT."""
        driver.ensure_context()
        return self.kernel[grid](*args, **kwargs)

    def _is_watched(self) -> bool:
        """Whether the JIT has to see a launch: hooks, debugging, or a changed global, of which it complains.

        Of the environment's variables (TRITON_DEBUG...) counts what they were when this module was imported.
        """
        kernel, runtime = self.kernel, knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if (
            kernel.debug
            or kernel.pre_run_hooks
            or _RUNTIME.get("debug", _DEBUG)  # as runtime.debug, without asking the environment, which costs 1 us
            or _COMPILATION.get("instrumentation_mode", _INSTRUMENTATION)
            or runtime.add_stages_inspection_hook is not None
            or (enter is not None and getattr(enter, "calls", True))  # by default an empty chain
            or (leave is not None and getattr(leave, "calls", True))
        ):
            return True
        try:
            for part in self._globals:
                if part.read(part.module) != part.values:
                    return True
        except KeyError:
            return True
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """How calls in the JIT's way, with so many positional arguments and these keywords, are read.

    Compared by identity.

    Attributes:
        arguments: from the keywords, the arguments that were not given by position, in the kernel's order.
        fixed: from the keywords, constants of the kernel and options of the launch.
        names: of constants and options, those given by position first.
    """

    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    fixed: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """How calls with the same constants and the same types of arguments are looked at.

    Attributes:
        places: of the tensors in the arguments.
        tensors: from the arguments, the tensors.
        aligned: from the tensors' addresses, those whose alignment is compiled in; None: of none.
        numbers: (place, what of an integer may be compiled in).
        variants: what was compiled, and how to launch it, by everything else that is looked at.
    """

    places: list[int]
    tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    aligned: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    numbers: tuple[tuple[int, Callable[[int], tuple[Any, ...]]], ...]
    variants: dict[tuple[Any, ...], tuple[CompiledKernel, Launch]]


@dataclass(frozen=True, slots=True)
class _Globals:
    """Global variables of one module that are compiled into a kernel."""

    module: dict[str, Any]
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]

    @staticmethod
    def of_kernel(kernel: JITFunction) -> "list[_Globals]":
        names: dict[int, list[str]] = {}
        modules: dict[int, dict[str, Any]] = {}
        for (name, _), (_, module) in kernel.used_global_vals.items():
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
        reads = {key: _getter(names[key], {}) for key in names}
        return [_Globals(modules[key], read, read(modules[key])) for key, read in reads.items()]


def _alignment(addresses: tuple[int, ...]) -> bool | tuple[bool, ...]:
    """Which of the addresses are multiples of 16: True if all are."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0 or tuple([each % 16 == 0 for each in addresses])


def _mode(parameter: KernelParam) -> int:
    """How the JIT looks at arguments of a parameter."""
    if parameter.is_constexpr:
        return CONSTANT
    name = parameter.annotation_type
    is_float_or_bool = name == "u1" or name[:2] in ("fp", "bf")
    if name and not name.startswith("*") and (parameter.do_not_specialize or is_float_or_bool):
        return NUMBER
    if parameter.do_not_specialize:
        return RANGE
    return VALUE if parameter.do_not_specialize_on_alignment else ALIGNED_VALUE


def _integer_range(value: int) -> tuple[bool, ...]:
    """The type (i32, i64 or u64) that the JIT gives an integer."""
    return -(2**31) <= value < 2**31, value < 2**63


def _integer_class(value: int) -> tuple[bool, ...]:
    """What the JIT may compile in of an integer: its type, 1 itself, that it is a multiple of 16."""
    return *_integer_range(value), value == 1, value % 16 == 0


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else type(value) in CONSTANT_TYPES


def _is_argument(value: Any, mode: int) -> bool:
    """Whether a call's key holds all that the compiled code depends on of this argument."""
    kind = type(value)
    return kind in NUMBER_TYPES or (mode != NUMBER and (value is None or kind in TENSOR_TYPES))


def _getter(names: list[str], defaults: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Function from a mapping to the tuple of its values under `names`; it lacks those that have defaults."""
    if len(names) > 1 and not set(names) & set(defaults):
        return operator.itemgetter(*names)  # which for one name would return no tuple
    return lambda mapping: tuple([defaults[name] if name in defaults else mapping[name] for name in names])
