"""Finds the arguments that kernels write: a hook compares tensors before and after each call, and twins repeat calls of
kernels from the same bytes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from symmoe.kernels import twin
from symmoe.kernels.control import Peers
from symmoe.kernels.flops import arguments_of
from symmoe.kernels.operands import ScaleTable, TensorTable, in_parts
from symmoe.kernels.twin.gemm import matrix

Span = tuple[int, int]  # of addresses
WRITTEN: dict[str, tuple[str, ...]] = {  # what each kernel writes, by name
    name: getattr(twin, name).writes for name in twin.__all__
}


class Writes:
    """A hook for kernels. is_alone: whether nobody else writes to the arena; otherwise what lies there may change.

    Attributes:
        launched: names of kernels.
        changed: kernel.argument of what has changed, as the contract declares it.
        undeclared: what has changed although it is not declared, and is no part of what is.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.launched = set[str]()
        self.changed = set[str]()
        self.undeclared = set[str]()
        self._is_alone, self._arenas = is_alone, list[Span]()

    def __call__(self, kernel_name: str, kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kernel_name not in WRITTEN:  # a function of numbers
            return kernel(*args, **kwargs)
        self.launched.add(kernel_name)
        arguments = in_parts(arguments_of(kernel_name, args, kwargs), WRITTEN[kernel_name])
        # Messages from another node may arrive in other parts of a base, e.g. of a plan's integers.
        tensors = [
            (name, tensor)
            for name, value in arguments
            for tensor in tensors_of(value, whole_bases=self._is_alone)
        ]
        before = [bytes_of(tensor) for _, tensor in tensors]
        result = kernel(*args, **kwargs)
        is_declared = [name in WRITTEN[kernel_name] for name, _ in tensors]
        arenas = [_span(tensor) for name, tensor in tensors if name == "peers"]
        self._arenas = arenas or self._arenas
        spans = [] if self._is_alone else self._arenas[:]
        spans += [_span(tensor) for name, tensor in tensors if name in WRITTEN[kernel_name]]
        for (name, tensor), declared, saved in zip(tensors, is_declared, before, strict=True):
            if torch.equal(saved, bytes_of(tensor)):
                continue
            if declared:
                self.changed.add(f"{kernel_name}.{name}")
            elif not any(
                begin < _span(tensor)[1] and _span(tensor)[0] < end for begin, end in spans
            ):
                self.undeclared.add(f"{kernel_name}.{name}")
        return result


class ComparedCalls:
    """Stands for a module of kernels. Every call is made a second time by the twin, from the same bytes, whose results
    stay.

    Attributes:
        differences: kernel.argument of what the kernel leaves otherwise than the twin, written or not.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.differences = list[str]()

    def __getattr__(self, kernel_name: str) -> Callable[..., None]:
        return partial(self._call, kernel_name)

    def _call(self, kernel_name: str, *args: Any, **kwargs: Any) -> None:
        arguments = arguments_of(kernel_name, args, kwargs)
        tensors = [(name, part) for name, value in arguments.items() for part in tensors_of(value)]
        before = [tensor.clone() for _, tensor in tensors]
        getattr(self.kernels, kernel_name)(*args, **kwargs)
        if any(tensor.is_cuda for _, tensor in tensors):
            torch.cuda.synchronize()  # for what lies on the host
        after = [bytes_with_one_nan(tensor) for _, tensor in tensors]
        for (_, tensor), saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        getattr(twin, kernel_name)(*args, **kwargs)
        for (name, tensor), actual in zip(tensors, after, strict=True):
            if not torch.equal(actual, bytes_with_one_nan(tensor)):
                self.differences.append(f"{kernel_name}.{name}")


def tensors_of(value: Any, *, whole_bases: bool = True) -> Iterator[torch.Tensor]:
    """The tensors of an argument; on CPUs also the matrices of tables. whole_bases: in place of a view its base."""
    if isinstance(value, torch.Tensor):
        is_part = value._base is not None and value._base.dtype == value.dtype
        yield value._base if is_part and whole_bases else value
    elif isinstance(value, TensorTable):
        if value.device.type == "cpu":
            yield from (matrix(value, group) for group in range(value.shape[0]))
    elif isinstance(value, (tuple, list)) and not isinstance(value, ScaleTable):
        for part in value:
            yield from tensors_of(part, whole_bases=whole_bases)
    elif isinstance(value, Peers):
        yield from value.views
    elif hasattr(value, "storage"):  # a plan
        yield value.storage


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in one dimension."""
    contiguous = tensor.detach().clone(memory_format=torch.contiguous_format)
    return contiguous.flatten().view(torch.uint8)


def bytes_with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which every NaN is the same."""
    if tensor.is_floating_point() and tensor.itemsize > 1:
        tensor = tensor.where(~tensor.isnan(), torch.nan)
    return bytes_of(tensor)


def _span(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
