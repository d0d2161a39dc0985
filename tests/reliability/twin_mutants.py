"""Steps of the protocol taken out of the CPU implementation, one at a time, by patching the twins on every rank. A
mutant that does not apply, because a name has gone, raises :class:`DoesNotApply`: it must not count as found."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from symmoe import kernels
from symmoe.kernels import control, twin
from symmoe.kernels.control import Peers
from symmoe.kernels.twin import sync


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
    generator = random.Random(seed)

    def late(wait: Callable, *args):
        if generator.random() < 0.3:
            time.sleep(2e-3)
        return wait(*args)

    with ExitStack() as stack:
        _replace(stack, sync, "_wait", late)
        yield


def _replace(stack: ExitStack, owner, name: str, stand_in: Callable) -> None:
    """Puts stand_in(original, *args, **kwargs) in place of `owner.name` for the life of the stack."""
    if not hasattr(owner, name):
        raise DoesNotApply(f"{owner.__name__} has no {name}")
    stack.enter_context(patch.object(owner, name, partial(stand_in, getattr(owner, name))))


def _hook(stack: ExitStack, **stand_ins: Callable) -> None:
    """Has stand_in(kernel, *args, **kwargs) called in place of each kernel of the twins."""
    for name in stand_ins:
        if not hasattr(twin, name):
            raise DoesNotApply(f"the twins have no {name}")

    def hook(name: str, kernel: Callable, /, *args, **kwargs):
        return (
            stand_ins[name](kernel, *args, **kwargs)
            if name in stand_ins
            else kernel(*args, **kwargs)
        )

    stack.enter_context(kernels.hooked(torch.device("cpu"), hook))


# -- waits ------------------------------------------------------------------------------------------------------------
def _no_wait_in(phase: int, stack: ExitStack) -> None:
    waits = [True]

    def barrier(kernel: Callable, *args, **kwargs):
        waits[0] = control.unpack_call(kwargs["call"])["phase"] != phase
        try:
            return kernel(*args, **kwargs)
        finally:
            waits[0] = True

    _replace(stack, sync, "_wait", lambda original, *args: original(*args) if waits[0] else True)
    _hook(stack, barrier=barrier)


def _wait_for_all_but_the_last(original: Callable, words, rank: int, *args):
    return True if rank == words.shape[0] - 1 else original(words, rank, *args)


def _wait_for_an_older_epoch(original: Callable, words, rank: int, value: int, *args):
    return original(words, rank, value - 4, *args)  # 2 epochs: the same half


def _with(original: Callable, *args, options: dict, **kwargs):
    return original(*args, **kwargs | options)


# -- epochs, halves and the order of stores ---------------------------------------------------------------------------
def _epoch_stays(kernel: Callable, peers: Peers, *args, **kwargs):
    counters = peers.counters(peers.rank)
    epoch = int(counters[control.BARRIER_EPOCH])
    result = kernel(peers, *args, **kwargs)
    counters[control.BARRIER_EPOCH] = max(epoch, 2)  # those of the start have to work
    return result


def _one_mailbox_half(stack: ExitStack) -> None:
    original = Peers.host_words.func

    def words(peers: Peers) -> control.HostWords:
        found = original(peers)
        return found._replace(
            mailboxes=tuple(
                np.lib.stride_tricks.as_strided(both, both.shape, (0, *both.strides[1:]))
                for both in found.mailboxes
            )
        )

    stack.enter_context(patch.object(Peers, "host_words", property(words)))


def _one_table_half(stack: ExitStack) -> None:
    original = Peers.count_table
    stack.enter_context(
        patch.object(Peers, "count_table", lambda peers, rank, epoch: original(peers, rank, 0))
    )


def _payload_after(which: str, stack: ExitStack) -> None:
    """Rows for others are pushed after the barrier or the signal that says that they are there."""
    later: list[Callable[[], None]] = []

    def push(
        kernel: Callable,
        x: torch.Tensor,
        to_row: torch.Tensor,
        peers: Peers,
        *args,
        **kwargs,
    ) -> None:
        push_now = partial(kernel, x, to_row, peers, *args, **kwargs)
        if which == "barrier" or peers.rank not in (kwargs.get("ranks") or (peers.rank,)):
            later.append(push_now)
        else:
            push_now()

    def flag(kernel: Callable, *args, **kwargs):
        result = kernel(*args, **kwargs)
        if which != "barrier":
            time.sleep(5e-3)
        while later:
            later.pop(0)()
        return result

    _hook(stack, push_rows=push, **{which: flag})


# -- faults and fills --------------------------------------------------------------------------------------------------
def _tail_of_the_index_not_zeroed(kernel: Callable, wire, packed, num_rows, trip, index) -> None:
    row_to_packed_row = index[1]
    before = row_to_packed_row.clone()
    kernel(wire, packed, num_rows, trip, index)
    row_to_packed_row[int(num_rows) :] = before[int(num_rows) :]


def _unused_packed_rows_not_marked(
    kernel, slots, region, peers, received, *, row_column, prob_column
) -> None:
    """The slots of packed rows that nobody uses keep what memory held: here, row 0 of somebody."""
    (rows, *_), (packed, _, start, limit) = slots, region
    kernel(slots, region, peers, received, row_column=row_column, prob_column=prob_column)
    for rank in range(peers.num_ranks):
        offset = int(received[rank, row_column])
        used = int((packed[:, rank] >= 0).sum())
        begin = int(start[rank])
        size = int(limit[rank])
        if offset >= 0 and used < size:
            peers.region(rank, offset, (begin + size, rows.shape[1]), torch.int32)[
                begin + used :
            ] = 0


def _hooks(**stand_ins: Callable) -> Callable[[ExitStack], None]:
    return lambda stack: _hook(stack, **stand_ins)


def _in_place_of(owner, name: str, stand_in: Callable) -> Callable[[ExitStack], None]:
    return lambda stack: _replace(stack, owner, name, stand_in)


_endless = partial(_with, options={"timeout_ns": 10**15})
MUTANTS: dict[str, Callable[[ExitStack], None]] = {
    "no wait for the counts": partial(_no_wait_in, control.PHASE_PLAN),
    "no wait before rows are sent": partial(_no_wait_in, control.PHASE_DISPATCH_READY),
    "no wait for rows to arrive": partial(_no_wait_in, control.PHASE_DISPATCH_DONE),
    "no wait before sums are sent": partial(_no_wait_in, control.PHASE_COMBINE_READY),
    "no wait for sums to arrive": partial(_no_wait_in, control.PHASE_COMBINE_DONE),
    "no wait for signals": _hooks(
        wait_for_signal=lambda kernel, peers, rank, arrived, status, **kwargs: arrived.fill_(0)
    ),
    "no wait for the last rank": _in_place_of(sync, "_wait", _wait_for_all_but_the_last),
    "wait for an older epoch": _in_place_of(sync, "_wait", _wait_for_an_older_epoch),
    "wait without end": _hooks(barrier=_endless, wait_for_signal=_endless),
    "timeout not reported": _in_place_of(sync, "record", lambda original, *args: None),
    "epoch stays": _hooks(barrier=_epoch_stays),
    "one half of the mailbox": _one_mailbox_half,
    "one half of the count table": _one_table_half,
    "payload after the flag": partial(_payload_after, "barrier"),
    "payload after the signal": partial(_payload_after, "send_signal"),
    "fault not told": _hooks(barrier=partial(_with, options={"fault": False})),
    "tail of the index not zeroed": _hooks(index_rows=_tail_of_the_index_not_zeroed),
    "unused packed rows not marked": _hooks(push_slots=_unused_packed_rows_not_marked),
}
