"""What products multiply, for those who count FLOPs: torch.utils.flop_counter, and the tools that use it.

A kernel is no operator of torch, so a dispatch mode does not see it; and a twin's own products, which it would see, are
larger than the kernel's. So while a mode looks on, every product says what it multiplies in an operator that does
nothing, and then runs unseen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from symmoe.kernels.contract import Kernels
from symmoe.kernels.operands import Operand
from symmoe.torch_internals import without_dispatch_modes

_ROUTER = {
    "router_gemm": ("logits",),
    "router_gemm_grads": ("dx", "d_weight"),
}  # a product for each result


def counted(name: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A hook for kernels: a dispatch mode sees their products as symmoe::product."""
    is_grouped = name.startswith("grouped_gemm")
    if not is_grouped and name not in _ROUTER:
        return kernel(*args, **kwargs)
    arguments = inspect.signature(getattr(Kernels, name)).bind(None, *args, **kwargs).arguments
    if is_grouped:  # a row is multiplied by the features of a matrix
        matrices = arguments["out" if "wgrad" in name else "weight"]
        matrices = matrices.data if isinstance(matrices, Operand) else matrices
        _, out_features, in_features = matrices.shape
        numbers_per_byte = 2 if matrices.dtype == torch.uint8 else 1
        _product(arguments["row_range"], 0, out_features * in_features * numbers_per_byte)
    else:
        num_products = sum(arguments[result] is not None for result in _ROUTER[name])
        _product(None, arguments["x"].shape[0], num_products * arguments["weight"].numel())
    with without_dispatch_modes():
        return kernel(*args, **kwargs)


@torch.library.custom_op("symmoe::product", mutates_args=())
def _product(row_range: torch.Tensor | None, num_rows: int, features: int) -> None:
    """Does nothing. A row meets `features` numbers. Rows: those of row_range int32 [2, G]; if it is None, num_rows."""


@_product.register_fake
def _(row_range: torch.Tensor | None, num_rows: int, features: int) -> None: ...


@register_flop_formula(torch.ops.symmoe.product, get_raw=True)
def _(row_range: torch.Tensor | None, num_rows: int, features: int, *, out_val: None) -> int:
    """Waits for the device, to see how many rows there are."""
    if row_range is not None:
        num_rows = int((row_range[1] - row_range[0]).clamp(min=0).sum())
    return 2 * num_rows * features
