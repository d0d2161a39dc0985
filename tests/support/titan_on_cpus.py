"""torchtitan on CPUs, from the moment this is imported, which is before other modules of torchtitan take these by name.
torchtitan knows accelerators only, so a device of type "cpu" and a module for it, which has no memory to report, are in
the place of torch.cuda. And its Trainer calls `torch.distributed.set_timeout`, which torch 2.13 does not have: the
older, private function is there under that name."""

from types import SimpleNamespace

import torch.distributed as dist
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda device: None,
    synchronize=lambda: None,
)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
