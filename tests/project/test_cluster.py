"""Tests on ranks (tests/support/cluster.py) fail if a rank raises or records a finding."""

from collections.abc import Callable

import pytest
from cluster import Cluster, RankFailure, run_on
from worker import Findings

from symmoe import SymmetricHeap


@run_on(2)
def found_on_rank_1(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, text: str
) -> None:
    findings.check(heap.rank != 1, text)


@run_on()
def raised_on_the_last(rank: int, num_ranks: int) -> None:
    assert rank < num_ranks - 1


def test_a_finding_and_an_error_of_one_rank_fail_the_test(cluster: Callable[..., Cluster]):
    with pytest.raises(AssertionError, match=r"^rank 1 of 2: one is wrong$"):
        found_on_rank_1(cluster=cluster, text="one is wrong")
    with pytest.raises(RankFailure, match="rank < num_ranks - 1"):
        raised_on_the_last(cluster=cluster, num_ranks=2)
