"""Recipes: errors, sizes, layouts and arguments."""

import itertools
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch

pytest.importorskip("ml_dtypes")

from low_precision_oracle import relative_error
from quantize_cases import FILL, SPLITS, TAIL, as_bytes, bounds, filled, row_range_of
from quantize_reference import swizzled_offset

from symmoe import kernels, precision
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.operands import ScatteredWeight, TensorTable
from symmoe.pointers import pack_weight_ptrs
from symmoe.precision import (
    MXFP8,
    NVFP4,
    PRECISIONS,
    Float8Block,
    Recipe,
    hadamard,
    swizzle_scales,
    unswizzle_scales,
)
from symmoe.precision.recipes import precision_word

RECIPES = [
    Float8Block(),
    Float8Block(power_of_two=True),
    MXFP8(),
    NVFP4(),
    NVFP4(hadamard_signs=None),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
ROWS, C, O = sum(SPLITS) + TAIL, 288, 160


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@every_recipe
def test_round_trips_have_the_errors_of_the_format(recipe):
    """Every layout restores the quantised numbers within the errors of the format; tails become 0."""
    rows = normal(ROWS, C)
    row_start = bounds()
    weight = normal(3, O, C, seed=1)
    end = int(row_start[-1])
    # Errors of numbers from a normal distribution: E4M3 has 3 bits after the leading one, E2M1 has 1.
    max_error = 0.028 if recipe.row_format.element == "e4m3" else 0.115
    for quantized in (recipe.quantize(rows, row_start), recipe.quantize_columns(rows, row_start)):
        back = quantized.dequantize()
        assert back.shape == rows.shape
        assert 0.5 * max_error < relative_error(back[:end], rows[:end]) < max_error
        assert not back[end:].any()
    forward = recipe.quantize_weight(weight)
    dgrad = recipe.quantize_weight_transposed(weight)
    for quantized in (forward, dgrad):
        back = quantized.dequantize()
        assert back.shape == weight.shape
        assert 0.5 * max_error < relative_error(back, weight) < max_error
    has_square_blocks = recipe.weight_format.block_lines > 1
    assert torch.equal(forward.dequantize(), dgrad.dequantize()) == has_square_blocks
    for actual, expected in zip(
        recipe.quantize_weight_pair(weight), (forward, dgrad), strict=True
    ):  # by one read
        assert [as_bytes(part).tolist() for part in actual.buffers] == [
            as_bytes(part).tolist() for part in expected.buffers
        ]
        assert (actual.layout, actual.num_rows) == (expected.layout, expected.num_rows)
        assert torch.equal(actual.dequantize(), expected.dequantize())
    assert [paired.data.shape[:2] for paired in recipe.quantize_weight_pair(weight[:0])] == [
        (0, O),
        (0, C),
    ]


@every_recipe
def test_results_have_the_documented_sizes(recipe):
    rows = normal(ROWS, C)
    row_start = bounds()
    quantized = recipe.quantize(rows, row_start)
    assert (
        recipe.row_bytes(C) * ROWS
        == as_bytes(quantized.data).numel() + as_bytes(quantized.scale).numel()
    )
    assert recipe.row_bytes(7168) < 2 * 7168 * 0.52
    assert quantized.data.dtype == recipe.row_format.data_dtype
    assert quantized.scale.dtype == recipe.row_format.scale_dtype
    columns = recipe.quantize_columns(rows, row_start)
    padded = TILE * max_tiles(ROWS, len(SPLITS))
    assert columns.data.shape == (C, padded // recipe.row_format.elements_per_byte)
    has_global = isinstance(recipe, NVFP4)
    assert (quantized.global_scale is not None) == has_global
    if has_global:
        largest = [
            float(part.abs().max()) if len(part) else 0.0
            for part in rows[: sum(SPLITS)].float().split(SPLITS)
        ]
        assert quantized.amax.tolist() == largest
        assert quantized.global_scale.tolist() == pytest.approx(
            [max(a / 2688, 2.0**-110) for a in largest]
        )


@every_recipe
def test_groups_are_bounds_ranges_or_none(recipe):
    """Callers pass bounds or ranges, kernels get ranges; without bounds all rows are one group; groups may be empty."""
    rows = normal(ROWS, C)
    for method in (recipe.quantize, recipe.quantize_columns):
        first = method(rows, bounds())
        second = method(rows, row_range_of())
        assert torch.equal(first.dequantize(), second.dequantize())
        for quantized in (first, second):
            assert torch.equal(quantized.row_start, bounds())
            assert torch.equal(quantized.row_range, row_range_of())
        first = method(rows)
        second = method(rows, bounds((ROWS,)))
        assert torch.equal(as_bytes(first.scale), as_bytes(second.scale))
        assert torch.equal(first.dequantize(), second.dequantize())
        for splits in ((0,), (0, 0, 0)):
            assert method(normal(0, C), bounds(splits)).dequantize().shape == (0, C)
        index = torch.randint(ROWS, (50,), generator=torch.Generator().manual_seed(3)).to(
            torch.int32
        )
        assert torch.equal(
            method(rows, bounds((50,)), row_index=index).dequantize(),
            method(rows[index.long()]).dequantize(),
        )
        for wrong in (index.long(), index[None], index[::2]):
            with pytest.raises(ArgumentError, match="row_index"):
                method(rows, row_index=wrong)


@every_recipe
def test_groups_do_not_depend_on_each_other(recipe):
    """A group's bytes depend neither on its position nor on the rows of other groups and the tail."""
    rows = normal(ROWS, C)
    further_rows = normal(400, C, seed=2) * 100
    alone = recipe.quantize(rows[:77].contiguous(), bounds((77,)))
    beside = recipe.quantize(
        torch.cat([further_rows[:50], rows[:77], further_rows[50:]]), bounds((50, 77, 33))
    )
    assert torch.equal(as_bytes(beside.data[50:127]), as_bytes(alone.data))
    assert torch.equal(as_bytes(beside.scale[50:127]), as_bytes(alone.scale))
    alone = recipe.quantize_columns(rows[:77].contiguous(), bounds((77,)))
    beside = recipe.quantize_columns(
        torch.cat([further_rows[:50], rows[:77], further_rows[50:]]), bounds((50, 77, 33))
    )
    width = recipe.row_format.data_width(TILE)
    assert torch.equal(as_bytes(beside.data[:, width : 2 * width]), as_bytes(alone.data[:, :width]))
    assert not torch.equal(as_bytes(beside.data[:, :width]), as_bytes(alone.data[:, :width]))


@every_recipe
def test_buffers_of_the_caller_get_the_results(recipe):
    rows = normal(ROWS, C)
    row_start = bounds()
    weight = normal(2, O, C)
    for method, args in (
        (recipe.quantize, (rows, row_start)),
        (recipe.quantize_columns, (rows, row_start)),
        (recipe.quantize_weight, (weight,)),
        (recipe.quantize_weight_transposed, (weight,)),
    ):
        expected = method(*args)
        is_turned = expected.layout == "columns" and expected.scale.dtype == torch.float32
        assert expected.scale.stride() == (
            (1, C) if is_turned else torch.empty(expected.scale.shape).stride()
        )
        scale = filled(expected.scale.shape[:: -1 if is_turned else 1], expected.scale.dtype)
        out = filled(expected.data.shape, expected.data.dtype), scale.t() if is_turned else scale
        actual = method(*args, out=out)
        assert (
            method != recipe.quantize or (as_bytes(actual.data[int(row_start[-1]) :]) == FILL).all()
        )
        assert actual.data is out[0]
        assert actual.scale is out[1]
        assert torch.equal(
            actual.dequantize().nan_to_num(7.0), expected.dequantize().nan_to_num(7.0)
        )
        for position in range(2):
            wrong = list(out)
            wrong[position] = filled(
                (*out[position].shape[:-1], out[position].shape[-1] + 1), out[position].dtype
            )
            with pytest.raises(ArgumentError, match="of out must be"):
                method(*args, out=tuple(wrong))
            wrong[position] = wrong[position][..., :-1]
            with pytest.raises(ArgumentError, match=r"of out .*must (be contiguous|have strides)"):
                method(*args, out=tuple(wrong))


class Coarse(Recipe):
    """A recipe of a user, whose text contains an address."""

    row_format = weight_format = MXFP8().row_format


@dataclass(frozen=True)
class Named(Coarse):
    """A recipe of a user that has the word of another recipe."""

    word = "mxfp8"


def test_ranks_can_compare_recipes():
    """A recipe's number of 31 bits is equal for equal recipes, and different for all others."""
    assert tuple(PRECISIONS) == control.PRECISIONS[:-1]
    assert precision_word(None) == -1
    for index, recipe in enumerate(PRECISIONS.values()):
        assert recipe == type(recipe)()  # names stand for no options
        assert precision_word(type(recipe)()) == index
    further_recipes = [
        Float8Block(power_of_two=True),
        NVFP4(hadamard_signs=None),
        NVFP4(stochastic_gradients=False),
        *(NVFP4(hadamard_signs=signs) for signs in range(0, 1 << 16, 97)),
    ]
    words = [
        precision_word(recipe)
        for recipe in (*PRECISIONS.values(), *further_recipes, Named(), Coarse())
    ]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 1 << 31 for word in words)
    assert precision_word(Coarse()) == words[-1]
    assert precision_word(NVFP4(hadamard_signs=None)) == 1307113986  # in every process


EIGHT = normal(8, 96)
STARTS = bounds((3, 5))
WRONG_ROWS = [
    (EIGHT.double(), r"rows is torch.float64"),
    (EIGHT[0], r"rows is torch.bfloat16 \[96\]"),
    (EIGHT.T, "must be contiguous"),
    (normal(8, 100), r"C of rows \(100\) must be a multiple of"),
    (normal(8, 0), r"C of rows \(0\)"),
]
WRONG_STARTS = [STARTS.long(), STARTS[:1], STARTS[None], torch.zeros(6, dtype=torch.int32)[::2]]
WRONG_WEIGHTS = [EIGHT, normal(2, 33, 96), normal(2, 96, 64).mT, normal(2, 32, 32).double()]


@every_recipe
def test_wrong_arguments_are_refused(recipe):
    by_rows = recipe.quantize, recipe.quantize_columns
    by_weights = recipe.quantize_weight, recipe.quantize_weight_pair
    for method, arguments, text in (
        *((method, (rows, STARTS), text) for method in by_rows for rows, text in WRONG_ROWS),
        *((recipe.quantize, (EIGHT, starts), "row_start") for starts in WRONG_STARTS),
        *((method, (weight,), "weight") for method in by_weights for weight in WRONG_WEIGHTS),
    ):
        with pytest.raises(ArgumentError, match=text):
            method(*arguments)


def quantize(recipe: Recipe, **options):
    return recipe.quantize(EIGHT, STARTS, **options)


TWO_SEEDS = torch.zeros(2, dtype=torch.int64)
OTHER_MISTAKES = [
    (
        lambda: quantize(MXFP8(), dbias=torch.zeros(2, 64)),
        r"dbias must be \[2, 96\], got \[2, 64\]",
    ),
    (
        lambda: quantize(MXFP8(), dbias=torch.zeros(2, 96).long()),
        "dbias must be of torch.bfloat16 or",
    ),
    (
        lambda: quantize(MXFP8(), dbias=torch.zeros(2, 96), bias_scale=torch.zeros(7)),
        r"bias_scale must be \[8\], got \[7\]",
    ),
    (lambda: quantize(MXFP8(), seeds=TWO_SEEDS), r"seeds are given; MXFP8\(\) rounds to nearest"),
    (lambda: quantize(NVFP4(stochastic_gradients=False), seeds=TWO_SEEDS), "seeds are given"),
    (lambda: quantize(NVFP4(), seeds=torch.zeros(3, dtype=torch.int64)), "seeds must be "),
    (lambda: quantize(NVFP4(), seeds=TWO_SEEDS.int()), "seeds must be "),
    (lambda: NVFP4(hadamard_signs=-1), "must have 16 bits"),
    (lambda: NVFP4(hadamard_signs=1 << 16), "must have 16 bits"),
    (lambda: hadamard(EIGHT, -1), "must have 16 bits"),
    (lambda: hadamard(EIGHT, 1 << 16), "must have 16 bits"),
    (lambda: hadamard(EIGHT[:, :24], 1), "a multiple of 16"),
    (lambda: swizzle_scales(torch.zeros(8, 4), STARTS), "one-byte scales"),
    (
        lambda: unswizzle_scales(
            torch.zeros(1, 1, 512, dtype=torch.uint8), STARTS, num_rows=8, num_blocks=9
        ),
        "swizzled must be",
    ),
]


@pytest.mark.parametrize(("call", "text"), OTHER_MISTAKES)
def test_further_wrong_arguments_are_refused(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def test_recipes_are_values():
    with pytest.raises(FrozenInstanceError):
        RECIPES[0].power_of_two = True
    assert replace(RECIPES[0], power_of_two=True) == RECIPES[1]
    assert len(set(RECIPES)) == len(RECIPES)


@every_recipe
def test_results_have_no_gradient(recipe):
    """A filled buffer has a new version, so autograd refuses tensors that it has saved of the buffer before."""
    rows = normal(64, C).requires_grad_()
    weight = torch.nn.Parameter(normal(2, O, C))
    results = [
        recipe.quantize(rows),
        recipe.quantize_columns(rows),
        recipe.quantize_weight(weight),
        recipe.quantize_weight_transposed(weight),
        *recipe.quantize_weight_pair(weight),
    ]
    for quantized in results:
        assert not quantized.scale.requires_grad
        assert not quantized.dequantize().requires_grad
    quantized = recipe.quantize(rows)
    versions = quantized.data._version, quantized.scale._version
    recipe.quantize(rows, out=(quantized.data, quantized.scale))
    assert quantized.data._version > versions[0]
    assert quantized.scale._version > versions[1]


def test_results_depend_on_the_seeds():
    rows = normal(64, C)
    row_start = bounds((30, 34))

    def data(*seeds):
        return NVFP4().quantize(rows, row_start, seeds=torch.tensor(seeds)).data

    assert torch.equal(data(1, 2), data(1, 2))
    changed = (data(1, 2) != data(1, 3)).any(dim=1)
    assert not changed[:30].any()
    assert changed[30:].all()
    assert not torch.equal(data(1, 2), NVFP4().quantize(rows, row_start).data)


def test_the_hadamard_transform_spreads_outliers():
    """One large token in 16 becomes 16 of a quarter."""
    rows = normal(128, 64) / 100
    rows[::16] = 4.0
    amax = [
        float(NVFP4(hadamard_signs=signs).quantize_columns(rows).amax) for signs in (None, 0x9A5C)
    ]
    assert amax[0] == 4.0
    assert amax[1] == pytest.approx(1.0, abs=0.1)
    assert (
        len({precision.draw_signs(torch.Generator().manual_seed(seed)) for seed in range(8)}) == 8
    )
    x = rows.float()
    assert torch.allclose(precision.inverse_hadamard(hadamard(x, 77), 77), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", [MXFP8(), NVFP4()], ids=str)
def test_swizzled_scales_lie_in_tiles(recipe):
    """Every scale of every layout lies at its offset in tiles; lines of square blocks have the block's scale."""
    rows = normal(ROWS, C)
    weight = normal(2, O, C)
    lines = recipe.weight_format.block_lines
    for quantized, starts in (
        (recipe.quantize(rows, bounds()), bounds().tolist()),
        (recipe.quantize_columns(rows, bounds()), [0, C]),
        (recipe.quantize_weight(weight), [0, O, 2 * O]),
        (recipe.quantize_weight_transposed(weight), [0, C, 2 * C]),
    ):
        swizzled = quantized.swizzled_scale()
        scale = quantized.scale.view(torch.uint8)
        is_weight = scale.dim() == 3
        first = 0
        for g, (start, end) in enumerate(itertools.pairwise(starts)):
            tiles = -(-(end - start) // 128)
            flat = swizzled[first : first + tiles].flatten()
            actual = torch.empty(end - start, scale.shape[-1])
            for i, j in itertools.product(range(end - start), range(scale.shape[-1])):
                actual[i, j] = flat[swizzled_offset(i, j, scale.shape[-1])]
            expected = (
                scale[g, torch.arange(end - start) // lines] if is_weight else scale[start:end]
            )
            assert torch.equal(actual.to(torch.uint8), expected), quantized.layout
            first += tiles
    with pytest.raises(ArgumentError, match="one-byte scales"):
        Float8Block().quantize(rows).swizzled_scale()


def test_tails_of_swizzled_scales_are_zeros():
    quantized = MXFP8().quantize(normal(ROWS, C), bounds())
    back = unswizzle_scales(quantized.swizzled_scale(), bounds(), num_rows=ROWS, num_blocks=C // 32)
    end = sum(SPLITS)
    assert torch.equal(back[:end], quantized.scale.view(torch.uint8)[:end])
    assert not back[end:].any()


@pytest.mark.parametrize("recipe", [Float8Block(), MXFP8(), NVFP4()], ids=str)
def test_quantised_weights_are_multiplied_by_pointer(recipe):
    """Every expert's numbers and compact scales have separate memory; the bits are those of packed weights."""
    num_groups, out_features, in_features = 3, 160, 288
    row_range = torch.tensor([[0, 7, 7], [7, 7, 33]], dtype=torch.int32)
    rows = recipe.quantize(torch.randn(40, in_features), row_range).operand()
    quantized = recipe.quantize_weight(torch.randn(num_groups, out_features, in_features))
    lines = (
        1 if quantized.scale.dtype == torch.float32 else recipe.weight_format.block_lines
    )  # of one scale
    data = [*map(torch.clone, quantized.data)]
    scales = [s.repeat_interleave(lines, 0) for s in quantized.scale]
    swizzle = {"e8m0": "mxfp8_rowwise", "e4m3": "nvfp4"}.get(recipe.weight_format.scale)
    if swizzle is None:
        actual = pack_weight_ptrs(data, fc1_scales=scales)
        shape = tuple(quantized.scale.shape)
    else:
        actual = pack_weight_ptrs(
            data, fc1_scales=[s.view(torch.uint8) for s in scales], swizzle=swizzle
        )
        shape = num_groups, 2, -(-scales[0].shape[1] // 4) * 512
    scattered = ScatteredWeight(
        TensorTable(actual.fc1, tuple(quantized.data.shape), quantized.data.dtype),
        TensorTable(actual.fc1_scales, shape, torch.float32 if swizzle is None else torch.uint8),
        quantized.global_scale,
    )
    packed, by_pointer = (torch.full((40, out_features), torch.nan) for _ in range(2))
    ops = kernels.for_device(torch.device("cpu"))
    ops.grouped_gemm_quantized(rows, quantized.operand(), row_range, packed)
    ops.grouped_gemm_quantized(rows, scattered, row_range, by_pointer)
    assert packed[:33].isfinite().all()
    assert torch.equal(by_pointer[:33], packed[:33])
    data[2].view(torch.uint8).zero_()  # nothing was copied
    ops.grouped_gemm_quantized(rows, scattered, row_range, by_pointer)
    assert not by_pointer[7:33].any()
