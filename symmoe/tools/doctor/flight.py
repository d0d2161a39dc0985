"""Diagnoses a failure from the available ranks' flight records (symm_mem/flight_record.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from symmoe.checks.json_values import typed
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.symm_mem.flight_record import FORMAT

MAX_BYTES = 16 << 20  # a record has some 30 KB


@dataclass(frozen=True)
class Call:
    """A barrier; with signal_of, a wait for a signal."""

    phase: str
    epoch: int
    launched_unix_s: float
    signal_of: int | None = None


@dataclass(frozen=True)
class Error:
    """The rank's exception. rank: the rank that a PeerTimeout or PeerAborted names."""

    type: str
    text: str
    rank: int = -1
    phase: str = ""
    expected: int = 0
    seen: int = 0
    reported_by: int | None = None


@dataclass(frozen=True)
class Status:
    """The status words of the rank's heap."""

    phase: str
    peer: int
    epoch: int
    kind: Any = ""


@dataclass(frozen=True)
class Record:
    """The used part of a flight record."""

    rank: int
    num_ranks: int
    written_unix_s: float
    error: Error
    status: Status
    calls: list[Call]
    epoch_of_rank: list[int]
    barrier_epoch: int | None = None


Records = dict[int, Record]  # by rank


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of records. A value of None is in no record."""

    kind: str  # "timeout" (ranks waited for others), "abort" (a rank aborted), or "error" (all ranks raised one)
    culprits: list[int]  # first causes: missing ranks, or the rank that aborted or raised
    witnesses: list[int]  # ranks that waited for the culprits, or received the abort
    phase: str | None  # of the witnesses' wait
    epoch: int | None
    since_unix_s: float | None  # when the first witness began to wait
    last_call: (
        dict[str, Any] | None
    )  # of the first culprit: phase, epoch, and whether from its own record
    without_record: list[int]  # ranks of the group without a record
    sentence: str  # the diagnosis in words


def read_record(path: str) -> Record:
    """A flight record from a file. Raises ArgumentError: unreadable, or no flight record; the text names the field."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        value = json.loads(data) if len(data) <= MAX_BYTES else None
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"{path} has more than {MAX_BYTES} bytes: no flight record")
    return parse_record(value, path)


def parse_record(value: Any, path: str) -> Record:
    """A flight record from JSON values. Raises ArgumentError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ArgumentError(f"{path} is no flight record of this version ({FORMAT!r})")
    try:
        record: Record = typed(Record, value, path, exactly=False)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    peer = record.error.rank if record.error.type in ("PeerTimeout", "PeerAborted") else 0
    raise_for(
        first_problem(
            (
                len(record.epoch_of_rank) != record.num_ranks,
                f"{path}: epoch_of_rank is not a number of each of {record.num_ranks} ranks",
            ),
            *(
                (
                    not 0 <= rank < record.num_ranks,
                    f"{path}: {name} is {rank}, of {record.num_ranks} ranks",
                )
                for name, rank in (("rank", record.rank), ("rank of error", peer))
            ),
        )
    )
    return record


def diagnose(records: Iterable[Record]) -> Diagnosis:
    """Diagnoses one or more records of the ranks of one group; each rank's latest record counts.
    Raises ArgumentError: the records are of groups of different sizes."""
    by_rank = {
        record.rank: record for record in sorted(records, key=lambda record: record.written_unix_s)
    }
    sizes = sorted({record.num_ranks for record in by_rank.values()})
    if len(sizes) > 1:
        raise ArgumentError(f"the records are of groups of {sizes} ranks: give those of one group")
    waits, aborted = (
        {rank: record.error.rank for rank, record in by_rank.items() if record.error.type == kind}
        for kind in ("PeerTimeout", "PeerAborted")
    )
    aborting = [
        rank
        for rank, record in by_rank.items()
        if record.error.text.startswith("this rank gave up: ")
    ]
    without = sorted(set(range(sizes[0])) - set(by_rank))
    if waits:
        diagnosis = _timeout(by_rank, waits)
    else:
        diagnosis = _abort(by_rank, aborted, aborting) if aborted or aborting else _error(by_rank)
    tail = f"; {_ranks(without)} left no record." if without else "."
    return replace(diagnosis, without_record=without, sentence=diagnosis.sentence + tail)


def _timeout(by_rank: Records, waits: dict[int, int]) -> Diagnosis:
    # A rank whose own wait timed out is no culprit, unless ranks waited for each other in a cycle.
    culprits = sorted(set(waits.values()) - set(waits)) or sorted(set(waits.values()))
    witnesses = sorted(rank for rank, missing in waits.items() if missing in culprits)
    # A rank whose own wait timed out knows more than ranks that received its abort.
    first_witnesses = [
        rank for rank in witnesses if by_rank[rank].error.reported_by is None
    ] or witnesses
    error, culprit = by_rank[first_witnesses[0]].error, culprits[0]
    since = _since(by_rank, witnesses, error.phase, error.expected)
    last_call = _last_call(by_rank, culprit, error.expected, error.seen, witnesses)
    calls = by_rank[culprit].calls if culprit in by_rank else []
    late = [
        f", and it came to '{call.phase}' too late, {_time(call.launched_unix_s)}"
        for call in calls
        if call.epoch >= error.expected
    ]
    sentence = (
        f"{_ranks(witnesses)} waited for {_ranks(culprits)} at '{error.phase}' (epoch {error.expected})"
        f"{'' if since is None else f' since {_time(since)}'}; {_last_known(culprit, last_call)}{''.join(late[:1])}"
    )
    return Diagnosis(
        "timeout", culprits, witnesses, error.phase, error.expected, since, last_call, [], sentence
    )


def _abort(by_rank: Records, aborted: dict[int, int], aborting: list[int]) -> Diagnosis:
    culprits = sorted(set(aborting) | set(aborted.values()))
    witnesses = sorted(set(aborted) - set(culprits))
    status = by_rank[witnesses[0]].status if witnesses else None
    phase, epoch = (status.phase, status.epoch) if status else (None, None)
    source = by_rank[next(rank for rank in (*culprits, *witnesses) if rank in by_rank)].error.text
    reason = source.partition("gave up: ")[2].partition(" (flight record")[0] or source
    last_call = _last_call(by_rank, culprits[0]) if culprits[0] in by_rank else None
    received = f"; {_ranks(witnesses)} found out at '{phase}' (epoch {epoch})" if witnesses else ""
    last = f"; {_last_known(culprits[0], last_call)}" if last_call else ""
    sentence = f"{_ranks(culprits)} gave up: {reason.rstrip('. ')}{received}{last}"
    return Diagnosis(
        "abort",
        culprits,
        witnesses,
        phase,
        epoch,
        _since(by_rank, witnesses, phase, epoch),
        last_call,
        [],
        sentence,
    )


def _error(by_rank: Records) -> Diagnosis:
    rank, record = max(by_rank.items(), key=lambda item: item[1].written_unix_s)
    status, error = record.status, record.error
    # The status of a plan has another word at the position of the epoch.
    epoch = status.epoch if status.kind in ("fault", "mismatch") else record.barrier_epoch
    text = error.text.partition(" (flight record")[0].rstrip(". ")
    sentence = (
        f"{_ranks(sorted(by_rank))} raised {error.type} at '{status.phase}' (epoch {epoch}): {text}"
    )
    return Diagnosis(
        "error",
        [status.peer] if status.peer >= 0 else [],
        sorted(by_rank),
        status.phase,
        epoch,
        _since(by_rank, [rank], status.phase, epoch),
        _last_call(by_rank, rank),
        [],
        sentence,
    )


def _since(
    by_rank: Records, ranks: Sequence[int], phase: str | None, epoch: int | None
) -> float | None:
    """The time at which the first of these ranks launched the call. If no epoch matches, as after CUDA graphs, the
    last call in that phase counts."""
    of_phase = [[call for call in by_rank[rank].calls if call.phase == phase] for rank in ranks]
    calls_found = [
        ([call for call in calls if call.epoch == epoch] or calls)[-1]
        for calls in of_phase
        if calls
    ]
    return min((call.launched_unix_s for call in calls_found), default=None)


def _last_call(
    by_rank: Records,
    rank: int,
    before: int | None = None,
    seen: int = 0,
    witnesses: Sequence[int] = (),
) -> dict[str, Any] | None:
    """A rank's last known call (before that epoch), from its own record or from other ranks' records."""
    if rank in by_rank:
        calls = (
            {"phase": c.phase, "epoch": c.epoch, "at_unix_s": c.launched_unix_s, "own": True}
            for c in reversed(by_rank[rank].calls)
            if before is None or c.epoch < before
        )
        return next(calls, None)
    epoch = max([seen, *(by_rank[witness].epoch_of_rank[rank] for witness in witnesses)])
    phases = (  # all ranks make the same calls
        call.phase
        for witness in witnesses
        for call in reversed(by_rank[witness].calls)
        if call.epoch == epoch and call.signal_of is None
    )
    return {"phase": next(phases, None), "epoch": epoch, "at_unix_s": None, "own": False}


def _last_known(rank: int, call: dict[str, Any] | None) -> str:
    if call is None:
        return f"nothing is known of a call of rank {rank}"
    where = f"'{call['phase']}' " if call["phase"] else ""
    when = f", launched {_time(call['at_unix_s'])}" if call["at_unix_s"] else ""
    return f"the last known call of rank {rank} is {where}(epoch {call['epoch']}{when})"


def _ranks(ranks: list[int]) -> str:
    return (
        f"rank {ranks[0]}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    )


def _time(unix_s: float) -> str:
    try:
        return (
            datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
            + " UTC"
        )
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s"  # not a valid time
