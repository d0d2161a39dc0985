"""The suites "plan", "dispatch" and "combine": each trip by itself, a plain copy, and a stock all-to-all.

A trip is timed with both of its barriers and all that belongs to it: slots and probs, fan-out, sums.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from suites.figures import combine_bytes, dispatch_bytes, wire_bytes
from suites.problem import DTYPE, LocalRows, Places, Problem
from suites.records import Record, gbs
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
    timed_records,
)
from symmoe.combine.trip import CombineTrip, combine
from symmoe.dispatch.plan import DispatchHandle, Plan
from symmoe.dispatch.trip import dispatch
from symmoe.errors import SymmoeError
from symmoe.kernels.operands import require_tensor
from symmoe.precision.recipes import Float8Block
from symmoe.precision.wire import WireFormat

FP8 = Float8Block()
_INTEGERS = 4  # rows to be summed hold integers up to this, whose sums are exact in bf16


def bench_plan(problem: Problem, run: Run) -> list[Record]:
    """make_plan with exact capacity, for which the host waits, and with static capacity."""
    variants = [
        _plan_variant("exact", problem, run, None),
        _plan_variant("static", problem, run, problem.static_capacity),
    ]
    return trip_records("plan", problem, run, variants, {})


def bench_dispatch(problem: Problem, run: Run) -> list[Record]:
    """Both layouts; forward with slots and probs, backward only rows. In bf16, and quantised by the sender."""
    hidden = problem.case.shape.hidden
    plan = plan_of(run, problem)
    wires: dict[str, WireFormat | None] = {"copy": None}
    if hidden % FP8.feature_multiple == 0:
        wires["copy, float8-block"] = WireFormat(FP8, hidden)
    sent = {
        copy: dispatch_bytes(plan, hidden * DTYPE.itemsize if wire is None else wire.row_bytes)
        for copy, wire in wires.items()
    }
    with ExitStack() as stack:
        capacities = {"packed": plan.packed_row_capacity, "expert-major": plan.row_capacity}
        buffers = {
            layout: stack.enter_context(run.heap.lease((rows, hidden), DTYPE, name=layout)).tensor
            for layout, rows in capacities.items()
        }
        by_layout = {
            copy: [
                _dispatch_variant(layout, problem, plan, buffer, wire)
                for layout, buffer in buffers.items()
            ]
            for copy, wire in wires.items()
        }
        copies = {
            variant.name: copy
            for copy, layout_variants in by_layout.items()
            for variant in layout_variants
        }
        moved = {name: sent[copy] for name, copy in copies.items()} | sent
        variants = [*itertools.chain(*by_layout.values()), *_yardsticks(problem, run, sent, stack)]
        return trip_records("dispatch", problem, run, variants, moved, copies, plan)


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
            with dispatch(
                problem.tokens.x.detach(), plan, packed.tensor, layout="packed"
            ) as arrival:
                pass
        handle = DispatchHandle(plan, arrival.index)
        variants = [_combine_variant(problem, handle, rows, order) for order in received]
        # What comes to this rank from r is what a copy that pushes writes on r: the matrix is transposed.
        sent = {
            f"copy {order}": run.ranks.gather(num_bytes)[:, run.ranks.rank].copy()
            for order, num_bytes in received.items()
        }
        variants += _yardsticks(problem, run, sent, stack)
        moved = {f"order={order}": num_bytes for order, num_bytes in received.items()} | sent
        copies = {f"order={order}": f"copy {order}" for order in received}
        return trip_records("combine", problem, run, variants, moved, copies, plan)


def trip_records(
    suite: str,
    problem: Problem,
    run: Run,
    variants: Sequence[Variant],
    moved: dict[str, npt.NDArray[np.int64]],
    copies: Mapping[str, str] = MappingProxyType({}),
    plan: Plan | None = None,
) -> list[Record]:
    """Measures the variants. moved: by variant, bytes to or from each rank. copies: by variant of ours, the copy of as
    many bytes. plan: of the rows, whose bytes are counted as neutral benchmarks do. Collective."""
    times, errors = measure(run, variants, align=align_ahead)
    wires = {name: wire_bytes(num_bytes, run.ranks) for name, num_bytes in moved.items()}
    neutral: Record = {}
    if plan is not None:
        row_bytes = problem.case.shape.hidden * DTYPE.itemsize
        neutral = {
            key: wire_bytes(combine_bytes(plan, order, row_bytes), run.ranks)
            for key, order in (("deduplicated_bytes", "rank"), ("slot_bytes", "slot"))
        }

    def figures(name: str, column: int) -> Record:
        figures: Record = {"error": errors[name], "wire_bytes": wires.get(name)} | neutral
        if copies.get(name) not in times:
            return figures
        return figures | {
            "copy_gbs": gbs(wires[name], times[copies[name]]),
            "stock_ms": median_ms(times[STOCK]),
            "yardstick": "copy_gbs",
        }

    return timed_records(problem, suite, times, figures)


def _yardsticks(
    problem: Problem, run: Run, sent: dict[str, npt.NDArray[np.int64]], stack: ExitStack
) -> list[Variant]:
    """The stock all-to-all, and copies of as many bytes, which end with `stack`; none on one rank, where nothing moves.

    sent: by name, bytes to each rank.
    """
    if run.ranks.num_ranks == 1:
        return []
    copies = [peer_copy(name, num_bytes, run, stack) for name, num_bytes in sent.items()]
    return [stock_all_to_all(problem, run), *copies]


def _plan_variant(name: str, problem: Problem, run: Run, capacity: int | None) -> Variant:
    def verify() -> float:
        plan = plan_of(run, problem, capacity)
        places = Places.of(problem.routing)
        pairs = (
            (plan.slot_to_row, places.slot_to_row),
            (plan.slot_to_rank, places.slot_to_rank),
            (plan.splits, problem.routing.splits),
        )
        return float(sum((got.cpu() != by_rank[problem.rank]).sum() for got, by_rank in pairs))

    return Variant(name, ("forward",), in_steps(lambda: plan_of(run, problem, capacity)), verify)


def _dispatch_variant(
    layout: str, problem: Problem, plan: Plan, rows: torch.Tensor, wire: WireFormat | None
) -> Variant:
    """rows: memory of bf16 rows; those in the wire format are not longer."""
    name = layout
    if wire is not None:
        name = f"{layout}, float8-block"
        rows = rows.view(-1)[: rows.shape[0] * wire.row_words].view(-1, wire.row_words)
    x = problem.tokens.x.detach()
    dy = problem.tokens.dy
    probs = problem.tokens.probs.detach()

    def forward() -> torch.Tensor | None:
        with dispatch(_encoded(x, wire), plan, rows, probs, layout=layout) as arrival:
            return arrival.row_probs

    with dispatch(_encoded(x, wire), plan, rows, layout=layout) as first_arrival:
        index = first_arrival.index

    def backward() -> None:
        with dispatch(_encoded(dy, wire), plan, rows, layout=layout, index=index):
            pass

    def verify() -> float:
        local = LocalRows.of(problem)
        arriving, d_arriving = (
            _encoded(packed if layout == "packed" else local.in_order(packed), wire)
            for packed in (local.packed, local.d_packed)
        )
        rows.fill_(torch.nan)
        row_probs = forward()
        # As 16-bit words, which need not be numbers.
        wrong = _differing(rows.view(torch.int16), arriving.view(torch.int16))
        wrong += _differing(require_tensor("row_probs", row_probs), local.row_probs)
        rows.fill_(torch.nan)
        backward()
        return wrong + _differing(rows.view(torch.int16), d_arriving.view(torch.int16))

    return Variant(name, DIRECTIONS, in_steps(forward, backward), verify)


def _encoded(rows: torch.Tensor, wire: WireFormat | None) -> torch.Tensor:
    return rows if wire is None else wire.encode(rows)


def _combine_variant(
    problem: Problem, handle: DispatchHandle, rows: torch.Tensor, order: str
) -> Variant:
    values = _values_of(problem, problem.rank)
    values = torch.cat([values, values.new_zeros(len(rows) - len(values))])

    def forward() -> torch.Tensor:
        return combine(rows, *handle, order=order)

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        with CombineTrip(rows, *handle, order=order, row_values=values) as collection:
            collection.collect()
        assert collection.out is not None
        assert collection.values is not None
        return collection.out, collection.values

    def verify() -> float:
        expected, expected_values = _combined(problem)
        rows[: problem.num_rows] = _rows_of(problem, problem.rank)
        wrong = _differing(forward(), expected)
        y, got_values = backward()
        rows.zero_()
        return wrong + _differing(y, expected) + _differing(got_values, expected_values)

    return Variant(f"order={order}", DIRECTIONS, in_steps(forward, backward), verify)


def stock_all_to_all(problem: Problem, run: Run) -> Variant:
    """One row per slot, sorted in advance, by all_to_all_single: only the transport of the stock layer."""
    exchange = plan_exchange(problem.topk_idx, problem.case.shape.num_experts, problem.num_ranks)
    rows = problem.tokens.x.detach()[exchange.order // problem.case.shape.top_k]

    def step() -> torch.Tensor:
        return all_to_all(rows, exchange.received, exchange.sent)

    def verify() -> float:
        local = LocalRows.of(problem)
        return _differing(step()[exchange.local_order], local.in_order(local.packed))

    return Variant(STOCK, ("forward",), in_steps(step), verify)


def _rows_of(problem: Problem, rank: int) -> torch.Tensor:
    """The rows bf16 [N, H] of any rank, small integers."""
    numbers = {
        "generator": torch.Generator(problem.device).manual_seed(rank),
        "device": problem.device,
        "dtype": torch.int8,
    }
    shape = (problem.routing.num_rows[rank], problem.case.shape.hidden)
    return torch.randint(-_INTEGERS, _INTEGERS + 1, shape, **numbers).to(DTYPE)


def _values_of(problem: Problem, rank: int) -> torch.Tensor:
    """The values fp32 [N] of any rank."""
    generator = torch.Generator(problem.device).manual_seed(1000 + rank)
    return torch.rand(problem.routing.num_rows[rank], generator=generator, device=problem.device)


def _combined(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected results of this rank: sums [T, H] of its slots' rows, and the values [T, K] of its slots."""
    tokens = problem.tokens.x
    y = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    values = torch.empty(problem.topk_idx.shape, dtype=torch.float32, device=tokens.device)
    slot_to_rank, slot_to_row, _ = Places.of(problem.routing)
    for rank in range(problem.num_ranks):
        is_local = (slot_to_rank[problem.rank] == rank).to(tokens.device)
        its_rows = slot_to_row[problem.rank].to(tokens.device)[is_local]
        # In any order: sums of small integers are exact.
        y.index_add_(0, is_local.nonzero()[:, 0], _rows_of(problem, rank)[its_rows].float())
        values[is_local] = _values_of(problem, rank)[its_rows]
    return y.to(DTYPE), values


def _differing(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The number of elements of `expected` that differ in `got`, which may have a tail. NaN differs."""
    return float((got[: len(expected)] != expected).sum())


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
    matrix = ranks.gather(sent)
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
    # The next rank first: not all write to the same one.
    peers = [(ranks.rank + step) % ranks.num_ranks for step in range(1, ranks.num_ranks)]
    sizes = matrix[ranks.rank, peers].tolist()
    begins = first[ranks.rank, peers].tolist()
    targets = [
        target.peer(peer)[begin : begin + size]
        for peer, begin, size in zip(peers, begins, sizes, strict=True)
    ]
    pairs = [*zip(targets, source.tensor[: sum(sizes)].split(sizes), strict=True)]
    stack.callback(pairs.clear)

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
