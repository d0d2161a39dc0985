"""The barrier of a group of ranks, and signals from one rank to another."""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.control import Peers


class SyncKernels(Protocol):
    @writes("peers", "received", "status", "nan_on_failure")
    def barrier(
        self,
        peers: Peers,
        words: tuple[int, ...],
        received: Tensor,
        status: Tensor,
        *,
        call: int,
        fault: bool,
        timeout_ns: int,
        nan_on_failure: Tensor | None = None,
    ) -> None:
        """Waits for every rank of the group, at most `timeout_ns`, and exchanges a few words. Collective.

        Args:
            peers: the group's arenas.
            words: NUM_PUBLISHED integers (arena offsets) for the peers.
            received: int64[R, NUM_PUBLISHED], gets every rank's words; all -1 if the call has failed: a rank faulted,
                gave up, did not come or is in another call, or an earlier failure has not been raised yet.
            status: int64[STATUS_WORDS] that the host reads, pinned host memory on GPUs; gets a record of a
                failure if none is pending.
            call: control.pack_call of what the ranks must agree on.
            fault: whether this rank's arguments are wrong, so that no rank may move payload.
            timeout_ns: bound of the wait.
            nan_on_failure: memory of a result; if the call has failed, every bit of it is set, which is NaN in every
                dtype of rows. On GPUs its size is a multiple of 16 bytes.
        """

    @writes("peers")
    def send_signal(self, peers: Peers, rank: int) -> None:
        """Tells `rank` that what this rank has written there since the last barrier is complete; does
        nothing after a failure."""

    @writes("peers", "arrived", "status", "nan_on_failure")
    def wait_for_signal(
        self,
        peers: Peers,
        rank: int,
        arrived: Tensor,
        status: Tensor,
        *,
        phase: int,
        timeout_ns: int,
        nan_on_failure: Tensor | None = None,
    ) -> None:
        """Waits for `rank`'s signal since the last barrier.

        Args:
            arrived: int64 [1], gets 0, or -1 if the call has failed: the signal did not come, a rank gave up, or
                an earlier failure has not been raised yet.
            status, timeout_ns, nan_on_failure: as in barrier.
            phase: the phase (control.PHASE_*), for the record.
        """

    @writes("counts", "progress")
    def count_exchange(self, counts: Tensor, progress: Tensor, *, which: int) -> None:
        """Adds 1 to counts[which], int64[2], and writes it to progress[which], int64[2] that the host reads: pinned
        host memory on GPUs."""

    @writes("fault")
    def hear_of_faults(self, heard: Tensor, fault: Tensor) -> None:
        """fault, int64[1], becomes at least the largest of heard, int64[N, .]: words of other nodes."""
