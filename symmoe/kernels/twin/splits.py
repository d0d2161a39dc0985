"""Twin of splits_to_row_start."""

import torch


def splits_to_row_start(splits: torch.Tensor, row_start: torch.Tensor, num_rows: int) -> None:
    row_start[0] = 0
    # Single splits are limited first, so that sums cannot overflow.
    ends = splits.long().clamp(0, num_rows).cumsum(0)
    row_start[1:] = ends.clamp(max=num_rows)
