"""Runs plan, dispatch, experts and combine: from routed tokens to the weighted sums of their experts' outputs.

MoELayer and the experts of symmoe.integrations.transformers use it. If a compiler or a dispatch mode traces the call,
the step is one operator of torch; otherwise it is not. The bits are the same.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import register_flop_formula

from symmoe.autograd import Context, Unmodified, no_second_order
from symmoe.checks.arguments import kernel_rows
from symmoe.dispatch.plan import Plan, PlanOptions, PlanResult, begin_plan, plan_call, plan_problem
from symmoe.errors import ArgumentError, StalePlan, raise_for
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.experts import ExpertTensors, materialized, of_tensors
from symmoe.grouped.mlp import GroupedMLP, kind_of, without_memory
from symmoe.grouped.parameters import local_tensors
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import attach_to_ddp, experts_problem, gradients_elsewhere
from symmoe.moe.ep_step import (
    OPTION_DEFAULTS,
    STASHES,
    ExpertCall,
    ExpertParallelMLP,
    Options,
    max_lease_bytes,
    step_options,
    step_problem,
)
from symmoe.moe.router import OUTSIDE_GRAPHS, Route, Routed
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.symm_mem.row_budget import RowBudget, RowHistory
from symmoe.torch_internals import keeps_graph, num_dispatch_modes, reshaped_result

BY_NUMBER: weakref.WeakValueDictionary[int, RoutedExperts] = weakref.WeakValueDictionary()
# The phases of a call in which peers wait next: before its plan is launched, and afterwards.
CALL_PHASES = control.PHASE_PLAN, control.PHASE_DISPATCH_READY
# An edge does not keep y's memory. Before torch 2.13 backward cannot begin at an edge of a Python function.
_TAKES_EDGES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The computation of a layer after routing. It has no parameters: every call passes the experts. Layers with equal
    configuration, heap and kind of experts share one, and so one compiled graph: see :meth:`of`. Operators take tensors
    and numbers only, so each RoutedExperts has a number in this process."""

    config: MoEConfig
    heap: SymmetricHeap
    meta_experts: GroupedMLP  # shape and activation of the layers' experts, without memory
    kind: tuple[object, ...]  # see kind_of
    number: int = field(default_factory=itertools.count().__next__)
    _plan_options: dict[torch.dtype, PlanOptions] = field(default_factory=dict)

    @classmethod
    def of(cls, config: MoEConfig, heap: SymmetricHeap, experts: GroupedMLP) -> RoutedExperts:
        """The RoutedExperts for a layer with these experts. Only the layers keep it alive. Local."""
        kind = kind_of(experts)
        for shared in BY_NUMBER.values():
            if shared.heap is heap and shared.config == config and shared.kind == kind:
                return shared
        routed_experts = cls(config, heap, without_memory(experts), kind)
        BY_NUMBER[routed_experts.number] = routed_experts
        return routed_experts

    def __deepcopy__(self, memo: dict[int, object]) -> RoutedExperts:
        """Returns self: copies of a layer share it, as they share the heap."""
        return self

    def run(
        self,
        x: torch.Tensor,
        probs: torch.Tensor | Route,
        topk_idx: torch.Tensor,
        experts: GroupedMLP | ExpertTensors,
        *,
        out_shape: torch.Size | None = None,
        before_trips: Callable[[], object] | None = None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], Routed | None]:
        """y [T, H] or out_shape; the plan's expert_load and num_dropped, with replicas also replica_to_expert and
        replica_rows, as in MoEMetrics; with a route as probs, the choice of experts, which the step then makes. Callers
        that may be traced use run_routed.

        Collective over the EP group, forward and backward. The caller signals errors to peers: FailPeersOnError, with
        CALL_PHASES. Synchronises the host only with exact capacity: it waits for the plan after it has launched all
        kernels. It waits earlier in the first calls, and in the rare call that needs more rows than recent ones
        (symm_mem/row_budget.py). Raises the errors of make_plan.

        Args:
            x: [T, H], or [T, L] with latent experts, in the dtype to compute in. probs: fp32 [T, K]. topk_idx: int32 or
                int64 [T, K], expert ids or -1; with a route, the route's topk_idx.
            before_trips: called after the plan is made and before any row travels, e.g. to enqueue work on another
                stream that fills the waits of the trips.
        """
        heap = self.heap
        options = self._plan_options.get(x.dtype) or self.plan_options(x.dtype)
        experts = materialized(experts, x.dtype)  # once, even if the call is planned again
        find_budget = partial(self._find_budget, topk_idx.shape[0], x.dtype.itemsize, experts)
        x = kernel_rows(x)
        route = None
        if isinstance(probs, Route):
            route = probs._replace(x=x if self.config.latent is None else kernel_rows(probs.x))
        heap.check(control.PHASE_PLAN, waits=options.capacity is None)
        heap._fail_for(
            step_problem(experts, heap, options.replicas_per_rank)
            or plan_problem(topk_idx, heap, options, is_output=route is not None),
            control.PHASE_PLAN,
        )
        pending_plan = begin_plan(topk_idx, heap, options, find_budget, route)
        if before_trips is not None:
            pending_plan = pending_plan.make()
            before_trips()
        trains = torch.is_grad_enabled()
        call = ExpertCall(heap, experts, self.options, pending_plan, trains, out_shape, route)
        probs_TK = None if isinstance(probs, Route) else probs
        # The router gets its own x: autograd adds the two gradients as it would for two functions.
        router_tensors = (None, None) if route is None else (route.x, route.weight)
        expert_tensors = (*experts.biases, *experts.tensors)
        plan: Plan
        y, (plan, load), *route_results = ExpertParallelMLP.apply(
            call, x, probs_TK, *router_tensors, *expert_tensors
        )
        routed = None if route is None else Routed._make([*route_results, topk_idx])
        if not plan.fits_budget:  # on all ranks; no row has moved
            pending_plan = PlanResult(plan_call(topk_idx, heap, options))
            call = call._replace(pending_plan=pending_plan, route=None)
            probs_TK = probs_TK if routed is None else routed.probs
            y, (plan, load) = ExpertParallelMLP.apply(
                call, x, probs_TK, None, None, *expert_tensors
            )
        if options.capacity is None and heap.captured_reports is None:
            history: RowHistory = heap.row_histories[self._history_key]
            history.note(plan.num_tokens, *plan.needed_rows, plan.most_sent)
        return y, load, routed

    @functools.cached_property
    def choices(self) -> dict[str, str]:
        """The options of expert_parallel_mlp, by name."""
        choices = {name: getattr(self.config, name) for name in OPTION_DEFAULTS}
        return choices | {"layout": self.config.received_layout}

    @functools.cached_property
    def options(self) -> Options:
        """The options of ExpertCall."""
        return step_options(self.choices, self.config.precision, self.config.expert_hidden)

    @functools.cached_property
    def _config_number(self) -> int:
        """The number by which plans compare the whole configuration, which must be equal on every rank."""
        values = {field.name: getattr(self.config, field.name) for field in fields(MoEConfig)}
        if (router := self.config.router) is not None:
            values["router"] = "RouterConfig"
            values |= {field.name: getattr(router, field.name) for field in fields(router)}
        return self.heap.configurations.number(values)

    @functools.cached_property
    def _history_key(self) -> tuple[int, int, int]:
        config = self.config
        return config.num_experts, config.top_k, config.num_replica_slots

    def _find_budget(
        self, num_tokens: int, item_bytes: int, experts: ExpertTensors
    ) -> RowBudget | None:
        config = self.config
        heap = self.heap
        history: RowHistory = heap.row_histories[self._history_key]
        budget = history.budget(num_tokens, config.max_row_budget, heap.row_budget_factor)
        if (
            budget is None
            or budget.rows is None
            or budget.packed_rows is None
            or heap.captured_reports is not None
        ):
            return budget
        received = budget.packed_rows if self.choices["layout"] == "packed" else budget.rows
        sizes = (received, budget.rows, budget.packed_rows)
        row_bytes = experts.form.hidden * item_bytes
        needed = max_lease_bytes(sizes, num_tokens, heap, row_bytes, experts, self._history_key[2])
        if heap.memory.lacks(needed):  # the routing's need may fit
            return RowBudget(
                budget.expected_rows,
                budget.rail_rows,
                why_it_waits=f"lacks {needed} bytes of the heap",
            )
        return budget

    def plan_options(self, dtype: torch.dtype) -> PlanOptions:
        """PlanOptions from the configuration, for tokens of `dtype`."""
        c = self.config
        self._plan_options[dtype] = PlanOptions(
            c.num_experts,
            c.capacity,
            c.overflow,
            c.max_tokens,
            c.expert_hidden,
            dtype,
            c.precision,
            c.quantized_wire,
            c.rail_capacity,
            self._config_number,
            c.num_replica_slots,
            c.replica_slack,
        )
        return self._plan_options[dtype]


def experts_of(config: MoEConfig, num_ranks: int, **options: Any) -> GroupedMLP:
    """The experts of one of num_ranks ranks from the configuration, with these other options of GroupedMLP."""
    return GroupedMLP(
        config.experts_per_rank(num_ranks),
        config.expert_hidden,
        config.ffn,
        activation=ScaledActivation(config.activation),
        precision=config.precision,
        **options,
    )


# -- the step as operators of torch ------------------------------------------------------------------------------------
#
# A compiler cannot trace a plan, leases and signals. So inside torch.compile and under a TorchDispatchMode (selective
# checkpointing) layers call the whole step as one operator, with a rule for shapes, and its backward as another. Both
# run the same code as eager calls, with the same bits.
#
# Operators take tensors and numbers only. The tensors are the tokens [T, H], probs [T, K], the *layer* tensors (biases,
# if any, and weights of both layers), and the adapters. The numbers are a _Call. Forward attaches its state for
# backward (plan, leases, h) to the memory of a small tensor that it returns, `state`. That state is freed when
# autograd, the compiled graph or the checkpoint drops the tensor.


class _Call(NamedTuple):
    """The numbers of an operator."""

    step: int  # of a RoutedExperts, see BY_NUMBER
    num_layer_tensors: int  # biases and weights, without adapters
    trains: int  # whether there will be a backward pass,
    trains_layers: int  # and whether it computes gradients of biases and weights
    gradients: int  # of x and probs, one of control.GRADIENTS

    @property
    def eager(self) -> RoutedExperts:
        """The RoutedExperts that runs the step."""
        return BY_NUMBER[self.step]

    def are_trained(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """For each of the operator's tensors, whether it gets a gradient."""
        trains_inputs = [bool(self.gradients & 1), bool(self.gradients & 2)]
        trains_layers = [bool(self.trains_layers)] * self.num_layer_tensors
        num_adapters = len(tensors) - 2 - self.num_layer_tensors
        return trains_inputs + trains_layers + [True] * num_adapters

    def experts(self, tensors: Sequence[torch.Tensor]) -> ExpertTensors:
        """The experts with these of the operator's tensors."""
        experts = self.eager.meta_experts
        end = 4 if experts.fc1.has_bias else 2
        return of_tensors(
            (experts.fc1, experts.activation, experts.fc2), tensors[2:end], tensors[end:]
        )


def is_traced(experts: GroupedMLP) -> bool:
    """Whether a compiler or a dispatch mode traces the call: both see operators only. A dispatch mode may skip a call,
    so calls of experts whose weight gradients an operator cannot return are not traced for it."""
    return torch.compiler.is_compiling() or (
        num_dispatch_modes() > 0 and gradients_elsewhere(experts) is None
    )


def run_routed(
    step: RoutedExperts,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    topk_idx: torch.Tensor,
    experts: GroupedMLP,
    out_shape: torch.Size | None = None,
    *,
    before_trips: Callable[[], object] | None = None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """RoutedExperts.run, or for a traced call the step as one operator, without before_trips. ArgumentError: as in run;
    or a traced call delays weight gradients or sends them to main_grad, although the operator returns them; or the
    layer's experts have changed to another kind."""
    if not is_traced(experts):
        with FailPeersOnError(step.heap, *CALL_PHASES):
            return step.run(
                tokens, probs, topk_idx, experts, out_shape=out_shape, before_trips=before_trips
            )[:2]
    raise_for(
        gradients_elsewhere(experts, "inside torch.compile an operator returns them")
        or experts_problem(experts, step.heap.num_ranks)
    )
    if (kind := kind_of(experts)) != step.kind:
        raise ArgumentError(f"experts are {kind}; the layer was made with {step.kind}")
    biases, tensors = local_tensors((experts.fc1, experts.fc2), tokens.dtype)
    tensors = [*(bias for bias in biases if bias is not None), *tensors]
    num_layer_tensors = sum(fc.has_bias + len(fc.weight_names) for fc in (experts.fc1, experts.fc2))
    layer_tensors = tensors[:num_layer_tensors]
    if any(tensor.device != step.heap.device for tensor in tensors):
        raise ArgumentError(
            f"experts have parameters that are not on {step.heap.device}, where the heap is"
        )
    trains = torch.is_grad_enabled()
    trains_layers = trains and any(tensor.requires_grad for tensor in layer_tensors)
    gradients = control.gradients_index(
        x=trains and tokens.requires_grad, probs=trains and probs.requires_grad
    )
    call = _Call(step.number, num_layer_tensors, int(trains), int(trains_layers), gradients)
    y, load, _ = _moe_forward([tokens, probs, *tensors], topk_idx, list(call))
    # Not a view, see ExpertParallelMLP.
    return y if out_shape is None else reshaped_result(y, out_shape), load


class _Arguments:
    """The operator's tensors. Autograd must not keep them: a compiled graph may reuse their memory after forward. The
    backward operator gets them again as arguments."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def pack(self, tensor: torch.Tensor) -> int | tuple[torch.Tensor, Unmodified]:
        for number, argument in enumerate(self.tensors):
            if (
                tensor.data_ptr() == argument.data_ptr()
                and tensor.dtype == argument.dtype
                and (tensor.shape, tensor.stride()) == (argument.shape, argument.stride())
            ):
                return number
        return tensor, Unmodified(tensor=tensor)

    def unpack(self, packed: int | tuple[torch.Tensor, Unmodified]) -> torch.Tensor:
        if isinstance(packed, int):
            return self.tensors[packed]
        packed[1].check()
        return packed[0]


@dataclass(frozen=True, slots=True)
class _State:
    """One call between forward and backward. Neither edges nor leaves refer to it, so there is no reference cycle."""

    arguments: _Arguments
    inputs: list[torch.Tensor]
    output: GradientEdge | torch.Tensor
    expert_load: torch.Tensor


def _state_of(state: torch.Tensor) -> _State | None:
    return getattr(state.untyped_storage(), "_symmoe_state", None)


@torch.library.custom_op("symmoe::moe_forward", mutates_args=(), tags=OUTSIDE_GRAPHS)
def _moe_forward(
    tensors: Sequence[torch.Tensor], topk_idx: torch.Tensor, numbers: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    call = _Call(*numbers)
    eager = call.eager
    eager.heap.check(control.PHASE_PLAN)
    fc1 = eager.meta_experts.fc1
    fc2 = eager.meta_experts.fc2
    device = eager.heap.device
    eager.heap._fail_for(
        attach_to_ddp() or fc1.width_problem(device) or fc2.width_problem(device),
        control.PHASE_PLAN,
    )
    state = torch.zeros(1, dtype=torch.int64, device="cpu")
    arguments = _Arguments(tensors)
    trained = call.are_trained(tensors)
    # Leaves of this call's private autograd graph.
    leaves = [
        tensor.detach().requires_grad_(is_trained)
        for tensor, is_trained in zip(tensors, trained, strict=True)
    ]
    with (
        FailPeersOnError(eager.heap, *CALL_PHASES),
        torch.set_grad_enabled(bool(call.trains)),
        saved_tensors_hooks(arguments.pack, arguments.unpack),
    ):
        y, load, _ = eager.run(leaves[0], leaves[1], topk_idx, call.experts(leaves))
    arguments.tensors = ()
    if call.trains:
        output = get_gradient_edge(y) if _TAKES_EDGES else y
        call_state = _State(arguments, [*compress(leaves, trained)], output, load[0])
        state.untyped_storage()._symmoe_state = call_state  # type: ignore[attr-defined]  # symmoe's own attribute
    # Clones: backward needs the plan, which writes into the results must not change.
    return y.detach(), [tensor.clone() for tensor in load], state


@_moe_forward.register_fake
def _(tensors: Sequence[torch.Tensor], _idx: object, numbers: Sequence[int]) -> tuple[Any, ...]:
    x = tensors[0]
    eager = _Call(*numbers).eager
    replica_slots = (eager.heap.num_ranks, eager.config.num_replica_slots)
    shapes = [(eager.config.num_experts,), (1,)] + [replica_slots] * 2 * (replica_slots[1] > 0)
    load = [torch.empty(shape, dtype=torch.int32, device=x.device) for shape in shapes]
    return x.new_empty(x.shape), load, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("symmoe::moe_backward", mutates_args=(), tags=OUTSIDE_GRAPHS)
def _moe_backward(
    dy: torch.Tensor, state: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[torch.Tensor]:
    call_state = _state_of(state)
    if call_state is None:
        raise StalePlan(
            "`state` is a copy of what moe_forward returned; backward needs the tensor itself"
        )
    call_state.arguments.tensors = tensors  # of the caller's backward pass
    try:
        outputs = cast(
            list[torch.Tensor], [call_state.output]
        )  # torch's annotation lacks a list of both
        return list(
            torch.autograd.grad(
                outputs, call_state.inputs, [dy.contiguous()], retain_graph=keeps_graph()
            )
        )
    finally:
        call_state.arguments.tensors = ()


@_moe_backward.register_fake
def _(
    _dy: object, _state: object, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[torch.Tensor]:
    return [
        tensor.new_empty(tensor.shape)
        for tensor in compress(tensors, _Call(*numbers).are_trained(tensors))
    ]


_moe_backward.register_autograd(lambda *_: no_second_order("an expert-parallel step"))


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    tensors, _topk_idx, ctx.numbers = inputs
    ctx.save_for_backward(output[2], *tensors)


def _backward(ctx: Context, dy: torch.Tensor, *_: object) -> tuple[Any, ...]:
    state, *tensors = ctx.saved_tensors
    gradients = iter(_moe_backward(dy, state, tensors, ctx.numbers))
    trained = _Call(*ctx.numbers).are_trained(tensors)
    return [next(gradients) if is_trained else None for is_trained in trained], None, None


_moe_forward.register_autograd(_backward, setup_context=_setup_context)


# For torch.utils.flop_counter: FLOPs of the products in one rank's GEMMs. Raw, because shapes do not show the numbers
# of rows. H hidden, I ffn, r rank of a layer's adapters, T tokens, K experts per token.


@register_flop_formula(torch.ops.symmoe.moe_forward, get_raw=True)
def _(*arguments: Any, out_val: tuple[Any, ...]) -> int:
    tensors, _topk_idx, numbers = arguments
    call = _Call(*numbers)
    # A1 [G, r, H], B1, A2 [G, r, I], B2
    adapters: int = sum(adapter[0].numel() for adapter in tensors[2 + call.num_layer_tensors :])
    flops = 2 * (sum(_features(call.eager.meta_experts)) + adapters)  # of a row
    return _num_rows(call.eager, tensors[1], out_val[1][0]) * flops


@register_flop_formula(torch.ops.symmoe.moe_backward, get_raw=True)
def _(*arguments: Any, out_val: object) -> int:
    _dy, state, tensors, numbers = arguments
    call = _Call(*numbers)
    call_state = _state_of(state)
    fc1, fc2 = _features(call.eager.meta_experts)
    adapters = tensors[2 + call.num_layer_tensors :]
    a1, b1, a2, b2 = (adapter[0].numel() for adapter in adapters) if adapters else (0, 0, 0, 0)
    products = fc2 + b2 + a2 + b1  # the gradient of the activation,
    if call.gradients & 1:
        products += fc1 + a1  # of the row itself,
    if call.trains_layers:
        products += fc1 + fc2  # of the weights and of the adapters;
    products += a1 + b1 + a2 + b2
    if not STASHES[call.eager.config.stash].keeps_h:
        products += fc1 + a1 + b1 + a2  # and FC1 again
    expert_load = None if call_state is None else call_state.expert_load
    return _num_rows(call.eager, tensors[1], expert_load) * 2 * products


def _num_rows(eager: RoutedExperts, probs: torch.Tensor, load: torch.Tensor | None) -> int:
    """The rows that a rank's experts multiply in a call: from expert_load [E], limited by a static capacity, without
    slots removed by a mask or a capacity factor. Waits for the device. A call traced without data has no load; its
    number is T * K, the slots of the rank's own tokens, probs [T, K]."""
    if load is None or hasattr(load, "fake_mode"):
        return probs.numel()
    heap = eager.heap
    capacity = eager.config.capacity
    rows = int(load.view(heap.num_ranks, -1)[heap.rank].sum())
    return rows if capacity is None else min(rows, capacity)


def _features(experts: GroupedMLP) -> tuple[int, int]:
    """W * H and I * H: elements of a weight of each layer."""
    return experts.fc1.out_features * experts.hidden, experts.hidden * experts.ffn
