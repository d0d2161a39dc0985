"""Launches of Triton kernels without the work that the JIT repeats in every call.

A JIT launch of a grouped GEMM costs an H200's host about 34 us: the JIT finds the compiled variant, queries the driver
about every pointer, and encodes unchanged tensor maps. Here the JIT only compiles, once for each kind of call, and
player.py launches the kernels that it supports.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.cuda import ExternalStream
from triton import JITFunction, OutOfResources

from symmoe.kernels.launch import driver, triton_internals
from symmoe.kernels.launch.player import Describe as Describe
from symmoe.kernels.launch.player import Kernel, known_kernel, picker
from symmoe.kernels.launch.triton_internals import ALIGNED_VALUE, CONSTANT, NUMBER, RANGE
from symmoe.program.builder import builder
from symmoe.torch_internals import current_device, current_stream

# For every compilation. A product and a sum become one fma, for speed, and because tests and records have those bits.
OPTIONS = {"enable_fp_fusion": True}  # Triton's default up to 3.9
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")
NUMBER_TYPES = (int, bool, float)
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)

_ADDRESS, _DEVICE, _DTYPE = (
    torch.Tensor.data_ptr,
    torch.Tensor.get_device,
    operator.attrgetter("dtype"),
)

CPU = -1  # the result of Tensor.get_device


class Constants:
    """Constants of many calls of one kernel, compared by identity: make an object once and reuse it.

    Attributes:
        named: the kernel's constants and the launch's options.
        descriptors: by position, functions from a tensor to its descriptor: a call passes the contiguous tensor there,
            or None. A descriptor must begin at the tensor's address and otherwise depend only on its dtype and shape.
    """

    __slots__ = ("descriptors", "named")

    def __init__(
        self, named: Mapping[str, Any], descriptors: Mapping[int, Describe] | None = None
    ) -> None:
        self.named = named
        self.descriptors = descriptors or {}

    def described(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for Triton, with tensor descriptors."""
        if not self.descriptors:
            return args
        result = [*args]
        for i, describe in self.descriptors.items():
            if args[i] is not None:
                result[i] = describe(args[i])
        return tuple(result)


class Named(tl.constexpr):  # type: ignore[misc]
    """A constant with its value's attributes, in compiled and interpreted kernels. Kernels may pass on a constant's
    attributes, and read global constants, only as constexpr.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "value":  # copied without __init__
            raise AttributeError(name)
        return getattr(self.value, name)


@functools.cache
def cached_constants(**named: Hashable) -> Constants:
    """The shared Constants of all calls with equal constants."""
    return Constants(named)


@functools.cache
def cached_sizes(**named: Hashable) -> Constants:
    """As cached_constants, for a kernel with one constant, SIZES, a Named whose attributes are the arguments. A call
    passes the attributes that the kernel reads."""
    options = {name: named.pop(name) for name in LAUNCH_OPTIONS if name in named}
    if isinstance(tl.cdiv, JITFunction):  # the interpreter's kernels are Python
        named = {name: value if value is None else Named(value) for name, value in named.items()}
    return Constants({"SIZES": make_dataclass("Sizes", named, frozen=True)(**named), **options})


def fast_jit(
    aligned: Collection[str] | None = None,
    *,
    optional: Collection[str] = (),
    jit: Callable[..., Any] = triton.jit,
) -> Callable[[Any], Any]:
    """Decorator of an entry kernel for :func:`launch`, in place of `jit`. Its constants must be the last parameters.
    Its numbers are the parameters with a type and the `optional` parameters, which may be None; their values are not
    compiled in. 16-byte alignment is compiled in for the tensors named in `aligned`; None: for all."""

    def decorate(function: Any) -> Any:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        kinds = {
            parameter.name: parameter.annotation
            for parameter in parameters
            if parameter.annotation is not tl.constexpr
        }
        numbers = [
            name
            for name, kind in kinds.items()
            if kind is not inspect.Parameter.empty or name in optional
        ]
        anywhere = (
            [] if aligned is None else [name for name in kinds if name not in (*aligned, *numbers)]
        )
        kernel = jit(do_not_specialize=numbers, do_not_specialize_on_alignment=anywhere)(function)
        return (
            FastLaunch(kernel) if isinstance(kernel, JITFunction) else kernel
        )  # not in the interpreter

    return decorate


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants, *args: Any) -> None:
    """kernel[grid](*args, **constants.named) on the device of the first tensor, at the lowest cost. With a 0 in the
    grid it does nothing and reads no argument: no descriptor can describe an empty tensor.

    args: one argument for each parameter except constants.
    """
    if 0 in grid:
        return
    if type(kernel) is FastLaunch:
        kernel.launch(grid, constants, args)
    else:
        kernel[grid](*constants.described(args), **constants.named)


def one_stage_less(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Options with one stage less, for a kernel that exceeds the device's shared memory; None at the last stage.

    The number of prefetched stages changes no sum. So tiles are chosen for GPUs with much shared memory.
    """
    stages = options.get("num_stages", 1)
    return {**options, "num_stages": stages - 1} if stages > 1 else None


def num_compiled() -> int:
    """The number of kernel variants that this process has compiled, or loaded from a cache."""
    return FastLaunch.num_compiled


class FastLaunch:
    """A Triton kernel with a cache of the compiled variants, by kind of call.

    A call's key has everything that the JIT reads: each parameter as its `mode` requires, constants and options by
    identity, the device. A call with a new key goes through the JIT, which compiles if necessary. Three kinds of calls
    always go through the JIT: calls with unsupported arguments (a tuple, a tensor on another device, a callable grid),
    calls with hooks or debugging, and all calls with an unsupported Triton. Global constants of a kernel's module must
    not change.

    Attributes:
        kernel: the JITFunction; `fn` is an alias, as in Triton's wrappers. All other attributes are the kernel's.
        num_compiled: cached variants of all kernels of this process.
    """

    num_compiled = 0

    def __init__(self, kernel: JITFunction) -> None:
        modes = (
            [triton_internals.mode(parameter) for parameter in kernel.params]
            if triton_internals.IS_KNOWN
            else []
        )
        self.kernel = self.fn = kernel
        self._modes = [mode for mode in modes if mode != CONSTANT]
        if CONSTANT in modes[: len(self._modes)]:
            raise TypeError(f"the constants of {kernel.__name__} must be its last parameters")
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._jit_variants: dict[int, Any] = {}  # variants from the JIT of an unsupported Triton

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # copied without __init__
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def launch(self, grid: tuple[int, ...], constants: Constants, args: tuple[Any, ...]) -> Any:
        """A call with one argument per non-constant parameter, on the device of the first tensor."""
        call = self._calls.get((constants, *map(type, args))) or self._new_call(constants, args)
        if call is None or type(grid) is not tuple or triton_internals.is_watched(self.kernel):
            return self._launch_by_jit(grid, constants, args)
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
        # The JIT's launcher rejects memory of the host and of other devices; an address does not show this.
        if key not in call.variants and all(tensor.get_device() == device for tensor in tensors):
            self._add_variant(key, call, constants, args)
        compiled, kernel = call.variants.get(key, (None, None))
        if kernel is None:
            return self._launch_by_jit(grid, constants, args)
        stream = current_stream(device)
        if (current := builder()) is not None:
            current.launch(kernel, self.kernel.arg_names, grid, stream, args, kernel.maps(args))
        else:
            kernel.launch(grid, stream, tensors, addresses, args)
        return compiled

    def _new_call(self, constants: Constants, args: tuple[Any, ...]) -> "_Call | None":
        """Caches how calls with arguments of these types are read; None if they are not supported."""
        if not triton_internals.IS_KNOWN or len(args) != len(self._modes):
            return None
        if not all(map(_is_argument, args, self._modes)):
            return None
        tensors = [i for i, value in enumerate(args) if type(value) in TENSOR_TYPES]
        if not all(args[i] is None or i in tensors for i in constants.descriptors):
            return None
        aligned = [
            n
            for n, i in enumerate(tensors)
            if self._modes[i] == ALIGNED_VALUE and i not in constants.descriptors
        ]
        numbers = [
            (i, _integer_range if mode == RANGE else _integer_class)
            for i, mode in enumerate(self._modes)
            if type(args[i]) is int and mode != NUMBER
        ]
        call = _Call(
            tensors, picker(tensors), picker(aligned) if aligned else None, tuple(numbers), {}
        )
        key = (constants, *map(type, args))
        self._calls[key] = call
        return call

    def _add_variant(
        self, key: tuple[Any, ...], call: "_Call", constants: Constants, args: tuple[Any, ...]
    ) -> None:
        """Compiles the variant for such a call, and caches it with its launcher."""
        described, named = constants.described(args), constants.named
        compiled, read = self._with_stages(
            lambda options: triton_internals.compiled_for(self.kernel, described, options), named
        )
        if compiled is not None:
            FastLaunch.num_compiled += 1
            parts = read, args, call.positions, constants.descriptors
            call.variants[key] = compiled, known_kernel(self.kernel.__name__, *parts)

    def _launch_by_jit(
        self, grid: tuple[int, ...], constants: Constants, args: tuple[Any, ...]
    ) -> Any:
        """Launches through the JIT; on another device, repeats the whole launch."""
        home = next((value.get_device() for value in args if isinstance(value, torch.Tensor)), CPU)
        if home not in (current_device(), CPU):
            with torch.cuda.device(home):
                return self.launch(grid, constants, args)
        if (current := builder()) is not None:
            names, stream = self.kernel.arg_names, current_stream(current_device())
            current.launch_by(self._launch_on, names, stream, grid, constants, args)
            return None
        described = constants.described(args)
        compiled = self._with_stages(
            lambda options: self.kernel[grid](*described, **options), constants.named
        )
        if not triton_internals.IS_KNOWN and id(compiled) not in self._jit_variants:
            self._jit_variants[id(compiled)] = compiled
            FastLaunch.num_compiled += 1
        return compiled

    def _launch_on(self, stream: int | None, *call: Any) -> None:
        """Launches on a stream; None: on the current stream."""
        on_it = nullcontext() if stream is None else torch.cuda.stream(ExternalStream(stream))
        with on_it:
            self._launch_by_jit(*call)

    @staticmethod
    def _with_stages(compile: Callable[[Mapping[str, Any]], Any], named: Mapping[str, Any]) -> Any:
        """compile() with these constants and options, with fewer stages where all would exceed the device's shared
        memory."""
        driver.ensure_context()
        try:
            return compile({**OPTIONS, **named})
        except OutOfResources as error:
            if error.name != "shared memory" or (fewer := one_stage_less(named)) is None:
                raise
            return FastLaunch._with_stages(compile, fewer)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that matter in calls with the same constants and the same types of arguments."""

    positions: list[int]  # of the tensors among the arguments
    tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # from the arguments
    # From the tensors' addresses to the addresses whose alignment is compiled in; None: there are none.
    aligned: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    numbers: tuple[
        tuple[int, Callable[[int], tuple[Any, ...]]], ...
    ]  # (position, properties of an integer that may be compiled in)
    # Compiled kernels and their launchers (None: the JIT), by the rest of the key.
    variants: dict[tuple[Any, ...], tuple[Any, Kernel | None]]


def _alignment(addresses: tuple[int, ...]) -> bool | tuple[bool, ...]:
    """Whether each address is a multiple of 16; True if all are."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0 or tuple(
        [address % 16 == 0 for address in addresses]
    )


def _integer_range(value: int) -> tuple[bool, ...]:
    """The type (i32, i64 or u64) of an integer for the JIT."""
    return -(2**31) <= value < 2**31, value < 2**63


def _integer_class(value: int) -> tuple[bool, ...]:
    """The properties of an integer that the JIT may compile in: its type, whether it is 1, whether 16 divides it."""
    return *_integer_range(value), value == 1, value % 16 == 0


def _is_argument(value: Any, mode: int) -> bool:
    """Whether a call's key has all properties of this argument that the compiled code depends on."""
    kind = type(value)
    return kind in NUMBER_TYPES or (mode != NUMBER and (value is None or kind in TENSOR_TYPES))


# Arithmetic with integers of the host. Triton's functions take 1.5 us a call, longer than a tensor descriptor.


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()
