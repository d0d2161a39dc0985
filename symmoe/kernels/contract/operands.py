"""Operands of kernels that are more than one tensor, in the words of contract/__init__.py, and which a kernel writes.

They are tuples, in which a program finds tensors. Those of quantised numbers: kernels/operands.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from symmoe.kernels.tensor_table import TensorTable

MaybeTensor = Tensor | None
Matrices = Tensor | TensorTable  # a packed tensor, or matrices anywhere
Rows = (
    Tensor | tuple[Tensor, MaybeTensor]
)  # rows; or a tensor of rows, and which of them stands for row r
Bias = (
    Tensor | tuple[MaybeTensor, MaybeTensor] | None
)  # [G, O]; or that, and what multiplies it for row r, fp32[N]


F = TypeVar("F", bound=Callable[..., object])


def writes(*names: str) -> Callable[[F], F]:
    """Decorator of a kernel: which arguments it writes. It may read these, too; all others it only reads. name.n: part
    n of a tuple; otherwise all of its parts are written. "peers": memory of other ranks that they have for it."""

    def decorate(kernel: F) -> F:
        kernel.writes = names  # type: ignore[attr-defined]  # for who asks the contract
        return kernel

    return decorate


def in_parts(arguments: Mapping[str, Any], names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Arguments by the names of their parameters; those of which the names have parts, as name.n."""
    for name, value in arguments.items():
        if f"{name}.0" in names:
            yield from ((f"{name}.{n}", part) for n, part in enumerate(value or ()))
        else:
            yield name, value


def as_pair(operand: Any) -> tuple[Any, Any]:
    """Rows and their index, or a bias and its scale; None for a second one that is not given."""
    return operand if isinstance(operand, tuple) else (operand, None)


def num_rows(rows: Rows) -> int:
    """N."""
    tensor, row_index = as_pair(rows)
    return int((tensor if row_index is None else row_index).shape[0])
