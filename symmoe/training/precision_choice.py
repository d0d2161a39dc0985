"""Whether a layer's steps take less time in FP8 than in bf16: formulas (`choose_precision`, "float8-auto").

GEMMs of E4M3 numbers take two thirds of the time of those of bf16. In return everything that they read is quantised
first: rows, weights, activations and their gradients, for forward and dgrad along features and for wgrad along tokens.
That takes bytes instead of FLOPs, so it pays where experts are wide and get many rows. All times come from counts of
one kernel after the other and from what a GPU was measured to do.

T tokens and N = T K rows of a rank, P packed rows, H hidden, I ffn, e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.formats import TILE
from symmoe.moe import overlap
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import STASHES
from symmoe.precision.recipes import Float8Block

AUTO = "float8-auto"  # in commands: FLOAT8 where it is expected to be faster
FLOAT8 = Float8Block()
FULL_BYTES = 2  # of a bf16 number
E4M3_BYTES = 1 + 4 / TILE  # with its share of a scale
_GATED = 2  # columns of h for one of the activation


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRates:
    """What a GPU does per second, bf16 and Float8Block. The defaults are for an H200 as steps leave it: its power is
    limited, and GEMMs by themselves are faster.

    Attributes:
        flops: of grouped GEMMs of bf16, with the activation in them.
        quantized_flops, quantized_wgrad_flops: of E4M3, forward and dgrad, and wgrad.
        row_bytes, column_bytes, weight_bytes: that are read and written to quantise rows along features (also to put
            them on the wire, and to take them off it) and along tokens, and weights.
        act_bytes, dact_bytes: the same of the activation that is quantised, and of its gradient.
        fan_out_bytes: written by the copies of bf16 rows in the expert-major layout.
        memory_bytes: of a weight that is read, or of its gradient that is written, where there are few rows.
        launch_s: of one more kernel: its start, and what of the GPU idles around it.
        least_gain: share of a step's time that must be gained. On 2 H200s, bf16 / FP8 of steps of qwen3-30b,
            mixtral-8x7b and deepseek-like were 0.98, 1.28 and 1.16; these formulas expect 0.99, 1.25 and 1.18.
    """

    flops: float = 660e12
    quantized_flops: float = 0.98e15
    quantized_wgrad_flops: float = 0.83e15
    row_bytes: float = 3.2e12
    column_bytes: float = 2.5e12
    weight_bytes: float = 3.7e12
    act_bytes: float = 4.2e12
    dact_bytes: float = 2.9e12
    fan_out_bytes: float = 2.8e12
    memory_bytes: float = 3e12
    launch_s: float = 4e-6
    least_gain: float = 0.05


H200 = PrecisionRates()


def rates_of(device: torch.device) -> PrecisionRates | None:
    """Of the GPUs that were measured; None for all others and for CPUs."""
    if device.type != "cuda":
        return None
    return H200 if "NVIDIA H200" in torch.cuda.get_device_name(device) else None


class Kernel(NamedTuple):
    """One kernel of a step, or several alike, and how long it is expected to take."""

    direction: Literal["forward", "backward"]
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """A step in both precisions, without what is the same in both: plan, combine, router.

    Attributes:
        full, quantized: kernels in bf16 and in FP8.
        least_gain: as in PrecisionRates.
    """

    full: tuple[Kernel, ...]
    quantized: tuple[Kernel, ...]
    least_gain: float

    @property
    def full_s(self) -> float:
        """Of a step in bf16."""
        return _sum(self.full)

    @property
    def quantized_s(self) -> float:
        """Of a step in FP8."""
        return _sum(self.quantized)

    @property
    def pays(self) -> bool:
        """Whether FP8 gains enough."""
        return self.quantized_s <= (1 - self.least_gain) * self.full_s


def choose_precision(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_tokens: int,
    device: torch.device | str,
    num_micro_batches: int = 1,
) -> MoEConfig:
    """`config` as it is where its precision is expected to be faster on this GPU, else the one that computes in full.

    That one has `precision=None` and `quantized_wire="none"`. Float8Block on an H200 is all that is known to be faster
    anywhere: with other recipes, on other GPUs and on CPUs the layer computes in full. Local; does not synchronise the
    host. The choice follows from the arguments and the kind of GPU only, so it is the same on all ranks that bring
    the same; ranks that choose differently find out in their first call (ConfigMismatch).

    Args:
        config: of a layer, with the precision to choose or not.
        num_ranks: R of the expert-parallel group; 1 for a GroupedMLP by itself.
        num_tokens: T that a rank brings to a call on average; the same number on all ranks.
        device: where the layer computes.
        num_micro_batches: calls that quantise the weights once, in symmoe.constant_weights.

    Raises:
        ArgumentError: the configuration has no precision, or a number is out of range.
    """
    if config.precision is None:
        raise ArgumentError("precision (None) must be a recipe for choose_precision to take or to leave")
    rates = rates_of(torch.device(device))
    if rates is not None and isinstance(config.precision, Float8Block):
        numbers = {"num_ranks": num_ranks, "num_tokens": num_tokens, "num_micro_batches": num_micro_batches}
        if expect(config, **numbers, rates=rates).pays:
            return config
    return in_full(config)


def in_full(config: MoEConfig) -> MoEConfig:
    """The same layer, computing in the working dtype."""
    return replace(config, precision=None, quantized_wire="none")


def expect(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_tokens: int,
    num_micro_batches: int = 1,
    rates: PrecisionRates = H200,
) -> Expectation:
    """Both steps of a layer with SwiGLU, kernel by kernel, with experts chosen uniformly. Arguments as above.

    Raises:
        ArgumentError: a number is out of range.
    """
    numbers = {"num_ranks": num_ranks, "num_tokens": num_tokens, "num_micro_batches": num_micro_batches}
    for name, value in numbers.items():
        if value < 1:
            raise ArgumentError(f"{name} ({value}) must be at least 1")
    if config.num_experts % num_ranks:
        raise ArgumentError(f"num_experts ({config.num_experts}) must be divisible by num_ranks ({num_ranks})")
    kernels = _StepKernels(config, num_ranks, num_tokens, num_micro_batches, rates)
    return Expectation(tuple(kernels.full()), tuple(kernels.quantized()), rates.least_gain)


def _sum(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.seconds for kernel in kernels)


@dataclass(frozen=True, slots=True)
class _StepKernels:
    """The kernels of a step in either precision, in the order of grouped/experts.py and quantized_experts.py."""

    config: MoEConfig
    num_ranks: int
    num_tokens: int
    num_micro_batches: int
    rates: PrecisionRates

    def full(self) -> list[Kernel]:
        """In bf16: the activation is in the GEMMs."""
        rates, config = self.rates, in_full(self.config)
        slower, copies_s = 1.0, 0.0
        if config.received_layout == "packed":
            slower += overlap.H200.gathered_share
        else:
            copied = max(0.0, self._num_rows - self._num_packed_rows) * config.hidden * FULL_BYTES
            copies_s = self._moved_s(copied, rates.fan_out_bytes)
        fc1_s, fc2_s = (slower * self._gemm_s(width, rates.flops, FULL_BYTES) for width in self._widths)
        push_s = self._push_s(config, "forward")
        if config.schedule != "serial":  # with a GEMM: it costs that the SMs it takes, and to be cut into parts
            beside_s = self._sizes.wire_bytes / (overlap.H200.program_push_bytes * overlap.H200_SMS)
            push_s = min(push_s, beside_s + (self.num_ranks - 1) * overlap.H200.part_s)
        return [
            Kernel("forward", "push", push_s),
            Kernel("forward", "fan-out", copies_s),
            Kernel("forward", "FC1", fc1_s),
            Kernel("forward", "FC2", fc2_s),
            Kernel("backward", "push", (1 + self._num_pushed_again) * push_s),
            Kernel("backward", "fan-out", (1 + self._num_pushed_again) * copies_s),
            Kernel("backward", "FC1 again", self._num_again * fc1_s),
            Kernel("backward", "FC2 dgrad", fc2_s),
            Kernel("backward", "FC1 dgrad", fc1_s),
            Kernel("backward", "wgrad", fc1_s + fc2_s),
        ]

    def quantized(self) -> list[Kernel]:
        """In FP8."""
        rates, config = self.rates, self.config
        hidden, ffn, rows = config.hidden, config.ffn, self._num_rows
        fc1_s, fc2_s = (self._gemm_s(width, rates.quantized_flops, E4M3_BYTES) for width in self._widths)
        wgrad_s = sum(self._gemm_s(width, rates.quantized_wgrad_flops, FULL_BYTES) for width in self._widths)
        weights = sum(self._widths) * hidden * self._num_experts
        pair_s = self._moved_s(weights * (FULL_BYTES + 2 * E4M3_BYTES), rates.weight_bytes, num_kernels=2)
        single_s = self._moved_s(weights * (FULL_BYTES + E4M3_BYTES), rates.weight_bytes, num_kernels=2)
        # h is read, the activation written; and da, h are read, dh written twice and the activation once.
        act_s = self._moved_s(rows * ffn * (_GATED * FULL_BYTES + E4M3_BYTES), rates.act_bytes)
        dact_bytes = (1 + _GATED) * FULL_BYTES + (2 * _GATED + 1) * E4M3_BYTES
        dact_s = self._moved_s(rows * ffn * dact_bytes, rates.dact_bytes, num_kernels=2)
        sent_s, read_s, column_s = zip(*(self._rows_s(d) for d in ("forward", "backward")), strict=True)
        pushed_s = self._push_s(config, "forward")
        again = self._num_again
        return [
            Kernel("forward", "quantise tokens", sent_s[0]),
            Kernel("forward", "push", pushed_s),
            Kernel("forward", "rows", read_s[0]),
            Kernel("forward", "weights", (single_s if again else pair_s) / self.num_micro_batches),
            Kernel("forward", "FC1", fc1_s),
            Kernel("forward", "activation", act_s),
            Kernel("forward", "FC2", fc2_s),
            Kernel("backward", "quantise gradients", sent_s[1] + self._num_pushed_again * sent_s[0]),
            Kernel("backward", "push", self._push_s(config, "backward") + self._num_pushed_again * pushed_s),
            Kernel("backward", "rows", read_s[1] + again * read_s[0]),
            Kernel("backward", "weights again", again * pair_s / self.num_micro_batches),
            Kernel("backward", "FC1 again", again * (fc1_s + act_s)),
            Kernel("backward", "FC2 dgrad", fc2_s),
            Kernel("backward", "activation gradient", dact_s),
            Kernel("backward", "FC1 dgrad", fc1_s),
            Kernel("backward", "columns", sum(column_s)),
            Kernel("backward", "wgrad", wgrad_s),
        ]

    def _rows_s(self, direction: Literal["forward", "backward"]) -> tuple[float, float, float]:
        """To put rows on the wire, to make operands of forward or dgrad of them, and those of wgrad."""
        rates, hidden, rows = self.rates, self.config.hidden, self._num_rows
        if self.config.quantized_wire not in (direction, "both"):
            quantised = rows * hidden * (FULL_BYTES + E4M3_BYTES)
            return 0.0, self._moved_s(quantised, rates.row_bytes), self._moved_s(quantised, rates.column_bytes)
        encoded = self.num_tokens * hidden * (FULL_BYTES + E4M3_BYTES)
        unpacked = rows * hidden * 2 * E4M3_BYTES
        columns_s = self._moved_s(unpacked, rates.column_bytes)
        return self._moved_s(encoded, rates.row_bytes), self._moved_s(unpacked, rates.row_bytes), columns_s

    def _gemm_s(self, width: int, flops: float, weight_item_bytes: float) -> float:
        """A product of all rows with matrices [width, H]. The last tile of an expert is half full on average."""
        computed_rows = self._num_rows + self._num_experts * TILE / 2
        weight_s = self._num_experts * width * self.config.hidden * weight_item_bytes / self.rates.memory_bytes
        return max(2 * computed_rows * width * self.config.hidden / flops, weight_s)

    def _moved_s(self, num_bytes: float, rate: float, num_kernels: int = 1) -> float:
        return num_bytes / rate + num_kernels * self.rates.launch_s

    def _push_s(self, config: MoEConfig, direction: Literal["forward", "backward"]) -> float:
        row_bytes = config.hidden * FULL_BYTES
        sent_bytes = self._sizes.wire_bytes / row_bytes * config.sent_row_bytes(direction, FULL_BYTES)
        return sent_bytes / overlap.H200.link_bytes

    @property
    def _sizes(self) -> overlap.Sizes:
        config = self.config
        return overlap.Sizes(
            num_rows=self._num_rows,
            hidden=config.hidden,
            ffn=config.ffn,
            top_k=config.top_k,
            num_experts=config.num_experts,
            num_ranks=self.num_ranks,
            item_bytes=FULL_BYTES,
            pre_reduces=config.order == "rank",
        )

    @property
    def _widths(self) -> tuple[int, int]:
        """Of both layers' weights, beside H."""
        return _GATED * self.config.ffn, self.config.ffn

    @property
    def _num_rows(self) -> int:
        return self.num_tokens * self.config.top_k

    @property
    def _num_packed_rows(self) -> float:
        if self.num_ranks == 1:
            return self.num_tokens
        from_peers = self._sizes.wire_bytes / (self.config.hidden * FULL_BYTES)
        return from_peers * self.num_ranks / (self.num_ranks - 1)

    @property
    def _num_experts(self) -> int:
        return self.config.num_experts // self.num_ranks

    @property
    def _num_again(self) -> int:
        """How often backward computes h again."""
        return 0 if STASHES[self.config.stash].keeps_h else 1

    @property
    def _num_pushed_again(self) -> int:
        """How often backward dispatches the tokens again."""
        return 0 if STASHES[self.config.stash].keeps_rows else 1
