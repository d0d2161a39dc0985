"""Runs the plan and token kernels of several ranks in one process: one arena per rank, barriers done by hand.
`run_case` takes either kernel module (twin or gpu) and returns every byte that a call produces, so that two modules can
be compared byte for byte. Buffers are prefilled: what a kernel must not write has to come back as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

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


def run_case(
    ops: ModuleType, case: Case, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every output of one layer call of all ranks, and the arenas after each step, by name."""
    return _Call(ops, case, torch.device(device)).run()


def table_of(matrices: torch.Tensor) -> torch.Tensor | TensorTable:
    """The same [G, M] as a table; on GPUs, whose memory twins cannot find by its address, as it is."""
    if matrices.is_cuda:
        return matrices
    addresses = [row.data_ptr() for row in matrices]
    return TensorTable(
        torch.tensor(addresses, device=matrices.device),
        (len(matrices), 1, matrices.shape[1]),
        matrices.dtype,
    )


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of the outputs of which any byte differs; every NaN of a floating-point output counts as the same."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(_bytes(ours[name]), _bytes(theirs[name]))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), float("nan"), tensor)
    return tensor.contiguous().view(-1).view(torch.uint8)


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
    given = {
        "num_ranks": num_ranks,
        "bases": bases,
        "views": tuple(arenas),
        "layout": ControlLayout(num_ranks),
    }
    return [Peers(rank=rank, **given) for rank in range(num_ranks)]


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


class _Call:
    def __init__(self, ops: ModuleType, case: Case, device: torch.device) -> None:
        self.ops, self.case, self.device = ops, case, device
        self.out: dict[str, torch.Tensor] = {}
        layout = ControlLayout(case.num_ranks)
        # A bound for every rank's rows and packed rows; offsets differ from rank to rank.
        num_rows = max(1, sum(case.tokens) * case.top_k)
        item_bytes = case.dtype.itemsize
        sizes = (
            num_rows * case.hidden * item_bytes,
            num_rows * case.hidden * item_bytes,
            num_rows * case.top_k * 4,
            num_rows * case.top_k * 4,
            num_rows * case.top_k * 4,
            case.num_ranks * max(1, *case.tokens) * case.hidden * item_bytes,
        )
        self.offsets: list[list[int]] = []
        views = []
        unit = 64 if case.num_ctas is None else 256
        for rank in range(case.num_ranks):
            offset = -(-layout.num_bytes // unit) * unit + unit * rank
            offsets = []
            for size in sizes:
                offsets.append(offset)
                offset += -(-size // unit) * unit + unit * (rank + 1)
            self.offsets.append(offsets)
            arena = torch.full((offset,), 0xFD, dtype=torch.uint8, device=device)
            arena[: layout.num_bytes] = 0
            views.append(arena)
        self.peers = peers_of_arenas(views)
        self.set_epoch(case.epoch)

    def set_epoch(self, epoch: int) -> None:
        for peers in self.peers:
            peers.counters(peers.rank)[control.BARRIER_EPOCH] = epoch

    def int32(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32, device=self.device)

    def received(self, columns: tuple[int, ...], fails: bool) -> torch.Tensor:
        """What a barrier hands out if every rank publishes the offsets of these buffers."""
        words = torch.zeros((self.case.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64)
        for rank, offsets in enumerate(self.offsets):
            for word, buffer in enumerate(columns):
                words[rank, word] = offsets[buffer]
        return (torch.full_like(words, -1) if fails else words).to(self.device)

    def keep(self, name: str, *tensors: torch.Tensor | None) -> None:
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                self.out[f"{name}[{index}]"] = tensor.clone()

    def keep_arenas(self, name: str) -> None:
        self.keep(name, *self.peers[0].views)

    def run(self) -> dict[str, torch.Tensor]:
        self.plan()
        self.dispatch()
        self.combine()
        if self.case.num_replica_slots:
            self.move_replicas()
        return self.out

    def plan(self) -> None:
        case, ops = self.case, self.ops
        num_experts, num_ranks = case.num_experts, case.num_ranks
        self.chosen_idx = self.topk_idx = [
            choose_experts(case, rank).to(self.device) for rank in range(num_ranks)
        ]
        sizes = case.top_k, num_experts, num_ranks, case.num_replica_slots
        layouts = [plan_layout(num_tokens, *sizes) for num_tokens in case.tokens]
        plans = [PlanIntegers(self.int32(numel), layout) for numel, layout in layouts]
        epoch, block_starts = case.epoch, self.count(self.topk_idx, num_experts)
        num_copies = num_experts + num_ranks * case.num_replica_slots
        if case.num_replica_slots:
            epoch += 1
            self.set_epoch(epoch)
            for rank, plan in enumerate(plans):
                ops.place_replicas(
                    self.peers[rank], plan, slack=case.slack, num_near=case.num_near or num_ranks
                )
                counts = self.int32(len(block_starts[rank]), num_copies + num_ranks + 2)
                ops.route_to_replicas(self.topk_idx[rank], block_starts[rank], plan, counts)
                self.keep(f"rank {rank} counts of copies", counts)
            self.topk_idx = [plan.slot_to_copy for plan in plans]
            block_starts = self.count(self.topk_idx, num_copies)
        self.set_epoch(epoch + 1)
        received = self.received((), case.plan_fails)
        self.maps = []
        for rank, plan in enumerate(plans):
            status = torch.zeros(
                control.STATUS_WORDS, dtype=torch.int64, pin_memory=self.device.type == "cuda"
            )
            status[control.STATUS_KIND] = case.pending
            ops.lay_out(
                self.peers[rank],
                received,
                status,
                plan,
                capacity=case.room_of(rank)[0],
                overflow=case.overflow,
                ranks=range(num_ranks),
            )
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.keep(f"rank {rank} status", status)
            ops.assign_rows(self.topk_idx[rank], block_starts[rank], plan, drop=case.drop)
            maps = {name: getattr(plan, name) for name in plan.layout}
            for name, tensor in maps.items():
                self.keep(f"rank {rank} {name}", tensor)
            self.keep(
                f"rank {rank} all of the plan", plan.storage
            )  # nothing between its tensors is written
            self.maps.append(maps)
        report = self.maps[0]["report"].tolist()
        self.num_rows = max(1, report[control.SUM_MAX_ROWS])
        self.num_packed = max(1, report[control.SUM_MAX_PACKED])

    def count(self, topk_idx: list[torch.Tensor], num_experts: int) -> list[torch.Tensor]:
        """Sends what each rank counts; the starts of blocks."""
        case, ops, num_ranks, block_starts = self.case, self.ops, self.case.num_ranks, []
        for rank, ids in enumerate(topk_idx):
            counts = self.int32(
                -(-len(ids) // control.TOKENS_PER_BLOCK), num_experts + num_ranks + 2
            )
            ops.count_slots(ids, counts, num_experts=num_experts, num_ranks=num_ranks)
            self.keep(f"rank {rank} counts of {num_experts}", counts)
            header = [0] * control.HEADER_WORDS
            header[control.HEAD_NUM_TOKENS] = len(ids)
            header[control.HEAD_TOP_K] = case.top_k + (case.other_top_k == rank)
            header[control.HEAD_NUM_EXPERTS], header[control.HEAD_NUM_REPLICA_SLOTS] = (
                case.num_experts,
                case.num_replica_slots,
            )
            header[control.HEAD_CAPACITY], header[control.HEAD_PACKED_CAPACITY] = case.room_of(rank)
            header[control.HEAD_OVERFLOW] = case.overflow
            header[control.HEAD_MAX_TOKENS] = -1
            header[control.HEAD_HIDDEN] = case.hidden
            header[control.HEAD_RAIL_CAPACITY] = 77
            ops.send_counts(
                counts,
                self.chosen_idx[rank],
                tuple(header),
                self.peers[rank],
                num_experts=num_experts,
            )
            self.keep(f"rank {rank} starts of {num_experts}", counts)
            block_starts.append(counts)
        self.keep_arenas("count tables")
        return block_starts

    def move_replicas(self) -> None:
        """Weights go to their replicas, and gradients come home."""
        case, widths = self.case, (24, 40)
        num_own, ready = (
            case.num_experts // case.num_ranks,
            self.received((ROWS, PACKED, RETURNED), case.trip_fails),
        )
        for rank, peers in enumerate(self.peers):
            generator = torch.Generator().manual_seed(rank)
            weights, gradients = (
                [
                    torch.randn((num_own, n), generator=generator).to(case.dtype).to(self.device)
                    for n in widths
                ]
                for _ in range(2)
            )
            its_gradients = torch.randn(
                (case.num_replica_slots, max(widths)), generator=generator
            ).to(case.dtype)
            self.buffer(rank, PACKED, its_gradients.shape, case.dtype).copy_(its_gradients)
            pair = (weights[0], table_of(weights[1]))
            at = {"column": 2, "starts": (64, 64 + 8 * 24 * 4)}
            self.ops.push_replicas(pair, self.maps[rank]["replica_to_expert"], peers, ready, **at)
            self.keep(f"gradients of rank {rank}", *gradients)
        self.keep_arenas("replicas")
        for rank, peers in enumerate(self.peers):
            gradients = [self.out[f"gradients of rank {rank}[{n}]"].clone() for n in range(2)]
            replica_slots = (
                self.maps[rank]["replica_to_expert"],
                self.maps[rank]["expert_to_replica_slot"],
            )
            pair = None if rank == 1 else gradients[0], table_of(gradients[1])
            self.ops.add_from_replicas(pair, replica_slots, peers, ready, column=1, starts=(64, 0))
            self.keep(f"gradients and those of replicas of rank {rank}", *gradients)

    def dispatch(self) -> None:
        case, ops = self.case, self.ops
        ready_packed = self.received((PACKED, SLOTS, PROBS), case.trip_fails)
        ready_rows = self.received((ROWS, SLOTS, PROBS), case.trip_fails)
        self.options = options = {"num_ctas": case.num_ctas}
        for rank, maps in enumerate(self.maps):
            generator = torch.Generator().manual_seed(77 + rank)
            num_tokens = case.tokens[rank]
            x = (
                torch.randn((num_tokens, case.hidden), generator=generator)
                .to(case.dtype)
                .to(self.device)
            )
            probs = None
            if case.with_probs:
                probs = torch.rand((num_tokens, case.top_k), generator=generator).to(self.device)
            peers = self.peers[rank]
            ops.push_rows(
                x, maps["token_to_packed_row"], peers, ready_packed, column=READY_ROWS, **options
            )
            primary = x, maps["token_to_primary_row"], peers, ready_rows
            if rank % 2:
                ops.push_rows(*primary, column=READY_ROWS, but=rank, **options)
            for peer in (
                range(case.num_ranks) if rank % 2 == 0 else ()
            ):  # in turn, as when GEMMs run meanwhile
                ops.push_rows(
                    *primary, column=READY_ROWS, ranks=range(peer, peer + 1), but=rank, **options
                )
            slots = maps["slot_to_rank"], maps["slot_to_row"]
            ops.place_rows(x, *slots, self.rows(rank), ready_rows, rank=rank)
            region = [
                maps[name]
                for name in ("token_to_packed_row", "block_tokens", "packed_start", "packed_limit")
            ]
            columns = {"row_column": READY_SLOTS, "prob_column": READY_PROBS}
            ops.push_slots(
                (maps["slot_to_row"], maps["slot_to_rank"], probs),
                region,
                peers,
                ready_rows,
                **columns,
            )
        self.keep_arenas("dispatched")

        arrived = self.received((), case.trip_fails)[:1, 0]
        for rank, maps in enumerate(self.maps):
            start = maps["source_to_packed_start"]
            packed_to_row = self.int32(self.num_packed, case.top_k)
            row_to_packed_row = self.int32(self.num_rows)
            row_probs = wire_probs = None
            if case.with_probs:
                row_probs = torch.full((self.num_rows,), -7.0, device=self.device)
                wire_probs = self.buffer(rank, PROBS, (self.num_packed, case.top_k), torch.float32)
            # All at once on even ranks, source by source on odd ones.
            step = 1 if rank % 2 else case.num_ranks
            for source in range(0, case.num_ranks, step):
                wire = (
                    self.buffer(rank, SLOTS, (self.num_packed, case.top_k), torch.int32),
                    wire_probs,
                )
                packed = start[source : source + 1], start[source + step : source + step + 1]
                index = packed_to_row, row_to_packed_row, row_probs
                num_rows = maps["report"][control.SUM_NUM_ROWS :][:1]
                ops.index_rows(wire, packed, num_rows, (ready_rows, arrived), index)
            self.keep(f"rank {rank} index", packed_to_row, row_to_packed_row, row_probs)
            maps["packed_to_row"], maps["num_packed"] = packed_to_row, start[-1:]
            # The ranks that index all rows at once copy them one rank after the other.
            for source in [None] if step == 1 else range(case.num_ranks):
                ops.fan_out(self.rows(rank), packed_to_row, start, rank=rank, source=source)
        self.keep_arenas("fanned out")

    def combine(self) -> None:
        case, ops = self.case, self.ops
        ready = self.received((ROWS, VALUES), case.trip_fails)
        for rank, maps in enumerate(self.maps):
            # Every row gets a value of its own, so that a wrong row or a wrong order of sums is seen.
            generator = torch.Generator().manual_seed(99 + rank)
            rows = self.rows(rank)
            values = torch.randn(rows.shape, generator=generator) * 3
            values[:, ::7] = -0.0
            values[::3, 3::11], values[1::3, 3::11] = torch.inf, -torch.inf
            count = int(maps["row_range"][1, -1])
            rows[:count] = values.to(case.dtype).to(self.device)[:count]
            row_values = torch.rand((self.num_rows,), generator=generator).to(self.device)
            packed_values = self.buffer(rank, VALUES, (self.num_packed, case.top_k), torch.float32)
            ops.gather_values(row_values, maps["packed_to_row"], maps["num_packed"], packed_values)
        self.keep_arenas("values gathered")
        for rank, maps in enumerate(self.maps):
            self.keep(f"rank {rank} rows", self.rows(rank))
            out = torch.full(
                (case.tokens[rank], case.hidden), -7.0, dtype=case.dtype, device=self.device
            )
            slots = maps["slot_to_rank"], maps["slot_to_row"]
            ops.pull_rows(*slots, self.peers[rank], ready, out, column=0)
            self.keep(f"rank {rank} sum by slot", out)
        ready = self.received((RETURNED, RETURNED), case.trip_fails)
        row_bytes = case.hidden * case.dtype.itemsize
        for rank, num_tokens in enumerate(case.tokens):
            ready[rank, 1] += (max(1, num_tokens) - 1) * row_bytes * (not case.trip_fails)
        for rank, maps in enumerate(self.maps):
            # Odd ranks send to one rank after the other, the last one first.
            for source in reversed(range(case.num_ranks)) if rank % 2 else [None]:
                ops.push_sums(
                    self.rows(rank),
                    maps["packed_to_row"],
                    maps["source_to_packed_start"],
                    self.peers[rank],
                    ready,
                    column=0,
                    source=source,
                    **self.options,
                )
            self.keep(f"rank {rank} rows after its sums", self.rows(rank))
        for rank in range(case.num_ranks):
            self.keep(f"rank {rank} returned", self.returned(rank))
        self.keep_arenas("sums returned")
        arrived = torch.zeros(1, dtype=torch.int64, device=self.device)
        for rank, maps in enumerate(self.maps):
            out = torch.full(
                (case.tokens[rank], case.hidden), -7.0, dtype=case.dtype, device=self.device
            )
            index = [
                maps[name]
                for name in ("token_to_packed_row", "packed_start", "slot_to_rank", "slot_to_row")
            ]
            rows = self.rows(rank), self.returned(rank)
            ops.sum_home(rows, index, (ready, arrived), out, rank=rank, **self.options)
            self.keep(f"rank {rank} sum by rank", out)
        self.keep_arenas("after rank")
        ready = self.received((ROWS, VALUES), case.trip_fails)
        for rank, maps in enumerate(self.maps):
            values = torch.full((case.tokens[rank], case.top_k), -7.0, device=self.device)
            ops.pull_values(
                maps["slot_to_rank"],
                maps["token_to_packed_row"],
                self.peers[rank],
                ready,
                values,
                column=1,
            )
            self.keep(f"rank {rank} values", values)

    def rows(self, rank: int) -> torch.Tensor:
        return self.buffer(rank, ROWS, (self.num_rows, self.case.hidden), self.case.dtype)

    def returned(self, rank: int) -> torch.Tensor:
        num_rows = max(1, self.case.num_ranks - 1) * max(1, self.case.tokens[rank])
        return self.buffer(rank, RETURNED, (num_rows, self.case.hidden), self.case.dtype)

    def buffer(
        self, rank: int, buffer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return self.peers[rank].region(rank, self.offsets[rank][buffer], shape, dtype)
