"""Kernels of plans between nodes in Triton's interpreter, compared with twins, and these with loops over tokens."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from symmoe.kernels import control, twin
from symmoe.kernels.triton import nodes
from symmoe.nodes.topology import find_topology, make_rank_maps

LOCAL = 2  # experts of a rank
TABLE_KERNELS = "publish_header, own_counts, other_counts, take_rows"
NODES = {
    "two of one": [0, 1],
    "two of two": [0, 0, 1, 1],
    "three of two": [0, 0, 1, 1, 2, 2],
    "mixed": [0, 1, 1, 0],
}


def filled(places: tuple[int, control.PlanLayout]) -> tuple[torch.Tensor, control.PlanLayout]:
    return torch.full((places[0],), -7, dtype=torch.int32), places[1]


def rail_rows(
    module, ids: torch.Tensor, maps: control.RankMaps, most: int
) -> tuple[torch.Tensor, ...]:
    num_nodes = len(maps.by_node)
    numbers, rows = (
        torch.full(shape, -7, dtype=torch.int32)
        for shape in ((num_nodes + 2,), (len(ids), num_nodes))
    )
    module.rail_rows(
        ids, maps, numbers, rows, num_experts=LOCAL * maps.by_node.numel(), max_rows=most
    )
    return numbers, rows


def expected_rail_rows(
    ids: torch.Tensor, node_of: list[int], here: int, most: int
) -> list[list[int]]:
    counts = [0] * (max(node_of) + 1)
    lines = []
    for token in ids.tolist():
        goes = {
            node_of[expert // LOCAL] for expert in token if 0 <= expert < LOCAL * len(node_of)
        } - {here}
        lines.append(
            [counts[n] if n in goes and counts[n] < most else -1 for n in range(len(counts))]
        )
        for node in goes:
            counts[node] += 1
    return [[*counts, max(counts)], *lines]


def plan_of(ids: torch.Tensor, num_ranks: int) -> control.PlanIntegers:
    """A plan with the ids' ranks, and any numbers elsewhere."""
    (num_tokens, top_k), generator = ids.shape, torch.Generator().manual_seed(3)
    size, layout = control.plan_layout(num_tokens, top_k, LOCAL * num_ranks, num_ranks)
    plan = control.PlanIntegers(
        torch.randint(0, 999, (size,), generator=generator, dtype=torch.int32), layout
    )
    valid = (ids >= 0) & (ids < LOCAL * num_ranks)
    plan.slot_to_rank.copy_(torch.where(valid, ids // LOCAL, -1))
    plan.slot_to_row.masked_fill_(~valid, -1)
    return plan


def in_node(
    module,
    plan: control.PlanIntegers,
    rows: torch.Tensor,
    numbers: torch.Tensor,
    maps: control.RankMaps,
    most: int,
) -> control.InNodeIntegers:
    (num_tokens, top_k), shape = plan.slot_to_row.shape, tuple(maps.by_node.shape)
    found = control.InNodeIntegers(
        *filled(control.in_node_layout(num_tokens, top_k, LOCAL, shape, most * (shape[0] - 1), 5))
    )
    module.plan_in_node(plan, rows, numbers, maps, found)
    return found


def check_lines(
    plan: control.PlanIntegers,
    rows: torch.Tensor,
    maps: control.RankMaps,
    most: int,
    found: control.InNodeIntegers,
) -> None:
    """Every home row, by loops."""
    num_tokens, top_k = plan.slot_to_row.shape
    used = {}
    for token, node in itertools.product(range(num_tokens), range(len(maps.by_node))):
        row = int(rows[token, node])
        home = (
            token
            if node == maps.own_node
            else -1
            if row < 0
            else num_tokens + most * (node - (node > maps.own_node)) + row
        )
        assert int(found.token_to_home_row[token, node]) == home
        if home >= 0:
            used[home] = token, node
    for home in range(len(found.home_row_to_token)):
        token, node = used.get(home, (0, None))
        ranks = [] if node is None else maps.by_node[node].tolist()
        assert int(found.home_row_to_token[home]) == token
        for k in range(top_k):
            rank = -1 if node is None else int(plan.slot_to_rank[token, k])
            is_its = rank in ranks
            assert int(found.slot_to_rank[home, k]) == (ranks.index(rank) if is_its else -1)
            assert int(found.slot_to_row[home, k]) == (
                int(plan.slot_to_row[token, k]) if is_its else -1
            )
            if is_its:
                assert int(found.slot_to_home_row[token, k]) == home * top_k + k
        for name in ("token_to_packed_row", "token_to_primary_row"):
            its = [int(getattr(plan, name)[token, rank]) for rank in ranks] or [
                -1
            ] * maps.by_node.shape[1]
            assert getattr(found, name)[home].tolist() == its
    assert bool((found.slot_to_home_row[plan.slot_to_rank < 0] == -1).all())
    assert not found.zeros.any()
    assert found.ends.tolist() == [0, num_tokens]


def tables(module, maps: control.RankMaps, epoch: int) -> list[torch.Tensor]:
    """What the kernels of count tables leave of rank 0's node."""
    num_ranks = maps.by_node.numel()
    own = maps.by_node[maps.own_node]
    layout = control.ControlLayout(len(own), num_ranks)
    generator = torch.Generator().manual_seed(7)
    views = tuple(
        torch.randint(0, 9, (layout.num_bytes,), generator=generator, dtype=torch.uint8)
        for _ in own
    )
    bases = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64)
    peers = control.Peers(0, len(own), bases, views, layout, tuple(own.tolist()))
    counters = peers.counters(0).zero_()
    counters[control.BARRIER_EPOCH], counters[control.RAIL_FAULT] = epoch, epoch % 2
    rows = torch.full((len(own), layout.row_words), -7, dtype=torch.int32)
    theirs = torch.randint(
        0, 99, (num_ranks - len(own), layout.row_words), generator=generator, dtype=torch.int32
    )
    received = torch.full((num_ranks, control.NUM_PUBLISHED), -7)
    module.publish_header(
        torch.tensor([1234], dtype=torch.int32), peers, int(own[0]), word=control.HEAD_RAIL_DROPPED
    )
    cleared = torch.full((3, 700), -7, dtype=torch.int32)
    module.own_counts(own, peers, rows, cleared)
    module.other_counts(theirs, maps.other_ranks, peers, received)
    assert bool((received == -(epoch % 2)).all())
    taken = torch.full((3, 6), -7.0, dtype=torch.bfloat16)
    module.take_rows(
        rows[:, :6].bfloat16(), torch.tensor([1, 0, 1], dtype=torch.int32) % len(own), taken
    )
    none = torch.full((2, 8), -7.0, dtype=torch.bfloat16)
    module.take_rows(
        torch.empty((0, 16), dtype=torch.bfloat16)[:, ::2], torch.zeros(2, dtype=torch.int32), none
    )
    return [*views, rows, received, taken, none, cleared]


def plan_differences(maps: control.RankMaps, ids: torch.Tensor, node_of: list[int], most: int):
    """Names of what the kernels leave that differs from what the twins do, which loops have checked."""
    (numbers, rows), theirs = (rail_rows(module, ids, maps, most) for module in (twin, nodes))
    expected = expected_rail_rows(ids, node_of, maps.own_node, most)
    largest = expected[0][-1]
    told = 0 if largest <= most else largest
    assert [[*expected[0], told], *expected[1:]] == [numbers.tolist(), *rows.tolist()]
    plan = plan_of(ids, len(node_of))
    assert control.num_blocks(len(ids)) == len(plan.block_tokens)
    right = in_node(twin, plan, rows, numbers, maps, most)
    check_lines(plan, rows, maps, most, right)
    ours = in_node(nodes, plan, rows, numbers, maps, most)
    pairs = {"numbers": (theirs[0], numbers), "rows": (theirs[1], rows)}
    pairs |= {name: (getattr(ours, name), getattr(right, name)) for name in right.layout}
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


def table_differences(maps: control.RankMaps, epoch: int) -> list[int]:
    pairs = zip(tables(twin, maps, epoch), tables(nodes, maps, epoch), strict=True)
    return [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]


def checks() -> Iterator[tuple[str, Callable[[], list]]]:
    """Names, and what checks them."""
    generator = torch.Generator().manual_seed(0)
    for name, node_of in NODES.items():
        num_experts = LOCAL * len(node_of)
        for rank, most in ((0, 200), (len(node_of) - 1, 40), (1, 40)):
            maps = make_rank_maps(find_topology(node_of, rank, None), torch.device("cpu"))
            for epoch in (6, 7):
                where = f"{name}, rank {rank}, epoch {epoch}"
                yield f"{TABLE_KERNELS}, {where}", partial(table_differences, maps, epoch)
            for num_tokens in (0, 1, 70) if name == "mixed" else (70,):
                dtype = (torch.int32, torch.int64)[rank % 2]
                shape = num_tokens, 3
                ids = torch.randint(-2, num_experts + 1, shape, generator=generator).to(dtype)
                where = f"{name}, rank {rank}, {num_tokens} tokens"
                check = partial(plan_differences, maps, ids, node_of, most)
                yield f"rail_rows, plan_in_node, {where}", check
