"""Sums by rank of the token kernels' twins, and the sums that travel, bit for bit against loops over tokens. The loops
do not divide the sums among ranks: every rank's rows of a token are summed in fp32 in k order from the first one on and
rounded, then these sums in fp32 from zero, in rank order, and rounded. test_interpreted.py and tests/gpu compare the
Triton kernels with the twins."""

from itertools import product

import pytest
import torch
from simulated_ranks import CASES, LayerCall
from written_arguments import bytes_with_one_nan

from symmoe.kernels import twin


def local_sum(call: LayerCall, source: int, token: int, rank: int) -> torch.Tensor | None:
    """The sum of a token's rows on a rank as home has to see it; None without rows."""
    plan = call.plans[source]
    places = zip(plan.slot_to_rank[token].tolist(), plan.slot_to_row[token].tolist(), strict=True)
    rows = [call.expert_rows[rank][row] for at, row in places if at == rank and row >= 0]
    if len(rows) < 2:
        return (
            rows[0] if rows else None
        )  # a sum of one is no sum: -0.0 and the payload of a NaN stay
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(call.case.dtype)


def expected_sums(call: LayerCall, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What returns to a rank, and the sums at home."""
    case = call.case
    num_tokens = case.tokens[source]
    sums = torch.zeros((num_tokens, case.hidden))
    returned = torch.empty_like(call.returned(source))
    returned.view(torch.uint8).fill_(0xFD)
    num_sent = [0] * case.num_ranks
    for token, rank in product(range(num_tokens), call.ranks):
        total = local_sum(call, source, token, rank)
        if total is None:
            continue
        sums[token] += total.float()
        if rank != source and not case.trip_fails:
            region = rank if rank < source else rank - 1
            returned[region * num_tokens + num_sent[rank]] = total
        num_sent[rank] += 1
    return returned, sums.to(case.dtype) * (torch.nan if case.trip_fails else 1)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_loops(name: str):
    """Rows stay as they are, and the sums at home change nothing anywhere."""
    call = LayerCall(twin, CASES[name])
    call.run()
    assert all(map(torch.equal, call.arenas, call.peers[0].views))
    for rank in call.ranks:
        actual = call.returned(rank), call.sums[rank], call.rows(rank)
        expected = *expected_sums(call, rank), call.expert_rows[rank]
        for tensors in zip(actual, expected, strict=True):
            assert torch.equal(*map(bytes_with_one_nan, tensors))


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
