"""Quantising kernels against the twins, byte for byte: in Triton's interpreter on CPU tensors, and on GPUs. kernels: a
module of them, or what stands for it; device: where they run. Twins run on the CPU."""

import quantize_cases as cases
import torch
from quantize_cases import FORMATS, as_bytes, differences, filled, joined_rows, row_buffers
from row_ranges import random_ranges, rows_of

from symmoe.kernels import twin
from symmoe.kernels.formats import max_tiles

Pair = tuple[torch.Tensor, torch.Tensor]


def assert_same(left: Pair, right: Pair, *where: object) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other)), where


def random_wire(name: str, width: int, num_rows: int = 50) -> torch.Tensor:
    """Rows of random bytes, of all codes. Scales are not of bits at random: no subnormals."""
    row_format = FORMATS[name]
    scales = torch.randn(num_rows, row_format.num_blocks(width)).view(torch.uint8)
    if row_format.scale == "e8m0":
        scales = torch.randint(60, 256, (num_rows, row_format.num_blocks(width))).to(torch.uint8)
    rows = torch.randint(256, (num_rows, -(-(width + scales.shape[1]) // 16) * 16)).to(torch.uint8)
    rows[:, width : width + scales.shape[1]] = scales
    return rows


def check_rows_of_an_index(
    kernels, name: str, rows: torch.Tensor, row_range: torch.Tensor, device: str = "cpu"
):
    """Rows picked by an index, some several times: those of the rows laid out like that."""
    index = torch.randint(len(rows), (int(row_range[1, -1]) + 2,), dtype=torch.int32)
    row_format, amax, results = FORMATS[name], None, []
    if row_format.has_global_scale:
        amax = torch.empty(row_range.shape[1])
        twin.group_amax(rows, row_range, amax, row_index=index)
    for ops, given, row_index, at in (
        (twin, rows[index.long()], None, "cpu"),
        (twin, rows, index, "cpu"),
        (kernels, rows, index, device),
    ):
        found = row_buffers(len(index), rows.shape[1], row_format, at)
        options = {"row_index": row_index, "amax": amax}
        options = {
            key: None if tensor is None else tensor.to(at) for key, tensor in options.items()
        }
        ops.quantize_rows(given.to(at), row_range.to(at), found, row_format, **options)
        results.append(found)
    assert_same(*results[:2], name)
    assert_same(*results[1:], name)


def check_sent(kernels, name: str, rows: torch.Tensor, device: str = "cpu") -> None:
    """Rows put on the wire in one launch: data and scales side by side, then zeros."""
    sent, wanted = cases.encode_rows(kernels, rows.to(device), name), joined_rows(twin, rows, name)
    assert torch.equal(sent.cpu(), wanted), (name, rows.shape)
    assert torch.equal(cases.encode_rows(twin, rows, name), wanted), (name, rows.shape)


def check_received(
    kernels, name: str, width: int, row_range: torch.Tensor, dtype: torch.dtype, device: str = "cpu"
):
    """Rows taken apart and decoded as the twin does it."""
    wire, num_rows, found = random_wire(name, width), int(row_range[1, -1]) + 3, []
    index = torch.randint(len(wire), (num_rows,), dtype=torch.int32)
    for ops, at in ((twin, "cpu"), (kernels, device)):
        sent, results = wire.to(at), []
        for row_index, groups in (
            (index.to(at), row_range.to(at)),
            (None, row_range.clamp(max=49).to(at)),
        ):
            pair = row_buffers(num_rows, width, FORMATS[name], at)
            ops.unpack_rows(
                sent, groups, [part.view(torch.uint8) for part in pair], row_index=row_index
            )
            results += pair
        out = torch.empty(len(wire), width, dtype=dtype, device=at)
        ops.decode_rows(sent, out, FORMATS[name])
        found.append([*results, out.nan_to_num(7.0)])
    assert_same(*found, name)
    assert torch.equal(
        as_bytes(found[1][0])[: num_rows - 3], wire[index.long()][: num_rows - 3, :width]
    )


def check_columns(
    kernels, name: str, rows: torch.Tensor, row_range: torch.Tensor, num_rows: int, device="cpu"
) -> None:
    """Rows of the wire quantised along tokens: as the twin, and as the kernels in two steps."""
    width, dtype = rows.shape[1], rows.dtype
    wire = cases.encode_rows(twin, rows, name)[: len(rows)]
    index = torch.randint(
        len(rows), (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(2)
    )
    for sent, row_index in ((wire, index), (wire[index.long()], None)):
        expected = cases.requantize_columns(twin, sent, row_range, width, name, dtype, row_index)
        row_index = None if row_index is None else row_index.to(device)
        args = sent.to(device), row_range.to(device), width, name, dtype, row_index
        assert differences(cases.requantize_columns(kernels, *args), expected) == [], (name, dtype)
        assert (
            differences(cases.requantize_columns(kernels, *args, in_two_steps=True), expected) == []
        ), (name, dtype)


def check_ranges(
    kernels, name: str, splits: tuple[int, ...], rows: torch.Tensor, device: str = "cpu"
) -> None:
    """Rows of ranges, gathered, quantised and taken off the wire: as the twin, and no other rows."""
    num_rows, width, row_format = sum(splits) + 3, rows.shape[1], FORMATS[name]
    wire, index = (
        random_wire(name, width, len(rows)),
        torch.randint(len(rows), (num_rows,), dtype=torch.int32),
    )

    def quantize(ops, at, ranges, pair):
        ops.quantize_rows(rows.to(at), ranges.to(at), pair, row_format, row_index=index.to(at))

    def unpack(ops, at, ranges, pair):
        parts = [part.view(torch.uint8) for part in pair]
        ops.unpack_rows(wire.to(at), ranges.to(at), parts, row_index=index.to(at))

    blank = row_buffers(num_rows, width, row_format)
    for take in (quantize, unpack):
        for ranges in random_ranges(splits, 3):
            found = (
                row_buffers(num_rows, width, row_format),
                row_buffers(num_rows, width, row_format, device),
            )
            take(twin, "cpu", ranges, found[0])
            take(kernels, device, ranges, found[1])
            assert_same(*found, name, take, ranges)
            outside = ~rows_of(ranges, num_rows)
            for tensor, nothing in zip(found[1], blank, strict=True):
                assert torch.equal(as_bytes(tensor)[outside], as_bytes(nothing)[outside])
                assert not torch.equal(as_bytes(tensor), as_bytes(nothing))


def check_tiles(
    kernels, row_range: torch.Tensor, num_rows: int, num_blocks: int, device: str = "cpu"
) -> None:
    """Scales into tiles and back."""
    scale, results = torch.randint(1, 255, (num_rows, num_blocks)).to(torch.uint8), []
    for ops, at in ((twin, "cpu"), (kernels, device)):
        shape = max_tiles(num_rows, row_range.shape[1]), -(-num_blocks // 4), 512
        swizzled, back = filled(shape, torch.uint8, at), filled(scale.shape, torch.uint8, at)
        ops.swizzle_scales(scale.to(at), row_range.to(at), swizzled)
        ops.unswizzle_scales(swizzled, row_range.to(at), back)
        results.append((swizzled, back))
    assert_same(*results, num_blocks)
    end = int(row_range[1, -1])
    assert torch.equal(results[1][1][:end].cpu(), scale[:end])
