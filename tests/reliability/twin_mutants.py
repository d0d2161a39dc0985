"""Steps of the protocol taken out of the CPU implementation, one at a time, by patching the twins on every rank.

A mutant that does not apply, because a name has gone, raises :class:`DoesNotApply`: it must not count as found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from symmoe.dispatch import trip
from symmoe.kernels import control, twin
from symmoe.kernels.control import Peers
from symmoe.kernels.twin import plan as twin_plan
from symmoe.kernels.twin import sync
from symmoe.symm_mem import faults

Mutant = Callable[[ExitStack], None]


class DoesNotApply(AssertionError):
    """What the mutant patches is not there."""


@contextmanager
def mutated(mutant: str | None) -> Iterator[None]:
    """The mutant of that name of :data:`MUTANTS`; None: the code as it is."""
    with ExitStack() as stack:
        if mutant is not None:
            MUTANTS[mutant](stack)
        yield


@contextmanager
def slow_waits(seed: int) -> Iterator[None]:
    """This rank is late, now and then, between its own flags of a barrier and its look at the others'."""
    generator, wait = random.Random(seed), getattr(sync, "_wait", None)
    if wait is None:
        raise DoesNotApply("symmoe.kernels.twin.sync has no _wait")

    def late(*args: Any) -> Any:
        if generator.random() < 0.3:
            time.sleep(2e-3)
        return wait(*args)

    with patch.object(sync, "_wait", late):
        yield


def _replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts `make(original)` in place of `owner.name` for the life of the stack."""
    if not hasattr(owner, name):
        raise DoesNotApply(f"{owner.__name__} has no {name}")
    stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))


# -- waits ------------------------------------------------------------------------------------------------------------


def _no_wait_in(phase: int, stack: ExitStack) -> None:
    waits = [True]

    def barrier(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            waits[0] = control.unpack_call(kwargs["call"])["phase"] != phase
            try:
                return original(*args, **kwargs)
            finally:
                waits[0] = True

        return call

    _replace(stack, sync, "_wait", lambda original: lambda *args: original(*args) if waits[0] else True)
    _replace(stack, twin, "barrier", barrier)


def _no_wait_for_signals(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda peers, rank, arrived, status, **kwargs: arrived.fill_(0)

    _replace(stack, twin, "wait_for_signal", make)


def _wait_for_all_but_the_last(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda words, rank, *args: True if rank == words.shape[0] - 1 else original(words, rank, *args)

    _replace(stack, sync, "_wait", make)


def _wait_for_an_older_epoch(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda words, rank, value, *args: original(words, rank, value - 4, *args)  # 2 epochs: the same half

    _replace(stack, sync, "_wait", make)


def _wait_without_end(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: original(*args, **{**kwargs, "timeout_ns": 10**15})

    _replace(stack, twin, "barrier", make)
    _replace(stack, twin, "wait_for_signal", make)


def _timeout_not_reported(stack: ExitStack) -> None:
    _replace(stack, sync, "_record", lambda original: lambda *args: None)


# -- epochs and halves ------------------------------------------------------------------------------------------------


def _counters(peers: Peers) -> torch.Tensor:
    return peers.region(peers.rank, peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)


def _epoch_stays(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        def call(peers: Peers, *args: Any, **kwargs: Any) -> Any:
            epoch = int(_counters(peers)[control.BARRIER_EPOCH])
            result = original(peers, *args, **kwargs)
            _counters(peers)[control.BARRIER_EPOCH] = max(epoch, 2)  # those of the start have to work
            return result

        return call

    _replace(stack, twin, "barrier", make)


def _one_mailbox_half(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        def mailbox(*args: Any) -> np.ndarray:
            both = original(*args)
            return np.lib.stride_tricks.as_strided(both, both.shape, (0, *both.strides[1:]))

        return mailbox

    _replace(stack, sync, "_mailbox", make)


def _one_table_half(stack: ExitStack) -> None:
    _replace(stack, twin_plan, "_count_table", lambda original: lambda peers, rank, half: original(peers, rank, 0))


# -- order of stores --------------------------------------------------------------------------------------------------


def _payload_after_the_flag(stack: ExitStack) -> None:
    later: list[Callable[[], None]] = []

    def push(original: Callable) -> Callable:
        return lambda *args, **kwargs: later.append(partial(original, *args, **kwargs))

    def barrier(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            while later:
                later.pop(0)()
            return result

        return call

    _replace(stack, twin, "push_rows", push)
    _replace(stack, twin, "barrier", barrier)


def _payload_after_the_signal(stack: ExitStack) -> None:
    later: list[Callable[[], None]] = []

    def push(original: Callable) -> Callable:
        def call(x: torch.Tensor, to_row: torch.Tensor, peers: Peers, *args: Any, **kwargs: Any) -> None:
            ranks = kwargs.get("ranks")
            if ranks is None or peers.rank in ranks:
                original(x, to_row, peers, *args, **kwargs)
            else:
                later.append(partial(original, x, to_row, peers, *args, **kwargs))

        return call

    def signal(original: Callable) -> Callable:
        def call(*args: Any) -> None:
            original(*args)
            time.sleep(5e-3)
            while later:
                later.pop(0)()

        return call

    _replace(stack, twin, "push_rows", push)
    _replace(stack, twin, "send_signal", signal)


# -- faults and fills -------------------------------------------------------------------------------------------------


def _fault_not_told(stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: original(*args, **{**kwargs, "fault": False})

    _replace(stack, twin, "barrier", make)


def _tail_of_the_index_not_zeroed(stack: ExitStack) -> None:
    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.empty(*args, **kwargs)

    _replace(stack, trip, "torch", lambda original: Torch())


def _unused_packed_rows_not_marked(stack: ExitStack) -> None:
    """The slots of packed rows that nobody uses keep what memory held: here, row 0 of somebody."""

    def make(original: Callable) -> Callable:
        def call(slots, region, peers, received, *, row_column, prob_column):
            (rows, *_), (packed, _, start, limit) = slots, region
            original(slots, region, peers, received, row_column=row_column, prob_column=prob_column)
            for rank in range(peers.num_ranks):
                offset, used = int(received[rank, row_column]), int((packed[:, rank] >= 0).sum())
                begin, size = int(start[rank]), int(limit[rank])
                if offset >= 0 and used < size:
                    peers.region(rank, offset, (begin + size, rows.shape[1]), torch.int32)[begin + used :] = 0

        return call

    _replace(stack, twin, "push_slots", make)


# -- giving up --------------------------------------------------------------------------------------------------------


def _rows_of_a_failed_call_kept(stack: ExitStack) -> None:
    _replace(stack, sync, "_spoil", lambda original: lambda tensor: None)


def _rows_of_a_failed_call_zeroed(stack: ExitStack) -> None:
    _replace(stack, sync, "_spoil", lambda original: lambda tensor: tensor.zero_())


def _kept_bits(kept_bits: int, stack: ExitStack) -> None:
    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: original(*args, **{**kwargs, "kept_bits": kept_bits})

    _replace(stack, faults, "end_waits", make)


MUTANTS: dict[str, Mutant] = {
    "no wait for the counts": partial(_no_wait_in, control.PHASE_PLAN),
    "no wait before rows are sent": partial(_no_wait_in, control.PHASE_DISPATCH_READY),
    "no wait for rows to arrive": partial(_no_wait_in, control.PHASE_DISPATCH_DONE),
    "no wait before sums are sent": partial(_no_wait_in, control.PHASE_COMBINE_READY),
    "no wait for sums to arrive": partial(_no_wait_in, control.PHASE_COMBINE_DONE),
    "no wait for signals": _no_wait_for_signals,
    "no wait for the last rank": _wait_for_all_but_the_last,
    "wait for an older epoch": _wait_for_an_older_epoch,
    "wait without end": _wait_without_end,
    "timeout not reported": _timeout_not_reported,
    "epoch stays": _epoch_stays,
    "one half of the mailbox": _one_mailbox_half,
    "one half of the count table": _one_table_half,
    "payload after the flag": _payload_after_the_flag,
    "payload after the signal": _payload_after_the_signal,
    "fault not told": _fault_not_told,
    "tail of the index not zeroed": _tail_of_the_index_not_zeroed,
    "unused packed rows not marked": _unused_packed_rows_not_marked,
    "rows of a failed call kept": _rows_of_a_failed_call_kept,
    "rows of a failed call zeroed": _rows_of_a_failed_call_zeroed,
    "what came counts after a timeout": partial(_kept_bits, control.EPOCH_MASK),
    "nothing counts after an abort": partial(_kept_bits, 0),
}
