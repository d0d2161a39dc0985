"""Formulas for which parts of a step run at the same time, and how they divide a GPU's SMs.

Overlap has a cost: the SMs that move rows, and for every part of the GEMMs one more launch and one more wave of tiles.
So a trip is overlapped only if that costs less than the trip takes by itself. All times follow from bytes, FLOPs and
measured rates of one program, a link and a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from symmoe.errors import logger
from symmoe.grouped.quantized_experts import takes_parts
from symmoe.kernels.gemm_parts import Division
from symmoe.precision.recipes import Float8Block, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of the hardware, per second. The defaults are for an H200 with NVLink; source:
    docs/decisions/0007-rows-under-gemms.md."""

    link_bytes: float = 340e9  # our push over NVLink to all peers together, one direction
    program_push_bytes: float = 28e9  # one program (it fills an SM) pushes during a GEMM
    program_copy_bytes: float = 38e9  # such a program writes to secondary rows
    program_sum_bytes: float = 41e9  # such a program sums
    program_rail_bytes: float = (
        14e9  # at least, one NCCL program over NVLink: 2 send 42e9, 16 230e9
    )
    memory_bytes: float = 3e12  # memory traffic of all SMs
    flops: float = 650e12  # of the grouped GEMMs on all SMs, forward and dgrad
    wgrad_flops: float = 650e12
    # Cost of one more GEMM launch and one more barrier: the last wave of tiles, and both starts. Also the cost of one
    # more part of a dispatch: that launch, a signal and a wait, a kernel that indexes the received rows, and the
    # branch; with a recipe one more kernel that makes operands of them.
    launch_s: float = 15e-6
    part_s: float = 25e-6
    least_gain: float = 0.02  # least share of time to gain: less is within the formulas' error
    gathered_share: float = 0.1  # of a step's GEMM time, added by gathering rows


H200 = Rates()
# Sums at home of 200 MB take 80 us on an H100, and 60 on an H200. Its links have not been measured.
H100 = Rates(memory_bytes=2.3e12)
GPUS = {"H200": H200, "H100": H100}
H200_SMS = 132


def rates_of(gpu: Rates, precision: Recipe | None) -> Rates:
    """The rates for the recipe's number format. Of the recipes only Float8Block has been measured."""
    if not isinstance(precision, Float8Block):
        return gpu
    return replace(gpu, flops=1.17e15, wgrad_flops=0.95e15, part_s=50e-6)


@functools.lru_cache
def gpu_of(device: torch.device) -> Rates:
    """The rates of a GPU. CPUs get the rates of an H200, so calls are cut alike everywhere; unknown GPUs do too, with a
    log message."""
    if device.type != "cuda":
        return H200
    name = torch.cuda.get_device_properties(device).name
    measured = [rates for gpu, rates in GPUS.items() if gpu in name]
    if not measured:
        logger.warning(
            "%s has not been measured: what overlaps is chosen as on an H200 (docs/tuning.md)", name
        )
    return measured[0] if measured else H200


def received_layout(layout: str, ffn: int, precision: Recipe | None) -> str:
    """The layout of received rows for `layout`: "auto" is the faster one for a step. Per element of a row, a gated step
    has 18 ffn FLOPs, and gathering adds a share of their time. Without gathering, a row of 16-bit numbers is copied
    once for each further expert in forward, and again in backward. Quantising gathers rows anyway."""
    if layout != "auto":
        return layout
    gathering_s = H200.gathered_share * 18 * ffn / H200.flops
    copies_s = 2 * 2 / H200.memory_bytes
    return "expert-major" if precision is None and gathering_s > copies_s else "packed"


def chance_of_part(
    num_experts: int, num_parts: int, top_k: int, num_groups: int = 1, top_groups: int = 1
) -> float:
    """Chance that a token has an expert in one of `num_parts` equal parts of the experts (ranks, nodes). All sets of
    `top_groups` groups are equally likely, and so are all sets of K experts of those groups. One of `num_parts` and
    `num_groups` divides the other."""
    part_size = num_experts // num_parts
    group_size = num_experts // num_groups
    num_touched_groups = max(1, part_size // group_size)
    num_shared_experts = min(part_size, group_size)  # of the part and one touched group
    num_candidates = top_groups * group_size
    num_choices_elsewhere = sum(
        math.comb(num_touched_groups, n)
        * math.comb(num_groups - num_touched_groups, top_groups - n)
        * math.comb(num_candidates - n * num_shared_experts, top_k)
        for n in range(min(num_touched_groups, top_groups) + 1)
    )
    num_choices = math.comb(num_groups, top_groups) * math.comb(num_candidates, top_k)
    return 1 - num_choices_elsewhere / max(1, num_choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Bytes that travel or are summed."""

    push_bytes: float = 0.0  # to peers
    sum_bytes: float = 0.0  # read from this GPU's memory for the pushed sums
    copy_bytes: float = 0.0  # copied to other rows after arrival

    def exclusive_s(self, rates: Rates) -> float:
        """Seconds with all SMs."""
        push_s = max(self.push_bytes / rates.link_bytes, self.sum_bytes / rates.memory_bytes)
        return push_s + self.copy_bytes / rates.memory_bytes

    def overlapped_s(self, num_programs: int, rates: Rates) -> float:
        """Seconds with that many programs during a GEMM."""
        push_s = self.push_bytes / min(num_programs * rates.program_push_bytes, rates.link_bytes)
        sum_s = self.sum_bytes / rates.program_sum_bytes / num_programs
        return max(push_s, sum_s) + self.copy_bytes / rates.program_copy_bytes / num_programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of one call on a rank, moved and multiplied, with experts chosen uniformly."""

    num_rows: int  # equal on all ranks (as `plan.expected_rows` is): they cut a call alike
    hidden: int
    ffn: int
    top_k: int
    num_experts: int
    num_ranks: int
    item_bytes: int  # of an element of a row
    num_nodes: int = 1
    rail_bytes_per_s: float = math.inf  # a rank's to other nodes, see Payload
    is_gated: bool = True
    sums_travel: bool = (
        True  # a peer's token's rows are summed before one row goes home (`order="rank"`)
    )
    is_expert_major: bool = False  # a received token is copied to all its rows
    sent_row_bytes: int | None = (
        None  # bytes of a row on its way to an expert; None: hidden * item_bytes
    )
    sent_gradient_row_bytes: int | None = None

    def push(self, row_bytes: int | None) -> Move:
        """A dispatch's move of rows with so many bytes; None: hidden * item_bytes."""
        share = self.sent_share(row_bytes)
        copy_bytes = self.peers_bytes - self.received_bytes if self.is_expert_major else 0.0
        return Move(push_bytes=share * self.wire_bytes, copy_bytes=share * copy_bytes)

    def sent_share(self, row_bytes: int | None) -> float:
        """The share of hidden * item_bytes that a row has on the wire; None: all."""
        return 1 if row_bytes is None else row_bytes / (self.hidden * self.item_bytes)

    @property
    def received_bytes(self) -> float:
        """Bytes of the rows that a rank receives in a dispatch, one per token of other ranks, if not quantised."""
        return self._sent_bytes(self.num_ranks)

    @property
    def wire_bytes(self) -> float:
        """The received bytes from peers of the node; a rank sends them as many."""
        return self.received_bytes * (self.num_ranks - self.num_nodes) / max(1, self.num_ranks - 1)

    @property
    def rail_bytes(self) -> float:
        """Bytes of the rows that a dispatch sends to other nodes, one per (token, node), if not quantised."""
        return self._sent_bytes(self.num_nodes)

    def _sent_bytes(self, num_parts: int) -> float:
        chance = chance_of_part(self.num_experts, num_parts, self.top_k)
        return self.row_bytes / self.top_k * (num_parts - 1) * chance

    @property
    def peers_bytes(self) -> float:
        """Bytes of the rows of peers' tokens."""
        return self.row_bytes * (1 - 1 / self.num_ranks)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows that the experts compute."""
        return self.num_rows * self.hidden * self.item_bytes

    @property
    def product_flops(self) -> int:
        """FLOPs of one product of all rows with a matrix [I, H] of their expert."""
        return 2 * self.num_rows * self.hidden * self.ffn

    @property
    def fc1_flops(self) -> int:
        """FLOPs of FC1: of forward, of dgrad or of wgrad."""
        return self.product_flops * (2 if self.is_gated else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Which trips of a layer's call are overlapped, and how they divide the SMs. None: serial."""

    dispatch: Division | None = None  # runs while FC1 computes the rows that have arrived
    gradient_dispatch: Division | None = None  # runs while FC2's dgrad computes them
    # A peer's rows go home while FC2 computes the next peer's, or this rank's own. Between nodes, other nodes' rows go
    # home while FC2 computes this node's.
    combine: Division | None = None
    gradient_combine: Division | None = None  # runs while dW1 is computed


SERIAL = Overlap()


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Times on a GPU, and the best of its divisions."""

    num_sms: int
    rates: Rates

    def gemm_s(self, flops: float, n: int = 0) -> float:
        """Seconds of GEMMs on the SMs that a move with n SMs leaves."""
        return flops / self.rates.flops * self.num_sms / (self.num_sms - n)

    def dw1_s(self, sizes: Sizes, n: int = 0) -> float:
        """Seconds of dW1, with n SMs for a move."""
        return self.gemm_s(sizes.fc1_flops * self.rates.flops / self.rates.wgrad_flops, n)

    def best(
        self, exclusive_s: float, overlapped_s: Callable[[int], float], rail_sms: int = 0
    ) -> Division | None:
        """The division with the least time besides the SMs of a rail; None if running in sequence is hardly slower."""
        n = min(range(1, self.num_sms // 2 + 1 - rail_sms // 2), key=overlapped_s)
        is_slow = overlapped_s(n) > (1 - self.rates.least_gain) * exclusive_s
        return None if is_slow else Division(n, self.num_sms - n - rail_sms)


@functools.lru_cache(maxsize=256)
def overlap(sizes: Sizes, num_sms: int, rates: Rates = H200) -> Overlap:
    """The overlap of a call of these sizes on a GPU of `num_sms` SMs that takes the least time by these formulas."""
    if num_sms < 2:
        return SERIAL
    gpu = _Gpu(num_sms, rates)
    return _on_one_node(sizes, gpu) if sizes.num_nodes == 1 else _between_nodes(sizes, gpu)


def _on_one_node(sizes: Sizes, gpu: _Gpu) -> Overlap:
    """n SMs move rows. Peers' last rows are complete after the whole move: so a dispatch in R parts ends with one part
    on all SMs, and FC2 with combine begins with one. With order "slot" rows travel when all are complete."""
    rates = gpu.rates
    # push_sums: sums of the rows of peers' tokens. sum_home: own rows, and the received sums.
    sent = Move(push_bytes=sizes.wire_bytes, sum_bytes=sizes.peers_bytes)
    home = Move(sum_bytes=sizes.row_bytes / sizes.num_ranks + sizes.wire_bytes)
    home_s = home.exclusive_s(rates)

    def in_parts(flops: int, move: Move, part_s: float, end_s: float = 0.0) -> Division | None:
        exclusive_flops = flops / sizes.num_ranks  # of the part that runs without a move

        def overlapped_s(n: int) -> float:
            shared_s = max(gpu.gemm_s(flops - exclusive_flops, n), move.overlapped_s(n, rates))
            exclusive_s = gpu.gemm_s(exclusive_flops)
            return shared_s + exclusive_s + end_s + (sizes.num_ranks - 1) * part_s

        return gpu.best(move.exclusive_s(rates) + gpu.gemm_s(flops) + end_s, overlapped_s)

    flops = sizes.product_flops
    overlapped = Overlap(
        dispatch=in_parts(sizes.fc1_flops, sizes.push(sizes.sent_row_bytes), rates.part_s),
        gradient_dispatch=in_parts(flops, sizes.push(sizes.sent_gradient_row_bytes), rates.part_s),
        combine=in_parts(flops, sent, rates.launch_s, home_s),
        gradient_combine=gpu.best(
            sent.exclusive_s(rates) + home_s + gpu.dw1_s(sizes),
            lambda n: max(
                gpu.dw1_s(sizes, n), sent.overlapped_s(n, rates) + home.overlapped_s(n, rates)
            ),
        ),
    )
    return (
        overlapped
        if sizes.sums_travel
        else replace(overlapped, combine=None, gradient_combine=None)
    )


def _between_nodes(sizes: Sizes, gpu: _Gpu) -> Overlap:
    """Rails have SMs of their own, at the measured rate. Other nodes are one part more, or two: last in a dispatch,
    first in FC2 and FC1's dgrad. dW1 then runs while rows are on the rails. A combine's reads inside the node take as
    long either way, and are left out."""
    rates = gpu.rates
    own_share = 1 / sizes.num_nodes
    rail_rate = min(sizes.rail_bytes_per_s, rates.link_bytes)
    rail_sms = min(gpu.num_sms // 2, math.ceil(rail_rate / rates.program_rail_bytes))
    num_ends = min(2, sizes.num_nodes - 1)
    home_s = sizes.rail_bytes / rail_rate
    num_parts = sizes.num_ranks // sizes.num_nodes - 1 + num_ends

    def dispatch(flops: int, row_bytes: int | None) -> Division | None:
        push = sizes.push(row_bytes)
        rail_s = sizes.sent_share(row_bytes) * home_s

        def overlapped_s(n: int) -> float:
            own_s = max(
                rail_s,
                own_share * push.overlapped_s(n, rates),
                gpu.gemm_s(own_share * flops, n + rail_sms),
            )
            foreign_s = (1 - own_share) * push.exclusive_s(rates) + gpu.gemm_s(
                (1 - own_share) * flops
            )
            return own_s + foreign_s + num_parts * rates.part_s

        return gpu.best(
            rail_s + push.exclusive_s(rates) + gpu.gemm_s(flops), overlapped_s, rail_sms
        )

    def combine(flops: float, wgrad_s: Callable[[int], float]) -> Division | None:
        def overlapped_s(n: int) -> float:
            overlapping_s = gpu.gemm_s(own_share * flops, n + rail_sms) + wgrad_s(n + rail_sms)
            return (
                gpu.gemm_s((1 - own_share) * flops)
                + max(home_s, overlapping_s)
                + num_ends * rates.launch_s
            )

        return gpu.best(home_s + gpu.gemm_s(flops) + wgrad_s(0), overlapped_s, rail_sms)

    return Overlap(
        dispatch=dispatch(sizes.fc1_flops, sizes.sent_row_bytes),
        gradient_dispatch=dispatch(sizes.product_flops, sizes.sent_gradient_row_bytes),
        combine=combine(sizes.product_flops, lambda _: 0.0),
        gradient_combine=combine(sizes.fc1_flops, functools.partial(gpu.dw1_s, sizes)),
    )


def overlap_everything(sizes: Sizes, num_sms: int) -> Overlap:
    """Overlaps every possible trip with a GEMM, even at a loss: for tests."""
    division = Division(4, num_sms - 4)
    combine = division if sizes.sums_travel or sizes.num_nodes > 1 else None
    return Overlap(
        dispatch=division, gradient_dispatch=division, combine=combine, gradient_combine=combine
    )


@functools.lru_cache(maxsize=256)
def overlap_of(
    schedule: str, sizes: Sizes, device: torch.device, precision: Recipe | None
) -> Overlap:
    """The overlap of a call of these sizes on a device, with any of MoEConfig's schedules except "serial"."""
    # CPUs have no SMs to divide; with an H200's number calls are cut alike everywhere.
    num_sms = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else H200_SMS
    )
    chosen = (
        overlap_everything(sizes, num_sms)
        if schedule == "always-overlapped"
        else overlap(sizes, num_sms, rates_of(gpu_of(device), precision))
    )
    # GEMMs that take no parts begin after all rows have arrived.
    return (
        chosen if takes_parts(precision) else replace(chosen, dispatch=None, gradient_dispatch=None)
    )
