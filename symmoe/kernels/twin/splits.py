"""Twin of splits_to_row_range."""


def splits_to_row_range(splits, row_range, num_rows):
    sizes = splits.long().clamp(0, num_rows)
    ends = sizes.cumsum(0)
    row_range[0] = (ends - sizes).clamp(max=num_rows)
    row_range[1] = ends.clamp(max=num_rows)
