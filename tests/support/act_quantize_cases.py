"""Problems that tests of the activations which quantise share, and their results by the functions that are fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from quantize_cases import FORMATS, as_bytes, filled, filled_column_scale, row_range_of

from symmoe.kernels.act_quantized import dact_quantize_workspace_numel
from symmoe.kernels.activation import Activation
from symmoe.kernels.formats import TILE, max_tiles

NAMES = ("float8_block", "float8_block_powers", "mxfp8")
ACTIVATIONS = {
    "swiglu": Activation(),
    "clamped": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "interleaved": Activation(alpha=1.702, limit=7.0, offset=1.0, interleave=1),
    "interleaved 32": Activation(interleave=32),
    "srelu": Activation(function="relu2", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh gelu": Activation(function="gelu_tanh", is_gated=False),
}
# Without rows, with one, unaligned, exactly a tile, more than one; 10 rows of the tail belong to no group.
SPLITS, TAIL = (0, 37, 128, 1, 0, 161), 10


@dataclass
class Problem:
    """h [N, W] and da [N, I] of all magnitudes, some not finite; the tail is NaN and must not be read."""

    activation: Activation
    ffn: int
    dtype: torch.dtype = torch.bfloat16
    splits: tuple[int, ...] = SPLITS
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.num_rows = sum(self.splits)
        capacity = self.num_rows + TAIL
        hidden = self.activation.hidden_width(self.ffn)
        h, da = (self.numbers(capacity, width, generator) for width in (hidden, self.ffn))
        row_scale = torch.rand(capacity, generator=generator) + 0.01
        for tensor in (h, da, row_scale):
            tensor[self.num_rows :] = torch.nan
        if self.num_rows > 60:
            h[41, 3], da[50, 5], row_scale[55] = torch.inf, torch.nan, 0.0
        self.h, self.da = h.to(self.dtype).to(self.device), da.to(self.dtype).to(self.device)
        self.row_scale, self.row_range = row_scale.to(self.device), row_range_of(self.splits).to(self.device)

    @staticmethod
    def numbers(rows, width, generator):
        x = torch.randn(rows, width, generator=generator) * 3
        return x * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())

    def operand(self, width, name, *, columns=False):
        """Buffers for data and scales, full of a byte that tells where nothing was written."""
        block_format = FORMATS[name]
        lines, length = self.h.shape[0], width
        if columns:
            lines, length = width, TILE * max_tiles(self.h.shape[0], len(self.splits))
        data = filled((lines, length), block_format.data_dtype, self.device)
        scale_shape = lines, block_format.num_blocks(length)
        if columns:
            return data, filled_column_scale(scale_shape, block_format, self.device)
        return data, filled(scale_shape, block_format.scale_dtype, self.device)

    def blank_dscale(self):
        return torch.full((self.h.shape[0],), torch.nan, device=self.device)

    def blank_dbias(self):
        return torch.full((len(self.splits), self.h.shape[1]), torch.nan, device=self.device)


def exact_problem(ffn, **options):
    """relu(h)^2 of numbers with few bits: no result is rounded before it is quantised."""
    p = Problem(ACTIVATIONS["srelu"], ffn, **options)
    generator = torch.Generator().manual_seed(1)
    for tensor in (p.h, p.da):
        tensor[: p.num_rows] = torch.randint(-5, 6, tensor[: p.num_rows].shape, generator=generator).bfloat16()
    p.row_scale[: p.num_rows] = torch.exp2(torch.randint(-2, 3, (p.num_rows,), generator=generator).float())
    return p


def reference_operand(p, x, name, *, columns):
    """(data, scale), bytes, that numpy makes of x [N, C], fp32 numpy; FILL where nothing is written."""
    import quantize_reference as reference  # which needs more packages than the rest

    block_format = FORMATS[name]
    fields = {"element": "e4m3", "kind": block_format.scale, "block": block_format.block, "block_lines": 1}
    data, scale = (as_bytes(tensor) for tensor in p.operand(x.shape[1], name, columns=columns))
    size, start, first = block_format.scale_dtype.itemsize, 0, 0
    for length in p.splits:
        here, start = slice(start, start + length), start + length
        if length == 0:
            continue
        lines = reference.padded_columns(x[here], None) if columns else x[here]
        codes, scales = map(torch.from_numpy, reference.quantize_lines(lines, **fields, amax=None))
        if columns:
            place = first // block_format.block * size
            data[:, first : first + codes.shape[1]], scale[:, place : place + scales.shape[1]] = codes, scales
            first += codes.shape[1]
        else:
            data[here], scale[here] = codes, scales
    return data, scale


def named(**operands):
    """The tensors of operands by name."""
    return {
        f"{name} {part}": tensor
        for name, operand in operands.items()
        for part, tensor in zip(("data", "scale"), operand, strict=True)
    }


def forward(kernels, p, name):
    """By act_quantize: both operands in one call."""
    rows, columns = p.operand(p.ffn, name), p.operand(p.ffn, name, columns=True)
    kernels.act_quantize(p.h, p.row_scale, p.row_range, p.activation, FORMATS[name], rows=rows, columns=columns)
    return named(rows=rows, columns=columns)


def forward_apart(kernels, p, name):
    """By the functions that it fuses."""
    n = p.num_rows
    a = torch.zeros(p.h.shape[0], p.ffn, dtype=p.dtype, device=p.device)
    kernels.scaled_activation(p.h[:n], p.row_scale[:n], a[:n], p.activation)
    rows, columns = p.operand(p.ffn, name), p.operand(p.ffn, name, columns=True)
    kernels.quantize_rows(a, p.row_range, *rows, FORMATS[name])
    kernels.quantize_columns(a, p.row_range, *columns, FORMATS[name])
    return named(rows=rows, columns=columns)


def backward(kernels, p, name, *, with_dbias=True):
    """By dact_quantize: the operands, and the sums by name."""
    hidden = p.h.shape[1]
    rows, columns = p.operand(hidden, name), p.operand(hidden, name, columns=True)
    a_columns, dscale = p.operand(p.ffn, name, columns=True), p.blank_dscale()
    dbias = p.blank_dbias() if with_dbias else None
    numel = dact_quantize_workspace_numel(p.h.shape[0], p.ffn, dbias)
    workspace = torch.full((numel,), torch.nan, device=p.device)
    kernels.dact_quantize(
        p.da,
        p.h,
        p.row_scale,
        p.row_range,
        dscale,
        workspace,
        p.activation,
        FORMATS[name],
        rows=rows,
        columns=columns,
        a_columns=a_columns,
        dbias=dbias,
    )
    sums = {"dscale": dscale} if dbias is None else {"dscale": dscale, "dbias": dbias}
    return named(rows=rows, columns=columns, a_columns=a_columns), sums


def backward_apart(kernels, p, name, *, with_dbias=True):
    """By the functions that it fuses."""
    n, hidden = p.num_rows, p.h.shape[1]
    dh, dscale = torch.zeros_like(p.h), p.blank_dscale()
    kernels.scaled_activation_grad(p.da[:n], p.h[:n], p.row_scale[:n], dh[:n], dscale[:n], p.activation)
    dscale[n:] = 0
    sums = {"dscale": dscale}
    if with_dbias:
        sums["dbias"] = p.blank_dbias()
        kernels.grouped_bias_grad(dh, p.row_range, sums["dbias"])
    rows, columns = p.operand(hidden, name), p.operand(hidden, name, columns=True)
    kernels.quantize_rows(dh, p.row_range, *rows, FORMATS[name])
    kernels.quantize_columns(dh, p.row_range, *columns, FORMATS[name])
    forward = forward_apart(kernels, p, name)
    a_columns = forward["columns data"], forward["columns scale"]
    return named(rows=rows, columns=columns, a_columns=a_columns), sums


def assert_same_sums(found, expected):
    """Bit for bit, on any device."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, check_device=False)
