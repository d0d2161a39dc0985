"""Names of Gluon that kernels use, also names that differ between the supported versions of Triton.

tma_add adds a block of shared memory to global memory, in the same way as tma_store stores it. Each sum is rounded
once, to the dtype of global memory; tma.store_wait waits for the addition. fp32 terms and sums below 2^-126 in
magnitude count as zeros of their sign (PTX ISA, cp.reduce.async.bulk).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "copy_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "thread_barrier",
    "tma",
    "tma_add",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

thread_barrier = (
    gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
)  # of a role's threads; since 3.7
_memory = gl.shared_memory_descriptor
reinterpret = (
    _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
)  # since 3.9

if hasattr(tma, "async_load"):  # since 3.8
    tma_load, tma_store, copy_async = tma.async_load, tma.async_store, async_copy.async_load
    tma_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    copy_async = async_copy.async_copy_global_to_shared

    @builtin
    def tma_add(desc: Any, coord: Any, shared: Any, _semantic: Any = None) -> None:
        coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, desc.handle, coordinates, shared.handle)
