"""How the SMs of a GPU are divided between kernels that move rows and GEMMs that run beside them: a formula.

A kernel that moves rows gets as few programs, each of which fills an SM, as finish by the time that the GEMMs beside it
do; the GEMMs get the other SMs. Both times come from bytes and FLOPs and from what one program, a link and a GPU were
measured to do, or, where nothing was measured yet, are taken to do.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from symmoe.kernels.parts import PANEL_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the hardware does, per second. The defaults are for an H200 with NVLink.

    The link, a push, and the GEMMs follow what was measured there with plain copies and with our kernels. A pull, the
    memory and a launch are estimates, to be replaced by measurements of our kernels beside GEMMs.

    Attributes:
        link_bytes: over NVLink to all peers together, one direction.
        program_push_bytes, program_pull_bytes: by one program that stores rows to peers, or loads them from peers,
            which has to wait for every answer.
        program_memory_bytes: by one program that moves rows within the GPU's memory.
        memory_bytes: by many.
        flops: of the grouped GEMMs on all SMs.
        launch_s: what one more launch of a GEMM and one more barrier cost: the last wave of tiles, and both starts.
    """

    link_bytes: float = 350e9
    program_push_bytes: float = 44e9
    program_pull_bytes: float = 22e9
    program_memory_bytes: float = 45e9
    memory_bytes: float = 3e12
    flops: float = 650e12
    launch_s: float = 15e-6


H200 = Rates()
H200_SMS = 132
MAX_PANELS = 8


@functools.lru_cache
def num_sms_of(device: torch.device) -> int:
    """SMs of a GPU. On CPUs, where nothing is divided, those of an H200: calls are cut alike everywhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


@dataclass(frozen=True, slots=True)
class Division:
    """Programs of the kernels that move rows, and SMs of the GEMMs beside them; None: no limit."""

    num_ctas: int | None = None
    num_sms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Bytes that are pushed to peers, pulled from peers, and moved within the memory, one after the other."""

    push_bytes: float = 0.0
    pull_bytes: float = 0.0
    memory_bytes: float = 0.0


def divide(num_sms: int, move: Move, flops: float, rates: Rates = H200) -> Division:
    """The division for a move beside GEMMs of so many FLOPs.

    With n programs the move takes memory_bytes / (n * program_memory_bytes) + pull_bytes / min(n * program_pull_bytes,
    link_bytes) + the same of push_bytes, and the GEMMs flops / (flops per second * (num_sms - n) / num_sms). n is the
    least number for which the longer of the two is shortest.
    """

    def move_s(n: int) -> float:
        push = min(n * rates.program_push_bytes, rates.link_bytes)
        pull = min(n * rates.program_pull_bytes, rates.link_bytes)
        memory = n * rates.program_memory_bytes
        return move.push_bytes / push + move.pull_bytes / pull + move.memory_bytes / memory

    def gemm_s(n: int) -> float:
        return flops / (rates.flops * (num_sms - n) / num_sms)

    if num_sms < 2:
        return Division()
    n = min(range(1, num_sms // 2 + 1), key=lambda n: max(move_s(n), gemm_s(n)))
    return Division(n, num_sms - n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What one call of a layer moves and multiplies on a rank, with experts chosen uniformly.

    Attributes:
        num_rows: N. As long as all ranks give the same, which `plan.row_capacity` is, they cut a call alike.
        hidden, ffn: H, I.
        top_k, num_experts, num_ranks: K, E, R.
        item_bytes: of an element of a row.
        is_gated: FC1 has gates and ups.
        pre_reduces: a token's rows on a rank are summed there before one of them goes home (`order="rank"`).
    """

    num_rows: int
    hidden: int
    ffn: int
    top_k: int
    num_experts: int
    num_ranks: int
    item_bytes: int
    is_gated: bool = True
    pre_reduces: bool = True

    @property
    def combine(self) -> Move:
        """What combine moves."""
        if self.pre_reduces:
            return Move(pull_bytes=self.wire_bytes, memory_bytes=self.row_bytes)
        return Move(pull_bytes=self.row_bytes * (self.num_ranks - 1) / self.num_ranks)

    @property
    def wire_bytes(self) -> float:
        """Of rows that go to peers in a dispatch, one per (token, rank)."""
        experts, top_k = self.num_experts, self.top_k
        stays_away = math.comb(experts - experts // self.num_ranks, top_k) / max(1, math.comb(experts, top_k))
        return self.row_bytes / top_k * (self.num_ranks - 1) * (1 - stays_away)

    @property
    def row_bytes(self) -> int:
        """Of all rows that the experts compute."""
        return self.num_rows * self.hidden * self.item_bytes

    @property
    def product_flops(self) -> int:
        """Of one product of all rows with a matrix [I, H] of their expert."""
        return 2 * self.num_rows * self.hidden * self.ffn

    @property
    def fc1_flops(self) -> int:
        """Of FC1, forward, dgrad or wgrad."""
        return self.product_flops * (2 if self.is_gated else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The divisions of one layer's call, and how forward cuts FC2.

    Attributes:
        dispatch: while FC1 computes the rows that have arrived.
        gradient_dispatch: while FC2's dgrad does.
        combine: while FC2 computes the next panel.
        gradient_combine: while both weight gradients are computed.
        num_panels: panels of columns of FC2's output; the same on all ranks, since each has a barrier.
    """

    dispatch: Division
    gradient_dispatch: Division
    combine: Division
    gradient_combine: Division
    num_panels: int


@functools.lru_cache(maxsize=256)
def overlap(sizes: Sizes, num_sms: int, rates: Rates = H200) -> Overlap:
    """How to overlap a call of these sizes on a GPU of `num_sms` SMs.

    FC2 gets about sqrt(t / launch_s) panels, t being how long a combine takes by itself: with p of them about t / p
    stays exposed, and p * launch_s is added. 1, 2, 4 or 8: kernels are compiled anew for every panel's columns. The
    rows of the own rank, 1 / R of all, are what a dispatch has to hide behind.
    """
    combine = sizes.combine
    combine_s = combine.pull_bytes / rates.link_bytes + combine.memory_bytes / rates.memory_bytes
    num_panels = 1
    while 2 * num_panels <= MAX_PANELS and (1.5 * num_panels) ** 2 * rates.launch_s <= combine_s:
        num_panels *= 2
    num_panels = max(1, min(num_panels, sizes.hidden // PANEL_COLUMNS))
    own, earlier = 1 / sizes.num_ranks, (num_panels - 1) / num_panels
    push = Move(push_bytes=sizes.wire_bytes)
    panels = Move(pull_bytes=earlier * combine.pull_bytes, memory_bytes=earlier * combine.memory_bytes)
    return Overlap(
        dispatch=divide(num_sms, push, own * sizes.fc1_flops, rates),
        gradient_dispatch=divide(num_sms, push, own * sizes.product_flops, rates),
        combine=divide(num_sms, panels, earlier * sizes.product_flops, rates),
        gradient_combine=divide(num_sms, combine, sizes.product_flops + sizes.fc1_flops, rates),
        num_panels=num_panels,
    )


def panels(width: int, number: int) -> list[tuple[int, int]]:
    """About `number` panels (first column, the one past the last) of a matrix, in order; none of them cuts a tile."""
    num_tiles = -(-width // PANEL_COLUMNS)
    number = max(1, min(number, num_tiles))
    bounds = [min(width, num_tiles * i // number * PANEL_COLUMNS) for i in range(number + 1)]
    return list(itertools.pairwise(bounds))
