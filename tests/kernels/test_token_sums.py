"""Sums by rank of the token kernels' twins, and the sums that travel, bit for bit against loops over tokens. The loops
do not divide the sums among ranks: every rank's rows of a token are summed in fp32 in k order from the first one on and
rounded, then these sums in fp32 from zero, in rank order, and rounded. test_interpreted.py and tests/gpu compare the
Triton kernels with the twins."""

import pytest
import torch
from simulated_ranks import CASES, Case, differences, run_case

from symmoe.kernels import twin

Outputs = dict[str, torch.Tensor]


def local_sum(case: Case, out: Outputs, source: int, token: int, rank: int) -> torch.Tensor | None:
    """The sum of a token's rows on a rank that its home must get; None without rows."""
    to_rank = out[f"rank {source} slot_to_rank[0]"][token].tolist()
    to_row = out[f"rank {source} slot_to_row[0]"][token].tolist()
    rows = [row for r, row in zip(to_rank, to_row, strict=True) if r == rank and row >= 0]
    if not rows:
        return None
    rank_rows = out[f"rank {rank} rows[0]"]
    if len(rows) == 1:
        return rank_rows[rows[0]]  # a sum of one is no sum: -0.0 and the payload of a NaN stay
    total = rank_rows[rows[0]].float()
    for row in rows[1:]:
        total = total + rank_rows[row].float()
    return total.to(case.dtype)


def expected(case: Case, out: Outputs) -> Outputs:
    """The sums that return to each rank, and the sums at home."""
    ranks, want = range(case.num_ranks), {}
    for source in ranks:
        sums = torch.zeros((case.tokens[source], case.hidden))
        returned = torch.full_like(out[f"rank {source} returned[0]"].view(torch.uint8), 0xFD).view(
            case.dtype
        )
        number = [0] * case.num_ranks
        for token in range(case.tokens[source]):
            for rank in ranks:
                total = local_sum(case, out, source, token, rank)
                if total is not None:
                    sums[token] += total.float()
                    if rank != source and not case.trip_fails:
                        region = rank if rank < source else rank - 1
                        returned[region * case.tokens[source] + number[rank]] = total
                    number[rank] += 1
        want[f"rank {source} returned[0]"] = returned
        want[f"rank {source} sum by rank[0]"] = sums.to(case.dtype) * (
            torch.nan if case.trip_fails else 1
        )
        want[f"rank {source} rows after its sums[0]"] = out[f"rank {source} rows[0]"]
    return want


def problems_of(case: Case, out: Outputs) -> list[str]:
    want = expected(case, out)
    problems = differences({name: out[name] for name in want}, want)
    # The sums at home change nothing anywhere.
    problems += differences({"arena": out["after rank[0]"]}, {"arena": out["sums returned[0]"]})
    return problems


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_loops(name: str):
    assert problems_of(CASES[name], run_case(twin, CASES[name])) == []


@pytest.mark.parametrize("failed", ["ready", "arrived"])
def test_sums_of_a_failed_call_are_nan(failed: str):
    """A call fails in either of the two barriers."""
    received = {
        name: torch.tensor([[-1 if name == failed else 0]]) for name in ("ready", "arrived")
    }
    rows = torch.ones(2, 4)
    to_rank = torch.zeros(3, 1, dtype=torch.int32)
    to_row = torch.zeros(3, 1, dtype=torch.int32)
    packed = torch.full((3, 2), -1, dtype=torch.int32)
    start = torch.zeros(2, dtype=torch.int32)
    out = torch.zeros(3, 4)
    twin.sum_home(
        (rows, rows), (packed, start, to_rank, to_row), tuple(received.values()), out, rank=0
    )
    assert out.isnan().all()
