"""From the number of rows of each group to where its rows start: the definition, in PyTorch."""

import torch


def splits_to_row_start(splits: torch.Tensor, row_start: torch.Tensor, num_rows: int) -> None:
    """row_start[g] = rows of the groups before g: int32[G+1] from splits int32 or int64 [G].

    Negative splits count as 0 and the sums end at num_rows, so no splits can lead a kernel out of its tensors.
    """
    row_start[0] = 0
    # A single split is limited first: sums of what is left cannot overflow.
    ends = splits.long().clamp(0, num_rows).cumsum(0)
    row_start[1:] = ends.clamp(max=num_rows)
