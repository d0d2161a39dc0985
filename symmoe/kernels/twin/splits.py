"""Twin of splits_to_row_range."""

import torch


def splits_to_row_range(splits: torch.Tensor, row_range: torch.Tensor, num_rows: int) -> None:
    # Single splits are limited first, so that sums cannot overflow.
    sizes = splits.long().clamp(0, num_rows)
    ends = sizes.cumsum(0)
    row_range[0] = (ends - sizes).clamp(max=num_rows)
    row_range[1] = ends.clamp(max=num_rows)
