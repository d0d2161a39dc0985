"""Compiled Triton kernels, launched without the work that Triton's launcher repeats in every call.

Triton's CudaLauncher is Python around a launcher in C: it allocates scratch memory if the kernel wants any, and encodes
a tensor map for every descriptor. Here the function in C is called directly, with tensor maps that are remembered.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels.launch import driver
from symmoe.tape.tape import Launch, Memory

MAX_TENSOR_MAPS = 1024  # remembered for one argument of one compiled kernel: about 600 KiB of host memory
REST_OF_GRID: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

Describe = Callable[[torch.Tensor], TensorDescriptor]
LaunchFunction = Callable[[tuple[int, ...], int, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], None]


def compiled_launch(
    compiled: CompiledKernel,
    args: Sequence[Any],
    constants: tuple[Any, ...],
    tensors: Sequence[int],
    describe: Mapping[int, Describe],
) -> LaunchFunction:
    """The function launch(grid, stream, tensors, addresses, args) of a compiled kernel.

    Args:
        compiled: the kernel.
        args: arguments of one call, without constants. Later calls have None and tensors in the same places.
        constants: the values of the kernel's constants, its last parameters.
        tensors: places of tensors in args; the launch gets these tensors, and their addresses, in this order.
        describe: by place, functions from a tensor to its descriptor.
    """
    described = {i: describe[i] for i in sorted(describe) if args[i] is not None}
    launcher = _Launcher.of_kernel(compiled, described)
    if launcher is None:
        return _ordinary_launch(compiled, constants, tensors, described)
    return _CompiledLaunch(compiled, launcher, args, constants, tensors, described)


class _CompiledLaunch:
    """A kernel that is launched by the function in C. Arguments: see compiled_launch."""

    __slots__ = ("_arrange", "_call", "_constants", "_descriptors", "_head", "_in_list", "_kernel", "_places")

    def __init__(
        self,
        compiled: CompiledKernel,
        launcher: "_Launcher",
        args: Sequence[Any],
        constants: tuple[Any, ...],
        tensors: Sequence[int],
        described: Mapping[int, Describe],
    ) -> None:
        self._descriptors = [
            (tensors.index(i), _TensorMaps(launcher.encoder(i), function)) for i, function in described.items()
        ]
        # The arguments of C are picked from one tuple of all addresses, arguments, constants and parts of tensor maps.
        self._places: list[int] = []
        first_arg = len(tensors)
        first_part = first_arg + len(args) + len(constants)
        for i in range(len(args) + len(constants)):
            if i in described:
                num_parts = 1 + 2 * len(described[i](args[i]).shape)
                self._places += range(first_part, first_part + num_parts)
                first_part += num_parts
            else:
                self._places.append(tensors.index(i) if i in tensors else first_arg + i)
        self._arrange = picker(self._places)
        self._call, self._head, self._in_list = launcher.call, launcher.head, launcher.takes_list
        self._kernel, self._constants = compiled, constants

    def __call__(
        self,
        grid: tuple[int, ...],
        stream: int,
        tensors: tuple[Any, ...],
        addresses: tuple[Any, ...],
        args: tuple[Any, ...],
    ) -> None:
        row = [*addresses, *args, *self._constants]
        for i, maps in self._descriptors:
            row += maps.get((addresses[i], tensors[i].shape)) or maps.encode(tensors[i])
        x, y, z = (*grid, *REST_OF_GRID[len(grid)])
        if self._in_list:
            self._call(x, y, z, stream, *self._head, self._arrange(row))
        else:
            self._call(x, y, z, stream, *self._head, *self._arrange(row))

    def bind(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        memory: Sequence[Memory],
        numbers: Mapping[int, Any],
    ) -> Launch:
        """The launch for a tape. memory: where tensors lie; numbers: by place in args, those that change."""
        row = [*(tensor.data_ptr() for tensor in tensors), *args, *self._constants]
        maps = []
        for i, known in self._descriptors:
            parts = known.get((row[i], tensors[i].shape)) or known.encode(tensors[i])
            maps.append((self._places.index(len(row)), len(parts), memory[i], known))
            row += parts
        x, y, z = (*grid, *REST_OF_GRID[len(grid)])
        return Launch(
            call=self._call,
            kernel=self._kernel,
            grid=(x, y, z),
            head=self._head,
            takes_list=self._in_list,
            row=list(self._arrange(row)),
            addresses=tuple((n, memory[place]) for n, place in enumerate(self._places) if place < len(tensors)),
            maps=tuple(maps),
            numbers=tuple((self._places.index(len(tensors) + i), place) for i, place in numbers.items()),
        )


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Function from a sequence to the tuple of its elements at `places`."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())


def _ordinary_launch(
    compiled: CompiledKernel, constants: tuple[Any, ...], tensors: Sequence[int], describe: Mapping[int, Describe]
) -> LaunchFunction:
    """Same as compiled_launch, but by Triton's launcher."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    pointers = [(i, place) for i, place in enumerate(tensors) if place not in describe]

    def launch(
        grid: tuple[int, ...], stream: int, tensors: tuple[Any, ...], addresses: tuple[Any, ...], args: tuple[Any, ...]
    ) -> None:
        values = [*args, *constants]
        for i, place in pointers:
            values[place] = addresses[i]  # Triton would look up each tensor's address, and ask the driver about it
        if describe:
            driver.ensure_context()
            for place, function_of in describe.items():
                values[place] = function_of(args[place])
        x, y, z = (*grid, *REST_OF_GRID[len(grid)])
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    return launch


class _TensorMaps(dict[tuple[int, torch.Size], tuple[Any, ...]]):
    """Descriptors for the launcher in C (tensor map, shape, strides), by a tensor's address and shape.

    A tensor map depends on nothing else, so it stays right for a later tensor at the same address.
    """

    def __init__(self, encoder: Callable[[TensorDescriptor], list[Any]], describe: Describe) -> None:
        self._encoder, self._describe = encoder, describe

    def encode(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The parts for a tensor that is not known yet."""
        driver.ensure_context()
        parts = tuple(self._encoder(self._describe(tensor)))
        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        self[tensor.data_ptr(), tensor.shape] = parts
        return parts


class _Launcher:
    """The parts of CudaLauncher for one compiled kernel.

    Attributes:
        call: the function in C, to be called with (x, y, z, stream, *head, ...).
        head: from the kernel's function to what precedes the kernel's arguments.
        takes_list: whether the arguments are one parameter.
    """

    def __init__(
        self, call: Callable[..., None], head: tuple[Any, ...], takes_list: bool, maps: Mapping[int, Any]
    ) -> None:
        self.call, self.head, self.takes_list, self._maps = call, head, takes_list, maps

    def encoder(self, place: int) -> Callable[[TensorDescriptor], list[Any]]:
        """Function from a descriptor in this place to tensor map, shape and strides."""
        encode, metadata = self._maps[place]
        return lambda descriptor: encode(descriptor, metadata)

    @staticmethod
    def of_kernel(compiled: CompiledKernel, places: Mapping[int, Describe]) -> "_Launcher | None":
        """The launcher of a kernel; None if Triton's launcher is not built as this class expects, or does more.

        places: places of the arguments that are descriptors.
        """
        launcher = compiled.run
        if type(launcher) is not CudaLauncher or VERSION not in ((3, 6), (3, 7)):
            return None
        try:
            if launcher.global_scratch_size or launcher.profile_scratch_size:
                return None
            function = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
            call, maps = _unwrap(launcher.launch)
            if list(maps) != sorted(places) or not callable(call):
                return None
            metadata = compiled.packed_metadata
            if VERSION == (3, 6):
                return _Launcher(call, (*function, None, None, metadata, None, None, None), False, maps)
            annotations, signature = launcher.arg_annotations, launcher.kernel_signature
            head = (*function, metadata, None, None, None, None, None, annotations, signature)
            return _Launcher(call, head, True, maps)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def _unwrap(launch: Callable[..., None]) -> tuple[Callable[..., None], dict[int, Any]]:
    """The function in C behind CudaLauncher.launch, and by place (encoding function, metadata) of the descriptors.

    KeyError or similar if there is anything else in between.
    """
    if type(launch) is not FunctionType:
        return launch, {}
    # triton.backends.nvidia.driver.wrap_handle_tensordesc
    cells = dict(
        zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True)
    )
    call, places, metadata = cells.pop("launcher"), cells.pop("tensordesc_indices"), cells.pop("tensordesc_meta")
    if cells or type(call) is FunctionType or None in metadata:  # no metadata: the kernel takes no tensor map
        raise ValueError("an unknown launcher")
    encode = launch.__globals__["make_tensordesc_arg"]
    return call, {place: (encode, data) for place, data in zip(sorted(places), metadata, strict=True)}
