"""Twins of the kernels that move rows: push and pull over the wire, fan-out and pre-reduce on one rank.

`received` is what a barrier returned, int64 [R, NUM_PUBLISHED]: column `column` holds, per rank, the arena offset of
the buffer concerned, or a negative number if the call has failed and nothing may be moved.
P_cap and N_cap are the sizes of the buffers; `num_packed` int32 [1] on the device says how many packed rows there are.
"""

from __future__ import annotations

import torch

from symmoe.kernels.control import Peers


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
    for rank in range(peers.num_ranks) if ranks is None else ranks:
        offset = int(received[rank, column])
        tokens = (token_to_row[:, rank] >= 0).nonzero().flatten()
        if offset < 0 or tokens.numel() == 0:
            continue
        rows = token_to_row[tokens, rank].long()
        buffer = peers.region(rank, offset, (int(rows.max()) + 1, x.shape[1]), x.dtype)
        buffer[rows] = x[tokens]


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
    for rank in range(peers.num_ranks):
        if int(received[rank, row_column]) < 0:
            continue
        start, size = int(packed_start[rank]), int(packed_limit[rank])
        tokens = (token_to_packed_row[:, rank] >= 0).nonzero().flatten()
        here = slot_to_rank[tokens] == rank
        shape = (start + size, top_k)
        rows = peers.region(rank, int(received[rank, row_column]), shape, torch.int32)[start:]
        rows[: tokens.numel()] = slot_to_row[tokens].where(here, -1)
        rows[tokens.numel() :] = -1
        if probs is not None:
            values = peers.region(rank, int(received[rank, prob_column]), shape, torch.float32)[start:]
            values[: tokens.numel()] = probs[tokens].where(here, 0)


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
    packed_to_row[begin:end] = wire_to_row[begin:end]
    packed, slot = (wire_to_row[begin:end] >= 0).nonzero(as_tuple=True)
    packed += begin
    rows = wire_to_row[packed, slot].long()
    row_to_packed_row[rows] = packed.int()
    if row_probs is not None and wire_probs is not None:
        row_probs[rows] = wire_probs[packed, slot]


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
    for secondary in others:
        has = secondary >= 0
        rows[secondary[has]] = rows[primary[has]]


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
    begin, end, num_packed = source_to_packed_start[[rank, rank + 1, -1]].tolist()
    primary, others = _primary_and_others(torch.cat([packed_to_row[:begin], packed_to_row[end:num_packed]]))
    rows = rows[:, slice(*columns or (None,))]
    several = torch.zeros_like(primary, dtype=torch.bool)
    for secondary in others:
        several |= secondary >= 0
    primary = primary[several]
    total = rows[primary].float()
    for secondary in others:
        secondary = secondary[several]
        has = secondary >= 0
        total[has] += rows[secondary[has]].float()
    rows[primary] = total.to(rows.dtype)


def gather_values(
    row_values: torch.Tensor,
    packed_to_row: torch.Tensor,
    num_packed: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """packed_values[p, k] = row_values[packed_to_row[p, k]], 0 where there is no row. fp32 [N_cap] to [P_cap, K]."""
    index = packed_to_row[: int(num_packed)].long()
    packed_values[: int(num_packed)] = row_values[index.clamp(min=0)].where(index >= 0, 0)


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
    panel = slice(*columns or (None,))
    if received.numel() and int(received[:, column].min()) < 0:
        out[:, panel] = float("nan")
        return
    total = torch.zeros(out[:, panel].shape, dtype=torch.float32, device=out.device)
    for s in range(source_row.shape[1]):
        for rank in range(peers.num_ranks):
            rows = source_row[:, s].where(source_rank[:, s] == rank, -1)
            _add_rows(total, rows, peers, rank, int(received[rank, column]), out, panel)
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
    panel = slice(*columns or (None,))
    if received.numel() and int(received[:, column].min()) < 0:
        out[:, panel] = float("nan")
        return
    total = torch.zeros(out[:, panel].shape, dtype=torch.float32, device=out.device)
    for rank in range(peers.num_ranks):
        offset = int(received[rank, column])
        if rank == peers.rank:
            own = torch.zeros_like(total)
            for k in range(slot_to_row.shape[1]):
                rows = slot_to_row[:, k].where(slot_to_rank[:, k] == rank, -1)
                _add_rows(own, rows, peers, rank, offset, out, panel)
            total += own.to(out.dtype)
        else:
            _add_rows(total, token_to_primary_row[:, rank], peers, rank, offset, out, panel)
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
    if received.numel() and int(received[:, column].min()) < 0:
        out.fill_(float("nan"))
        return
    out.zero_()
    for rank in range(peers.num_ranks):
        tokens = (token_to_packed_row[:, rank] >= 0).nonzero().flatten()
        if tokens.numel() == 0:
            continue
        packed = token_to_packed_row[tokens, rank].long()
        shape = (int(packed.max()) + 1, out.shape[1])
        values = peers.region(rank, int(received[rank, column]), shape, torch.float32)[packed]
        out[tokens] = values.where(slot_to_rank[tokens] == rank, out[tokens])


def _add_rows(
    total: torch.Tensor, rows: torch.Tensor, peers: Peers, rank: int, offset: int, out: torch.Tensor, panel: slice
) -> None:
    """total[t] += row `rows[t]` of rank `rank`'s buffer at `offset`, of the width and dtype of `out`; -1: nothing."""
    tokens = (rows >= 0).nonzero().flatten()
    if tokens.numel():
        index = rows[tokens].long()
        buffer = peers.region(rank, offset, (int(index.max()) + 1, out.shape[1]), out.dtype)
        total[tokens] += buffer[index, panel].float()


def _primary_and_others(packed_to_row: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Primary row of each packed row that is used, and, per k, its secondary rows (-1 for none)."""
    index = packed_to_row.long()
    index = index[(index >= 0).any(1)]
    first = (index >= 0).int().argmax(1, keepdim=True)
    primary = index.gather(1, first)[:, 0]
    columns = torch.arange(index.shape[1], device=index.device)
    secondary = index.where(columns != first, -1)
    return primary, list(secondary.unbind(1))
