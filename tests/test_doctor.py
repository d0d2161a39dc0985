"""`symmoe doctor --read` on records made by hand; those of real ranks are in test_flight.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from symmoe.cli import main
from symmoe.doctor.flight import MAX_BYTES, diagnose, read_record
from symmoe.errors import ArgumentError
from symmoe.symm_mem.flight import FORMAT

START = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def call(epoch: int, phase: str, at_s: float) -> dict[str, Any]:
    return {"launch": epoch, "epoch": epoch, "phase": phase, "launched_unix_s": START + at_s}


def record(rank: int, num_ranks: int, error: dict[str, Any], calls: list[dict], **more: Any) -> dict[str, Any]:
    status = {"kind": "timeout", "phase": "start-up", "peer": 0, "expected": 0, "seen": 0, "epoch": 0, "where": 0}
    return {
        "format": FORMAT,
        "rank": rank,
        "num_ranks": num_ranks,
        "error": error,
        "status": status,
        "calls": calls,
        "epoch_of_rank": [7] * num_ranks,
        "written_unix_s": START + 50 + rank,
        **more,
    }


def timeout(rank: int, *, phase: str = "dispatch: ready", expected: int = 8, reported_by: int | None = None) -> dict:
    text = f"rank {rank} did not reach '{phase}'"
    return {
        "type": "PeerTimeout",
        "text": text,
        "rank": rank,
        "phase": phase,
        "expected": expected,
        "seen": 7,
        "reported_by": reported_by,
    }


CALLS = [call(7, "plan: counts", 1.0), call(8, "dispatch: ready", 2.5)]


def test_one_missing_rank():
    found = diagnose([record(r, 4, timeout(3, reported_by=None if r else 1), CALLS) for r in (0, 1, 2)])
    assert (found.kind, found.culprits, found.witnesses, found.without_record) == ("timeout", [3], [0, 1, 2], [3])
    assert found.sentence == (
        "ranks 0, 1 and 2 waited for rank 3 at 'dispatch: ready' (epoch 8) since 2023-11-14 22:13:22.500 UTC; "
        "the last known call of rank 3 is 'plan: counts' (epoch 7); rank 3 left no record."
    )


def test_the_missing_rank_lives():
    late = [call(7, "plan: counts", 1.0), call(8, "close", 40.0)]
    told = {"type": "PeerAborted", "text": "rank 0 gave up: rank 1 did not reach", "rank": 0}
    found = diagnose([record(0, 2, timeout(1), CALLS), record(1, 2, told, late)])
    assert (found.kind, found.culprits, found.witnesses, found.without_record) == ("timeout", [1], [0], [])
    assert found.last_call == {"phase": "plan: counts", "epoch": 7, "at_unix_s": START + 1.0, "own": True}
    assert found.sentence.endswith("and it came to 'close' too late, 2023-11-14 22:14:00.000 UTC.")


def test_a_rank_that_waited_itself_is_not_where_it_began():
    """Rank 0 waited for 1, which waited for 2."""
    records = [record(0, 3, timeout(1, expected=9), CALLS), record(1, 3, timeout(2), CALLS)]
    found = diagnose(records)
    assert (found.culprits, found.witnesses, found.epoch) == ([2], [1], 8)


def test_ranks_that_waited_for_each_other():
    found = diagnose([record(0, 2, timeout(1), CALLS), record(1, 2, timeout(0), CALLS)])
    assert (found.culprits, found.witnesses) == ([0, 1], [0, 1])
    assert found.sentence.startswith("ranks 0 and 1 waited for ranks 0 and 1 at 'dispatch: ready' (epoch 8)")


def test_the_latest_record_of_a_rank_counts():
    older = record(0, 2, {"type": "ExpertIdError", "text": "an id"}, CALLS, written_unix_s=START)
    for records in ([older, record(0, 2, timeout(1), CALLS)], [record(0, 2, timeout(1), CALLS), older]):
        assert diagnose(records).kind == "timeout"
    assert diagnose([older]).kind == "error"


def test_calls_that_nobody_has_noted():
    """A ring that has turned, or epochs that CUDA graphs have moved on."""
    found = diagnose([record(0, 2, timeout(1, expected=900), [])])
    assert found.since_unix_s is None
    assert (
        "waited for rank 1 at 'dispatch: ready' (epoch 900); the last known call of rank 1 is (epoch 7)"
        in found.sentence
    )
    moved = diagnose([record(0, 2, timeout(1, expected=900), CALLS)])
    assert moved.since_unix_s == START + 2.5  # the last call of that phase


def write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def test_files_that_are_no_records(tmp_path: Path, capsys):
    good = record(0, 2, timeout(1), CALLS)
    cases = {
        "no JSON": write(tmp_path, "a", "{"),
        "no flight record": write(tmp_path, "b", json.dumps({**good, "format": "another"})),
        "is no flight record": write(tmp_path, "c", "[1, 2]"),
        "lacks ['calls', 'epoch_of_rank']": write(
            tmp_path, "d", json.dumps({k: v for k, v in good.items() if k not in ("calls", "epoch_of_rank")})
        ),
        "cannot read": str(tmp_path / "not there"),
        f"more than {MAX_BYTES} bytes": write(tmp_path, "e", " " * (MAX_BYTES + 1)),
    }
    fine = write(tmp_path, "fine", json.dumps(good))
    for text, path in cases.items():
        with pytest.raises(ArgumentError) as caught:
            read_record(path)
        assert text in str(caught.value)
        assert path in str(caught.value)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--read", fine, path])
        assert ended.value.code == 2
        assert path in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"groups of \[2, 4\] ranks"):
        diagnose([good, record(1, 4, timeout(3), CALLS)])
    with pytest.raises(SystemExit):
        main(["doctor", "--read"])
