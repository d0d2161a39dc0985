"""The processes that train together: one per CPU core or GPU, started by torchrun, or only this one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch.optim imports this module on first use. Its functions have the default group of that moment as default
# arguments, so imported after init_process_group it keeps the group alive past destroy_process_group, and gloo's
# threads then abort one process in ten at its exit ("terminate called without an active exception", torch 2.13).
import torch.distributed.nn.functional


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among its peers.

    Attributes:
        group: all ranks; None: this one is alone.
        ep_group: the ranks of `group` that share the experts.
        expert_group: this rank and those of other EP groups with the same experts; None: there are none.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    expert_group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, total: int) -> range:
        """This rank's contiguous part of `total` items, which must divide evenly."""
        if total % self.size:
            raise ValueError(
                f"the number of sequences ({total}) must be divisible by the number of ranks ({self.size})"
            )
        per_rank = total // self.size
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Mean of a tensor over the ranks. Collective."""
        if self.group is None:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.size

    def sum_of_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the EP groups of a value that all ranks of a group share. Collective."""
        if self.expert_group is None:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self.expert_group)
        return total

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


@contextlib.contextmanager
def open_ranks(device_type: str, ep: int | None = None) -> Iterator[Ranks]:
    """Joins the process group that torchrun describes in the environment, if any, and leaves it at the end.

    Args:
        ep: ranks of an EP group, neighbours and so on one node if it divides the ranks of a node; None: all.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ep = ep or size
    if ep < 1 or size % ep:
        raise ValueError(
            f"the number of ranks ({size}) must be divisible by the ranks of an EP group ({ep})"
        )
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # one core per process
    if "RANK" not in os.environ:
        yield Ranks(rank=0, size=1, device=device, group=None, ep_group=None, expert_group=None)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    try:
        world = dist.group.WORLD
        ep_group, expert_group = world, None
        if ep < size:
            ep_group, _ = dist.new_subgroups(ep)
            replicas = [list(range(first, size, ep)) for first in range(ep)]
            expert_group, _ = dist.new_subgroups_by_enumeration(replicas)
        yield Ranks(
            rank=rank,
            size=size,
            device=device,
            group=world,
            ep_group=ep_group,
            expert_group=expert_group,
        )
    finally:
        dist.destroy_process_group()


def make_deterministic() -> None:
    """Makes a GPU run repeat bit for bit: by default attention's backward adds in the order of arrival."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not `warn_only`: flash attention's backward takes its deterministic form only if it must.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward has no deterministic form
    # Would fill every new tensor, to expose reads of uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
