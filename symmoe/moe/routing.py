"""From tokens to the choice of experts and its weights: the router's product in fp32, scores, choice, and gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from symmoe import kernels
from symmoe.autograd import Context, Function
from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.symm_mem.heap import SymmetricHeap, heap_numbered
from symmoe.tape.recorder import recorded

SCORES = CHOICES["score"]


class Routed(NamedTuple):
    """T tokens' choice of K out of E experts."""

    logits: torch.Tensor  # fp32 [T, E]
    probs: torch.Tensor  # fp32 [T, K]
    scores: torch.Tensor  # fp32 [T, E]
    topk_idx: torch.Tensor  # int32 [T, K]


class Route(NamedTuple):
    """A choice that is to be made. Tensors are contiguous."""

    x: torch.Tensor  # [T, H] in any precision
    weight: torch.Tensor  # fp32 [E, H]
    bias: torch.Tensor | None  # fp32 [E], added to the scores where experts are compared
    given_idx: torch.Tensor | None  # int32 [T, K], experts to take instead of the best ones
    top_k: int
    rule: RoutingRule
    topk_idx: torch.Tensor | None = None  # int32 [T, K], which gets the choice; None: it goes to a new tensor

    @property
    def key(self) -> tuple[Hashable, ...]:
        """On what it depends what is launched, besides tensors."""
        return "route", self.top_k, self.rule, self.bias is None, self.given_idx is None, self.topk_idx is None

    def compute(self, block_counts: torch.Tensor | None = None) -> Routed:
        """What route_tokens returns, without a gradient. block_counts: see choose_experts."""
        x, weight, bias, given_idx, top_k, rule, topk_idx = self
        ops = kernels.for_device(x.device)
        logits, probs, scores, topk_idx = _empty(x, weight, top_k, topk_idx)
        if _has_kernels(x, weight):
            ops.router_gemm(x, weight, logits)
        else:
            torch.mm(x.float(), weight.t(), out=logits)  # which autocast does not change
        ops.choose_experts(logits, bias, given_idx, topk_idx, probs, scores, rule=rule, block_counts=block_counts)
        return Routed(logits, probs, scores, topk_idx)

    @property
    def inputs(self) -> list[torch.Tensor]:
        tensors = self.x, self.weight, self.bias, self.given_idx, self.topk_idx
        return [tensor for tensor in tensors if tensor is not None]

    def choose(self, heap: SymmetricHeap, counts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """As a part of a plan, see dispatch/plan.py. On CPUs logits must be finite, on all ranks."""
        logits, probs, scores, _ = self.compute(counts)
        if heap.device.type == "cpu":  # on GPUs the host would have to wait
            fail_for_nonfinite(heap, "the router's logits", logits)
        return logits, probs, scores

    def run(self, heap: SymmetricHeap | None) -> Routed:
        """What `compute` returns; from a tape of the heap, if such calls repeat."""
        return self.compute() if heap is None else Routed(*heap.run(self.key, self.compute, self.inputs))


class RouteGradients(NamedTuple):
    """Gradients of x and weight that are to be made, where they are needed. given: those of logits, probs and scores;
    kept: x, weight, topk_idx, scores."""

    given: tuple[torch.Tensor | None, ...]
    kept: tuple[torch.Tensor, ...]
    rule: RoutingRule
    needs: Sequence[bool]

    @property
    def key(self) -> tuple[Hashable, ...]:
        """On what it depends what is launched, besides :attr:`inputs`."""
        return "gradients of the route", self.rule, *self.needs, *[one is None for one in self.given]

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.given, *self.kept) if tensor is not None]

    def compute(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients; None, too, where nothing given depends on the logits."""
        (d_logits, d_probs, d_scores), (x, weight, topk_idx, scores), rule, needs = self
        ops, direct = kernels.for_device(x.device), d_logits
        with torch.autocast(x.device.type, enabled=False):  # backward may be called inside autocast
            if d_probs is not None or d_scores is not None:
                d_probs, d_scores = (None if each is None else each.contiguous() for each in (d_probs, d_scores))
                d_logits = torch.empty_like(scores)
                ops.choose_experts_grad(d_probs, d_scores, topk_idx, scores, d_logits, rule=rule)
                d_logits = d_logits if direct is None else d_logits + direct
            if d_logits is None:
                return None, None
            if _has_kernels(x, weight):
                dx = torch.empty_like(x) if needs[0] else None
                d_weight = torch.empty_like(weight) if needs[1] else None
                ops.router_gemm_grads(d_logits.contiguous(), x, weight, dx, d_weight)
            else:
                dx = d_logits.mm(weight).to(x.dtype) if needs[0] else None
                d_weight = d_logits.t().mm(x.float()) if needs[1] else None
        return dx, d_weight

    def run(self, heap: SymmetricHeap | None) -> Sequence[torch.Tensor | None]:
        """The same; from a tape of the heap, if such calls repeat."""
        return self.compute() if heap is None else heap.run(self.key, self.compute, self.inputs)


def route_tokens(route: Route, heap: SymmetricHeap | None = None) -> Routed:
    """Logits x @ weight^T of tokens, and the experts that they choose (kernels/contract/router.py). Not collective, no
    host sync. For bf16 tokens, kernels compute the logits with sums as good as those of fp32 products (never tf32),
    without an fp32 copy of the tokens; on GPUs a token's logits do not depend on the other tokens. Otherwise torch
    computes them from an fp32 copy. Differentiable, once. heap: its tapes play what is launched."""
    if torch.compiler.is_compiling():
        return Routed(*_route(*route[:4], _packed(route.top_k, route.rule, heap)))
    return Routed(*_RouteFunction.apply(heap, route, route.x, route.weight))


@recorded
def fail_for_nonfinite(heap: SymmetricHeap, what: str, numbers: torch.Tensor) -> None:
    """Fails the call, before its plan, if numbers of a token are not finite. Synchronises the host: for CPUs."""
    bad = (~numbers.isfinite()).any(1).nonzero()
    if len(bad):
        text = f"{what} of token {int(bad[0])} are not finite ({len(bad)} such tokens)"
        heap.fail(ArgumentError(text), control.PHASE_PLAN)


def _has_kernels(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and weight.dtype == torch.float32


def _empty(x: torch.Tensor, weight: torch.Tensor, top_k: int, topk_idx: torch.Tensor | None = None) -> Routed:
    widths = len(weight), top_k, len(weight)
    logits, probs, scores = (x.new_empty((len(x), width), dtype=torch.float32) for width in widths)
    topk_idx = x.new_empty((len(x), top_k), dtype=torch.int32) if topk_idx is None else topk_idx
    return Routed(logits, probs, scores, topk_idx)


def _save(ctx: Context, x: torch.Tensor, weight: torch.Tensor, routed: Routed) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(routed.topk_idx)
    ctx.save_for_backward(x, weight, routed.topk_idx, routed.scores)


class _RouteFunction(Function):
    """Of a route, and its x and weight once more, for autograd."""

    @staticmethod
    def forward(ctx: Context, heap: SymmetricHeap | None, route: Route, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routed = route.run(heap)
        _save(ctx, route.x, route.weight, routed)
        ctx.rule, ctx.heap = route.rule, heap
        return tuple(routed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = RouteGradients(gradients[:3], ctx.saved_tensors, ctx.rule, ctx.needs_input_grad[2:])
        return None, None, *found.run(ctx.heap)


# For torch.compile, operators, which take numbers in place of a rule and a heap. They stand next to those of the step,
# which cannot be in a CUDA graph: there, tapes play what these launch.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def _packed(top_k: int, rule: RoutingRule, heap: SymmetricHeap | None) -> list[float]:
    """The numbers of an operator, equal for equal arguments."""
    score, number = SCORES.index(rule.score), -1 if heap is None else heap.number
    numbers = top_k, score, rule.renormalize, rule.num_groups, rule.top_groups, rule.route_scale, number
    return [float(each) for each in numbers]


def _unpacked(numbers: Sequence[float]) -> tuple[int, RoutingRule, SymmetricHeap | None]:
    top_k, score, renormalize, num_groups, top_groups, _, number = map(int, numbers)
    groups = {"num_groups": num_groups, "top_groups": top_groups}
    rule = RoutingRule(score=SCORES[score], renormalize=bool(renormalize), route_scale=numbers[5], **groups)
    return top_k, rule, heap_numbered(None if number < 0 else number)


@torch.library.custom_op("symmoe::route", mutates_args=(), tags=_TAGS)
def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    given_idx: torch.Tensor | None,
    numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, rule, heap = _unpacked(numbers)
    return tuple(Route(x, weight, bias, given_idx, top_k, rule).run(heap))  # type: ignore[return-value]  # of four


@_route.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
    x, weight, _bias, _given_idx, numbers = arguments
    return tuple(_empty(x, weight, int(numbers[0])))


@torch.library.custom_op("symmoe::route_gradients", mutates_args=(), tags=_TAGS)
def _route_gradients(
    d_logits: torch.Tensor | None,
    d_probs: torch.Tensor | None,
    d_scores: torch.Tensor | None,
    kept: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    _, rule, heap = _unpacked(numbers)
    found = RouteGradients((d_logits, d_probs, d_scores), tuple(kept), rule, (True, True)).run(heap)
    return tuple(found)  # type: ignore[return-value]  # both


@_route_gradients.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _d_logits, _d_probs, _d_scores, (x, weight, *_), _numbers = arguments
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, _, ctx.numbers = inputs
    _save(ctx, x, weight, Routed(*output))


def _backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *_route_gradients(*gradients[:3], list(ctx.saved_tensors), ctx.numbers), None, None, None


_route.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.symmoe.route)
def _(x: Sequence[int], weight: Sequence[int], *_: object, out_shape: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.symmoe.route_gradients)
def _(*arguments: Any, out_shape: object) -> Any:
    _d_logits, _d_probs, _d_scores, (x, weight, *_), _numbers = arguments
    return 2 * 2 * x[0] * weight[0] * weight[1]
