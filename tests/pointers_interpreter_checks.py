"""Run by test_interpreted.py with TRITON_INTERPRET=1: the swizzle kernel against its twin, byte for byte."""

import torch
from interpreter import spare_the_interpreter

from symmoe.kernels.triton import pointers as gpu
from symmoe.kernels.twin import pointers as twin

# rows and blocks of the scales, and of the matrix in memory
CASES = [((1, 1), (1, 1)), ((128, 4), (128, 4)), ((160, 3), (256, 4)), ((300, 9), (301, 11)), ((70, 21), (128, 24))]


def swizzled(module, matrices, rows, blocks, strides):
    pointers = torch.tensor([matrix.data_ptr() for matrix in matrices])
    out = torch.full((len(matrices), twin.swizzled_scale_bytes(rows, blocks)), 0x5A, dtype=torch.uint8)
    module.swizzle_scales(pointers, out, rows, blocks, *strides)
    return out


def main():
    torch.manual_seed(0)
    for (rows, blocks), (height, width) in CASES:
        for is_columnwise in (False, True):
            shape, strides = ((width, height), (1, height)) if is_columnwise else ((height, width), (width, 1))
            matrices = [torch.randint(1, 256, shape).to(torch.uint8) for _ in range(3)]
            expected = swizzled(twin, matrices, rows, blocks, strides)
            assert torch.equal(swizzled(gpu, matrices, rows, blocks, strides), expected), (rows, blocks, is_columnwise)
        print(rows, blocks, ": ok")
    print("all is well")


if __name__ == "__main__":
    spare_the_interpreter()
    main()
