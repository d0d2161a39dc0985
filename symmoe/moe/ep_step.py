"""Dispatch, experts and combine as one differentiable step: no copy between its parts.

The receive buffer of dispatch is the saved activation; FC2 writes into a lease that combine reads in place; in
backward, FC1's input gradient does. Which layout the receive buffer has, and
whether rows travel while GEMMs run, is the caller's choice (moe/schedule.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context, Function, is_in_backward, transform_problem
from symmoe.checks.arguments import kernel_rows, words_problem, wrapped_problem
from symmoe.checks.buffers import memory_problem
from symmoe.combine.trip import PHASE as COLLECT
from symmoe.combine.trip import Collection, pulls
from symmoe.dispatch.plan import MAX_TOP_K, Plan
from symmoe.dispatch.slots import PHASE as SEND
from symmoe.grouped.experts import ExpertRows, ExpertWeights, Hidden, SecondInput
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import CallExperts, ExpertForm, GroupedMLP, Held, evaluated, expert_weights
from symmoe.grouped.quantized_experts import FULL, Wire, takes_parts
from symmoe.grouped.weight_gradients import Compute, Target
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import given
from symmoe.moe.overlap import Rates, Sizes, gpu_of, num_sms_of, overlap, overlap_everything, rates_of, received_layout
from symmoe.moe.schedule import Overlapped, Schedule, Serial
from symmoe.precision.recipes import Recipe
from symmoe.precision.wire import WireFormat, wire_problem
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Lease
from symmoe.torch_internals import reshaped_result

RECEIVED = "received rows"
NUM_HIDDEN = len(Hidden._fields)
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Stash:
    """What forward keeps for backward in addition to the tokens, the plan and the weights.

    Attributes:
        keeps_rows: the received rows, in a lease; without them backward dispatches the tokens again.
        keeps_h: FC1's output, and what adapters added to it; without them backward computes them again.
    """

    keeps_rows: bool
    keeps_h: bool


STASHES = {
    "all": Stash(True, True),
    "rows": Stash(True, False),
    "hidden": Stash(False, True),
    "none": Stash(False, False),
}


def expert_parallel_mlp(
    x: torch.Tensor,
    probs: torch.Tensor,
    experts: GroupedMLP | CallExperts,
    plan: Plan,
    *,
    order: str = "rank",
    stash: str = "all",
    layout: str = "auto",
    schedule: str = "overlapped",
    quantized_wire: str = "none",
    out_shape: torch.Size | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of probs[t, k] * MLP of expert topk_idx[t, k] (x[t]). Collective; does not synchronise.

    Backward is collective too and must be entered by all ranks in the same order. It computes what is asked for: each
    of `x` and `probs` requires a gradient on all ranks or on none.

    Args:
        x: [T, H] on the heap's device; the experts' weights are cast to its dtype.
        probs: fp32 [T, K].
        experts: the experts of this rank; their `precision` is that of the step.
        plan: the plan of this call's routing.
        order, stash, layout, schedule, quantized_wire: see MoEConfig.
        out_shape: [..., H] of the result; None is [T, H].

    Returns:
        [..., H].

    Raises:
        ArgumentError: order, stash, layout, schedule or quantized_wire is no such word; on every rank if it is on any
            (on GPUs the peers raise at their next call on the heap, or in heap.synchronize). Or rows are to travel
            quantised, and the experts' precision is not one of E4M3 numbers; or the GPU is too old for the precision;
            or a weight has changed inside constant_weights; on every rank in the same way.
    """
    problem = words_problem(order=order, stash=stash, layout=layout, schedule=schedule, quantized_wire=quantized_wire)
    plan.heap.check()
    with FailPeersOnError(plan.heap, SEND):
        plan.heap.fail_for(transform_problem() or problem, SEND)
        for name, fc in () if isinstance(experts, CallExperts) else (("fc1", experts.fc1), ("fc2", experts.fc2)):
            plan.heap.fail_for(wrapped_problem(f"experts.{name}", fc, "held_problem"), SEND)
        experts = evaluated(experts, x.dtype)
        form, linears = experts.form, experts.linears
        problem = linears[0].held_problem() or linears[1].held_problem()
        if form.precision is not None:
            problem = problem or e4m3_problem(form.precision, x.device)
        plan.heap.fail_for(problem, SEND)
        layout = received_layout(layout, form.ffn, form.precision)
        wire = _wire(form, plan, quantized_wire)
        schedule_of_call = _schedule(schedule, x, form, plan, order, layout, wire)
        step = _EPStep(
            form=form,
            plan=plan,
            order=order,
            stash=STASHES[stash],
            layout=layout,
            schedule=schedule_of_call,
            wire=wire,
            trains=torch.is_grad_enabled(),
            out_shape=out_shape,
            num_rows=plan.row_capacity if plan.num_rows is None else max(1, plan.num_rows),
            kind=_kind(experts, plan, schedule_of_call, order, stash, layout),
        )
        y: torch.Tensor = _ExpertParallelMLP.apply(step, linears, x, probs, *experts.biases, *experts.tensors)
    return y


def _wire(experts: ExpertForm, plan: Plan, quantized_wire: str) -> Wire:
    recipe = experts.precision
    if quantized_wire != "none":
        plan.heap.fail_for(wire_problem(recipe), SEND)
    if quantized_wire == "none" or recipe is None:
        return FULL
    wire = WireFormat(recipe, experts.hidden)
    return Wire(*(wire if quantized_wire in (direction, "both") else None for direction in ("forward", "backward")))


def _schedule(
    word: str, x: torch.Tensor, experts: ExpertForm, plan: Plan, order: str, layout: str, wire: Wire
) -> Schedule:
    """The schedule of a call. How it cuts the call depends only on what all ranks agree on."""
    heap, across = plan.heap, plan.across
    if heap.num_ranks == 1 or word == "serial":
        return Serial(layout)
    if across is not None and across.own_rows is None:  # no parts in the order of ranks
        return Serial(layout)
    sizes = Sizes(
        num_rows=_rounded_up(plan.expected_rows),
        hidden=experts.hidden,
        ffn=experts.ffn,
        top_k=plan.top_k,
        num_experts=plan.num_experts,
        num_ranks=heap.num_ranks,
        num_nodes=1 if across is None else heap.topology.num_nodes,
        item_bytes=x.element_size(),
        is_gated=experts.activation.is_gated,
        sums_travel=not pulls(plan, order),
        is_expert_major=layout == "expert-major",
        sent_row_bytes=None if wire.rows is None else wire.rows.row_bytes,
        sent_gradient_row_bytes=None if wire.gradients is None else wire.gradients.row_bytes,
    )
    return _overlapped(word, layout, sizes, num_sms_of(x.device), gpu_of(x.device), experts.precision)


@functools.lru_cache(maxsize=256)
def _overlapped(word: str, layout: str, sizes: Sizes, num_sms: int, gpu: Rates, precision: Recipe | None) -> Overlapped:
    """The same object for the same call: steps are told apart by it."""
    if word == "always-overlapped":
        chosen = overlap_everything(sizes, num_sms)
    else:
        chosen = overlap(sizes, num_sms, rates_of(gpu, precision))
    if not takes_parts(precision):  # its GEMMs begin when all rows are there
        chosen = replace(chosen, dispatch=None, gradient_dispatch=None)
    return Overlapped(layout, chosen)


def _rounded_up(number: int) -> int:
    """Rounded up to four significant bits: with exact capacity the number changes every step, the schedule rarely."""
    step = 1 << max(0, number.bit_length() - 4)
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class _EPStep:
    """One step: everything that forward and backward share, except the tensors that are differentiated. Frozen, since
    functions on tapes read it.

    Attributes:
        num_rows: rows of h.
        kind: a number, equal for steps that launch the same kernels with the same arguments, given tensors of the same
            shapes; None for those that are not put on a tape.
    """

    form: ExpertForm
    plan: Plan
    order: str
    stash: Stash
    layout: str
    schedule: Schedule
    wire: Wire
    trains: bool
    out_shape: torch.Size | None
    num_rows: int
    kind: int | None

    def run(
        self,
        name: str,
        options: tuple[Hashable, ...],
        function: Callable[[], Sequence[Any]],
        inputs: Sequence[torch.Tensor | None],
    ) -> Sequence[Any]:
        """function(), or what the tape of an earlier step of this kind does; see SymmetricHeap.run."""
        if self.kind is None:
            return function()
        given_inputs = [tensor for tensor in inputs if tensor is not None]
        plan = self.plan
        return plan.heap.run((name, options, self.kind), function, given_inputs, plan=plan.generation)

    def receive(self, rows: torch.Tensor, *, name: str) -> Lease:
        """A lease in which rows with the width and dtype of these arrive from all ranks."""
        return self.plan.heap.lease((self.num_received, rows.shape[1]), rows.dtype, name=name, phase=SEND)

    @property
    def num_received(self) -> int:
        """Rows of a receive buffer."""
        return self.plan.packed_row_capacity if self.layout == "packed" else self.plan.row_capacity

    def weight_gradients(
        self, target: Target, weights: tuple[torch.Tensor, ...], compute: Callable[..., None], *, while_combining: bool
    ) -> Sequence[torch.Tensor | None]:
        """The weight gradients of one linear layer, computed `while_combining` unless they are delayed."""
        num_sms = self.schedule.gradient_combine_sms if while_combining and target.computes else None
        on_sms: Compute = partial(compute, num_sms=num_sms)
        return target.add(weights, on_sms)

    def operands(
        self,
        received: torch.Tensor,
        row_to_packed_row: torch.Tensor,
        row_probs: torch.Tensor,
        biases: Biases,
        tensors: Sequence[torch.Tensor],
        *,
        trains: tuple[bool, bool],
        held: Held,
    ) -> tuple[ExpertRows, ExpertWeights]:
        """Inputs as the kernels take them. trains, held: as in expert_weights, for this call."""
        bias_scale = None if biases[1] is None else row_probs
        weights = expert_weights(self.form, biases, tensors, trains=trains, wire=self.wire, held=held)
        row_index = row_to_packed_row if self.layout == "packed" else None
        return ExpertRows(received, self.plan.row_range, row_probs, bias_scale, row_index), weights


def _kind(experts: CallExperts, plan: Plan, schedule: Schedule, order: str, stash: str, layout: str) -> int | None:
    """See _EPStep. Steps are put on a tape if their sizes repeat, and if no table of addresses and no quantised weight
    is among their operands."""
    if (
        plan.heap.device.type == "meta"
        or plan.heap.nodes is not None
        or plan.num_rows is not None
        or experts.form.precision is not None
        or experts.form.split(experts.tensors)[2]  # adapters
        or not all(experts.form.are_packed)
    ):
        return None
    have_bias = [bias is not None for bias in experts.biases]
    sizes = plan.num_tokens, plan.row_capacity, plan.packed_row_capacity, plan.num_experts, plan.top_k
    return plan.heap.tapes.number((schedule, order, stash, layout, *sizes, experts.form, *have_bias))


def _held(linears: tuple[GroupedLinear, GroupedLinear]) -> Held:
    """What symmoe.constant_weights holds now: a block may end before backward."""
    return linears[0].held_weight, linears[1].held_weight


def most_bytes(received: int, rows: int, packed_rows: int, num_tokens: int, heap: SymmetricHeap, row_bytes: int) -> int:
    """What a call leases at most, forward or backward: two receive buffers, rows, sums of the peers, and slots."""
    slot_bytes = packed_rows * MAX_TOP_K * 2 * torch.int32.itemsize
    num_rows = 2 * received + rows + heap.num_ranks * max(1, num_tokens)
    return num_rows * row_bytes + slot_bytes + 8 * ALIGNMENT_BYTES


def _that_fits(step: _EPStep, row_bytes: int) -> _EPStep:
    """The step, with buffers of backward that fit into the heap, if those with room do not."""
    plan, heap = step.plan, step.plan.heap
    sizes = plan.row_capacity, plan.packed_row_capacity
    if plan.num_rows is None or sizes == plan.needed_rows:
        return step  # there is no room beyond what is needed
    if not heap.memory.lacks(most_bytes(step.num_received, *sizes, plan.num_tokens, heap, row_bytes)):
        return step
    plan.shrink()
    return replace(step, kind=None, num_rows=max(1, plan.num_rows))


def _on_wire(rows: torch.Tensor, wire: WireFormat | None) -> torch.Tensor:
    """The rows in the format in which they travel."""
    return rows if wire is None else wire.encode(rows)


def _first_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == num_rows else tensor[:num_rows]


def _whole(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The tensor of which _first_rows has made this one; this one if it has other memory now, e.g. a copy's."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    first_byte = tensor.storage_offset() * tensor.element_size()
    if tensor.shape[0] >= num_rows or first_byte + num_rows * row_bytes > tensor.untyped_storage().nbytes():
        return tensor
    return tensor.as_strided((num_rows, *tensor.shape[1:]), tensor.stride())


class _Half(NamedTuple):
    """What the first half of a forward pass leaves: the received rows, the probs of the rows, the activation, what
    backward will need, and inputs as the kernels take them; None: the second half makes them again."""

    received: Lease
    row_probs: torch.Tensor
    a: SecondInput
    hidden: Hidden
    operands: tuple[ExpertRows, ExpertWeights] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """The two halves of a forward pass. trains, held: as in expert_weights."""

    step: _EPStep
    x: torch.Tensor
    probs: torch.Tensor
    biases: Biases
    tensors: tuple[torch.Tensor, ...]
    trains: tuple[bool, bool]
    held: Held

    def first_half(self) -> _Half:
        """Dispatch and FC1."""
        step, plan = self.step, self.step.plan
        if step.kind is None:
            return self._dispatch_and_first_layer()
        inputs = (self.x, self.probs, plan.storage, *self.biases, *self.tensors)
        *index, received, row_probs, a, h = step.run("first half", self.trains, self._on_tape, inputs)
        plan.packed_to_row, plan.row_to_packed_row = index
        return _Half(received, row_probs, a, Hidden(h))

    def _on_tape(self) -> tuple[Any, ...]:
        half = self._dispatch_and_first_layer()
        return *self.step.plan.received_index(), half.received, half.row_probs, half.a, half.hidden.h

    def _dispatch_and_first_layer(self) -> _Half:
        step = self.step
        sent = _on_wire(self.x, step.wire.rows)
        received = step.receive(sent, name=RECEIVED)
        with step.schedule.dispatch(sent, step.plan, received.tensor, self.probs) as arrival:
            row_probs = given("row_probs", arrival.row_probs)
            made = rows, experts = self._operands(received.tensor, arrival.row_to_packed_row, row_probs)
            hidden, a = experts.first_layer(rows, num_rows=step.num_rows, parts=arrival.parts)
        # The halves of steps on tape know of each other only what is in their inputs.
        return _Half(received, row_probs, a, hidden, made if step.kind is None else None)

    def _operands(
        self, received: torch.Tensor, row_to_packed_row: torch.Tensor, row_probs: torch.Tensor
    ) -> tuple[ExpertRows, ExpertWeights]:
        operands = received, row_to_packed_row, row_probs, self.biases, self.tensors
        return self.step.operands(*operands, trains=self.trains, held=self.held)

    def second_half(self, half: _Half, received: torch.Tensor) -> torch.Tensor:
        """FC2 and combine: y [T, H]. received: the tensor of the lease, which may have been released."""
        step, plan = self.step, self.step.plan
        function = partial(self._second_layer_and_combine, half, received)
        if step.kind is None:
            return function()[0]
        assert isinstance(half.a, torch.Tensor)  # there is no recipe
        inputs = (half.a, half.row_probs, plan.storage, *plan.received_index(), *self.biases, *self.tensors)
        y: torch.Tensor = step.run("second half", (), function, inputs)[0]
        return y

    def _second_layer_and_combine(self, half: _Half, received: torch.Tensor) -> tuple[torch.Tensor]:
        step, plan = self.step, self.step.plan
        rows, experts = half.operands or self._operands(received, plan.received_index()[1], half.row_probs)
        shape = plan.row_capacity, self.x.shape[1]
        with plan.heap.lease(shape, self.x.dtype, name="expert output", phase=COLLECT) as out:

            def compute(part: Part | None) -> None:
                experts.second_layer(half.a, half.hidden, rows, out.tensor, part=part)

            return (step.schedule.combine(out.tensor, plan, step.order, compute),)


class _EPStepContext(Context, Protocol):
    step: _EPStep
    linears: tuple[GroupedLinear, GroupedLinear]


class _ExpertParallelMLP(Function):
    @staticmethod
    def forward(
        ctx: _EPStepContext,
        step: _EPStep,
        linears: tuple[GroupedLinear, GroupedLinear],
        x: torch.Tensor,
        probs: torch.Tensor,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        plan, stash, x = step.plan, step.stash, kernel_rows(x)
        keeps = any(ctx.needs_input_grad)
        keeps_h = keeps and step.trains and stash.keeps_h
        trains = keeps_h and ctx.needs_input_grad[2], keeps_h
        forward = _Forward(step, x, probs.contiguous(), (b1, b2), tensors, trains, _held(linears))
        half = forward.first_half()
        received, row_probs, computed = half.received, half.row_probs, half.hidden

        def keep() -> None:
            """Saves what backward needs, in the sizes of the routing: a checkpoint compares them."""
            plan.settle()
            if not (keeps and plan.has_room):
                return
            max_rows, max_packed_rows = plan.needed_rows
            # The tensor holds its lease: it ends when autograd frees the saved tensor, or checkpointing drops it.
            kept: tuple[torch.Tensor | None, ...] = (x, None)
            if stash.keeps_rows:
                used = max_packed_rows if step.layout == "packed" else max_rows
                kept = (None, _first_rows(received.tensor, used))
                if used < received.shape[0]:
                    received.shrink(used * received.shape[1] * received.dtype.itemsize)
            num_rows = step.num_rows if plan.num_rows is None else max(1, plan.num_rows)
            kept += computed.of_rows(num_rows) if stash.keeps_h else (None,) * len(computed)
            ctx.save_for_backward(*kept, _first_rows(row_probs, max_rows), b1, b2, *tensors)
            ctx.step, ctx.linears = step, linears

        # A checkpoint's forward inside backward ends where the last tensor is saved: now, not after combine.
        is_recomputed = is_in_backward()
        if is_recomputed:
            keep()
        rows = received.tensor
        if not (keeps and stash.keeps_rows):
            received.release()
        y = forward.second_half(half, rows)
        if not is_recomputed:
            keep()  # everything is launched: now the host may wait for the plan
        # Not a view: autograd allows less with views, and a view would lose FSDP's hooks when somebody writes into it.
        # Made here, so that no function stands between the caller's gradient and the check of it.
        return y if step.out_shape is None else reshaped_result(y, step.out_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: _EPStepContext, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heap = ctx.step.plan.heap
        with FailPeersOnError(heap, SEND):
            heap.fail_for(memory_problem("the gradient of y", dy), SEND)
            return _backward(ctx, dy.reshape(-1, dy.shape[-1]))


def _backward(ctx: _EPStepContext, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    linears = ctx.linears
    _, _, needs_x, needs_probs, *_ = ctx.needs_input_grad
    x, received, *rest = ctx.saved_tensors
    step = ctx.step = _that_fits(ctx.step, dy.shape[1] * dy.element_size())
    computed, (row_probs, b1, b2, *tensors) = Hidden(*rest[:NUM_HIDDEN]), rest[NUM_HIDDEN:]
    biases = b1, b2
    plan = step.plan
    packed_to_row, row_to_packed_row = plan.received_index()
    dy = kernel_rows(dy)
    # As large as in forward, where that is possible: sizes repeat then.
    received = None if received is None else _whole(received, step.num_received)
    row_probs = _whole(row_probs, plan.row_capacity)
    computed = computed._replace(h=None if computed.h is None else _whole(computed.h, step.num_rows))
    both, needed = step.form.split(tensors)[:2], step.form.split(ctx.needs_input_grad[6:])[:2]
    # Here, not in what a tape repeats: where gradients go may change from call to call.
    fc1, fc2 = (
        fc.gradient_target(tuple(compress(weights, needs)), overwrite_main_grad=False)
        for fc, weights, needs in zip(linears, both, needed, strict=True)
    )
    needs, operands = (needs_x, needs_probs), (computed, row_probs, biases, tensors, _held(linears))
    function = partial(_input_and_weight_gradients, step, dy, x, received, *operands, (fc1, fc2), needs)
    inputs = (dy, x, received, computed.h, row_probs, *biases, plan.storage, packed_to_row, row_to_packed_row, *tensors)
    options = *needs, x is None, fc1.option, fc2.option
    if "delayed" in options:
        dx, d_probs, db1, db2, *rest = function()
    else:
        found = step.run("backward", options, function, (*inputs, *fc1.tensors, *fc2.tensors))
        dx, d_probs, db1, db2, *rest = found
    dw1, dw2, d_adapters = step.form.split(rest)
    if fc1.option != "new":
        dw1 = tuple(fc1.placeholders(both[0]))
    if fc2.option != "new":
        dw2 = tuple(fc2.placeholders(both[1]))
    return None, None, dx, d_probs, db1, db2, *dw1, *dw2, *d_adapters


def _input_and_weight_gradients(
    step: _EPStep,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    received: torch.Tensor | None,
    computed: Hidden,
    row_probs: torch.Tensor,
    biases: Biases,
    tensors: list[torch.Tensor],
    held: Held,
    targets: tuple[Target, Target],
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """dx, d_probs, gradients of the biases, of the weights (those that are not for autograd are None) and of the
    adapters."""
    needs_x, needs_probs = needs
    gradients = control.gradients_index(x=needs_x, probs=needs_probs)
    plan, schedule, (fc1, fc2) = step.plan, step.schedule, targets
    weights1, weights2, _ = step.form.split(tensors)
    heap, hidden = plan.heap, dy.shape[1]
    _, row_to_packed_row = plan.received_index()
    arrived = None
    if received is None:
        sent = _on_wire(given("x", x), step.wire.rows)
        received = step.receive(sent, name=RECEIVED).tensor
        arrived = schedule.dispatch_rows(sent, plan, received, gradients=gradients)  # who goes where is in the plan
    trains = needs_x, True
    rows, experts = step.operands(received, row_to_packed_row, row_probs, biases, tensors, trains=trains, held=held)
    with nullcontext() if arrived is None else arrived as parts:
        if computed.h is None:
            computed, _ = experts.first_layer(rows, num_rows=step.num_rows, parts=parts)
    sent = _on_wire(dy, step.wire.gradients)
    d_out = step.receive(sent, name="output gradients").tensor
    with schedule.dispatch_rows(sent, plan, d_out, gradients=gradients) as parts:
        # Holds both leases, beyond this call if weight gradients are delayed.
        experts_backward = experts.backward(rows, computed, d_out, parts=parts, needs_scale=needs_probs)
    # Without weight gradients nothing would run meanwhile; those of adapters take too little time.
    combining = schedule if fc1.computes or fc2.computes else Serial(step.layout)
    lease: AbstractContextManager[Lease | None] = nullcontext()
    if needs_x:
        lease = heap.lease((plan.row_capacity, hidden), dy.dtype, name="input gradients", phase=COLLECT)
    with lease as input_gradients:
        d_rows = None if input_gradients is None else input_gradients.tensor
        if d_rows is not None:
            experts_backward.input_gradient(d_rows)
        trip: AbstractContextManager[Collection | None] = nullcontext()
        if gradients:
            d_scale = experts_backward.d_scale if needs_probs else None
            trip = combining.combine_while(d_rows, plan, step.order, d_scale, gradients=gradients)
        with trip as collection:
            compute = partial(step.weight_gradients, while_combining=collection is not None)
            dw2 = compute(fc2, weights2, experts_backward.w2_gradient)
            dw1 = compute(fc1, weights1, experts_backward.w1_gradient)
            d_adapters = experts_backward.adapter_gradients()
    dx, d_probs = (None, None) if collection is None else (collection.out, collection.values)
    return dx, d_probs, experts_backward.db1, experts_backward.db2, *dw1, *dw2, *d_adapters
