"""Backward without gradients that nobody asked for: less is launched, what is left has the same bits."""

import pytest
import torch
from skipped_gradients import OPTIONS, check_dispatch, check_layer, check_mismatches, check_mlp


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_mlp_computes_what_is_asked_for(cluster, num_ranks: int):
    assert cluster(num_ranks).findings(check_mlp, "cpu", torch.float32, OPTIONS) == []


CHECKS = [(check_dispatch, 1), (check_dispatch, 3), (check_layer, 1), (check_layer, 2)]


@pytest.mark.parametrize(("check", "num_ranks"), [*CHECKS, (check_mismatches, 2), (check_mismatches, 3)])
def test_dispatch_layers_and_ranks_that_disagree(cluster, check, num_ranks: int):
    assert cluster(num_ranks).findings(check, "cpu") == []
