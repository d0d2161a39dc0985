"""For the development of the quantising kernels: how fast they are beside a copy of the same rows, on one GPU.

    python benchmarks/quantize.py [--only "copy,Float8Block columns"] [--json quantize.json]

GB/s count what has to be read once and what is written: rows, data and scales; for the copy, rows twice. NVFP4's times
include the search for the largest number of every group. Results are dequantised and compared with the rows first.
Times are medians of CUDA events around single calls, of all variants in turn; the tensors are larger than the L2 cache.

`gathered`: rows picked by an index from fewer, as experts share the tokens that a rank has received. `of the wire`:
columns of such rows that have travelled quantised, in one kernel, and `decoded`: in two, whose bits must be the same.
What is gathered counts once. In brackets: other options of the kernels for Hopper (hopper_columns.py,
hopper_weights.py).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from symmoe.kernels import select
from symmoe.kernels.formats import TILE
from symmoe.kernels.parts import range_of
from symmoe.precision import MXFP8, NVFP4, Float8Block, Quantized
from symmoe.precision.wire import WireFormat, wire_problem
from symmoe.tools.bench.records import machine

SHAPES = {  # experts on this rank, hidden size, FFN width, rows
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
}
RECIPES = (Float8Block(), MXFP8(), NVFP4())
DISTINCT_ROWS = 16384  # of gathered ones: what two ranks of 8192 tokens have
HOPPER_OPTIONS = {
    "one stage": {"stages": 1},
    "two stages": {"stages": 2},
}
MAX_ERROR = {"e4m3": 0.04, "e2m1": 0.16}  # of the root of the sum of squares
WARM_UP, REPS = 3, 20


class Variant(NamedTuple):
    """What is timed, what it reads, and what it quantises if that is not the same."""

    step: Callable[[], object]
    source: torch.Tensor
    rows: torch.Tensor | None = None


def variants(shape: str) -> dict[str, Variant]:
    """By name."""
    num_groups, hidden, ffn, num_rows = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(num_groups, ffn, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    share = torch.rand(num_groups, device="cuda", generator=generator) + 0.5
    bounds = torch.zeros(num_groups + 1, dtype=torch.int32, device="cuda")
    bounds[1:] = (share.cumsum(0) / share.sum() * num_rows).round()
    row_range = range_of(bounds)
    seeds = torch.arange(num_groups, device="cuda")
    copy = torch.empty_like(rows)
    result = {"copy": Variant(lambda: copy.copy_(rows), rows)}
    for recipe in RECIPES:
        name = type(recipe).__name__
        result[f"{name} rows"] = Variant(partial(recipe.quantize, rows, row_range), rows)
        result[f"{name} columns"] = Variant(partial(recipe.quantize_columns, rows, row_range), rows)
        result[f"{name} weight"] = Variant(partial(recipe.quantize_weight, weight), weight)
        result[f"{name} weight^T"] = Variant(partial(recipe.quantize_weight_transposed, weight), weight)
        result[f"{name} weight pair"] = Variant(partial(recipe.quantize_weight_pair, weight), weight)
        if wire_problem(recipe) is None:
            result[f"{name} to the wire"] = Variant(partial(WireFormat(recipe, hidden).encode, rows), rows)
        if recipe.stochastic_gradients:
            stochastic = partial(recipe.quantize_columns, rows, row_range, seeds=seeds)
            result[f"{name} columns, stochastic"] = Variant(stochastic, rows)
    return result | column_variants(rows, row_range) | weight_variants(weight)


def column_variants(rows: torch.Tensor, row_range: torch.Tensor) -> dict[str, Variant]:
    """Columns in blocks of 128: of gathered rows, of rows on the wire, and with other options."""
    recipe, hidden = Float8Block(), rows.shape[1]
    wire = WireFormat(recipe, hidden)
    few, index = rows[:DISTINCT_ROWS], gathered_index(row_range, rows.shape[0])
    sent, dtype = wire.encode(few), rows.dtype
    picked, decoded = few[index], wire.decode(sent, dtype)[index]

    def in_two_steps() -> Quantized:
        return recipe.quantize_columns(wire.decode(sent, dtype), row_range, row_index=index)

    one, two = wire.columns(sent, row_range, dtype, index), in_two_steps()
    num_tiles = int(((row_range[1] - row_range[0] + TILE - 1) // TILE).sum())
    for left, right, length in ((one.data, two.data, TILE * num_tiles), (one.scale, two.scale, num_tiles)):
        if not torch.equal(bits(left)[:, :length], bits(right)[:, :length]):
            sys.exit("columns of the wire have other bits than those of the decoded rows")
    gathered = partial(recipe.quantize_columns, few, row_range, row_index=index)
    of_the_wire = partial(wire.columns, sent, row_range, dtype, index)
    result = {
        "Float8Block columns, gathered": Variant(gathered, few, picked),
        "Float8Block columns, of the wire": Variant(of_the_wire, sent, decoded),
        "Float8Block columns, decoded": Variant(in_two_steps, sent, decoded),
    }
    if select.hopper_kernels(rows.device, dtype, hidden) is None:
        return result
    from symmoe.kernels.low_precision.hopper_columns import launch_quantize_columns, launch_requantize_columns

    words = sent.view(torch.uint8)

    def launched(source: torch.Tensor, function: Callable[..., None], *args: object, **options: object) -> Quantized:
        columns = recipe.empty_columns(rows.shape[0], hidden, row_range)
        function(source, row_range, columns.data, columns.scale, recipe.row_format, *args, **options)
        return columns

    for name, options in HOPPER_OPTIONS.items():
        plain = partial(launched, rows, launch_quantize_columns, **options)
        gathered = partial(launched, few, launch_quantize_columns, row_index=index, **options)
        travelled = partial(launched, words, launch_requantize_columns, dtype, row_index=index, **options)
        result[f"Float8Block columns [{name}]"] = Variant(plain, rows)
        result[f"Float8Block columns, gathered [{name}]"] = Variant(gathered, few, picked)
        result[f"Float8Block columns, of the wire [{name}]"] = Variant(travelled, sent, decoded)
    return result


def weight_variants(weight: torch.Tensor) -> dict[str, Variant]:
    """Both operands in blocks of 128, with other options."""
    if select.hopper_kernels(weight.device, weight.dtype, weight.shape[2]) is None:
        return {}
    from symmoe.kernels.low_precision.hopper_weights import launch_quantize_weight_pairs

    recipe = Float8Block()
    pair = recipe.quantize_weight_pair(weight)
    buffers = [buffer for quantized in pair for buffer in (quantized.data, quantized.scale)]

    def launched(**options: int) -> tuple[Quantized, ...]:
        launch_quantize_weight_pairs(weight, *buffers, recipe.weight_format, **options)
        return pair

    return {
        f"Float8Block weight pair [{name}]": Variant(partial(launched, **options), weight)
        for name, options in HOPPER_OPTIONS.items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as integers, wherever they lie."""
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def gathered_index(row_range: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32[N]: random rows of DISTINCT_ROWS, ascending in every group, as routing has them."""
    generator = torch.Generator("cuda").manual_seed(1)
    index = torch.randint(DISTINCT_ROWS, (num_rows,), device="cuda", generator=generator)
    group = torch.searchsorted(row_range[1], torch.arange(num_rows, device="cuda").int(), right=True)
    return ((group * DISTINCT_ROWS + index).sort().values % DISTINCT_ROWS).int()


def check(name: str, found: Quantized, wanted: torch.Tensor) -> None:
    """Ends the program if the result is not about what was quantised."""
    error = float((found.dequantize() - wanted).norm() / wanted.float().norm())
    if not error < MAX_ERROR[found.block_format.element]:
        sys.exit(f"{name}: wrong by {error:.3f} of the whole")


def quantized_parts(result: object) -> tuple[Quantized, ...]:
    """What has been quantised; nothing of copies, and of rows on the wire, whose bytes the tests compare."""
    return result if isinstance(result, tuple) else (result,) if isinstance(result, Quantized) else ()


def moved_bytes(result: object, source: torch.Tensor) -> int:
    """Bytes that have to be read or written."""
    outputs = [tensor for part in quantized_parts(result) for tensor in (part.data, part.scale)]
    outputs += [result] if isinstance(result, torch.Tensor) else []
    return sum(tensor.numel() * tensor.element_size() for tensor in (source, *outputs))


def times_us(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of one call of each, of all in turn."""
    times = {name: [] for name in steps}
    for repetition in range(WARM_UP + REPS):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host's head start: its time does not show
            start.record()
            step()
            end.record()
            end.synchronize()
            if repetition >= WARM_UP:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(shape: str, wanted: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """{variant: {us, gbs}} of one shape; of variants whose names have one of the wanted texts."""

    def is_wanted(name: str) -> bool:
        return not wanted or any(text in name for text in wanted)

    timed = {name: variant for name, variant in variants(shape).items() if is_wanted(name)}
    num_bytes = {}
    for name, (step, source, rows) in timed.items():
        result = step()
        num_bytes[name] = moved_bytes(result, source)
        for part in quantized_parts(result):
            check(f"{shape}, {name}", part, source if rows is None else rows)
        del result
    medians = times_us({name: variant.step for name, variant in timed.items()})
    return {name: {"us": us, "gbs": num_bytes[name] / us / 1e3} for name, us in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of these, with commas between")
    parser.add_argument("--only", help="variants whose names have one of these texts, with commas between")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    figures = {}
    for shape in options.shapes.split(","):
        figures[shape] = measure(shape, tuple(options.only.split(",")) if options.only else ())
        print(shape)
        for name, figure in figures[shape].items():
            print(f"  {name:48} {figure['us']:8.0f} us {figure['gbs']:6.0f} GB/s")
    if options.json:
        with open(options.json, "w") as file:
            env = machine(torch.device("cuda")) | {"command": " ".join(sys.argv)}
            json.dump({"env": env, "quantize": figures}, file, indent=1)


if __name__ == "__main__":
    main()
