"""How much memory MoE layers need, before any is allocated: the heap's exactly, by going through the lease schedule.

T tokens per rank, H hidden, I ffn, W width of FC1's output, E experts, K slots per token, R ranks; N rows and P packed
rows that a rank receives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.activation import Activation
from symmoe.kernels.control import ControlLayout
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import STASHES
from symmoe.precision.operands import weight_bytes
from symmoe.symm_mem.arena import ALIGNMENT_BYTES, Arena

_ENDLESS_BYTES = 1 << 62
INT_BYTES = FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What :func:`plan_memory` returns, for one rank.

    Attributes:
        num_rows, num_packed_rows: N and P that the figures are for.
        heap_bytes: what `SymmetricHeap(num_bytes=...)` needs to run the schedule, eagerly or in one CUDA graph:
            the control block and the arena up to the highest byte that is ever leased.
        lease_bytes_per_call: of that, what one call of one layer holds from its forward to its backward.
        forward_bytes_per_call, backward_bytes_per_call: leases that live only during that pass, at their peak.
        activation_bytes_per_call: ordinary memory that one call of one layer holds from forward to backward: h, the
            plan, the probs of the rows, the tokens if they are sent again, and with a recipe the transposed weights as
            it has quantised them, which live as long as h. Without the router's own (a few fp32
            [T, E]) and whatever a shared expert keeps.
        activation_bytes: the same of all layers and micro-batches in flight.
    """

    num_rows: int
    num_packed_rows: int
    heap_bytes: int
    lease_bytes_per_call: int
    forward_bytes_per_call: int
    backward_bytes_per_call: int
    activation_bytes_per_call: int
    activation_bytes: int


def plan_memory(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_tokens: int,
    num_layers: int = 1,
    num_in_flight: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation | None = None,
    routing: Literal["uniform", "worst"] = "uniform",
) -> MemoryPlan:
    """Bytes that a rank needs to train `num_layers` layers that share one heap. Local; allocates nothing.

    The schedule is 1F1B: `num_in_flight` micro-batches go forward, then backward and forward alternate. It has the
    high-water mark of plain training (1 in flight), gradient accumulation (1) and pipeline stages (their depth).

    Args:
        config: of every layer.
        num_ranks: R.
        num_tokens: T of a call, the largest of any rank.
        dtype: of the rows.
        activation: of the experts; None is SwiGLU.
        routing: with exact capacity, the rows to count with. "uniform": K distinct experts for every token, all
            equally likely; the mean, real routing needs more. "worst": every token of every rank chooses this rank.
            A static capacity is what it is.

    Raises:
        ArgumentError: a number is out of range.
    """
    numbers = {
        "num_ranks": num_ranks,
        "num_tokens": num_tokens,
        "num_layers": num_layers,
        "num_in_flight": num_in_flight,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ArgumentError(f"{name} ({value}) must be at least 1")
    if config.num_experts % num_ranks:
        raise ArgumentError(f"num_experts ({config.num_experts}) must be divisible by num_ranks ({num_ranks})")
    if routing not in ("uniform", "worst"):
        raise ArgumentError(f"routing ({routing!r}) must be 'uniform' or 'worst'")
    rows, packed_rows = _row_counts(config, num_ranks, num_tokens, routing)
    calls = _CallLeases(config, rows, packed_rows, dtype.itemsize)
    width = (activation or Activation()).hidden_width(config.ffn)
    kept = _activation_bytes(config, num_ranks, num_tokens, rows, packed_rows, width, dtype.itemsize)
    schedule = list(_one_forward_one_backward(num_layers, num_in_flight))
    alone = [calls.peak_of(steps) for steps in (calls.forward(), calls.backward())]
    return MemoryPlan(
        num_rows=rows,
        num_packed_rows=packed_rows,
        heap_bytes=max(_heap_bytes(calls, schedule, num_ranks, in_graph=in_graph) for in_graph in (False, True)),
        lease_bytes_per_call=calls.kept_bytes,
        forward_bytes_per_call=alone[0] - calls.kept_bytes,
        backward_bytes_per_call=alone[1],
        activation_bytes_per_call=kept,
        activation_bytes=kept * num_layers * num_in_flight,
    )


def _row_counts(config: MoEConfig, num_ranks: int, num_tokens: int, routing: str) -> tuple[int, int]:
    """N and P."""
    experts, top_k = config.num_experts, config.top_k
    local = experts // num_ranks
    if config.capacity is not None:
        return config.capacity, min(config.capacity, num_ranks * (config.max_tokens or num_tokens))
    if routing == "worst":
        return num_ranks * num_tokens * min(top_k, local), num_ranks * num_tokens
    comes_here = 1 - math.comb(experts - local, top_k) / math.comb(experts, top_k)
    return num_tokens * top_k, math.ceil(num_ranks * num_tokens * comes_here)


def _activation_bytes(
    config: MoEConfig, num_ranks: int, num_tokens: int, rows: int, packed_rows: int, width: int, itemsize: int
) -> int:
    """What the fused step saves outside of the heap."""
    stash, top_k, experts = STASHES[config.stash], config.top_k, config.num_experts
    num_blocks = -(-num_tokens // control.TOKENS_PER_BLOCK)
    per_token = 2 * top_k + 2 * num_ranks  # where its slots and its rows went
    received = packed_rows * top_k + rows
    # block_tokens, source_to_packed_start, packed_start, packed_limit; expert_load, report; splits, row_start,
    # source_to_row_start
    small = (num_blocks + 3) * num_ranks + 1 + experts + control.SUMMARY_WORDS
    small += (3 + num_ranks) * (experts // num_ranks) + 1
    if config.schedule != "serial" and num_ranks > 1:  # source_to_rows
        small += 2 * experts
    plan_bytes = INT_BYTES * (num_tokens * per_token + received + small)
    h_bytes = rows * width * itemsize if stash.keeps_h else 0
    x_bytes = 0 if stash.keeps_rows else num_tokens * config.hidden * itemsize
    weights_bytes = 0
    if config.precision is not None and stash.keeps_h:
        for num_lines, contracted in ((config.hidden, width), (config.ffn, config.hidden)):
            weights_bytes += weight_bytes(config.precision, experts // num_ranks, num_lines, contracted)
    return plan_bytes + rows * FLOAT_BYTES + h_bytes + x_bytes + weights_bytes


# What happens to the heap: ("+name", bytes) is a lease, ("-name", 0) its end.
LeaseEvent = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _CallLeases:
    """The leases of one call of a layer, in the order in which moe/ep_step.py makes and ends them."""

    config: MoEConfig
    rows: int
    packed_rows: int
    itemsize: int

    @property
    def kept_bytes(self) -> int:
        """The received rows, if they are kept."""
        return self._received_bytes if STASHES[self.config.stash].keeps_rows else 0

    @property
    def _received_bytes(self) -> int:
        return self._arriving_bytes("forward")

    def _arriving_bytes(self, direction: Literal["forward", "backward"]) -> int:
        """Of the buffer that rows arrive in."""
        num_rows = self.packed_rows if self.config.received_layout == "packed" else self.rows
        return self.config.sent_row_bytes(direction, self.itemsize) * num_rows

    def forward(self) -> list[LeaseEvent]:
        """Dispatch, experts, combine."""
        slots_bytes = self.packed_rows * self.config.top_k * INT_BYTES
        steps = [("+received", self._received_bytes), ("+slots", slots_bytes), ("+probs", slots_bytes)]
        steps += [("-probs", 0), ("-slots", 0)]
        if not self.kept_bytes:
            steps.append(("-received", 0))
        return [*steps, ("+out", self.rows * self.config.hidden * self.itemsize), ("-out", 0)]

    def backward(self) -> list[LeaseEvent]:
        """Dispatch again, experts, combine; ends with the rows that forward kept."""
        steps = [] if self.kept_bytes else [("+received", self._received_bytes)]
        steps += [
            ("+d_out", self._arriving_bytes("backward")),
            ("+d_rows", self.rows * self.config.hidden * self.itemsize),
            ("+values", self.packed_rows * self.config.top_k * FLOAT_BYTES),
        ]
        return [*steps, ("-values", 0), ("-d_rows", 0), ("-d_out", 0), ("-received", 0)]

    @staticmethod
    def peak_of(steps: list[LeaseEvent]) -> int:
        """The most bytes that the leases of `steps` have together."""
        live, peak = {}, 0
        for step, num_bytes in steps:
            if step[0] == "+":
                live[step[1:]] = num_bytes
            else:
                live.pop(step[1:], None)
            peak = max(peak, sum(live.values()))
        return peak


def _one_forward_one_backward(num_layers: int, num_in_flight: int) -> Iterator[tuple[str, int, int]]:
    """("forward" or "backward", micro-batch, layer) of twice as many micro-batches as are in flight at a time."""
    for turn in range(3 * num_in_flight - 1):
        if turn < 2 * num_in_flight:
            yield from (("forward", turn, layer) for layer in range(num_layers))
        if turn + 1 >= num_in_flight:
            yield from (("backward", turn + 1 - num_in_flight, layer) for layer in reversed(range(num_layers)))


def _heap_bytes(calls: _CallLeases, schedule: list[tuple[str, int, int]], num_ranks: int, *, in_graph: bool) -> int:
    """End of the highest lease when the schedule runs on an empty heap."""
    control_bytes = ControlLayout(num_ranks).num_bytes
    arena = Arena(control_bytes, _ENDLESS_BYTES)
    take: Callable[[int], tuple[int, int] | None] = arena.take
    if in_graph:
        arena, whole = Arena(0, 0), arena

        def take(num_bytes: int) -> tuple[int, int] | None:
            return arena.take_or_grow(num_bytes, whole)

    end = control_bytes + ALIGNMENT_BYTES
    live: dict[tuple[str, int, int], tuple[int, int]] = {}
    for direction, micro_batch, layer in schedule:
        for step, num_bytes in calls.forward() if direction == "forward" else calls.backward():
            key = (step[1:], micro_batch, layer)
            if step[0] == "+":
                span = take(num_bytes)
                if span is None:
                    raise ArgumentError(f"these sizes would need a heap of more than {_ENDLESS_BYTES} bytes")
                live[key] = span
                end = max(end, sum(span))
            else:
                arena.give_back(*live.pop(key))
    return end
