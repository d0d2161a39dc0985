"""What is measured: layer shapes of known models, numbers of tokens, and how skewed the routing is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig

HOT_EXPERT = 0
_ZIPF_SEED = 20261121


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer: H, I, E, K."""

    name: str
    hidden: int
    ffn: int
    num_experts: int
    top_k: int


PRESETS = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-like", 7168, 2048, 64, 8),  # DeepSeek-V3 with a quarter of its experts, so that it fits
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("olmoe", 2048, 1024, 64, 8),
    )
}


_SIZES = {"hidden": "H, width of the tokens", "ffn": "I, width of one expert", "experts": "E, experts in all"}
_SIZES |= {"top_k": "K, experts per token"}


def add_shape_arguments(parser: argparse.ArgumentParser, *, several: bool = False, default: str = "") -> None:
    """Adds what :func:`shapes_of`, or unless `several` :func:`shape_of`, reads."""
    what = "comma-separated names, or all" if several else "one"
    known = ", ".join(PRESETS) + (f" ({default})" if default else "")
    parser.add_argument("--preset", default="", help=f"{what}: {known}")
    for name, text in _SIZES.items():
        more = "; with the other three instead of a preset" if name == "hidden" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text + more)


def add_config_arguments(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Adds fields of MoEConfig that are one of several words."""
    for name, default in defaults.items():
        option, text = f"--{name.replace('_', '-')}", "see MoEConfig (default %(default)s)"
        parser.add_argument(option, choices=CHOICES[name], default=default, help=text)


def shapes_of(args: argparse.Namespace, default: str = "") -> list[Shape]:
    """The layers that the arguments name. Raises ArgumentError for what is unknown or incomplete."""
    sizes = {name: getattr(args, name) for name in _SIZES}
    given = [name for name, value in sizes.items() if value is not None]
    if args.preset and given:
        raise ArgumentError(f"preset ({args.preset}) and sizes ({', '.join(given)}) exclude each other")
    if args.preset or (default and not given):
        return [PRESETS[name] for name in names_of("preset", args.preset or default, PRESETS)]
    if missing := [f"--{name.replace('_', '-')}" for name in sizes if name not in given]:
        raise ArgumentError(f"explicit sizes also need {', '.join(missing)}" if given else "name a --preset, or sizes")
    return [Shape("x".join(map(str, sizes.values())), *sizes.values())]


def shape_of(args: argparse.Namespace, default: str = "") -> Shape:
    """The one layer that the arguments name."""
    shapes = shapes_of(args, default)
    if len(shapes) != 1:
        raise ArgumentError(f"preset ({args.preset}) must be one")
    return shapes[0]


def names_of(what: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """The known names in a comma-separated list; "all" is all of them. Raises ArgumentError for others."""
    names = tuple(known) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ArgumentError(f"{what} ({name}) must be of {', '.join(known)}, or all")
    return tuple(dict.fromkeys(names))


def config_of(shape: Shape, **options: Any) -> MoEConfig:
    """The configuration of a layer of that shape."""
    return MoEConfig(hidden=shape.hidden, ffn=shape.ffn, num_experts=shape.num_experts, top_k=shape.top_k, **options)


@dataclass(frozen=True, slots=True)
class Case:
    """A shape, T tokens on every rank, and a routing."""

    shape: Shape
    num_tokens: int
    skew: str

    @property
    def num_slots(self) -> int:
        """T * K, which is also the mean number of rows of a rank."""
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
        place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(_ZIPF_SEED))
        log_popularity = -torch.log1p(place.float())
    elif case.skew == "hot":
        log_popularity[HOT_EXPERT] = math.inf
    uniform = torch.rand(case.num_tokens, num_experts, generator=generator).clamp_(1e-30, 1 - 2**-24)
    keys = log_popularity - torch.log(-torch.log(uniform))
    return keys.topk(case.shape.top_k, dim=1).indices
