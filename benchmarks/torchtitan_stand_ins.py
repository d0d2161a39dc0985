"""torchtitan 0.3 on CPUs, and on a torch before 2.12, from the moment this is imported, which is before torchtitan.

torch lacks `torch.distributed.set_timeout`, which older ones have as a private function; before 2.12 also a class that
only other backends than "partial_dtensor" use, and a question of the compiler's. There FSDP2 gives all parameters of a
unit one mesh; so experts, whose mesh is another one, are units of their own.

torchtitan knows accelerators only. Without one, a device of type "cpu" and a module for it, which has no memory to
report, are in the place of torch.cuda, and FSDP2 is told to use plain sums: gloo does not scale in a sum.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

IS_OLDER = not hasattr(dist.fsdp, "DataParallelMeshDims")

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
if IS_OLDER:
    dist.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    torch.compiler._is_non_strict_tracing = lambda: False
if not torch.cuda.is_available():  # before torchtitan's other modules take these by name
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


def parallelize(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
    """torchtitan's function for a Qwen3."""
    from torchtitan.models.qwen3 import parallelize as qwen3

    apply_fsdp = qwen3.apply_fsdp_to_decoder
    with patch.object(
        qwen3, "apply_fsdp_to_decoder", partial(_apply_fsdp, apply_fsdp) if IS_OLDER else apply_fsdp
    ):
        model = qwen3.parallelize_qwen3(model, **kwargs)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not torch.cuda.is_available():
            module.set_force_sum_reduction_for_comms(True)
    return model


def _apply_fsdp(
    torchtitans: Any, model: Any, dp_mesh: Any, *, edp_mesh: Any = None, **kwargs: Any
) -> None:
    if edp_mesh is not None:
        policy = MixedPrecisionPolicy(
            kwargs["param_dtype"], kwargs["reduce_dtype"], cast_forward_inputs=False
        )
        for block in model.layers.values():
            experts = block.moe.routed_experts.inner_experts
            fully_shard(experts, mesh=edp_mesh, mp_policy=policy, reshard_after_forward=False)
    torchtitans(model, dp_mesh, **kwargs | {"ep_degree": 1})
