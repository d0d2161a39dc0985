"""Quantising kernels on a GPU against the twins on the CPU, byte for byte, with device splits and in a CUDA graph."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import quantize_cases as cases
from compared_launches import IN_ALL_FORMATS, IN_NO_FORMAT, ON_THE_WIRE, differences, quantising
from graphs import captured
from host_reads import synchronising_is_an_error
from launch_table import WAYS, Launch
from row_ranges import random_ranges

from symmoe.kernels import gpu, twin
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.precision import MXFP8, NVFP4, Float8Block

ROWS = sum(cases.SPLITS) + cases.TAIL
OTHER_SPLITS = (100, 3, 0, 0, 200, 7)


KERNELS = [*IN_ALL_FORMATS, *ON_THE_WIRE, *IN_NO_FORMAT]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.parametrize("width", [64, 160, 272, 544, 2880])
@dtypes
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_are_those_of_the_twin(kernel, dtype, width):
    for launch in quantising({"H": width, "W": 160}, dtype, kernel):
        for splits in (cases.SPLITS, cases.SUMMED):
            assert differences(launch, gpu, "cuda", splits=splits, hard=True) == []


@dtypes
@pytest.mark.parametrize("kernel", ["quantize_weights", "quantize_weight_pairs", *ON_THE_WIRE])
def test_bits_of_wide_operands_are_those_of_the_twin(kernel, dtype):
    for launch in quantising({"H": 7168, "W": 1536}, dtype, kernel):
        assert differences(launch, gpu, "cuda", splits=(37, 0, 130), hard=True) == []


@dtypes
@pytest.mark.parametrize("kernel", ["quantize_rows", "unpack_rows"])
def test_ranges_of_rows(kernel, dtype):
    splits = (0, 133, 1, 300, 0, 128, 777)
    for launch in quantising({"H": 1040}, dtype, kernel):
        for part in random_ranges(splits, 3, step=SLOT_ROWS):
            if launch.format != "nvfp4":
                assert differences(launch, gpu, "cuda", splits=splits, part=part, hard=True) == []


@pytest.mark.parametrize("num_sms", [1, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["float8_block", "float8_block_powers"])
@pytest.mark.parametrize(
    "kernel", ["quantize_weight_pairs", "quantize_columns", "requantize_columns"]
)
def test_bits_do_not_depend_on_how_programs_for_hopper_walk(kernel, name, dtype, num_sms):
    pytest.importorskip("symmoe.kernels.hopper_launchers")
    options = {"splits": cases.SUMMED, "hard": True, "tuning": {"num_sms": num_sms}}
    for ways in WAYS[kernel].keys() & {"table", "indexed"}:
        for variant in ("", ways):
            launch = Launch(f"launch_{kernel}", {"H": 512, "W": 384}, dtype, name, ways=variant)
            assert differences(launch, device="cuda", like=kernel, **options) == []


def test_every_bf16_number():
    """Conversions of the hardware, which no interpreter has: blocks whose scale is 1."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    every = every[torch.isfinite(every) & (every.abs() <= 448)]
    rows = torch.full((-(-every.numel() // 127), 128), 448.0, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(every, (0, rows.shape[0] * 127 - every.numel()))
    rows[:, 1:] = padded.view(-1, 127)
    row_range = cases.row_range_of((rows.shape[0],))
    for name in ("float8_block", "mxfp8"):
        actual = cases.quantize_all(gpu, rows.cuda(), row_range.cuda(), name)
        assert cases.differences(actual, cases.quantize_all(twin, rows, row_range, name)) == []


@pytest.mark.parametrize("recipe", [Float8Block(), MXFP8(), NVFP4()], ids=str)
def test_graph_replay_with_other_rows_and_splits(recipe):
    generator = torch.Generator().manual_seed(0)
    replayed = [
        (torch.randn(ROWS, 256, generator=generator).bfloat16(), splits)
        for splits in (cases.SPLITS, OTHER_SPLITS)
    ]
    rows = replayed[0][0].cuda()
    row_range = cases.row_range_of().cuda()
    seeds = torch.arange(len(cases.SPLITS), device="cuda") if recipe.stochastic_gradients else None
    dbias = torch.empty(len(cases.SPLITS), 256, device="cuda")
    factor = torch.rand(ROWS, device="cuda")

    def step():
        by_rows = recipe.quantize(rows, row_range, seeds=seeds, dbias=dbias, bias_scale=factor)
        quantized = by_rows, recipe.quantize_columns(rows, row_range, seeds=seeds)
        return quantized, [matrix.dequantize() for matrix in quantized]

    graph, (_, actual) = captured(step)
    for new_rows, splits in replayed:
        rows.copy_(new_rows)
        row_range.copy_(cases.row_range_of(splits))
        graph.replay()
        seeds_here = None if seeds is None else seeds.cpu()
        for tensor, quantize in zip(
            actual, (recipe.quantize, recipe.quantize_columns), strict=True
        ):
            expected = quantize(new_rows, cases.row_range_of(splits), seeds=seeds_here)
            # Data and scales are the same bits; undoing a Hadamard transform sums on the device.
            assert torch.allclose(tensor.cpu(), expected.dequantize(), rtol=1e-5, atol=1e-5)
        sums = torch.empty(len(cases.SPLITS), 256)
        twin.grouped_bias_grad(new_rows, cases.row_range_of(splits), sums, scale=factor.cpu())
        assert torch.equal(dbias.cpu(), sums)


def test_nothing_waits_for_the_device():
    rows = torch.randn(ROWS, 256, device="cuda").bfloat16()
    row_range = cases.row_range_of().cuda()
    weight = torch.randn(4, 128, 256, device="cuda")
    dbias = torch.empty(len(cases.SPLITS), 256, device="cuda")

    def step():
        for recipe in (Float8Block(), MXFP8(), NVFP4()):
            for quantized in (
                recipe.quantize(rows, row_range),
                recipe.quantize(rows),
                recipe.quantize(rows, row_range, dbias=dbias),
                recipe.quantize_columns(rows, row_range),
                recipe.quantize_weight(weight),
                recipe.quantize_weight_transposed(weight),
                *recipe.quantize_weight_pair(weight),
            ):
                quantized.dequantize()

    step()
    with synchronising_is_an_error():
        step()
