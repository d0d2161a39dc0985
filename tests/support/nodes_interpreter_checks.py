"""Kernels of plans between nodes in Triton's interpreter, compared with twins, and these with loops over tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from compared_launches import EPOCH, Numbers, differences, results
from launch_table import I32, Arguments, Launch, later, peers_of
from written_arguments import ComparedCalls

from symmoe.kernels import control, gpu, twin
from symmoe.nodes.topology import find_topology, make_rank_maps

LOCAL = 2  # experts of a rank
NODES = {
    "two of one": [0, 1],
    "two of two": [0, 0, 1, 1],
    "three of two": [0, 0, 1, 1, 2, 2],
    "mixed": [0, 1, 1, 0],
}


def int32(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=I32)


# -- plans -------------------------------------------------------------------------------------------------------------
def expected_rail_rows(
    ids: torch.Tensor, node_of: list[int], own_node: int, max_tokens: int
) -> list[list[int]]:
    """Numbers of tokens, and the rows of every token."""
    counts = [0] * (max(node_of) + 1)
    lines = []
    for token in ids.tolist():
        experts = [expert for expert in token if 0 <= expert < LOCAL * len(node_of)]
        nodes = {node_of[expert // LOCAL] for expert in experts} - {own_node}
        rows = [count if count < max_tokens else -1 for count in counts]
        lines.append([row if node in nodes else -1 for node, row in enumerate(rows)])
        for node in nodes:
            counts[node] += 1
    largest = max(counts)
    return [[*counts, largest, 0 if largest <= max_tokens else largest], *lines]


def plan_of(ids: torch.Tensor, num_ranks: int) -> control.PlanIntegers:
    """A plan with the ids' ranks, and any numbers elsewhere."""
    generator = torch.Generator().manual_seed(3)
    numel, layout = control.plan_layout(*ids.shape, LOCAL * num_ranks, num_ranks)
    integers = torch.randint(0, 999, (numel,), generator=generator, dtype=I32)
    plan = control.PlanIntegers(integers, layout)
    is_valid = (ids >= 0) & (ids < LOCAL * num_ranks)
    plan.slot_to_rank.copy_(torch.where(is_valid, ids // LOCAL, -1))
    plan.slot_to_row.masked_fill_(~is_valid, -1)
    return plan


def check_lines(
    plan: control.PlanIntegers,
    rows: torch.Tensor,
    maps: control.RankMaps,
    max_tokens: int,
    in_node: control.InNodeIntegers,
) -> None:
    """Every home row, by loops."""
    num_tokens, top_k = plan.slot_to_row.shape
    owners = {}
    for token, node in product(range(num_tokens), range(len(maps.by_node))):
        row = int(rows[token, node])
        home = -1 if row < 0 else num_tokens + max_tokens * (node - (node > maps.own_node)) + row
        if node == maps.own_node:
            home = token
        assert int(in_node.token_to_home_row[token, node]) == home
        if home >= 0:
            owners[home] = token, maps.by_node[node].tolist()
    nowhere = [-1] * maps.by_node.shape[1]
    for home in range(len(in_node.home_row_to_token)):
        token, ranks = owners.get(home, (0, []))
        assert int(in_node.home_row_to_token[home]) == token
        for k in range(top_k):
            rank = int(plan.slot_to_rank[token, k]) if ranks else -1
            slot = in_node.slot_to_rank[home, k], in_node.slot_to_row[home, k]
            if rank in ranks:
                assert slot == (ranks.index(rank), int(plan.slot_to_row[token, k]))
                assert int(in_node.slot_to_home_row[token, k]) == home * top_k + k
            else:
                assert slot == (-1, -1)
        for name in ("token_to_packed_row", "token_to_primary_row"):
            expected = [int(getattr(plan, name)[token, rank]) for rank in ranks] or nowhere
            assert getattr(in_node, name)[home].tolist() == expected
    assert bool((in_node.slot_to_home_row[plan.slot_to_rank < 0] == -1).all())
    assert not in_node.zeros.any()
    assert in_node.ends.tolist() == [0, num_tokens]


def plan_differences(
    maps: control.RankMaps, ids: torch.Tensor, node_of: list[int], max_tokens: int
) -> list[str]:
    """Of kernels and twins, which loops check."""
    (num_tokens, top_k), (num_nodes, per_node) = ids.shape, maps.by_node.shape
    kernels = ComparedCalls(gpu)
    numbers = int32(num_nodes + 2)
    rows = int32(num_tokens, num_nodes)
    kernels.rail_rows(
        ids, maps, numbers, rows, num_experts=LOCAL * len(node_of), max_rows=max_tokens
    )
    expected = expected_rail_rows(ids, node_of, maps.own_node, max_tokens)
    assert [numbers.tolist(), *rows.tolist()] == expected
    plan = plan_of(ids, len(node_of))
    assert control.num_blocks(num_tokens) == len(plan.block_tokens)
    numel, layout = control.in_node_layout(
        num_tokens, top_k, LOCAL, (num_nodes, per_node), max_tokens * (num_nodes - 1), 5
    )
    in_node = control.InNodeIntegers(int32(numel), layout)
    kernels.plan_in_node(plan, rows, numbers, maps, in_node)
    check_lines(plan, rows, maps, max_tokens, in_node)
    return kernels.differences


# -- count tables ------------------------------------------------------------------------------------------------------
@later
def arenas(make: Arguments, maps: control.RankMaps, epoch: int, counter: int) -> control.Peers:
    """The arenas of a node, after a barrier; one counter is 1."""
    ranks = tuple(maps.own_ranks.tolist())
    peers = make(peers_of(len(ranks), 0, ranks, maps.by_node.numel()))
    counters = peers.counters(0)
    counters[control.BARRIER_EPOCH] = epoch
    counters[counter] = 1
    return peers


def table_launches(maps: control.RankMaps, *state: int) -> list[Launch]:
    num_nodes, per_node = maps.by_node.shape
    sizes = {"T": 1, "E": 1, "R": num_nodes * per_node, "L": num_nodes}
    header = {"source": int(maps.own_ranks[0]), "word": control.HEAD_RAIL_DROPPED}
    kernels = {
        "publish_header": {"number": torch.tensor([1234], dtype=I32), **header},
        "own_counts": {"ranks": maps.own_ranks},
        "other_counts": {"ranks": maps.other_ranks},
    }
    peers = {"peers": arenas(maps, *state)}
    return [Launch(kernel, sizes, changes=peers | changes) for kernel, changes in kernels.items()]


def check_failures(launch: Launch, *, fails: bool) -> None:
    """They are received as -1."""
    received = results(launch, twin.other_counts, Numbers(launch))["received 0"]
    assert bool((received == -int(fails)).all())


STATES = [  # the epoch, and the counter that is 1
    (EPOCH, control.ON_RAIL),
    (EPOCH, control.ABORTED),
    (EPOCH + 1, control.RAIL_FAULT),
]
TAKEN_ROWS = [
    {"rows": "3 6", "index": torch.tensor([1, 0, 1], dtype=I32), "out": "3 6"},
    {"rows": lambda make: make("0 16")[:, ::2], "index": torch.zeros(2, dtype=I32), "out": "2 8"},
]


def checks() -> Iterator[tuple[str, Callable[[], list | None]]]:
    """Names, and what checks them."""
    generator = torch.Generator().manual_seed(0)
    for number, changes in enumerate(TAKEN_ROWS):
        launch = Launch("take_rows", changes=changes)
        yield f"take_rows {number}", partial(differences, launch)
    for name, node_of in NODES.items():
        for rank, max_tokens in ((0, 200), (len(node_of) - 1, 40), (1, 40)):
            maps = make_rank_maps(find_topology(node_of, rank, None), torch.device("cpu"))
            for state in STATES:
                where = f"{name}, rank {rank}, epoch and counter {state}"
                for launch in table_launches(maps, *state):
                    yield f"{launch.kernel}, {where}", partial(differences, launch)
                fails = state[1] != control.ON_RAIL
                yield f"failures, {where}", partial(check_failures, launch, fails=fails)
            for num_tokens in (0, 1, 70) if name == "mixed" else (70,):
                dtype = (torch.int32, torch.int64)[rank % 2]
                shape = num_tokens, 3
                num_experts = LOCAL * len(node_of)
                ids = torch.randint(-2, num_experts + 1, shape, generator=generator).to(dtype)
                where = f"{name}, rank {rank}, {num_tokens} tokens"
                check = partial(plan_differences, maps, ids, node_of, max_tokens)
                yield f"rail_rows, plan_in_node, {where}", check
