"""torchtitan 0.3 on a torch before 2.12, from the moment this is imported, which is before torchtitan.

Names are missing there: `torch.distributed.set_timeout`, which older ones have as a private function, a class that only
other backends than "partial_dtensor" use, and a question of the compiler's. And FSDP2 gives all parameters of a unit
one mesh; so experts, whose mesh is another one, are units of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

IS_OLDER = not hasattr(torch.distributed.fsdp, "DataParallelMeshDims")

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
if IS_OLDER:
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    torch.compiler._is_non_strict_tracing = lambda: False

    from torchtitan.models.qwen3 import parallelize


def _apply_fsdp(torchtitans: Any, model: Any, dp_mesh: Any, *, edp_mesh: Any = None, **how: Any) -> None:
    if edp_mesh is not None:
        policy = MixedPrecisionPolicy(how["param_dtype"], how["reduce_dtype"], cast_forward_inputs=False)
        for block in model.layers.values():
            experts = block.moe.routed_experts.inner_experts
            fully_shard(experts, mesh=edp_mesh, mp_policy=policy, reshard_after_forward=False)
    torchtitans(model, dp_mesh, **how | {"ep_degree": 1})


if IS_OLDER:
    parallelize.apply_fsdp_to_decoder = partial(_apply_fsdp, parallelize.apply_fsdp_to_decoder)
