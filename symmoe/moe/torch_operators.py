"""The expert-parallel step as operators of torch, for those who trace a call: torch.compile, selective checkpointing.

A compiler cannot trace a plan, leases and signals. So the whole step is one operator, with a rule for shapes, and its
backward is another:

    symmoe::moe_forward    plan, dispatch, experts, combine
    symmoe::moe_backward   dispatch, experts, combine

RoutedExperts calls them inside torch.compile and under a TorchDispatchMode. Elsewhere it runs the same code without an
operator around it. Results have the same bits.

Operators take tensors and numbers only. `own` are the biases of both layers, if they have any, and their weights. The
heap and the configuration go in as the number of a RoutedExperts, found in a table that holds nothing alive. What
backward needs of forward (plan, leases, h) hangs on the memory of a small tensor that forward returns, `state`, and is
gone when autograd, the compiled graph or the checkpoint drops that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import register_flop_formula

from symmoe.autograd import Context, Unmodified
from symmoe.errors import ArgumentError, StalePlan
from symmoe.grouped.experts import CallExperts, of_tensors
from symmoe.grouped.mlp import GroupedMLP, kind_of
from symmoe.grouped.parameters import local_tensors
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import ddp_problem, fsdp_problem
from symmoe.moe.ep_step import STASHES
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import num_dispatch_modes


@dataclass(frozen=True, eq=False)
class EagerStep:
    """What the operators run: a RoutedExperts (moe/routed_experts.py).

    Attributes:
        config, heap: the configuration and heap of the layers.
        meta_experts: of the shape and activation of the layers' experts, without memory.
        kind: the kind of the layers' experts, see kind_of.
        number: the number of this object in this process. Operators take it, as they take tensors and numbers only.
    """

    config: MoEConfig
    heap: SymmetricHeap
    meta_experts: GroupedMLP
    kind: tuple[object, ...]
    number: int = field(default_factory=itertools.count().__next__)

    def run(
        self, tokens: torch.Tensor, probs: torch.Tensor, topk_idx: torch.Tensor, experts: CallExperts
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(y, expert_load, num_dropped); collective, forward and backward."""
        raise NotImplementedError


BY_NUMBER: weakref.WeakValueDictionary[int, EagerStep] = weakref.WeakValueDictionary()


def is_traced(experts: GroupedMLP) -> bool:
    """Whether a compiler or a dispatch mode traces the call, which both see operators only.

    A dispatch mode need not trace every call: not those of experts whose weight gradients an operator cannot return.
    """
    if torch.compiler.is_compiling():
        return True
    return num_dispatch_modes() > 0 and _gradients_option(experts) is None


def run_as_operator(
    step: EagerStep, tokens: torch.Tensor, probs: torch.Tensor, topk_idx: torch.Tensor, experts: GroupedMLP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """step.run as one operator. Collective, forward and backward.

    Returns:
        y [T, H]; the plan's expert_load and num_dropped, as new tensors.

    Raises:
        ArgumentError: weight gradients are to be delayed, or to go to main_grad: the operator returns them. Or the
            layer has been given experts of another kind since it was made.
    """
    if (option := _gradients_option(experts)) is not None:
        raise ArgumentError(f"experts.{option} (True) must be False inside torch.compile")
    if (problem := fsdp_problem(experts, step.heap.num_ranks)) is not None:
        raise problem
    if (kind := kind_of(experts)) != step.kind:
        raise ArgumentError(f"experts are {kind}; the layer was made with {step.kind}")
    biases, weights, adapters = local_tensors((experts.fc1, experts.fc2), tokens.dtype)
    own = [*(bias for bias in biases if bias is not None), *weights]
    if any(tensor.device != step.heap.device for tensor in (*own, *adapters)):
        raise ArgumentError(f"experts have parameters that are not on {step.heap.device}, where the heap is")
    trains = torch.is_grad_enabled()
    trains_own = trains and any(tensor.requires_grad for tensor in own)
    gradients = control.gradients_index(x=trains and tokens.requires_grad, probs=trains and probs.requires_grad)
    y, expert_load, num_dropped, _ = _moe_forward(
        tokens, probs, topk_idx, own, adapters, step.number, trains, trains_own, gradients
    )
    return y, expert_load, num_dropped


def _gradients_option(experts: GroupedMLP) -> str | None:
    """The option by which weight gradients go where an operator cannot send them, or None."""
    for linear in (experts.fc1, experts.fc2):
        for option in ("delay_wgrad", "accumulate_into_main_grad"):
            if getattr(linear, option):
                return option
    return None


def _trained_inputs(gradients: int) -> tuple[bool, bool]:
    """Whether x gets a gradient, and whether probs gets one. `gradients` is one of control.GRADIENTS."""
    return bool(gradients & 1), bool(gradients & 2)


class _Arguments:
    """The operator's tensors. Autograd must not keep them: a compiled graph may reuse their memory after forward.

    Backward gets them again, as arguments of the backward operator.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def put_away(self, tensor: torch.Tensor) -> int | tuple[torch.Tensor, Unmodified]:
        for number, argument in enumerate(self.tensors):
            if _same_memory(tensor, argument):
                return number
        return tensor, Unmodified(tensor=tensor)

    def take_out(self, kept: int | tuple[torch.Tensor, Unmodified]) -> torch.Tensor:
        if isinstance(kept, int):
            return self.tensors[kept]
        kept[1].check()
        return kept[0]


@dataclass(frozen=True, slots=True)
class _State:
    """One call between forward and backward. Neither edges nor leaves refer to it: nothing is left in a cycle."""

    arguments: _Arguments
    inputs: list[torch.Tensor]
    output: GradientEdge | torch.Tensor
    expert_load: torch.Tensor


def _kept(state: torch.Tensor) -> _State | None:
    return getattr(state.untyped_storage(), "_symmoe_state", None)


def _end_of(y: torch.Tensor) -> GradientEdge | torch.Tensor:
    """Where backward begins, without y's memory. Before torch 2.13 it cannot begin at the edge of a Python function."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return get_gradient_edge(y) if version >= (2, 13) else y


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


_TAGS = (torch.Tag.cudagraph_unsafe,)  # what backward needs does not lie in a CUDA graph's memory


@torch.library.custom_op("symmoe::moe_forward", mutates_args=(), tags=_TAGS)
def _moe_forward(
    x: torch.Tensor,
    probs: torch.Tensor,
    topk_idx: torch.Tensor,
    own: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    step: int,
    trains: bool,
    trains_own: bool,
    gradients: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    eager = BY_NUMBER[step]
    eager.heap.check(control.PHASE_PLAN)
    experts = eager.meta_experts
    problem = ddp_problem() or experts.fc1.width_problem(x) or experts.fc2.width_problem(x)
    eager.heap.fail_for(problem, control.PHASE_PLAN)
    state = torch.zeros(1, dtype=torch.int64, device="cpu")
    num_biases = 2 if experts.fc1.has_bias else 0
    if not trains:
        called = of_tensors(experts, own[:num_biases], [*own[num_biases:], *adapters])
        y, expert_load, num_dropped = eager.run(x, probs, topk_idx, called)
        return y, expert_load.clone(), num_dropped.clone(), state
    tensors = [x, probs, *own, *adapters]
    arguments = _Arguments(tensors)
    # Leaves of an autograd graph that only this call has.
    trained = [*_trained_inputs(gradients)] + [trains_own] * len(own) + [True] * len(adapters)
    leaves = [tensor.detach().requires_grad_(is_trained) for tensor, is_trained in zip(tensors, trained, strict=True)]
    called = of_tensors(experts, leaves[2 : 2 + num_biases], leaves[2 + num_biases :])
    with torch.enable_grad(), saved_tensors_hooks(arguments.put_away, arguments.take_out):
        y, expert_load, num_dropped = eager.run(leaves[0], leaves[1], topk_idx, called)
    arguments.tensors = ()
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    kept = _State(arguments, inputs, _end_of(y), expert_load)
    state.untyped_storage()._symmoe_state = kept  # type: ignore[attr-defined]  # symmoe's own attribute
    # Clones: the plan is kept for backward, and writes into the results must not change it.
    return y.detach(), expert_load.clone(), num_dropped.clone(), state


@_moe_forward.register_fake
def _(x: torch.Tensor, _probs: object, _idx: object, *arguments: Any) -> tuple[torch.Tensor, ...]:
    _own, _adapters, step, *_ = arguments
    load = torch.empty(BY_NUMBER[step].config.num_experts, dtype=torch.int32, device=x.device)
    num_dropped = torch.empty(1, dtype=torch.int32, device=x.device)
    return x.new_empty(x.shape), load, num_dropped, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("symmoe::moe_backward", mutates_args=(), tags=_TAGS)
def _moe_backward(
    dy: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    probs: torch.Tensor,
    own: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    step: int,
    trains_own: bool,
    gradients: int,
) -> list[torch.Tensor]:
    kept = _kept(state)
    if kept is None:
        raise StalePlan("`state` is a copy of what moe_forward returned; backward needs the tensor itself")
    kept.arguments.tensors = [x, probs, *own, *adapters]
    try:
        outputs = cast(list[torch.Tensor], [kept.output])  # torch's annotation has no list of either
        return list(torch.autograd.grad(outputs, kept.inputs, [dy.contiguous()], retain_graph=True))
    finally:
        kept.arguments.tensors = ()


@_moe_backward.register_fake
def _(_dy: object, _state: object, *arguments: Any) -> list[torch.Tensor]:
    x, probs, own, adapters, _step, trains_own, gradients = arguments
    inputs = [*compress((x, probs), _trained_inputs(gradients)), *(own if trains_own else ()), *adapters]
    return [tensor.new_empty(tensor.shape) for tensor in inputs]


class _OperatorContext(Context, Protocol):
    num_own: int
    options: tuple[int, bool, int]


def _keep(ctx: _OperatorContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, probs, _topk_idx, own, adapters, step, _trains, *options = inputs
    ctx.num_own, ctx.options = len(own), (step, *options)
    ctx.save_for_backward(output[3], x, probs, *own, *adapters)


def _backward(ctx: _OperatorContext, dy: torch.Tensor, *_: object) -> tuple[Any, ...]:
    state, x, probs, *rest = ctx.saved_tensors
    num_own, (trains_own, gradients) = ctx.num_own, ctx.options[1:]
    found = iter(_moe_backward(dy, state, x, probs, rest[:num_own], rest[num_own:], *ctx.options))
    dx, d_probs = (next(found) if is_trained else None for is_trained in _trained_inputs(gradients))
    d_own = [next(found) if trains_own else None for _ in range(num_own)]
    return dx, d_probs, None, d_own, [*found], None, None, None, None


_moe_forward.register_autograd(_backward, setup_context=_keep)


# For torch.utils.flop_counter, FLOPs of the products on one rank, as its GEMMs do them. Raw: numbers of rows are not in
# the shapes. H hidden, I ffn, r rank of a layer's adapters, T tokens, K experts per token.


@register_flop_formula(torch.ops.symmoe.moe_forward, get_raw=True)
def _(*arguments: Any, out_val: tuple[torch.Tensor, ...]) -> int:
    _x, probs, _topk_idx, _own, adapters, step, *_ = arguments
    eager = BY_NUMBER[step]
    return _num_rows(eager, probs, out_val[1]) * _forward_flops(eager.meta_experts, adapters)


@register_flop_formula(torch.ops.symmoe.moe_backward, get_raw=True)
def _(*arguments: Any, out_val: object) -> int:
    _dy, state, _x, probs, _own, adapters, step, trains_own, gradients = arguments
    eager, kept = BY_NUMBER[step], _kept(state)
    needs_x, _ = _trained_inputs(gradients)
    flops = _backward_flops(
        eager.meta_experts, adapters, eager.config.stash, needs_x=needs_x, trains_weights=trains_own
    )
    return _num_rows(eager, probs, None if kept is None else kept.expert_load) * flops


def _num_rows(eager: EagerStep, probs: torch.Tensor, load: torch.Tensor | None) -> int:
    """The rows that the experts of a rank multiply in a call: its expert_load [E], cut to a static capacity. Slots that
    a mask or a capacity factor has taken away are not in it. Waits for the device.

    A call that is traced without data has no load. For it, T * K: the slots of the rank's own tokens, probs [T, K].
    """
    if load is None or hasattr(load, "fake_mode"):
        return probs.numel()
    heap, capacity = eager.heap, eager.config.capacity
    rows = int(load.view(heap.num_ranks, -1)[heap.rank].sum())
    return rows if capacity is None else min(rows, capacity)


def _forward_flops(experts: GroupedMLP, adapters: Sequence[torch.Tensor]) -> int:
    """FLOPs of a row in forward: both layers, and what adapters A1 [G, r, H], B1, A2 [G, r, I], B2 add to them."""
    return 2 * (sum(_features(experts)) + sum(adapter[0].numel() for adapter in adapters))


def _backward_flops(
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
