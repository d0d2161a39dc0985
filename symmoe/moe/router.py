"""The router chooses the experts of a token and their weights. Its product is in fp32.

T tokens on this rank, H hidden size, E experts in all, K experts per token, G groups of experts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from symmoe import kernels
from symmoe.autograd import Context, Function, is_in_backward, no_second_order
from symmoe.checks.arguments import (
    CHOICES,
    call_problem,
    check_kind,
    choices_problem,
    memory_problem,
    tensor_problem,
)
from symmoe.errors import ArgumentError, SymmoeError, first_problem, raise_for
from symmoe.kernels import control
from symmoe.kernels.programs import run_program
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.config import MoEConfig
from symmoe.moe.recomputed import CountedCalls
from symmoe.program.builder import noted
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import replaceable

BIAS_BINS = 1000  # of the biases that an expert would need to be chosen, for bias_update="quantile"


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for T tokens. topk_idx is -1, with a prob of 0, for a masked token and for a slot that the capacity
    factor dropped. Backward reads it: change a copy."""

    topk_idx: torch.Tensor  # int32 [T, K]
    probs: torch.Tensor  # fp32 [T, K], weight of each choice, differentiable (once)
    chosen_idx: torch.Tensor  # int32 [T, K], topk_idx before the capacity factor's drops
    num_over_capacity: (
        torch.Tensor | None
    )  # int32 [1], slots dropped by the capacity factor; None without one


@dataclass(frozen=True, slots=True)
class RouterOutput(Choice):
    """The router's result for T tokens: each token's experts are distinct, best first."""

    scores: torch.Tensor  # fp32 [T, E], of all experts, without the bias, differentiable (once)
    logits: torch.Tensor  # fp32 [T, E], differentiable

    @classmethod
    def of(cls, routed: Routed) -> RouterOutput:
        """The choice without a mask and a capacity factor."""
        topk_idx = routed.topk_idx
        return cls(topk_idx, routed.probs, topk_idx, None, routed.scores, routed.logits)


class Router(nn.Module):
    """Linear scores, then top-k over (optionally) the best groups of experts.

    Selection uses scores + `expert_bias`; the probs come only from the scores. Everything is computed in fp32, also
    under autocast (of fp32 and fp16 tokens with tf32 products if torch is told to allow them). Equal scores go to the
    lower expert id, on every device and however many tokens share the call.

    Args:
        heap: the heap of the router's layer; None: the router has no layer.

    Parameters stay fp32 when a model is cast (`model.to(torch.bfloat16)`).

    Attributes:
        weight: [E, H] fp32 parameter.
        expert_bias: [E] fp32 buffer, or None; changed by :func:`symmoe.moe.balance.balance_step`, not by gradients.
        step_load: [E] int64, slots of each expert since the last balance_step, or None if unused; zeros at first. Not a
            buffer, which DDP would overwrite with another rank's: moves, casts and loading of the router do not change
            it. It is on the heap's device (without a heap, on the parameters').
        step_histogram: [E, bins] int64, in the same way: of this rank's tokens, by the bias that an expert would need,
            see :func:`symmoe.moe.balance.needed_bias_histogram`. None without bias_update="quantile".
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        heap: SymmetricHeap | None = None,
    ) -> None:
        super().__init__()
        check_kind("config", config, MoEConfig)
        if (options := config.router) is None:
            raise ArgumentError("config.router (None) must be a RouterConfig")
        self.config = config
        self.options = options
        self._rule = options.rule
        self.heap = heap
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden, dtype=torch.float32, device=device)
        )
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.expert_bias: torch.Tensor | None
        self.register_buffer("expert_bias", bias if options.expert_bias else None)
        counts_load = options.expert_bias or options.sums_global_load
        self._step_load = (
            torch.zeros(config.num_experts, dtype=torch.int64, device=device)
            if counts_load
            else None
        )
        histogram_shape = (config.num_experts, BIAS_BINS)
        self._step_histogram = (
            torch.zeros(histogram_shape, dtype=torch.int64, device=device)
            if options.bias_update == "quantile"
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation H^-0.5 (logits of order one for normalised tokens) and no bias."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.config.hidden))
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.start_step()

    @property
    def step_load(self) -> torch.Tensor | None:
        """See the class."""
        return self._on_counting_device("_step_load")

    @step_load.setter
    def step_load(self, load: torch.Tensor | None) -> None:
        self._step_load = load

    @property
    def step_histogram(self) -> torch.Tensor | None:
        """See the class."""
        return self._on_counting_device("_step_histogram")

    def _on_counting_device(self, name: str) -> torch.Tensor | None:
        """The counts of a step with this name, after a move to the device on which calls count. Calls count nothing on
        "meta"."""
        counts: torch.Tensor | None = getattr(self, name)
        if counts is None:
            return None
        device = next(self.parameters()).device if self.heap is None else self.heap.device
        if counts.device != device:
            counts = (
                torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device)
            )
            setattr(self, name, counts)
        return counts

    def load_before_call(self) -> torch.Tensor:
        """int64 [E]: the step's count before the layer's call that begins now. If backward recomputes a call, the count
        before that call, because backward of other calls has counted since. ArgumentError: backward recomputes a call
        of another step."""
        load = self.step_load
        assert load is not None
        if torch.compiler.is_compiling() or not (self.training or is_in_backward()):
            return load
        if not is_in_backward():
            return self._calls.begin(load)
        load_at_begin = self._calls.recomputed_load()
        if load_at_begin is None:
            raise ArgumentError(
                "aux_loss ('global') needs to know which call a checkpoint repeats: backward must come before "
                "balance_step, and through the graph of a call of this step"
            )
        return load_at_begin

    def start_step(self) -> None:
        """Starts the counts of a step. Does not synchronise the host."""
        for counts in (self.step_load, self.step_histogram):
            if counts is not None:
                counts.zero_()
        self._calls = CountedCalls()

    @replaceable
    def forward(
        self,
        x: torch.Tensor,
        *,
        token_mask: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
    ) -> RouterOutput:
        """Routes the tokens of this rank. Not collective; no host synchronisation. ArgumentError: an argument does not
        fit.

        Args:
            x: [T, H], any float dtype. T may be 0.
            token_mask: bool [T]; False marks padding, which goes to no expert.
            topk_idx: int [T, K], experts that replace the best ones, e.g. `chosen_idx` of another forward; -1 is no
                expert. The router computes the scores, and the probs of these experts.
        """
        config = self.config
        raise_for(
            first_problem(
                (
                    x.dim() != 2 or x.shape[1] != config.hidden,
                    f"x {tuple(x.shape)} must be [tokens, hidden ({config.hidden})]",
                ),
                (
                    not x.is_floating_point(),
                    f"x ({x.dtype}) must be floating point, like weight ({self.weight.dtype})",
                ),
            )
            or memory_problem("x", x)
            or arguments_problem(config, x, token_mask=token_mask, topk_idx=topk_idx)
        )
        # Padding may contain NaN, which a gradient of 0 would not remove.
        x_TH = x if token_mask is None else x.masked_fill(~token_mask.unsqueeze(1), 0.0)
        # Autocast would run the product in half precision, where close scores tie or swap.
        with torch.autocast(x.device.type, enabled=False):
            given_idx_TK = None if topk_idx is None else _int32(topk_idx).contiguous()
            routed = route_tokens(self.route_of(x_TH, given_idx_TK))
            choice = choice_of(config, routed.topk_idx, routed.probs, token_mask)
        return RouterOutput(
            choice.topk_idx,
            choice.probs,
            choice.chosen_idx,
            choice.num_over_capacity,
            routed.scores,
            routed.logits,
        )

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def route_of(
        self,
        x: torch.Tensor,
        given_idx: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
    ) -> Route:
        """:meth:`forward`'s Route for tokens [T, H] without a mask and a capacity factor; arguments as in Route."""
        weight_EH = self.weight.contiguous()
        x_TH = x.contiguous()
        top_k = self.config.top_k
        return Route(x_TH, weight_EH, self.expert_bias, given_idx, top_k, self._rule, topk_idx)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Follows `.to(device)` but not `.to(dtype)`: a bias of half precision would lose its updates."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        moved: nn.Module = super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return moved

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden={c.hidden}, num_experts={c.num_experts}, top_k={c.top_k}, score={self.options.score!r}"


def inner_router(router: nn.Module) -> Router:
    """The Router of a layer's router, which may wrap it."""
    return next(module for module in router.modules() if isinstance(module, Router))


def router_problem(router: nn.Module | None) -> ArgumentError | None:
    """The error if a module cannot be a layer's router, or None; a wrapper must expose the Router inside."""
    if router is None:
        return None
    if any(isinstance(module, Router) for module in router.modules()):
        parameters = inspect.signature(router.forward).parameters.values()
        if {"token_mask", "topk_idx"} <= {p.name for p in parameters} or any(
            p.kind is p.VAR_KEYWORD for p in parameters
        ):
            return None if hasattr(router, "step_load") else call_problem(router=router)
    return ArgumentError(
        f"router ({type(router).__name__}) must be a Router, called as router(x, token_mask=..., topk_idx=...); one of "
        "your own brings its choice to each call: layer(x, topk_idx=..., probs=...), see symmoe.MoELayer"
    )


def choice_of(
    config: MoEConfig, topk_idx: torch.Tensor, probs: torch.Tensor, token_mask: torch.Tensor | None
) -> Choice:
    """The choice of experts int [T, K] with weights fp32 [T, K], without padding and slots over capacity."""
    if token_mask is not None:
        padding_T1 = ~token_mask.unsqueeze(1)
        topk_idx = topk_idx.masked_fill(padding_T1, -1)
        probs = probs.masked_fill(padding_T1, 0.0)
    chosen_idx_TK = topk_idx = _int32(topk_idx)
    num_over_capacity = None
    if config.capacity_factor is not None:
        # A multiple of an expert's balanced load (GShard, arXiv:2006.16668).
        capacity = math.ceil(topk_idx.numel() / config.num_experts * config.capacity_factor)
        topk_idx, probs, num_over_capacity = drop_over_capacity(
            topk_idx,
            probs,
            num_experts=config.num_experts,
            capacity=capacity,
            policy=config.drop_policy,
        )
    return Choice(topk_idx, probs, chosen_idx_TK, num_over_capacity)


def _int32(topk_idx: torch.Tensor) -> torch.Tensor:
    """The ids as int32. A too large id stays too large, so that the plan reports it."""
    limits = torch.iinfo(torch.int32)
    return (
        topk_idx if topk_idx.dtype == torch.int32 else topk_idx.clamp(limits.min, limits.max).int()
    )


def arguments_problem(
    config: MoEConfig,
    x: torch.Tensor,
    *,
    token_mask: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    probs: torch.Tensor | None = None,
) -> SymmoeError | None:
    """The error of the mask, the choice of experts or its weights for the tokens of x [..., H], or None."""
    choice_shape = math.prod(x.shape[:-1]), config.top_k
    error: SymmoeError | None = None
    if token_mask is not None:
        error = tensor_problem(
            "token_mask", token_mask, shape=x.shape[:-1], dtypes=(torch.bool,), device=x.device
        )
    if error is None and topk_idx is not None:
        dtypes = (torch.int32, torch.int64)
        error = tensor_problem(
            "topk_idx", topk_idx, shape=choice_shape, dtypes=dtypes, device=x.device
        )
    if error is not None or (probs is None and config.router is not None):
        return error
    return first_problem(
        (
            probs is None,
            "probs (None) must be given, and topk_idx with it: the configuration has router=None",
        ),
        (
            topk_idx is None,
            "topk_idx (None) must be given with probs: which experts have these weights?",
        ),
    ) or tensor_problem("probs", probs, shape=choice_shape, dtypes=control.DTYPES, device=x.device)


def drop_over_capacity(
    topk_idx: torch.Tensor, probs: torch.Tensor, *, num_experts: int, capacity: int, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] with -1 and probs fp32 [T, K] with 0 where an expert has more slots than `capacity`; and int32
    [1], the number of dropped slots. Local; does not synchronise the host. An expert keeps the slots of the largest
    probs (policy "probs"; ties in the order of tokens) or of the first tokens ("position"). The remaining probs do not
    change: a token's lost weight does not go to its other experts (as in Megatron-Core)."""
    raise_for(choices_problem(drop_policy=policy))
    # The plan reports ids out of range, on all ranks; here they count as no expert.
    is_none_TK = (topk_idx < 0) | (topk_idx >= num_experts)
    expert_N = topk_idx.masked_fill(is_none_TK, num_experts).flatten().long()
    order_N = (
        probs.detach().flatten().argsort(descending=True, stable=True)
        if policy == "probs"
        else torch.arange(expert_N.numel(), device=expert_N.device)
    )
    order_N = order_N[expert_N[order_N].argsort(stable=True)]
    sorted_expert_N = expert_N[order_N]
    first_E = torch.searchsorted(
        sorted_expert_N, torch.arange(num_experts + 1, device=sorted_expert_N.device)
    )
    rank_in_expert_N = (
        torch.arange(sorted_expert_N.numel(), device=sorted_expert_N.device)
        - first_E[sorted_expert_N]
    )
    is_over_N = (rank_in_expert_N >= capacity) & (sorted_expert_N < num_experts)
    is_over_TK = torch.empty_like(is_over_N).scatter_(0, order_N, is_over_N).view(topk_idx.shape)
    return (
        topk_idx.masked_fill(is_over_TK, -1),
        probs.masked_fill(is_over_TK, 0.0),
        is_over_TK.sum(dtype=torch.int32).view(1),
    )


# -- the choice itself -------------------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """T tokens' choice of K out of E experts."""

    logits: torch.Tensor  # fp32 [T, E]
    probs: torch.Tensor  # fp32 [T, K]
    scores: torch.Tensor  # fp32 [T, E]
    topk_idx: torch.Tensor  # int32 [T, K]


class Route(NamedTuple):
    """The arguments of a choice of experts. Tensors are contiguous."""

    x: torch.Tensor  # [T, H] in any precision
    weight: torch.Tensor  # fp32 [E, H]
    bias: torch.Tensor | None  # fp32 [E], added to the scores for selection only
    given_idx: torch.Tensor | None  # int32 [T, K], experts that replace the best ones
    top_k: int
    rule: RoutingRule
    topk_idx: torch.Tensor | None = None  # int32 [T, K], output for the choice; None: a new tensor

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values other than tensors that determine the launches."""
        return "route", self.top_k, self.rule

    def compute(self, block_counts: torch.Tensor | None = None) -> Routed:
        """The result of route_tokens, without a gradient. block_counts: see choose_experts."""
        x_TH, weight_EH, bias_E, given_idx_TK, top_k, rule, topk_idx_TK = self
        ops = kernels.for_device(x_TH.device)
        logits_TE, probs_TK, scores_TE, topk_idx_TK = _empty(x_TH, weight_EH, top_k, topk_idx_TK)
        if _has_kernels(x_TH, weight_EH):
            ops.router_gemm(x_TH, weight_EH, logits_TE)
        else:
            torch.mm(x_TH.float(), weight_EH.t(), out=logits_TE)  # autocast does not change out=
        ops.choose_experts(
            logits_TE,
            bias_E,
            given_idx_TK,
            topk_idx_TK,
            probs_TK,
            scores_TE,
            rule=rule,
            block_counts=block_counts,
        )
        return Routed(logits_TE, probs_TK, scores_TE, topk_idx_TK)

    @property
    def inputs(self) -> list[torch.Tensor | None]:
        return [self.x, self.weight, self.bias, self.given_idx, self.topk_idx]

    def choose(self, heap: SymmetricHeap, counts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Routes as a part of a plan, see dispatch/plan.py. On CPUs logits must be finite, on all ranks."""
        routed = self.compute(counts)
        if heap.device.type == "cpu":  # on GPUs the host would wait
            check_finite(heap, "the router's logits", routed.logits)
        return routed[:3]


class RouteGradients(NamedTuple):
    """The arguments of a route's backward, which computes the required gradients of x and weight. grad_outputs: the
    gradients of logits, probs and scores; saved: x, weight, topk_idx, scores."""

    grad_outputs: tuple[torch.Tensor | None, ...]
    saved: tuple[torch.Tensor, ...]
    rule: RoutingRule
    needs: Sequence[bool]

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values other than tensors that determine the launches."""
        return "gradients of the route", self.rule, *self.needs

    @property
    def inputs(self) -> list[torch.Tensor | None]:
        return [*self.saved, *self.grad_outputs]

    def compute(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients, or None; also None if the logits get no gradient."""
        d_logits_TE, d_probs_TK, d_scores_TE = self.grad_outputs
        x_TH, weight_EH, topk_idx_TK, scores_TE = self.saved
        ops = kernels.for_device(x_TH.device)
        direct_TE = d_logits_TE
        # Backward may be called inside autocast.
        with torch.autocast(x_TH.device.type, enabled=False):
            if d_probs_TK is not None or d_scores_TE is not None:
                d_probs_TK, d_scores_TE = (
                    None if gradient is None else gradient.contiguous()
                    for gradient in (d_probs_TK, d_scores_TE)
                )
                d_logits_TE = torch.empty_like(scores_TE)
                ops.choose_experts_grad(
                    d_probs_TK, d_scores_TE, topk_idx_TK, scores_TE, d_logits_TE, rule=self.rule
                )
                d_logits_TE = d_logits_TE if direct_TE is None else d_logits_TE + direct_TE
            if d_logits_TE is None:
                return None, None
            if _has_kernels(x_TH, weight_EH):
                dx_TH = torch.empty_like(x_TH) if self.needs[0] else None
                d_weight_EH = torch.empty_like(weight_EH) if self.needs[1] else None
                ops.router_gemm_grads(d_logits_TE.contiguous(), x_TH, weight_EH, dx_TH, d_weight_EH)
            else:
                dx_TH = d_logits_TE.mm(weight_EH).to(x_TH.dtype) if self.needs[0] else None
                d_weight_EH = d_logits_TE.t().mm(x_TH.float()) if self.needs[1] else None
        return dx_TH, d_weight_EH


def run_route(call: Route | RouteGradients) -> Sequence[Any]:
    """The result of call.compute(), by a program."""
    return run_program(call.key, call.compute, call.inputs)


def route_tokens(route: Route) -> Routed:
    """Logits x @ weight^T of tokens, and the chosen experts (kernels/twin/route.py). Not collective, no host sync. For
    bf16 tokens, and on CPUs, kernels compute the logits with sums as accurate as fp32 products (never tf32), without an
    fp32 copy of the tokens; a token's logits do not depend on other tokens. Otherwise torch computes them from an fp32
    copy. Differentiable once."""
    if torch.compiler.is_compiling():
        return Routed(*_route(*route[:4], _packed(route.top_k, route.rule)))
    return Routed(*_RouteFunction.apply(route, route.x, route.weight))


@noted()
def check_finite(heap: SymmetricHeap, name: str, values: torch.Tensor) -> None:
    """Fails the call before its plan if a token has non-finite numbers. Synchronises the host, so only for CPUs."""
    bad_tokens = (~values.isfinite()).any(1).nonzero()
    if len(bad_tokens):
        heap._fail(
            ArgumentError(
                f"{name} of token {int(bad_tokens[0])} are not finite ({len(bad_tokens)} such tokens)"
            ),
            control.PHASE_PLAN,
        )


def _has_kernels(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether kernels compute the logits. On CPUs always: torch sums one token in another order than several."""
    return weight.dtype == torch.float32 and (x.dtype == torch.bfloat16 or x.device.type == "cpu")


def _empty(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, topk_idx: torch.Tensor | None = None
) -> Routed:
    """Memory for the result of a route."""
    widths = len(weight), top_k, len(weight)
    logits_TE, probs_TK, scores_TE = (
        x.new_empty((len(x), width), dtype=torch.float32) for width in widths
    )
    topk_idx_TK = x.new_empty((len(x), top_k), dtype=torch.int32) if topk_idx is None else topk_idx
    return Routed(logits_TE, probs_TK, scores_TE, topk_idx_TK)


def _save(
    ctx: Context, x: torch.Tensor, weight: torch.Tensor, routed: Sequence[torch.Tensor]
) -> None:
    _, _, scores, topk_idx = routed
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(topk_idx)
    ctx.save_for_backward(x, weight, topk_idx, scores)


class _RouteFunction(Function):
    """The autograd function of a route. x and weight are also arguments of their own, for autograd."""

    label = "the router"

    @staticmethod
    def forward(ctx: Context, route: Route, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routed = tuple(run_route(route))
        _save(ctx, route.x, route.weight, routed)
        ctx.rule = route.rule
        return routed

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        return None, *run_route(RouteGradients(gradients[:3], ctx.saved_tensors, ctx.rule, needs))


# Operators for torch.compile, which take numbers in place of a rule. A compiled graph runs them and the step's
# operators, whose backward needs state outside a CUDA graph's memory: so programs run their launches.
OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


def _packed(top_k: int, rule: RoutingRule) -> list[float]:
    """An operator's numbers, equal for equal arguments."""
    score = CHOICES["score"].index(rule.score)
    return [
        float(top_k),
        float(score),
        float(rule.renormalize),
        float(rule.num_expert_groups),
        float(rule.topk_groups),
        float(rule.route_scale),
    ]


def _unpacked(numbers: Sequence[float]) -> tuple[int, RoutingRule]:
    top_k, score, renormalize, num_groups, topk_groups, _ = map(int, numbers)
    return top_k, RoutingRule(
        score=CHOICES["score"][score],
        renormalize=bool(renormalize),
        num_expert_groups=num_groups,
        topk_groups=topk_groups,
        route_scale=numbers[5],
    )


@torch.library.custom_op("symmoe::route", mutates_args=(), tags=OUTSIDE_GRAPHS)
def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    given_idx: torch.Tensor | None,
    numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, rule = _unpacked(numbers)
    return tuple(run_route(Route(x, weight, bias, given_idx, top_k, rule)))


@_route.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
    x, weight, _bias, _given_idx, numbers = arguments
    return tuple(_empty(x, weight, int(numbers[0])))


@torch.library.custom_op("symmoe::route_gradients", mutates_args=(), tags=OUTSIDE_GRAPHS)
def _route_gradients(
    d_logits: torch.Tensor | None,
    d_probs: torch.Tensor | None,
    d_scores: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    _, rule = _unpacked(numbers)
    return tuple(
        run_route(RouteGradients((d_logits, d_probs, d_scores), tuple(saved), rule, (True, True)))
    )


@_route_gradients.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _d_logits, _d_probs, _d_scores, (x, weight, *_), _numbers = arguments
    return torch.empty_like(x), torch.empty_like(weight)


_route_gradients.register_autograd(lambda *_: no_second_order("the router"))


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, _, ctx.numbers = inputs
    _save(ctx, x, weight, output)


def _backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *_route_gradients(*gradients[:3], list(ctx.saved_tensors), ctx.numbers), None, None, None


_route.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.symmoe.route)
def _(x: Sequence[int], weight: Sequence[int], *_: object, out_shape: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.symmoe.route_gradients)
def _(*arguments: Any, out_shape: object) -> Any:
    _d_logits, _d_probs, _d_scores, (x, weight, *_), _numbers = arguments
    return 2 * 2 * x[0] * weight[0] * weight[1]
