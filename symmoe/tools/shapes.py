"""Layer shapes of known models, and the arguments that name one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from symmoe.checks.arguments import CHOICES
from symmoe.errors import first_problem, raise_for
from symmoe.moe.config import MoEConfig

Options = dict[str, dict[str, Any]]  # keyword arguments of argparse's add_argument, by option


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer: H, I, E, K, and L of latent experts."""

    name: str
    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    latent: int | None = None


PRESETS = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape(
            "deepseek-like", 7168, 2048, 64, 8
        ),  # DeepSeek-V3 with a quarter of its experts, to fit in memory
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("glm-5", 6144, 2048, 256, 8),
        Shape("kimi-k2", 7168, 2048, 384, 8),
        Shape("deepseek-v4-pro", 7168, 3072, 384, 6),
        Shape("qwen3.5-397b", 4096, 1024, 512, 10),
        Shape("kimi-k3", 7168, 3072, 896, 16, latent=3584),
        Shape("nemotron-3-super", 4096, 2688, 512, 22, latent=1024),
    )
}
_SIZES = {
    "hidden": "H, width of the tokens; with the other three instead of a preset",
    "ffn": "I, width of one expert",
    "experts": "E, experts in all",
    "top_k": "K, experts per token",
}


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Adds the options of a table."""
    for name, kwargs in options.items():
        parser.add_argument(name, **kwargs)


def number(text: str, kind: Callable[[str], float] = int, above: int = 0) -> float:
    """The number in an option's text. ArgumentTypeError: the text is no number of this kind, not finite, or not greater
    than `above`."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not above < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text} must be {'an integer' if kind is int else 'finite and'} greater than {above}"
        )
    return value


def shape_options(*, default: str = "", noun: str = "one") -> Options:
    """Options for :func:`shape_of`."""
    names = ", ".join(PRESETS) + (f" ({default})" if default else "")
    return {
        "--preset": {"default": "", "help": f"{noun}: {names}"},
        **{_option(name): {"type": int, "help": text} for name, text in _SIZES.items()},
    }


def config_options(**defaults: str) -> Options:
    """Options for MoEConfig's fields with a choice of words."""
    return {
        _option(name): {
            "choices": CHOICES[name],
            "default": default,
            "help": "see MoEConfig (default %(default)s)",
        }
        for name, default in defaults.items()
    }


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def shape_of(args: argparse.Namespace, default: str = "") -> Shape:
    """The layer that the arguments name. Raises ArgumentError: a name is unknown, or sizes are missing."""
    sizes = {name: getattr(args, name) for name in _SIZES}
    explicit = [name for name, value in sizes.items() if value is not None]
    preset = args.preset or ("" if explicit else default)
    missing = ", ".join(_option(name) for name in sizes if name not in explicit)
    raise_for(
        first_problem(
            (
                args.preset and explicit,
                f"preset ({args.preset}) and sizes ({', '.join(explicit)}) exclude each other",
            ),
            (
                preset and preset not in PRESETS,
                f"preset ({preset}) must be one of {', '.join(PRESETS)}",
            ),
            (not preset and not explicit, "name a --preset, or sizes"),
            (not preset and missing, f"explicit sizes also need {missing}"),
        )
    )
    if preset:
        return PRESETS[preset]
    return Shape("x".join(map(str, sizes.values())), *sizes.values())


def config_of(shape: Shape, **options: Any) -> MoEConfig:
    """The configuration of a layer of that shape."""
    return MoEConfig(
        hidden=shape.hidden,
        ffn=shape.ffn,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        latent=shape.latent,
        **options,
    )
