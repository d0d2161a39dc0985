"""Aligns the clocks of ranks, by barriers.

Nobody leaves a barrier before everybody has entered it. So a rank's clock is ahead of rank 0's by no less than its own
entry minus rank 0's exit, and by no more than its own exit minus rank 0's entry. The middle of what all barriers allow
is taken; half of that range is the error.
"""

from __future__ import annotations

from collections.abc import Sequence

from symmoe.timeline.events import Span


def align(barriers: Sequence[Sequence[Span]]) -> tuple[list[float], list[float]]:
    """(how far each rank's clock is ahead of rank 0's, the largest error of that), in the unit of the barriers.

    Args:
        barriers: per rank: (entered, left) of the same barriers in the same order, at least one.
    """
    offsets, errors = [0.0], [0.0]
    for mine in barriers[1:]:
        pairs = list(zip(mine, barriers[0], strict=True))
        least = max(entered - left_0 for (entered, _), (_, left_0) in pairs)
        most = min(left - entered_0 for (_, left), (entered_0, _) in pairs)
        offsets.append((least + most) / 2)
        errors.append(abs(most - least) / 2)  # least > most: the clocks have drifted, or are coarse, by as much
    return offsets, errors
