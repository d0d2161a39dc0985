"""FLOPs of the products of an expert-parallel step on one rank, as its GEMMs do them.

H hidden, I ffn, W width of FC1's output (2I if gated), r rank of a layer's adapters, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import STASHES


def num_rows(config: MoEConfig, rank: int, num_ranks: int, probs: torch.Tensor, load: torch.Tensor | None) -> int:
    """The rows that the experts of a rank multiply in a call: its expert_load [E], cut to a static capacity. Slots that
    a mask or a capacity factor has taken away are not in it. Waits for the device.

    A call that is traced without data has no load. For it, T * K: the slots of the rank's own tokens, probs [T, K].
    """
    if load is None or hasattr(load, "fake_mode"):
        return probs.numel()
    rows = int(load.view(num_ranks, -1)[rank].sum())
    return rows if config.capacity is None else min(rows, config.capacity)


def forward_flops(experts: GroupedMLP, adapters: Sequence[torch.Tensor]) -> int:
    """FLOPs of a row in forward: both layers, and what adapters A1 [G, r, H], B1, A2 [G, r, I], B2 add to them."""
    return 2 * (sum(_features(experts)) + sum(adapter[0].numel() for adapter in adapters))


def backward_flops(
    experts: GroupedMLP, adapters: Sequence[torch.Tensor], stash: str, *, needs_x: bool, trains_weights: bool
) -> int:
    """FLOPs of a row in backward: gradients of its activation, of itself (needs_x), of the weights (trains_weights) and
    of the adapters; and FC1 again, if `stash` does not keep what it has made."""
    fc1, fc2 = _features(experts)
    a1, b1, a2, b2 = (adapter[0].numel() for adapter in adapters) if adapters else (0, 0, 0, 0)
    products = fc2 + b2 + a2 + b1
    if needs_x:
        products += fc1 + a1
    if trains_weights:
        products += fc1 + fc2
    products += a1 + b1 + a2 + b2
    if not STASHES[stash].keeps_h:
        products += fc1 + a1 + b1 + a2
    return 2 * products


def _features(experts: GroupedMLP) -> tuple[int, int]:
    """W * H and I * H: numbers of a weight of each layer."""
    return experts.fc1.out_features * experts.hidden, experts.hidden * experts.ffn
