"""Twins of the quantising kernels, bit for bit against numpy and ml_dtypes (quantize_reference.py)."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

import ml_dtypes
import quantize_cases as cases
import quantize_reference as reference
from row_ranges import random_ranges

from symmoe.errors import ArgumentError
from symmoe.kernels import formats, twin
from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.twin import block_scaled, quantize

WIDTH = 160  # more than a block of 128, no multiple of it
ROWS = sum(cases.SPLITS) + cases.TAIL
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)


def fields(block_format):
    return {
        "element": block_format.element,
        "kind": block_format.scale,
        "block": block_format.block,
        "block_lines": block_format.block_lines,
    }


def expected_rows(rows: torch.Tensor, splits, name: str, *, hard: bool) -> dict[str, torch.Tensor]:
    """The expected result of quantize_all."""
    block_format = cases.FORMATS[name]
    values = rows.float().numpy()
    padded = TILE * max_tiles(len(rows), len(splits))
    num_groups = len(splits)
    size = block_format.scale_dtype.itemsize
    num_scales = padded // block_format.block
    result = {
        "data": np.full((len(rows), block_format.data_width(WIDTH)), cases.FILL, np.uint8),
        "scale": np.full((len(rows), block_format.num_blocks(WIDTH) * size), cases.FILL, np.uint8),
        "column_data": np.full((WIDTH, block_format.data_width(padded)), cases.FILL, np.uint8),
        "column_scale": np.full((WIDTH, num_scales * size), cases.FILL, np.uint8),
    }
    amax = np.zeros(num_groups, np.float32)
    column_amax = np.zeros(num_groups, np.float32)
    token = 0
    for g, (start, end) in enumerate(itertools.pairwise(itertools.accumulate(splits, initial=0))):
        group = values[start:end]
        signs = cases.SIGNS if hard and block_format.has_global_scale else None
        seed = g * 0x123456789 - 7 if hard and block_format.has_global_scale else None
        lines = reference.padded_columns(group, signs)
        amax[g], column_amax[g] = reference.group_amax(group), reference.group_amax(lines)
        options = {**fields(block_format), "seed": seed}
        if start == end:
            continue
        data, scale = reference.quantize_lines(group, amax=amax[g], **options)
        result["data"][start:end], result["scale"][start:end] = data, scale
        data, scale = reference.quantize_lines(lines, amax=column_amax[g], **options)
        first = token // block_format.elements_per_byte
        result["column_data"][:, first : first + data.shape[1]] = data
        first = size * (token // block_format.block)
        result["column_scale"][:, first : first + scale.shape[1]] = scale
        token += lines.shape[1]
    if block_format.has_global_scale:
        result |= {"amax": amax.view(np.uint8), "column_amax": column_amax.view(np.uint8)}
    return {key: torch.from_numpy(value) for key, value in result.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_rows_and_columns_have_the_bits_of_the_reference(name, dtype):
    rows = cases.hard_rows(ROWS, WIDTH, dtype)
    expected = expected_rows(rows, cases.SPLITS, name, hard=False)
    assert (
        cases.differences(cases.quantize_all(twin, rows, cases.row_range_of(), name), expected)
        == []
    )
    if name != "nvfp4":  # with an index; other options are NVFP4's
        assert (
            cases.differences(
                cases.quantize_all(twin, rows, cases.row_range_of(), name, hard=True), expected
            )
            == []
        )


def test_stochastic_rounding_and_hadamard_have_the_bits_of_the_reference():
    rows = cases.hard_rows(200, WIDTH, torch.bfloat16)
    splits = (3, 0, 150, 20)
    actual = cases.quantize_all(twin, rows, cases.row_range_of(splits), "nvfp4", hard=True)
    assert cases.differences(actual, expected_rows(rows, splits, "nvfp4", hard=True)) == []
    nearest = cases.quantize_all(twin, rows, cases.row_range_of(splits), "nvfp4")
    assert cases.differences(actual, nearest) == [
        "column_amax",
        "data",
        "column_data",
        "column_scale",
    ]


@pytest.mark.parametrize("shape", [(2, 160, 96), (1, 128, 256), (3, 16, 288)], ids=str)
@pytest.mark.parametrize("name", cases.FORMATS)
def test_weights_have_the_bits_of_the_reference(name, shape):
    weight = cases.hard_rows(shape[0] * shape[1], shape[2], torch.bfloat16).view(shape)
    actual = cases.quantize_weights(twin, weight, name)
    block_format = cases.format_of_weights(name)
    expected = {}
    for prefix, lines in (("", weight), ("transposed_", weight.mT)):
        amaxes = [reference.group_amax(matrix.float().numpy()) for matrix in weight]
        pairs = [
            reference.quantize_lines(matrix.float().numpy(), amax=amax, **fields(block_format))
            for matrix, amax in zip(lines, amaxes, strict=True)
        ]
        for key, parts in zip(("data", "scale"), zip(*pairs, strict=True), strict=True):
            expected[prefix + key] = torch.from_numpy(np.stack(parts))
    if block_format.has_global_scale:
        expected["amax"] = torch.from_numpy(np.array(amaxes).view(np.uint8))
    assert cases.differences(actual, expected) == []
    assert (
        cases.differences(cases.quantize_weights(twin, weight, name, in_pairs=True), expected) == []
    )
    if block_format.block_lines > 1 and block_format.element == "e4m3":
        for key in ("data", "scale"):
            turned = actual["transposed_" + key].mT.flatten()
            assert torch.equal(cases.as_bytes(actual[key].flatten()), cases.as_bytes(turned)), key


def test_columns_with_other_strides_of_scales_are_refused():
    rows = cases.hard_rows(4, 32, torch.bfloat16)
    row_range = cases.row_range_of((4,))
    data = cases.filled((32, 256), torch.float8_e4m3fn)
    for name, scale in (
        ("float8_block", torch.zeros(32, 2)),
        ("mxfp8", torch.zeros(8, 32, dtype=torch.uint8).t()),
    ):
        with pytest.raises(ArgumentError, match=r"scale \[32, .\] must have strides"):
            twin.quantize_columns(rows, row_range, (data, scale), cases.FORMATS[name])


MUTANTS = {
    "a product with the reciprocal": (
        "float8_block",
        "_scales",
        lambda _: lambda amax, *_: _by_product(amax),
    ),
    "truncation": ("mxfp8", "to_e4m3", lambda _: lambda x: _truncated(x)),
    "ties away from zero": (
        "nvfp4",
        "to_e2m1",
        lambda original: lambda x, words: original(x * (1 + 1e-6), words),
    ),
    "the high bits of a word": (
        "nvfp4",
        "to_e2m1",
        lambda original: lambda x, words: original(x, words << 1),
    ),
    "another group's amax": (
        "nvfp4",
        "global_scale_of",
        lambda original: lambda amax: original(amax * 1.0000002),
    ),
}


def tied_rows(num_rows):
    """Rows with the global scale and block scales 1, and elements in the middle between two numbers of E2M1."""
    rows = torch.tensor([6, 5, 2.5, 3.5, -0.25, 0.75, 1.25, 1.75]).repeat(num_rows, WIDTH // 8)
    rows[:, 0] = 2688
    return rows.bfloat16()


def _by_product(amax):
    scale = (amax * (1 / 448)).clamp(min=formats.MIN_SCALE)
    return scale, 1.0 / scale


def _truncated(x):
    bits = x.clamp(-448, 448).view(torch.int32) & ~0xFFFFF
    return bits.view(torch.float32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_reference_notices(monkeypatch, mutant):
    name, function, mutate = MUTANTS[mutant]
    splits = (30, 34)
    hard = "word" in mutant
    rows = tied_rows(64) if "ties" in mutant else cases.hard_rows(64, WIDTH, torch.bfloat16)
    expected = expected_rows(rows, splits, name, hard=hard)
    row_range = cases.row_range_of(splits)
    assert (
        cases.differences(cases.quantize_all(twin, rows, row_range, name, hard=hard), expected)
        == []
    )
    module = block_scaled if function == "to_e2m1" else quantize
    monkeypatch.setattr(module, function, mutate(getattr(module, function)))
    assert (
        cases.differences(cases.quantize_all(twin, rows, row_range, name, hard=hard), expected)
        != []
    )


def all_bf16_and_more() -> torch.Tensor:
    """Every finite bf16 number, fp32 numbers of all kinds, and the neighbours of all halves between E4M3 numbers."""
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    bits = torch.randint(
        -(1 << 31), 1 << 31, (200_000,), generator=torch.Generator().manual_seed(0)
    )
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    halves = torch.cat(
        [halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(1e9))]
    )
    x = torch.cat([bf16, bits.to(torch.int32).view(torch.float32), halves, -halves])
    return x[torch.isfinite(x)]


def test_casts_are_those_of_ml_dtypes():
    x = all_bf16_and_more()
    expected = reference.e4m3(x.numpy()).view(np.uint8)
    assert np.array_equal(quantize.to_e4m3(x).view(torch.uint8).numpy(), expected)
    x = torch.cat([x, x[x.abs() < 1e5] / 64])
    expected = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    assert np.array_equal(block_scaled.to_e2m1(x, None).numpy(), expected)


# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, words):
    assert tuple(reference.philox(key, counter)) == words
    signed = key - 2**64 if key >= 2**63 else key  # as int64 tensors have it
    actual = block_scaled.philox(signed, tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in actual) == words


def test_stochastic_rounding_is_unbiased():
    """Means of 4096 draws are within 5 standard errors of the number; numbers rounded to nearest are not."""
    x = torch.linspace(-6, 6, 97)
    words = block_scaled.random_words(1234, 4096, 97)
    table = torch.tensor(reference.E2M1_NUMBERS)
    table = torch.cat([table, -table])
    draws = table[block_scaled.to_e2m1(x.expand(4096, -1), words).int()]
    error = (draws.double().mean(0) - x.double()).abs()
    bound = 5 * draws.double().std(0) / 64 + 1e-6
    assert (error < bound).all()
    nearest = table[block_scaled.to_e2m1(x, None).int()]
    assert ((nearest.double() - x.double()).abs() > bound).float().mean() > 0.5
    # Only the two neighbours ever occur.
    lower = torch.searchsorted(table[:8], x.abs(), right=True) - 1
    upper = torch.searchsorted(table[:8], x.abs())
    codes = block_scaled.to_e2m1(x.expand(4096, -1), words).int() & 7
    assert ((codes == lower) | (codes == upper)).all()


def test_random_numbers_depend_on_the_place_in_the_group_alone():
    rows = cases.hard_rows(90, 64, torch.bfloat16)[20:]
    alone = cases.quantize_all(
        twin, rows[30:].contiguous(), cases.row_range_of((40,)), "nvfp4", hard=True
    )
    shifted = torch.zeros(2, dtype=torch.int64)  # the seed of group 0 in both
    out = cases.row_buffers(70, 64, cases.FORMATS["nvfp4"])
    amax = torch.empty(2)
    row_range = cases.row_range_of((30, 40))
    twin.group_amax(rows, row_range, amax)
    twin.quantize_rows(
        rows, row_range, out, cases.FORMATS["nvfp4"], amax=amax, seeds=shifted.fill_(-7)
    )
    assert torch.equal(out[0][30:], alone["data"])


def test_hadamard_is_orthonormal_and_has_an_inverse():
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))
    y = block_scaled.hadamard(x, cases.SIGNS)
    exact = (
        x.double().view(33, 4, 16) @ torch.from_numpy(reference.hadamard_matrix(cases.SIGNS)).T
    ).view(33, 64)
    assert (y - exact).abs().max() < 1e-6 * x.abs().max()
    assert (block_scaled.inverse_hadamard(y, cases.SIGNS) - x).abs().max() < 1e-6 * x.abs().max()
    # Orthonormal: contractions keep their results. Signs matter.
    second = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(y @ block_scaled.hadamard(second, cases.SIGNS).T, x @ second.T, atol=1e-4)
    assert not torch.allclose(
        y @ block_scaled.hadamard(second, cases.SIGNS ^ 1).T, x @ second.T, atol=1e-1
    )
    assert np.allclose(
        reference.hadamard_matrix(cases.SIGNS) @ reference.hadamard_matrix(cases.SIGNS).T,
        np.eye(16),
    )


def test_other_blocks_do_not_see_nan():
    """A NaN in one block, and the same rows without it: every other byte is the same, in all formats."""
    clean = cases.hard_rows(ROWS, WIDTH, torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
    dirty = clean.clone()
    dirty[40, 5] = torch.nan
    for name, block_format in cases.FORMATS.items():
        clean_result, dirty_result = (
            cases.quantize_all(twin, rows, cases.row_range_of(), name) for rows in (clean, dirty)
        )
        changed = (
            cases.as_bytes(clean_result["data"]) != cases.as_bytes(dirty_result["data"])
        ).nonzero()
        assert set(changed[:, 0].tolist()) <= {40}, name
        assert changed[:, 1].max() < block_format.data_width(min(block_format.block, WIDTH)), name
        changed = (
            cases.as_bytes(clean_result["column_data"])
            != cases.as_bytes(dirty_result["column_data"])
        ).nonzero()
        assert set(changed[:, 0].tolist()) <= {5}, name


@pytest.mark.parametrize("num_blocks", [1, 4, 6, 10])
def test_swizzled_scales_lie_in_tiles_and_convert_back(num_blocks):
    row_range, num_rows = cases.row_range_of(), ROWS
    scale = torch.randint(
        1, 255, (num_rows, num_blocks), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    num_tiles, across = max_tiles(num_rows, len(cases.SPLITS)), -(-num_blocks // 4)
    swizzled = cases.filled((num_tiles, across, 512), torch.uint8)
    twin.swizzle_scales(scale, row_range, swizzled)
    expected, tile = np.full((num_tiles, across * 512), cases.FILL, np.uint8), 0
    for start, end in row_range.t().tolist():
        num_group_tiles = -(-(end - start) // 128)
        flat = np.zeros(num_group_tiles * across * 512, np.uint8)
        for row in range(start, end):
            for block in range(num_blocks):
                flat[reference.swizzled_offset(row - start, block, num_blocks)] = scale[row, block]
        expected[tile : tile + num_group_tiles] = flat.reshape(num_group_tiles, across * 512)
        tile += num_group_tiles
    assert np.array_equal(swizzled.view(num_tiles, -1).numpy(), expected)
    back = cases.filled((num_rows, num_blocks), torch.uint8)
    twin.unswizzle_scales(swizzled, row_range, back)
    end = int(row_range[1, -1])
    assert torch.equal(back[:end], scale[:end])
    assert (back[end:] == cases.FILL).all()


def test_sums_of_slots_are_those_of_a_bias_gradient():
    """Sums of all rows at once and of parts; NaN stays in its column, the tail and its scale are not read."""
    splits, width = cases.SUMMED, 5
    num_rows = sum(splits)
    row_range = cases.row_range_of(splits)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows + cases.TAIL, width, generator=generator)
    scale = torch.randn(len(rows), generator=generator)
    rows[num_rows - 1, 3] = torch.inf
    rows[num_rows:], scale[num_rows:] = torch.nan, torch.nan
    for row_scale, ranges in itertools.product(
        (scale, None), ([row_range], random_ranges(splits, 3, step=SLOT_ROWS))
    ):
        expected, actual = torch.full((2, len(splits), width), torch.nan)
        sums = cases.filled((bias_slots(len(rows), len(splits), SLOT_ROWS), width), torch.float32)
        for part in ranges:
            out = cases.row_buffers(len(rows), width, cases.FORMATS["mxfp8"])
            twin.quantize_rows(rows, part, out, cases.FORMATS["mxfp8"], sums=(sums, row_scale))
        twin.grouped_bias_grad(rows, row_range, expected, scale=row_scale)
        twin.sum_dbias(sums, row_range, actual)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert expected.isfinite().any()
        assert not expected.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["float8_block", "float8_block_powers", "mxfp8"])
def test_rows_of_the_wire_unpack_decode_and_requantise(name, dtype):
    """A row of the wire is data and scales side by side, then zeros. Requantising is decoding and quantising."""
    row_format = cases.FORMATS[name]
    rows = cases.hard_rows(50, 272, dtype)
    quantised = cases.row_buffers(50, 272, row_format)
    twin.quantize_rows(rows, cases.row_range_of((50,)), quantised, row_format)
    sent = torch.cat([part.view(torch.uint8) for part in quantised], dim=1)
    sent = torch.nn.functional.pad(sent, (0, -sent.shape[1] % 16))
    wire = cases.filled((52, sent.shape[1]), torch.uint8)
    twin.encode_rows(rows, wire[:50], row_format)
    assert torch.equal(wire, torch.cat([sent, torch.full_like(sent[:2], cases.FILL)]))
    index = torch.arange(49, -1, -1, dtype=torch.int32)
    row_range = cases.row_range_of((0, 41))
    unpacked = [part.view(torch.uint8) for part in cases.row_buffers(50, 272, row_format)]
    twin.unpack_rows(wire[:50], row_range, unpacked, row_index=index)
    for actual, part in zip(unpacked, quantised, strict=True):
        assert torch.equal(actual[:41], part.view(torch.uint8).flip(0)[:41])
        assert (actual[41:] == cases.FILL).all()
    decoded = torch.empty(50, 272, dtype=dtype)
    twin.decode_rows(wire[:50], decoded, row_format)
    requantised, reference = (cases.column_buffers(50, 2, 272, row_format) for _ in range(2))
    twin.requantize_columns(wire[:50], row_range, requantised, row_format, dtype, row_index=index)
    twin.quantize_columns(decoded, row_range, reference, row_format, row_index=index)
    assert cases.differences(cases.named(*requantised), cases.named(*reference)) == []
