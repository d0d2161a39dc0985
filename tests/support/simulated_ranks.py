"""Runs the plan and token kernels of several ranks in one process: one arena per rank, barriers done by hand. A module
of kernels is twin or gpu; with ComparedCalls, every kernel is compared with its twin. Buffers are prefilled: what a
kernel must not write has to come back as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from written_arguments import ComparedCalls

from symmoe.kernels import control
from symmoe.kernels.control import ControlLayout, Peers, PlanIntegers, plan_layout
from symmoe.kernels.operands import TensorTable

READY_ROWS, READY_SLOTS, READY_PROBS = range(3)
ROWS, PACKED, SLOTS, PROBS, VALUES, RETURNED = range(6)  # buffers of a rank's arena


@dataclass(frozen=True)
class Case:
    """One layer call. `tokens` has each rank's T; `ids` names how experts are chosen."""

    tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden: int = 16
    dtype: torch.dtype = torch.float16
    id_dtype: torch.dtype = torch.int64
    ids: str = "uniform"
    capacity: int = -1
    packed_capacity: int = -1
    budgets: tuple[
        tuple[int, int], ...
    ] = ()  # capacity and packed capacity that each rank gives itself
    drop: bool = False
    other_top_k: int | None = None  # rank of which the header names another K
    plan_fails: bool = False
    trip_fails: bool = False
    with_probs: bool = True
    epoch: int = 6
    pending: int = control.STATUS_OK
    num_ctas: int | None = None
    seed: int = 0
    num_replica_slots: int = 0  # of a rank
    slack: int = 0  # per mille
    num_near: int = 0  # ranks of a node, between which rows are balanced; 0: all

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_copies(self) -> int:
        """Of experts, with all replica slots."""
        return self.num_experts + self.num_ranks * self.num_replica_slots

    @property
    def overflow(self) -> int:
        if self.budgets or self.packed_capacity >= 0:
            return control.OVERFLOW_REPEAT
        return control.OVERFLOW_DROP if self.drop else control.OVERFLOW_RAISE

    def room_of(self, rank: int) -> tuple[int, int]:
        return self.budgets[rank] if self.budgets else (self.capacity, self.packed_capacity)


CASES = {
    "one rank": Case(tokens=(37,), num_experts=5, top_k=3),
    "two ranks": Case(tokens=(40, 33), num_experts=8, top_k=2, epoch=7, hidden=24),
    "wide rows": Case(tokens=(40, 21), num_experts=8, top_k=3, hidden=1536, num_ctas=2),
    "wide rows, masked": Case(
        tokens=(5, 13), num_experts=10, top_k=9, hidden=1000, ids="sparse", dtype=torch.float32
    ),
    "bf16": Case(tokens=(40, 33), num_experts=8, top_k=1, hidden=24, dtype=torch.bfloat16, seed=1),
    "three ranks, odd": Case(
        tokens=(70, 0, 31), num_experts=12, top_k=3, id_dtype=torch.int32, hidden=20
    ),
    "four ranks": Case(
        tokens=(64, 1, 32, 7), num_experts=16, top_k=4, dtype=torch.float32, hidden=260, num_ctas=3
    ),
    "six ranks": Case(tokens=(9, 0, 12, 3, 5, 2), num_experts=24, top_k=6, hidden=24),
    "no expert": Case(tokens=(35, 20), num_experts=6, top_k=3, ids="sparse"),
    "all to one expert": Case(tokens=(33, 20, 5), num_experts=6, top_k=1, ids="one"),
    "duplicates": Case(tokens=(40, 35), num_experts=4, top_k=5, ids="duplicates"),
    "nothing at all": Case(tokens=(0, 0), num_experts=4, top_k=2),
    "ids out of range": Case(tokens=(40, 40), num_experts=4, top_k=2, ids="bad"),
    "ids out of range, recorded": Case(
        tokens=(3, 70), num_experts=4, top_k=2, ids="bad", id_dtype=torch.int32, capacity=1000
    ),
    "overflow": Case(tokens=(40, 41, 42), num_experts=9, top_k=3, capacity=100),
    "too many packed rows": Case(
        tokens=(40, 41, 42), num_experts=9, top_k=3, capacity=300, packed_capacity=90
    ),
    "budget": Case(tokens=(40, 41, 42), num_experts=9, top_k=3, capacity=300, packed_capacity=123),
    "budgets that differ": Case(
        tokens=(40, 41, 42), num_experts=9, top_k=3, budgets=((300, 123), (-1, -1), (200, 150))
    ),
    "one rank has too small a budget": Case(
        tokens=(40, 41, 42), num_experts=9, top_k=3, budgets=((300, 123), (-1, -1), (50, 123))
    ),
    "one rank has too small a budget of packed rows": Case(
        tokens=(40, 41, 42), num_experts=9, top_k=3, budgets=((-1, -1), (300, 20), (300, 123))
    ),
    "overflow, recorded": Case(
        tokens=(40, 41), num_experts=4, top_k=3, capacity=50, pending=control.STATUS_FAULT
    ),
    "drops": Case(tokens=(50, 60), num_experts=10, top_k=3, capacity=91, drop=True, ids="skewed"),
    "drops all but one": Case(tokens=(33, 20), num_experts=4, top_k=2, capacity=1, drop=True),
    "drops nothing": Case(tokens=(33, 20), num_experts=4, top_k=2, capacity=106, drop=True),
    "drops, leftovers": Case(
        tokens=(40, 30, 20), num_experts=21, top_k=4, capacity=52, drop=True, ids="skewed"
    ),
    "ranks disagree": Case(
        tokens=(10, 10, 10), num_experts=6, top_k=2, other_top_k=1, capacity=500
    ),
    "several errors": Case(
        tokens=(40, 35, 3), num_experts=6, top_k=2, ids="bad", other_top_k=2, capacity=5
    ),
    "errors and a fault": Case(
        tokens=(40, 35),
        num_experts=6,
        top_k=2,
        ids="bad",
        other_top_k=0,
        capacity=5,
        plan_fails=True,
    ),
    "a rank faults in the plan": Case(
        tokens=(10, 20), num_experts=6, top_k=2, plan_fails=True, capacity=500
    ),
    "the trip fails": Case(
        tokens=(10, 40), num_experts=6, top_k=2, trip_fails=True, dtype=torch.bfloat16
    ),
    "replicas": Case(tokens=(70, 40), num_experts=8, top_k=3, ids="skewed", num_replica_slots=2),
    "replicas on four ranks": Case(
        tokens=(64, 1, 90, 7),
        num_experts=16,
        top_k=4,
        ids="skewed",
        num_replica_slots=3,
        slack=50,
        epoch=7,
        dtype=torch.float32,
    ),
    "replicas on two nodes": Case(
        tokens=(50, 20, 31, 60),
        num_experts=16,
        top_k=3,
        ids="skewed",
        num_replica_slots=2,
        num_near=2,
        epoch=3,
    ),
    "replicas of one expert": Case(
        tokens=(33, 20, 45), num_experts=6, top_k=1, ids="one", num_replica_slots=1, num_ctas=3
    ),
    "too few replica slots": Case(
        tokens=(60, 50, 31),
        num_experts=24,
        top_k=6,
        ids="skewed",
        num_replica_slots=1,
        capacity=5000,
    ),
    "no rank has too many rows": Case(
        tokens=(64, 64), num_experts=8, top_k=4, num_replica_slots=2, slack=500
    ),
    "replicas, sparse": Case(
        tokens=(35, 0, 20), num_experts=6, top_k=3, ids="sparse", num_replica_slots=4
    ),
    "replicas, drops": Case(
        tokens=(50, 60),
        num_experts=10,
        top_k=3,
        capacity=100,
        drop=True,
        ids="skewed",
        num_replica_slots=1,
        slack=300,
    ),
    "replicas, ids out of range": Case(
        tokens=(40, 40), num_experts=4, top_k=2, ids="bad", num_replica_slots=2
    ),
    "replicas, a rank faults in the plan": Case(
        tokens=(10, 20), num_experts=6, top_k=2, plan_fails=True, capacity=500, num_replica_slots=1
    ),
    "replicas, nothing at all": Case(tokens=(0, 0), num_experts=4, top_k=2, num_replica_slots=2),
    "no probs": Case(tokens=(40, 20), num_experts=6, top_k=4, with_probs=False),
}


def run_case(kernels: Any, case: Case, device: torch.device | str = "cpu") -> None:
    """One layer call of all ranks, and what replicas need."""
    call = LayerCall(kernels, case, device)
    call.run()
    if case.num_replica_slots:
        call.move_replicas()


def case_differences(kernels: Any, case: Case, device: torch.device | str = "cpu") -> list[str]:
    """Arguments that kernels leave otherwise than their twins in one layer call."""
    compared = ComparedCalls(kernels)
    run_case(compared, case, device)
    return compared.differences


def table_of(matrices: torch.Tensor) -> torch.Tensor | TensorTable:
    """The same [G, M] as a table; on GPUs, whose memory twins cannot find by its address, as it is."""
    if matrices.is_cuda:
        return matrices
    pointers = torch.tensor([row.data_ptr() for row in matrices])
    return TensorTable(pointers, (len(matrices), 1, matrices.shape[1]), matrices.dtype)


def choose_experts(case: Case, rank: int) -> torch.Tensor:
    """topk_idx [T, K] of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    shape = (case.tokens[rank], case.top_k)
    if case.ids == "one":
        return torch.full(shape, case.num_experts - 1, dtype=case.id_dtype)
    if case.ids in ("duplicates", "bad"):
        ids = torch.randint(case.num_experts, shape, generator=generator)
    else:
        weights = torch.ones(case.num_experts)
        if case.ids == "skewed":
            weights = torch.arange(1, case.num_experts + 1).float() ** 2
        ids = torch.empty(shape, dtype=torch.int64)
        if shape[0]:
            ids = torch.multinomial(weights.expand(shape[0], -1), case.top_k, generator=generator)
    if case.ids == "sparse":
        ids[torch.rand(shape, generator=generator) < 0.6] = -1
    if case.ids == "bad" and rank == case.num_ranks - 1:
        ids[-1, -1] = case.num_experts
        ids[shape[0] // 2, 0] = -(2**40) if case.id_dtype == torch.int64 else -2
    return ids.to(case.id_dtype)


def peers_of_arenas(arenas: Sequence[torch.Tensor]) -> list[Peers]:
    """Peers of each rank; arenas: of all ranks, in one process."""
    num_ranks = len(arenas)
    bases = torch.tensor([arena.data_ptr() for arena in arenas], device=arenas[0].device)
    common = {
        "num_ranks": num_ranks,
        "bases": bases,
        "views": tuple(arenas),
        "layout": ControlLayout(num_ranks),
    }
    return [Peers(rank=rank, **common) for rank in range(num_ranks)]


def empty_arenas(num_ranks: int, device: str = "cpu") -> list[torch.Tensor]:
    """Zeros for what ranks tell each other."""
    num_bytes = ControlLayout(num_ranks).num_bytes
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]


def peers_of_tables(counts: np.ndarray) -> list[Peers]:
    """Peers of each rank, whose count tables have these slots [R, E]."""
    num_ranks, num_experts = counts.shape
    ranks = peers_of_arenas(empty_arenas(num_ranks))
    for peers in ranks:
        table = peers.count_table(peers.rank, 0)
        table[:, control.HEADER_WORDS : control.HEADER_WORDS + num_experts] = torch.from_numpy(
            counts
        )
    return ranks


class LayerCall:
    """The results of one layer call of all ranks.

    Attributes, of all ranks:
        peers, plans: what kernels get.
        expert_rows: copies of the rows that are summed.
        arenas: copies of the arenas that have every sum of a rank.
        sums: of rows by rank, at home.
    """

    def __init__(self, kernels: Any, case: Case, device: torch.device | str = "cpu") -> None:
        self.kernels = kernels
        self.case = case
        self.device = torch.device(device)
        # A bound for every rank's rows and packed rows.
        num_rows = max(1, sum(case.tokens) * case.top_k)
        row_bytes = case.hidden * case.dtype.itemsize
        slot_bytes = 4 * num_rows * case.top_k
        returned_bytes = case.num_ranks * max(1, *case.tokens) * row_bytes
        sizes = *[num_rows * row_bytes] * 2, *[slot_bytes] * 3, returned_bytes
        self.offsets = list[list[int]]()
        self.peers = peers_of_arenas([self.make_arena(rank, sizes) for rank in self.ranks])
        self.set_epoch(case.epoch)

    def run(self) -> None:
        self.plan()
        self.dispatch()
        self.combine()

    @property
    def ranks(self) -> range:
        return range(self.case.num_ranks)

    def make_arena(self, rank: int, sizes: Sequence[int]) -> torch.Tensor:
        """Zeros for what ranks tell each other, and buffers whose offsets differ from rank to rank."""
        unit = 64 if self.case.num_ctas is None else 256
        control_bytes = ControlLayout(self.case.num_ranks).num_bytes
        end = -(-control_bytes // unit) * unit + unit * rank
        self.offsets.append([])
        for size in sizes:
            self.offsets[rank].append(end)
            end += -(-size // unit) * unit + unit * (rank + 1)
        arena = torch.full((end,), 0xFD, dtype=torch.uint8, device=self.device)
        arena[:control_bytes] = 0
        return arena

    def set_epoch(self, epoch: int) -> None:
        for peers in self.peers:
            peers.counters(peers.rank)[control.BARRIER_EPOCH] = epoch

    def int32(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32, device=self.device)

    def random(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device)

    def rows(self, rank: int) -> torch.Tensor:
        return self.buffer(rank, ROWS, (self.num_rows, self.case.hidden), self.case.dtype)

    def returned(self, rank: int) -> torch.Tensor:
        num_rows = max(1, self.case.num_ranks - 1) * max(1, self.case.tokens[rank])
        return self.buffer(rank, RETURNED, (num_rows, self.case.hidden), self.case.dtype)

    def slots(self, rank: int, buffer: int) -> torch.Tensor:
        """A number for every slot of a packed row."""
        dtype = torch.int32 if buffer == SLOTS else torch.float32
        return self.buffer(rank, buffer, (self.num_packed, self.case.top_k), dtype)

    def buffer(
        self, rank: int, buffer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return self.peers[rank].region(rank, self.offsets[rank][buffer], shape, dtype)

    def received(self, columns: tuple[int, ...], fails: bool | None = None) -> torch.Tensor:
        """The offsets that a barrier returns if every rank publishes the offsets of these buffers."""
        words = torch.zeros((self.case.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64)
        for rank, offsets in enumerate(self.offsets):
            for word, buffer in enumerate(columns):
                words[rank, word] = offsets[buffer]
        fails = self.case.trip_fails if fails is None else fails
        return (torch.full_like(words, -1) if fails else words).to(self.device)

    # -- the plan ------------------------------------------------------------------------------------------------------
    def plan(self) -> None:
        case = self.case
        self.topk_idx = [choose_experts(case, rank).to(self.device) for rank in self.ranks]
        self.plans = [self.blank_plan(num_tokens) for num_tokens in case.tokens]
        slots = self.topk_idx
        block_starts = self.count(slots, case.num_experts)
        epoch = case.epoch + 1
        if case.num_replica_slots:
            self.set_epoch(epoch)
            self.place_replicas(block_starts)
            slots = [plan.slot_to_copy for plan in self.plans]
            block_starts = self.count(slots, case.num_copies)
            epoch += 1
        self.set_epoch(epoch)
        for rank, plan in enumerate(self.plans):
            self.lay_out(rank)
            self.kernels.assign_rows(slots[rank], block_starts[rank], plan, drop=case.drop)
        report = self.plans[0].report.tolist()
        self.num_rows = max(1, report[control.SUM_MAX_ROWS])
        self.num_packed = max(1, report[control.SUM_MAX_PACKED])

    def blank_plan(self, num_tokens: int) -> PlanIntegers:
        case = self.case
        sizes = case.top_k, case.num_experts, case.num_ranks, case.num_replica_slots
        numel, layout = plan_layout(num_tokens, *sizes)
        return PlanIntegers(self.int32(numel), layout)

    def count(self, slots: list[torch.Tensor], num_experts: int) -> list[torch.Tensor]:
        """Sends what each rank counts; the starts of blocks."""
        num_ranks = self.case.num_ranks
        counts = []
        for rank, ids in enumerate(slots):
            num_blocks = control.num_blocks(len(ids))
            counts.append(self.int32(num_blocks, num_experts + num_ranks + 2))
            sizes = {"num_experts": num_experts, "num_ranks": num_ranks}
            self.kernels.count_slots(ids, counts[rank], **sizes)
            self.kernels.send_counts(
                counts[rank],
                self.topk_idx[rank],
                self.header(rank),
                self.peers[rank],
                num_experts=num_experts,
            )
        return counts

    def header(self, rank: int) -> tuple[int, ...]:
        case = self.case
        capacity, packed_capacity = case.room_of(rank)
        words = {
            control.HEAD_NUM_TOKENS: case.tokens[rank],
            control.HEAD_TOP_K: case.top_k + (case.other_top_k == rank),
            control.HEAD_NUM_EXPERTS: case.num_experts,
            control.HEAD_NUM_REPLICA_SLOTS: case.num_replica_slots,
            control.HEAD_CAPACITY: capacity,
            control.HEAD_PACKED_CAPACITY: packed_capacity,
            control.HEAD_OVERFLOW: case.overflow,
            control.HEAD_MAX_TOKENS: -1,
            control.HEAD_HIDDEN: case.hidden,
            control.HEAD_RAIL_CAPACITY: 77,
        }
        return tuple(words.get(word, 0) for word in range(control.HEADER_WORDS))

    def place_replicas(self, block_starts: list[torch.Tensor]) -> None:
        case = self.case
        num_near = case.num_near or case.num_ranks
        for rank, plan in enumerate(self.plans):
            self.kernels.place_replicas(self.peers[rank], plan, slack=case.slack, num_near=num_near)
            counts = self.int32(len(block_starts[rank]), case.num_copies + case.num_ranks + 2)
            self.kernels.route_to_replicas(self.topk_idx[rank], block_starts[rank], plan, counts)

    def lay_out(self, rank: int) -> None:
        pinned = {"pin_memory": self.device.type == "cuda"}
        status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64, **pinned)
        status[control.STATUS_KIND] = self.case.pending
        self.kernels.lay_out(
            self.peers[rank],
            self.received((), self.case.plan_fails),
            status,
            self.plans[rank],
            capacity=self.case.room_of(rank)[0],
            overflow=self.case.overflow,
            ranks=self.ranks,
        )

    # -- dispatch ------------------------------------------------------------------------------------------------------
    def dispatch(self) -> None:
        for rank in self.ranks:
            self.push(rank)
        self.packed_to_row = [self.int32(self.num_packed, self.case.top_k) for _ in self.ranks]
        for rank in self.ranks:
            self.index(rank)

    def push(self, rank: int) -> None:
        case, kernels, peers, plan = self.case, self.kernels, self.peers[rank], self.plans[rank]
        ready = self.received((ROWS, SLOTS, PROBS))
        x = self.random(77 + rank, case.tokens[rank], case.hidden).to(case.dtype)
        options = {"column": READY_ROWS, "num_ctas": case.num_ctas}
        ready_packed = self.received((PACKED, SLOTS, PROBS))
        kernels.push_rows(x, plan.token_to_packed_row, peers, ready_packed, **options)
        # On even ranks in turn, as when GEMMs run meanwhile.
        parts = [self.ranks] if rank % 2 else [range(peer, peer + 1) for peer in self.ranks]
        for ranks in parts:
            options |= {"ranks": ranks, "but": rank}
            kernels.push_rows(x, plan.token_to_primary_row, peers, ready, **options)
        kernels.place_rows(
            x, plan.slot_to_rank, plan.slot_to_row, self.rows(rank), ready, rank=rank
        )
        probs = self.random(rank, case.tokens[rank], case.top_k)
        region = plan.token_to_packed_row, plan.block_tokens, plan.packed_start, plan.packed_limit
        columns = {"row_column": READY_SLOTS, "prob_column": READY_PROBS}
        slots = plan.slot_to_row, plan.slot_to_rank, probs if case.with_probs else None
        kernels.push_slots(slots, region, peers, ready, **columns)

    def index(self, rank: int) -> None:
        """All rows at once on even ranks, source by source on odd ones; these copy all at once."""
        case, starts = self.case, self.plans[rank].source_to_packed_start
        packed_to_row = self.packed_to_row[rank]
        row_probs = wire_probs = None
        if case.with_probs:
            row_probs = torch.full((self.num_rows,), -7.0, device=self.device)
            wire_probs = self.slots(rank, PROBS)
        index = packed_to_row, self.int32(self.num_rows), row_probs
        num_rows = self.plans[rank].report[control.SUM_NUM_ROWS :][:1]
        trip = self.received((ROWS, SLOTS, PROBS)), self.received(())[:1, 0]
        step = 1 if rank % 2 else case.num_ranks
        for source in range(0, case.num_ranks, step):
            packed = starts[source : source + 1], starts[source + step : source + step + 1]
            wire = self.slots(rank, SLOTS), wire_probs
            self.kernels.index_rows(wire, packed, num_rows, trip, index)
        for source in [None] if step == 1 else self.ranks:
            options = {"source": source, "num_ctas": case.num_ctas}
            self.kernels.fan_out(self.rows(rank), packed_to_row, starts, rank=rank, **options)

    # -- combine -------------------------------------------------------------------------------------------------------
    def combine(self) -> None:
        for rank in self.ranks:
            self.compute(rank)
        self.expert_rows = [self.rows(rank).clone() for rank in self.ranks]
        self.pull()
        ready = self.received((RETURNED, RETURNED))
        if not self.case.trip_fails:
            row_bytes = self.case.hidden * self.case.dtype.itemsize
            for rank, num_tokens in enumerate(self.case.tokens):
                ready[rank, 1] += (max(1, num_tokens) - 1) * row_bytes
        options = {"num_ctas": self.case.num_ctas}
        for rank, plan in enumerate(self.plans):
            # Odd ranks send to one rank after the other, the last one first.
            for source in reversed(self.ranks) if rank % 2 else [None]:
                self.kernels.push_sums(
                    self.rows(rank),
                    self.packed_to_row[rank],
                    plan.source_to_packed_start,
                    self.peers[rank],
                    ready,
                    column=0,
                    source=source,
                    **options,
                )
        self.arenas = [arena.clone() for arena in self.peers[0].views]
        trip = ready, torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sums = [self.blank(rank, self.case.hidden, self.case.dtype) for rank in self.ranks]
        for rank, plan in enumerate(self.plans):
            rows = self.rows(rank), self.returned(rank)
            index = [
                plan.token_to_packed_row,
                plan.packed_start,
                plan.slot_to_rank,
                plan.slot_to_row,
            ]
            self.kernels.sum_home(rows, index, trip, self.sums[rank], rank=rank, **options)

    def blank(self, rank: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = self.case.tokens[rank], width
        return torch.full(shape, -7.0, dtype=dtype, device=self.device)

    def compute(self, rank: int) -> None:
        """Every row gets numbers of its own, so that a wrong row or a wrong order of sums is seen."""
        rows = self.rows(rank)
        numbers = 3 * self.random(99 + rank, *rows.shape)
        numbers[:, ::7] = -0.0
        numbers[::3, 3::11] = torch.inf
        numbers[1::3, 3::11] = -torch.inf
        count = int(self.plans[rank].row_range[1, -1])
        rows[:count] = numbers[:count]
        row_values = self.random(rank, self.num_rows)
        num_packed = self.plans[rank].source_to_packed_start[-1:]
        self.kernels.gather_values(
            row_values, self.packed_to_row[rank], num_packed, self.slots(rank, VALUES)
        )

    def pull(self) -> None:
        ready = self.received((ROWS, VALUES))
        for rank, (peers, plan) in enumerate(zip(self.peers, self.plans, strict=True)):
            out = self.blank(rank, self.case.hidden, self.case.dtype)
            self.kernels.pull_rows(plan.slot_to_rank, plan.slot_to_row, peers, ready, out, column=0)
            values = self.blank(rank, self.case.top_k)
            self.kernels.pull_values(
                plan.slot_to_rank, plan.token_to_packed_row, peers, ready, values, column=1
            )

    # -- replicas ------------------------------------------------------------------------------------------------------
    def move_replicas(self) -> None:
        """Weights go to their replicas, and gradients come home."""
        case = self.case
        ready = self.received((ROWS, PACKED, RETURNED))
        shapes = [(case.num_experts // case.num_ranks, width) for width in (24, 40)]
        starts = 64, 64 + 8 * 24 * 4
        for rank, peers in enumerate(self.peers):
            shape = case.num_replica_slots, 40
            self.buffer(rank, PACKED, shape, case.dtype).copy_(self.random(rank, *shape))
            first, second = (self.random(rank, *shape).to(case.dtype) for shape in shapes)
            self.kernels.push_replicas(
                (first, table_of(second)),
                self.plans[rank].replica_to_expert,
                peers,
                ready,
                column=2,
                starts=starts,
            )
        for rank, (peers, plan) in enumerate(zip(self.peers, self.plans, strict=True)):
            first, second = (self.random(rank + 50, *shape).to(case.dtype) for shape in shapes)
            gradients = None if rank == 1 else first, table_of(second)
            replica_slots = plan.replica_to_expert, plan.expert_to_replica_slot
            self.kernels.add_from_replicas(
                gradients, replica_slots, peers, ready, column=1, starts=(64, 0)
            )
