"""Operands of the grouped GEMMs of quantised numbers: meta tensors of real shapes."""

import torch
from compiled_launches import meta

from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.operands import Operand
from symmoe.kernels.quantized_gemm import num_blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
ELEMENTS = {
    "fp8": (E4M3, 1, 128),
    "mxfp8": (E4M3, 1, 32),
    "nvfp4": (U8, 2, 16),
}  # data, in a byte, to a scale
SHAPES = {  # G, O, C, N of a product; functions take other tuples as well
    "deepseek-like FC1": (32, 4096, 7168, 65536),
    "odd": (3, 712, 1056, 999),  # parts of tiles, of steps and of blocks
    "narrow": (65, 136, 96, 999),
}


def tiles(num_tiles, width, block):
    return meta(num_tiles, -(-width // (4 * block)), 512, dtype=U8)


def _operand(name, data, scale, num_groups):
    return Operand(data, scale, meta(num_groups, dtype=FP32) if name == "nvfp4" else None)


def gemm_operands(name, shape, dtype=BF16):
    """Arguments of the product."""
    (G, O, C, N), (data, per_byte, block) = SHAPES.get(shape, shape), ELEMENTS[name]
    rows, weight = meta(N, C // per_byte, dtype=data), meta(G, O, C // per_byte, dtype=data)
    if name == "fp8":
        row_scale, weight_scale = (
            meta(N, num_blocks(C), dtype=FP32),
            meta(G, num_blocks(O), num_blocks(C), dtype=FP32),
        )
    else:
        row_scale, weight_scale = (
            tiles(max_tiles(N, G), C, block),
            tiles(max_tiles(G * O, G), C, block),
        )
    operands = _operand(name, rows, row_scale, G), _operand(name, weight, weight_scale, G)
    return *operands, meta(2, G), meta(N, O, dtype=dtype)


def wgrad_operands(name, shape, dtype=BF16):
    """Arguments of the weight gradient."""
    (G, O, C, N), (data, per_byte, block) = SHAPES.get(shape, shape), ELEMENTS[name]
    tokens, operands = TILE * max_tiles(N, G), []
    for width in (O, C):
        block_major = meta(tokens // TILE, width, dtype=FP32).t()
        scale = block_major if name == "fp8" else tiles(-(-width // TILE), tokens, block)
        operands.append(_operand(name, meta(width, tokens // per_byte, dtype=data), scale, G))
    return *operands, meta(2, G), meta(G, O, C, dtype=dtype)
