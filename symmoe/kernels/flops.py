"""The sizes of products, for FLOP counters: torch.utils.flop_counter and the tools that use it.

A dispatch mode does not see a kernel, because a kernel is not an operator of torch. The mode would see the products
inside a twin, but these are larger than the kernel's. So while a mode is active, every product reports its size through
an operator that does nothing, and then runs hidden from the mode.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from symmoe.kernels.operands import Operand, ScatteredWeight, num_rows
from symmoe.kernels.twin import Kernels
from symmoe.torch_internals import without_dispatch_modes

_ROUTER = {
    "router_gemm": ("logits",),
    "router_gemm_grads": ("dx", "d_weight"),
}  # one product per result


class Product(NamedTuple):
    """The size of a kernel's product: each row takes `features` multiplications and additions."""

    row_range: Any  # int32 [2, G], which rows; None: all
    max_rows: int
    features: int

    @property
    def max_flops(self) -> int:
        """FLOPs if every row is multiplied."""
        return 2 * self.max_rows * self.features


def arguments_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel by the names of its parameters."""
    return dict(inspect.signature(getattr(Kernels, name)).bind(*args, **kwargs).arguments)


def product_of(name: str, arguments: Mapping[str, Any]) -> Product | None:
    """The kernel's product; None if it multiplies nothing. arguments: tensors, or objects with shape and dtype."""
    if name in _ROUTER:
        num_products = sum(arguments[result] is not None for result in _ROUTER[name])
        features = num_products * math.prod(arguments["weight"].shape)
        return Product(None, arguments["x"].shape[0], features)
    if not name.startswith("grouped_gemm"):
        return None
    is_wgrad, rows = "wgrad" in name, arguments.get("rows", arguments.get("dout"))
    matrices = arguments["out" if is_wgrad else "weight"]
    matrices = matrices.data if isinstance(matrices, (Operand, ScatteredWeight)) else matrices
    _, out_features, in_features = matrices.shape
    numbers = out_features * in_features
    if not isinstance(rows, Operand):
        return Product(arguments["row_range"], num_rows(rows), numbers)
    per_byte = 2 if rows.data.dtype == torch.uint8 else 1
    if is_wgrad:  # columns are padded
        return Product(arguments["row_range"], rows.data.shape[1] * per_byte, numbers)
    return Product(arguments["row_range"], rows.data.shape[0], numbers * per_byte)


def counted(name: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A hook for kernels: a dispatch mode sees their products as symmoe::product."""
    product = product_of(name, arguments_of(name, args, kwargs))
    if product is None:
        return kernel(*args, **kwargs)
    _product(*product)
    with without_dispatch_modes():
        return kernel(*args, **kwargs)


@torch.library.custom_op("symmoe::product", mutates_args=())
def _product(row_range: torch.Tensor | None, max_rows: int, features: int) -> None:
    """Does nothing. See Product."""


@_product.register_fake
def _(row_range: torch.Tensor | None, max_rows: int, features: int) -> None: ...


@register_flop_formula(torch.ops.symmoe.product, get_raw=True)
def _(row_range: torch.Tensor | None, max_rows: int, features: int, *, out_val: None) -> int:
    """FLOPs. Waits for the device to read the number of rows."""
    if row_range is not None:
        max_rows = int((row_range[1] - row_range[0]).clamp(min=0).sum())
    return Product(None, max_rows, features).max_flops
