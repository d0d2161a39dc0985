"""From the number of rows of each group to where its rows are (Triton)."""

import triton.language as tl

from symmoe.kernels.launch.integers import next_power_of_2
from symmoe.kernels.launch.launch import fast_jit, kept_constants, launch


@fast_jit([])
def splits_to_row_range_kernel(
    splits, row_range, num_rows: tl.int32, NUM_GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr
):
    group = tl.arange(0, GROUP_LANES)
    size = tl.load(splits + group, mask=group < NUM_GROUPS, other=0).to(tl.int64)
    # Single splits are limited first, so that sums cannot overflow.
    size = tl.minimum(tl.maximum(size, 0), num_rows)
    total = tl.cumsum(size, axis=0)
    begin, end = tl.minimum(total - size, num_rows), tl.minimum(total, num_rows)
    tl.store(row_range + group, begin.to(tl.int32), mask=group < NUM_GROUPS)
    tl.store(row_range + NUM_GROUPS + group, end.to(tl.int32), mask=group < NUM_GROUPS)


def splits_to_row_range(splits, row_range, num_rows):
    num_groups = splits.shape[0]
    constants = kept_constants(NUM_GROUPS=num_groups, GROUP_LANES=next_power_of_2(num_groups), num_warps=4)
    launch(splits_to_row_range_kernel, (1,), constants, splits, row_range, num_rows)
