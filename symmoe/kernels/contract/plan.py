"""The plan: maps from every slot of a rank's `topk_idx` to its place.

There are B blocks of TOKENS_PER_BLOCK tokens. A rank receives packed rows, one for each token that it needs. The
primary row of a token on a rank is that of its smallest k there; its other rows are secondary rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from symmoe.kernels import control
from symmoe.kernels.control import Peers

Layout = Mapping[str, tuple[int, int, tuple[int, ...]]]  # (first element, number of elements, shape) of each tensor


@functools.lru_cache(maxsize=256)
def plan_layout(num_tokens: int, top_k: int, num_experts: int, num_ranks: int) -> tuple[int, Layout]:
    """Elements of the storage of a plan's integers, and where each of them is."""
    num_local = num_experts // num_ranks
    shapes = {
        "splits": (num_local,),
        "row_range": (2, num_local),
        "slot_start": (num_experts,),
        "slot_limit": (num_experts,),
        "slot_to_row": (num_tokens, top_k),
        "slot_to_rank": (num_tokens, top_k),
        "token_to_primary_row": (num_tokens, num_ranks),
        "token_to_packed_row": (num_tokens, num_ranks),
        "block_tokens": (num_blocks(num_tokens), num_ranks),
        "packed_start": (num_ranks,),
        "packed_limit": (num_ranks,),
        "source_to_packed_start": (num_ranks + 1,),
        "source_to_row_start": (num_ranks + 1, num_local),
        "source_to_rows": (num_ranks, 2, num_local),
        "expert_load": (num_experts,),
        "report": (control.SUMMARY_WORDS,),
    }
    unit = control.ACCESS_BYTES // torch.int32.itemsize
    first, layout = 0, {}
    for name, shape in shapes.items():
        layout[name] = first, math.prod(shape), shape
        first += -(-math.prod(shape) // unit) * unit
    return first, layout


def num_blocks(num_tokens: int) -> int:
    """B."""
    return -(-num_tokens // control.TOKENS_PER_BLOCK)


class _Integers:
    """One of the tensors in the storage of a plan: a view that is made when it is first asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, integers: PlanIntegers, owner: type) -> Tensor:
        first, numel, shape = integers.layout[self._name]
        view = integers.storage[first : first + numel].view(shape)
        vars(integers)[self._name] = view  # found before this descriptor from now on
        return view


@dataclass(eq=False)
class PlanIntegers:
    """The tensors that the kernels of a plan fill: int32 views of one allocation, aligned to 16 bytes. T tokens, K
    slots per token, E experts, e experts per rank, R ranks, B blocks; -1 in a map means "none".

    Attributes:
        storage, layout: the allocation, and where they are in it, see plan_layout.
        splits: [e], rows of each local expert.
        row_range: [2, e], where each local expert's rows begin and end.
        slot_start, slot_limit: [E], on the expert's rank, the row of this rank's first slot of the expert, and how many
            of this rank's slots of it are kept.
        slot_to_row, slot_to_rank: [T, K], the row of each slot on its expert's rank, and that rank; -1 for no expert,
            and for slots that are dropped.
        token_to_primary_row, token_to_packed_row: [T, R], per destination rank; -1 if the token has no slot there.
        block_tokens: [B, R], tokens of each block that have a kept slot on each rank.
        packed_start, packed_limit: [R], this rank's region of packed rows on each rank: first row, number of rows.
        source_to_packed_start: [R + 1], where the packed rows of each source rank start here; the last is their number.
        source_to_row_start: [R + 1, e], where the rows of each source rank and local expert start here; the last row is
            where the experts' rows end.
        source_to_rows: [R, 2, e], see PlanKernels.split_by_source.
        expert_load: [E], slots of each expert in the whole group, before dropping.
        report: [control.SUMMARY_WORDS], sizes and errors for the host, as in control.SUM_*.
    """

    storage: Tensor
    layout: Layout

    splits, row_range, slot_start, slot_limit = _Integers(), _Integers(), _Integers(), _Integers()
    slot_to_row, slot_to_rank, token_to_primary_row = _Integers(), _Integers(), _Integers()
    token_to_packed_row, block_tokens, packed_start, packed_limit = _Integers(), _Integers(), _Integers(), _Integers()
    source_to_packed_start, source_to_row_start, source_to_rows = _Integers(), _Integers(), _Integers()
    expert_load, report = _Integers(), _Integers()


class PlanKernels(Protocol):
    def splits_to_row_range(self, splits: Tensor, row_range: Tensor, num_rows: int) -> None:
        """row_range of whole groups, int32[2, G], from their numbers of rows: splits int32 or int64 [G].

        Negative splits count as 0 and sums are limited to num_rows: kernels stay inside their tensors for any splits.
        """

    def count_slots(self, topk_idx: Tensor, block_counts: Tensor, *, num_experts: int, num_ranks: int) -> None:
        """Counts slots per expert and tokens per destination rank in each block of tokens.

        Args:
            topk_idx: int32 or int64 [T, K], expert ids; -1 is "no expert".
            block_counts: int32 [B, E + R + 2]; columns: slots of each expert, tokens that go to each rank, number of
                ids out of range, and the first slot t * K + k with such an id (2**31 - 1 if none). Ids out of range
                are not counted as slots.
        """

    def send_counts(
        self,
        block_counts: Tensor,
        topk_idx: Tensor,
        header: tuple[int, ...],
        block_starts: Tensor,
        peers: Peers,
        *,
        num_experts: int,
    ) -> None:
        """Puts this rank's row (header, slots per expert, tokens per rank) into every rank's count table.

        It uses the half of the table that belongs to the next barrier.

        Args:
            block_counts, topk_idx: those of count_slots.
            header: HEADER_WORDS integers; the HEAD_BAD_* words are filled in here.
            block_starts: int32 [B, E], gets the slots of each expert in earlier blocks.
        """

    def lay_out(
        self,
        peers: Peers,
        received: Tensor,
        status: Tensor,
        plan: PlanIntegers,
        *,
        capacity: int,
        packed_capacity: int,
        drop: bool,
        record_errors: bool,
    ) -> None:
        """Lays out every rank's rows from the count table, the same way on every rank.

        After an error, which the report has, nothing is laid out: all counts are zero.

        Args:
            received: result of the plan's barrier; negative words mean that a rank faulted.
            status: int64[STATUS_WORDS], pinned host memory on GPUs; gets a record of an error if `record_errors`.
            plan: gets what says where rows are, expert_load and the report.
            capacity: rows that each rank can take; -1: no limit.
            packed_capacity: packed rows that each rank can take; -1: no limit. If there is a limit, an overflow is only
                reported, not recorded, since the call will be planned again; `drop` must be False.
            drop: whether to clip to the capacity instead of reporting an overflow.
        """

    def split_by_source(self, source_to_row_start: Tensor, source_to_rows: Tensor, *, rank: int) -> None:
        """Cuts each local expert's rows into the parts that can be computed as the ranks' rows arrive.

        Rows arrive from `rank` itself first, then from rank - 1, rank - 2 and so on, the last rank following rank 0.
        The part of a source needs only rows that have arrived by then. Parts begin at multiples of PART_ROWS,
        counted from the expert's first row, or at its end; together they are all rows.

        Args:
            source_to_row_start: int32 [R + 1, e] of lay_out.
            source_to_rows: int32 [R, 2, e]; first row of each part, and the row past its last.
        """

    def assign_rows(self, topk_idx: Tensor, block_starts: Tensor, plan: PlanIntegers) -> None:
        """Gives every slot of this rank its row: a stable scan in order of token, then k.

        Args:
            topk_idx, block_starts: those of count_slots and send_counts.
            plan: that of lay_out; gets slot_to_row, slot_to_rank and block_tokens.
        """

    def assign_packed_rows(self, plan: PlanIntegers) -> None:
        """Gives every pair of a token and a rank its packed row, and says which row is the primary one: in
        token_to_packed_row and token_to_primary_row of the plan of assign_rows."""
