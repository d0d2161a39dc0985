"""Which arguments kernels write, as seen: a hook that compares tensors before and after each call."""

from collections.abc import Iterator
from typing import Any

import torch

from symmoe.kernels import twin
from symmoe.kernels.control import Peers
from symmoe.kernels.flops import arguments_of
from symmoe.kernels.operands import in_parts

Span = tuple[int, int]  # of addresses
WRITTEN: dict[str, tuple[str, ...]] = {  # what each kernel writes, by name
    name: getattr(twin, name).writes for name in twin.__all__
}


class Writes:
    """A hook for kernels. is_alone: whether nobody else writes to the arena; otherwise what lies there may change.

    Attributes:
        seen: names of kernels.
        changed: kernel.argument of what has changed, as the contract declares it.
        undeclared: what has changed although it is not declared, and is no part of what is.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.seen = set[str]()
        self.changed = set[str]()
        self.undeclared = set[str]()
        self._is_alone, self._arenas = is_alone, list[Span]()

    def __call__(self, kernel_name: str, kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kernel_name not in WRITTEN:  # a function of numbers
            return kernel(*args, **kwargs)
        self.seen.add(kernel_name)
        arguments = in_parts(arguments_of(kernel_name, args, kwargs), WRITTEN[kernel_name])
        tensors = [(name, tensor) for name, value in arguments for tensor in _tensors(value)]
        before = [_bytes(tensor) for _, tensor in tensors]
        result = kernel(*args, **kwargs)
        is_declared = [name in WRITTEN[kernel_name] for name, _ in tensors]
        theirs = [_span(each) for name, each in tensors if name == "peers"]
        self._arenas = theirs or self._arenas
        known = [] if self._is_alone else self._arenas[:]
        known += [_span(each) for (_, each), its in zip(tensors, is_declared, strict=True) if its]
        for (name, tensor), its, old in zip(tensors, is_declared, before, strict=True):
            if torch.equal(old, _bytes(tensor)):
                continue
            if its:
                self.changed.add(f"{kernel_name}.{name}")
            elif not any(
                begin < _span(tensor)[1] and _span(tensor)[0] < end for begin, end in known
            ):
                self.undeclared.add(f"{kernel_name}.{name}")
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Peers):
        yield from value.views
    elif hasattr(value, "storage"):  # a plan
        yield value.storage


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8).clone()


def _span(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
