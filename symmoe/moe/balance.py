"""Keeping the experts equally busy: losses, the expert bias, and the figure that says how well it goes.

Pure functions on device tensors. None of them is collective and none synchronises the host. They take the
expert load of the whole EP group, which every rank has from the plan's exchange of counts, so balance costs
no communication.

T tokens on this rank, E experts in all.
"""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError


def load_balance_loss(scores: torch.Tensor, expert_load: torch.Tensor) -> torch.Tensor:
    """E * sum_i f_i * P_i of the Switch Transformer (arXiv:2101.03961, eq. 4-6), over the group's tokens.

    f_i is the fraction of the group's slots that went to expert i; P_i is the mean score of expert i. The
    value is 1 when both are uniform. f has no gradient. Taking f over all ranks, not per rank, lets experts
    specialise within a rank's batch (global-batch load balancing, arXiv:2501.11873) and makes the loss
    linear in what is local: the mean over ranks of this value, and of its gradient, equals the loss of the
    global batch, however many ranks it is cut over (equal T on every rank, as for a mean loss in data
    parallelism).

    Args:
        scores: [T, E] float, differentiable. Rows are normalised here, so sigmoid scores may be passed as
            they are.
        expert_load: [E] integer, slots per expert over the EP group.

    Returns:
        [] fp32. With T = 0 it is 0, still connected to `scores`.
    """
    num_tokens, num_experts = scores.shape
    scores = scores.float()
    normalised = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    mean_score_E = normalised.sum(0) / max(num_tokens, 1)
    load_E = expert_load.detach().float()
    fraction_E = load_E / load_E.sum().clamp_min(1)
    return num_experts * (fraction_E * mean_score_E).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean of logsumexp(logits)^2 over the tokens (ST-MoE, arXiv:2202.08906, eq. 5): keeps logits small.

    Args:
        logits: [T, E] float, differentiable.

    Returns:
        [] fp32. With T = 0 it is 0, still connected to `logits`.
    """
    lse_T = logits.float().logsumexp(-1)
    # Not square(), whose backward copies its input for a power of one.
    return (lse_T * lse_T).sum() / max(logits.shape[0], 1)


@torch.no_grad()
def update_expert_bias(bias: torch.Tensor, expert_load: torch.Tensor, rate: float) -> None:
    """Adds `rate` to the bias of every underloaded expert and takes it from every overloaded one, in place.

    The auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2408.15664). Call it once per optimizer step,
    with the load summed over the micro-batches (and over the EP groups, where there are several). Every rank
    then makes the same update, because every rank has the same load.

    Args:
        bias: [E] fp32, `Router.expert_bias`.
        expert_load: [E] integer, slots per expert.
        rate: step size, `MoEConfig.bias_update_rate`.
    """
    if bias.dtype != torch.float32 or bias.shape != expert_load.shape:
        raise ArgumentError(
            f"bias ({bias.dtype} {tuple(bias.shape)}) must be torch.float32 of expert_load's shape"
            f" {tuple(expert_load.shape)}; steps of the size of rate ({rate}) are lost in half precision"
        )
    # mean > load as integers: sum > load * E. Exact, so the bias cannot depend on how a mean is rounded.
    load = expert_load.long()
    bias.add_((load.sum() - load * load.numel()).sign().to(bias.dtype), alpha=rate)


def imbalance(expert_load: torch.Tensor) -> torch.Tensor:
    """Largest over mean load: 1 is perfect, E is everything on one expert, 0 is no tokens at all.

    Args:
        expert_load: [E] integer, slots per expert.

    Returns:
        [] fp32.
    """
    load_E = expert_load.float()
    # The smallest mean of a load that is not zero is 1 / E.
    return load_E.max() / load_E.mean().clamp_min(1 / load_E.numel())
