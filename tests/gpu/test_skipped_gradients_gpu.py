"""Backward on GPUs without gradients that nobody asked for: less is launched, what is left has the same bits."""

import pytest
import torch
from skipped_gradients import OPTIONS, check_dispatch, check_layer, check_mismatches, check_mlp

from symmoe.precision import Float8Block

# Other recipes need other GPUs.
PLAIN = [options for options in OPTIONS if "precision" not in options]
QUANTIZED = [options for options in OPTIONS if isinstance(options.get("precision"), Float8Block)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_mlp_computes_what_is_asked_for(cluster, num_ranks: int, dtype: torch.dtype):
    assert cluster(num_ranks, "cuda").findings(check_mlp, "cuda", dtype, PLAIN, timeout_s=280) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_so_do_quantised_experts(cluster, num_ranks: int):
    assert cluster(num_ranks, "cuda").findings(check_mlp, "cuda", torch.bfloat16, QUANTIZED, timeout_s=280) == []


@pytest.mark.parametrize("check", [check_dispatch, check_layer, check_mismatches])
def test_dispatch_layers_and_ranks_that_disagree(cluster, check):
    assert cluster(2, "cuda").findings(check, "cuda", timeout_s=280) == []
