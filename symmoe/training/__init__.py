"""Training-loop support beyond the layer: gradients, data parallelism, captured steps, memory.

May import the layer. Start with `gradients`. `parallel` is not imported here: it imports FSDP, which takes 0.4 s.
"""

from symmoe.moe.balance import balance_after, balance_step
from symmoe.moe.ddp_and_fsdp import prepare_for_ddp
from symmoe.training.captured_step import CapturedStep, capture_step
from symmoe.training.first_step import check_first_step
from symmoe.training.gradients import broadcast_parameters, clip_grad_norm, reduce_gradients
from symmoe.training.memory_plan import MemoryPlan, plan_memory
from symmoe.training.precision_choice import choose_precision

__all__ = [
    "CapturedStep",
    "MemoryPlan",
    "balance_after",
    "balance_step",
    "broadcast_parameters",
    "capture_step",
    "check_first_step",
    "choose_precision",
    "clip_grad_norm",
    "plan_memory",
    "prepare_for_ddp",
    "reduce_gradients",
]
