"""PyTorch twins: any device, simple loops, the definition of what the kernels compute."""

from symmoe.kernels.twin.plan import assign_packed_rows, assign_rows, count_slots, lay_out, send_counts
from symmoe.kernels.twin.sync import barrier
from symmoe.kernels.twin.tokens import (
    fan_out,
    gather_values,
    index_rows,
    pre_reduce,
    pull_rows,
    pull_values,
    push_rows,
    push_slots,
)

__all__ = [
    "assign_packed_rows",
    "assign_rows",
    "barrier",
    "count_slots",
    "fan_out",
    "gather_values",
    "index_rows",
    "lay_out",
    "pre_reduce",
    "pull_rows",
    "pull_values",
    "push_rows",
    "push_slots",
    "send_counts",
]
