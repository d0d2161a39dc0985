"""Rules of the activations with quantised results, for all devices: their formats and their results."""

from typing import NamedTuple

import torch

from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.bias_sums import bias_slots
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.operands import Buffers

FEATURES = 128  # a tile's features of the activation's result
ALTERNATING_FEATURES = 64  # of its gradient, if gate and up features alternate: a whole block of dh
H = (torch.bfloat16, torch.float16)  # dtypes of the activation's input


class DactOperands(NamedTuple):
    """The results of dact_quantize."""

    dscale: torch.Tensor  # fp32[N], 0 past the last row
    rows: Buffers  # dh, W features: operand of the first GEMM's input gradient
    columns: Buffers  # operand of the first GEMM's weight gradient
    a_columns: Buffers  # the activation, I features: operand of the second GEMM's weight gradient
    # [G, W], bf16, fp16 or fp32: the bits that grouped_bias_grad computes from dh; None: not computed.
    dbias: torch.Tensor | None = None


def takes_act_quantize(block_format: BlockFormat) -> bool:
    """Whether act_quantize supports this format: E4M3 in blocks that divide tiles, without a global scale."""
    return (
        block_format.element == "e4m3"
        and block_format.block in (32, 128)
        and not block_format.has_global_scale
    )


def takes_dact_quantize(ffn: int, activation: Activation, block_format: BlockFormat) -> bool:
    """Whether dact_quantize supports this format of dh: in halves, no block of a row may mix gate and up features."""
    in_halves = activation.is_gated and activation.interleave is None
    return takes_act_quantize(block_format) and (not in_halves or ffn % block_format.block == 0)


def dact_features(activation: Activation) -> int:
    """Features of the activation's result in a tile of dact_quantize."""
    return FEATURES if activation.interleave is None else ALTERNATING_FEATURES


def dact_quantize_workspace_numel(
    num_rows: int, ffn: int, dbias: torch.Tensor | None = None
) -> int:
    """Elements of dact_quantize's fp32 workspace: one sum per row and block of features, then one per row tile and
    column of dbias."""
    numel = num_rows * num_scale_sums(ffn)
    return numel if dbias is None else numel + bias_slots(num_rows, dbias.shape[0]) * dbias.shape[1]
