"""Chooses FP8 for a layer if measured steps were faster in FP8 than in bf16 (`choose_precision`, "float8-auto"). See
"FP8" in docs/tuning.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from symmoe.checks.arguments import check_kind, size_problem
from symmoe.errors import ArgumentError, raise_for
from symmoe.moe.config import MoEConfig
from symmoe.precision.recipes import Float8Block

AUTO = "float8-auto"  # in commands: FLOAT8 if measured faster
FLOAT8 = Float8Block()
LEAST_SPEED_UP = 1.05  # less is within the noise between runs
MEASURED_GPU = "NVIDIA H200"


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Median milliseconds of a step, forward and backward, of one layer, with `stash="all"` and uniform routing."""

    name: str  # of the model
    hidden: int
    ffn: int
    rows_per_expert: int  # mean of a call
    full_ms: float  # in bf16
    quantized_ms: float  # in FP8, with rows that travel in bf16
    wire_ms: float  # in FP8, with rows that travel in FP8 too (`quantized_wire="both"`)
    constant_weights_ms: float  # wire_ms without quantising the weights

    def speed_up(self, quantized_wire: str, num_micro_batches: int) -> float:
        """Time in bf16 by time in FP8. Tokens or gradients that travel in FP8 without the other do not count."""
        quantized_ms = self.wire_ms if quantized_wire == "both" else self.quantized_ms
        weights_ms = self.wire_ms - self.constant_weights_ms
        return self.full_ms / (quantized_ms - weights_ms * (1 - 1 / num_micro_batches))


# On 2 H200s with 8,192 tokens each: benchmarks/results/precision-h200-ep2.json.
MEASURED = (
    MeasuredLayer("mixtral-8x7b", 4096, 14336, 4096, 26.82, 21.05, 21.02, 20.24),
    MeasuredLayer("deepseek-like", 7168, 2048, 2048, 28.19, 25.07, 24.21, 22.88),
    MeasuredLayer("qwen3-30b", 2048, 768, 1024, 3.606, 3.714, 3.679, 3.344),
)


def choose_precision(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_tokens: int,
    device: torch.device | str,
    num_micro_batches: int = 1,
) -> MoEConfig:
    """`config` itself if its precision was faster on this GPU, else a copy that computes in the working dtype: with
    `precision=None` and `quantized_wire="none"`. The rule is in docs/tuning.md. Local; does not synchronise
    the host. The choice depends only on the arguments and the kind of GPU, so ranks with the same ones agree; ranks
    that choose differently raise ConfigMismatch in their first call.

    Args:
        config: the configuration of a layer, with the candidate precision.
        num_ranks: R of the expert-parallel group; 1 for a GroupedMLP without one.
        num_tokens: mean T of a rank per call; the same number on all ranks.
        device: where the layer computes.
        num_micro_batches: calls that share quantised weights, in symmoe.grouped.cache_quantized_weights.

    Raises:
        ArgumentError: the configuration has no precision, or a number is out of range.
    """
    check_kind("config", config, MoEConfig)
    if config.precision is None:
        raise ArgumentError(
            "precision (None) must be a recipe for choose_precision to take or to leave"
        )
    speed_up = 0.0
    if _was_measured(torch.device(device)) and isinstance(config.precision, Float8Block):
        _, speed_up = best_measured(
            config,
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
        )
    return config if speed_up >= LEAST_SPEED_UP else in_full(config)


def in_full(config: MoEConfig) -> MoEConfig:
    """The layer's configuration in the working dtype."""
    return replace(config, precision=None, quantized_wire="none")


def best_measured(
    config: MoEConfig, *, num_ranks: int, num_tokens: int, num_micro_batches: int = 1
) -> tuple[MeasuredLayer | None, float]:
    """The layer with the largest FP8 speed-up among the measured layers that exceed this one in no dimension, and
    the speed-up; (None, 0) if there is none. Arguments as in :func:`choose_precision`; ArgumentError: one is out of
    range."""
    raise_for(
        size_problem(
            num_ranks=num_ranks, num_tokens=num_tokens, num_micro_batches=num_micro_batches
        )
    )
    config.experts_per_rank(num_ranks)
    speed_ups = [
        (layer, layer.speed_up(config.quantized_wire, num_micro_batches))
        for layer in MEASURED
        if layer.hidden <= config.expert_hidden
        and layer.ffn <= config.ffn
        and layer.rows_per_expert * config.num_experts <= num_ranks * num_tokens * config.top_k
    ]
    return max(speed_ups, key=lambda pair: pair[1], default=(None, 0.0))


def _was_measured(device: torch.device) -> bool:
    return device.type == "cuda" and MEASURED_GPU in torch.cuda.get_device_name(device)
