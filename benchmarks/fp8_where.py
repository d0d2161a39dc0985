"""For the development of FP8 kernels: one kernel on small exact problems, and where its result is wrong, on one GPU.

    python benchmarks/fp8_where.py gemm        # or gemm-triton, wgrad, wgrad-triton

"-triton": the kernel for every GPU. Prints how many elements are wrong,
in which tiles of 64 x 64, and in which rows and columns of 8: a wrong layout of operands shows there.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fp8_problem import Numbers, Problem, WgradProblem

from symmoe.kernels.hopper import launchers
from symmoe.kernels.low_precision import fp8

KERNELS = ("gemm", "gemm-triton", "wgrad", "wgrad-triton")
SPLITS = (300, 0, 1, 777, 128, 129, 0)
WIDTHS = ((512, 1024), (1040, 720))
TILE = 64
SHOWN_TILES = 6  # rows of them


def describe(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How many elements differ, and where."""
    wrong = ~((found == expected) | (found.isnan() & expected.isnan())).flatten(0, -2)
    text = f"wrong {int(wrong.sum())} of {wrong.numel()}, NaN {int(found.isnan().sum())}"
    if not wrong.any():
        return text
    rows, columns = wrong.nonzero().unbind(1)
    text += f", rows {int(rows.min())}..{int(rows.max())}, columns {int(columns.min())}..{int(columns.max())}"
    num_rows, num_columns = (size // TILE * TILE for size in wrong.shape)
    tiles = wrong[:num_rows, :num_columns].unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).sum((1, 3))
    text += f"\nof each tile: {tiles[:SHOWN_TILES].tolist()}"
    for dim, name in enumerate(("row", "column")):
        lines = wrong.sum(1 - dim)
        text += f"\nby {name} % 8: {lines[: len(lines) // 8 * 8].view(-1, 8).sum(0).tolist()}"
    return text


def gemm(kernel: str, widths: tuple[int, int], numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what it must be."""
    problem = Problem(SPLITS, widths, numbers)
    out = problem.blank(torch.float16)
    if kernel == "gemm-triton":
        fp8.grouped_gemm_fp8(*problem.operands, out, config=fp8.CONFIG)
    else:
        launchers.launch_fp8_gemm(*problem.operands, out)
    return out, problem.expected().to(out.dtype)


def wgrad(kernel: str, widths: tuple[int, int], numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise."""
    problem = WgradProblem(SPLITS, widths, numbers)
    out = torch.full(problem.shape, torch.nan, device="cuda")
    if kernel == "wgrad-triton":
        fp8.grouped_gemm_wgrad_fp8(*problem.operands, out, config=fp8.CONFIG)
    else:
        launchers.launch_fp8_wgrad(*problem.operands, out)
    return out, problem.expected().to(out.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    kernel = parser.parse_args().kernel
    numbers = Numbers(exact=True, device="cuda")
    for widths in WIDTHS:
        began = time.monotonic()
        found, expected = (gemm if kernel.startswith("gemm") else wgrad)(kernel, widths, numbers)
        torch.cuda.synchronize()
        print(f"{kernel} {widths}, {time.monotonic() - began:.1f} s: {describe(found, expected)}", flush=True)


if __name__ == "__main__":
    main()
