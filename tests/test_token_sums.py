"""Sums by rank of the token kernels' twins against loops over tokens, and what they leave in the buffers, bit for bit.

The loops know nothing of who sums what: every rank's rows of a token are summed in fp32 in k order from the first one
on and rounded, then these sums in fp32 from zero, in rank order, and rounded. The Triton kernels are compared with the
twins elsewhere (test_interpreted.py, tests/gpu).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from simulated_ranks import CASES, Case, differences, run_case

from symmoe.kernels import twin

Outputs = dict[str, torch.Tensor]


def local_sum(case: Case, out: Outputs, source: int, token: int, rank: int) -> tuple[int, torch.Tensor] | None:
    """A token's primary row on a rank, and the sum of its rows there as home has to see it; None without rows."""
    to_rank = out[f"rank {source} slot_to_rank[0]"][token].tolist()
    to_row = out[f"rank {source} slot_to_row[0]"][token].tolist()
    rows = [row for r, row in zip(to_rank, to_row, strict=True) if r == rank and row >= 0]
    if not rows:
        return None
    held = out[f"rank {rank} rows before rank[0]"]
    total = held[rows[0]].float()
    for row in rows[1:]:
        total = total + held[row].float()
    total = total.to(case.dtype)
    if len(rows) == 1:
        total = held[rows[0]].clone()  # a sum of one is no sum: -0.0 and the payload of a NaN stay
    if rank % 2 and rank != source:  # odd ranks do not pre-reduce the first panel of columns
        panel = case.hidden // 2 // 8 * 8
        total[:panel] = held[rows[0], :panel]
    return rows[0], total


def expected(case: Case, out: Outputs) -> Outputs:
    """The sums at home and the rows that peers read."""
    ranks, want = range(case.num_ranks), {}
    for rank in ranks:
        want[f"rank {rank} rows for rank[0]"] = out[f"rank {rank} rows before rank[0]"].clone()
    for source in ranks:
        sums = torch.zeros((case.tokens[source], case.hidden))
        for token in range(case.tokens[source]):
            for rank in ranks:
                summed = local_sum(case, out, source, token, rank)
                if summed is not None:
                    primary, total = summed
                    sums[token] += total.float()
                    if rank != source and not case.trip_fails:  # nothing has arrived then, so nothing is reduced
                        want[f"rank {rank} rows for rank[0]"][primary] = total
        want[f"rank {source} sum by rank[0]"] = sums.to(case.dtype) * (torch.nan if case.trip_fails else 1)
    return want


def wrong(case: Case, out: Outputs) -> list[str]:
    want = expected(case, out)
    found = differences({name: out[name] for name in want}, want)
    # Pulling changes nothing anywhere.
    found += differences({"arena": out["after rank[0]"]}, {"arena": out["ready for rank[0]"]})
    return found


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_loops(name: str):
    assert wrong(CASES[name], run_case(twin, CASES[name])) == []


def pull_without_rounding(primary, to_rank, to_row, peers, *args, **kwargs):
    """A rank's own rows one by one among the peers' sums."""
    before, after = primary[:, : peers.rank], primary[:, peers.rank + 1 :]
    ranks = torch.arange(peers.num_ranks, dtype=torch.int32).expand_as(primary)
    own = to_row.where(to_rank == peers.rank, -1)
    sources = torch.cat([ranks[:, : peers.rank], to_rank, ranks[:, peers.rank + 1 :]], 1)
    twin.pull_rows(sources, torch.cat([before, own, after], 1), peers, *args, **kwargs)


def pull_own_rows_last(primary, to_rank, to_row, peers, *args, **kwargs):
    """As if this rank were the last one: the peers' sums first, then its own."""
    own = torch.zeros_like(args[-1])
    twin.pull_sums(torch.full_like(primary, -1), to_rank, to_row, peers, args[0], own, **kwargs)
    twin.pull_sums(primary, torch.full_like(to_rank, -1), to_row, peers, *args, **kwargs)
    args[-1].copy_(args[-1].float() + own.float())


def pull_backwards(primary, to_rank, to_row, *args, **kwargs):
    twin.pull_sums(primary, to_rank.flip(1), to_row.flip(1), *args, **kwargs)


def pull_the_primary_row(primary, to_rank, to_row, peers, *args, **kwargs):
    own = primary[:, peers.rank : peers.rank + 1]
    twin.pull_sums(primary, torch.full_like(own, peers.rank), own.contiguous(), peers, *args, **kwargs)


def reduce_all(rows, packed_to_row, starts, *, rank, **kwargs):
    twin.pre_reduce(rows, packed_to_row, torch.tensor([0, 0, int(starts[-1])]), rank=0, **kwargs)


def reduce_all_but_the_first(rows, packed_to_row, starts, *, rank, **kwargs):
    twin.pre_reduce(rows, packed_to_row, starts, rank=0, **kwargs)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"pull_sums": pull_without_rounding},
        {"pull_sums": pull_own_rows_last},
        {"pull_sums": pull_backwards},
        {"pull_sums": pull_the_primary_row},
        {"pre_reduce": reduce_all},
        {"pre_reduce": reduce_all_but_the_first},
    ],
    ids=lambda spoiled: next(iter(spoiled.values())).__name__,
)
def test_other_sums_are_found(spoiled: dict):
    ops, found = SimpleNamespace(**{**vars(twin), **spoiled}), []
    for dtype in (torch.bfloat16, torch.float32):  # one that is rounded, one whose bits show an order of sums
        case = Case(tokens=(20, 15, 18), num_experts=18, top_k=8, hidden=40, dtype=dtype)
        assert wrong(case, run_case(twin, case)) == []
        found += wrong(case, run_case(ops, case))
    assert found
