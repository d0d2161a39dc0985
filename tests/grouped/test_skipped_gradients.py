"""Backward without gradients that nobody asked for: less is launched, what is left has the same bits."""

import pytest
import torch
from skipped_gradients import OPTIONS, check_dispatch, check_layer, check_mismatches, check_mlp

from symmoe.precision import Float8Block

FP32, BF16 = torch.float32, torch.bfloat16
PLAIN = [options for options in OPTIONS if "precision" not in options]
QUANTIZED = [options for options in OPTIONS if isinstance(options.get("precision"), Float8Block)]  # on any Hopper
ON_GPUS = [
    pytest.param(num_ranks, "cuda", dtype, options, id=f"{num_ranks} GPUs, {name}, {dtype}", marks=pytest.mark.gpu)
    for num_ranks in (1, 2)
    for name, dtype, options in (("plain", FP32, PLAIN), ("plain", BF16, PLAIN), ("quantized", BF16, QUANTIZED))
]
ON_CPUS = [
    pytest.param(num_ranks, "cpu", FP32, OPTIONS, id=f"{num_ranks}", marks=[pytest.mark.slow] * (num_ranks == 2))
    for num_ranks in (1, 2, 3)
]


@pytest.mark.parametrize(("num_ranks", "device", "dtype", "options"), [*ON_CPUS, *ON_GPUS])
def test_the_mlp_computes_what_is_asked_for(cluster, num_ranks: int, device: str, dtype: torch.dtype, options):
    assert cluster(num_ranks, device).findings(check_mlp, device, dtype, options) == []


CHECKS = [(check_dispatch, 1), (check_dispatch, 3), (check_layer, 1), (check_layer, 2)]
CHECKS = [(*case, "cpu") for case in [*CHECKS, (check_mismatches, 2), (check_mismatches, 3)]]
CHECKS += [
    pytest.param(each, 2, "cuda", marks=pytest.mark.gpu) for each in (check_dispatch, check_layer, check_mismatches)
]


@pytest.mark.parametrize(("check", "num_ranks", "device"), CHECKS)
def test_dispatch_layers_and_ranks_that_disagree(cluster, check, num_ranks: int, device: str):
    assert cluster(num_ranks, device).findings(check, device) == []
