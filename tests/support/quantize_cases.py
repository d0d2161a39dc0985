"""Rows, groups and formats that tests of the quantising kernels share."""

from dataclasses import replace
from itertools import product

import torch
from row_ranges import random_ranges

from symmoe.kernels import twin
from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import TensorTable, range_of

FORMATS = {
    "float8_block": BlockFormat(element="e4m3", scale="fp32", block=128),
    "float8_block_powers": BlockFormat(element="e4m3", scale="power_of_two", block=128),
    "mxfp8": BlockFormat(element="e4m3", scale="e8m0", block=32),
    "nvfp4": BlockFormat(element="e2m1", scale="e4m3", block=16),
}
WEIGHT_LINES = {"float8_block": 128, "float8_block_powers": 128, "nvfp4": 16}
SIGNS = 0x9A5C
# Without rows, with one, unaligned, exactly a tile, more than one; 10 rows of the tail belong to no group.
SPLITS = (0, 37, 128, 1, 0, 161)
SUMMED = (0, 37, 128, 1, 0, 333)  # three tiles of 128 rows, and more than half of the second
TAIL = 10
FILL = 0xA5  # what tests put where nothing may be written


def bounds(splits: tuple[int, ...] = SPLITS) -> torch.Tensor:
    """row_start of groups of these sizes."""
    return torch.tensor([0, *splits], dtype=torch.int32).cumsum(0).to(torch.int32)


def row_range_of(splits: tuple[int, ...] = SPLITS) -> torch.Tensor:
    """row_range of groups of these sizes."""
    return range_of(bounds(splits))


def hard_rows(num_rows: int, width: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes, and some with what formats and scales treat in a way of their own."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator)
    rows *= torch.exp2(torch.randint(-40, 40, (num_rows, 1), generator=generator).float())
    rows *= torch.exp2(torch.randint(-12, 3, (num_rows, width), generator=generator).float())
    rows = rows.to(dtype)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    ties = torch.tensor(
        [448, 17, 19, -17, 2**-10, 3 * 2**-10, 1.0625, 416, 432, 6, 5, 2.5, 3.5, 0.25, 0.75, -1.75]
    )
    special = {
        1: torch.zeros(width),
        2: -torch.zeros(width),
        5: torch.full((width,), tiny / 8),
        6: torch.full((width,), largest),
        9: ties.repeat(-(-width // 16))[:width],
    }
    for i, row in special.items():
        if i < num_rows:
            rows[i] = row.to(dtype)
    for row, column, value in (
        (11, 3, torch.nan),
        (12, 70, torch.inf),
        (13, width - 1, -torch.inf),
    ):
        if row < num_rows:
            rows[row, column % width] = value
    return rows


def quantize_all(
    kernels, rows: torch.Tensor, row_range: torch.Tensor, name: str, *, hard: bool = False
) -> dict[str, torch.Tensor]:
    """What kernels (a module of them) make of rows, with FILL where they write nothing. hard: with what is optional,
    and columns of rows that are picked by an index from the reversed ones."""
    block_format = FORMATS[name]
    (num_rows, width), num_groups = rows.shape, row_range.shape[1]
    result = {}
    index, source = None, rows
    if hard:
        index, source = (
            torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=rows.device),
            rows.flip(0),
        )
    options, column_options = {}, {}
    if block_format.has_global_scale:
        signs = SIGNS if hard else None
        seeds = torch.arange(num_groups, device=rows.device) * 0x123456789 - 7
        amax, column_amax = (filled((num_groups,), torch.float32, rows.device) for _ in range(2))
        kernels.group_amax(rows, row_range, amax)
        kernels.group_amax(source, row_range, column_amax, signs=signs, row_index=index)
        result |= {"amax": amax, "column_amax": column_amax}
        options = {"amax": amax, "seeds": seeds if hard else None}
        column_options = {"amax": column_amax, "signs": signs, "seeds": seeds if hard else None}
    out = row_buffers(num_rows, width, block_format, rows.device)
    kernels.quantize_rows(rows, row_range, out, block_format, **options)
    columns = column_buffers(num_rows, num_groups, width, block_format, rows.device)
    kernels.quantize_columns(
        source, row_range, columns, block_format, row_index=index, **column_options
    )
    return result | named(*out) | named(*columns, "column_")


def check_bias_sums(
    kernels,
    name: str,
    dtype: torch.dtype,
    *,
    width: int = 160,
    splits: tuple[int, ...] = SUMMED,
    device: str = "cpu",
) -> None:
    """A bias gradient out of quantize_rows, of all rows at once and of parts: the bits of the twin's grouped_bias_grad;
    what is quantised is the same as without. NaN stays in its column; the tail and its scale are not read."""
    row_format, num_rows = FORMATS[name], sum(splits)
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows + TAIL, width, generator=generator)
    rows = (rows * torch.exp2(torch.randint(-9, 9, rows.shape, generator=generator).float())).to(
        dtype
    )
    index = torch.randperm(len(rows), generator=generator, dtype=torch.int32)
    scale = torch.randn(len(rows), generator=generator)
    rows[index[num_rows:]], rows[index[-1 - TAIL], 3], scale[num_rows:] = (
        torch.nan,
        torch.inf,
        torch.nan,
    )
    row_range, options = row_range_of(splits), {}
    if row_format.has_global_scale:
        amax = torch.empty(len(splits))
        twin.group_amax(rows, row_range, amax, row_index=index)
        options = {"amax": amax.to(device)}
    parts = [row_range], random_ranges(splits, 3, step=SLOT_ROWS)
    for row_index, row_scale, ranges in product((index, None), (scale, None), parts):
        lines = rows if row_index is not None else rows[index]
        dbias = torch.full((len(splits), width), torch.nan, dtype=dtype)
        twin.grouped_bias_grad((lines, row_index), row_range, dbias, scale=row_scale)
        sums = filled((bias_slots(len(rows), len(splits), SLOT_ROWS), width), torch.float32, device)
        found = []
        for extra in (None, (sums, None if row_scale is None else row_scale.to(device))):
            out = row_buffers(len(rows), width, row_format, device)
            given = {
                "row_index": None if row_index is None else row_index.to(device),
                "sums": extra,
                **options,
            }
            for part in ranges:
                kernels.quantize_rows(lines.to(device), part.to(device), out, row_format, **given)
            found.append(named(*out))
        assert differences(*found) == [], name
        total = torch.full_like(dbias, torch.nan, device=device)
        kernels.sum_dbias(sums, row_range.to(device), total)
        where = f"{name}, {dtype}, index {row_index is not None}, scale {row_scale is not None}, {len(ranges)} parts"
        torch.testing.assert_close(total.cpu(), dbias, rtol=0, atol=0, equal_nan=True, msg=where)
        assert dbias.isfinite().any()
        assert not dbias.isfinite().all()


class Scattered:
    """Matrices in memory of their own, the last one first, and their table."""

    def __init__(self, packed: torch.Tensor):
        self.matrices = [matrix.clone() for matrix in packed.flip(0)][::-1]
        pointers = torch.tensor([matrix.data_ptr() for matrix in self.matrices]).to(packed.device)
        self.table = TensorTable(pointers, tuple(packed.shape), packed.dtype)

    def packed(self) -> torch.Tensor:
        return torch.stack(self.matrices)


def quantize_weights(
    kernels,
    weight: torch.Tensor,
    name: str,
    table: TensorTable | None = None,
    *,
    in_pairs: bool = False,
) -> dict[str, torch.Tensor]:
    """What kernels make of weights and of their transpose; in_pairs: in one call. table: of the weights, where they are
    to be read."""
    block_format, source = weight_format(name), weight if table is None else table
    result, amax = {}, None
    if block_format.has_global_scale:
        result["amax"] = amax = filled((weight.shape[0],), torch.float32, weight.device)
        kernels.weight_amax(source, amax)
    outs = []
    for prefix, lines in (("", weight), ("transposed_", weight.mT)):
        num_groups, num_lines, width = lines.shape
        scale_shape = (
            num_groups,
            -(-num_lines // block_format.block_lines),
            block_format.num_blocks(width),
        )
        data_shape = num_groups, num_lines, block_format.data_width(width)
        data = filled(data_shape, block_format.data_dtype, weight.device)
        outs.append((data, filled(scale_shape, block_format.scale_dtype, weight.device)))
        result |= named(*outs[-1], prefix)
        if not in_pairs:
            kernels.quantize_weights(lines, outs[-1], block_format, amax=amax)
    if in_pairs:
        kernels.quantize_weight_pairs(source, *outs, block_format, amax=amax)
    return result


def encode_rows(kernels, rows: torch.Tensor, name: str) -> torch.Tensor:
    """Rows as kernels put them on the wire, and two more, where nothing may be written."""
    block_format, (num_rows, width) = FORMATS[name], rows.shape
    row_bytes = width + block_format.num_blocks(width) * block_format.scale_dtype.itemsize
    wire = filled((num_rows + 2, -(-row_bytes // 16) * 16), torch.uint8, rows.device)
    kernels.encode_rows(rows, wire[:num_rows], block_format)
    return wire


def joined_rows(kernels, rows: torch.Tensor, name: str) -> torch.Tensor:
    """What encode_rows must give: data and scales of quantize_rows side by side, and zeros."""
    out = row_buffers(*rows.shape, FORMATS[name], rows.device)
    kernels.quantize_rows(rows, row_range_of((len(rows),)).to(rows.device), out, FORMATS[name])
    row = torch.cat([part.view(torch.uint8) for part in out], dim=1)
    row = torch.nn.functional.pad(row, (0, -row.shape[1] % 16))
    return torch.cat([row, torch.full_like(row[:1], FILL).expand(2, -1)])


def requantize_columns(
    kernels,
    wire,
    row_range,
    width: int,
    name: str,
    dtype: torch.dtype,
    row_index=None,
    *,
    in_two_steps: bool = False,
) -> dict[str, torch.Tensor]:
    """Columns that kernels make of rows of the wire; in_two_steps: by way of the decoded rows."""
    block_format, num_rows = FORMATS[name], len(wire if row_index is None else row_index)
    out = column_buffers(num_rows, row_range.shape[1], width, block_format, wire.device)
    if in_two_steps:
        decoded = torch.empty(wire.shape[0], width, dtype=dtype, device=wire.device)
        kernels.decode_rows(wire, decoded, block_format)
        kernels.quantize_columns(decoded, row_range, out, block_format, row_index=row_index)
    else:
        kernels.requantize_columns(wire, row_range, out, block_format, dtype, row_index=row_index)
    return named(*out)


def weight_format(name: str) -> BlockFormat:
    """The format of weights that goes with one of FORMATS."""
    return replace(FORMATS[name], block_lines=WEIGHT_LINES.get(name, 1))


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A tensor all of whose bytes are FILL."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(FILL)
    return tensor


def row_buffers(
    num_rows: int, width: int, block_format: BlockFormat, device: torch.device | str = "cpu"
):
    """Data and scales of rows, full of FILL."""
    data = filled((num_rows, block_format.data_width(width)), block_format.data_dtype, device)
    return data, filled(
        (num_rows, block_format.num_blocks(width)), block_format.scale_dtype, device
    )


def column_buffers(
    num_rows: int, num_groups: int, width: int, block_format: BlockFormat, device="cpu"
):
    """The same for columns of rows in groups; fp32 scales are block-major."""
    tokens = TILE * max_tiles(num_rows, num_groups)
    data = filled((width, block_format.data_width(tokens)), block_format.data_dtype, device)
    shape = width, tokens // block_format.block
    if block_format.scale_dtype == torch.float32:
        return data, filled(shape[::-1], torch.float32, device).t()
    return data, filled(shape, block_format.scale_dtype, device)


def named(data: torch.Tensor, scale: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    """Buffers by name."""
    return {prefix + "data": data, prefix + "scale": scale}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes on the CPU."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in a byte."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(as_bytes(left[name]), as_bytes(right[name]))]
