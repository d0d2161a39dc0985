"""Layers in a recipe's numbers on GPUs: the caller's buffers, launches, graphs. See tests/precision for the rest."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU that converts to E4M3: Hopper and newer", allow_module_level=True)

import grouped_cases as cases
from gpu_steps import check_replays
from layers import WAYS
from low_precision_cases import CASES, TINY, every_recipe
from suites.figures import trace_step

from symmoe import GroupedLinear, GroupedMLP
from symmoe.precision import MXFP8, NVFP4, Float8Block

pytestmark = pytest.mark.timeout(300, method="thread")

BF16 = torch.bfloat16


# -- grouped layers ---------------------------------------------------------------------------------------------------
@every_recipe
def test_buffers_of_the_caller(recipe):
    for case in CASES:
        inputs = cases.make_inputs(case, sizes=TINY, width=32, out_features=32, device="cuda")
        buffers = cases.Buffers.of(case, inputs, out_features=32)
        ran = cases.run_linear(case, inputs, buffers, precision=recipe)
        cases.assert_buffers_used(ran, buffers, TINY)
        want = cases.run_linear(replace(case, buffers=(), delayed=False), inputs, precision=recipe)
        cases.assert_same_results(ran, want, TINY)
        discrete = cases.run_linear(
            replace(case, buffers=(), delayed=False), inputs, precision=recipe, weights="discrete"
        )
        cases.assert_same_results(discrete, want, TINY)


@every_recipe
def test_no_kernel_reads_the_rows_for_bias_gradients_alone(recipe):
    options = {"bias": True, "precision": recipe, "dtype": BF16, "device": "cuda"}
    linear = GroupedLinear(2, 64, 128, **options)
    mlp = GroupedMLP(2, 64, 128, **options)
    x = torch.randn(300, 64, device="cuda", dtype=BF16, requires_grad=True)
    scale = torch.ones(300, device="cuda")
    splits = torch.tensor([100, 200], device="cuda")

    def step():
        linear(x, splits).sum().backward()
        mlp(x, splits, scale).sum().backward()

    step()
    launched = trace_step(step, row_numel=x.numel()).kernels
    assert (launched["grouped_bias_grad_kernel"], launched["sum_dbias_kernel"]) == (0, 3)


# -- expert parallelism -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "wire"), [(Float8Block(), "both"), (MXFP8(), "none"), (NVFP4(), "none")], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replays_equal_eager_steps(cluster, num_ranks: int, recipe, wire):
    """Of a CUDA graph, with other tokens and other gradients each time: stochastic rounding goes along."""
    fields = {**WAYS[2], "precision": recipe, "quantized_wire": wire}
    assert (
        cluster(num_ranks, "cuda").findings(check_replays, 21, "all", False, fields, timeout_s=240)
        == []
    )
