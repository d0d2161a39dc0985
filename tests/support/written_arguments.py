"""Which arguments kernels write, as seen: a hook that compares tensors before and after each call."""

from collections.abc import Iterator
from typing import Any

import torch

from symmoe.kernels import Kernels
from symmoe.kernels.control import Peers
from symmoe.kernels.flops import arguments_of


class Writes:
    """A hook for kernels. is_alone: whether nobody else writes to the arena; otherwise what lies there may change.

    Attributes:
        seen: names of kernels.
        changed: kernel.argument of what has changed, as the contract declares it.
        undeclared: what has changed although it is not declared.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.seen, self.changed, self.undeclared = set[str](), set[str](), set[str]()
        self._is_alone, self._arenas = is_alone, list[tuple[int, int]]()

    def __call__(self, kernel_name: str, kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kernel_name not in written_by_contract():  # e.g. __all__, functions of numbers
            return kernel(*args, **kwargs)
        self.seen.add(kernel_name)
        declared = written_by_contract()[kernel_name]
        tensors = list(_tensors(arguments_of(kernel_name, args, kwargs), declared))
        before = [_bytes(tensor) for _, tensor in tensors]
        result = kernel(*args, **kwargs)
        after = [_bytes(tensor) for _, tensor in tensors]
        written = [_span(tensor) for name, tensor in tensors if name in declared]
        self._arenas = [_span(each) for name, each in tensors if name == "peers"] or self._arenas
        for (name, tensor), old, new in zip(tensors, before, after, strict=True):
            if name == "peers" and name not in declared:  # an argument may lie in the arena
                start = tensor.data_ptr()
                for begin, end in written:
                    if start <= begin < start + len(old):
                        old[begin - start : end - start] = new[begin - start : end - start] = 0
            if not torch.equal(old, new):
                self._note(f"{kernel_name}.{name}", name in declared, tensor, written)
        return result

    def _note(
        self, name: str, is_declared: bool, tensor: torch.Tensor, written: list[tuple[int, int]]
    ) -> None:
        if is_declared:
            self.changed.add(name)
        elif not _overlaps(tensor, written) and (
            self._is_alone or not _overlaps(tensor, self._arenas)
        ):
            self.undeclared.add(name)


def written_by_contract() -> dict[str, tuple[str, ...]]:
    """What each kernel writes, by name."""
    return {
        name: each.writes
        for subject in Kernels.__mro__
        for name, each in vars(subject).items()
        if hasattr(each, "writes")
    }


def _tensors(
    arguments: dict[str, Any], declared: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Peers):
            yield from ((name, view) for view in value.views)
        elif f"{name}.0" in declared:
            for n, part in enumerate(value or ()):
                yield from ((f"{name}.{n}", tensor) for tensor in _flat(part))
        else:
            yield from ((name, tensor) for tensor in _flat(value))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    value = getattr(value, "storage", value) if not isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _flat(part)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8).clone()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _overlaps(tensor: torch.Tensor, spans: list[tuple[int, int]]) -> bool:
    begin, end = _span(tensor)
    return any(begin < other_end and other < end for other, other_end in spans)
