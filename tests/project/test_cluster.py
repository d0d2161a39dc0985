"""Tests that run on ranks (tests/support/cluster.py) fail where a rank fails or finds something wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster, RankFailure, run_on


@run_on(2)
def found_on_rank_1(rank: int, num_ranks: int, text: str) -> list[str]:
    return [text] * rank


@run_on()
def raised_on_the_last(rank: int, num_ranks: int) -> None:
    assert rank < num_ranks - 1


def test_a_finding_of_one_rank_fails_the_test(cluster: Callable[..., Cluster]):
    with pytest.raises(AssertionError, match="one is wrong"):
        found_on_rank_1(cluster=cluster, text="one is wrong")


def test_an_error_of_one_rank_fails_the_test(cluster: Callable[..., Cluster]):
    with pytest.raises(RankFailure, match="rank < num_ranks - 1"):
        raised_on_the_last(cluster=cluster, num_ranks=2)
