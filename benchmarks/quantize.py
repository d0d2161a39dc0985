"""For the development of the quantising kernels: how fast they are beside a copy of the same rows, on one GPU.

    python benchmarks/quantize.py [--json quantize.json]

GB/s count what has to be read once and what is written: rows, data and scales; for the copy, rows twice. NVFP4's times
include the search for the largest number of every group. Results are dequantised and compared with the rows first.
Times are medians of CUDA events around single calls, of all variants in turn; the tensors are larger than the L2 cache.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch

from symmoe.bench.records import machine
from symmoe.precision import MXFP8, NVFP4, Float8Block, Float8Rowwise, Quantized

SHAPES = {  # experts on this rank, hidden size, FFN width, rows
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
}
RECIPES = (Float8Block(), Float8Rowwise(), MXFP8(), NVFP4())
MAX_ERROR = {"e4m3": 0.04, "e2m1": 0.16}  # of the root of the sum of squares
WARM_UP, REPS = 3, 20


def variants(shape: str) -> dict[str, tuple[Callable[[], object], torch.Tensor]]:
    """What is timed, by name, and what it reads."""
    num_groups, hidden, ffn, num_rows = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(num_groups, ffn, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    share = torch.rand(num_groups, device="cuda", generator=generator) + 0.5
    row_start = torch.zeros(num_groups + 1, dtype=torch.int32, device="cuda")
    row_start[1:] = (share.cumsum(0) / share.sum() * num_rows).round()
    seeds = torch.arange(num_groups, device="cuda")
    copy = torch.empty_like(rows)
    result = {"copy": (lambda: copy.copy_(rows), rows)}
    for recipe in RECIPES:
        name = type(recipe).__name__
        result[f"{name} rows"] = partial(recipe.quantize, rows, row_start), rows
        result[f"{name} columns"] = partial(recipe.quantize_columns, rows, row_start), rows
        result[f"{name} weight"] = partial(recipe.quantize_weight, weight), weight
        result[f"{name} weight^T"] = partial(recipe.quantize_weight_transposed, weight), weight
        if recipe.stochastic_gradients:
            stochastic = partial(recipe.quantize_columns, rows, row_start, seeds=seeds)
            result[f"{name} columns, stochastic"] = stochastic, rows
    return result


def check(name: str, found: Quantized, wanted: torch.Tensor) -> None:
    """Ends the program if the result is not about what was quantised."""
    error = float((found.dequantize() - wanted).norm() / wanted.float().norm())
    if not error < MAX_ERROR[found.block_format.element]:
        sys.exit(f"{name}: wrong by {error:.3f} of the whole")


def moved_bytes(result: Quantized | torch.Tensor, source: torch.Tensor) -> int:
    """Bytes that have to be read or written."""
    outputs = [result] if isinstance(result, torch.Tensor) else [result.data, result.scale]
    return sum(tensor.numel() * tensor.element_size() for tensor in (source, *outputs))


def measure(shape: str) -> dict[str, dict[str, float]]:
    """{variant: {us, gbs}} of one shape."""
    timed, times = variants(shape), {}
    num_bytes = {}
    for name, (step, source) in timed.items():
        result = step()
        num_bytes[name] = moved_bytes(result, source)
        if name != "copy":
            check(f"{shape}, {name}", result, source)
        del result
    for repetition in range(WARM_UP + REPS):
        for name, (step, _) in timed.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host's head start: its time does not show
            start.record()
            step()
            end.record()
            end.synchronize()
            if repetition >= WARM_UP:
                times.setdefault(name, []).append(start.elapsed_time(end) * 1e3)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {name: {"us": us, "gbs": num_bytes[name] / us / 1e3} for name, us in medians.items()}


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
            json.dump({"env": env, "quantize": figures}, file, indent=1)


if __name__ == "__main__":
    main()
