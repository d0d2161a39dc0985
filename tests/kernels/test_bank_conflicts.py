"""Kernels for Hopper write and read shared memory without bank conflicts."""

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from symmoe.kernels.low_precision import hopper_columns as columns  # noqa: E402
from symmoe.kernels.low_precision import hopper_dact_quantize as dact  # noqa: E402

CASES = {  # dtype, number of columns, layouts in registers and in shared memory, warps
    "columns": (
        gl.int32,
        64,
        columns.HELD,
        columns.copied_layout(4),
        columns.SHARED,
        columns.NUM_WARPS,
    ),
    "columns of the wire": (
        gl.int16,
        64,
        columns.HELD,
        columns.copied_layout(2),
        columns.SHARED,
        columns.NUM_WARPS,
    ),
    "dact": (gl.bfloat16, 128, dact.PAIRS, dact.COPY, dact.LAYOUT, dact.NUM_WARPS),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_shared_memory_have_no_bank_conflicts(tmp_path, monkeypatch, case):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    *constants, num_warps = CASES[case]
    DTYPE, WIDTH, HELD, COPIED, SHARED = map(gl.constexpr, constants)
    PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    @gluon.jit
    def kernel(out):
        shape: gl.constexpr = [128, WIDTH.value]
        read: gl.constexpr = gl.distributed_type(DTYPE.value, shape, HELD)
        copied: gl.constexpr = gl.distributed_type(DTYPE.value, shape, COPIED)
        shared: gl.constexpr = gl.shared_memory_descriptor_type(DTYPE.value, shape, SHARED, shape)
        plain: gl.constexpr = gl.shared_memory_descriptor_type(DTYPE.value, shape, PLAIN, shape)
        gl.static_assert(gl.bank_conflicts(read, shared) == 0)
        gl.static_assert(gl.bank_conflicts(copied, shared) == 0)
        gl.static_assert(gl.bank_conflicts(read, plain) > 0)

    source = GluonASTSource(kernel, {"out": "*i32"}, {}, {})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
