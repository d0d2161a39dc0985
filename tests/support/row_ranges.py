"""Ranges of rows for tests: whole groups, and groups cut into parts at random rows."""

import itertools

import torch


def whole_groups(splits, device="cpu"):
    """The row_range int32[2, G] of groups of these sizes."""
    ends = list(itertools.accumulate(splits, initial=0))
    return torch.tensor([ends[:-1], ends[1:]], dtype=torch.int32, device=device)


def spans_of(row_range):
    """The rows of each group."""
    return [slice(begin, end) for begin, end in row_range.t().tolist()]


def random_ranges(splits, num_parts, *, step=1, seed=0):
    """num_parts tensors int32[2, G] that have every row once; some ranges without rows end before they begin. step:
    every part but a group's first begins that many rows, or a multiple, behind the group's start, or at its end."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(splits)
    starts = whole_groups(splits)[0]
    inner = (
        torch.rand(num_parts - 1, len(splits), generator=generator) * (sizes // step + 2)
    ).long() * step
    inner = inner.minimum(sizes).sort(dim=0).values
    cuts = torch.cat([starts[None], starts + inner, (starts + sizes)[None]])
    result = []
    for begin, end in itertools.pairwise(cuts):
        behind = torch.randint(0, 300, begin.shape, generator=generator)
        result.append(torch.stack([begin, torch.where(begin == end, end - behind, end)]).int())
    return result


def rows_of(ranges, num_rows):
    """Mask [num_rows] of the rows that ranges have."""
    row = torch.arange(num_rows, device=ranges.device)[:, None]
    return ((ranges[0] <= row) & (row < ranges[1])).any(dim=1)
