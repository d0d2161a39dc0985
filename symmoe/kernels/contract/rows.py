"""What moves between ranks and to the device: rows, the words of barriers and signals, addresses and small data.

RowKernels
----------
Rows: push and pull between ranks, copies and sums on one rank.

    N_cap, P_cap  rows and packed rows that the buffers have room for (contract/plan.py says what packed rows are)

Arguments that mean the same everywhere:

* received: what a barrier returned, int64 [R, NUM_PUBLISHED]: column `column` holds, per rank, the arena offset of the
  buffer concerned, or a negative number if the call has failed and nothing may be moved.
* trip: the results of the trip's first barrier, and of its last one or of the wait for a signal; a negative first word
  means that the call has failed.
* x [T, H]: the tokens; out [T, H]: their sums; rows [N_cap, H]: the rows on this rank; rank: this rank.
* Of the plan (control.PlanIntegers): slot_to_row, slot_to_rank, token_to_packed_row, block_tokens, packed_start,
  packed_limit, source_to_packed_start; -1 means none. packed_to_row: int32 [P_cap, K] of index_rows.
* source: the rank whose tokens or rows are complete, and only these are moved; None: all but this rank.

Sums return to rank h in a buffer [R - 1, T_h, H] of it, a region for each peer in the order of ranks: row i of the
region of rank r has the sum of the rows there of the i-th token, in order of tokens, that rank h has sent to rank r.

On GPUs rows are 16-byte aligned and a multiple of 16 bytes long, and so are the offsets; with num_ctas, offsets are
multiples of 256, as those of leases are.

SyncKernels
-----------
The barrier of a group of ranks, and signals from one rank to another.

PointerKernels
--------------
Addresses of tensors, and small data of the host on its way to the device.
"""

from typing import Protocol

import torch
from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.control import Peers

Slots = tuple[Tensor, Tensor, Tensor | None]
Region = tuple[Tensor, Tensor, Tensor, Tensor]


class RowKernels(Protocol):
    @writes("peers")
    def push_rows(
        self,
        x: Tensor,
        token_to_row: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        ranks: range | None = None,
        but: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Writes each token's row to the ranks it goes to: row token_to_row[t, r] of rank r's buffer [., H] = x[t].

        Args:
            token_to_row: int32 [T, R]; -1: the token does not go to that rank.
            ranks: ranks to write to, one after the other; None: all.
            but: a rank of them that gets nothing.
        """

    @writes("peers")
    def push_slots(
        self,
        slots: Slots,
        region: Region,
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
            slots: slot_to_row, slot_to_rank, and probs fp32 [T, K]; None: nothing is written to the probs' buffer.
            region: token_to_packed_row, block_tokens, packed_start, packed_limit.
            row_column, prob_column: the columns of `received`.
        """

    @writes("index")
    def index_rows(
        self,
        wire: tuple[Tensor, Tensor | None],
        packed: tuple[Tensor, Tensor],
        num_rows: Tensor,
        trip: tuple[Tensor, Tensor],
        index: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """Turns the slots that arrived into index tensors of this rank.

        If the call has failed, nothing has arrived: packed_to_row is filled with -1 and row_to_packed_row with 0, so
        that kernels already on their way stay inside their buffers, and row_probs with NaN.

        Args:
            wire: int32 [P_cap, K], row of each slot of a packed row, or -1; fp32 [P_cap, K], the probs of the slots, or
                None, as row_probs.
            packed: int32 [1] each; first packed row that has arrived, and the one past the last.
            num_rows: int32 [1], N.
            index: packed_to_row, gets a copy; row_to_packed_row int32 [N_cap], gets the packed row of each row, and 0
                in the tail, so that all rows can be gathered by it; row_probs fp32 [N_cap] or None, gets the prob of
                each row. The tails of packed_to_row and row_probs stay as they are.
        """

    @writes("rows")
    def replica_rows(
        self,
        x: Tensor,
        slot_to_rank: Tensor,
        slot_to_row: Tensor,
        rows: Tensor,
        received: Tensor,
        *,
        rank: int,
    ) -> None:
        """Writes each token's row to all rows that it has on this rank: rows[slot_to_row[t, k]] = x[t].

        If the call has failed, nothing is written. received: column 0.
        """

    @writes("rows")
    def fan_out(
        self,
        rows: Tensor,
        packed_to_row: Tensor,
        source_to_packed_start: Tensor,
        *,
        rank: int,
        source: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Copies primary rows of `rows` to the secondary rows of other ranks' tokens, in place."""

    @writes("peers")
    def push_sums(
        self,
        rows: Tensor,
        packed_to_row: Tensor,
        source_to_packed_start: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        source: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Sums the rows of each token that another rank has sent, and writes the sums to that rank: fp32, in k order.

        A sum begins with the token's first row: a token with one row sends it as it is. The column after `column` holds
        the offset of the last row of a rank's first region.
        """

    @writes("packed_values")
    def gather_values(
        self, row_values: Tensor, packed_to_row: Tensor, num_packed: Tensor, packed_values: Tensor
    ) -> None:
        """packed_values[p, k] = row_values[packed_to_row[p, k]], 0 where there is no row. fp32 [N_cap] to [P_cap, K].

        num_packed: int32 [1], number of packed rows.
        """

    @writes("out")
    def pull_rows(
        self,
        source_rank: Tensor,
        source_row: Tensor,
        peers: Peers,
        received: Tensor,
        out: Tensor,
        *,
        column: int,
    ) -> None:
        """out[t] = sum over s of row source_row[t, s] of rank source_rank[t, s]: fp32, in order of s.

        If the call has failed, `out` is filled with NaN. source_rank, source_row: int32 [T, S]; -1: nothing to add.
        """

    @writes("out")
    def sum_home(
        self,
        rows: tuple[Tensor, Tensor],
        index: tuple[Tensor, Tensor, Tensor, Tensor],
        trip: tuple[Tensor, Tensor],
        out: Tensor,
        *,
        rank: int,
        num_ctas: int | None = None,
    ) -> None:
        """out[t] = sum over the ranks of the sum of token t's rows there: fp32, in order of the ranks.

        A peer's sum has returned. This rank's sum is made here with the same bits: fp32, in k order, rounded to the
        dtype of `out`. If the call has failed, `out` gets NaN. rows: the rows on this rank; those that have returned,
        [(R - 1) * T, H]. index: token_to_packed_row, packed_start, slot_to_rank, slot_to_row.
        """

    @writes("out")
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


class SyncKernels(Protocol):
    @writes("peers", "received", "status", "nan_on_failure")
    def barrier(
        self,
        peers: Peers,
        words: tuple[int, ...],
        received: Tensor,
        status: Tensor,
        *,
        call: int,
        fault: bool,
        timeout_ns: int,
        nan_on_failure: Tensor | None = None,
    ) -> None:
        """Waits for every rank of the group, at most `timeout_ns`, and exchanges a few words. Collective.

        Args:
            peers: the group's arenas.
            words: NUM_PUBLISHED integers (arena offsets) for the peers.
            received: int64[R, NUM_PUBLISHED], gets every rank's words; all -1 if the call has failed: a rank faulted,
                gave up, did not come or is in another call, or an earlier failure has not been raised yet.
            status: int64[STATUS_WORDS] that the host reads, pinned host memory on GPUs; gets a record of a
                failure if none is pending.
            call: control.pack_call of what the ranks must agree on.
            fault: whether this rank's arguments are wrong, so that no rank may move payload.
            timeout_ns: bound of the wait.
            nan_on_failure: memory of a result; if the call has failed, every bit of it is set, which is NaN in every
                dtype of rows. On GPUs its size is a multiple of 16 bytes.
        """

    @writes("peers")
    def send_signal(self, peers: Peers, rank: int) -> None:
        """Tells `rank` that what this rank has written there since the last barrier is complete; does
        nothing after a failure."""

    @writes("peers", "arrived", "status", "nan_on_failure")
    def wait_for_signal(
        self,
        peers: Peers,
        rank: int,
        arrived: Tensor,
        status: Tensor,
        *,
        phase: int,
        timeout_ns: int,
        nan_on_failure: Tensor | None = None,
    ) -> None:
        """Waits for `rank`'s signal since the last barrier.

        Args:
            arrived: int64 [1], gets 0, or -1 if the call has failed: the signal did not come, a rank gave up, or
                an earlier failure has not been raised yet.
            status, timeout_ns, nan_on_failure: as in barrier.
            phase: the phase (control.PHASE_*), for the record.
        """

    @writes("counts", "progress")
    def count_exchange(self, counts: Tensor, progress: Tensor, *, which: int) -> None:
        """Adds 1 to counts[which], int64[2], and writes it to progress[which], int64[2] that the host reads: pinned
        host memory on GPUs."""

    @writes("fault")
    def receive_fault_flags(self, heard: Tensor, fault: Tensor) -> None:
        """fault, int64[1], becomes at least the largest of heard, int64[N, .]: words of other nodes."""


HostBytes = Tensor | bytes | bytearray | memoryview


class PointerKernels(Protocol):
    @writes("destination")
    def copy_host_to_device(self, source: HostBytes, destination: Tensor) -> None:
        """The first bytes of destination = source; on GPUs without a copy engine, so that graphs can hold the bytes.
        source: contiguous memory of the host, of any size up to that of destination. The caller may change it when the
        call returns."""

    @writes()
    def read_addresses(
        self, tensors: list[Tensor], device: torch.device, *, alignment: int, contiguous: bool
    ) -> bytes | None:
        """The addresses of tensors as native int64; None if one of them is not what it must be.

        Args:
            tensors: any number of tensors, each on `device` and with memory.
            alignment: alignment of their addresses in bytes, a power of two.
            contiguous: whether they must be contiguous.
        """
