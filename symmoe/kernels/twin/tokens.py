"""Twins of the kernels that move rows: push and pull over the wire, fan-out and pre-reduce on one rank.

`received` is what a barrier returned, int64 [R, NUM_PUBLISHED]: column `column` holds, per rank, the arena offset of
the buffer concerned, or a negative number if the call has failed and nothing may be moved.
P_cap and N_cap are the sizes of the buffers; `num_packed` int32 [1] on the device says how many packed rows there are.
"""

from __future__ import annotations

import torch

from symmoe.kernels.control import Peers

_WORD = torch.complex128  # the largest that torch copies as one: 16 bytes


def push_rows(
    x: torch.Tensor,
    token_to_row: torch.Tensor,
    peers: Peers,
    received: torch.Tensor,
    *,
    column: int,
    ranks: range | None = None,
    num_ctas: int | None = None,
) -> None:
    """Writes each token's row to the ranks it goes to: peer's buffer [., H] row `token_to_row[t, r]` = x[t].

    Args:
        x: [T, H].
        token_to_row: int32 [T, R]; -1: the token does not go to that rank.
        ranks: that are written to, one after the other; None: all.
        num_ctas: of kernels; here and below the twin has no use for it.
    """
    offsets = received[:, column].tolist()
    for rank in range(peers.num_ranks) if ranks is None else ranks:
        offset = offsets[rank]
        if offset < 0:
            continue
        tokens, rows = _present(token_to_row[:, rank])
        _put_rows(_rows_at(peers, rank, offset, x), rows, x.index_select(0, tokens))


def push_slots(
    slot_to_row: torch.Tensor,
    slot_to_rank: torch.Tensor,
    probs: torch.Tensor | None,
    token_to_packed_row: torch.Tensor,
    block_tokens: torch.Tensor,
    packed_start: torch.Tensor,
    packed_limit: torch.Tensor,
    peers: Peers,
    received: torch.Tensor,
    *,
    row_column: int,
    prob_column: int,
) -> None:
    """Writes, beside each packed row, the rows of the token on that rank and their probs.

    On rank r, `packed_to_row[p, k]` gets slot_to_row[t, k] if slot (t, k) lives there, else -1, and
    `packed_probs[p, k]` gets probs[t, k] (0 elsewhere). Packed rows of this rank's region that no token uses get -1.

    Args:
        probs: fp32 [T, K] or None (nothing is written to the probs' buffer).
        packed_start, packed_limit: int32 [R], this rank's region on each rank.
    """
    top_k = slot_to_row.shape[1]
    regions = zip(received.tolist(), packed_start.tolist(), packed_limit.tolist(), strict=True)
    for rank, (offsets, start, limit) in enumerate(regions):
        if offsets[row_column] < 0:
            continue
        tokens, _ = _present(token_to_packed_row[:, rank])
        end, used = start + limit, slice(start, start + tokens.numel())
        here = slot_to_rank.index_select(0, tokens) == rank
        rows = peers.region(rank, offsets[row_column], (end, top_k), torch.int32)
        rows[used] = slot_to_row.index_select(0, tokens).where(here, -1)
        if used.stop < end:
            rows[used.stop :] = -1
        if probs is not None:
            values = peers.region(rank, offsets[prob_column], (end, top_k), torch.float32)
            values[used] = probs.index_select(0, tokens).where(here, 0)


def index_rows(
    wire_to_row: torch.Tensor,
    wire_probs: torch.Tensor | None,
    packed_begin: torch.Tensor,
    packed_end: torch.Tensor,
    ready: torch.Tensor,
    arrived: torch.Tensor,
    packed_to_row: torch.Tensor,
    row_to_packed_row: torch.Tensor,
    row_probs: torch.Tensor | None,
) -> None:
    """Turns the slots that arrived into index tensors of this rank's own.

    If the call has failed, nothing has arrived: `packed_to_row` is filled with -1 and `row_to_packed_row` with 0, so
    that kernels already on their way stay inside their buffers, and `row_probs` with NaN.

    Args:
        packed_begin, packed_end: int32 [1]; the packed rows that have arrived.
        ready, arrived: what the trip's barriers, or the wait for a signal, returned; a negative first word means that
            the call has failed.
        wire_to_row: int32 [P_cap, K]; row of each slot of a packed row, or -1.
        wire_probs: fp32 [P_cap, K] or None.
        packed_to_row: int32 [P_cap, K], gets a copy.
        row_to_packed_row: int32 [N_cap], gets the packed row of each row; the tail stays as it is.
        row_probs: fp32 [N_cap] or None, gets the prob of each row; the tail stays as it is.
    """
    if min(int(ready.flatten()[0]), int(arrived.flatten()[0])) < 0:
        packed_to_row.fill_(-1)
        row_to_packed_row.zero_()
        if row_probs is not None and wire_probs is not None:
            row_probs.fill_(float("nan"))
        return
    begin, end = int(packed_begin), int(packed_end)
    arrived_rows = wire_to_row[begin:end]
    packed_to_row[begin:end] = arrived_rows
    slots, rows = _present(arrived_rows.flatten())
    packed = slots.div(wire_to_row.shape[1], rounding_mode="floor") + begin
    row_to_packed_row.index_copy_(0, rows, packed.int())
    if row_probs is not None and wire_probs is not None:
        row_probs.index_copy_(0, rows, wire_probs[begin:end].flatten().index_select(0, slots))


def fan_out(
    rows: torch.Tensor,
    packed_to_row: torch.Tensor,
    packed_begin: torch.Tensor,
    packed_end: torch.Tensor,
    *,
    num_ctas: int | None = None,
) -> None:
    """Copies primary rows of `rows` [N_cap, H] to the tokens' secondary rows, in place.

    Args:
        packed_begin, packed_end: int32 [1]; the packed rows whose tokens are meant.
    """
    primary, others = _primary_and_others(packed_to_row[int(packed_begin) : int(packed_end)])
    for which, secondary in others:
        _put_rows(rows, secondary, rows.index_select(0, primary.index_select(0, which)))


def pre_reduce(
    rows: torch.Tensor,
    packed_to_row: torch.Tensor,
    source_to_packed_start: torch.Tensor,
    *,
    rank: int,
    columns: tuple[int, int] | None = None,
    num_ctas: int | None = None,
) -> None:
    """Sums the rows of each token that another rank has sent into its primary row: fp32, in k order, in place.

    A token's rows are summed from the primary row on, and one that has no other row is left alone.

    Args:
        rows: [N_cap, H].
        source_to_packed_start: int32 [R + 1]; where the packed rows of each rank's tokens start, the last is P.
        rank: whose tokens' rows are left alone: this one, which pull_sums sums itself.
        columns: first column that is summed and the one past the last; None: all.
    """
    starts = source_to_packed_start.tolist()
    begin, end, num_packed = starts[rank], starts[rank + 1], starts[-1]
    primary, others = _primary_and_others(torch.cat([packed_to_row[:begin], packed_to_row[end:num_packed]]))
    rows = rows[:, slice(*columns or (None,))]
    total = rows.index_select(0, primary).float()
    for which, secondary in others:
        total.index_add_(0, which, rows.index_select(0, secondary).float())
    _put_rows(rows, primary, total.to(rows.dtype))


def gather_values(
    row_values: torch.Tensor,
    packed_to_row: torch.Tensor,
    num_packed: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """packed_values[p, k] = row_values[packed_to_row[p, k]], 0 where there is no row. fp32 [N_cap] to [P_cap, K]."""
    used = slice(int(num_packed))
    index = packed_to_row[used]
    values = row_values.index_select(0, index.clamp(min=0).flatten()).view(index.shape)
    packed_values[used] = values.where(index >= 0, 0)


def pull_rows(
    source_rank: torch.Tensor,
    source_row: torch.Tensor,
    peers: Peers,
    received: torch.Tensor,
    out: torch.Tensor,
    *,
    column: int,
    columns: tuple[int, int] | None = None,
    num_ctas: int | None = None,
) -> None:
    """out[t] = sum over s of row `source_row[t, s]` of rank `source_rank[t, s]`: fp32, in order of s.

    If the call has failed, `out` is filled with NaN.

    Args:
        source_rank, source_row: int32 [T, S]; -1: nothing to add.
        out: [T, H].
        columns: first column of `out` that is written and the one past the last; None: all.
    """
    panel, offsets = slice(*columns or (None,)), received[:, column].tolist()
    if any(offset < 0 for offset in offsets):
        out[:, panel] = float("nan")
        return
    buffers = [_rows_at(peers, rank, offset, out)[:, panel] for rank, offset in enumerate(offsets)]
    total = torch.zeros(out[:, panel].shape, dtype=torch.float32, device=out.device)
    for ranks, rows in zip(source_rank.unbind(1), source_row.unbind(1), strict=True):
        for rank, buffer in enumerate(buffers):
            _add_rows(total, buffer, (ranks == rank) & (rows >= 0), rows)
    out[:, panel] = total


def pull_sums(
    token_to_primary_row: torch.Tensor,
    slot_to_rank: torch.Tensor,
    slot_to_row: torch.Tensor,
    peers: Peers,
    received: torch.Tensor,
    out: torch.Tensor,
    *,
    column: int,
    columns: tuple[int, int] | None = None,
    num_ctas: int | None = None,
) -> None:
    """out[t] = sum over the ranks of the sum of token t's rows there: fp32, in order of the ranks.

    A peer's sum has been made by pre_reduce and is read from the primary row. This rank's own is made here, of the
    same bits: fp32, in k order, rounded to the dtype of `out`. If the call has failed, `out` is filled with NaN.

    Args:
        token_to_primary_row: int32 [T, R]; -1: the token has no row there.
        slot_to_rank, slot_to_row: int32 [T, K]; -1 for no expert.
        out: [T, H].
        columns: first column of `out` that is written and the one past the last; None: all.
    """
    panel, offsets = slice(*columns or (None,)), received[:, column].tolist()
    if any(offset < 0 for offset in offsets):
        out[:, panel] = float("nan")
        return
    total = torch.zeros(out[:, panel].shape, dtype=torch.float32, device=out.device)
    for rank, offset in enumerate(offsets):
        buffer = _rows_at(peers, rank, offset, out)[:, panel]
        if rank == peers.rank:
            own = torch.zeros_like(total)
            for ranks, rows in zip(slot_to_rank.unbind(1), slot_to_row.unbind(1), strict=True):
                _add_rows(own, buffer, (ranks == rank) & (rows >= 0), rows)
            total += own.to(out.dtype)
        else:
            rows = token_to_primary_row[:, rank]
            _add_rows(total, buffer, rows >= 0, rows)
    out[:, panel] = total


def pull_values(
    slot_to_rank: torch.Tensor,
    token_to_packed_row: torch.Tensor,
    peers: Peers,
    received: torch.Tensor,
    out: torch.Tensor,
    *,
    column: int,
) -> None:
    """out[t, k] = packed_values[token's packed row, k] of the rank that slot (t, k) went to; 0 for no expert.

    If the call has failed, `out` is filled with NaN.
    """
    offsets = received[:, column].tolist()
    if any(offset < 0 for offset in offsets):
        out.fill_(float("nan"))
        return
    out.zero_()
    for rank, offset in enumerate(offsets):
        buffer = _rows_at(peers, rank, offset, out)
        values = buffer.index_select(0, token_to_packed_row[:, rank].clamp(min=0))
        torch.where(slot_to_rank == rank, values, out, out=out)


def _add_rows(total: torch.Tensor, buffer: torch.Tensor, has_row: torch.Tensor, rows: torch.Tensor) -> None:
    """total[t] += buffer[rows[t]] in fp32, for every token t of has_row."""
    tokens = has_row.nonzero().squeeze(1)
    total.index_add_(0, tokens, buffer.index_select(0, rows.index_select(0, tokens)).float())


def _present(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where index [n] is not -1, and what it is there: two int64 vectors."""
    where = (index >= 0).nonzero().squeeze(1)
    return where, index.index_select(0, where).long()


def _rows_at(peers: Peers, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """[., H]: what lies at and past an offset of a rank's arena, as rows like these: as many as fit."""
    num_rows = (peers.views[rank].numel() - offset) // (like.shape[1] * like.element_size())
    return peers.region(rank, offset, (num_rows, like.shape[1]), like.dtype)


def _put_rows(rows: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """rows[index] = values, [., width] each; no row twice. torch does that word by word: in large words if it can."""
    if index.numel() == 0:
        return
    row_bytes = values.shape[1] * values.element_size()
    if rows.is_contiguous() and row_bytes % _WORD.itemsize == 0 and rows.data_ptr() % _WORD.itemsize == 0:
        rows, values = rows.view(_WORD), values.view(_WORD)
    rows.index_copy_(0, index, values)


def _primary_and_others(packed_to_row: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Primary rows of the packed rows that have more than one row; per k > 0, which have a secondary row, and it.

    All int64. What has one row only has nothing to copy or to add.
    """
    several = ((packed_to_row >= 0).sum(1) > 1).nonzero().squeeze(1)
    index = packed_to_row.index_select(0, several)
    first = (index >= 0).int().argmax(1, keepdim=True)
    primary = index.gather(1, first).squeeze(1).long()
    secondary = index.scatter(1, first, -1)
    return primary, [_present(column) for column in secondary.unbind(1)[1:]]  # with the smallest k it is primary
