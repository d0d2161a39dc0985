"""Rows: push and pull between ranks, copies and sums on one rank.

    N_cap, P_cap  capacities of the buffers, in rows and packed rows (twin/plan.py defines packed rows)

Arguments with the same meaning everywhere:

* received: a barrier's result, int64 [R, NUM_PUBLISHED]: column `column` has, per rank, the arena offset of the buffer,
  or a negative number if the call has failed and no data may be moved.
* trip: the results of the trip's first barrier, and of its last barrier or of the wait for a signal; a negative first
  word means that the call has failed.
* x [T, H]: the tokens; out [T, H]: their sums; rows [N_cap, H]: the rows on this rank; rank: this rank.
* From the plan (control.PlanIntegers): slot_to_row, slot_to_rank, token_to_packed_row, block_tokens, packed_start,
  packed_limit, source_to_packed_start; -1 means none. packed_to_row: int32 [P_cap, K] from index_rows.
* source: the rank whose tokens or rows are complete; only these are moved. None: all ranks but this one.

Sums return to a buffer [R - 1, T_h, H] of rank h, with one region per peer in rank order: row i of rank r's region has
the sum of the rows on rank r of the i-th token, in token order, that rank h has sent to rank r.

On GPUs rows are 16-byte aligned and a multiple of 16 bytes long, and offsets are multiples of 16; with num_ctas,
offsets are multiples of 256, as offsets of leases are.
"""

import torch

from symmoe.kernels.control import Peers
from symmoe.kernels.operands import writes

Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Region = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


_WORD = torch.complex128  # the largest that torch copies as one: 16 bytes


class RowKernels:
    @staticmethod
    @writes("peers")
    def push_rows(
        x: torch.Tensor,
        token_to_row: torch.Tensor,
        peers: Peers,
        received: torch.Tensor,
        *,
        column: int,
        ranks: range | None = None,
        but: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Writes each token's row to its destination ranks: row token_to_row[t, r] of rank r's buffer [., H] = x[t].

        Args:
            token_to_row: int32 [T, R]; -1: the token does not go to that rank.
            ranks: destination ranks in the order of the writes; None: all.
            but: a rank that is excluded.
        """
        offsets = received[:, column].tolist()
        for rank in range(peers.num_ranks) if ranks is None else ranks:
            offset = offsets[rank]
            if offset < 0 or rank == but:
                continue
            tokens, rows = _present(token_to_row[:, rank])
            _put_rows(_rows_at(peers, rank, offset, x), rows, x.index_select(0, tokens))

    @staticmethod
    @writes("peers")
    def push_slots(
        slots: Slots,
        region: Region,
        peers: Peers,
        received: torch.Tensor,
        *,
        row_column: int,
        prob_column: int,
    ) -> None:
        """Writes, for each packed row, the token's rows on that rank and their probs.

        On rank r the packed row's int32 [K] get slot_to_row[t, k] where slot (t, k) lives there, else -1, and its fp32
        [K] get probs[t, k], else 0. Packed rows of this rank's region that no token uses get -1.

        Args:
            slots: slot_to_row, slot_to_rank, and probs fp32 [T, K]; None: the probs' buffer is not written.
            region: token_to_packed_row, block_tokens, packed_start, packed_limit.
            row_column, prob_column: the columns of `received`.
        """
        slot_to_row, slot_to_rank, probs = slots
        token_to_packed_row, _, packed_start, packed_limit = region
        top_k = slot_to_row.shape[1]
        regions = zip(received.tolist(), packed_start.tolist(), packed_limit.tolist(), strict=True)
        for rank, (offsets, start, limit) in enumerate(regions):
            if offsets[row_column] < 0:
                continue
            tokens, _ = _present(token_to_packed_row[:, rank])
            end, used = start + limit, slice(start, start + tokens.numel())
            is_here = slot_to_rank.index_select(0, tokens) == rank
            rows_PK = peers.region(rank, offsets[row_column], (end, top_k), torch.int32)
            rows_PK[used] = slot_to_row.index_select(0, tokens).where(is_here, -1)
            rows_PK[used.stop :] = -1
            if probs is not None:
                values_PK = peers.region(rank, offsets[prob_column], (end, top_k), torch.float32)
                values_PK[used] = probs.index_select(0, tokens).where(is_here, 0)

    @staticmethod
    @writes("index")
    def index_rows(
        wire: tuple[torch.Tensor, torch.Tensor | None],
        packed: tuple[torch.Tensor, torch.Tensor],
        num_rows: torch.Tensor,
        trip: tuple[torch.Tensor, torch.Tensor],
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Converts the slots that arrived to index tensors of this rank.

        If the call has failed, no slots have arrived: packed_to_row is filled with -1 and row_to_packed_row with 0, so
        that kernels that are already queued stay inside their buffers, and row_probs with NaN.

        Args:
            wire: int32 [P_cap, K], row of each slot of a packed row, or -1; fp32 [P_cap, K], the probs of the slots, or
                None, as row_probs.
            packed: int32 [1] each: the first packed row that has arrived, and the end.
            num_rows: int32 [1], N.
            index: packed_to_row, gets a copy; row_to_packed_row int32 [N_cap], gets the packed row of each row, and 0
                in the tail, so that it can gather all rows; row_probs fp32 [N_cap] or None, gets the prob of each row.
                The tails of packed_to_row and row_probs stay unchanged.
        """
        (wire_to_row, wire_probs), (packed_to_row, row_to_packed_row, row_probs) = wire, index
        if _failed(trip):
            packed_to_row.fill_(-1)
            row_to_packed_row.zero_()
            if row_probs is not None:
                row_probs.fill_(float("nan"))
            return
        row_to_packed_row[int(num_rows) :] = 0
        begin, end = map(int, packed)
        arrived_rows = wire_to_row[begin:end]
        packed_to_row[begin:end] = arrived_rows
        slots, rows = _present(arrived_rows.flatten())
        packed_rows = slots.div(wire_to_row.shape[1], rounding_mode="floor") + begin
        row_to_packed_row.index_copy_(0, rows, packed_rows.int())
        if row_probs is not None and wire_probs is not None:
            row_probs.index_copy_(0, rows, wire_probs[begin:end].flatten().index_select(0, slots))

    @staticmethod
    @writes("rows")
    def place_rows(
        x: torch.Tensor,
        slot_to_rank: torch.Tensor,
        slot_to_row: torch.Tensor,
        rows: torch.Tensor,
        received: torch.Tensor,
        *,
        rank: int,
    ) -> None:
        """Writes each token's row to all of its rows on this rank: rows[slot_to_row[t, k]] = x[t].

        If the call has failed, no row is written. received: column 0.
        """
        if int(received[rank, 0]) < 0:
            return
        slots, index = _present(slot_to_row.where(slot_to_rank == rank, -1).flatten())
        tokens = slots // slot_to_row.shape[1]
        _put_rows(rows, index, x.index_select(0, tokens))

    @staticmethod
    @writes("rows")
    def fan_out(
        rows: torch.Tensor,
        packed_to_row: torch.Tensor,
        source_to_packed_start: torch.Tensor,
        *,
        rank: int,
        source: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Copies primary rows of `rows` to the secondary rows of other ranks' tokens, in place."""
        starts = source_to_packed_start.tolist()
        for home in range(len(starts) - 1) if source is None else (source,):
            if home != rank:
                row_PK = packed_to_row[starts[home] : starts[home + 1]]
                primary_PK = _first_rows(row_PK)[:, None].expand_as(row_PK)
                is_secondary_PK = (row_PK >= 0) & (row_PK != primary_PK)
                copied = rows.index_select(0, primary_PK[is_secondary_PK])
                _put_rows(rows, row_PK[is_secondary_PK].long(), copied)

    @staticmethod
    @writes("peers")
    def push_sums(
        rows: torch.Tensor,
        packed_to_row: torch.Tensor,
        source_to_packed_start: torch.Tensor,
        peers: Peers,
        received: torch.Tensor,
        *,
        column: int,
        source: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Sums the rows of each token from another rank, and writes the sums to that rank: fp32, in k order.

        A sum begins with the token's first row: a token with one row sends it unchanged. The column after `column` has
        the offset of the last row of a rank's first region.
        """
        starts, published = source_to_packed_start.tolist(), received.tolist()
        for home in range(peers.num_ranks) if source is None else (source,):
            offset, last_row = published[home][column : column + 2]
            if home == peers.rank or offset < 0:
                continue
            row_bytes = rows.shape[1] * rows.element_size()
            offset += (peers.rank - (peers.rank > home)) * (last_row - offset + row_bytes)
            row_PK = packed_to_row[starts[home] : starts[home + 1]]
            used, first = _present(_first_rows(row_PK))
            total = rows.index_select(0, first).float()
            for row_P in row_PK.index_select(0, used).unbind(1):
                _add_rows(total, rows, (row_P >= 0) & (row_P != first), row_P)
            _put_rows(_rows_at(peers, home, offset, rows), used, total.to(rows.dtype))

    @staticmethod
    @writes("packed_values")
    def gather_values(
        row_values: torch.Tensor,
        packed_to_row: torch.Tensor,
        num_packed: torch.Tensor,
        packed_values: torch.Tensor,
    ) -> None:
        """packed_values[p, k] = row_values[packed_to_row[p, k]], 0 without a row. fp32 [N_cap] to [P_cap, K].

        num_packed: int32 [1], number of packed rows.
        """
        used = slice(int(num_packed))
        index_PK = packed_to_row[used]
        values_PK = row_values.index_select(0, index_PK.clamp(min=0).flatten()).view(index_PK.shape)
        packed_values[used] = values_PK.where(index_PK >= 0, 0)

    @staticmethod
    @writes("out")
    def pull_rows(
        source_rank: torch.Tensor,
        source_row: torch.Tensor,
        peers: Peers,
        received: torch.Tensor,
        out: torch.Tensor,
        *,
        column: int,
    ) -> None:
        """out[t] = sum over s of row source_row[t, s] of rank source_rank[t, s]: fp32, in order of s.

        If the call has failed, `out` is filled with NaN. source_rank, source_row: int32 [T, S]; -1: no addend.
        """
        offsets = received[:, column].tolist()
        if min(offsets) < 0:
            out.fill_(float("nan"))
            return
        buffers = [_rows_at(peers, rank, offset, out) for rank, offset in enumerate(offsets)]
        total_TH = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for ranks, rows in zip(source_rank.unbind(1), source_row.unbind(1), strict=True):
            for rank, buffer in enumerate(buffers):
                _add_rows(total_TH, buffer, (ranks == rank) & (rows >= 0), rows)
        out.copy_(total_TH)

    @staticmethod
    @writes("out")
    def sum_home(
        rows: tuple[torch.Tensor, torch.Tensor],
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        trip: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        *,
        rank: int,
        num_ctas: int | None = None,
    ) -> None:
        """out[t] = sum over the ranks of the sum of token t's rows there: fp32, in order of the ranks.

        Peers' sums have returned. This rank's sum is computed here with the same bits: fp32, in k order, rounded to the
        dtype of `out`. If the call has failed, `out` gets NaN. rows: the rows on this rank; the returned rows, [(R - 1)
        * T, H]. index: token_to_packed_row, packed_start, slot_to_rank, slot_to_row.
        """
        own_rows, returned = rows
        token_to_packed_row, packed_start, slot_to_rank, slot_to_row = index
        if _failed(trip):
            out.fill_(float("nan"))
            return
        total_TH = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for peer, start in enumerate(packed_start.tolist()):
            if peer == rank:
                own_TH = torch.zeros_like(total_TH)
                for ranks, slots in zip(slot_to_rank.unbind(1), slot_to_row.unbind(1), strict=True):
                    _add_rows(own_TH, own_rows, (ranks == rank) & (slots >= 0), slots)
                total_TH += own_TH.to(out.dtype)
            else:
                packed_row_T = token_to_packed_row[:, peer]
                _add_rows(
                    total_TH,
                    returned,
                    packed_row_T >= 0,
                    packed_row_T + ((peer - (peer > rank)) * len(out) - start),
                )
        out.copy_(total_TH)

    @staticmethod
    @writes("out")
    def pull_values(
        slot_to_rank: torch.Tensor,
        token_to_packed_row: torch.Tensor,
        peers: Peers,
        received: torch.Tensor,
        out: torch.Tensor,
        *,
        column: int,
    ) -> None:
        """out[t, k] = packed_values[p, k] of the rank that slot (t, k) went to; p is the token's packed row there.

        0 for no expert. If the call has failed, `out` fp32 [T, K] is filled with NaN.
        """
        offsets = received[:, column].tolist()
        if min(offsets) < 0:
            out.fill_(float("nan"))
            return
        out.zero_()
        for rank, offset in enumerate(offsets):
            values = _rows_at(peers, rank, offset, out).index_select(
                0, token_to_packed_row[:, rank].clamp(min=0)
            )
            torch.where(slot_to_rank == rank, values, out, out=out)


def _failed(trip: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the trip's barriers report that the call has failed."""
    first, last = trip
    return int(first.flatten()[0]) < 0 or int(last.flatten()[0]) < 0


def _add_rows(
    total: torch.Tensor, buffer: torch.Tensor, has_row: torch.Tensor, rows: torch.Tensor
) -> None:
    """total[t] += buffer[rows[t]] in fp32, for every token t with has_row."""
    tokens = has_row.nonzero().squeeze(1)
    total.index_add_(0, tokens, buffer.index_select(0, rows.index_select(0, tokens)).float())


def _present(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places where index [n] is not -1, and its values there: two int64 vectors."""
    where = (index >= 0).nonzero().squeeze(1)
    return where, index.index_select(0, where).long()


def _rows_at(peers: Peers, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """[., H]: a rank's arena from an offset on, as rows with the width and dtype of `like`, as many as fit."""
    num_rows = (peers.views[rank].numel() - offset) // (like.shape[1] * like.element_size())
    return peers.region(rank, offset, (num_rows, like.shape[1]), like.dtype)


def _put_rows(rows: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """rows[index] = values, [., width] each; rows are distinct. torch copies words, the largest possible."""
    row_bytes = values.shape[1] * values.element_size()
    if (
        rows.is_contiguous()
        and row_bytes % _WORD.itemsize == 0
        and rows.data_ptr() % _WORD.itemsize == 0
    ):
        rows, values = rows.view(_WORD), values.view(_WORD)
    rows.index_copy_(0, index, values)


def _first_rows(packed_to_row: torch.Tensor) -> torch.Tensor:
    """The row of the smallest k of each packed row; -1 without rows."""
    first = (packed_to_row >= 0).int().argmax(1, keepdim=True)
    return packed_to_row.gather(1, first).squeeze(1)
