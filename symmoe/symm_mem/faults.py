"""The errors of a heap: which error this rank raises, when it raises it, and what it reports to its peers.
docs/design/faults.md and docs/design/nodes.md explain why all ranks of all nodes raise each error once.

A rank may leave a failed call by another exception and enter the next plan. Its peers may have raised the error
already, and wait in that plan's barrier: if only this rank raised it now, the peers would wait in vain. So the rank
keeps the error, enters the barrier, and publishes this. If all ranks keep the error, all raise it; else the error is
over. Between nodes a rank reports each error to its rail once, and whether it keeps the error. Only if the whole rail
keeps it, the rank publishes so in its node.

On each rail either all ranks exchange an error or none does. A rank that receives it in a barrier reports it to the
rail. A rank that receives it from the rail enters its node's next barrier with it. On GPUs a rank may have entered
later exchanges of its rail before its host looks; their data is then marked unusable (RemoteNodes.begin). Once all
ranks of a rail have raised the error, their exchanges no longer mark data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from symmoe.errors import (
    TRAVELLING,
    PeerAborted,
    PeerError,
    PeerTimeout,
    SymmoeError,
    encode,
    logger,
)
from symmoe.kernels import control
from symmoe.symm_mem import flight_record, reports
from symmoe.symm_mem.reports import UNKNOWN, Fault, Report, end_waits, plan_error
from symmoe.symm_mem.streams import Streams, capture_id
from symmoe.symm_mem.waits import Waits
from symmoe.torch_internals import outside_transforms

UNRAISED = (1,)  # published by a rank with an error; others publish 0
_NO_STATUS = (0,) * control.STATUS_WORDS

# By barrier, the next barrier of the same call.
_NEXT = {
    control.PHASE_PLAN: control.PHASE_DISPATCH_READY,
    control.PHASE_NODES_PLAN: control.PHASE_DISPATCH_READY,
    control.PHASE_DISPATCH_READY: control.PHASE_COMBINE_READY,
    control.PHASE_DISPATCH_DONE: control.PHASE_COMBINE_READY,
}


class NoRemoteNodes:
    """The methods by which errors reach the group's other nodes, for a group without any. RemoteNodes has several.

    Attributes:
        overdue: the report of a rank on another node that misses an exchange on the device, once this is noticed.
        turn: a context for work that is local on one node, and collective on several.
    """

    overdue: Report | None = None
    turn: AbstractContextManager[object] = nullcontext()

    def node_of(self, rank: int) -> int | None:
        """The node of a rank of the group, for error texts; None: there is one node, or no such rank."""

    def announce(self, fault: Fault) -> None:
        """Announces an error for the next rendezvous with other nodes, by :meth:`exchange`. Does not wait."""

    def exchange(self, fault: Fault) -> Fault | Report:
        """Exchanges an error with other nodes, also if :meth:`announce` has sent it. Returns the error that all ranks
        raise. Collective."""
        return fault

    def enter(
        self, call: int, sizes: int = 0, rail_rows: int | None = None
    ) -> Fault | Report | None:
        """Waits for the other nodes, which must be in the same call (control.pack_call) and agree on `sizes`. None: all
        continue; else the result is the same on all ranks of a rail. Collective."""

    def has_reported_cause(self, peer: int) -> bool:
        """Whether a missing rank of this node has aborted because of another node, and reported it."""
        return False

    def reporting_abort(self, sender: int, report: Report) -> AbstractContextManager[None]:
        """Reports to other nodes that `sender` (rank in the EP group) has aborted, and ends the exchanges on the device
        for good at the end of the context, or a moment after its begin. Local; does not wait."""
        return nullcontext()


class Faults:
    """The errors of one rank on one heap. Methods return errors instead of raising them: a frame with a name for an
    error that passes through it forms a cycle with the traceback, which keeps the leases of all its frames. forget:
    called when an error of a call is noticed.

    Attributes:
        poison: the reason why only `close` works any more, or None. (An error object would keep frames alive.)
        unraised: the error that is kept for the barrier of the next plan, or None.
    """

    def __init__(
        self,
        waits: Waits,
        streams: Streams,
        one_call: AbstractContextManager[None],
        forget: Callable[[], None],
        remote_nodes: NoRemoteNodes,
    ) -> None:
        self.poison: str | None = None
        self.unraised: SymmoeError | None = None
        self._waits = waits
        self._streams = streams
        self._one_call = one_call
        self._remote_nodes = remote_nodes
        self._forget = forget
        self._folder = flight_record.find_folder()
        self._words = waits.status.numpy()
        self._rank = waits.peers.in_group(waits.peers.rank)  # in the EP group
        self._counters = waits.peers.counters(waits.peers.rank)
        self._turns = itertools.cycle((1, 0))  # the slots of the peers' inboxes for messages

    # -- errors on record -----------------------------------------------------------------------------------------

    @outside_transforms()
    def find(self, phase: int | None) -> SymmoeError | None:
        """The error that this rank raises now; None if there is none on record, or if it is kept for the next barrier.
        phase: as in SymmetricHeap.check."""
        if self._words[control.STATUS_KIND] == control.STATUS_OK:
            return None  # another thread has raised the error meanwhile
        words, error = self._end_call()
        if error is not None:
            return error
        failed_phase = words[control.STATUS_PHASE]
        since = self._waits.flight.phases_since(self._waits.flight.epoch)
        is_leaving = not has_left_call(failed_phase, since) and has_left_call(
            failed_phase, [*since, phase]
        )
        error, is_unraised = self._agree(words, is_unraised=is_leaving)
        if not is_leaving or self.poison is not None:
            return error
        if is_unraised:
            self.unraised = error
        else:
            self._is_over(error)
        return None

    def settle(self, received: list[list[int]]) -> SymmoeError | None:
        """The error that was kept for this barrier, if this rank raises it. received: [R][NUM_PUBLISHED], as published
        in the barrier by the ranks of this node."""
        error = self.unraised
        self.unraised = None
        assert error is not None
        if any(published[0] != UNRAISED[0] for published in received):
            self._is_over(error)
            return None
        # On other nodes this plan may have failed for another reason.
        answer = self._remote_nodes.exchange(Fault(-1, encode(error)))
        return self.poison_with(answer) if isinstance(answer, Report) else error

    def _is_over(self, error: SymmoeError) -> None:
        logger.warning(
            "rank %d has left a call by an exception of its own, in which its peers have raised: "
            "%s",
            self._rank,
            error,
        )

    def take(
        self, own_error: SymmoeError | None = None, *, rail_answer: Fault | None = None
    ) -> SymmoeError:
        """Returns the error on record and ends it: the next barrier counts again, unless a peer is gone. Synchronises.
        own_error, rail_answer: see _agree."""
        words, error = self._end_call()
        if error is None:
            error, _ = self._agree(words, own_error, rail_answer=rail_answer)
        return error

    def _end_call(self) -> tuple[list[int], SymmoeError | None]:
        """Ends the failed call: the next barrier counts again. Returns the record, and the error if ranks need not
        agree on it."""
        words = [int(word) for word in self._words]
        self.unraised = None  # every rank raises the error on record instead
        if words[control.STATUS_KIND] in (
            control.STATUS_TIMEOUT,
            control.STATUS_ABORT,
            control.STATUS_RAIL,
        ):
            return words, self._peer_failure(words)
        if self._is_captured:
            return words, SymmoeError(
                "an earlier call has failed; end the capture and call heap.check() for the error"
            )
        self._streams.synchronize()  # launched barriers of the failed call must still find the flag
        self._counters[control.FAULTED : control.RAIL_FAULT + 1].zero_()
        # Some launched barriers have not counted.
        self._waits.flight.epoch = int(self._counters[control.BARRIER_EPOCH])
        self._streams.synchronize()  # the next call may be on another stream
        self._words[control.STATUS_KIND] = control.STATUS_OK
        return words, None

    def _agree(
        self,
        words: list[int],
        own_error: SymmoeError | None = None,
        *,
        rail_answer: Fault | None = None,
        is_unraised: bool = False,
    ) -> tuple[SymmoeError, bool]:
        """The error of the record `words`, on which the rail agrees, and whether no rank of the rail raises it now.

        Args:
            own_error: the error by which this rank has failed the call.
            rail_answer: the error that the rail has exchanged already, or None. After an UNKNOWN error it exchanges
                again.
            is_unraised: whether this rank has left the call and is about to make a plan.
        """
        kind = words[control.STATUS_KIND]
        if kind == control.STATUS_PLAN:
            fault = Fault(-1, encode(plan_error(words)))
        elif kind == control.STATUS_FAULT:
            fault = reports.read_fault(
                self._waits.peers, words[control.STATUS_PEER], epoch=words[control.STATUS_EPOCH]
            )
        else:
            mismatch = reports.mismatch_error(
                self._waits.configurations,
                first=self._waits.peers.in_group(0),
                call=words[control.STATUS_EXPECTED],
                peer=self._waits.peers.in_group(words[control.STATUS_PEER]),
                other_call=words[control.STATUS_ACTUAL],
            )
            fault = Fault(-1, encode(mismatch))
        fault = fault._replace(is_unraised=is_unraised)
        answer: Fault | Report = (
            self._remote_nodes.exchange(fault) if rail_answer is None else rail_answer
        )
        if isinstance(answer, Fault) and answer.origin == UNKNOWN:
            answer = self._remote_nodes.exchange(fault)
        if isinstance(answer, Report):
            return self.poison_with(answer), False
        is_unraised = answer.is_unraised
        # Otherwise the record names the error.
        if rail_answer is None or UNKNOWN in (rail_answer.origin, fault.origin):
            fault = answer
        if own_error is not None and fault.origin == self._rank:
            error = own_error
        else:
            error = plan_error(words) if kind == control.STATUS_PLAN else fault.error
        self._forget()
        self._describe(error, words)
        self._write_record(error)
        if has_left_call(
            words[control.STATUS_PHASE], self._waits.flight.phases_since(self._waits.flight.epoch)
        ):
            # On the device it was no barrier: the peers are still in it.
            error = self.fail(error, control.PHASE_PLAN)
        return error, is_unraised

    def resolve_answer(self, answer: Fault | Report | None, call: int) -> SymmoeError | None:
        """The error that this rank raises after the rendezvous of its rail that enters `call`; None: all continue."""
        if answer is None or isinstance(answer, Report):
            return None if answer is None else self.poison_with(answer)
        if self._is_captured:
            return answer.error
        with self._one_call:
            self._streams.synchronize()
            # Otherwise this node's barriers have failed already.
            if self._words[control.STATUS_KIND] == control.STATUS_OK:
                self._enter_with(answer, control.pack_call(phase=call & 0xFF))
            return self.take(rail_answer=answer)

    def note_overdue(self, report: Report) -> None:
        """Aborts because of `remote_nodes.overdue`, for which this rank's host may be waiting. In any thread."""
        if self.poison is not None:
            return
        # Later errors follow from this one.
        if self._words[control.STATUS_KIND] == control.STATUS_OK:
            self._words[control.STATUS_KIND] = control.STATUS_RAIL
        self._report_abort(report._replace(reason=report.reason or str(self._peer_error(report))))

    def _enter_with(self, fault: Fault, call: int) -> None:
        """Enters the next barrier with an error, and waits until the barrier ends."""
        reports.send_fault(
            self._waits.peers,
            fault,
            epoch=int(self._counters[control.BARRIER_EPOCH]) + 1,
            turn=next(self._turns),
        )
        self._waits.wait(call, fault=True)
        self._streams.synchronize()

    def poison_with(
        self,
        report: Report,
        status: Sequence[int] = _NO_STATUS,
        send: Callable[[Report], None] | None = None,
        error: SymmoeError | None = None,
    ) -> SymmoeError:
        """Poisons the heap with the error of a missing or aborted rank, or this error, and returns it. From now on
        everything but `close` is blocked.

        Args:
            report: the reason, or the missing rank; sent with the text of the error if it has no reason.
            status: the record of it, if there is one.
            send: sends the report; None: to all peers.
        """
        error = error or self._peer_error(report)
        self.poison = str(error)
        self._describe(error, status)  # before this rank overwrites the words of its peers
        (send or self._report_abort)(report._replace(reason=report.reason or self.poison))
        self._write_record(error)
        return error

    def _peer_error(self, report: Report) -> PeerError:
        """The error of a report from its sender or from this rank, with the missing rank if the report names one."""
        sender = report.sender if report.sender >= 0 else None
        # The missing rank learns which rank reported it.
        if sender is not None and report.missing in (-1, self._rank):
            return PeerAborted(rank=sender, reason=report.reason)
        return PeerTimeout(
            rank=report.missing,
            phase=control.PHASES[report.phase],
            expected=report.expected,
            seen=report.seen,
            bound=self._waits.bound(bool(report.first)),
            reported_by=sender,
            node=self._remote_nodes.node_of(report.missing),
            is_lost=bool(report.lost),
        )

    def of_plan(self, report: list[int]) -> SymmoeError:
        """The error of a plan whose report (control.SUM_*) the host has read itself. Collective between nodes: ranks
        with a static capacity have the error on record, and report it to their rail."""
        with self._remote_nodes.turn:
            error, _ = self._agree(reports.plan_record(report))
        return error

    def _peer_failure(self, words: list[int]) -> SymmoeError:
        """The error of a peer that is missing or has aborted. All ranks name the same missing peer."""
        kind = words[control.STATUS_KIND]
        overdue = self._remote_nodes.overdue
        if kind == control.STATUS_RAIL and overdue is not None:
            return self.poison_with(overdue, words, lambda _: None)  # the peers have the report
        phase, peer, expected, actual, epoch = words[
            control.STATUS_PHASE : control.STATUS_EPOCH + 1
        ]
        if kind == control.STATUS_TIMEOUT and not self._remote_nodes.has_reported_cause(peer):
            first = self._waits.startup_grace.was_first(epoch, phase, peer)
            report = Report(
                "", self._waits.peers.in_group(peer), phase, expected, actual, int(first)
            )
            return self.poison_with(report, words)
        report = Report("it has not said why")
        if not self._is_captured:  # a capture may not read
            with self._streams.at_once():
                report = reports.read_report(self._waits.peers, peer)
        if report.sender < 0:
            report = report._replace(sender=self._waits.peers.in_group(peer))
        return self.poison_with(report, words, self._forward_report)

    def _forward_report(self, report: Report) -> None:
        """Forwards a report by a rank of this node to the other nodes."""
        with self._remote_nodes.reporting_abort(report.sender, report):
            pass  # this node has the report

    # -- errors of this rank --------------------------------------------------------------------------------------

    @outside_transforms()
    def fail(self, error: SymmoeError, phase: int | None) -> SymmoeError:
        """Fails the call whose next barrier is `phase`, as SymmetricHeap.fail does; the error that this rank raises."""
        if phase is None or self._is_captured:
            return error
        with self._one_call:
            fault = Fault(self._rank, encode(error))
            # Now: peers may wait for ranks whose rail peers wait for this one.
            self._remote_nodes.announce(fault)
            self._enter_with(fault, control.pack_call(phase=phase))
            return self.take(error)

    def fail_peers(self, error: Exception, phase: int) -> None:
        """Fails the call on all other ranks; this rank raises `error` itself."""
        if self.poison is not None:
            return
        text = str(error) if isinstance(error, SymmoeError) else f"{type(error).__name__}: {error}"
        kind = next((kind for kind in TRAVELLING if kind is type(error)), SymmoeError)
        try:
            # The peers raise the returned error, which may be of an earlier call.
            self.fail(kind(text), phase)
        except SymmoeError:
            pass  # another thread is in a call
        except Exception as problem:  # noqa: BLE001 - a GPU that is out of order
            logger.warning("rank %d cannot tell its peers of an error: %s", self._rank, problem)
            self.abort(text)

    @outside_transforms()
    def abort(self, reason: str) -> None:
        """See SymmetricHeap.abort."""
        if self.poison is not None:
            return
        self.poison_with(Report(reason), error=SymmoeError(f"this rank gave up: {reason}"))

    def _report_abort(self, report: Report) -> None:
        """Reports to the peers. With a broken GPU, or in a capture, the peers wait until their bounds instead."""
        if self._is_captured:
            return
        sender = report.sender if report.sender >= 0 else self._rank
        kept_bits = 0 if self._waits.is_inside or report.missing >= 0 else control.EPOCH_MASK
        with self._remote_nodes.reporting_abort(sender, report):
            try:
                with self._streams.at_once():
                    end_waits(
                        self._waits.peers, report, turn=next(self._turns), kept_bits=kept_bits
                    )
            except RuntimeError as problem:
                logger.warning(
                    "rank %d cannot tell its peers that it gives up: %s", self._rank, problem
                )

    def wait_to_close(self) -> tuple[SymmoeError | None, bool]:
        """The error that :meth:`SymmetricHeap.close` raises, and whether all ranks have entered close."""
        error = None
        together = False
        call = control.pack_call(phase=control.PHASE_CLOSE)
        try:
            self._streams.synchronize()
            if self.poison is None and self._words[control.STATUS_KIND] != control.STATUS_OK:
                # No rank has raised it yet. Unless it is a timeout, the peers are there.
                error = self.take()
            if self.poison is None:
                self._waits.wait(call)
                self._streams.synchronize()
                together = self._words[control.STATUS_KIND] == control.STATUS_OK
                close_error = (
                    self.resolve_answer(self._remote_nodes.enter(call), call)
                    if together
                    else self.take()
                )
                together = close_error is None
                error = error or close_error
        except (
            BaseException
        ) as problem:  # of a signal handler or the GPU: the peers wait for a report
            self.abort(f"{type(problem).__name__}: {problem}")
            raise
        if not together and self.poison is None:
            # The peers were in another call, and continue.
            self._report_abort(Report("it has closed its heap"))
        return error, together

    # -- flight records -------------------------------------------------------------------------------------------

    def _describe(self, error: SymmoeError, status: Sequence[int]) -> None:
        """Adds the flight record to the error."""
        if self._is_captured:
            return
        try:
            with self._streams.at_once():
                error.flight = flight_record.describe(self._waits, error, status)
        except RuntimeError as problem:
            logger.warning("rank %d cannot make a flight record: %s", self._rank, problem)

    def _write_record(self, error: SymmoeError) -> None:
        """Writes the error's flight record to its folder, and adds the path to the error's text."""
        if error.flight is not None and (where := flight_record.write(error.flight, self._folder)):
            error.args = (f"{error}{where}",)

    @property
    def _is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, during which the host can neither read nor wait."""
        try:
            return bool(capture_id(self._counters.device))
        except RuntimeError:  # a GPU that is out of order
            return False


def has_left_call(phase: int, since: Sequence[int | None]) -> bool:
    """Whether this rank has entered another plan without the next barrier of a call that failed in the barrier of
    `phase`. since: the phases of the barriers after it."""
    if phase not in _NEXT or control.PHASE_PLAN not in since:
        return False
    return _NEXT[phase] not in since[: since.index(control.PHASE_PLAN)]
