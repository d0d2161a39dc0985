"""Problems that tests of the activations which quantise share, and their results by the functions that are fused."""

from dataclasses import dataclass

import torch
from launch_table import ACTIVATIONS
from quantize_cases import (
    FORMATS,
    as_bytes,
    column_buffers,
    differences,
    named,
    row_buffers,
    row_range_of,
)
from row_ranges import rows_of

from symmoe.kernels.act_quantized import DactOperands, dact_quantize_workspace_numel
from symmoe.kernels.activation import Activation

NAMES = ("float8_block", "float8_block_powers", "mxfp8")
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
        self.h = h.to(self.dtype).to(self.device)
        self.da = da.to(self.dtype).to(self.device)
        self.row_scale = row_scale.to(self.device)
        self.row_range = row_range_of(self.splits).to(self.device)

    @staticmethod
    def numbers(rows, width, generator):
        x = torch.randn(rows, width, generator=generator) * 3
        return x * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())

    def operand(self, width, name, *, columns=False):
        """Buffers for data and scales, full of a byte that tells where nothing was written."""
        if columns:
            return column_buffers(
                self.h.shape[0], len(self.splits), width, FORMATS[name], self.device
            )
        return row_buffers(self.h.shape[0], width, FORMATS[name], self.device)

    def blank_dbias(self):
        return torch.full((len(self.splits), self.h.shape[1]), torch.nan, device=self.device)


def exact_problem(ffn, **options):
    """relu(h)^2 of numbers with few bits: no result is rounded before it is quantised."""
    p = Problem(ACTIVATIONS["srelu"], ffn, **options)
    generator = torch.Generator().manual_seed(1)
    for tensor in (p.h, p.da):
        tensor[: p.num_rows] = torch.randint(
            -5, 6, tensor[: p.num_rows].shape, generator=generator
        ).bfloat16()
    p.row_scale[: p.num_rows] = torch.exp2(
        torch.randint(-2, 3, (p.num_rows,), generator=generator).float()
    )
    return p


def reference_operand(p, x, name, *, columns):
    """(data, scale), bytes, that numpy makes of x [N, C], fp32 numpy; FILL where nothing is written."""
    import quantize_reference as reference  # which needs more packages than the rest

    block_format = FORMATS[name]
    fields = {
        "element": "e4m3",
        "kind": block_format.scale,
        "block": block_format.block,
        "block_lines": 1,
    }
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
            data[:, first : first + codes.shape[1]], scale[:, place : place + scales.shape[1]] = (
                codes,
                scales,
            )
            first += codes.shape[1]
        else:
            data[here], scale[here] = codes, scales
    return data, scale


def forward(kernels, p, name):
    """By act_quantize."""
    out = p.operand(p.ffn, name)
    kernels.act_quantize(p.h, p.row_scale, p.row_range, out, p.activation, FORMATS[name])
    return named(*out)


def activated(kernels, p):
    """The activation by the function that is fused; zeros in the tail."""
    n, a = p.num_rows, torch.zeros(p.h.shape[0], p.ffn, dtype=p.dtype, device=p.device)
    kernels.scaled_activation(p.h[:n], p.row_scale[:n], a[:n], p.activation)
    return a


def forward_apart(kernels, p, name):
    """By the functions that it fuses."""
    out = p.operand(p.ffn, name)
    kernels.quantize_rows(activated(kernels, p), p.row_range, out, FORMATS[name])
    return named(*out)


def dact_operands(p, name, *, with_dbias=True):
    """What dact_quantize fills, blank."""
    hidden = p.h.shape[1]
    buffers = (
        p.operand(hidden, name),
        p.operand(hidden, name, columns=True),
        p.operand(p.ffn, name, columns=True),
    )
    dscale = torch.full_like(p.row_scale, torch.nan)
    return DactOperands(dscale, *buffers, p.blank_dbias() if with_dbias else None)


def results_of(out):
    """The operands and the sums of a DactOperands, by name."""
    operands = (
        named(*out.rows, "rows ")
        | named(*out.columns, "columns ")
        | named(*out.a_columns, "a_columns ")
    )
    return operands, {
        name: getattr(out, name) for name in ("dscale", "dbias") if getattr(out, name) is not None
    }


def backward(kernels, p, name, *, with_dbias=True):
    """By dact_quantize: the operands, and the sums by name."""
    out = dact_operands(p, name, with_dbias=with_dbias)
    workspace = torch.full(
        (dact_quantize_workspace_numel(len(p.h), p.ffn, out.dbias),), torch.nan, device=p.device
    )
    kernels.dact_quantize(
        p.da, p.h, p.row_scale, p.row_range, out, workspace, p.activation, FORMATS[name]
    )
    return results_of(out)


def backward_apart(kernels, p, name, *, with_dbias=True):
    """By the functions that it fuses."""
    n = p.num_rows
    dh = torch.zeros_like(p.h)
    out = dact_operands(p, name, with_dbias=with_dbias)
    kernels.scaled_activation_grad(
        p.da[:n], p.h[:n], p.row_scale[:n], dh[:n], out.dscale[:n], p.activation
    )
    out.dscale[n:] = 0
    if with_dbias:
        kernels.grouped_bias_grad(dh, p.row_range, out.dbias)
    kernels.quantize_rows(dh, p.row_range, out.rows, FORMATS[name])
    kernels.quantize_columns(dh, p.row_range, out.columns, FORMATS[name])
    kernels.quantize_columns(activated(kernels, p), p.row_range, out.a_columns, FORMATS[name])
    return results_of(out)


def assert_same_sums(found, expected):
    """Bit for bit, on any device."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, check_device=False)


def check_fusion(kernels, p, name):
    """The bits of what is fused, of a backward pass with the gradient of a bias and without."""
    assert differences(forward(kernels, p, name), forward_apart(kernels, p, name)) == []
    for with_dbias in (True, False):
        found, sums = backward(kernels, p, name, with_dbias=with_dbias)
        expected, wanted = backward_apart(kernels, p, name, with_dbias=with_dbias)
        assert differences(found, expected) == []
        assert_same_sums(sums, wanted)


def check_ranges(kernels, p, name, parts):
    """Rows of ranges are written and no others, of rows of h that are there: the others are NaN."""

    def call(row_range, out):
        there = torch.where(rows_of(row_range, len(p.h))[:, None], p.h, torch.nan)
        kernels.act_quantize(there, p.row_scale, row_range, out, p.activation, FORMATS[name])

    whole = p.operand(p.ffn, name)
    union = p.operand(p.ffn, name)
    call(p.row_range, whole)
    for ranges in parts:
        part = p.operand(p.ffn, name)
        ranges = ranges.to(p.device)
        call(ranges, part)
        call(ranges, union)
        inside = rows_of(ranges, len(p.h))[:, None].cpu()
        for got, want, blank in zip(part, whole, p.operand(p.ffn, name), strict=True):
            assert torch.equal(as_bytes(got), torch.where(inside, as_bytes(want), as_bytes(blank)))
    assert all(
        torch.equal(as_bytes(got), as_bytes(want)) for got, want in zip(union, whole, strict=True)
    )


def check_that_differences_are_noticed(kernels, p):
    expected = forward_apart(kernels, p, "float8_block")
    p.row_scale[40] *= 2
    assert differences(forward(kernels, p, "float8_block"), expected) == [
        "scale"
    ]  # twice the numbers
