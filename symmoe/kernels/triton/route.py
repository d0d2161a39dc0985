"""The choice of experts and their weights (Triton), from logits in one launch.

A number and its index form one integer, which is larger for the better choice, so K maxima give K choices: no sort, no
copies of [T, E], and a row's result depends only on the row. A program that counts for the plan has one of the plan's
token blocks, and as many scores per thread as other programs, so that a row's sums have the same order.
"""

import functools
from dataclasses import replace

import triton
import triton.language as tl

from symmoe.kernels import control, routing_rule
from symmoe.kernels.launch.launch import (
    Constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.triton import plan
from symmoe.kernels.triton.plan import NO_SLOT
from symmoe.kernels.triton.tiles import constants_of

SCORES_PER_PROGRAM = 1024
NUM_WARPS = 4
MAX_COUNTED = (
    128,
    64,
)  # experts (a block of tokens then has 16 warps); ranks (bits of an integer)
LOWEST_KEY = tl.constexpr(-(2**63))
NAN_KEY = tl.constexpr(2**31 - 1)
RULE = constants_of(routing_rule)
LOSS_LINES = 16  # lines of sums that are loaded together


@functools.cache
def _choice(
    num_experts: int, top_k: int, rule: RoutingRule, num_ranks: int = 0
) -> tuple[int, Constants]:
    """Tokens of a program, and the constants. num_ranks: 0 if programs do not count."""
    rule, expert_lanes = (
        replace(rule, route_scale=1.0),
        next_power_of_2(num_experts),
    )  # the scale is an argument
    tokens = control.TOKENS_PER_BLOCK if num_ranks else max(1, SCORES_PER_PROGRAM // expert_lanes)
    num_ranks = max(1, num_ranks)
    return tokens, cached_sizes(
        num_experts=num_experts,
        expert_lanes=expert_lanes,
        experts_per_rank=num_experts // num_ranks,
        num_ranks=num_ranks,
        rank_lanes=next_power_of_2(num_ranks),
        top_k=top_k,
        choice_lanes=next_power_of_2(top_k),
        rule=rule,
        group_lanes=next_power_of_2(rule.num_expert_groups),
        best_of_group=rule.best_of_group(num_experts),
        tokens=tokens,
        num_warps=max(1, tokens * expert_lanes * NUM_WARPS // SCORES_PER_PROGRAM),
    )


@triton.jit
def keys_of(value, index, LANES: tl.constexpr):
    """int64 keys in the order of the numbers; of equal numbers, the lower index comes first. Keys are distinct."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0: both are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the numbers
    ordered = tl.where(value != value, NAN_KEY, ordered)
    return (ordered.to(tl.int64) << 32) | (LANES - 1 - index)[None, :].to(tl.int64)


@triton.jit
def index_of(key, LANES: tl.constexpr):
    """The index in a key, int32."""
    return (LANES - 1 - (key & (LANES - 1))).to(tl.int32)


@triton.jit
def keep_top_groups(value, expert, SIZES: tl.constexpr):
    """[tokens, lanes] values, -inf outside of a token's best groups."""
    SIZE: tl.constexpr = SIZES.num_experts // SIZES.rule.num_expert_groups
    key = keys_of(value, expert, SIZES.expert_lanes)
    group = tl.arange(0, SIZES.group_lanes)
    worth = tl.full((value.shape[0], SIZES.group_lanes), 0.0, tl.float32)
    for g in range(SIZES.rule.num_expert_groups):
        member_key = tl.where((expert // SIZE == g)[None, :], key, LOWEST_KEY)
        for _ in range(SIZES.best_of_group):
            best = tl.max(member_key, axis=1)
            number = tl.sum(tl.where(member_key == best[:, None], value, 0.0), axis=1)
            worth = tl.where((group == g)[None, :], worth + number[:, None], worth)
            member_key = tl.where(member_key == best[:, None], LOWEST_KEY, member_key)
    group_key = tl.where(
        (group < SIZES.rule.num_expert_groups)[None, :],
        keys_of(worth, group, SIZES.group_lanes),
        LOWEST_KEY,
    )
    is_kept = expert[None, :] < tl.zeros((value.shape[0], 1), tl.int32)  # none
    for _ in range(SIZES.rule.topk_groups):
        best = tl.max(group_key, axis=1)
        is_kept = is_kept | (
            (expert // SIZE)[None, :] == index_of(best, SIZES.group_lanes)[:, None]
        )
        group_key = tl.where(group_key == best[:, None], LOWEST_KEY, group_key)
    return tl.where(is_kept, value, -float("inf"))


@triton.jit
def score_or_gradient(x, d_score, SCORE: tl.constexpr):
    """Scores [tokens, lanes] of logits x; with d_score, the gradient of the logits of scores x."""
    if SCORE == "softmax":
        if d_score is None:
            power = tl.exp(x - tl.max(x, axis=1)[:, None])
            result = tl.div_rn(power, tl.sum(power, axis=1)[:, None] + tl.zeros_like(power))
        else:
            result = x * (d_score - tl.sum(d_score * x, axis=1)[:, None])
    elif SCORE == "sigmoid":
        if d_score is None:
            result = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
        else:
            result = d_score * x * (1.0 - x)
    else:  # where the score is small, sums with 1 would lose its digits
        tl.static_assert(SCORE == "sqrtsoftplus")
        if d_score is None:
            power = tl.exp(-tl.abs(x))
            total = 1.0 + power
            log1p = tl.log(total) - tl.div_rn((total - 1.0) - power, total)
            root = tl.sqrt_rn(tl.maximum(x, 0.0) + log1p)
            result = tl.where(x > -16.0, root, tl.exp(0.5 * x))
        else:
            u = x * x  # softplus of the logit; its slope is 1 - exp(-u)
            series = 1 - u / 2 * (1 - u / 3 * (1 - u / 4 * (1 - u / 5 * (1 - u / 6))))
            slope = tl.where(u < 0.25, 0.5 * x * series, tl.div_rn(1.0 - tl.exp(-u), 2.0 * x))
            result = d_score * slope
    return result


@fast_jit()
def choose_experts_kernel(
    logits,
    bias,
    given_idx,
    topk_idx,
    probs,
    scores,
    block_counts,
    num_tokens: tl.int32,
    route_scale: tl.float32,
    SIZES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * SIZES.tokens + tl.arange(0, SIZES.tokens)
    expert, position = tl.arange(0, SIZES.expert_lanes), tl.arange(0, SIZES.choice_lanes)
    is_token, is_expert = token < num_tokens, (expert < SIZES.num_experts)[None, :]
    at = token[:, None] * SIZES.num_experts + expert[None, :]
    logit = tl.load(logits + at, mask=is_token[:, None] & is_expert, other=-float("inf"))
    SCORE: tl.constexpr = SIZES.rule.score
    score = score_or_gradient(logit, None, SCORE)
    tl.store(scores + at, score, mask=is_token[:, None] & is_expert)

    key = tl.full((SIZES.tokens, SIZES.expert_lanes), 0, tl.int64)
    if given_idx is None:
        value = score
        if bias is not None:
            value += tl.load(bias + expert, mask=expert < SIZES.num_experts, other=0.0)[None, :]
        if SIZES.rule.num_expert_groups > 1:
            value = keep_top_groups(value, expert, SIZES)
        key = tl.where(is_expert, keys_of(value, expert, SIZES.expert_lanes), LOWEST_KEY)
    prob = tl.full((SIZES.tokens, SIZES.choice_lanes), 0.0, tl.float32)
    ranks = tl.full((SIZES.tokens,), 0, tl.int64)  # bit r: the token goes to rank r
    for k in range(SIZES.top_k):
        if given_idx is None:
            best = tl.max(key, axis=1)
            chosen = index_of(best, SIZES.expert_lanes)
            key = tl.where(key == best[:, None], LOWEST_KEY, key)
        else:
            chosen = tl.load(given_idx + token * SIZES.top_k + k, mask=is_token, other=-1)
        tl.store(topk_idx + token * SIZES.top_k + k, chosen, mask=is_token)
        number = tl.sum(
            tl.where((expert[None, :] == chosen[:, None]) & is_expert, score, 0.0), axis=1
        )
        prob = tl.where((position == k)[None, :], number[:, None], prob)
        if block_counts is not None:
            ranks |= tl.full((SIZES.tokens,), 1, tl.int64) << (chosen // SIZES.experts_per_rank).to(
                tl.int64
            )
    if SIZES.rule.renormalize:
        prob = tl.div_rn(prob, tl.sum(prob, axis=1)[:, None] + RULE.TINY + tl.zeros_like(prob))
    mask = is_token[:, None] & (position < SIZES.top_k)[None, :]
    tl.store(
        probs + token[:, None] * SIZES.top_k + position[None, :], prob * route_scale, mask=mask
    )
    if block_counts is not None:
        row = block_counts + tl.program_id(0) * (SIZES.num_experts + SIZES.num_ranks + 2)
        is_chosen = (key == LOWEST_KEY) & is_token[:, None]
        tl.store(
            row + expert, tl.sum(is_chosen.to(tl.int32), axis=0), mask=expert < SIZES.num_experts
        )
        rank = tl.arange(0, SIZES.rank_lanes)
        goes = (tl.where(is_token, ranks, 0)[:, None] >> rank[None, :].to(tl.int64)).to(
            tl.int32
        ) & 1
        tl.store(row + SIZES.num_experts + rank, tl.sum(goes, axis=0), mask=rank < SIZES.num_ranks)
        bad = tl.arange(0, 2)  # the number of bad ids, and the first one
        tl.store(row + SIZES.num_experts + SIZES.num_ranks + bad, tl.where(bad == 0, 0, NO_SLOT))


@fast_jit()
def choose_experts_grad_kernel(
    d_probs,
    d_scores,
    topk_idx,
    scores,
    d_logits,
    num_tokens: tl.int32,
    route_scale: tl.float32,
    SIZES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * SIZES.tokens + tl.arange(0, SIZES.tokens)
    expert, position = tl.arange(0, SIZES.expert_lanes), tl.arange(0, SIZES.choice_lanes)
    is_token = token < num_tokens
    mask = is_token[:, None] & (expert < SIZES.num_experts)[None, :]
    at = token[:, None] * SIZES.num_experts + expert[None, :]
    score = tl.load(scores + at, mask=mask, other=0.0)
    d_score = (
        tl.full((SIZES.tokens, SIZES.expert_lanes), 0.0, tl.float32)
        if d_scores is None
        else tl.load(d_scores + at, mask=mask, other=0.0)
    )
    if d_probs is not None:
        choice = token[:, None] * SIZES.top_k + position[None, :]
        is_choice = is_token[:, None] & (position < SIZES.top_k)[None, :]
        chosen = tl.load(topk_idx + choice, mask=is_choice, other=-1)
        is_chosen = (chosen >= 0) & (chosen < SIZES.num_experts)
        d_chosen = tl.load(d_probs + choice, mask=is_choice, other=0.0) * route_scale
        if SIZES.rule.renormalize:
            number = tl.load(
                scores + token[:, None] * SIZES.num_experts + chosen, mask=is_chosen, other=0.0
            )
            divisor = tl.sum(number, axis=1)[:, None] + RULE.TINY + tl.zeros_like(number)
            inner = tl.sum(d_chosen * tl.div_rn(number, divisor), axis=1)
            d_chosen = tl.div_rn(d_chosen - inner[:, None], divisor)
        d_chosen = tl.where(is_chosen, d_chosen, 0.0)
        for k in range(SIZES.top_k):
            is_k = (position == k)[None, :]
            number_k = tl.sum(tl.where(is_k, d_chosen, 0.0), axis=1)
            expert_k = tl.sum(tl.where(is_k, chosen, 0), axis=1)
            d_score += tl.where(expert[None, :] == expert_k[:, None], number_k[:, None], 0.0)
    SCORE: tl.constexpr = SIZES.rule.score
    d_logit = score_or_gradient(score, d_score, SCORE)
    tl.store(d_logits + at, d_logit, mask=mask)


def choose_experts(logits, bias, given_idx, topk_idx, probs, scores, *, rule, block_counts=None):
    num_tokens, num_experts = logits.shape
    num_ranks = 0 if block_counts is None else block_counts.shape[1] - num_experts - 2
    counts = (
        num_ranks > 0
        and given_idx is None
        and num_experts <= MAX_COUNTED[0]
        and num_ranks <= MAX_COUNTED[1]
    )
    tokens, constants = _choice(num_experts, topk_idx.shape[1], rule, num_ranks if counts else 0)
    launch(
        choose_experts_kernel,
        (ceil_div(num_tokens, tokens),),
        constants,
        logits,
        bias,
        given_idx,
        topk_idx,
        probs,
        scores,
        block_counts if counts else None,
        num_tokens,
        rule.route_scale,
    )
    if num_ranks > 0 and not counts:
        plan.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)


def choose_experts_grad(d_probs, d_scores, topk_idx, scores, d_logits, *, rule):
    num_tokens, num_experts = scores.shape
    tokens, constants = _choice(num_experts, topk_idx.shape[1], rule)
    launch(
        choose_experts_grad_kernel,
        (ceil_div(num_tokens, tokens),),
        constants,
        d_probs,
        d_scores,
        topk_idx,
        scores,
        d_logits,
        num_tokens,
        rule.route_scale,
    )


# -- losses ----------------------------------------------------------------------------------------------------------


@functools.cache
def _loss(num_experts: int, normalises: bool) -> tuple[int, Constants]:
    """Tokens of a tile, and the constants."""
    lanes = next_power_of_2(num_experts)
    tokens = min(control.TOKENS_PER_LOSS_BLOCK, max(1, SCORES_PER_PROGRAM // lanes))
    return tokens, cached_sizes(
        num_experts=num_experts,
        expert_lanes=lanes,
        normalises=normalises,
        tokens=tokens,
        block=control.TOKENS_PER_LOSS_BLOCK,
        lines=LOSS_LINES,
        num_warps=NUM_WARPS,
    )


@triton.jit
def log_of_sum(logit):
    """[tokens, 1], logsumexp of each token's logits."""
    peak = tl.max(logit, axis=1)[:, None]
    return peak + tl.log(tl.sum(tl.exp(logit - peak), axis=1)[:, None])


@triton.jit
def sum_of(score):
    """[tokens, 1], the sum of each token's scores: the divisor of its scores."""
    return tl.maximum(tl.sum(score, axis=1), RULE.SMALLEST)[:, None]


@fast_jit()
def router_loss_sums_kernel(
    logits, scores, token_mask, sums, num_tokens: tl.int32, SIZES: tl.constexpr
):
    expert = tl.arange(0, SIZES.expert_lanes)
    share_sum = tl.full((SIZES.expert_lanes,), 0.0, tl.float32)
    square_sum = tl.full((SIZES.tokens, 1), 0.0, tl.float32)
    count = tl.full((SIZES.tokens,), 0, tl.int32)
    block = tl.program_id(0).to(tl.int64)
    for first in range(0, SIZES.block, SIZES.tokens):
        token = block * SIZES.block + first + tl.arange(0, SIZES.tokens)
        is_counted = token < num_tokens
        if token_mask is not None:
            is_counted &= tl.load(token_mask + token, mask=is_counted, other=0) != 0
        mask = is_counted[:, None] & (expert < SIZES.num_experts)[None, :]
        at = token[:, None] * SIZES.num_experts + expert[None, :]
        share = tl.load(scores + at, mask=mask, other=0.0)
        if SIZES.normalises:
            share = tl.div_rn(share, sum_of(share) + tl.zeros_like(share))
        share_sum += tl.sum(share, axis=0)
        logit = tl.load(logits + at, mask=mask, other=-float("inf"))
        lse = log_of_sum(logit)
        square_sum += tl.where(is_counted[:, None], lse * lse, 0.0)
        count += is_counted.to(tl.int32)
    line = sums + block * (SIZES.num_experts + 2)
    tl.store(line + expert, share_sum, mask=expert < SIZES.num_experts)
    tl.store(line + SIZES.num_experts, tl.sum(tl.sum(square_sum, axis=1), axis=0))
    tl.store(line + SIZES.num_experts + 1, tl.sum(count, axis=0).to(tl.float32))


@fast_jit()
def router_loss_kernel(
    sums,
    expert_load,
    slopes,
    loss,
    num_lines: tl.int32,
    balance_coef: tl.float32,
    z_coef: tl.float32,
    SIZES: tl.constexpr,
):
    expert, lane = tl.arange(0, SIZES.expert_lanes), tl.arange(0, 2)
    is_expert = expert < SIZES.num_experts
    total = tl.full((SIZES.expert_lanes,), 0.0, tl.float32)
    squares_and_tokens = tl.zeros((2,), tl.float32)  # squares, tokens
    for first in range(0, num_lines, SIZES.lines):
        number = first + tl.arange(0, SIZES.lines)
        line = sums + (number * (SIZES.num_experts + 2))[:, None]
        is_line = (number < num_lines)[:, None]
        values = tl.load(line + expert[None, :], mask=is_line & is_expert[None, :], other=0.0)
        total += tl.sum(values, axis=0)
        values = tl.load(line + SIZES.num_experts + lane[None, :], mask=is_line, other=0.0)
        squares_and_tokens += tl.sum(values, axis=0)
    square = tl.sum(tl.where(lane == 0, squares_and_tokens, 0.0), axis=0)
    count = tl.maximum(tl.sum(tl.where(lane == 1, squares_and_tokens, 0.0), axis=0), 1.0)
    load = tl.load(expert_load + expert, mask=is_expert, other=0).to(tl.float32)
    slope = (
        balance_coef * SIZES.num_experts / count * (load / tl.maximum(tl.sum(load, axis=0), 1.0))
    )
    tl.store(slopes + expert, slope, mask=is_expert)
    tl.store(slopes + SIZES.num_experts, 2.0 * z_coef / count)
    tl.store(loss, tl.sum(slope * total, axis=0) + z_coef / count * square)


@fast_jit()
def router_losses_grad_kernel(
    d_loss,
    logits,
    scores,
    token_mask,
    slopes,
    d_logits,
    d_scores,
    num_tokens: tl.int32,
    SIZES: tl.constexpr,
):
    expert = tl.arange(0, SIZES.expert_lanes)
    token = tl.program_id(0).to(tl.int64) * SIZES.tokens + tl.arange(0, SIZES.tokens)
    is_counted = token < num_tokens
    mask = is_counted[:, None] & (expert < SIZES.num_experts)[None, :]
    if token_mask is not None:
        is_counted &= tl.load(token_mask + token, mask=is_counted, other=0) != 0
    at, factor = token[:, None] * SIZES.num_experts + expert[None, :], tl.load(d_loss)
    if d_logits is not None:
        logit = tl.load(logits + at, mask=mask, other=-float("inf"))
        lse = log_of_sum(logit)
        slope = tl.load(slopes + SIZES.num_experts) * lse * tl.exp(logit - lse)
        tl.store(d_logits + at, tl.where(is_counted[:, None], factor * slope, 0.0), mask=mask)
    if d_scores is not None:
        slope = tl.load(slopes + expert, mask=expert < SIZES.num_experts, other=0.0)[None, :]
        if SIZES.normalises:
            score = tl.load(scores + at, mask=mask, other=0.0)
            total = sum_of(score)
            mean = tl.sum(slope * score, axis=1)[:, None] / total
            is_normal = tl.sum(score, axis=1)[:, None] >= RULE.SMALLEST
            slope = (slope - tl.where(is_normal, mean, 0.0)) / total
        slope += tl.full((SIZES.tokens, SIZES.expert_lanes), 0.0, tl.float32)
        tl.store(d_scores + at, tl.where(is_counted[:, None], factor * slope, 0.0), mask=mask)


def router_losses(
    logits, scores, expert_load, token_mask, sums, slopes, loss, *, balance_coef, z_coef, normalises
):
    _, constants = _loss(scores.shape[1], normalises)
    if len(sums):
        launch(
            router_loss_sums_kernel,
            (len(sums),),
            constants,
            logits,
            scores,
            token_mask,
            sums,
            len(scores),
        )
    launch(
        router_loss_kernel,
        (1,),
        constants,
        sums,
        expert_load,
        slopes,
        loss,
        len(sums),
        float(balance_coef),
        float(z_coef),
    )


def router_losses_grad(
    d_loss, logits, scores, token_mask, slopes, d_logits, d_scores, *, normalises
):
    tokens, constants = _loss(scores.shape[1], normalises)
    if len(scores):
        launch(
            router_losses_grad_kernel,
            (ceil_div(len(scores), tokens),),
            constants,
            d_loss,
            logits,
            scores,
            token_mask,
            slopes,
            d_logits,
            d_scores,
            len(scores),
        )
