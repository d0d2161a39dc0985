"""The barrier of a group of ranks, and signals from one rank to another.

On CPUs, these are plain loads and stores in shared memory; x86-64 guarantees their order.
"""

import os
import time

import numpy as np
import numpy.typing as npt
import torch

from symmoe.kernels import control
from symmoe.kernels.operands import writes

_SPINS_BEFORE_SLEEP = 200
_SLEEP_S = 50e-6


class SyncKernels:
    @staticmethod
    @writes("peers", "received", "status", "nan_on_failure")
    def barrier(
        peers: control.Peers,
        words: tuple[int, ...],
        received: torch.Tensor,
        status: torch.Tensor,
        *,
        call: int,
        fault: bool,
        timeout_ns: int,
        nan_on_failure: torch.Tensor | None = None,
    ) -> None:
        """Waits for every rank of the group, at most `timeout_ns`, and exchanges a few words. Collective.

        Args:
            peers: the group's arenas.
            words: NUM_PUBLISHED integers (arena offsets) for the peers.
            received: int64[R, NUM_PUBLISHED], gets every rank's words; all -1 if the call has failed: a rank faulted,
                aborted, did not arrive or is in another call, or an earlier failure has not been raised yet.
            status: int64[STATUS_WORDS] that the host reads, pinned host memory on GPUs; gets a record of a failure
                unless one is pending.
            call: control.pack_call of the values that must be equal on all ranks.
            fault: whether this rank's arguments are wrong; then no rank may move payload.
            timeout_ns: bound of the wait.
            nan_on_failure: memory of a result; if the call has failed, all of its bits are set, which is NaN in every
                dtype of rows. On GPUs its size is a multiple of 16 bytes.
        """
        counters, mailboxes, _ = peers.host_words
        received.numpy().fill(-1)
        if counters[control.ABORTED] or counters[control.FAULTED]:
            _spoil(nan_on_failure)
            return
        fault = fault or bool(counters[control.RAIL_FAULT])
        epoch = int(counters[control.BARRIER_EPOCH]) + 1
        counters[control.BARRIER_EPOCH] = epoch
        half = epoch & 1
        for peer_mailbox in mailboxes:
            slot = peer_mailbox[half, peers.rank]
            slot[1 : 1 + control.NUM_PUBLISHED] = words
            slot[control.MAIL_CALL] = call
            slot[0] = 2 * epoch + int(
                fault
            )  # last: a rank that sees the epoch sees the words and all payload
        mailbox = mailboxes[peers.rank]
        mail = mailbox[half]
        deadline_ns = time.monotonic_ns() + timeout_ns
        late = []
        for rank in range(peers.num_ranks):
            if rank != peers.rank and not _wait(mail, rank, 2 * epoch, deadline_ns):
                late.append(rank)
        sent = mailbox[:, :, 0].copy()  # read once: a rank may abort between two reads
        calls = mail[:, control.MAIL_CALL]
        reached = np.where(sent >= control.ABORT, sent & control.EPOCH_MASK, sent)
        given_up = ((sent[half] >= control.ABORT) & (reached[half] < 2 * epoch)).nonzero()[0]
        faulted = (reached[half] == 2 * epoch + 1).nonzero()[0]
        different = (calls != calls[0]).nonzero()[0]
        counter = control.ABORTED if given_up.size or late else control.FAULTED
        if given_up.size:
            word = int(sent[half, given_up[0]])
            failure = control.STATUS_ABORT, _aborting_rank(word), epoch, word
        elif late:
            failure = control.STATUS_TIMEOUT, late[0], epoch, int(reached[:, late[0]].max()) >> 1
        elif faulted.size:
            failure = control.STATUS_FAULT, int(faulted[0]), epoch, epoch
        elif different.size:
            different_rank = int(different[0])
            failure = (
                control.STATUS_MISMATCH,
                different_rank,
                int(calls[0]),
                int(calls[different_rank]),
            )
        else:
            received.numpy()[:] = mail[:, 1 : 1 + control.NUM_PUBLISHED]
            return
        counters[counter] = 1
        kind, peer, expected, actual = failure
        record(status, kind, call & 0xFF, peer, expected, actual, epoch)
        _spoil(nan_on_failure)

    @staticmethod
    @writes("peers")
    def send_signal(peers: control.Peers, rank: int) -> None:
        """Signals to `rank` that this rank's writes there since the last barrier are complete; does nothing after a
        failure."""
        counters, _, signals = peers.host_words
        if not (counters[control.ABORTED] or counters[control.FAULTED]):
            signals[rank][peers.rank, 0] = counters[control.BARRIER_EPOCH]

    @staticmethod
    @writes("peers", "arrived", "status", "nan_on_failure")
    def wait_for_signal(
        peers: control.Peers,
        rank: int,
        arrived: torch.Tensor,
        status: torch.Tensor,
        *,
        phase: int,
        timeout_ns: int,
        nan_on_failure: torch.Tensor | None = None,
    ) -> None:
        """Waits for `rank`'s signal since the last barrier.

        Args:
            arrived: int64 [1], gets 0, or -1 if the call has failed: the signal did not arrive, a rank aborted, or an
                earlier failure has not been raised yet.
            status, timeout_ns, nan_on_failure: as in barrier.
            phase: the phase (control.PHASE_*), for the record.
        """
        counters, _, all_signals = peers.host_words
        arrived.fill_(-1)
        if not (counters[control.ABORTED] or counters[control.FAULTED]):
            epoch = int(counters[control.BARRIER_EPOCH])
            signals = all_signals[peers.rank]
            came = _wait(signals, rank, epoch, time.monotonic_ns() + timeout_ns)
            actual = int(signals[rank, 0])
            gave_up = actual >= control.ABORT
            if came and (not gave_up or actual & control.EPOCH_MASK >= epoch):
                arrived.fill_(0)
                return
            counters[control.ABORTED] = 1
            if gave_up:
                record(
                    status,
                    control.STATUS_ABORT,
                    phase,
                    _aborting_rank(actual),
                    epoch,
                    actual,
                    epoch,
                )
            else:
                record(status, control.STATUS_TIMEOUT, phase, rank, epoch, actual, epoch)
        _spoil(nan_on_failure)

    @staticmethod
    @writes("counts", "progress")
    def count_exchange(counts: torch.Tensor, progress: torch.Tensor, *, which: int) -> None:
        """Adds 1 to counts[which], int64[2], and writes it to progress[which], int64[2] that the host reads: pinned
        host memory on GPUs."""
        counts[which] += 1
        progress[which] = counts[which]

    @staticmethod
    @writes("fault")
    def receive_fault_flags(heard: torch.Tensor, fault: torch.Tensor) -> None:
        """Raises fault, int64[1], to the largest of heard, int64[N, .], if that is larger: words from other nodes."""
        torch.maximum(fault, heard.amax().view(1), out=fault)


def _aborting_rank(word: int) -> int:
    return (word - control.ABORT) >> control.ABORT_RANK_SHIFT


def _spoil(tensor: torch.Tensor | None) -> None:
    if tensor is not None and tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)


def _wait(words: npt.NDArray[np.int64], rank: int, value: int, deadline_ns: int) -> bool:
    spins = 0
    while words[rank, 0] < value:
        spins += 1
        if spins > _SPINS_BEFORE_SLEEP:
            if time.monotonic_ns() > deadline_ns:
                return False
            time.sleep(_SLEEP_S)
        else:
            os.sched_yield()  # tests run more ranks than there are cores
    return True


def record(
    status: torch.Tensor,
    kind: int,
    phase: int,
    peer: int,
    expected: int,
    actual: int,
    epoch: int,
    where: int = 0,
) -> None:
    """Writes a failure to a status record, unless one is pending."""
    if int(status[control.STATUS_KIND]) == control.STATUS_OK:
        words = status.new_tensor([phase, peer, expected, actual, epoch, where])
        status[control.STATUS_PHASE : control.STATUS_WHERE + 1] = words
        status[control.STATUS_KIND] = kind
