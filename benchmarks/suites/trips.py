"""The suites "plan", "dispatch" and "combine": each trip by itself, a plain copy, and a stock all-to-all.

A trip is timed with both of its barriers and all that belongs to it: slots and probs, fan-out, sums.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from suites.figures import combine_bytes, dispatch_bytes, wire_bytes
from suites.problem import DTYPE, LocalRows, Places, Problem
from suites.records import Record, case_record, gbs
from suites.stock_torch import STOCK, all_to_all, plan_exchange
from suites.timing import (
    DIRECTIONS,
    Run,
    Variant,
    align_ahead,
    in_steps,
    measure,
    median_ms,
    plan_of,
)
from symmoe.combine.trip import CombineTrip, combine
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.trip import dispatch
from symmoe.errors import SymmoeError
from symmoe.kernels.operands import require_tensor
from symmoe.precision.recipes import Float8Block
from symmoe.precision.wire import WireFormat

FP8 = Float8Block()
Times = dict[str, npt.NDArray[np.float64]]  # by variant, milliseconds [repetitions, directions]
_INTEGERS = 4  # rows to be summed hold integers up to this, whose sums are exact in bf16


def bench_plan(problem: Problem, run: Run) -> list[Record]:
    """make_plan with exact capacity, which the host waits for, and with static capacity."""
    capacities = {"exact": None, "static": problem.static_capacity}
    variants = [
        _plan_variant(name, problem, run, capacity) for name, capacity in capacities.items()
    ]
    times, errors = measure(run, variants, align=align_ahead)
    return [
        case_record(problem, "plan", name, "forward", taken[:, 0], error=errors[name])
        for name, taken in times.items()
    ]


def bench_dispatch(problem: Problem, run: Run) -> list[Record]:
    """Both layouts; forward with slots and probs, backward only rows. In bf16, and quantised by the sender."""
    hidden = problem.case.shape.hidden
    plan = plan_of(run, problem)
    sent = {"copy": dispatch_bytes(plan, hidden * DTYPE.itemsize)}
    with ExitStack() as stack:
        packed = stack.enter_context(
            run.heap.lease((plan.packed_row_capacity, hidden), DTYPE, name="packed")
        ).tensor
        rows = stack.enter_context(
            run.heap.lease((plan.row_capacity, hidden), DTYPE, name="rows")
        ).tensor
        buffers = {"packed": packed, "expert-major": rows}
        variants = [
            _dispatch_variant(layout, problem, plan, buffer) for layout, buffer in buffers.items()
        ]
        copies = {variant.name: "copy" for variant in variants}
        if hidden % FP8.feature_multiple == 0:
            wire = WireFormat(FP8, hidden)
            sent["copy, float8-block"] = dispatch_bytes(plan, wire.row_bytes)
            variants += [
                _dispatch_variant(layout, problem, plan, _words(buffer, wire), wire)
                for layout, buffer in buffers.items()
            ]
            copies |= {variant.name: "copy, float8-block" for variant in variants[2:]}
        times, errors = measure(
            run, [*variants, *_yardsticks(problem, run, sent, stack)], align=align_ahead
        )
    moved = {name: sent[copy] for name, copy in copies.items()} | sent
    return trip_records("dispatch", problem, run, times, errors, moved, copies)


def bench_combine(problem: Problem, run: Run) -> list[Record]:
    """Both orders; forward only rows, backward with a value per row."""
    hidden = problem.case.shape.hidden
    plan = plan_of(run, problem)
    received = {
        order: combine_bytes(plan, order, hidden * DTYPE.itemsize) for order in ("rank", "slot")
    }
    with ExitStack() as stack:
        rows = stack.enter_context(
            run.heap.lease((plan.row_capacity, hidden), DTYPE, name="rows")
        ).tensor
        with run.heap.lease((plan.packed_row_capacity, hidden), DTYPE, name="packed") as packed:
            with dispatch(problem.tokens.x.detach(), plan, packed.tensor, layout="packed"):
                pass  # combine follows a dispatch
        variants = [_combine_variant(problem, run, plan, rows, order) for order in received]
        # What comes to this rank from r is what a copy that pushes writes on r: the matrix is transposed.
        sent = {
            f"copy {order}": run.ranks.gather(each)[:, run.ranks.rank].copy()
            for order, each in received.items()
        }
        times, errors = measure(
            run, [*variants, *_yardsticks(problem, run, sent, stack)], align=align_ahead
        )
    moved = {f"order={order}": each for order, each in received.items()} | sent
    copies = {f"order={order}": f"copy {order}" for order in received}
    return trip_records("combine", problem, run, times, errors, moved, copies)


def trip_records(
    suite: str,
    problem: Problem,
    run: Run,
    times: Times,
    errors: dict[str, float],
    moved: dict[str, npt.NDArray[np.int64]],
    copies: Mapping[str, str] = MappingProxyType({}),
) -> list[Record]:
    """moved: by variant, bytes to or from each rank. copies: by variant of ours, the copy of as many bytes."""
    wires = {name: wire_bytes(each, run.ranks) for name, each in moved.items()}
    records = []
    for name, taken in times.items():
        for column in range(taken.shape[1]):
            figures: Record = {"error": errors[name], "wire_bytes": wires.get(name)}
            if copies.get(name) in times:
                figures |= {
                    "copy_gbs": gbs(wires[name], times[copies[name]]),
                    "stock_ms": median_ms(times[STOCK]),
                    "yardstick": "copy_gbs",
                }
            records.append(
                case_record(problem, suite, name, DIRECTIONS[column], taken[:, column], **figures)
            )
    return records


def _yardsticks(
    problem: Problem, run: Run, sent: dict[str, npt.NDArray[np.int64]], stack: ExitStack
) -> list[Variant]:
    """The stock all-to-all, and copies of as many bytes, which end with `stack`; none on one rank, where nothing moves.

    sent: by name, bytes to each rank.
    """
    if run.ranks.num_ranks == 1:
        return []
    copies = [peer_copy(name, each, run, stack) for name, each in sent.items()]
    return [stock_all_to_all(problem, run), *copies]


def _plan_variant(name: str, problem: Problem, run: Run, capacity: int | None) -> Variant:
    def verify() -> float:
        plan = plan_of(run, problem, capacity)
        places = Places.of(problem.routing)
        wrong = (plan.slot_to_row.cpu() != places.slot_to_row[problem.rank]).sum()
        wrong += (plan.slot_to_rank.cpu() != places.slot_to_rank[problem.rank]).sum()
        return float(wrong + (plan.splits.cpu() != problem.routing.splits[problem.rank]).sum())

    return Variant(name, ("forward",), in_steps(lambda: plan_of(run, problem, capacity)), verify)


def _words(buffer: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """The memory of bf16 rows as the same number of rows in the wire format, which are not longer."""
    return buffer.view(-1)[: buffer.shape[0] * wire.row_words].view(-1, wire.row_words)


def _dispatch_variant(
    layout: str, problem: Problem, plan: Plan, rows: torch.Tensor, wire: WireFormat | None = None
) -> Variant:
    x = problem.tokens.x.detach()
    dy = problem.tokens.dy
    probs = problem.tokens.probs.detach()

    def forward() -> torch.Tensor | None:
        with dispatch(_encoded(x, wire), plan, rows, probs, layout=layout) as arrival:
            return arrival.row_probs

    def backward() -> None:
        with dispatch(_encoded(dy, wire), plan, rows, layout=layout, gradients=0):
            pass

    def arriving(packed: torch.Tensor) -> torch.Tensor:
        index = LocalRows.of(problem).row_to_packed_row.long()
        return _encoded(packed if layout == "packed" else packed[index], wire)

    def verify() -> float:
        local = LocalRows.of(problem)
        rows.fill_(torch.nan)
        row_probs = forward()
        wrong = _differing_bits(rows, arriving(local.packed))
        wrong += _differing(require_tensor("row_probs", row_probs), local.row_probs)
        rows.fill_(torch.nan)
        backward()
        return wrong + _differing_bits(rows, arriving(local.d_packed))

    return Variant(_name(layout, wire), DIRECTIONS, in_steps(forward, backward), verify)


def _name(layout: str, wire: WireFormat | None) -> str:
    return layout if wire is None else f"{layout}, float8-block"


def _encoded(rows: torch.Tensor, wire: WireFormat | None) -> torch.Tensor:
    return rows if wire is None else wire.encode(rows)


def _combine_variant(
    problem: Problem, run: Run, plan: Plan, rows: torch.Tensor, order: str
) -> Variant:
    values = _values_of(problem, problem.rank)
    values = torch.cat([values, values.new_zeros(plan.row_capacity - len(values))])

    def forward() -> torch.Tensor:
        return combine(rows, plan, order=order)

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        with CombineTrip(rows, plan, order=order, row_values=values) as collection:
            collection.collect()
        assert collection.out is not None
        assert collection.values is not None
        return collection.out, collection.values

    def verify() -> float:
        expected, expected_values = _combined(problem)
        wrong = 0.0
        calls: list[Callable[[], tuple[torch.Tensor, torch.Tensor]]] = [
            lambda: (forward(), expected_values),
            backward,
        ]
        rows[: problem.num_rows] = _rows_of(problem, problem.rank)
        for call in calls:
            y, got_values = call()
            wrong += _differing(y, expected) + _differing(got_values, expected_values)
        rows.zero_()
        return wrong

    return Variant(f"order={order}", DIRECTIONS, in_steps(forward, backward), verify)


def stock_all_to_all(problem: Problem, run: Run) -> Variant:
    """One row per slot, already sorted, by all_to_all_single: only the transport of the stock layer."""
    ranks = run.ranks
    exchange = plan_exchange(problem.topk_idx, problem.case.shape.num_experts, ranks.num_ranks)
    rows = problem.tokens.x.detach()[exchange.order // problem.case.shape.top_k]

    def step() -> torch.Tensor:
        return all_to_all(rows, exchange.received, exchange.sent)

    def verify() -> float:
        arrived = step()[exchange.local_order]
        local = LocalRows.of(problem)
        return _differing(arrived, local.packed[local.row_to_packed_row.long()])

    return Variant(STOCK, ("forward",), in_steps(step), verify)


def _rows_of(problem: Problem, rank: int) -> torch.Tensor:
    """The rows bf16 [N, H] of any rank, small integers."""
    generator = torch.Generator(problem.device).manual_seed(rank)
    shape = (problem.routing.num_rows[rank], problem.case.shape.hidden)
    limits = (-_INTEGERS, _INTEGERS + 1)
    return torch.randint(
        *limits, shape, generator=generator, device=problem.device, dtype=torch.int8
    ).to(DTYPE)


def _values_of(problem: Problem, rank: int) -> torch.Tensor:
    """The values fp32 [N] of any rank."""
    generator = torch.Generator(problem.device).manual_seed(1000 + rank)
    return torch.rand(problem.routing.num_rows[rank], generator=generator, device=problem.device)


def _combined(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank must get: sums [T, H] of its slots' rows, and the values [T, K] of its slots."""
    tokens = problem.tokens.x
    y = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    values = torch.empty(problem.topk_idx.shape, dtype=torch.float32, device=tokens.device)
    places = Places.of(problem.routing)
    slot_to_row = places.slot_to_row[problem.rank].to(tokens.device)
    slot_to_rank = places.slot_to_rank[problem.rank].to(tokens.device)
    for rank in range(problem.num_ranks):
        rows = _rows_of(problem, rank)
        for k in range(slot_to_row.shape[1]):
            here = (slot_to_rank[:, k] == rank).nonzero().squeeze(1)
            y[here] += rows[slot_to_row[here, k]].float()
        here = slot_to_rank == rank
        values[here] = _values_of(problem, rank)[slot_to_row[here]]
    return y.to(DTYPE), values


def _differing(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Elements of `expected` that `got`, which may have a tail, does not have. NaN differs."""
    return float((got[: len(expected)] != expected).sum())


def _differing_bits(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Same as _differing, for 16-bit words that need not be numbers."""
    return _differing(got.view(torch.int16), expected.view(torch.int16))


def peer_copy(name: str, sent: npt.NDArray[np.int64], run: Run, stack: ExitStack) -> Variant:
    """A plain copy of as many bytes to each peer, all ranks at once: what the links give. Collective.

    Args:
        name: the variant's name.
        sent: int64 [R], bytes to each rank; bytes to this rank are left out.
        stack: ends the leases.

    Raises:
        SymmoeError: on every rank, if the ranks' leases do not lie at the same place.
    """
    ranks = run.ranks
    matrix = run.ranks.gather(sent)
    np.fill_diagonal(matrix, 0)
    # Where each rank's bytes lie at their destination; leases are of one size everywhere, as peer() needs.
    first = np.cumsum(matrix, axis=0) - matrix
    gc.collect()  # leases of dead objects, or the ranks' arenas may differ
    source, target = (
        stack.enter_context(
            run.heap.lease((max(1, int(matrix.sum(axis).max())),), torch.uint8, name=f"copy {end}")
        )
        for axis, end in ((1, "source"), (0, "target"))
    )
    places = ranks.gather(np.array([target.offset]))
    if (places != places[0]).any():
        raise SymmoeError(
            f"the targets of '{name}' lie at different offsets: {places.reshape(-1).tolist()}"
        )
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # destination, source
    stack.callback(pairs.clear)
    offset = 0
    for step in range(1, ranks.num_ranks):  # the next rank first: not all write to the same one
        peer = (ranks.rank + step) % ranks.num_ranks
        begin = int(first[ranks.rank, peer])
        size = int(matrix[ranks.rank, peer])
        here = source.tensor[offset : offset + size]
        pairs.append((target.peer(peer)[begin : begin + size], here))
        offset += size

    def copy() -> None:
        for destination, its_source in pairs:
            destination.copy_(its_source)

    def verify() -> float:
        """The error, which must be 0: every rank sends its number plus one."""
        target.tensor.zero_()
        source.tensor.fill_(ranks.rank + 1)
        ranks.barrier()
        copy()
        ranks.barrier()
        numbers = torch.arange(1, ranks.num_ranks + 1, dtype=torch.uint8)
        expected = numbers.repeat_interleave(torch.from_numpy(matrix[:, ranks.rank].copy()))
        return _differing(target.tensor, expected.to(target.tensor.device))

    return Variant(name, ("forward",), in_steps(copy), verify)
