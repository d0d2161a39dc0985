"""Layers in a recipe's numbers on GPUs: the oracle's numbers, the twins' bytes, the same bits in every way, graphs."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU that converts to E4M3: Hopper and newer", allow_module_level=True)

import grouped_cases as cases
import low_precision_oracle as oracle
import numpy as np
from gpu_steps import check_replays
from layers import WAYS
from low_precision_cases import CASES, NUMBERS, TINY, check_bias_gradients, every_recipe, rows_of_groups
from low_precision_checks import NAMES, check_layer, check_second_bias, check_ways, run_cut
from low_precision_oracle import relative_error
from suites.traced import trace_step

from symmoe import GroupedLinear, GroupedMLP, ScaledClampedSwiGLU, ScaledSReLU
from symmoe.precision import MXFP8, NVFP4, Float8Block

pytestmark = pytest.mark.timeout(300, method="thread")

# Groups without rows, of one row, of more than a tile; widths of whole tiles, and those that end within a block.
SIZES = cases.Sizes(splits=(300, 0, 1, 129, 70), lead=(51, 10), hidden=512, ffn=256)
ODD = replace(SIZES, hidden=544, ffn=288)
BF16 = torch.bfloat16


# -- grouped layers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", NUMBERS, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["whole", "odd"])
def test_experts_multiply_these_numbers(recipe, sizes):
    case = cases.Case(dtype=BF16, bias=False, buffers=())
    inputs = cases.make_inputs(case, sizes=sizes, device="cuda")
    ran = cases.run_experts("mlp", case, inputs, precision=recipe)

    def rounded(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).to(BF16).float().numpy()

    weights = (inputs.w1, inputs.w2)
    want = oracle.mlp(NUMBERS[recipe], inputs.x, inputs.scale, weights, inputs.d_y, sizes.splits, round_to=rounded)
    for name, numbers in want.items():
        assert relative_error(rows_of_groups(ran.tensors[name], name, sizes), numbers) < 1e-2, name


@every_recipe
@pytest.mark.parametrize("path", cases.PATHS[1:])
def test_fused_experts_are_three_modules(recipe, path):
    for activation, bias, sizes in (
        (None, False, SIZES),
        (None, True, SIZES),
        (None, True, ODD),
        (ScaledClampedSwiGLU(interleave=8), False, SIZES),
        (ScaledSReLU(), True, ODD),
    ):
        case = cases.Case(dtype=BF16, bias=bias, is_nd=bias)
        width = sizes.ffn if isinstance(activation, ScaledSReLU) else None
        inputs = cases.make_inputs(case, sizes=sizes, width=width, device="cuda")
        options = {"activation": activation, "precision": recipe}
        separate = cases.run_experts("modules", replace(case, buffers=()), inputs, **options)
        buffers = cases.Buffers.of(case, inputs, out_features=sizes.hidden)
        fused = cases.run_experts(path, case, inputs, buffers, **options)
        cases.assert_same_results(fused, separate, sizes)
        cases.assert_buffers_used(fused, buffers, sizes)


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
@pytest.mark.parametrize("way", ["packed", "scattered", "delayed"])
def test_bias_gradients_have_the_bits_of_a_kernel_that_only_sums(recipe, way):
    check_bias_gradients(recipe, way, BF16, "cuda")


@every_recipe
def test_no_kernel_reads_the_rows_for_bias_gradients_alone(recipe):
    options = {"bias": True, "precision": recipe, "dtype": BF16, "device": "cuda"}
    linear, mlp = GroupedLinear(2, 64, 128, **options), GroupedMLP(2, 64, 128, **options)
    x, scale = torch.randn(300, 64, device="cuda", dtype=BF16, requires_grad=True), torch.ones(300, device="cuda")
    splits = torch.tensor([100, 200], device="cuda")

    def step():
        linear(x, splits).sum().backward()
        mlp(x, splits, scale).sum().backward()

    step()
    launched = trace_step(step, row_numel=x.numel()).kernels
    assert (launched["grouped_bias_grad_kernel"], launched["sum_dbias_kernel"]) == (0, 3)


# -- expert parallelism -----------------------------------------------------------------------------------------------
@every_recipe
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ways_give_the_same_bits(cluster, num_ranks: int, recipe):
    assert cluster(num_ranks, "cuda").findings(check_ways, "cuda", recipe, BF16, timeout_s=280) == []


@pytest.mark.parametrize(
    ("recipe", "wire"), [(NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "forward")], ids=str
)
def test_any_number_of_ranks_gives_the_same_bits(cluster, recipe, wire):
    results = cluster(1, "cuda").run(run_cut, "cuda", recipe, wire, [44], "slot")
    parts = cluster(2, "cuda").run(run_cut, "cuda", recipe, wire, [40, 4], "slot")
    for name in NAMES:
        assert np.array_equal(np.concatenate([part[name] for part in parts]), results[0][name]), name


@pytest.mark.parametrize(
    ("recipe", "wire"), [(NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "backward")], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers(cluster, num_ranks: int, recipe, wire):
    assert cluster(num_ranks, "cuda").findings(check_layer, "cuda", recipe, wire) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "wire"),
    [(Float8Block(), "none"), (Float8Block(), "both"), (MXFP8(), "none"), (NVFP4(), "none")],
    ids=str,
)
def test_second_bias(cluster, num_ranks: int, recipe, wire: str):
    assert cluster(num_ranks, "cuda").findings(check_second_bias, "cuda", recipe, wire) == []


@pytest.mark.parametrize(("recipe", "wire"), [(Float8Block(), "both"), (MXFP8(), "none"), (NVFP4(), "none")], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replays_equal_eager_steps(cluster, num_ranks: int, recipe, wire):
    """Of a CUDA graph, with other tokens and other gradients each time: stochastic rounding goes along."""
    way = {**WAYS[2], "precision": recipe, "quantized_wire": wire}
    assert cluster(num_ranks, "cuda").findings(check_replays, 21, "all", False, way, timeout_s=240) == []
