"""What happened, from the flight records (symm_mem/flight_record.py) of as many ranks as have left one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from symmoe.errors import ArgumentError
from symmoe.symm_mem.flight_record import FORMAT

MAX_BYTES = 16 << 20  # a record has some 30 KB
_END_OF_TIME_S = 253_402_300_800  # the end of what a date can say: the year 10000

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the records say.

    Attributes:
        kind: "timeout" (ranks waited for others), "abort" (a rank gave up), or "error" (all ranks raised one).
        culprits: the ranks with which it began: the missing ones, or the one that gave up or was wrong.
        witnesses: ranks that waited for the culprits, or were told.
        phase, epoch: where they waited; None if no record says so.
        since_unix_s: when the first of them began to wait; None if no record says so.
        last_call: the last call that is known of the first culprit: phase, epoch, and whether its own record says so.
        without_record: ranks of the group that have left no record here.
        sentence: all of this in words.
    """

    kind: str
    culprits: list[int]
    witnesses: list[int]
    phase: str | None
    epoch: int | None
    since_unix_s: float | None
    last_call: dict[str, Any] | None
    without_record: list[int]
    sentence: str


def read_record(path: str) -> Record:
    """A flight record from a file.

    Raises:
        ArgumentError: it cannot be read, or is no record. The text names the field.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"{path} has more than {MAX_BYTES} bytes: no flight record")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ArgumentError(f"{path} is no flight record of this version ({FORMAT!r})")
    _check_record(path, record)
    return record


def diagnose(records: Iterable[Record]) -> Diagnosis:
    """What happened, from one or more records of the ranks of one group; for each rank, its latest record counts.

    Raises:
        ArgumentError: the records are of groups of different sizes.
    """
    by_rank: dict[int, Record] = {}
    for record in sorted(records, key=lambda record: record["written_unix_s"]):
        by_rank[record["rank"]] = record
    sizes = sorted({record["num_ranks"] for record in by_rank.values()})
    if len(sizes) > 1:
        raise ArgumentError(f"the records are of groups of {sizes} ranks: give those of one group")
    waits = {rank: record["error"]["rank"] for rank, record in by_rank.items() if _type(record) == "PeerTimeout"}
    if waits:
        return _timeout(by_rank, waits, sizes[0])
    told = {rank: record["error"]["rank"] for rank, record in by_rank.items() if _type(record) == "PeerAborted"}
    gave_up = [rank for rank, record in by_rank.items() if _gave_up(record)]
    if told or gave_up:
        return _abort(by_rank, told, gave_up, sizes[0])
    return _error(by_rank, sizes[0])


def _is_count(value: object) -> bool:
    return type(value) is int and -1 <= value < 1 << 63


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast(float, value) < _END_OF_TIME_S


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a pair of surrogates, which cannot be printed
        return False


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_Fields = Mapping[str, Callable[[object], bool]]
_RECORD: _Fields = {
    "rank": _is_count,
    "num_ranks": _is_count,
    "written_unix_s": _is_time,
    "error": _is_object,
    "status": _is_object,
    "calls": _is_list,
    "epoch_of_rank": _is_list,
}
_ERROR: _Fields = {"type": _is_text, "text": _is_text}
_ABORT: _Fields = {"rank": _is_count}
_TIMEOUT: _Fields = {
    "rank": _is_count,
    "phase": _is_text,
    "expected": _is_count,
    "seen": _is_count,
    "reported_by": _is_count_or_none,
}
_STATUS: _Fields = {"phase": _is_text, "peer": _is_count, "epoch": _is_count}
_CALL: _Fields = {"phase": _is_text, "epoch": _is_count, "launched_unix_s": _is_time}


def _check_record(path: str, record: Record) -> None:
    """Checks that every field that is used below exists and has its type: files may come from anywhere."""
    _check(path, record, _RECORD)
    error, num_ranks = record["error"], record["num_ranks"]
    _check(f"{path}: error", error, _ERROR)
    _check(f"{path}: error", error, {"PeerTimeout": _TIMEOUT, "PeerAborted": _ABORT}.get(error["type"], {}))
    _check(f"{path}: status", record["status"], _STATUS)
    for call in record["calls"]:
        _check(f"{path}: one of calls", call, _CALL)
    if len(record["epoch_of_rank"]) != num_ranks or not all(map(_is_count, record["epoch_of_rank"])):
        raise ArgumentError(f"{path}: epoch_of_rank is not a number of each of {num_ranks} ranks")
    peer = error["rank"] if error["type"] in ("PeerTimeout", "PeerAborted") else 0
    for name, rank in (("rank", record["rank"]), ("rank of error", peer)):
        if not 0 <= rank < num_ranks:
            raise ArgumentError(f"{path}: {name} is {rank}, of {num_ranks} ranks")


def _check(where: str, value: object, fields: _Fields) -> None:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is no object")
    if missing := sorted(set(fields) - set(value)):
        raise ArgumentError(f"{where} lacks {missing}")
    for name, fits in fields.items():
        if not fits(value[name]):
            raise ArgumentError(f"{where} has {name} {ascii(value[name])[:60]}, which is none")


def _timeout(by_rank: dict[int, Record], waits: dict[int, int], num_ranks: int) -> Diagnosis:
    # It did not begin with a rank that itself waited in vain, unless ranks waited for each other in a circle.
    culprits = sorted(set(waits.values()) - set(waits)) or sorted(set(waits.values()))
    witnesses = sorted(rank for rank, missing in waits.items() if missing in culprits)
    # Only ranks whose own wait has ended, if any of them has left its record: others have been told.
    own = [rank for rank in witnesses if by_rank[rank]["error"]["reported_by"] is None] or witnesses
    first = by_rank[own[0]]["error"]
    phase, epoch = first["phase"], first["expected"]
    since = [call["launched_unix_s"] for rank in witnesses if (call := _call(by_rank[rank], phase, epoch))]
    last_call = _last_call(by_rank, culprits[0], epoch, first["seen"], witnesses)
    parts = [f"{_ranks(witnesses)} waited for {_ranks(culprits)} at '{phase}' (epoch {epoch})"]
    if since:
        parts.append(f" since {_time(min(since))}")
    parts.append("; " + _last_known(culprits[0], last_call))
    if culprits[0] in by_rank and (late := [c for c in by_rank[culprits[0]]["calls"] if c["epoch"] >= epoch]):
        parts.append(f", and it came to '{late[0]['phase']}' too late, {_time(late[0]['launched_unix_s'])}")
    parts.append(_no_record(without := _without(by_rank, num_ranks)))
    return Diagnosis(
        kind="timeout",
        culprits=culprits,
        witnesses=witnesses,
        phase=phase,
        epoch=epoch,
        since_unix_s=min(since, default=None),
        last_call=last_call,
        without_record=without,
        sentence="".join(parts) + ".",
    )


def _abort(by_rank: dict[int, Record], told: dict[int, int], gave_up: list[int], num_ranks: int) -> Diagnosis:
    culprits = sorted(set(gave_up) | set(told.values()))
    witnesses = sorted(set(told) - set(culprits))
    status = by_rank[witnesses[0]]["status"] if witnesses else None
    phase, epoch = (status["phase"], status["epoch"]) if status else (None, None)
    since = [call["launched_unix_s"] for rank in witnesses if (call := _call(by_rank[rank], phase, epoch))]
    source = by_rank[next(rank for rank in (*culprits, *witnesses) if rank in by_rank)]["error"]["text"]
    reason = source.partition("gave up: ")[2].partition(" (flight record")[0] or source
    last_call = _last_call(by_rank, culprits[0], None, 0, []) if culprits[0] in by_rank else None
    sentence = f"{_ranks(culprits)} gave up: {reason.rstrip('. ')}"
    if witnesses:
        sentence += f"; {_ranks(witnesses)} found out at '{phase}' (epoch {epoch})"
    if last_call:
        sentence += f"; {_last_known(culprits[0], last_call)}"
    without = _without(by_rank, num_ranks)
    return Diagnosis(
        kind="abort",
        culprits=culprits,
        witnesses=witnesses,
        phase=phase,
        epoch=epoch,
        since_unix_s=min(since, default=None),
        last_call=last_call,
        without_record=without,
        sentence=sentence + _no_record(without) + ".",
    )


def _error(by_rank: dict[int, Record], num_ranks: int) -> Diagnosis:
    rank, record = max(by_rank.items(), key=lambda item: item[1]["written_unix_s"])
    status, error = record["status"], record["error"]
    culprits = [status["peer"]] if status["peer"] >= 0 else []
    # The epoch of a plan is in another place: its status has other words there.
    epoch = status["epoch"] if status["kind"] in ("fault", "mismatch") else record.get("barrier_epoch")
    text = error["text"].partition(" (flight record")[0].rstrip(". ")
    without = _without(by_rank, num_ranks)
    call = _call(record, status["phase"], epoch)
    return Diagnosis(
        kind="error",
        culprits=culprits,
        witnesses=sorted(by_rank),
        phase=status["phase"],
        epoch=epoch,
        since_unix_s=call["launched_unix_s"] if call else None,
        last_call=_last_call(by_rank, rank, None, 0, []),
        without_record=without,
        sentence=f"{_ranks(sorted(by_rank))} raised {error['type']} at '{status['phase']}' (epoch {epoch}): {text}"
        f"{_no_record(without)}.",
    )


def _type(record: Record) -> str:
    name: str = record["error"]["type"]
    return name


def _gave_up(record: Record) -> bool:
    text: str = record["error"]["text"]
    return text.startswith("this rank gave up: ")


def _call(record: Record, phase: str | None, epoch: int | None) -> dict[str, Any] | None:
    """The call of that epoch and phase; the last one of that phase if epochs do not fit, as after CUDA graphs."""
    calls: list[dict[str, Any]] = [call for call in record["calls"] if call["phase"] == phase]
    exact = [call for call in calls if call["epoch"] == epoch]
    found = exact or calls
    return found[-1] if found else None


def _last_call(
    by_rank: dict[int, Record], rank: int, before: int | None, seen: int, witnesses: list[int]
) -> dict[str, Any] | None:
    """What is known of a rank's last call (before that epoch), from its own record or from the records of others."""
    if rank in by_rank:
        calls = [call for call in by_rank[rank]["calls"] if before is None or call["epoch"] < before]
        if not calls:
            return None
        last = calls[-1]
        return {"phase": last["phase"], "epoch": last["epoch"], "at_unix_s": last["launched_unix_s"], "own": True}
    epochs = [by_rank[witness]["epoch_of_rank"][rank] for witness in witnesses]
    epoch = max([seen, *epochs])
    for witness in witnesses:  # all ranks make the same calls
        for call in reversed(by_rank[witness]["calls"]):
            if call["epoch"] == epoch and "signal_of" not in call:
                return {"phase": call["phase"], "epoch": epoch, "at_unix_s": None, "own": False}
    return {"phase": None, "epoch": epoch, "at_unix_s": None, "own": False}


def _last_known(rank: int, call: dict[str, Any] | None) -> str:
    if call is None:
        return f"nothing is known of a call of rank {rank}"
    where = f"'{call['phase']}' " if call["phase"] else ""
    when = f", launched {_time(call['at_unix_s'])}" if call["at_unix_s"] else ""
    return f"the last known call of rank {rank} is {where}(epoch {call['epoch']}{when})"


def _without(by_rank: dict[int, Record], num_ranks: int) -> list[int]:
    return sorted(set(range(num_ranks)) - set(by_rank))


def _no_record(without: list[int]) -> str:
    if not without:
        return ""
    return f"; {_ranks(without)} left no record"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
