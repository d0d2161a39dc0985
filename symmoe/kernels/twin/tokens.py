"""Twins of contract/rows.py."""

import torch

from symmoe.kernels.control import Peers

_WORD = torch.complex128  # the largest that torch copies as one: 16 bytes


def push_rows(x, token_to_row, peers, received, *, column, ranks=None, but=None, num_ctas=None):
    offsets = received[:, column].tolist()
    for rank in range(peers.num_ranks) if ranks is None else ranks:
        offset = offsets[rank]
        if offset < 0 or rank == but:
            continue
        tokens, rows = _present(token_to_row[:, rank])
        _put_rows(_rows_at(peers, rank, offset, x), rows, x.index_select(0, tokens))


def push_slots(slots, region, peers, received, *, row_column, prob_column):
    slot_to_row, slot_to_rank, probs = slots
    token_to_packed_row, _, packed_start, packed_limit = region
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
        rows[used.stop :] = -1
        if probs is not None:
            values = peers.region(rank, offsets[prob_column], (end, top_k), torch.float32)
            values[used] = probs.index_select(0, tokens).where(here, 0)


def index_rows(wire, packed, num_rows, trip, index):
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
    if row_probs is not None:
        row_probs.index_copy_(0, rows, wire_probs[begin:end].flatten().index_select(0, slots))


def replica_rows(x, slot_to_rank, slot_to_row, rows, received, *, rank):
    if int(received[rank, 0]) < 0:
        return
    for ranks, places in zip(slot_to_rank.unbind(1), slot_to_row.unbind(1), strict=True):
        tokens, index = _present(places.where(ranks == rank, -1))
        _put_rows(rows, index, x.index_select(0, tokens))


def fan_out(rows, packed_to_row, source_to_packed_start, *, rank, source=None, num_ctas=None):
    starts = source_to_packed_start.tolist()
    for each in range(len(starts) - 1) if source is None else (source,):
        if each != rank:
            primary, others = _primary_and_others(packed_to_row[starts[each] : starts[each + 1]])
            for which, secondary in others:
                _put_rows(rows, secondary, rows.index_select(0, primary.index_select(0, which)))


def push_sums(
    rows,
    packed_to_row,
    source_to_packed_start,
    peers,
    received,
    *,
    column,
    source=None,
    num_ctas=None,
):
    starts, published = source_to_packed_start.tolist(), received.tolist()
    for home in range(peers.num_ranks) if source is None else (source,):
        offset, last_row = published[home][column : column + 2]
        if home == peers.rank or offset < 0:
            continue
        row_bytes = rows.shape[1] * rows.element_size()
        offset += (peers.rank - (peers.rank > home)) * (last_row - offset + row_bytes)
        index = packed_to_row[starts[home] : starts[home + 1]]
        used, first = _present(_first_rows(index))
        total = rows.index_select(0, first).float()
        for which, secondary in _secondary_rows(index.index_select(0, used)):
            total.index_add_(0, which, rows.index_select(0, secondary).float())
        _put_rows(_rows_at(peers, home, offset, rows), used, total.to(rows.dtype))


def gather_values(row_values, packed_to_row, num_packed, packed_values):
    used = slice(int(num_packed))
    index = packed_to_row[used]
    values = row_values.index_select(0, index.clamp(min=0).flatten()).view(index.shape)
    packed_values[used] = values.where(index >= 0, 0)


def pull_rows(source_rank, source_row, peers, received, out, *, column):
    offsets = received[:, column].tolist()
    if any(offset < 0 for offset in offsets):
        out.fill_(float("nan"))
        return
    buffers = [_rows_at(peers, rank, offset, out) for rank, offset in enumerate(offsets)]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for ranks, rows in zip(source_rank.unbind(1), source_row.unbind(1), strict=True):
        for rank, buffer in enumerate(buffers):
            _add_rows(total, buffer, (ranks == rank) & (rows >= 0), rows)
    out.copy_(total)


def sum_home(rows, index, trip, out, *, rank, num_ctas=None):
    (rows, returned), (token_to_packed_row, packed_start, slot_to_rank, slot_to_row) = rows, index
    if _failed(trip):
        out.fill_(float("nan"))
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for peer, start in enumerate(packed_start.tolist()):
        if peer == rank:
            own = torch.zeros_like(total)
            for ranks, slots in zip(slot_to_rank.unbind(1), slot_to_row.unbind(1), strict=True):
                _add_rows(own, rows, (ranks == rank) & (slots >= 0), slots)
            total += own.to(out.dtype)
        else:
            packed = token_to_packed_row[:, peer]
            _add_rows(
                total, returned, packed >= 0, packed + ((peer - (peer > rank)) * len(out) - start)
            )
    out.copy_(total)


def pull_values(slot_to_rank, token_to_packed_row, peers, received, out, *, column):
    offsets = received[:, column].tolist()
    if any(offset < 0 for offset in offsets):
        out.fill_(float("nan"))
        return
    out.zero_()
    for rank, offset in enumerate(offsets):
        values = _rows_at(peers, rank, offset, out).index_select(
            0, token_to_packed_row[:, rank].clamp(min=0)
        )
        torch.where(slot_to_rank == rank, values, out, out=out)


def _failed(trip: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the trip's barriers say that the call has failed."""
    return min(int(words.flatten()[0]) for words in trip) < 0


def _add_rows(
    total: torch.Tensor, buffer: torch.Tensor, has_row: torch.Tensor, rows: torch.Tensor
) -> None:
    """total[t] += buffer[rows[t]] in fp32, for every token t of has_row."""
    tokens = has_row.nonzero().squeeze(1)
    total.index_add_(0, tokens, buffer.index_select(0, rows.index_select(0, tokens)).float())


def _present(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places where index [n] is not -1, and its values there: two int64 vectors."""
    where = (index >= 0).nonzero().squeeze(1)
    return where, index.index_select(0, where).long()


def _rows_at(peers: Peers, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """[., H]: the arena of a rank from an offset on, as rows of the shape and dtype of `like`: as many as fit."""
    num_rows = (peers.views[rank].numel() - offset) // (like.shape[1] * like.element_size())
    return peers.region(rank, offset, (num_rows, like.shape[1]), like.dtype)


def _put_rows(rows: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """rows[index] = values, [., width] each; no row twice. torch copies word by word, with large words if possible."""
    if index.numel() == 0:
        return
    row_bytes = values.shape[1] * values.element_size()
    if (
        rows.is_contiguous()
        and row_bytes % _WORD.itemsize == 0
        and rows.data_ptr() % _WORD.itemsize == 0
    ):
        rows, values = rows.view(_WORD), values.view(_WORD)
    rows.index_copy_(0, index, values)


def _primary_and_others(
    packed_to_row: torch.Tensor,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Primary rows of the packed rows that have more than one row, and what _secondary_rows says of these. int64."""
    several = ((packed_to_row >= 0).sum(1) > 1).nonzero().squeeze(1)
    index = packed_to_row.index_select(0, several)
    return _first_rows(index).long(), _secondary_rows(index)


def _first_rows(packed_to_row: torch.Tensor) -> torch.Tensor:
    """The row of the smallest k of each packed row; -1 without rows."""
    first = (packed_to_row >= 0).int().argmax(1, keepdim=True)
    return packed_to_row.gather(1, first).squeeze(1)


def _secondary_rows(packed_to_row: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per k > 0, the packed rows that have a row there which is not their first, and that row. int64."""
    first = (packed_to_row >= 0).int().argmax(1, keepdim=True)
    return [_present(column) for column in packed_to_row.scatter(1, first, -1).unbind(1)[1:]]
