"""torch's NVSHMEM all-to-all (`torch.ops.symm_mem.all_to_all_vdev`): one row per slot, splits on the device.

The op has no barrier at its end. Here the alignment of the ranks before each call keeps calls apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.peers.common import Measured
from symmoe.tools.bench.problem import DTYPE, Problem, routing_of
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.stock import plan_exchange
from symmoe.tools.bench.timing import Variant, in_steps

NAME = "torch-nvshmem"


def find_problem(device: torch.device, num_ranks: int) -> str:
    """See peers/__init__.py."""
    if device.type != "cuda":
        return "torch's symmetric memory needs a GPU, this is a CPU"
    if num_ranks < 2:
        return f"all_to_all_vdev needs at least 2 ranks, this is {num_ranks}"
    import torch.distributed._symmetric_memory as symm_mem

    return "" if symm_mem.is_nvshmem_available() else "this torch has no NVSHMEM"


@dataclass(frozen=True)
class _Buffers:
    """Symmetric memory for all cases: torch frees it collectively, so it is made once."""

    here: torch.Tensor
    there: torch.Tensor
    in_splits: torch.Tensor
    out_splits_offsets: torch.Tensor


def open_peer(cases: list[Case], ranks: Ranks) -> _Buffers:
    """Buffers for the largest of all cases."""
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.set_backend("NVSHMEM")
    rows = [max(*routing_of(case, ranks.num_ranks).num_rows, case.num_slots) for case in cases]
    numel = max(count * case.shape.hidden for count, case in zip(rows, cases, strict=True))

    def symmetric(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = symm_mem.empty(shape, dtype=dtype, device=ranks.device)
        symm_mem.rendezvous(tensor, dist.distributed_c10d._get_default_group().group_name)
        return tensor

    return _Buffers(
        here=symmetric(numel, dtype=DTYPE),
        there=symmetric(numel, dtype=DTYPE),
        in_splits=symmetric(ranks.num_ranks, dtype=torch.int64),
        out_splits_offsets=symmetric(2, ranks.num_ranks, dtype=torch.int64),
    )


def make_variants(problem: Problem, ranks: Ranks, opened: _Buffers) -> list[Measured]:
    """Dispatch, and combine without its sum: the same rows back."""
    shape, num_slots = problem.case.shape, problem.case.num_slots
    exchange = plan_exchange(problem.topk_idx, shape.num_experts, problem.num_ranks)
    rows = problem.tokens.x.detach()[exchange.order // shape.top_k]
    sent, back = opened.here[: num_slots * shape.hidden], opened.there[: problem.num_rows * shape.hidden]
    splits = [torch.tensor(s, device=ranks.device) * shape.hidden for s in (exchange.sent, exchange.received)]
    group = dist.distributed_c10d._get_default_group().group_name

    def dispatch() -> None:
        torch.ops.symm_mem.all_to_all_vdev(sent, opened.there, opened.in_splits, opened.out_splits_offsets, group)

    def combine() -> None:
        torch.ops.symm_mem.all_to_all_vdev(back, opened.here, opened.in_splits, opened.out_splits_offsets, group)

    def dispatch_error() -> float:
        opened.in_splits.copy_(splits[0])
        opened.there.fill_(torch.nan)
        sent.view_as(rows).copy_(rows)
        ranks.barrier()
        dispatch()
        ranks.barrier()
        local = problem.local_rows
        got = back.view(-1, shape.hidden)[exchange.local_order]
        return float((got != local.packed[local.row_to_packed_row.long()]).sum())

    def combine_error() -> float:
        wrong = dispatch_error()
        opened.in_splits.copy_(splits[1])
        opened.here.fill_(torch.nan)
        ranks.barrier()
        combine()
        ranks.barrier()
        return wrong + float((sent.view_as(rows) != rows).sum())

    # Each verifies first, which leaves its own splits behind for the timing.
    leave, come = (
        (sum(counts) - counts[problem.rank]) * shape.hidden * DTYPE.itemsize
        for counts in (exchange.sent, exchange.received)
    )
    return [
        Measured("dispatch", Variant(NAME, ("forward",), in_steps(dispatch), dispatch_error), leave),
        Measured("combine", Variant(NAME, ("forward",), in_steps(combine), combine_error), come),
    ]
