"""Compiled Triton kernels, launched without the work that Triton's launcher repeats in every call.

Triton's CudaLauncher is Python around a launcher in C: it allocates scratch memory if the kernel wants any, and encodes
a tensor map for every descriptor. Here the function in C is called directly, with tensor maps that are remembered.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels.launch import driver
from symmoe.kernels.launch.triton_internals import Launcher, launcher_of, runner
from symmoe.tape.tape import Launch, Memory

MAX_TENSOR_MAPS = 1024  # remembered for one argument of one compiled kernel: about 600 KiB of host memory
REST_OF_GRID: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())

Describe = Callable[[torch.Tensor], TensorDescriptor]
LaunchFunction = Callable[[tuple[int, ...], int, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], None]


def compiled_launch(
    compiled: Any,
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
    launcher = launcher_of(compiled, list(described))
    if launcher is None:
        return _ordinary_launch(compiled, constants, tensors, described)
    return _CompiledLaunch(compiled, launcher, args, constants, tensors, described)


class _CompiledLaunch:
    """A kernel that is launched by the function in C. Arguments: see compiled_launch."""

    __slots__ = ("_arrange", "_call", "_constants", "_descriptors", "_head", "_in_list", "_kernel", "_places")

    def __init__(
        self,
        compiled: Any,
        launcher: Launcher,
        args: Sequence[Any],
        constants: tuple[Any, ...],
        tensors: Sequence[int],
        described: Mapping[int, Describe],
    ) -> None:
        self._descriptors = [
            (tensors.index(i), _TensorMaps(launcher.maps[i], function)) for i, function in described.items()
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
    compiled: Any, constants: tuple[Any, ...], tensors: Sequence[int], describe: Mapping[int, Describe]
) -> LaunchFunction:
    """Same as compiled_launch, but by Triton's launcher."""
    run, function, metadata = runner(compiled)
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
