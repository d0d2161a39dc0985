"""A dumb oracle for the plan, dispatch, combine and the layer. It shares no code with the package. Loops over slots,
numpy bit patterns, float64, and stock collectives. Slow on purpose: nobody should have to doubt it.

T tokens of a rank, H hidden, I ffn, E experts, K slots per token, R ranks. A slot is (source rank, token, k)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

Slot = tuple[int, int, int]


# -- what all ranks hold ----------------------------------------------------------------------------------------------
def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Every rank's tensor, on the CPU; the first dimension may differ from rank to rank. Collective."""
    tensor = tensor.detach().cpu().contiguous()
    num_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([tensor.shape[0]]), group=group)
    sizes = [int(size) for size in sizes]
    row_bytes = tensor.element_size()
    for size in tensor.shape[1:]:
        row_bytes *= size
    padded = torch.zeros(max(sizes) * row_bytes, dtype=torch.uint8)
    padded[: tensor.shape[0] * row_bytes] = tensor.reshape(-1).view(torch.uint8)
    received = [torch.zeros_like(padded) for _ in range(num_ranks)]
    if padded.numel():
        dist.all_gather(received, padded, group=group)
    return [
        flat[: size * row_bytes].view(tensor.dtype).view(size, *tensor.shape[1:])
        for flat, size in zip(received, sizes, strict=True)
    ]


# -- layout -----------------------------------------------------------------------------------------------------------
@dataclass
class Layout:
    """Where every slot of the group goes. Lists over ranks; -1 is "none"."""

    num_ranks: int
    num_experts: int
    top_k: int
    rows: list[list[Slot]]  # [r] the slot that each row of rank r holds
    splits: list[list[int]]  # [r] rows of each expert of rank r
    packed: list[
        list[tuple[int, int] | None]
    ]  # [r] (source, token) of each packed row of rank r; None: unused
    packed_start: list[
        list[int]
    ]  # [r] where each source's packed rows start on rank r; the last is their number
    packed_to_row: list[np.ndarray]  # [r] int [P, K]
    row_to_packed_row: list[np.ndarray]  # [r] int [N]
    slot_to_row: list[np.ndarray]  # [s] int [T, K], as the next
    slot_to_rank: list[np.ndarray]
    token_to_primary_row: list[np.ndarray]  # [s] int [T, R], as the next
    token_to_packed_row: list[np.ndarray]
    expert_load: list[int]  # slots of each expert before dropping
    num_dropped: int  # slots that a capacity dropped
    wanted_rows: list[int]  # [r] rows routed to rank r before dropping


def lay_out(topk_idx: list[np.ndarray], num_experts: int, *, capacity: int | None = None) -> Layout:
    """The layout of a routing: `topk_idx[s]` is [T_s, K]. Rows are ordered expert, source, token, k."""
    num_ranks = len(topk_idx)
    top_k = topk_idx[0].shape[1]
    local = num_experts // num_ranks
    requested: list[list[Slot]] = [[] for _ in range(num_experts)]
    for source, ids in enumerate(topk_idx):
        for token in range(ids.shape[0]):
            for k in range(top_k):
                if ids[token, k] >= 0:
                    requested[ids[token, k]].append((source, token, k))
    num_kept = keep_within(
        [[len(w) for w in requested[r * local : (r + 1) * local]] for r in range(num_ranks)],
        capacity,
    )

    def table(value: int, *shape: int) -> np.ndarray:
        return np.full(shape, value, dtype=np.int64)

    rows, packed, packed_start, packed_to_row, row_to_packed_row = [], [], [], [], []
    slot_to_row = [table(-1, ids.shape[0], top_k) for ids in topk_idx]
    slot_to_rank = [table(-1, ids.shape[0], top_k) for ids in topk_idx]
    to_primary = [table(-1, ids.shape[0], num_ranks) for ids in topk_idx]
    to_packed = [table(-1, ids.shape[0], num_ranks) for ids in topk_idx]
    for rank in range(num_ranks):
        local_experts = range(rank * local, (rank + 1) * local)
        rows.append(
            [
                slot
                for g, count in zip(local_experts, num_kept[rank], strict=True)
                for slot in requested[g][:count]
            ]
        )
        for row, (source, token, k) in enumerate(rows[rank]):
            slot_to_row[source][token, k] = row
            slot_to_rank[source][token, k] = rank
        packed.append([])
        packed_start.append([])
        for source in range(num_ranks):
            packed_start[rank].append(len(packed[rank]))
            before = {token for g in local_experts for s, token, _ in requested[g] if s == source}
            after = sorted({token for s, token, _ in rows[rank] if s == source})
            num_rows = sum(1 for s, _, _ in rows[rank] if s == source)
            region = min(
                len(before), num_rows
            )  # what the source can know without asking who was dropped
            assert len(after) <= region
            for token in after:
                to_packed[source][token, rank] = len(packed[rank])
                packed[rank].append((source, token))
            packed[rank] += [None] * (region - len(after))
        packed_start[rank].append(len(packed[rank]))
        packed_to_row.append(table(-1, len(packed[rank]), top_k))
        row_to_packed_row.append(table(-1, len(rows[rank])))
        for row, (source, token, k) in enumerate(rows[rank]):
            packed_row = to_packed[source][token, rank]
            packed_to_row[rank][packed_row, k] = row
            row_to_packed_row[rank][row] = packed_row
        for packed_row, owner in enumerate(packed[rank]):
            if owner is not None:
                source, token = owner
                to_primary[source][token, rank] = next(
                    row for row in packed_to_row[rank][packed_row] if row >= 0
                )

    loads = [len(slots) for slots in requested]
    return Layout(
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=top_k,
        rows=rows,
        splits=num_kept,
        packed=packed,
        packed_start=packed_start,
        packed_to_row=packed_to_row,
        row_to_packed_row=row_to_packed_row,
        slot_to_row=slot_to_row,
        slot_to_rank=slot_to_rank,
        token_to_primary_row=to_primary,
        token_to_packed_row=to_packed,
        expert_load=loads,
        num_dropped=sum(loads) - sum(sum(counts) for counts in num_kept),
        wanted_rows=[sum(loads[r * local : (r + 1) * local]) for r in range(num_ranks)],
    )


def keep_within(loads: list[list[int]], capacity: int | None) -> list[list[int]]:
    """Rows kept of each expert, per rank: the fullest expert loses rows one by one, the last of equals first."""
    within = [list(counts) for counts in loads]
    for counts in within:
        while capacity is not None and sum(counts) > capacity:
            fullest = max(range(len(counts)), key=lambda g: (counts[g], g))
            counts[fullest] -= 1
    return within


# -- payload ----------------------------------------------------------------------------------------------------------
def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Bit patterns of a tensor, uint16 or uint32 by the size of its elements."""
    as_int, as_unsigned = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}[
        tensor.element_size()
    ]
    return tensor.detach().cpu().contiguous().view(as_int).numpy().view(as_unsigned)


def expert_major(layout: Layout, rank: int, x_bits: list[np.ndarray]) -> np.ndarray:
    """Bit patterns [N, H] of the rows of rank `rank`."""
    rows = np.zeros((len(layout.rows[rank]), x_bits[0].shape[1]), dtype=x_bits[0].dtype)
    for row, (source, token, _) in enumerate(layout.rows[rank]):
        rows[row] = x_bits[source][token]
    return rows


def row_probs(layout: Layout, rank: int, probs: list[np.ndarray]) -> np.ndarray:
    """fp32 [N]."""
    values = np.zeros(len(layout.rows[rank]), dtype=np.float32)
    for row, (source, token, k) in enumerate(layout.rows[rank]):
        values[row] = probs[source][token, k]
    return values


# -- sums -------------------------------------------------------------------------------------------------------------
def widen(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bit patterns as fp32; exact."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32)


def narrow(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp32 as bit patterns of `dtype`, rounded to nearest, ties to even. Any NaN is some NaN."""
    if dtype == torch.float32:
        return values.view(np.uint32)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def same_numbers(got: np.ndarray, want: np.ndarray, dtype: torch.dtype) -> bool:
    """Equal bit patterns; where a NaN is wanted any NaN will do, for nothing fixes the payload of a NaN."""
    is_nan = np.isnan(widen(want, dtype))
    return got.shape == want.shape and bool(
        np.where(is_nan, np.isnan(widen(got, dtype)), got == want).all()
    )


def sum_slots(
    layout: Layout, source: int, out_bits: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    """Bit patterns [T, H] of `order="slot"`: fp32 from zero, in k order, rounded once."""
    return _sums(_slots(layout, source), out_bits, dtype)


def _slots(layout: Layout, source: int) -> list[list[tuple[int, int]]]:
    """By token the rank and the row of each slot."""
    of_tokens = zip(layout.slot_to_rank[source], layout.slot_to_row[source], strict=True)
    return [list(zip(ranks, rows, strict=True)) for ranks, rows in of_tokens]


def _sums(
    places: list[list[tuple[int, int]]], bits: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    """Bit patterns [T, H]: by token the sum of the rows bits[i][row] at its places (i, row), those of -1 left out, in
    fp32 from zero, in order, rounded once."""
    sums = np.zeros((len(places), bits[0].shape[1]), dtype=np.float32)
    with np.errstate(all="ignore"):
        for token, of_token in enumerate(places):
            for i, row in of_token:
                if row >= 0:
                    sums[token] += widen(bits[i][row], dtype)
    return narrow(sums, dtype)


def reduce_primary(
    layout: Layout, rank: int, out_bits: np.ndarray, dtype: torch.dtype
) -> np.ndarray:
    """The first half of `order="rank"`: where a token's primary row on rank `rank` was, the sum of its rows there, in
    fp32, in k order, from the primary row on, and rounded. One row is its own sum."""
    reduced = out_bits.copy()
    with np.errstate(all="ignore"):
        for places in layout.packed_to_row[rank]:
            first, *later = [row for row in places if row >= 0] or [-1]
            if later:
                total = widen(out_bits[first], dtype)
                for row in later:
                    total = total + widen(out_bits[row], dtype)
                reduced[first] = narrow(total, dtype)
    return reduced


def sum_ranks(
    layout: Layout, source: int, reduced_bits: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    """Bit patterns [T, H] of the second half of `order="rank"`: these sums in fp32 from zero, in rank order."""
    places = [list(enumerate(rows)) for rows in layout.token_to_primary_row[source]]
    return _sums(places, reduced_bits, dtype)


def sum_nodes(
    layout: Layout, source: int, out_bits: list[np.ndarray], nodes: list[list[int]], dtype
) -> np.ndarray:
    """Bit patterns [T, H] of `order="node"`: in each node a token's rows in fp32 from zero, in k order, rounded; then
    these sums in fp32 from zero, in the order of nodes. nodes: the ranks of each."""
    slots = _slots(layout, source)
    of_nodes = [
        _sums([[at for at in of_token if at[0] in ranks] for of_token in slots], out_bits, dtype)
        for ranks in nodes
    ]
    places = [[(node, token) for node in range(len(nodes))] for token in range(len(slots))]
    return _sums(places, of_nodes, dtype)


# -- experts in float64 -----------------------------------------------------------------------------------------------
def experts(
    tokens: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, fc1, fc2, biases=(None, None)
) -> torch.Tensor:
    """[T, H], the sum over k of probs[t, k] * (W2 (silu(gate) * up) + b2), [gate, up] = W1 x + b1, of the experts
    ids[t, k]; -1: none. fc1 [E, 2I, H], fc2 [E, H, I]; biases: [E, .] of both, or None. Differentiable."""
    y = torch.zeros_like(tokens)
    b1, b2 = (
        fc.new_zeros(fc.shape[:2]) if bias is None else bias
        for fc, bias in zip((fc1, fc2), biases, strict=True)
    )
    # Unbound once: the gradient of an index would be as large as all experts.
    of_expert = zip(fc1.unbind(), b1.unbind(), fc2.unbind(), b2.unbind(), strict=True)
    for expert, (w1, its_b1, w2, its_b2) in enumerate(of_expert):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (tokens[token] @ w1.T + its_b1).chunk(2, 1)
        out = (gate * torch.sigmoid(gate) * up) @ w2.T + its_b2
        y = y.index_add(0, token, out * probs[token, k, None])
    return y


@dataclass
class Dense:
    """A whole MoE layer over the tokens of all ranks, in float64. Lists over ranks; gradients are of sum(y * dy)."""

    y: list[torch.Tensor]
    dx: list[torch.Tensor]
    dprobs: list[torch.Tensor]
    dweights: list[torch.Tensor]


def dense_moe(
    layout: Layout,
    topk_idx: list[torch.Tensor],
    x: list[torch.Tensor],
    probs: list[torch.Tensor],
    weights: list[torch.Tensor],
    dy: list[torch.Tensor],
) -> Dense:
    """Forward and backward by autograd. Slots that the layout dropped take no part.

    Args:
        weights: each [E, ., .], all experts.
    """
    x = [t.detach().double().requires_grad_() for t in x]
    probs = [t.detach().double().requires_grad_() for t in probs]
    weights = [w.detach().double().requires_grad_() for w in weights]
    kept_ids = [
        ids.long().masked_fill(torch.from_numpy(rows) < 0, -1)
        for ids, rows in zip(topk_idx, layout.slot_to_row, strict=True)
    ]
    y = [experts(*of_rank, *weights) for of_rank in zip(x, kept_ids, probs, strict=True)]
    loss = sum((a * b.double()).sum() for a, b in zip(y, dy, strict=True))
    leaves = [*x, *probs, *weights]
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    if loss.requires_grad:
        computed = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [zero if grad is None else grad for zero, grad in zip(zeros, computed, strict=True)]
    else:
        grads = zeros
    n = len(x)
    return Dense([t.detach() for t in y], grads[:n], grads[n : 2 * n], grads[2 * n :])
