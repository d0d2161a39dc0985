"""Matrices anywhere in memory through one TMA descriptor, which the host makes without their addresses.

A descriptor has one address: the address of a tensor (the anchor). From the anchor, two more dimensions reach any
address that is a multiple of 16: one in steps of 16 bytes, one in steps of 2^34. So the two coordinates are the digits
of the matrix's distance from the anchor. The device computes them from a table of addresses; addresses wrap around at
2^64. The other two dimensions are the matrix's, so TMA still masks accesses outside of the matrix.
"""

from collections.abc import Callable, Sequence

import torch

from symmoe.kernels.hopper.gluon_names import TensorDescriptor, gl, gluon
from symmoe.kernels.launch.launch import Describe

GLUON_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.uint8: gl.uint8,
}
STEP_BITS = gl.constexpr(4)  # strides of descriptors are multiples of 16 bytes,
FAR_STEP_BITS = gl.constexpr(34)  # of less than 2^40
DIGITS = gl.constexpr(2**30 - 1)  # 64 bits leave 30 for either digit
# Not 2^30: Triton's sum of a descriptor's bytes would overflow, and treat matrices of more than 64 KiB as small.
_LENGTH = 2**30 + 2**26


def describe_table(block: list[int], dtype: torch.dtype, num_rows: int, width: int) -> Describe:
    """Function from an anchor to the descriptor of contiguous matrices [num_rows, width] of its dtype, with blocks [1,
    1, *block]."""
    step, far_step = (2**bits.value // dtype.itemsize for bits in (STEP_BITS, FAR_STEP_BITS))
    extent = [_LENGTH, _LENGTH, num_rows, width], [far_step, step, width, 1]
    return describe_as(lambda anchor: extent, [1, 1, *block], dtype)


def describe_as(
    extent: Callable[[torch.Tensor], tuple[Sequence[int], Sequence[int]]],
    block: list[int],
    dtype: torch.dtype,
) -> Describe:
    """Function from a tensor to the descriptor at its address with this shape and these strides."""
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])
    return lambda tensor: TensorDescriptor(tensor, *map(list, extent(tensor)), block, layout)


@gluon.jit
def matrix_coordinates(table, anchor, group):
    """The first two coordinates of a matrix, for describe_table's descriptor of the same anchor."""
    return distant_coordinates(gl.load(table + group) - anchor.to(gl.int64))


@gluon.jit
def distant_coordinates(distance):
    """The first two coordinates of an address at this distance in bytes from the anchor, a multiple of 16."""
    return ((distance >> FAR_STEP_BITS) & DIGITS).to(gl.int32), (
        (distance >> STEP_BITS) & DIGITS
    ).to(gl.int32)
