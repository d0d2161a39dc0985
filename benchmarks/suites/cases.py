"""The cases of the suites: layer shapes, numbers of tokens, and the skew of the routing."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from symmoe.errors import ArgumentError
from symmoe.tools.shapes import PRESETS, Options, Shape, add_options, shape_of

HOT_EXPERT = 0
_ZIPF_SEED = 20261121


def shapes_of(args: argparse.Namespace, default: str = "") -> list[Shape]:
    """The layer shapes of the arguments: of --preset several, separated by commas, or all. Latent experts are measured
    without projections: tokens have the latent width. Raises ArgumentError for unknown or incomplete shapes."""
    presets = names_of("preset", args.preset, PRESETS) if args.preset else ("",)
    shapes = [
        shape_of(argparse.Namespace(**vars(args) | {"preset": preset}), default)
        for preset in presets
    ]
    return [replace(shape, hidden=shape.latent or shape.hidden, latent=None) for shape in shapes]


def names_of(option: str, text: str, valid: Collection[str]) -> tuple[str, ...]:
    """The valid names in a comma-separated list; "all" means all of them. Raises ArgumentError for other names."""
    names = tuple(valid) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in valid:
            raise ArgumentError(f"{option} ({name}) must be of {', '.join(valid)}, or all")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Case:
    """A shape, T tokens on every rank, and a routing."""

    shape: Shape
    num_tokens: int
    skew: str

    @property
    def num_slots(self) -> int:
        """T * K, also the mean number of rows of a rank."""
        return self.num_tokens * self.shape.top_k

    @property
    def forward_flops(self) -> int:
        """6 T H I K, FLOPs of the mean rank; a backward pass has twice as many."""
        return 6 * self.num_slots * self.shape.hidden * self.shape.ffn

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.num_tokens} tokens, {self.skew}"


SKEWS = ("uniform", "zipf", "hot")


def choose_experts(case: Case, generator: torch.Generator) -> torch.Tensor:
    """int64 [T, K] on the CPU: each token's K distinct experts, by the skew as docs/benchmarking.md has it.

    Keys log(popularity) + Gumbel noise, sorted, are draws without replacement (Efraimidis and Spirakis, 2006).
    """
    num_experts = case.shape.num_experts
    log_popularity = torch.zeros(num_experts)
    if case.skew == "zipf":
        # The order of popularity is a fixed permutation, so that not all popular experts live on rank 0.
        positions = torch.randperm(num_experts, generator=torch.Generator().manual_seed(_ZIPF_SEED))
        log_popularity = -torch.log1p(positions.float())
    elif case.skew == "hot":
        log_popularity[HOT_EXPERT] = math.inf
    uniform = torch.rand(case.num_tokens, num_experts, generator=generator).clamp_(
        1e-30, 1 - 2**-24
    )
    keys = log_popularity - torch.log(-torch.log(uniform))
    return keys.topk(case.shape.top_k, dim=1).indices


def parser_of(description: str | None, options: Options) -> argparse.ArgumentParser:
    """A parser that prints the program's description unchanged."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, options)
    return parser


def run_program(
    description: str | None,
    options: Options,
    run: Callable[[argparse.Namespace], None],
    arguments: list[str] | None = None,
) -> None:
    """Parses the arguments (None: those of the process) and runs the program; an ArgumentError is a usage error."""
    parser = parser_of(description, options)
    try:
        run(parser.parse_args(arguments))
    except ArgumentError as error:
        parser.error(str(error))
