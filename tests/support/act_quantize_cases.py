"""Problems that tests of the activations which quantise share, and their results by the functions that are fused."""

from dataclasses import dataclass, replace

import torch
from launch_table import ACTIVATIONS, Launch, later
from quantize_cases import FORMATS, as_bytes, column_buffers, named, row_buffers, row_range_of
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
        span, start = slice(start, start + length), start + length
        if length == 0:
            continue
        lines = reference.padded_columns(x[span], None) if columns else x[span]
        codes, scales = map(torch.from_numpy, reference.quantize_lines(lines, **fields, amax=None))
        if columns:
            scale_first = first // block_format.block * size
            (
                data[:, first : first + codes.shape[1]],
                scale[:, scale_first : scale_first + scales.shape[1]],
            ) = (
                codes,
                scales,
            )
            first += codes.shape[1]
        else:
            data[span], scale[span] = codes, scales
    return data, scale


def forward(kernels, p, name):
    """By act_quantize."""
    out = p.operand(p.ffn, name)
    kernels.act_quantize(p.h, p.row_scale, p.row_range, out, p.activation, FORMATS[name])
    return named(*out)


def dact_operands(p, name, *, with_dbias=True):
    """Blank outputs of dact_quantize."""
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


class Apart:
    """Kernels that quantise activations, by those of a module that they fuse."""

    def __init__(self, kernels):
        self.kernels = kernels

    def activated(self, h, row_scale, row_range, width, activation):
        """Zeros behind the groups."""
        a = h.new_zeros(len(h), width)
        end = int(row_range[1].max()) if len(h) else 0
        self.kernels.scaled_activation(h[:end], row_scale[:end], a[:end], activation)
        return a

    def act_quantize(self, h, row_scale, row_range, out, activation, block_format):
        a = self.activated(h, row_scale, row_range, out[0].shape[1], activation)
        self.kernels.quantize_rows(a, row_range, out, block_format)

    def dact_quantize(self, da, h, row_scale, row_range, out, workspace, activation, block_format):
        end = int(row_range[1].max())
        dh = torch.zeros_like(h)
        out.dscale[end:] = 0
        self.kernels.scaled_activation_grad(
            da[:end], h[:end], row_scale[:end], dh[:end], out.dscale[:end], activation
        )
        if out.dbias is not None:
            self.kernels.grouped_bias_grad(dh, row_range, out.dbias)
        self.kernels.quantize_rows(dh, row_range, out.rows, block_format)
        self.kernels.quantize_columns(dh, row_range, out.columns, block_format)
        a = self.activated(h, row_scale, row_range, da.shape[1], activation)
        self.kernels.quantize_columns(a, row_range, out.a_columns, block_format)


@later
def numbers_of(make, values):
    """Of the rows that are computed; the others are NaN."""
    is_computed = rows_of(make.part, len(values)).view(-1, *[1] * (values.ndim - 1))
    return values.where(is_computed, torch.nan).to(make.device)


def launches(activation, ffn, name, dtype=torch.bfloat16, splits=SPLITS):
    """Forward, and backward with the gradient of a bias and without, of a Problem's numbers."""
    p = Problem(activation, ffn, dtype, splits)
    changes = {key: numbers_of(getattr(p, key)) for key in ("h", "row_scale", "da")}
    forward_changes = {key: changes[key] for key in ("h", "row_scale")}
    act = Launch("act_quantize", {"I": ffn}, dtype, name, activation, changes=forward_changes)
    dact = replace(act, kernel="dact_quantize", changes=changes)
    return act, dact, replace(dact, ways="dbias")
