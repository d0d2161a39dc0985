"""Quantising kernels on a GPU against the twins on the CPU, byte for byte, with device splits and in a CUDA graph."""

import types

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import quantize_cases as cases
from graphs import captured
from host_reads import synchronising_is_an_error
from quantize_checks import (
    check_columns,
    check_ranges,
    check_received,
    check_rows_of_an_index,
    check_sent,
    check_tiles,
)

from symmoe.kernels import gpu, twin
from symmoe.precision import MXFP8, NVFP4, Float8Block

ROWS = sum(cases.SPLITS) + cases.TAIL
OTHER_SPLITS = (100, 3, 0, 0, 200, 7)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("width", [160, 2880])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_rows_and_columns(name, dtype, width, hard):
    rows, row_range = cases.hard_rows(ROWS, width, dtype), cases.row_range_of()
    found = cases.quantize_all(gpu, rows.cuda(), row_range.cuda(), name, hard=hard)
    assert (
        cases.differences(found, cases.quantize_all(twin, rows, row_range, name, hard=hard)) == []
    )


@pytest.mark.parametrize("width", [160, 2880])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_sums_for_a_bias_gradient(name, dtype, width):
    cases.check_bias_sums(gpu, name, dtype, width=width, device="cuda")


@pytest.mark.parametrize("shape", [(2, 160, 96), (3, 1536, 2048)], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_weights(name, shape):
    weight = cases.hard_rows(shape[0] * shape[1], shape[2], torch.bfloat16).view(shape)
    wanted = cases.quantize_weights(twin, weight, name)
    assert cases.differences(cases.quantize_weights(gpu, weight.cuda(), name), wanted) == []
    assert (
        cases.differences(cases.quantize_weights(gpu, weight.cuda(), name, in_pairs=True), wanted)
        == []
    )


@pytest.mark.parametrize("width", [64, 272, 544, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in cases.FORMATS if cases.FORMATS[name].element == "e4m3"]
)
def test_the_wire(name, dtype, width):
    check_sent(gpu, name, cases.hard_rows(ROWS, width, dtype), "cuda")
    check_received(gpu, name, width, cases.row_range_of(), dtype, "cuda")
    check_columns(gpu, name, cases.hard_rows(90, width, dtype), cases.row_range_of(), ROWS, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_rows_of_an_index_and_of_ranges(name, dtype):
    check_rows_of_an_index(gpu, name, cases.hard_rows(90, 288, dtype), cases.row_range_of(), "cuda")
    if cases.FORMATS[name].element == "e4m3":
        check_ranges(
            gpu, name, (0, 133, 1, 300, 0, 128, 777), cases.hard_rows(90, 1040, dtype), "cuda"
        )


@pytest.mark.parametrize("num_sms", [1, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["float8_block", "float8_block_powers"])
def test_weights_in_whole_blocks(name, dtype, num_sms):
    weights = pytest.importorskip("symmoe.kernels.low_precision.hopper_weights")
    weight = cases.hard_rows(3 * 384, 512, dtype).view(3, 384, 512)

    def launched(*args, amax):
        assert weights.takes_weight_pairs(args[-1], args[0])
        weights.launch_quantize_weight_pairs(*args, num_sms=num_sms)

    on_gpu, expected = cases.Scattered(weight.cuda()), cases.quantize_weights(twin, weight, name)
    kernels = types.SimpleNamespace(quantize_weight_pairs=launched)
    for table in (None, on_gpu.table):
        found = cases.quantize_weights(kernels, weight.cuda(), name, table, in_pairs=True)
        assert cases.differences(found, expected) == []


@pytest.mark.parametrize("num_sms", [1, None])
def test_columns_do_not_depend_on_how_programs_walk(num_sms):
    columns = pytest.importorskip("symmoe.kernels.low_precision.hopper_columns")
    rows, block_format = cases.hard_rows(ROWS, 2880, torch.bfloat16), cases.FORMATS["float8_block"]
    expected, found = (
        cases.column_buffers(ROWS, len(cases.SPLITS), 2880, block_format, device)
        for device in ("cpu", "cuda")
    )
    twin.quantize_columns(rows, cases.row_range_of(), expected, block_format)
    on_gpu = rows.cuda(), cases.row_range_of().cuda()
    columns.launch_quantize_columns(*on_gpu, found, block_format, num_sms=num_sms)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(cases.as_bytes(left), cases.as_bytes(right))


def test_every_bf16_number():
    """Conversions of the hardware, which no interpreter has: blocks whose scale is 1."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    every = every[torch.isfinite(every) & (every.abs() <= 448)]
    rows = torch.full((-(-every.numel() // 127), 128), 448.0, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(every, (0, rows.shape[0] * 127 - every.numel()))
    rows[:, 1:] = padded.view(-1, 127)
    row_range = cases.row_range_of((rows.shape[0],))
    for name in ("float8_block", "mxfp8"):
        found = cases.quantize_all(gpu, rows.cuda(), row_range.cuda(), name)
        assert cases.differences(found, cases.quantize_all(twin, rows, row_range, name)) == []


@pytest.mark.parametrize("num_blocks", [1, 4, 6, 90])
def test_swizzled_scales(num_blocks):
    check_tiles(gpu, cases.row_range_of(), ROWS, num_blocks, "cuda")


@pytest.mark.parametrize("recipe", [Float8Block(), MXFP8(), NVFP4()], ids=str)
def test_graph_replay_with_other_rows_and_splits(recipe):
    generator = torch.Generator().manual_seed(0)
    replayed = [
        (torch.randn(ROWS, 256, generator=generator).bfloat16(), each)
        for each in (cases.SPLITS, OTHER_SPLITS)
    ]
    rows, row_range = replayed[0][0].cuda(), cases.row_range_of().cuda()
    seeds = torch.arange(len(cases.SPLITS), device="cuda") if recipe.stochastic_gradients else None
    dbias, factor = (
        torch.empty(len(cases.SPLITS), 256, device="cuda"),
        torch.rand(ROWS, device="cuda"),
    )

    def step():
        by_rows = recipe.quantize(rows, row_range, seeds=seeds, dbias=dbias, bias_scale=factor)
        quantized = by_rows, recipe.quantize_columns(rows, row_range, seeds=seeds)
        return quantized, [each.dequantize() for each in quantized]

    graph, (_, found) = captured(step)
    for new_rows, splits in replayed:
        rows.copy_(new_rows)
        row_range.copy_(cases.row_range_of(splits))
        graph.replay()
        seeds_here = None if seeds is None else seeds.cpu()
        for tensor, quantize in zip(found, (recipe.quantize, recipe.quantize_columns), strict=True):
            expected = quantize(new_rows, cases.row_range_of(splits), seeds=seeds_here)
            # Data and scales are the same bits; undoing a Hadamard transform sums on the device.
            assert torch.allclose(tensor.cpu(), expected.dequantize(), rtol=1e-5, atol=1e-5)
        sums = torch.empty(len(cases.SPLITS), 256)
        twin.grouped_bias_grad(new_rows, cases.row_range_of(splits), sums, scale=factor.cpu())
        assert torch.equal(dbias.cpu(), sums)


def test_nothing_waits_for_the_device():
    rows, row_range = torch.randn(ROWS, 256, device="cuda").bfloat16(), cases.row_range_of().cuda()
    weight, dbias = (
        torch.randn(4, 128, 256, device="cuda"),
        torch.empty(len(cases.SPLITS), 256, device="cuda"),
    )

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
