"""Megatron-Core without Transformer Engine, apex and grouped_gemm: stand-ins for missing names. For examples.

symmoe does not need this file.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def install() -> None:
    """Makes the router of 0.16 run without Transformer Engine, on any device. Call it before building a model."""
    from megatron.core.transformer.moe import moe_utils

    # 0.16 asks whether this function is None, but defines it only where Transformer Engine is.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def provide_grouped_gemm() -> None:
    """Lets Megatron's GroupedMLP run on torch's grouped GEMM if the package grouped_gemm is not installed."""
    from megatron.core.transformer.moe import grouped_gemm_util

    if not grouped_gemm_util.grouped_gemm_is_available():
        grouped_gemm_util.ops = types.SimpleNamespace(gmm=gmm)
        grouped_gemm_util.grouped_gemm = types.SimpleNamespace(ops=grouped_gemm_util.ops)


def gmm(
    a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """grouped_gemm.ops.gmm: a [N, C] in groups of batch_sizes rows, each times its b [G, C, O] ([G, O, C]: trans_b).

    Differentiable in a and b. bf16 on GPUs. `batch_sizes`: integers [G], on the CPU or the device of a.
    """
    ends = batch_sizes.cumsum(0).to(device=a.device, dtype=torch.int32, non_blocking=True)
    return F.grouped_mm(a, b.transpose(1, 2) if trans_b else b, offs=ends)


class FusedAttention(nn.Module):
    """Causal attention by torch's fused kernels; Megatron's own without Transformer Engine writes all scores to memory.

    Arguments of Megatron's core attention; no dropout, no packed sequences, no other mask than the causal one.
    """

    def __init__(
        self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D]; returns [S, B, heads * D]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def use_fused_attention(spec: Any) -> None:
    """Sets FusedAttention in a layer spec."""
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
