"""Dispatch, experts and combine as one differentiable step, without copies in between
("A step" in docs/design/programs.md).

The receive buffer of dispatch is the saved activation; FC2 writes into a lease that combine reads in place; in
backward, FC1's input gradient does. The caller chooses the layout of the receive buffer, and whether rows may travel
while GEMMs run (moe/overlap.py). Both choices give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, cast

import torch

from symmoe.autograd import Context, Function, transform_problem, wrote_into
from symmoe.checks.arguments import CHOICES, choices_problem, kernel_rows, memory_problem
from symmoe.combine.trip import CombineTrip, combine, combine_during
from symmoe.dispatch.plan import (
    MAX_TOP_K,
    Plan,
    PlanRequest,
    PlanResult,
    ReceivedIndex,
    reads_rows_in_place,
)
from symmoe.dispatch.trip import dispatch
from symmoe.errors import ArgumentError
from symmoe.grouped.experts import (
    ExpertSpec,
    ExpertTensors,
    ExpertWeights,
    SavedActivations,
    materialized,
)
from symmoe.grouped.mlp import GroupedMLP, expert_weights
from symmoe.grouped.quantized_experts import Wire
from symmoe.grouped.rows_function import ExpertRows
from symmoe.grouped.weights import Target
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem
from symmoe.kernels.operands import require_tensor
from symmoe.moe.overlap import SERIAL, Overlap, Sizes, overlap_of, received_layout
from symmoe.moe.replicas import ReplicaTrip, replica_bytes, replicas_problem
from symmoe.moe.router import Route, RouteGradients, run_route
from symmoe.precision.recipes import Recipe
from symmoe.precision.wire import WireFormat, wire_problem
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Lease
from symmoe.torch_internals import graph_task_id, keeps_graph, saved_tensor_hooks

DISPATCH = control.PHASE_DISPATCH_READY
COMBINE = control.PHASE_COMBINE_READY  # the first barriers of trips
NUM_SAVED_ACTIVATIONS = len(SavedActivations._fields)
_NUM_ROUTE_SAVED = 4  # tensors of RouteGradients.saved: x, weight, topk_idx, scores


class Stash(NamedTuple):
    """The results that forward saves for backward besides the tokens, the plan and the weights."""

    keeps_rows: bool  # the received rows, in a lease; False: backward dispatches the tokens again
    keeps_h: bool  # FC1's output with the adapters' sums; False: backward computes it again


class Options(NamedTuple):
    """The options of a step: as in MoEConfig, with "auto" resolved."""

    order: str
    stash: Stash
    layout: str  # not "auto"
    schedule: str
    wire: Wire


STASHES = {
    name: Stash(name in ("all", "rows"), name in ("all", "hidden")) for name in CHOICES["stash"]
}
# Options of expert_parallel_mlp, as in MoEConfig, and their defaults.
OPTION_DEFAULTS = {
    "order": "rank",
    "stash": "all",
    "layout": "auto",
    "schedule": "overlapped",
    "quantized_wire": "none",
}


def step_options(choices: Mapping[str, str], precision: Recipe | None, hidden: int) -> Options:
    """The options from their names in MoEConfig."""
    wire_format = None if precision is None else WireFormat(precision, hidden)
    formats = [
        wire_format if choices["quantized_wire"] in (direction, "both") else None
        for direction in ("forward", "backward")
    ]
    stash = STASHES[choices["stash"]]
    return Options(choices["order"], stash, choices["layout"], choices["schedule"], Wire(*formats))


def expert_parallel_mlp(
    x: torch.Tensor,
    probs: torch.Tensor,
    experts: GroupedMLP | ExpertTensors,
    plan: Plan,
    *,
    out_shape: torch.Size | None = None,
    **choices: str,
) -> torch.Tensor:
    """y[t] = sum over k of probs[t, k] * MLP of expert topk_idx[t, k] (x[t]), from a plan of make_plan, for
    experts without a configuration. Collective, forward and backward; does not synchronise.

    Args:
        choices: order, stash, layout, schedule and quantized_wire, with the values and defaults of MoEConfig.

    Raises:
        ArgumentError: a choice is unknown; raised on every rank if any rank raises (on GPUs the peers raise at their
            next call on the heap, or in heap.synchronize). Or quantised rows were requested without a precision of E4M3
            numbers; or see :func:`step_problem`.
    """
    if unknown := choices.keys() - OPTION_DEFAULTS:
        raise TypeError(
            f"expert_parallel_mlp takes {', '.join(OPTION_DEFAULTS)}, not {', '.join(unknown)}"
        )
    heap = plan.heap
    heap.check()
    with FailPeersOnError(heap, DISPATCH):
        heap._fail_for(transform_problem() or choices_problem(**choices), DISPATCH)
        experts = materialized(experts, x.dtype)
        form = experts.form
        choices = OPTION_DEFAULTS | choices
        choices["layout"] = received_layout(choices["layout"], form.ffn, form.precision)
        if choices["quantized_wire"] != "none":
            heap._fail_for(wire_problem(form.precision), DISPATCH)
        options = step_options(choices, form.precision, form.hidden)
        heap._fail_for(step_problem(experts, heap, plan.num_replica_slots), DISPATCH)
        call = ExpertCall(
            heap, experts, options, PlanResult(plan), torch.is_grad_enabled(), out_shape
        )
        y, _plan = ExpertParallelMLP.apply(
            call, kernel_rows(x), probs, None, None, *experts.biases, *experts.tensors
        )
        return cast(torch.Tensor, y)


def step_problem(
    experts: ExpertTensors, heap: SymmetricHeap, num_replica_slots: int
) -> ArgumentError | None:
    """The reason why these experts cannot compute a call now, or None: the GPU is too old for the precision, or a
    weight has changed inside cache_quantized_weights."""
    fc1, fc2 = experts.linears
    problem = None
    if fc1.cached_weight is not None or fc2.cached_weight is not None:
        problem = fc1.cache_problem() or fc2.cache_problem()
    if num_replica_slots:
        problem = problem or replicas_problem(experts)
    if experts.form.precision is not None:
        problem = problem or e4m3_problem(experts.form.precision, heap.device)
    return problem


class ExpertCall(NamedTuple):
    """The arguments of one call of ExpertParallelMLP besides the differentiated tensors.

    experts: see :func:`step_problem`; pending_plan: with a route, the request for the plan that begins with it;
    out_shape: [..., H] of the result; None is [T, H]."""

    heap: SymmetricHeap
    experts: ExpertTensors
    options: Options
    pending_plan: PlanRequest | PlanResult
    trains: bool
    out_shape: torch.Size | None = None
    route: Route | None = None


def _overlap_of(
    form: ExpertSpec, plan: Plan | PlanRequest, options: Options, x: torch.Tensor
) -> Overlap:
    """The overlap of each trip with GEMMs. Depends only on values that are equal on all ranks."""
    heap = plan.heap
    nodes = plan.nodes
    wire = options.wire
    # If ranks of a node are not consecutive, the rows of its tokens are not one part.
    if (
        heap.num_ranks == 1
        or options.schedule == "serial"
        or (nodes is not None and not heap.topology.is_in_order)
    ):
        return SERIAL
    sizes = Sizes(
        num_rows=plan.expected_rows,
        hidden=form.hidden,
        ffn=form.ffn,
        top_k=plan.top_k,
        num_experts=plan.num_experts,
        num_ranks=heap.num_ranks,
        num_nodes=1 if nodes is None else heap.topology.num_nodes,
        rail_bytes_per_s=math.inf if heap.nodes is None else heap.nodes.payload.bytes_per_s,
        item_bytes=x.element_size(),
        is_gated=form.activation.is_gated,
        sums_travel=not reads_rows_in_place(options.order, nodes),
        is_expert_major=options.layout == "expert-major",
        sent_row_bytes=None if wire.rows is None else wire.rows.row_bytes,
        sent_gradient_row_bytes=None if wire.gradients is None else wire.gradients.row_bytes,
    )
    return overlap_of(options.schedule, sizes, x.device, form.precision)


class _EPStep(NamedTuple):
    """One step: everything that forward and backward share, except the differentiated tensors. `kind` is a number,
    equal for steps that launch the same kernels with the same arguments for tensors of the same shapes; or None."""

    form: ExpertSpec
    plan: Plan | PlanRequest  # with known sizes; in backward a Plan
    options: Options
    overlap: Overlap
    num_rows: int  # of h
    kind: int | None

    @classmethod
    def of(cls, call: ExpertCall, plan: Plan | PlanRequest, x: torch.Tensor) -> _EPStep:
        """The step of a call, with a plan whose sizes are known."""
        form = call.experts.form
        options = call.options
        overlap = _overlap_of(form, plan, options, x)
        if plan.num_rows is not None:
            return cls(form, plan, options, overlap, max(1, plan.num_rows), None)
        key = (
            overlap,
            options,
            form,
            plan.num_tokens,
            plan.row_capacity,
            plan.packed_row_capacity,
            plan.num_experts,
            plan.num_replica_slots,
            plan.top_k,
            None if plan.nodes is None else plan.nodes.rails.key,
        )
        kind = plan.heap.programs.number(key)
        return cls(form, plan, options, overlap, plan.row_capacity, kind)

    def arguments(
        self, key: tuple[Hashable, ...], inputs: Sequence[torch.Tensor | None], generation: int
    ) -> tuple[tuple[Hashable, ...] | None, Sequence[torch.Tensor | None], dict[str, int]]:
        """The key, the inputs and the numbers for SymmetricHeap._run, of this step. generation: of the plan."""
        if self.kind is None:
            return None, inputs, {}
        numbers = {"plan": generation}
        if self.plan.nodes is None:
            return (*key, self.kind), inputs, numbers
        rails = self.plan.nodes.rails
        return (
            (*key, self.kind),
            [*inputs, rails.integers.storage],
            {**numbers, "rail_plan": rails.number},
        )

    def receive(self, rows: torch.Tensor, *, name: str) -> Lease:
        """A lease for rows, with the width and dtype of `rows`, that arrive from all ranks."""
        return self.plan.heap.lease(
            (self.num_received, rows.shape[1]), rows.dtype, name=name, phase=DISPATCH
        )

    @property
    def num_received(self) -> int:
        """Rows of a receive buffer."""
        return self.plan.packed_row_capacity if self.is_packed else self.plan.row_capacity

    @property
    def is_packed(self) -> bool:
        """Whether the receive buffer has one row for each (token, rank), not for each (token, expert)."""
        return self.options.layout == "packed"

    def rows(
        self,
        plan: Plan,
        received: torch.Tensor,
        index: ReceivedIndex,
        row_probs: torch.Tensor,
    ) -> ExpertRows:
        """The rows in the kernels' form. plan: the plan of one run."""
        return ExpertRows(
            received,
            plan.row_range,
            row_probs,
            bias_scale=row_probs if self.form.have_biases[1] else None,
            row_index=index.row_to_packed_row if self.is_packed else None,
        )


def max_lease_bytes(
    sizes: tuple[int, int, int],
    num_tokens: int,
    heap: SymmetricHeap,
    row_bytes: int,
    experts: ExpertTensors,
    num_replica_slots: int,
) -> int:
    """The most bytes that a call leases, forward or backward: a receive buffer, rows of outputs or gradients, sums of
    the peers, slots, and replicas. sizes: rows of a receive buffer, rows, and packed rows."""
    received, rows, packed_rows = sizes
    has_adapters = len(experts.tensors) > sum(experts.form.num_weights)
    # Whether the leases of the experts' output gradient and of their input gradient overlap in time.
    are_both_leased = experts.linears[1].delay_wgrad or has_adapters
    weight_bytes = replica_bytes(experts, num_replica_slots) if num_replica_slots else 0
    slot_bytes = packed_rows * MAX_TOP_K * 2 * torch.int32.itemsize
    num_gradient_rows = received + rows if are_both_leased else max(received, rows)
    num_rows = received + num_gradient_rows + heap.num_ranks * max(1, num_tokens)
    return num_rows * row_bytes + slot_bytes + weight_bytes + 8 * ALIGNMENT_BYTES


def _shrunk_to_heap(step: _EPStep, row_bytes: int, experts: ExpertTensors) -> _EPStep:
    """The step, with smaller buffers of backward if those of the row budget do not fit into the heap."""
    plan = step.plan
    heap = plan.heap
    sizes = (plan.row_capacity, plan.packed_row_capacity)
    if plan.num_rows is None or sizes == plan.needed_rows:
        return step  # the buffers have no more rows than needed
    needed = max_lease_bytes(
        (step.num_received, *sizes),
        plan.num_tokens,
        heap,
        row_bytes,
        experts,
        plan.num_replica_slots,
    )
    if not heap.memory.lacks(needed):
        return step
    rows, packed_rows = plan.needed_rows
    shrunk = plan.replaced(row_capacity=rows, packed_row_capacity=packed_rows)
    return step._replace(plan=shrunk, kind=None, num_rows=max(1, plan.num_rows))


def _encode(rows: torch.Tensor, wire: WireFormat | None) -> torch.Tensor:
    """The rows in the wire format."""
    return rows if wire is None else wire.encode(rows)


def _resized_rows(tensor: Any, num_rows: int) -> Any:
    """The first num_rows rows of a tensor's memory; the tensor if its memory has fewer (a copy). None for None."""
    if tensor is None or tensor.shape[0] == num_rows:
        return tensor
    end = tensor.storage_offset() + num_rows * tensor.stride(0)
    if end * tensor.element_size() > tensor.untyped_storage().nbytes():
        return tensor
    return tensor.as_strided((num_rows, *tensor.shape[1:]), tensor.stride())


class _Saved(NamedTuple):
    """The results of forward that backward reads."""

    received: torch.Tensor | None  # the received rows; None: backward dispatches the tokens again
    hidden: SavedActivations  # its fields are None if backward recomputes it
    row_probs: torch.Tensor

    def with_rows(self, received: int, hidden: int, row_probs: int) -> _Saved:
        """A copy whose tensors have these numbers of rows, see _resized_rows."""
        rows = [_resized_rows(tensor, hidden) for tensor in self.hidden[:3]]
        return _Saved(
            _resized_rows(self.received, received),
            SavedActivations._make([*rows, *self.hidden[3:]]),
            _resized_rows(self.row_probs, row_probs),
        )


_NOTHING_SAVED = SavedActivations._make([None] * NUM_SAVED_ACTIVATIONS)


class _ForwardResult(NamedTuple):
    """The results of a forward pass, or of its first half."""

    storage: torch.Tensor  # of the plan
    routed: Sequence[torch.Tensor]  # logits, probs and scores of a route that has run
    received_index: ReceivedIndex
    received: Lease  # the received rows
    row_probs: torch.Tensor  # their probs
    a: Any  # the activation, see SecondInput
    hidden: SavedActivations
    replica_slots: Lease | None  # with the weights of replicas
    y: torch.Tensor | None = None  # [T, H], of both halves


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """The two halves of a forward pass."""

    step: _EPStep
    x: torch.Tensor
    probs: torch.Tensor | None  # None: probs of the route that fills the plan
    weights: ExpertWeights
    frees_rows: bool  # whether FC1 is the last reader of the received rows
    generation: int  # of the plan

    def first_half(self) -> _ForwardResult:
        """Plan, dispatch and FC1."""
        return self._begin()[0]

    def both_halves(self) -> _ForwardResult:
        result, plan, replicas = self._begin()
        return result._replace(y=self.finish(result, plan, replicas))

    def _begin(self) -> tuple[_ForwardResult, Plan, ReplicaTrip]:
        """Runs the first half, with the plan's kernels for a PlanRequest. Returns the second half's arguments."""
        step = self.step
        routed: Sequence[torch.Tensor] = ()
        if isinstance(step.plan, PlanRequest):
            storage, *routed = step.plan.launch(self.generation)
            plan = step.plan.plan_of(storage, self.generation)
        else:
            plan = step.plan
        sent_rows = _encode(self.x, step.options.wire.rows)
        probs = require_tensor("probs", routed[1] if self.probs is None else self.probs)
        replicas = ReplicaTrip(plan, self.weights)
        received = step.receive(sent_rows, name="received rows")
        layout = step.options.layout
        send = partial(dispatch, layout=layout, division=step.overlap.dispatch, is_last=False)
        with send(
            sent_rows, plan, received.tensor, probs, extra_payload=replicas.extra_payload
        ) as arrival:
            row_probs = require_tensor("row_probs", arrival.row_probs)
            rows = step.rows(plan, received.tensor, arrival.index, row_probs)
            hidden, a = replicas.weights.first_layer(
                rows, num_rows=step.num_rows, parts=arrival.parts
            )
        result = _ForwardResult(
            plan.storage, routed, arrival.index, received, row_probs, a, hidden, replicas.lease
        )
        return result, plan, replicas

    def finish(self, result: _ForwardResult, plan: Plan, replicas: ReplicaTrip) -> torch.Tensor:
        """The second half, FC2 and combine: y [T, H]."""
        step = self.step
        received = result.received
        rows = step.rows(plan, received.tensor, result.received_index, result.row_probs)
        if self.frees_rows:
            received.release()
        shape = (plan.row_capacity, self.x.shape[1])
        order = step.options.order
        with plan.heap.lease(shape, self.x.dtype, name="expert output", phase=COMBINE) as out:
            compute = partial(replicas.weights.second_layer, result.a, rows, out.tensor)
            y = combine(
                out.tensor,
                plan,
                result.received_index,
                compute,
                order=order,
                division=step.overlap.combine,
            )
        replicas.finish()
        return y

    def to_save(self, result: _ForwardResult) -> _Saved:
        """The results to save, with the sizes of the buffers."""
        stash = self.step.options.stash
        # The tensor owns its lease, which ends when autograd or checkpointing frees the tensor.
        received = result.received.tensor if stash.keeps_rows else None
        hidden = result.hidden if stash.keeps_h else _NOTHING_SAVED
        return _Saved(received, hidden, result.row_probs)

    def shrink(self, saved: _Saved, lease: Lease, plan: Plan, *, cuts: bool) -> _Saved:
        """Shrinks the lease of the received rows to the sizes of a plan, and returns the results to save. cuts: whether
        hooks get saved tensors. Then these have the sizes of the routing, because a checkpoint compares them."""
        step = self.step
        max_rows, max_packed_rows = plan.needed_rows
        num_received = max_packed_rows if step.is_packed else max_rows
        if saved.received is not None and num_received < lease.shape[0]:
            lease.shrink(num_received * lease.shape[1] * lease.dtype.itemsize)
        if not cuts:
            return saved
        num_rows = step.num_rows if plan.num_rows is None else max(1, plan.num_rows)
        return saved.with_rows(num_received, num_rows, max_rows)


class ExpertParallelMLP(Function):
    """y, and the plan with its load; with a route also logits, probs and scores. Collective; does not synchronise. The
    caller signals errors to peers (FailPeersOnError).

    Backward is collective too, and all ranks must enter it in the same order. It computes the required gradients: each
    of `x` and `probs` requires one on all ranks or on none. Without a gradient of y, only the route's backward runs."""

    label = "an expert-parallel step"

    @staticmethod
    def forward(
        ctx: Context,
        call: ExpertCall,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        _: torch.Tensor | None,
        weight: torch.Tensor | None,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        pending_plan = call.pending_plan
        stash = call.options.stash
        route = call.route
        fc1, fc2 = call.experts.linears
        saves = call.trains and any(ctx.needs_input_grad)
        saves_h = saves and stash.keeps_h
        frees_rows = not (saves and stash.keeps_rows)
        trains = (saves_h and ctx.needs_input_grad[1], saves_h)
        weights = expert_weights(
            call.experts.form,
            (b1, b2),
            tensors,
            trains=trains,
            wire=call.options.wire,
            cached=(fc1.cached_weight, fc2.cached_weight),
        )
        # A checkpoint's forward inside backward ends when the last tensor is saved, which is before combine.
        is_recomputed = graph_task_id() >= 0
        key: tuple[Hashable, ...] = "first half" if is_recomputed else "forward", frees_rows, trains
        with (heap := call.heap).one_call:
            routed: Sequence[torch.Tensor] = ()
            if isinstance(pending_plan, PlanRequest) and pending_plan.row_capacity >= 0:
                storage = pending_plan.topk_idx
                generation = heap.waits.flight.epoch + 1
                step = _EPStep.of(call, pending_plan, x)
                key = *key, pending_plan.key
            else:
                plan, routed = pending_plan.make()
                storage = plan.storage
                generation = plan.generation
                step = _EPStep.of(call, plan, x)
            probs = routed[1] if routed else None if probs is None else probs.contiguous()
            inputs = [x, probs, storage, *weights.operands]
            if isinstance(step.plan, PlanRequest) and route is not None:
                inputs += [None if route.x is x else route.x, weight, route.bias]
            forward = _Forward(step, x, probs, weights, frees_rows, generation)
            function = forward.first_half if is_recomputed else forward.both_halves
            kind, operands, numbers = step.arguments(key, inputs, generation)
            result = _ForwardResult._make(heap._run(kind, function, operands, **numbers))
            if isinstance(step.plan, PlanRequest):
                plan = step.plan.plan(result.storage, generation)
        routed = routed or result.routed
        saved = forward.to_save(result) if saves else None
        load = plan.load
        plan = plan.settle()  # all work is launched: now the host may wait for the plan
        if saved is not None:
            tensors_to_save: tuple[torch.Tensor | None, ...] = ()
            if route is not None:
                tensors_to_save = (
                    route.x,
                    require_tensor("weight", weight),
                    require_tensor("topk_idx", route.topk_idx),
                    routed[2],
                )
            ctx.is_cut = saved_tensor_hooks(True) is not None
            if plan.fits_budget:
                received, hidden, row_probs = forward.shrink(
                    saved, result.received, plan, cuts=ctx.is_cut
                )
                # Always x: gradients of gradients raise on the way to it, see symmoe/autograd.py.
                tensors_to_save = (
                    *tensors_to_save,
                    x,
                    received,
                    *hidden,
                    row_probs,
                    b1,
                    b2,
                    *tensors,
                )
            ctx.save_for_backward(*tensors_to_save)
            ctx.step = step._replace(plan=plan)
            ctx.index = result.received_index
            ctx.linears = call.experts.linears
            ctx.rule = route and route.rule
            ctx.routes_rows = route is not None and route.x is x
        y = result.y
        if y is None:
            replicas = ReplicaTrip(plan, weights, lease=result.replica_slots)
            y = forward.finish(result, plan, replicas)
        if call.out_shape is not None and call.out_shape != y.shape:
            # In place, because autograd restricts views, and a write to a view removes FSDP's hooks. Here, so that no
            # function comes between the caller's gradient and its check.
            y.resize_(call.out_shape)
        if route is None:
            return y, (plan, load)
        ctx.set_materialize_grads(False)
        return y, (plan, load), *routed

    @staticmethod
    def backward(
        ctx: Context, dy: torch.Tensor | None, _: None = None, *d_routed: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        heap = ctx.step.plan.heap
        if dy is None:  # only the choice of experts is differentiated, not y
            route = RouteGradients(
                d_routed, ctx.saved_tensors[:_NUM_ROUTE_SAVED], ctx.rule, ctx.needs_input_grad[3:5]
            )
            return *[None] * 3, *run_route(route), *[None] * len(ctx.needs_input_grad[5:])
        with FailPeersOnError(heap, DISPATCH):
            heap._fail_for(memory_problem("the gradient of y", dy), DISPATCH)
            dy = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
            return _backward(ctx, kernel_rows(dy), d_routed)


def _backward(
    ctx: Context, dy: torch.Tensor, d_routed: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    linears = ctx.linears
    saved = ctx.saved_tensors
    route = None
    needs_x, needs_probs, *needs_route = ctx.needs_input_grad[1:5]
    if ctx.rule is not None:
        route_saved = saved[:_NUM_ROUTE_SAVED]
        saved = saved[_NUM_ROUTE_SAVED:]
        needs_probs = any(needs_route)
        route = (
            RouteGradients(d_routed, route_saved, ctx.rule, needs_route) if needs_probs else None
        )
    x, received, *remaining = saved
    hidden, (row_probs, b1, b2, *tensors) = (
        SavedActivations(*remaining[:NUM_SAVED_ACTIVATIONS]),
        remaining[NUM_SAVED_ACTIVATIONS:],
    )
    # Saved twice, as in a repeated call: hooks may return two tensors of one memory, and a program takes one.
    x = route_saved[0] if ctx.routes_rows else x
    x = x if received is None else None  # backward reads the received rows
    experts = ExpertTensors(ctx.step.form, (b1, b2), tuple(tensors), linears)
    step = _shrunk_to_heap(ctx.step, dy.shape[1] * dy.element_size(), experts)
    plan = cast(Plan, step.plan)
    index = ctx.index
    results = _Saved(received, hidden, row_probs)
    if ctx.is_cut or step is not ctx.step:
        # As large as in forward, if possible, so that sizes repeat.
        results = results.with_rows(step.num_received, step.num_rows, plan.row_capacity)
        index = index.with_rows_of(plan)
    options = step.options
    layer_weights = step.form.split(tensors)[:2]
    layer_needs = step.form.split(ctx.needs_input_grad[7:])[:2]
    # Outside the repeated program: the targets may change from call to call.
    fc1, fc2 = (
        fc.gradient_target(tuple(compress(weights, needs)), overwrite_main_grad=False)
        for fc, weights, needs in zip(linears, layer_weights, layer_needs, strict=True)
    )
    # Also now: a block of symmoe.grouped.cache_quantized_weights may have ended since forward.
    cached = [linear.cached_weight if results.hidden.h is None else None for linear in linears]
    weights = expert_weights(
        step.form,
        (b1, b2),
        tensors,
        trains=(needs_x, True),
        wire=options.wire,
        cached=(cached[0], cached[1]),
    )
    spends_h = not (options.stash.keeps_h and keeps_graph())
    needs = (needs_x, needs_probs)
    backward = _Backward(
        step,
        index,
        dy,
        x,
        results,
        weights,
        (fc1, fc2),
        needs,
        spends_h,
        route,
        tensors,
    )
    saved_results = results.received, *results.hidden, results.row_probs
    inputs = dy, x, *saved_results, plan.storage, *index, *weights.operands
    targets = (fc1.option, fc2.option)
    key: tuple[Any, ...] = needs_x, needs_probs, spends_h, targets
    if route is not None:
        key = (*key, route.key)
        inputs = *inputs, *[None if tensor is x else tensor for tensor in route.inputs]
    inputs = *inputs, *fc1.operands, *fc2.operands
    kind, operands, numbers = step.arguments(("backward", key), inputs, plan.generation)
    with plan.heap.one_call:
        dx_TH, d_probs_TK, d_route, d_biases, dw1, dw2, d_adapters = plan.heap._run(
            kind, backward, operands, **numbers
        )
    if spends_h and options.stash.keeps_h:
        wrote_into(results.hidden.h)  # a later reader gets an error
    return (
        None,
        dx_TH,
        d_probs_TK,
        *d_route,
        *d_biases,
        *fc1.for_autograd(layer_weights[0], dw1),
        *fc2.for_autograd(layer_weights[1], dw2),
        *d_adapters,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """A backward pass: of the tokens x, or of the rows that forward has received."""

    step: _EPStep
    index: ReceivedIndex
    dy: torch.Tensor
    x: torch.Tensor | None
    saved: _Saved
    weights: ExpertWeights
    targets: tuple[Target, Target]  # of the weight gradients
    needs: tuple[bool, bool]  # whether x and probs need gradients
    spends_h: bool  # whether this pass is the last reader of h
    route: RouteGradients | None  # which also takes the gradient of probs
    tensors: Sequence[torch.Tensor]  # of the experts, weights and adapters

    def __call__(self) -> tuple[Any, ...]:
        """dx; d_probs, or with a route the tuple of its gradients of x and weight; and sequences of gradients: of the
        biases, of both layers' weights (None for those that bypass autograd) and of the adapters."""
        step = self.step
        plan = cast(Plan, self.step.plan)
        dy = self.dy
        options = step.options
        received, hidden, row_probs = self.saved
        (needs_x, needs_probs), (fc1, fc2) = self.needs, self.targets
        gradients = control.gradients_index(x=needs_x, probs=needs_probs)
        division = step.overlap.gradient_dispatch
        send = partial(
            dispatch,
            plan=plan,
            layout=options.layout,
            index=self.index,
            gradients=gradients,
            division=division,
        )
        replicas = ReplicaTrip(plan, self.weights, self.targets)
        if received is None:
            sent_rows = _encode(require_tensor("x", self.x), options.wire.rows)
            received = step.receive(sent_rows, name="received rows").tensor
        rows = step.rows(plan, received, self.index, row_probs)
        if self.saved.received is None:  # the plan has the routing
            with send(
                sent_rows, buffer=received, is_last=False, extra_payload=replicas.extra_payload
            ) as arrival:
                if hidden.h is None:
                    hidden = replicas.weights.first_layer(
                        rows, num_rows=step.num_rows, parts=arrival.parts
                    )[0]
        sent_rows = _encode(dy, options.wire.gradients)
        d_out = step.receive(sent_rows, name="output gradients")
        with send(
            sent_rows,
            buffer=d_out.tensor,
            is_last=not gradients,
            extra_payload=replicas.extra_payload,
        ) as arrival:
            if hidden.h is None:  # not earlier: this trip carries the weights of replicas
                hidden = replicas.weights.first_layer(
                    rows, num_rows=step.num_rows, parts=arrival.parts
                )[0]
                arrival = replace(arrival, parts=None)  # the first layer has read all parts
            experts_backward = replicas.weights.backward(
                rows,
                hidden,
                d_out.tensor,
                parts=arrival.parts,
                needs_scale=needs_probs,
                spends_h=self.spends_h,
            )
        weights1, weights2, adapters = step.form.split(self.tensors)
        dw2 = fc2.add(weights2, experts_backward.w2_product, experts_backward.w2_gradient)
        is_d_out_read_later = fc2.delay is not None and dw2[0].read is not None
        if not is_d_out_read_later and not adapters:
            experts_backward.free_w2()
            d_out.release()
        # Without dW1 nothing would overlap; gradients of adapters take too little time.
        division = step.overlap.gradient_combine if fc1.computes else None
        lease: AbstractContextManager[Lease | None] = nullcontext()
        if needs_x:
            lease = plan.heap.lease(
                (plan.row_capacity, dy.shape[1]), dy.dtype, name="input gradients", phase=COMBINE
            )
        with lease as input_gradients:
            d_rows_NH = None if input_gradients is None else input_gradients.tensor
            compute = (
                (lambda part: None)
                if d_rows_NH is None
                else partial(experts_backward.input_gradient, d_rows_NH)
            )
            trip: AbstractContextManager[CombineTrip | None] = nullcontext()
            if gradients:
                sums = CombineTrip(
                    d_rows_NH,
                    plan,
                    self.index,
                    order=options.order,
                    row_values=experts_backward.d_scale if needs_probs else None,
                    gradients=gradients,
                )
                trip = combine_during(sums, compute, division)
            num_sms = division.num_sms if gradients and division is not None else None
            w1_gradient = partial(experts_backward.w1_gradient, num_sms=num_sms)
            with trip as collection:
                dw1 = fc1.add(weights1, experts_backward.w1_product, w1_gradient)
                d_adapters = experts_backward.adapter_gradients()
        replicas.finish(experts_backward.gradients)
        dx_TH = None if collection is None else collection.out
        d_probs_TK = None if collection is None else collection.values
        d_route: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if (route := self.route) is not None:
            d_logits_TE, loss_d_probs_TK, d_scores_TE = route.grad_outputs
            if d_probs_TK is not None and loss_d_probs_TK is not None:
                d_probs_TK = d_probs_TK + loss_d_probs_TK
            grad_outputs = d_logits_TE, d_probs_TK, d_scores_TE
            d_route = route._replace(grad_outputs=grad_outputs).compute()
            d_probs_TK = None
        return dx_TH, d_probs_TK, d_route, experts_backward.d_biases, dw1, dw2, d_adapters
