"""For the development of act_quantize and dact_quantize: how fast they are beside a copy of the same bytes, on one GPU.

    python benchmarks/act_quantize.py [--json act_quantize.json]

SwiGLU, E4M3 in blocks of 128: `act` makes rows, as a layer's forward pass asks for; `dact` dh in both ways and columns
of a, as its backward pass does. In brackets: other shapes of the programs. GB/s count what has to be read once and what
is written; the copy reads half as many bytes and writes as many. Times are medians of CUDA events around single calls,
of all in turn; the tensors are larger than the L2 cache. Every result is first compared, byte for byte, with that of
the kernels that are fused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import torch
from quantize import SHAPES, times_us

from symmoe.kernels import gpu
from symmoe.kernels.act_quantized import FEATURES, Buffers, dact_features, dact_quantize_workspace_numel
from symmoe.kernels.activation import Activation
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.launch.integers import ceil_div
from symmoe.kernels.launch.launch import Constants, launch
from symmoe.kernels.low_precision import act_quantized
from symmoe.kernels.low_precision.hopper_dact_quantize import launch_dact_quantize
from symmoe.kernels.parts import range_of
from symmoe.kernels.triton.gemm_act import sum_dact_partials
from symmoe.kernels.triton.tiles import max_row_tiles, row_programs
from symmoe.precision import Float8Block
from symmoe.tools.bench.records import machine

SWIGLU, FLOAT8_BLOCK = Activation(), Float8Block().row_format
ROW_PROGRAMS = {"64 rows, 8 warps": (64, 8), "16 rows, 4 warps": (16, 4)}  # beside those of act_quantize
BANDS = {"bands of a tile": 1, "bands of 32": 32}  # beside dact_quantize's


class Case:
    """The tensors of one shape, and what may be done with them: each step takes its results' operands."""

    def __init__(self, shape: str) -> None:
        self.num_groups, _hidden, self.ffn, self.num_rows = SHAPES[shape]
        generator = torch.Generator("cuda").manual_seed(0)
        numbers = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.h, self.da = numbers(self.num_rows, 2 * self.ffn), numbers(self.num_rows, self.ffn)
        self.row_scale = torch.rand(self.num_rows, device="cuda", generator=generator)
        share = torch.rand(self.num_groups, device="cuda", generator=generator) + 0.5
        bounds = torch.zeros(self.num_groups + 1, dtype=torch.int32, device="cuda")
        bounds[1:] = (share.cumsum(0) / share.sum() * self.num_rows).round()
        self.row_range = range_of(bounds)
        self.dscale = torch.empty(self.num_rows, device="cuda")
        self.workspace = torch.empty(dact_quantize_workspace_numel(self.num_rows, self.ffn), device="cuda")

    def rows(self, width: int) -> Buffers:
        """Empty operands: rows, all bytes 0."""
        return self._data(self.num_rows, width), torch.zeros(self.num_rows, width // TILE, device="cuda")

    def columns(self, width: int) -> Buffers:
        """The same of columns; a scale's block is its first dimension in memory."""
        tokens = TILE * max_tiles(self.num_rows, self.num_groups)
        return self._data(width, tokens), torch.zeros(tokens // TILE, width, device="cuda").t()

    @staticmethod
    def _data(lines: int, length: int) -> torch.Tensor:
        return torch.zeros(lines, length, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)

    def act(self, rows: Buffers) -> None:
        gpu.act_quantize(self.h, self.row_scale, self.row_range, SWIGLU, FLOAT8_BLOCK, rows=rows)

    def act_in_programs_of(self, num_rows: int, num_warps: int, rows: Buffers) -> None:
        named = act_quantized._row_constants(self.ffn, self.num_groups, SWIGLU, FLOAT8_BLOCK).named
        constants = Constants({**named, "ROWS": num_rows, "num_warps": num_warps})
        num_tiles = max_row_tiles(self.num_rows, self.num_groups, num_rows)
        grid = self.ffn // FEATURES, row_programs(num_tiles, self.ffn // FEATURES)
        operands = self.h, self.row_scale, self.row_range, rows[0].view(torch.uint8), rows[1]
        launch(act_quantized.act_quantize_rows_kernel, grid, constants, *operands)

    def act_apart(self, rows: Buffers) -> None:
        a = torch.empty_like(self.da)
        gpu.scaled_activation(self.h, self.row_scale, a, SWIGLU)
        gpu.quantize_rows(a, self.row_range, *rows, FLOAT8_BLOCK)

    def dact(self, rows: Buffers, columns: Buffers, a_columns: Buffers) -> None:
        operands = {"rows": rows, "columns": columns, "a_columns": a_columns}
        inputs = self.da, self.h, self.row_scale, self.row_range, self.dscale, self.workspace
        gpu.dact_quantize(*inputs, SWIGLU, FLOAT8_BLOCK, **operands)

    def dact_in_bands_of(self, group_m: int, rows: Buffers, columns: Buffers, a_columns: Buffers) -> None:
        inputs = self.da, self.h, self.row_scale, self.row_range, self.workspace, SWIGLU, FLOAT8_BLOCK
        launch_dact_quantize(*inputs, rows, columns, a_columns, group_m=group_m)
        sum_dact_partials(self.workspace, self.row_range, self.dscale, ceil_div(self.ffn, dact_features(SWIGLU)))

    def dact_apart(self, rows: Buffers, columns: Buffers, a_columns: Buffers) -> None:
        dh, a = torch.empty_like(self.h), torch.empty_like(self.da)
        gpu.scaled_activation_grad(self.da, self.h, self.row_scale, dh, self.dscale, SWIGLU)
        gpu.quantize_rows(dh, self.row_range, *rows, FLOAT8_BLOCK)
        gpu.quantize_columns(dh, self.row_range, *columns, FLOAT8_BLOCK)
        gpu.scaled_activation(self.h, self.row_scale, a, SWIGLU)
        gpu.quantize_columns(a, self.row_range, *a_columns, FLOAT8_BLOCK)


def same_bits(steps: dict[str, Callable[..., None]], operands: tuple[Buffers, ...]) -> None:
    """Ends the program unless all steps leave the same bytes in the operands. The last step is the oracle."""
    expected = None
    for name, step in reversed(steps.items()):
        for data, scale in operands:
            data.view(torch.uint8).zero_()
            scale.zero_()
        step(*operands)
        found = [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.t() for tensor in sum(operands, ())]
        found = [tensor.contiguous().view(torch.uint8).clone() for tensor in found]
        expected = expected or found
        if not all(map(torch.equal, found, expected)):
            sys.exit(f"{name} has other bits than what it fuses")


def measure(shape: str) -> dict[str, dict[str, float]]:
    """{variant: {us, gbs}} of one shape."""
    case = Case(shape)
    rows = (case.rows(case.ffn),)
    steps = {"act": case.act}
    steps |= {f"act [{name}]": partial(case.act_in_programs_of, *program) for name, program in ROW_PROGRAMS.items()}
    result = _measured(case, {**steps, "act apart": case.act_apart}, rows, case.h.nbytes)
    operands = case.rows(2 * case.ffn), case.columns(2 * case.ffn), case.columns(case.ffn)
    steps = {"dact": case.dact}
    steps |= {f"dact [{name}]": partial(case.dact_in_bands_of, band) for name, band in BANDS.items()}
    return result | _measured(case, {**steps, "dact apart": case.dact_apart}, operands, case.h.nbytes + case.da.nbytes)


def _measured(
    case: Case, steps: dict[str, Callable[..., None]], operands: tuple[Buffers, ...], read_bytes: int
) -> dict[str, dict[str, float]]:
    same_bits(steps, operands)
    num_bytes = read_bytes + sum(tensor.nbytes for pair in operands for tensor in pair)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    copied = torch.empty_like(source)
    name = next(iter(steps))
    timed = {f"copy of the bytes of {name}": lambda: copied.copy_(source)}
    timed |= {name: partial(step, *operands) for name, step in steps.items()}
    return {name: {"us": us, "gbs": num_bytes / us / 1e3} for name, us in times_us(timed).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of these, with commas between")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    figures = {}
    for shape in options.shapes.split(","):
        figures[shape] = measure(shape)
        print(shape)
        for name, figure in figures[shape].items():
            print(f"  {name:28} {figure['us']:8.0f} us {figure['gbs']:6.0f} GB/s")
    if options.json:
        with open(options.json, "w") as file:
            env = machine(torch.device("cuda")) | {"command": " ".join(sys.argv)}
            json.dump({"env": env, "act_quantize": figures}, file, indent=1)


if __name__ == "__main__":
    main()
