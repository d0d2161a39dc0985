"""Layout of the control block at the start of every rank's arena, of the records that kernels write for the host, and
of a plan's integers.

Twins and device code share these numbers. This module writes no memory.

    counters      int64[8]                       local: barrier epoch, aborted, faulted, fault of a rail, on the rail
    mailbox       int64[2][R][MAIL_WORDS]        only rank s writes slot [epoch & 1][s]
    signals       int64[R][SIGNAL_WORDS]         only rank s writes slot s: the epoch of its last signal
    fault inbox   uint8[2][R][INBOX_BYTES]       only rank s writes slot [.][s], in turn
    count table   int32[2][S][row_words]         half [epoch of the plan's barrier & 1]; only rank s writes row s

R counts the ranks of the node, whose arenas kernels can access. S counts the ranks of the group; S is R unless the
group spans nodes. Then the owner of a table writes the rows of other nodes' ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from symmoe.errors import FAULT_BYTES
from symmoe.program.builder import noted

MAX_EXPERTS = 1024  # bounds the count table: 2 * R rows of about 4 KiB

# Counters. A wait that times out, or ends because another rank aborted, sets ABORTED for good. A barrier that sees a
# fault, and a plan that finds an error for the host, set FAULTED: until the host has raised the error, barriers return
# at once and count no epoch. So all ranks continue from the same epoch, however far their hosts had run ahead.
# RAIL_FAULT is 1 if a rank of another node has reported a fault with its payload: the next barrier is entered with this
# fault. A rank sends these three counters to other nodes, see symm_mem/several_nodes.py. ON_RAIL is 1 while this rank
# waits for ranks of other nodes: peers then do not count it as absent.
BARRIER_EPOCH, ABORTED, FAULTED, RAIL_FAULT, ON_RAIL = range(5)
NUM_COUNTERS = 8

# a mailbox slot: 2 * epoch + fault, published words, the call; 64 bytes, so that two writers never share a cache line
MAIL_WORDS = 8
NUM_PUBLISHED = 4
MAIL_CALL = 1 + NUM_PUBLISHED

# a slot of the signals: an epoch, padding to 64 bytes
SIGNAL_WORDS = 8

# A rank that aborts adds ABORT and its rank (in the bits from ABORT_RANK_SHIFT) to the first word of every slot of
# every mailbox and of the signals, on itself and on its peers. The sum exceeds any epoch: every wait ends and needs no
# other flag. The old word may stay in the low bits, so that a wait for an epoch that was reached does not fail (see
# symm_mem/reports.py). Peers may overwrite the sum with their epochs, but not in the slots of this rank: later waits
# see it there.
ABORT = 1 << 62
ABORT_RANK_SHIFT = 48
EPOCH_MASK = (1 << ABORT_RANK_SHIFT) - 1

# a slot of the fault inbox: the epoch of the faulted barrier or the word of a rank that aborted (8 bytes), the error,
# five integers of a rank that aborted (see symm_mem/reports.py), padding to 64 bytes
INBOX_BYTES = 64 + FAULT_BYTES
INBOX_DETAILS = 8 + FAULT_BYTES  # where the integers start

# a row of the count table: a header, slots per expert, tokens per destination rank
HEADER_WORDS = 32
(
    HEAD_NUM_TOKENS,
    HEAD_TOP_K,
    HEAD_NUM_EXPERTS,
    HEAD_CAPACITY,
    HEAD_MAX_TOKENS,
    HEAD_OVERFLOW,
    HEAD_HIDDEN,
    HEAD_DTYPE,
    HEAD_BAD_SLOTS,  # number of ids out of range
    HEAD_BAD_ID,  # the first such id,
    HEAD_BAD_SLOT,  # and its slot t * K + k
    HEAD_PRECISION,
    HEAD_QUANTIZED_WIRE,
    HEAD_PACKED_CAPACITY,
    HEAD_RAIL_CAPACITY,
    HEAD_RAIL_DROPPED,  # slots that are dropped because their tokens exceed a rail's rows; if none are dropped,
    # the most tokens for one node, if they exceed these rows. Only the device has it
    HEAD_NUM_REPLICA_SLOTS,
    HEAD_SLACK,
) = range(18)
# Header fields that must be equal on all ranks, with their names for users.
AGREED_FIELDS = {
    HEAD_TOP_K: "top_k",
    HEAD_NUM_EXPERTS: "num_experts",
    HEAD_CAPACITY: "capacity",
    HEAD_MAX_TOKENS: "max_tokens",
    HEAD_OVERFLOW: "overflow",
    HEAD_HIDDEN: "hidden",
    HEAD_DTYPE: "dtype",
    HEAD_PRECISION: "precision",
    HEAD_QUANTIZED_WIRE: "quantized_wire",
    HEAD_PACKED_CAPACITY: "room for packed rows",
    HEAD_RAIL_CAPACITY: "rail_capacity",
    HEAD_NUM_REPLICA_SLOTS: "replica slots",
    HEAD_SLACK: "slack per mille",
}

# Kernels move rows in accesses of this size: buffers are aligned to it, and on GPUs rows are a multiple of it long.
ACCESS_BYTES = 16

# the dtypes of rows; the header holds the index
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# The recipes of experts; the header holds the index in its low bits and above them a number for the recipe's options, 0
# for none (precision/recipes.py). The last entry stands for every other recipe.
PRECISIONS = ("float8-block", "mxfp8", "nvfp4", "another recipe")
PRECISION_BITS = 8

# which payload is quantised on the wire; the header holds the index
QUANTIZED_WIRES = ("none", "forward", "backward", "both")

# the orders of combine's sums inside a node; a call holds the index
ORDERS = ("rank", "slot")

# what backward of a trip computes besides the gradients of weights; a call holds the index, x + 2 * probs
GRADIENTS = ("none", "x", "probs", "x and probs")

# The tensors that replicas exchange: for each layer of the experts a weight, a bias, and the two matrices of an
# adapter; forward sends them, backward sends their gradients.
_KINDS = "weight", "bias", "lora_a", "lora_b"
REPLICA_MATRICES = tuple(f"{layer} {kind}" for layer in ("fc1", "fc2") for kind in _KINDS)

# the layouts of received rows and the schedules of a step; a call holds the indices
LAYOUTS = ("packed", "expert-major")
SCHEDULES = ("serial", "overlapped")

# overflow policy in the header. With OVERFLOW_REPEAT, capacities and rows of rails are guesses; if one is too low, all
# ranks plan the call again. A capacity of -1 then means that the rank's host waits for the plan and allocates exactly.
OVERFLOW_RAISE, OVERFLOW_DROP, OVERFLOW_REPEAT = 0, 1, 2

# a status record: int64[STATUS_WORDS] that the host can read without synchronising
STATUS_WORDS = 8
(
    STATUS_KIND,
    STATUS_PHASE,
    STATUS_PEER,
    STATUS_EXPECTED,
    STATUS_ACTUAL,
    STATUS_EPOCH,
    STATUS_WHERE,
) = range(7)
STATUS_OK, STATUS_TIMEOUT, STATUS_FAULT, STATUS_PLAN, STATUS_MISMATCH, STATUS_ABORT, STATUS_RAIL = (
    range(7)
)
# A record of kind STATUS_PLAN: PEER = SUM_ERROR_RANK, EXPECTED = SUM_LIMIT, ACTUAL = SUM_VALUE, EPOCH = SUM_ERROR,
# WHERE = SUM_WHERE. Of kind STATUS_MISMATCH: PEER is the first rank whose call differs from rank 0's, EXPECTED is rank
# 0's call, ACTUAL is PEER's call. Of kind STATUS_ABORT: PEER is the rank that aborted, ACTUAL the word that it wrote.
# Of kind STATUS_RAIL, which the host writes: the host treats a rank of another node as lost, see
# symm_mem/several_nodes.py.

# The reports that the host reads: int64[REPORT_SLOTS, SUMMARY_WORDS]; row generation % REPORT_SLOTS has the report of
# the plan of this generation. A word has the report's word in its lower half and the generation, positive, above it.
REPORT_SLOTS = 8
GENERATION_BITS = 31

# how plan kernels cut the tokens of a rank
TOKENS_PER_BLOCK = 32
# and how a router's losses cut them
TOKENS_PER_LOSS_BLOCK = 128

# what `lay_out` reports of a plan: int32[SUMMARY_WORDS]
SUMMARY_WORDS = 16
(
    SUM_ERROR,  # one of the PLAN_* codes
    SUM_ERROR_RANK,  # the first rank concerned
    SUM_LIMIT,  # of the error: num_experts, a capacity, or rank 0's value of the field that differs
    SUM_VALUE,  # of the error: the id, the rows or tokens, or the rank's value of the field
    SUM_WHERE,  # of the error: the slot t * K + k, or the header word that differs
    SUM_NUM_ROWS,  # rows that this rank receives
    SUM_MAX_ROWS,  # the most rows that a rank of the group receives
    SUM_NUM_PACKED,
    SUM_MAX_PACKED,
    SUM_NUM_DROPPED,  # slots of the whole group that were dropped
    SUM_MOST_SENT,  # with exact capacity between nodes: the most tokens that this rank sends to another node
) = range(11)
# PLAN_OVER_BUDGET is an overflow of either kind with OVERFLOW_REPEAT: it is not an error.
(
    PLAN_OK,
    PLAN_FAULT,
    PLAN_MISMATCH,
    PLAN_BAD_ID,
    PLAN_OVERFLOW,
    PLAN_RAIL_OVERFLOW,
    PLAN_OVER_BUDGET,
) = range(7)

# barrier names, by the number kernels record
PHASES = (
    "start-up",
    "plan: counts",
    "dispatch: ready",
    "dispatch: arrived",
    "combine: ready",
    "combine: done",
    "close",
    "plan: maps of other nodes",
    "dispatch: rows of other nodes",
    "combine: sums of other nodes",
    "replicas: gradients",
    "suspend or resume",
)
(
    PHASE_START,
    PHASE_PLAN,
    PHASE_DISPATCH_READY,
    PHASE_DISPATCH_DONE,
    PHASE_COMBINE_READY,
    PHASE_COMBINE_DONE,
) = range(6)
PHASE_CLOSE, PHASE_NODES_PLAN, PHASE_NODES_OUT, PHASE_NODES_HOME = range(6, 10)
PHASE_REPLICAS_HOME, PHASE_SUSPEND = 10, 11

# A barrier checks that these values are equal on all ranks: fields of an int64, from the lowest bit up, with their
# widths. The field plan has the last bits of the plan's generation. While a plan is made, and in a dispatch with
# replicas, one number for the whole configuration (symm_mem/reports.py) replaces the later fields.
CALL_FIELDS = {
    "phase": 8,
    "replicas": 1,
    "plan": 12,
    "order": 1,
    "gradients": 2,
    "probs": 1,
    "dtype": 4,
    "hidden": 24,
    "layout": 1,
    "schedule": 1,
}
_STARTS = dict(
    zip(CALL_FIELDS, itertools.accumulate(CALL_FIELDS.values(), initial=0), strict=False)
)
CONFIG_SHIFT = _STARTS["order"]
CONFIG_BITS = 63 - CONFIG_SHIFT
MAX_HIDDEN = (1 << CALL_FIELDS["hidden"]) - 1


CallFields = dict[str, Any]  # values of CALL_FIELDS, except the phase; the default is 0


def gradients_index(*, x: bool, probs: bool) -> int:
    """The index of GRADIENTS."""
    return int(x) + 2 * int(probs)


@functools.lru_cache(maxsize=256)  # steps repeat the same calls
def pack_call(*, config: int = 0, **fields: int) -> int:
    """The call of a barrier as one integer; missing fields are 0. config: the number of a configuration."""
    assert fields.keys() <= CALL_FIELDS.keys(), fields
    call = config << CONFIG_SHIFT
    for name, value in fields.items():
        call |= (value & (1 << CALL_FIELDS[name]) - 1) << _STARTS[name]
    return call


def unpack_call(call: int) -> dict[str, int]:
    """The fields of :func:`pack_call`."""
    return {name: call >> _STARTS[name] & (1 << width) - 1 for name, width in CALL_FIELDS.items()}


@dataclass(unsafe_hash=True)  # launches keep constants by layout
class ControlLayout:
    """Byte offsets of the control block's parts for `num_ranks` ranks of a node."""

    num_ranks: int
    num_sources: int | None = (
        None  # ranks of the group, one row each in the count table; None: num_ranks
    )

    def __post_init__(self) -> None:
        self.num_rows = self.num_sources or self.num_ranks  # of one half of the count table
        # int32 words of one row, a multiple of 16: rows stay aligned to 64 bytes
        self.row_words = -(-(HEADER_WORDS + MAX_EXPERTS + self.num_rows) // 16) * 16
        self.table_stride_bytes = self.num_rows * self.row_words * 4  # of one half
        self.counters, self.mailbox = 0, 512
        self.signals = self.mailbox + 2 * self.num_ranks * MAIL_WORDS * 8
        self.fault_inbox = self.signals + self.num_ranks * SIGNAL_WORDS * 8
        self.count_table = self.fault_inbox + 2 * self.num_ranks * INBOX_BYTES
        self.num_bytes = -(-(self.count_table + 2 * self.table_stride_bytes) // 4096) * 4096


class HostWords(NamedTuple):
    """The words that ranks exchange, as numpy arrays: slicing an array costs a tenth of slicing a tensor."""

    counters: npt.NDArray[np.int64]  # this rank's Peers.counters
    mailboxes: tuple[npt.NDArray[np.int64], ...]  # each rank's Peers.mailbox
    signals: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class Peers:
    """The arenas of all ranks of the node, as kernels see them."""

    rank: int  # this rank in the node
    num_ranks: int  # R
    bases: (
        torch.Tensor
    )  # int64[R] on the heap's device, the address of each rank's arena in this process
    views: tuple[torch.Tensor, ...]  # each rank's arena as a uint8 tensor in this process
    layout: ControlLayout  # where the parts of the control block lie
    group_ranks: tuple[
        int, ...
    ] = ()  # the ranks of the node in the EP group; (): the group is on one node

    def in_group(self, rank: int) -> int:
        """A rank of the node as a rank of the EP group; a negative number stays as it is."""
        return self.group_ranks[rank] if self.group_ranks and rank >= 0 else rank

    @functools.cached_property
    def host_words(self) -> HostWords:
        """The words of the control blocks, on CPUs."""
        ranks = range(self.num_ranks)
        mailboxes = tuple(self.mailbox(rank).numpy() for rank in ranks)
        signals = tuple(self.signals(rank).numpy() for rank in ranks)
        return HostWords(self.counters(self.rank).numpy(), mailboxes, signals)

    def region(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """`shape` elements of `dtype` at byte `offset` of rank `rank`'s arena, as a view."""
        num_bytes = dtype.itemsize * math.prod(shape)
        return self.views[rank][offset : offset + num_bytes].view(dtype).view(shape)

    def counters(self, rank: int) -> torch.Tensor:
        """The counters of a rank, int64 [NUM_COUNTERS]."""
        return self.region(rank, self.layout.counters, (NUM_COUNTERS,), torch.int64)

    def mailbox(self, rank: int) -> torch.Tensor:
        """The mailbox of a rank, int64 [2, R, MAIL_WORDS]."""
        return self.region(rank, self.layout.mailbox, (2, self.num_ranks, MAIL_WORDS), torch.int64)

    def signals(self, rank: int) -> torch.Tensor:
        """The signals of a rank, int64 [R, SIGNAL_WORDS]."""
        return self.region(rank, self.layout.signals, (self.num_ranks, SIGNAL_WORDS), torch.int64)

    @property
    def control_block(self) -> torch.Tensor:
        """This rank's control block, as bytes."""
        return self.views[self.rank][: self.layout.num_bytes]

    @property
    def epoch(self) -> int:
        """The epoch of this rank's last barrier. Waits for the device."""
        return int(self.counters(self.rank)[BARRIER_EPOCH])

    def count_table(self, rank: int, epoch: int) -> torch.Tensor:
        """The count table of a rank, int32 [S, row_words]: the half for this epoch."""
        layout = self.layout
        offset = layout.count_table + (epoch & 1) * layout.table_stride_bytes
        return self.region(rank, offset, (layout.num_rows, layout.row_words), torch.int32)


@dataclass(frozen=True, eq=False)
class RankMaps:
    """The placement of ranks on nodes, for kernels. Made once, because a host that copies numbers to a GPU waits."""

    own_node: int  # the node of this rank
    first: int  # its first rank, if the ranks of a node follow each other
    to_node: (
        torch.Tensor
    )  # int64 [R + 1], the node of a rank; the last entry, for rank -1, is arbitrary
    to_local: (
        torch.Tensor
    )  # int32 [N * (R + 1)], by node, a rank's index in it; -1 for other ranks and for rank -1
    by_node: torch.Tensor  # int64 [N, G], the ranks of each node
    own_ranks: torch.Tensor  # int64 [G], the ranks of this node
    other_ranks: torch.Tensor  # int64 [R - G], the ranks of the other nodes, in their order
    first_with: (
        torch.Tensor
    )  # int64 [R + 1], the first rank whose rows arrive with a rank's; the end is R


PlanLayout = Mapping[
    str, tuple[int, tuple[int, ...], tuple[int, ...]]
]  # (first element, strides, shape) of each tensor


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_PER_BLOCK)


class _Integers:
    """One of the tensors in the storage of a plan: a view that is made on first access. shape: numbers, and the names
    of numbers that plan_layout and in_node_layout define."""

    def __init__(self, *shape: int | str) -> None:
        self.shape = shape

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, integers: PlanIntegers | InNodeIntegers, owner: type) -> torch.Tensor:
        first, strides, shape = integers.layout[self._name]
        storage = integers.storage
        view = storage.as_strided(shape, strides, storage.storage_offset() + first)
        vars(integers)[self._name] = view  # later accesses read this attribute first
        return view


@dataclass(frozen=True, eq=False)
class PlanIntegers:
    """The tensors that the kernels of a plan fill: int32 views of one allocation, aligned to 16 bytes, with these
    shapes. T tokens, K slots per token, E experts, R ranks, B blocks; -1 in a map means "none".

    A rank may have S replica slots for other ranks' experts, see ReplicaKernels.place_replicas. Their numbers follow
    its E / R own experts: e is E / R + S. If S is 0, the tensors for replica slots are empty.
    """

    storage: torch.Tensor
    layout: PlanLayout  # the tensors' offsets in the storage, see plan_layout

    splits = _Integers("e")  # rows of each local expert
    row_range = _Integers(2, "E / R")  # where each local expert's rows begin and end
    # The row, on the expert's rank, of this rank's first slot of the expert; how many of this rank's slots are kept.
    slot_start, slot_limit = _Integers("R * e"), _Integers("R * e")
    # The row of each slot on its expert's rank, and that rank; -1 for no expert and for dropped slots.
    slot_to_row, slot_to_rank = _Integers("T", "K"), _Integers("T", "K")
    # Per destination rank; -1 if the token has no slot there.
    token_to_primary_row, token_to_packed_row = _Integers("T", "R"), _Integers("T", "R")
    block_tokens = _Integers("B", "R")  # tokens of each block that have a kept slot on each rank
    # This rank's region of packed rows on each rank: first row, number of rows.
    packed_start, packed_limit = _Integers("R"), _Integers("R")
    source_to_packed_start = _Integers(
        "R + 1"
    )  # where each source's packed rows start here; the last entry: their number
    # Where the rows of each source rank and local expert start here; the last row: where the experts' rows end.
    source_to_row_start = _Integers("R + 1", "e")
    source_to_rows = _Integers(
        "R", 2, "E / R"
    )  # the part of each source: first rows, rows past the last, see lay_out
    expert_load = _Integers("E")  # slots of each expert in the whole group, before dropping
    report = _Integers(SUMMARY_WORDS)  # sizes and errors for the host, as in SUM_*
    # Begin and end of each replica slot's rows: of all rows, then of rows from earlier ranks, from this rank, from
    # later ranks.
    replica_ranges = _Integers(4, 2, "S")
    slot_to_copy = _Integers(
        "T if S", "K"
    )  # topk_idx with a copy, rank * e + n, in place of each expert
    # The expert that a replica slot of a rank is for, and its rows there.
    replica_to_expert, replica_rows = _Integers("R", "S"), _Integers("R", "S")
    expert_to_replica_slot = _Integers("E if S", "R")  # an expert's replica slot on a rank
    copy_slots = _Integers(
        "E if S", "R"
    )  # this rank's slots of an expert that go to its copy on a rank


@dataclass(eq=False)
class InNodeIntegers:
    """Where the tokens of a plan are inside each node: int32 views of one allocation, aligned to 16 bytes, with these
    shapes. N nodes of G ranks, R ranks in all, e experts per rank, T own and F foreign tokens, A sent lines in all,
    equally many to each other node; H = T + A home rows; -1 in a map means "none".

    Lines [H + F, .]: first the plan's lines for home rows, with slots and ranks numbered inside the destination node;
    then the lines of foreign tokens.
    """

    storage: torch.Tensor
    layout: PlanLayout  # the tensors' offsets in the storage, see in_node_layout

    token_to_home_row = _Integers(
        "T", "N"
    )  # the home row of a node's sum for a token; see RailPlan
    home_row_to_token = _Integers("H")  # arbitrary for unused rows
    slot_to_row, slot_to_rank = _Integers("H + F", "K"), _Integers("H + F", "K")
    token_to_packed_row, token_to_primary_row = _Integers("H + F", "G"), _Integers("H + F", "G")
    slot_to_home_row = _Integers(
        "T", "K"
    )  # a slot's place among K values of each home row; -1: no expert
    zeros = _Integers("T * max(N, K)")  # the rank of each home row
    ends = _Integers(2)  # 0 and T: home is a group of one rank
    # For each node, then for the lines from each other node's rank: tokens that go to each rank, where their packed
    # rows start, and how many there are.
    regions = _Integers(2, "N", 3, "G")
    source_to_packed_start = _Integers(
        "R + 1"
    )  # the plan's, for this node's sources only (dispatch/nodes.py)
    # The rows that can be computed once all tokens of this node have arrived, if its ranks are consecutive.
    own_rows = _Integers(2, "e")


@functools.lru_cache(maxsize=256)
def plan_layout(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, num_replica_slots: int = 0
) -> tuple[int, PlanLayout]:
    """The number of elements in the storage of PlanIntegers, and the place of each tensor."""
    num_own = num_experts // num_ranks
    sizes = {
        "T": num_tokens,
        "K": top_k,
        "E": num_experts,
        "R": num_ranks,
        "S": num_replica_slots,
        "R + 1": num_ranks + 1,
    }
    sizes |= {
        "E / R": num_own,
        "e": num_own + num_replica_slots,
        "R * e": num_ranks * (num_own + num_replica_slots),
    }
    sizes |= {
        "T if S": num_tokens * min(1, num_replica_slots),
        "E if S": num_experts * min(1, num_replica_slots),
    }
    return _laid_out(PlanIntegers, sizes | {"B": num_blocks(num_tokens)})


Integers = TypeVar("Integers", PlanIntegers, InNodeIntegers)


# A program finds tensors that are kernel arguments, but not tensors inside other arguments.
@noted(on_gpus=False, stands_for="itself")
def in_storage(kind: type[Integers], storage: torch.Tensor, layout: PlanLayout) -> Integers:
    """Integers of this kind with all of their views, for kernels."""
    integers = kind(storage, layout)
    start = storage.storage_offset()
    for name, (first, strides, shape) in layout.items():
        vars(integers)[name] = storage.as_strided(shape, strides, start + first)
    return integers


@functools.lru_cache(maxsize=256)
def in_node_layout(
    num_tokens: int,
    top_k: int,
    num_local: int,
    nodes: tuple[int, int],
    num_sent: int,
    num_foreign: int,
) -> tuple[int, PlanLayout]:
    """As plan_layout, for InNodeIntegers. nodes: N, G; num_local: e; num_sent: A; num_foreign: F."""
    (num_nodes, per_node), num_home = nodes, num_tokens + num_sent
    sizes = {
        "T": num_tokens,
        "K": top_k,
        "N": num_nodes,
        "G": per_node,
        "R + 1": num_nodes * per_node + 1,
    }
    sizes |= {
        "H": num_home,
        "H + F": num_home + num_foreign,
        "T * max(N, K)": num_tokens * max(num_nodes, top_k),
    }
    return _laid_out(InNodeIntegers, sizes | {"e": num_local})


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(1, size) for size in shape[n + 1 :]) for n in range(len(shape)))


def _laid_out(kind: type, sizes: Mapping[str, int]) -> tuple[int, PlanLayout]:
    unit = ACCESS_BYTES // torch.int32.itemsize
    first, layout = 0, {}
    for name, field in vars(kind).items():
        if isinstance(field, _Integers):
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in field.shape)
            layout[name] = first, contiguous_strides(shape), shape
            first += -(-math.prod(shape) // unit) * unit
    return first, layout
