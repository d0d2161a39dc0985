"""Ranks that share a GPU, where a machine has fewer GPUs than a test has ranks and SYMMOE_TESTS_SHARE_GPUS=1.

The GPU gives each process slices of its time, so everything but speed and clocks can be tested. NVSHMEM allows it
without MPS (puts, addresses of peers); NCCL takes ranks for those of different machines.
"""

import os
from typing import Any

import torch

NAME = "SYMMOE_TESTS_SHARE_GPUS"


def are_too_few(num_ranks: int) -> bool:
    """Whether this machine has too few GPUs for a test of so many ranks."""
    return torch.cuda.device_count() < num_ranks and os.environ.get(NAME) != "1"


class _OwnGpu:
    """Properties of a GPU with another identity."""

    def __init__(self, properties: Any, uuid: str) -> None:
        self._properties = properties
        self.uuid = uuid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def take_gpu(rank: int, num_ranks: int) -> None:
    """Makes a GPU the current one. If ranks share GPUs, this rank's has an identity of its own in this process: symmoe
    and NCCL refuse ranks on the same GPU."""
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    if num_gpus < num_ranks:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        properties_of = torch.cuda.get_device_properties
        torch.cuda.get_device_properties = lambda device=None: _OwnGpu(
            properties_of(device), f"GPU of rank {rank}"
        )
