"""Parts of rows by arrival, and the division of SMs."""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from cluster import run_on
from hypothesis import given, settings
from hypothesis import strategies as st
from worker import open_heap

from symmoe import GroupedMLP, make_plan
from symmoe.dispatch import nodes
from symmoe.kernels import twin
from symmoe.kernels.control import InNodeIntegers, PlanIntegers, in_node_layout, plan_layout
from symmoe.kernels.gemm_parts import PART_ROWS
from symmoe.kernels.twin.plan import split_rows
from symmoe.moe import overlap
from symmoe.moe import overlap as formulas
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.nodes.topology import find_topology, make_rank_maps
from symmoe.precision import MXFP8, Float8Block
from symmoe.symm_mem.row_budget import rounded_up

H200_FLOAT8 = overlap.Rates(flops=1.17e15, wgrad_flops=0.95e15, part_s=50e-6)


def starts_of(experts: list[list[int]]) -> torch.Tensor:
    """int32 [R + 1, e], where the rows of each source and expert start; experts: their rows by source."""
    starts = torch.zeros((len(experts[0]) + 1, len(experts)), dtype=torch.int32)
    row = 0
    for e, counts in enumerate(experts):
        for source, count in enumerate(counts):
            starts[source, e] = row
            row += count
        starts[len(counts), e] = row
    return starts


def check_parts(
    experts: list[list[int]], ranges: torch.Tensor, arrivals: list[tuple[int, set[int]]]
) -> None:
    """Against the definition, row by row, for one expert after the other. arrivals: parts, and who arrives for them."""
    starts = starts_of(experts)
    for e, counts in enumerate(experts):
        first = int(starts[0, e])
        end = int(starts[-1, e])
        row_to_source = [source for source, count in enumerate(counts) for _ in range(count)]
        computed = set()
        arrived = set()
        for part, sources in arrivals:
            arrived |= sources
            begin, stop = ranges[part, :, e].tolist()
            rows = set(range(begin, stop))
            assert not rows & computed
            assert all(row_to_source[row - first] in arrived for row in rows)
            assert begin >= stop or (begin - first) % PART_ROWS == 0
            computed |= rows
            # No part leaves out a tile whose rows have all arrived (except parts of ranks without rows).
            for tile in range(first, end, PART_ROWS) if all(counts) else ():
                rows = set(range(tile, min(tile + PART_ROWS, end)))
                if all(row_to_source[row - first] in arrived for row in rows):
                    assert rows <= computed
        assert computed == set(range(first, end))
        # In the opposite order, in which FC2 goes, the part of a rank completes all rows of that rank.
        computed = set()
        for part, sources in reversed(arrivals):
            begin, stop = ranges[part, :, e].tolist()
            computed |= set(range(begin, stop))
            assert all(
                first + i in computed for i, owner in enumerate(row_to_source) if owner in sources
            )


def draw_rows(data: st.DataObject, num_ranks: int) -> list[list[int]]:
    """Rows of some experts by source."""
    of_expert = st.lists(st.integers(0, 300), min_size=num_ranks, max_size=num_ranks)
    rows: list[list[int]] = data.draw(st.lists(of_expert, min_size=1, max_size=3))
    return rows


@settings(max_examples=50)
@given(st.data())
def test_parts_need_only_rows_that_have_arrived(data):
    num_ranks = data.draw(st.integers(1, 8))
    rank = data.draw(st.integers(0, num_ranks - 1))
    experts = draw_rows(data, num_ranks)
    ranges = torch.full((num_ranks, 2, len(experts)), -7, dtype=torch.int32)
    split_rows(starts_of(experts), ranges, rank, range(num_ranks))
    arrivals = [(rank - step) % num_ranks for step in range(num_ranks)]
    check_parts(experts, ranges, [(source, {source}) for source in arrivals])


def zeros(places):
    return torch.zeros(places[0], dtype=torch.int32), places[1]


def integers_in_node(topology, maps, source_to_rows, source_to_packed_start) -> InNodeIntegers:
    """The integers of plan_in_node for a plan without tokens."""
    num_nodes = topology.num_nodes
    num_ranks = len(source_to_rows)
    num_local = source_to_rows.shape[2]
    plan = PlanIntegers(*zeros(plan_layout(0, 1, num_ranks * num_local, num_ranks)))
    plan.source_to_rows.copy_(source_to_rows)
    plan.source_to_packed_start.copy_(source_to_packed_start)
    integers = InNodeIntegers(
        *zeros(in_node_layout(0, 1, num_local, (num_nodes, len(topology.ranks)), 0, 0))
    )
    rail_rows, numbers = (
        torch.zeros(shape, dtype=torch.int32) for shape in ((0, num_nodes), num_nodes + 2)
    )
    twin.plan_in_node(plan, rail_rows, numbers, maps, integers)
    return integers


@settings(max_examples=50)
@given(st.data())
def test_parts_between_nodes_need_only_rows_that_have_arrived(data):
    """The ranks of the node first, as on one node; then those before it and those after it, all at once."""
    num_nodes, num_ranks = data.draw(
        st.sampled_from([(2, 2), (2, 4), (3, 3), (3, 6), (4, 8), (2, 8)])
    )
    rank = data.draw(st.integers(0, num_ranks - 1))
    experts = draw_rows(data, num_ranks)
    topology = find_topology(
        [source * num_nodes // num_ranks for source in range(num_ranks)], rank, None
    )
    packed_start = torch.cat([torch.zeros(1), torch.tensor(experts).sum(0).cumsum(0)]).int()
    maps = make_rank_maps(topology, torch.device("cpu"))
    heap = SimpleNamespace(topology=topology, num_ranks=num_ranks, nodes=SimpleNamespace(maps=maps))
    rows = torch.full((num_ranks, 2, len(experts)), -7, dtype=torch.int32)
    split_rows(starts_of(experts), rows, rank, topology.ranks)
    integers = integers_in_node(topology, maps, rows, packed_start)
    ranks, arrivals = topology.ranks, nodes.arrivals_in_node(heap)
    assert arrivals[: len(ranks)] == [
        ranks[(ranks.index(rank) - step) % len(ranks)] for step in range(len(ranks))
    ]
    ranks_of_ends = {0: set(range(ranks[0])), num_ranks - 1: set(range(ranks[-1] + 1, num_ranks))}
    ends = [(source, ranks_of_ends[source]) for source in arrivals[len(ranks) :]]
    assert [end for end in ranks_of_ends.values() if end] == [end for _, end in ends]
    check_parts(experts, rows, [*((source, {source}) for source in arrivals[: len(ranks)]), *ends])
    # With all ranks of the node as one part, and the packed rows of each.
    check_parts(
        experts, torch.cat([rows, integers.own_rows[None]]), [(num_ranks, set(ranks)), *ends]
    )
    for source in arrivals:
        sources = sorted(ranks_of_ends[source] if source not in ranks else {source})
        expected = packed_start[sources[0]], packed_start[sources[-1] + 1]
        assert tuple(integers.source_to_packed_start[source : source + 2]) == expected


RATES = overlap.Rates(
    link_bytes=100e9,
    program_push_bytes=10e9,
    program_copy_bytes=40e9,
    program_sum_bytes=20e9,
    memory_bytes=500e9,
    flops=1e15,
    wgrad_flops=0.6e15,
    launch_s=5e-6,
    least_gain=0.1,
)
LAYERS = [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 64, 8), (4096, 1536, 128, 8)]


def sizes_of(layer: tuple[int, ...], num_ranks: int, **changes: object) -> overlap.Sizes:
    hidden, ffn, num_experts, top_k = layer
    arguments = {
        "num_rows": 8192 * top_k,
        "hidden": hidden,
        "ffn": ffn,
        "top_k": top_k,
        "num_experts": num_experts,
    }
    return overlap.Sizes(**{**arguments, "num_ranks": num_ranks, "item_bytes": 2, **changes})


def test_the_layout_depends_on_the_width():
    assert (
        overlap.received_layout("auto", 768, None)
        == overlap.received_layout("auto", 14336, None)
        == "expert-major"
    )
    assert (
        overlap.received_layout("auto", 256, None)
        == overlap.received_layout("auto", 768, Float8Block())
        == "packed"
    )


Times = dict[
    str, tuple[float, list[float]]
]  # of each trip, with the work that may run beside it: apart, and with 1, 2, ... SMs


def chance(num_experts: int, num_parts: int, top_k: int) -> float:
    """The probability that a token has an expert in a given part."""
    missed = (
        Fraction(num_experts - num_experts // num_parts - i, num_experts - i) for i in range(top_k)
    )
    return 1 - float(math.prod(missed))


def gemm_s(flops: float, n: int, per_s: float) -> float:
    return flops / (per_s * (132 - n) / 132)


def brute_force(sizes: overlap.Sizes, rates: overlap.Rates) -> Times:
    """Times by plain arithmetic from the documented formulas, from the arguments of `sizes` only."""
    counts, ranks, row_bytes = range(1, 67), sizes.num_ranks, sizes.hidden * sizes.item_bytes
    num_pushed = (
        (ranks - 1) * sizes.num_rows / sizes.top_k * chance(sizes.num_experts, ranks, sizes.top_k)
    )
    num_foreign = sizes.num_rows * (ranks - 1) / ranks
    fc2_flops = 2 * sizes.num_rows * sizes.hidden * sizes.ffn
    fc1_flops = 2 * fc2_flops  # gate and up
    results = {}

    def link(num_bytes: float, n: int) -> float:
        return num_bytes / min(n * rates.program_push_bytes, rates.link_bytes)

    for name, flops, sent_bytes in (
        ("dispatch", fc1_flops, sizes.sent_row_bytes),
        ("gradient_dispatch", fc2_flops, sizes.sent_gradient_row_bytes),
    ):
        pushed = num_pushed * (sent_bytes or row_bytes)
        copied = (
            (num_foreign - num_pushed) * (sent_bytes or row_bytes) if sizes.is_expert_major else 0.0
        )
        copies = {n: copied / rates.program_copy_bytes / n for n in counts}
        gemm_time_s = gemm_s(flops, 0, rates.flops)
        further_parts_s = gemm_time_s / ranks + (ranks - 1) * rates.part_s
        gemms = {n: gemm_s(flops, n, rates.flops) * (1 - 1 / ranks) for n in counts}
        times = [max(gemms[n], link(pushed, n) + copies[n]) + further_parts_s for n in counts]
        results[name] = pushed / rates.link_bytes + copied / rates.memory_bytes + gemm_time_s, times
    pushed, summed = num_pushed * row_bytes, num_foreign * row_bytes
    at_home = sizes.num_rows / ranks * row_bytes + pushed
    sending = {n: max(link(pushed, n), summed / rates.program_sum_bytes / n) for n in counts}
    serial = (
        max(pushed / rates.link_bytes, summed / rates.memory_bytes) + at_home / rates.memory_bytes
    )
    # R parts: sums of the first R - 1 travel under the last R - 1; nothing runs with the first, nor with sums at home.
    part, later = fc2_flops / ranks, (ranks - 1) * fc2_flops / ranks
    further_parts_s = (
        gemm_s(part, 0, rates.flops) + at_home / rates.memory_bytes + (ranks - 1) * rates.launch_s
    )
    times = [max(gemm_s(later, n, rates.flops), sending[n]) + further_parts_s for n in counts]
    results["combine"] = serial + gemm_s(fc2_flops, 0, rates.flops), times
    weights = {n: gemm_s(fc1_flops, n, rates.wgrad_flops) for n in (0, *counts)}
    times = [max(weights[n], sending[n] + at_home / rates.program_sum_bytes / n) for n in counts]
    results["gradient_combine"] = serial + weights[0], times
    return results


def rail_sms(sizes: overlap.Sizes, rates: overlap.Rates) -> tuple[float, int]:
    """The rate of rails, and the SMs that they have for themselves."""
    rate = min(sizes.rail_bytes_per_s, rates.link_bytes)
    return rate, 0 if sizes.num_nodes == 1 else min(66, math.ceil(rate / rates.program_rail_bytes))


def brute_force_between_nodes(sizes: overlap.Sizes, rates: overlap.Rates) -> Times:
    """Like brute_force, with a separate rate of the rails."""
    ranks, nodes, (rail_rate, m) = sizes.num_ranks, sizes.num_nodes, rail_sms(sizes, rates)
    token_bytes, own_tokens, counts = (
        sizes.num_rows / sizes.top_k * 2 * sizes.hidden,
        1 / nodes,
        range(1, 67 - m // 2),
    )
    pushed = token_bytes * (ranks - nodes) * chance(sizes.num_experts, ranks, sizes.top_k)
    rail_s = token_bytes * (nodes - 1) * chance(sizes.num_experts, nodes, sizes.top_k) / rail_rate
    ends, product = 1 if nodes == 2 else 2, 2 * sizes.num_rows * sizes.hidden * sizes.ffn

    def dispatch(flops: int) -> tuple[float, list[float]]:
        times, parts, push_s = [], ranks // nodes - 1 + ends, pushed / rates.link_bytes
        for n in counts:
            own_push_s = own_tokens * pushed / min(n * rates.program_push_bytes, rates.link_bytes)
            first_s = max(rail_s, own_push_s, gemm_s(own_tokens * flops, n + m, rates.flops))
            last_s = (1 - own_tokens) * push_s + gemm_s((1 - own_tokens) * flops, 0, rates.flops)
            times.append(first_s + last_s + parts * rates.part_s)
        return rail_s + push_s + gemm_s(flops, 0, rates.flops), times

    def combine(flops: int, wgrad_flops: int) -> tuple[float, list[float]]:
        times = []
        first_s = gemm_s((1 - own_tokens) * flops, 0, rates.flops) + ends * rates.launch_s
        for n in counts:
            own_s = gemm_s(own_tokens * flops, n + m, rates.flops) + gemm_s(
                wgrad_flops, n + m, rates.wgrad_flops
            )
            times.append(first_s + max(rail_s, own_s))
        return rail_s + gemm_s(flops, 0, rates.flops) + gemm_s(
            wgrad_flops, 0, rates.wgrad_flops
        ), times

    return {
        "dispatch": dispatch(2 * product),
        "gradient_dispatch": dispatch(product),
        "combine": combine(product, 0),
        "gradient_combine": combine(2 * product, 2 * product),
    }


def check_choice(sizes: overlap.Sizes, rates: overlap.Rates, times_of: Times) -> None:
    """A call is overlapped where that is faster, with the best division."""
    chosen = overlap.overlap(sizes, 132, rates)
    for name, (exclusive_s, times) in times_of.items():
        division = getattr(chosen, name)
        assert (division is not None) == (min(times) <= (1 - rates.least_gain) * exclusive_s), name
        if division is not None:
            assert times[division.num_ctas - 1] == pytest.approx(min(times), rel=1e-9), name
            assert division.num_ctas + division.num_sms == 132 - rail_sms(sizes, rates)[1]


ROWS = st.floats(6, 16).map(lambda power: int(2**power))
ANY_RATES = st.sampled_from([overlap.H200, H200_FLOAT8, RATES])
SENT = ({}, {"is_expert_major": True}, {"sent_row_bytes": 1040, "sent_gradient_row_bytes": 7392})


@given(
    st.sampled_from([*LAYERS, (128, 64, 8, 2)]),
    st.sampled_from([2, 4, 8]),
    ROWS,
    ANY_RATES,
    st.sampled_from(SENT),
)
def test_calls_are_overlapped_where_it_pays(layer, num_ranks, num_rows, rates, sent):
    sizes = sizes_of(layer, num_ranks, num_rows=num_rows, **sent)
    check_choice(sizes, rates, brute_force(sizes, rates))


@given(
    st.sampled_from([LAYERS[0], LAYERS[2], (128, 64, 24, 2)]),
    st.sampled_from([(4, 2), (3, 3), (8, 4), (2, 2)]),  # ranks and nodes
    ROWS,
    ANY_RATES,
    st.sampled_from([math.inf, 42e9]),
)
def test_calls_between_nodes_are_overlapped_where_it_pays(layer, group, num_rows, rates, rail_rate):
    num_ranks, num_nodes = group
    if layer[2] % num_ranks:
        layer = (*layer[:2], 96, layer[3])
    sizes = sizes_of(
        layer,
        num_ranks,
        num_rows=num_rows,
        num_nodes=num_nodes,
        rail_bytes_per_s=rail_rate,
        sums_travel=False,
    )
    check_choice(sizes, rates, brute_force_between_nodes(sizes, rates))
    everything = overlap.overlap_everything(sizes, 132)
    assert None not in (everything.dispatch, everything.gradient_dispatch, everything.combine)
    assert everything.gradient_combine == everything.combine


def test_small_calls_and_single_sms_are_not_overlapped():
    assert overlap.overlap(sizes_of(LAYERS[0], 2), 1) == overlap.SERIAL
    assert overlap.overlap(sizes_of(LAYERS[0], 2, num_rows=64), 132).dispatch is None


def test_order_slot_sends_no_row_before_the_barrier():
    """With order "slot" a combine sends nothing before the barrier; a dispatch is the same in both orders."""
    sizes = sizes_of(LAYERS[2], 4)
    slot = replace(sizes, sums_travel=False)
    for actual, expected in (
        (overlap.overlap(sizes, 132), overlap.overlap(slot, 132)),
        (overlap.overlap_everything(sizes, 132), overlap.overlap_everything(slot, 132)),
    ):
        assert None not in (actual.combine, actual.gradient_combine)
        assert expected == replace(actual, combine=None, gradient_combine=None)


FEWER = {"capacity": 64, "max_tokens": 40}
PLAN = torch.tensor([[0, 1]], dtype=torch.int32).expand(
    16, 2
)  # 16 tokens with two slots each, all of them for rank 0
# (precision, quantised wire, limits of the plan) to (rows, rates, bytes of a row and of its gradient). The rows are the
# expected rows, not the capacity, which is larger.
FORMULAS_GET = [
    (None, "none", {}, (64, overlap.H200, None, None)),
    (None, "none", {"capacity": 100, "max_tokens": 16}, (32, overlap.H200, None, None)),
    (None, "none", FEWER, (64, overlap.H200, None, None)),
    (MXFP8(), "none", {}, (64, overlap.H200, None, None)),
    (Float8Block(), "none", {}, (64, H200_FLOAT8, None, None)),
    (Float8Block(), "backward", {}, (64, H200_FLOAT8, None, 176)),
]


@run_on(2)
def test_formulas_get_the_sizes_of_the_call(rank: int, num_ranks: int) -> None:
    """The formulas of a call get the sizes in FORMULAS_GET, the same on all ranks."""
    results = []
    chosen = formulas.overlap

    def noting(sizes: overlap.Sizes, num_sms: int, rates: overlap.Rates) -> overlap.Overlap:
        results.append((sizes.num_rows, rates, sizes.sent_row_bytes, sizes.sent_gradient_row_bytes))
        return chosen(sizes, num_sms, rates)

    with open_heap("cpu") as heap, pytest.MonkeyPatch.context() as patch:
        patch.setattr(formulas, "overlap", noting)
        for precision, wire, limits, _ in FORMULAS_GET:
            formulas.overlap_of.cache_clear()
            experts = GroupedMLP(2, 160, 32, precision=precision)
            plan = make_plan(PLAN, num_experts=2 * num_ranks, heap=heap, **limits)
            expert_parallel_mlp(
                torch.randn(16, 160), torch.full((16, 2), 0.5), experts, plan, quantized_wire=wire
            )
    assert results == [expected for *_, expected in FORMULAS_GET]


@pytest.mark.parametrize(
    ("name", "expected", "is_known"),
    [
        ("NVIDIA H200", overlap.H200, True),
        ("NVIDIA H100 80GB HBM3", overlap.H100, True),
        ("NVIDIA H20", overlap.H200, False),
        ("NVIDIA B200", overlap.H200, False),
    ],
)
def test_rates_of_another_gpu_are_logged(name, expected, is_known, monkeypatch, caplog):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name)
    )
    overlap.gpu_of.cache_clear()
    for _ in range(2):
        assert overlap.gpu_of(torch.device("cuda", 0)) == expected
    overlap.gpu_of.cache_clear()
    assert [name in record.getMessage() for record in caplog.records] == [True] * (not is_known)
    assert overlap.gpu_of(torch.device("cpu")) == overlap.H200


def test_numbers_that_are_multiplied_do_not_change_a_gpus_memory():
    assert (
        overlap.rates_of(overlap.H100, None)
        == overlap.rates_of(overlap.H100, MXFP8())
        == overlap.H100
    )
    assert overlap.rates_of(overlap.H100, Float8Block()) == replace(
        H200_FLOAT8, memory_bytes=overlap.H100.memory_bytes
    )
    assert overlap.H100.memory_bytes < overlap.H200.memory_bytes


@pytest.mark.parametrize("number", [1, 15, 16, 17, 1000, 65536, 65537, 78643])
def test_numbers_near_each_other_are_cut_alike(number: int):
    rounded = rounded_up(number)
    assert number <= rounded <= 1.125 * number
    assert rounded == rounded_up(rounded)
    assert len({rounded_up(n) for n in range(number, int(1.1 * number) + 1)}) <= 2
