"""A TMA copy that Gluon of Triton 3.6 compiles, but has no function for."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def add_shared_to_global(desc: Any, place: Any, shared: Any, _semantic: Any = None) -> None:
    """Adds a block of shared memory to global memory, as tma.async_copy_shared_to_global stores it.

    Each sum is rounded once, to the dtype there; tma.store_wait waits for it. fp32 terms and sums below 2^-126 in
    magnitude count as zeros of their sign (PTX ISA, cp.reduce.async.bulk).
    """
    coordinates = _semantic._convert_to_ir_values(place, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, desc.handle, coordinates, shared.handle)
