"""What becomes of an error that a rank finds on record in a later call than its peers.

All ranks find the error of a call by themselves, and each raises it once: on GPUs when its host next looks. A rank that
has left the call before that, by an exception of its own, comes with the next plan, in whose barrier its peers are,
because they have raised the error already. To raise it alone would leave them there. So this rank enters the barrier as
well, and publishes that it has an error which it has not raised. If all ranks publish that, all raise. Otherwise the
error has been raised where somebody waited for the result, and is over.

That the call was left is seen in what has been launched since: a plan comes, and what belongs between has not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symmoe.kernels import control

UNRAISED = (1,)  # what is published; ranks without an error publish 0

# What follows a barrier of the key before there is another plan.
_NEXT = {
    control.PHASE_PLAN: control.PHASE_DISPATCH_READY,
    control.PHASE_DISPATCH_READY: control.PHASE_COMBINE_READY,
    control.PHASE_DISPATCH_DONE: control.PHASE_COMBINE_READY,
}


def was_left(phase: int, since: Sequence[int | None]) -> bool:
    """Whether this rank has gone on to another plan without the rest of a call.

    Args:
        phase: of the barrier in which the call failed.
        since: the phases of the barriers after it.
    """
    if phase not in _NEXT or control.PHASE_PLAN not in since:
        return False
    return _NEXT[phase] not in since[: since.index(control.PHASE_PLAN)]


def nobody_has_raised(received: torch.Tensor) -> bool:
    """Whether all ranks have published that they have not raised their error: int64 [R, NUM_PUBLISHED]."""
    return bool((received[:, 0] == UNRAISED[0]).all())
