"""Rows, groups and formats that tests of the quantising kernels share."""

import torch
from launch_table import FORMATS, SIGNS, format_of_weights

from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import TensorTable, range_of

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
    ties = torch.tensor(
        [448, 17, 19, -17, 2**-10, 3 * 2**-10, 1.0625, 416, 432, 6, 5, 2.5, 3.5, 0.25, 0.75, -1.75]
    )
    special = {
        1: torch.zeros(width),
        2: -torch.zeros(width),
        5: torch.full((width,), torch.finfo(dtype).smallest_normal / 8),
        6: torch.full((width,), torch.finfo(dtype).max),
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
    """The outputs of kernels (a module of them) for rows, with FILL where they write nothing. hard: with optional
    outputs, and columns of rows that are picked by an index from the reversed ones."""
    block_format = FORMATS[name]
    (num_rows, width), num_groups = rows.shape, row_range.shape[1]
    result = {}
    index = None
    source = rows
    if hard:
        index = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=rows.device)
        source = rows.flip(0)
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


class Scattered:
    """Matrices where no two are neighbours, the last one first, with NaN between them, and their table."""

    def __init__(self, packed: torch.Tensor):
        size = packed[0].nbytes
        pitch = -(-size // 16) * 16 + 16
        memory = torch.full((len(packed), pitch), 0xFF, dtype=torch.uint8, device=packed.device)
        lines = reversed(memory.unbind())
        self.matrices = [line[:size].view(packed.dtype).view(packed.shape[1:]) for line in lines]
        for matrix, source in zip(self.matrices, packed, strict=True):
            matrix.copy_(source)
        self.between = memory[:, size:]
        pointers = torch.tensor([matrix.data_ptr() for matrix in self.matrices]).to(packed.device)
        self.table = TensorTable(pointers, tuple(packed.shape), packed.dtype)

    def packed(self) -> torch.Tensor:
        """As they are now; what lies between them must not have changed."""
        assert (self.between == 0xFF).all()
        return torch.stack(self.matrices)


def quantize_weights(
    kernels,
    weight: torch.Tensor,
    name: str,
    table: TensorTable | None = None,
    *,
    in_pairs: bool = False,
) -> dict[str, torch.Tensor]:
    """The outputs of kernels for weights and their transpose; in_pairs: in one call. table: the addresses of the
    weights, where kernels read them from there."""
    block_format = format_of_weights(name)
    source = weight if table is None else table
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


def differences(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in a byte."""
    assert first.keys() == second.keys()
    return [
        name for name in first if not torch.equal(as_bytes(first[name]), as_bytes(second[name]))
    ]
