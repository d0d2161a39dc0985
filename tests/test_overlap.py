"""How rows are cut into parts by arrival, how SMs are divided, how columns are cut into panels."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symmoe.kernels import twin
from symmoe.kernels.parts import PART_ROWS
from symmoe.moe.overlap import H200, Move, Rates, Sizes, divide, overlap, panels


@given(st.data())
def test_parts_need_only_rows_that_have_arrived(data):
    """Against the definition, row by row, for one expert after the other."""
    num_ranks = data.draw(st.integers(1, 8))
    rank = data.draw(st.integers(0, num_ranks - 1))
    experts = data.draw(
        st.lists(st.lists(st.integers(0, 300), min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=3)
    )
    starts, row = torch.zeros((num_ranks + 1, len(experts)), dtype=torch.int32), 0
    for e, counts in enumerate(experts):
        for source, count in enumerate(counts):
            starts[source, e] = row
            row += count
        starts[num_ranks, e] = row
    ranges = torch.full((num_ranks, 2, len(experts)), -7, dtype=torch.int32)
    twin.split_by_source(starts, ranges, rank=rank)

    arrivals = [(rank - step) % num_ranks for step in range(num_ranks)]
    for e, counts in enumerate(experts):
        first, end = int(starts[0, e]), int(starts[num_ranks, e])
        row_to_source = [source for source, count in enumerate(counts) for _ in range(count)]
        computed, arrived = set(), set()
        for source in arrivals:
            arrived.add(source)
            begin, stop = ranges[source, :, e].tolist()
            rows = set(range(begin, stop))
            assert not rows & computed
            assert all(row_to_source[row - first] in arrived for row in rows)
            assert begin == end or (begin - first) % PART_ROWS == 0
            computed |= rows
            # No tile whose rows have all arrived is left for later (unless it is a rank without rows that comes later).
            for tile in range(first, end, PART_ROWS) if all(counts) else ():
                rows = set(range(tile, min(tile + PART_ROWS, end)))
                if all(row_to_source[row - first] in arrived for row in rows):
                    assert rows <= computed
        assert computed == set(range(first, end))


@pytest.mark.parametrize("width", [1, 64, 256, 300, 2048, 2880, 7168])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 100])
def test_panels_cover_the_columns(width: int, number: int):
    cut = panels(width, number)
    assert cut[0][0] == 0
    assert cut[-1][1] == width
    assert all(one[1] == other[0] for one, other in pairwise(cut))
    assert all(first < end and first % 256 == 0 for first, end in cut)
    assert len(cut) == min(number, -(-width // 256))


def test_division_hides_the_move_with_the_fewest_programs():
    rates = Rates(
        link_bytes=100e9, program_push_bytes=25e9, program_pull_bytes=10e9, program_memory_bytes=50e9, flops=100e12
    )
    # 100 us of GEMM on 10 SMs; a push of 5 MB takes 200 us with one program, 100 with two, 67 with three.
    division = divide(10, Move(push_bytes=5e6), 1e10, rates)
    assert (division.num_ctas, division.num_sms) == (2, 8)
    # A pull takes 167 us with three programs; with four, the GEMMs do.
    assert divide(10, Move(pull_bytes=5e6), 1e10, rates).num_ctas == 3
    # Nothing to move costs one SM; more than the GEMMs can hide takes no more programs than fill the link.
    assert divide(10, Move(), 1e10, rates).num_ctas == 1
    assert divide(10, Move(push_bytes=5e7), 1e10, rates).num_ctas == 4
    # Memory traffic counts, too: 5 MB take 100 us with one program, with which the push of 2.5 MB takes 100 more.
    assert divide(10, Move(push_bytes=2.5e6, memory_bytes=5e6), 1e10, rates).num_ctas == 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("hidden", "ffn", "num_experts", "top_k"), [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 64, 8)]
)
def test_overlap_of_the_benchmarked_layers(num_ranks: int, hidden: int, ffn: int, num_experts: int, top_k: int):
    sizes = Sizes(
        num_rows=8192 * top_k,
        hidden=hidden,
        ffn=ffn,
        top_k=top_k,
        num_experts=num_experts,
        num_ranks=num_ranks,
        item_bytes=2,
    )
    chosen = overlap(sizes, 132)
    divisions = (chosen.dispatch, chosen.gradient_dispatch, chosen.combine, chosen.gradient_combine)
    assert all(1 <= d.num_ctas <= 66 and d.num_ctas + d.num_sms == 132 for d in divisions)
    assert 1 <= chosen.num_panels <= hidden // 256
    # More time to hide behind never takes more programs.
    longer = overlap(Sizes(**{**vars_of(sizes), "ffn": 4 * ffn}), 132)
    assert longer.gradient_combine.num_ctas <= chosen.gradient_combine.num_ctas
    # No more programs than fill the link, where nothing else is moved.
    assert chosen.dispatch.num_ctas * H200.program_push_bytes < H200.link_bytes + H200.program_push_bytes


def test_wire_bytes_are_those_of_uniform_routing():
    sizes = Sizes(num_rows=12000, hidden=1, ffn=1, top_k=3, num_experts=12, num_ranks=4, item_bytes=1)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand((4000, 12), generator=generator).topk(3).indices // 3
    remote = sum(int((chosen == rank).any(1).sum()) for rank in (1, 2, 3))
    assert abs(sizes.wire_bytes - remote) < 0.02 * remote


def vars_of(sizes: Sizes) -> dict[str, int]:
    return {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}
