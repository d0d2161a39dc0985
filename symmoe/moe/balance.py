"""Keeps the experts equally busy: losses, the expert bias, and figures that measure the balance (docs/training.md).

None of these functions synchronises the host, and only balance_step is collective, if a heap has an `expert_group`:
every rank has the load of the whole EP group from the plan's exchange of counts, so balance costs no communication.

A load-balance loss is E * sum_i f_i * P_i, [] fp32, of the fraction f_i of the slots that went to expert i, which has
no gradient, and the mean P_i of its normalised scores: 1 when both are uniform. Without tokens the loss is 0, still
connected to its inputs. Tokens that are False in a mask, bool [T], do not count. T tokens on this rank, S tokens in a
sequence, K experts per token, E experts in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from symmoe import kernels
from symmoe.autograd import Context, Function
from symmoe.checks.arguments import check_kind, check_model, modules_of
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.operands import require_tensor
from symmoe.kernels.programs import run_program
from symmoe.moe.ddp_and_fsdp import all_reduce_together, expert_group_of
from symmoe.moe.router import BIAS_BINS, Router, RouterOutput


def normalised(scores: torch.Tensor) -> torch.Tensor:
    """Scores [T, E] as fp32 shares that sum to 1 over the experts; shares are 0 where all scores are 0."""
    scores = scores.float()
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def rows_per_rank(
    expert_load: torch.Tensor, replica_to_expert: torch.Tensor, replica_rows: torch.Tensor
) -> torch.Tensor:
    """int64 [2, R], rows of each rank before and after balance. Before: expert_load [E] of its E / R experts. After:
    replica_rows [R, S] of the experts replica_to_expert [R, S] have moved."""
    load_Re = expert_load.view(len(replica_rows), -1)
    owner_RS = replica_to_expert // load_Re.shape[1]
    rank_R = torch.arange(len(load_Re), device=load_Re.device)
    before_R = load_Re.sum(1)
    moved_R = (replica_rows * (owner_RS == rank_R[:, None, None])).sum((1, 2))
    return torch.stack([before_R, before_R - moved_R + replica_rows.sum(1)])


def load_balance_loss(
    shares: torch.Tensor, expert_load: torch.Tensor, token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """E * sum_i f_i * P_i of the Switch Transformer (arXiv:2101.03961, eq. 4-6), with f from a given load. With a load
    of all ranks or of a step's micro-batches, experts may specialise within one rank's micro-batch (arXiv:2501.11873).
    The loss is linear in the local shares: the mean over ranks of the value, and of its gradient, equals the loss of
    the global batch for any number of ranks (with equal T on every rank, as for a mean loss in data parallelism).
    shares: [T, E] fp32, see :func:`normalised`; expert_load: [E] integer, slots per expert."""
    mean_share_E = _mean(shares, token_mask)
    load_E = expert_load.detach().float()
    fraction_E = load_E / load_E.sum().clamp_min(1)
    return shares.shape[1] * (fraction_E * mean_share_E).sum()


def sequence_balance_loss(
    shares: torch.Tensor,
    topk_idx: torch.Tensor,
    sequence_length: int,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The complementary sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17-20), mean over the sequences of S
    consecutive tokens. topk_idx: int [T, K], the choice before drops; -1 is no expert. f and P of a sequence are over
    its own tokens. f counts the chosen experts, including the effect of the router's bias and groups. A sequence of
    padding only counts as 0."""
    num_tokens, num_experts = shares.shape
    sequences = (num_tokens // max(sequence_length, 1), sequence_length)
    mask_BS = None if token_mask is None else token_mask.view(sequences)
    mean_share_BE = _mean(shares.view(*sequences, num_experts), mask_BS)
    load_BE = routing_map(topk_idx, num_experts).view(*sequences, num_experts).sum(1).float()
    fraction_BE = load_BE / load_BE.sum(1, keepdim=True).clamp_min(1)
    losses_B = num_experts * (fraction_BE * mean_share_BE).sum(1)
    return losses_B.sum() / max(losses_B.numel(), 1)


def z_loss(logits: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of logsumexp(logits)^2 over the tokens (ST-MoE, arXiv:2202.08906, eq. 5): keeps logits [T, E] small."""
    lse_T = logits.float().logsumexp(-1)
    # Not square(), whose backward copies its input for a power of one.
    return _mean((lse_T * lse_T).unsqueeze(1), token_mask).squeeze(0)


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The sum of a balance loss and a z-loss, each times its coefficient; 0 turns a loss off. sequence_length: S of the
    sequence-wise loss; None: the loss of a load."""

    balance_coef: float
    z_coef: float
    score: str
    sequence_length: int | None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the kernel router_losses."""
        return {
            "balance_coef": self.balance_coef,
            "z_coef": self.z_coef,
            "normalises": self.score != "softmax",
        }

    def __call__(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        chosen_idx: torch.Tensor,
        expert_load: torch.Tensor,
        token_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        losses = []
        if self.balance_coef:
            shares = scores if self.score == "softmax" else normalised(scores)
            if self.sequence_length is None:
                loss = load_balance_loss(shares, expert_load, token_mask)
            else:
                loss = sequence_balance_loss(shares, chosen_idx, self.sequence_length, token_mask)
            losses.append(self.balance_coef * loss)
        if self.z_coef:
            losses.append(self.z_coef * z_loss(logits, token_mask))
        return sum(losses[1:], start=losses[0])


class _KernelLoss(Function):
    """The loss of a load, and a z-loss, by kernels."""

    label = "the loss of a router"

    @staticmethod
    def forward(
        ctx: Context,
        loss_config: RouterLoss,
        load_and_mask: tuple[torch.Tensor, torch.Tensor | None],
        logits: torch.Tensor,
        scores: torch.Tensor,
    ) -> torch.Tensor:
        expert_load, token_mask = load_and_mask
        num_tokens, num_experts = scores.shape

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            sums = scores.new_empty(
                (-(-num_tokens // control.TOKENS_PER_LOSS_BLOCK), num_experts + 2)
            )
            slopes = scores.new_empty(num_experts + 1)
            loss = scores.new_empty(())
            kernels.for_device(scores.device).router_losses(
                logits, scores, expert_load, token_mask, sums, slopes, loss, **loss_config.options
            )
            return loss, slopes

        loss, slopes = run_program(
            ("loss of a router", loss_config),
            compute,
            [logits, scores, expert_load, token_mask],
        )
        ctx.save_for_backward(logits, scores, token_mask, slopes)
        ctx.loss = loss_config
        return cast(torch.Tensor, loss)

    @staticmethod
    def backward(ctx: Context, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, scores, token_mask, slopes = ctx.saved_tensors
        needs_logits, needs_scores = ctx.needs_input_grad[2:]
        # A loss without a coefficient has no gradient, rather than a zero one.
        needs = needs_logits and ctx.loss.z_coef != 0, needs_scores and ctx.loss.balance_coef != 0
        if not any(needs):
            return None, None, None, None

        def compute() -> list[torch.Tensor | None]:
            pairs = zip((logits, scores), needs, strict=True)
            gradients = [
                torch.empty_like(tensor) if is_needed else None for tensor, is_needed in pairs
            ]
            kernels.for_device(scores.device).router_losses_grad(
                d_loss,
                logits,
                scores,
                token_mask,
                slopes,
                *gradients,
                normalises=ctx.loss.options["normalises"],
            )
            return gradients

        key = "gradient of the loss of a router", ctx.loss.score, needs
        return (
            None,
            None,
            *run_program(key, compute, [d_loss, logits, scores, token_mask, slopes]),
        )


def router_loss(
    loss: RouterLoss,
    logits: torch.Tensor,
    scores: torch.Tensor,
    chosen_idx: torch.Tensor,
    expert_load: torch.Tensor,
    token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The value of `loss`, by kernels if they exist, which cost the host much less time. Differentiable once."""
    if torch.compiler.is_compiling() or loss.sequence_length is not None:
        return loss(logits, scores, chosen_idx, expert_load, token_mask)
    return cast(torch.Tensor, _KernelLoss.apply(loss, (expert_load, token_mask), logits, scores))


def routing_map(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """bool [T, E]: whether a token goes to an expert. topk_idx is int [T, K]; -1 and ids out of range are no expert."""
    # These ids get a separate column: writes of different values to one element have no order.
    column_TK = topk_idx.masked_fill((topk_idx < 0) | (topk_idx >= num_experts), num_experts).long()
    is_chosen_TE = torch.zeros(
        (topk_idx.shape[0], num_experts + 1), dtype=torch.bool, device=topk_idx.device
    )
    return is_chosen_TE.scatter_(1, column_TK, True)[:, :num_experts]


def _mean(values: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """[..., C] means over the tokens that count, of values [..., T, C] and a mask [..., T]."""
    if token_mask is None:
        return values.sum(-2) / max(values.shape[-2], 1)
    # Filled, not multiplied: a padding token may be NaN.
    counted = values.masked_fill(~token_mask.unsqueeze(-1), 0.0)
    return counted.sum(-2) / token_mask.sum(-1, keepdim=True).clamp_min(1)


@torch.no_grad()
def update_expert_bias(bias: torch.Tensor, expert_load: torch.Tensor, rate: float) -> None:
    """Adds `rate` to the bias of every underloaded expert and subtracts it from that of every overloaded one, in place:
    the auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2408.15664). Call it once per optimizer step, with the load
    summed over the micro-batches (and over the EP groups, where there are several). Every rank then makes the same
    update, because every rank has the same load. bias: [E] fp32; expert_load: [E] integer."""
    if bias.dtype != torch.float32 or bias.shape != expert_load.shape:
        raise ArgumentError(
            f"bias ({bias.dtype} {tuple(bias.shape)}) must be torch.float32 of expert_load's shape"
            f" {tuple(expert_load.shape)}; steps of the size of rate ({rate}) are lost in half precision"
        )
    # mean > load as integers: sum > load * E. Exact, so the bias cannot depend on how a mean is rounded.
    load_E = expert_load.long()
    bias.add_((load_E.sum() - load_E * load_E.numel()).sign().to(bias.dtype), alpha=rate)


@torch.no_grad()
def needed_bias_histogram(
    scores: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [E, BIAS_BINS]: for each expert, how many tokens would need which bias to choose it: the K+1-th largest
    biased score of the token minus its score (Kimi K3's technical report, eq. 13). Bins divide the range from
    min(bias) - 1 to max(bias) + 1. With K = E, when every expert is chosen, and without tokens, all are 0. scores: fp32
    [T, E], from 0 to 1; bias: fp32 [E]; token_mask: bool [T], False for tokens that do not count."""
    num_experts = scores.shape[1]
    count_N = torch.zeros(num_experts * BIAS_BINS, dtype=torch.int64, device=scores.device)
    if top_k < num_experts:
        threshold_T1 = (scores + bias).topk(top_k + 1).values[:, -1:]
        low, width = _bins(bias)
        bin_TE = ((threshold_T1 - scores - low) / width).long().clamp(0, BIAS_BINS - 1)
        bin_TE += torch.arange(num_experts, device=scores.device) * BIAS_BINS
        is_counted_TE = (
            torch.ones_like(bin_TE)
            if token_mask is None
            else token_mask.unsqueeze(1).expand_as(bin_TE).long()
        )
        count_N.scatter_add_(0, bin_TE.flatten(), is_counted_TE.flatten())
    return count_N.view(num_experts, BIAS_BINS)


def _bins(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The start of the first bin of a histogram, and the width of a bin."""
    low, high = bias.aminmax()
    return low - 1, (high - low + 2) / BIAS_BINS


@torch.no_grad()
def update_bias_to_quantile(bias: torch.Tensor, histogram: torch.Tensor, top_k: int) -> None:
    """Sets the bias of every expert, in place, to the one with which a share of K / E of the tokens would have chosen
    it, minus the mean over the experts (Kimi K3's technical report, eq. 14). Within a bin, tokens count as spread
    evenly. Without tokens the bias stays. bias: fp32 [E], as when they were counted; histogram: int64 [E, bins], see
    :func:`needed_bias_histogram`."""
    num_experts = len(bias)
    until_EB = histogram.cumsum(1)
    target_E1 = until_EB[:, -1:].double() * top_k / num_experts
    bin_E1 = torch.searchsorted(until_EB.double(), target_E1).clamp_max(histogram.shape[1] - 1)
    inside_E1 = histogram.gather(1, bin_E1)
    before_E1 = until_EB.gather(1, bin_E1) - inside_E1
    fraction_E = ((target_E1 - before_E1) / inside_E1.clamp_min(1)).squeeze(1)
    low, width = _bins(bias.double())
    bias_E = low + width * (bin_E1.squeeze(1) + fraction_E)
    bias.copy_(torch.where(until_EB[:, -1] > 0, bias_E - bias_E.mean(), bias.double()))


def max_violation(expert_load: torch.Tensor) -> torch.Tensor:
    """[] fp32, (largest - mean) / mean of a load [E] (arXiv:2408.15664): 0 is perfect; 0 also without tokens."""
    load_E = expert_load.float()
    # The smallest mean of a load that is not zero is 1 / E.
    return (load_E.max() - load_E.mean()) / load_E.mean().clamp_min(1 / load_E.numel())


def coefficient_of_variation(expert_load: torch.Tensor) -> torch.Tensor:
    """[] fp32, standard deviation (of the population) over mean of a load [E]: 0 is perfect; 0 also without tokens."""
    load_E = expert_load.float()
    return load_E.std(correction=0) / load_E.mean().clamp_min(1 / load_E.numel())


def load_entropy(expert_load: torch.Tensor) -> torch.Tensor:
    """[] fp32, entropy of a load [E] as a part of log E, that of an equal load: 1 is perfect; 0 if one expert has all
    slots, and without tokens."""
    load_E = expert_load.float()
    share_E = load_E / load_E.sum().clamp_min(1)
    entropy: torch.Tensor = torch.special.entr(share_E).sum()
    return entropy / math.log(max(2, load_E.numel()))


@torch.no_grad()
def balance_step(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Moves every expert bias towards balance, and starts the counts of the next step. Call it once per optimizer step.
    model: contains the layers, in the same order on every rank. In training mode a layer counts the load of a call (of
    its whole EP group) when backward passes through the call; micro-batches add up. A frozen router (neither it nor its
    wrapper has a parameter that requires a gradient) also counts, but keeps its bias.

    Collective over the `expert_group` of the layers' heap (one all-reduce for all layers), if it has one; with
    bias_update="quantile" also over `group`, as in reduce_gradients: all ranks that train together. Does not
    synchronise the host, and can be captured in a CUDA graph. ArgumentError: layers have different expert groups.
    """
    modules = modules_of(model, nn.Module)
    # The outermost module that replaces a router, e.g. a wrapper with adapters.
    wrappers = {
        inner: wrapper
        for module in reversed(modules)
        if (wrapper := module._modules.get("router")) is not None
        for inner in wrapper.modules()
    }
    counts = {
        module: load
        for module in modules
        if isinstance(module, Router) and (load := module.step_load) is not None
    }
    all_reduce_together([*counts.values()], expert_group_of(model))
    histograms = [
        histogram for router in counts if (histogram := router.step_histogram) is not None
    ]
    all_reduce_together(histograms, group or dist.group.WORLD)
    for router, step_load in counts.items():
        parameters = wrappers.get(router, router).parameters()
        is_trained = any(parameter.requires_grad for parameter in parameters)
        bias = router.expert_bias
        if bias is not None and is_trained and router.step_histogram is not None:
            update_bias_to_quantile(bias, router.step_histogram, router.config.top_k)
        elif bias is not None and is_trained:
            update_expert_bias(bias, step_load, router.options.bias_update_rate)
        router.start_step()


def balance_after(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
) -> RemovableHandle:
    """Makes every `optimizer.step()` end with :func:`balance_step`, unless a gradient scaler skips the step. `remove()`
    of the returned handle ends this."""
    check_model(model)
    check_kind("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch")
    return optimizer.register_step_post_hook(lambda *_: balance_step(model, group=group))


def count_needed_biases(
    y: torch.Tensor, router: Router, routed: RouterOutput, token_mask: torch.Tensor | None
) -> torch.Tensor:
    """y, the result of a call, whose backward adds to the router's `step_histogram`, with bias_update="quantile"."""
    bias = require_tensor("expert_bias", router.expert_bias)
    needed = needed_bias_histogram(routed.scores, bias, router.config.top_k, token_mask)
    return count_in_backward(y, needed, require_tensor("step_histogram", router.step_histogram))


def count_in_backward(
    y: torch.Tensor, expert_load: torch.Tensor, step_load: torch.Tensor
) -> torch.Tensor:
    """y, the result of a call. A hook adds the load [E] of the call to `step_load` when backward reaches y. By then
    autograd has run backward of the call's balance loss, which is newer than y. So a checkpoint that recomputes for
    that loss still reads forward's count."""
    if torch.compiler.is_compiling():
        return cast(torch.Tensor, _CountInBackward.apply(y, expert_load, step_load))  # type: ignore[no-untyped-call]
    loads = [expert_load.long()]  # a copy: users may write to the caller's, in the metrics

    def add(_: torch.Tensor) -> None:
        while loads:  # once, also if the graph is retained
            step_load.add_(loads.pop())

    if y.requires_grad:
        y.register_hook(add)
    return y


class _CountInBackward(torch.autograd.Function):
    """The hook of :func:`count_in_backward` as an autograd function, for torch.compile."""

    @staticmethod
    def forward(
        ctx: Context, y: torch.Tensor, load: torch.Tensor, step_load: torch.Tensor
    ) -> torch.Tensor:
        ctx.load = load
        ctx.step_load = step_load
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _add_load(ctx.step_load, ctx.load)
        return dy, None, None


# Operators: a compiler would merge the two sums, or compute the first again in backward, when its input has changed.


@torch.library.custom_op("symmoe::load_so_far", mutates_args=())
def load_so_far(step_load: torch.Tensor, expert_load: torch.Tensor) -> torch.Tensor:
    """int64 [E]: the step's count plus the load of a call."""
    return step_load + expert_load


@load_so_far.register_fake
def _(step_load: torch.Tensor, expert_load: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(step_load)


@torch.library.custom_op("symmoe::add_load", mutates_args=("step_load",))
def _add_load(step_load: torch.Tensor, expert_load: torch.Tensor) -> None:
    step_load.add_(expert_load)
