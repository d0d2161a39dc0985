"""Rows: push and pull between ranks, copies and sums on one rank.

    N_cap, P_cap  rows and packed rows that the buffers have room for (contract/plan.py says what packed rows are)

`received` is what a barrier returned, int64 [R, NUM_PUBLISHED]: column `column` holds, per rank, the arena offset of
the buffer concerned, or a negative number if the call has failed and nothing may be moved. `columns` are the first
feature that is read and written, and the one past the last; None: all.

On GPUs rows are 16-byte aligned and a multiple of 16 bytes long, and so are the offsets; with num_ctas, offsets are
multiples of 256, as those of leases are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from symmoe.kernels.control import Peers


class RowKernels(Protocol):
    def push_rows(
        self,
        x: Tensor,
        token_to_row: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        ranks: range | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Writes each token's row to the ranks it goes to: row token_to_row[t, r] of rank r's buffer [., H] = x[t].

        Args:
            x: [T, H].
            token_to_row: int32 [T, R]; -1: the token does not go to that rank.
            ranks: ranks to write to, one after the other; None: all.
        """

    def push_slots(
        self,
        slot_to_row: Tensor,
        slot_to_rank: Tensor,
        probs: Tensor | None,
        token_to_packed_row: Tensor,
        block_tokens: Tensor,
        packed_start: Tensor,
        packed_limit: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        row_column: int,
        prob_column: int,
    ) -> None:
        """Writes, for each packed row, the rows of the token on that rank and their probs.

        On rank r the packed row's int32 [K] get slot_to_row[t, k] where slot (t, k) lives there, else -1, and its fp32
        [K] get probs[t, k], else 0. Packed rows of this rank's region that no token uses get -1.

        Args:
            slot_to_row, slot_to_rank, token_to_packed_row, block_tokens, packed_start, packed_limit: as in Plan.
            probs: fp32 [T, K]; None: nothing is written to the probs' buffer.
            row_column, prob_column: the columns of `received`.
        """

    def index_rows(
        self,
        wire_to_row: Tensor,
        wire_probs: Tensor | None,
        packed_begin: Tensor,
        packed_end: Tensor,
        ready: Tensor,
        arrived: Tensor,
        packed_to_row: Tensor,
        row_to_packed_row: Tensor,
        row_probs: Tensor | None,
    ) -> None:
        """Turns the slots that arrived into index tensors of this rank.

        If the call has failed, nothing has arrived: `packed_to_row` is filled with -1 and `row_to_packed_row` with 0,
        so that kernels already on their way stay inside their buffers, and `row_probs` with NaN.

        Args:
            wire_to_row: int32 [P_cap, K]; row of each slot of a packed row, or -1.
            wire_probs: fp32 [P_cap, K], the probs of the slots, or None.
            packed_begin, packed_end: int32 [1]; first packed row that has arrived, and the one past the last.
            ready, arrived: results of the trip's barriers, or of the wait for a signal; a negative first word means
                that the call has failed.
            packed_to_row: int32 [P_cap, K], gets a copy.
            row_to_packed_row: int32 [N_cap], gets the packed row of each row; the tail stays as it is.
            row_probs: fp32 [N_cap] or None, gets the prob of each row; the tail stays as it is.
        """

    def fan_out(
        self,
        rows: Tensor,
        packed_to_row: Tensor,
        packed_begin: Tensor,
        packed_end: Tensor,
        *,
        num_ctas: int | None = None,
    ) -> None:
        """Copies primary rows of `rows` [N_cap, H] to the tokens' secondary rows, in place.

        Args:
            packed_to_row: int32 [P_cap, K] of index_rows.
            packed_begin, packed_end: int32 [1]; first packed row of the tokens, and the one past the last.
        """

    def pre_reduce(
        self,
        rows: Tensor,
        packed_to_row: Tensor,
        source_to_packed_start: Tensor,
        *,
        rank: int,
        columns: tuple[int, int] | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Sums the rows of each token that another rank has sent into its primary row: fp32, in k order, in place.

        A token's sum begins with the primary row; a token without secondary rows stays as it is.

        Args:
            rows: [N_cap, H].
            packed_to_row: int32 [P_cap, K] of index_rows.
            source_to_packed_start: int32 [R + 1] of lay_out.
            rank: this rank; rows of its tokens stay as they are, because pull_sums sums them.
        """

    def gather_values(
        self, row_values: Tensor, packed_to_row: Tensor, num_packed: Tensor, packed_values: Tensor
    ) -> None:
        """packed_values[p, k] = row_values[packed_to_row[p, k]], 0 where there is no row. fp32 [N_cap] to [P_cap, K].

        num_packed: int32 [1], number of packed rows.
        """

    def pull_rows(
        self,
        source_rank: Tensor,
        source_row: Tensor,
        peers: Peers,
        received: Tensor,
        out: Tensor,
        *,
        column: int,
        columns: tuple[int, int] | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """out[t] = sum over s of row source_row[t, s] of rank source_rank[t, s]: fp32, in order of s.

        If the call has failed, `out` is filled with NaN.

        Args:
            source_rank, source_row: int32 [T, S]; -1: nothing to add.
            out: [T, H].
        """

    def pull_sums(
        self,
        token_to_primary_row: Tensor,
        slot_to_rank: Tensor,
        slot_to_row: Tensor,
        peers: Peers,
        received: Tensor,
        out: Tensor,
        *,
        column: int,
        columns: tuple[int, int] | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """out[t] = sum over the ranks of the sum of token t's rows there: fp32, in order of the ranks.

        A peer's sum has been made by pre_reduce and is read from the primary row. This rank's sum is made here with
        the same bits: fp32, in k order, rounded to the dtype of `out`. If the call has failed, `out` gets NaN.

        Args:
            token_to_primary_row: int32 [T, R]; -1: the token has no row there.
            slot_to_rank, slot_to_row: int32 [T, K]; -1 for no expert.
            out: [T, H].
        """

    def pull_values(
        self,
        slot_to_rank: Tensor,
        token_to_packed_row: Tensor,
        peers: Peers,
        received: Tensor,
        out: Tensor,
        *,
        column: int,
    ) -> None:
        """out[t, k] = packed_values[p, k] of the rank that slot (t, k) went to, p the token's packed row there.

        0 for no expert. If the call has failed, `out` fp32 [T, K] is filled with NaN.
        """
