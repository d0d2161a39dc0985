"""`symmoe doctor --read` on records made by hand; test_flight.py has records of real ranks."""

import json
import random
from pathlib import Path

import pytest

from symmoe.cli import main
from symmoe.errors import ArgumentError
from symmoe.symm_mem.flight_record import FORMAT
from symmoe.tools.doctor import command, flight
from symmoe.tools.doctor.flight import MAX_BYTES, Diagnosis, read_record

START = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def call(epoch: int, phase: str, at_s: float) -> dict:
    return {"launch": epoch, "epoch": epoch, "phase": phase, "launched_unix_s": START + at_s}


def record(rank: int, num_ranks: int, error: dict, calls: list[dict], **overrides) -> dict:
    status = {
        "kind": "timeout",
        "phase": "start-up",
        "peer": 0,
        "expected": 0,
        "seen": 0,
        "epoch": 0,
        "where": 0,
    }
    defaults = {
        "format": FORMAT,
        "rank": rank,
        "num_ranks": num_ranks,
        "error": error,
        "status": status,
        "calls": calls,
    }
    return {
        **defaults,
        "epoch_of_rank": [7] * num_ranks,
        "written_unix_s": START + 50 + rank,
        **overrides,
    }


def timeout(
    rank: int, *, phase: str = "dispatch: ready", expected: int = 8, reported_by: int | None = None
) -> dict:
    fields = {
        "type": "PeerTimeout",
        "text": f"rank {rank} did not reach '{phase}'",
        "rank": rank,
        "phase": phase,
    }
    return {**fields, "expected": expected, "seen": 7, "reported_by": reported_by}


def diagnose(records: list[dict]) -> Diagnosis:
    return flight.diagnose([flight.parse_record(record, "a file") for record in records])


CALLS = [call(7, "plan: counts", 1.0), call(8, "dispatch: ready", 2.5)]


LATE = [call(7, "plan: counts", 1.0), call(8, "close", 40.0)]
TOLD = {"type": "PeerAborted", "text": "rank 0 gave up: rank 1 did not reach", "rank": 0}
OLDER = record(0, 2, {"type": "ExpertIdError", "text": "an id"}, CALLS, written_unix_s=START)
FOR_EPOCH_900 = timeout(1, expected=900)
DIAGNOSES: dict[str, tuple[list[dict], dict, str]] = {  # records; fields and words of the diagnosis
    "one missing rank": (
        [record(r, 4, timeout(3, reported_by=None if r else 1), CALLS) for r in (0, 1, 2)],
        {"kind": "timeout", "culprits": [3], "witnesses": [0, 1, 2], "without_record": [3]},
        "ranks 0, 1 and 2 waited for rank 3 at 'dispatch: ready' (epoch 8) since 2023-11-14 22:13:22.500 UTC; "
        "the last known call of rank 3 is 'plan: counts' (epoch 7); rank 3 left no record.",
    ),
    "the missing rank lives": (
        [record(0, 2, timeout(1), CALLS), record(1, 2, TOLD, LATE)],
        {"kind": "timeout", "culprits": [1], "witnesses": [0], "without_record": []}
        | {"last_call": {"phase": "plan: counts", "epoch": 7, "at_unix_s": START + 1.0, "own": True}},
        "and it came to 'close' too late, 2023-11-14 22:14:00.000 UTC.",
    ),
    "a rank that waited itself is not where it began": (  # rank 0 waited for 1, which waited for 2
        [record(0, 3, timeout(1, expected=9), CALLS), record(1, 3, timeout(2), CALLS)],
        {"culprits": [2], "witnesses": [1], "epoch": 8},
        "",
    ),
    "ranks that waited for each other": (
        [record(0, 2, timeout(1), CALLS), record(1, 2, timeout(0), CALLS)],
        {"culprits": [0, 1], "witnesses": [0, 1]},
        "ranks 0 and 1 waited for ranks 0 and 1 at 'dispatch: ready' (epoch 8)",
    ),
    "the latest record of a rank counts": (
        [OLDER, record(0, 2, timeout(1), CALLS)], {"kind": "timeout"}, ""
    ),
    "also if it comes first": ([record(0, 2, timeout(1), CALLS), OLDER], {"kind": "timeout"}, ""),
    "an error": ([OLDER], {"kind": "error"}, ""),
    "calls that nobody has noted": (  # a ring that has turned, or epochs that CUDA graphs have moved on
        [record(0, 2, FOR_EPOCH_900, [])],
        {"since_unix_s": None},
        "waited for rank 1 at 'dispatch: ready' (epoch 900); the last known call of rank 1 is (epoch 7)",
    ),
    "the last call of that phase": (
        [record(0, 2, FOR_EPOCH_900, CALLS)], {"since_unix_s": START + 2.5}, ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIAGNOSES)
def test_records_have_the_expected_diagnosis(name: str):
    records, fields, words = DIAGNOSES[name]
    diagnosis = diagnose(records)
    assert {field: getattr(diagnosis, field) for field in fields} == fields
    assert words in diagnosis.sentence


def test_a_file_that_is_no_record_is_refused(tmp_path: Path, capsys):
    good = record(0, 2, timeout(1), CALLS)
    error = good["error"]
    status = good["status"]
    without = {
        name: value for name, value in good.items() if name not in ("calls", "epoch_of_rank")
    }
    cases: dict = {  # by text of the error: content of the file, as bytes, text or JSON values
        "no JSON": "{",
        "is no JSON: 'utf-8' codec": b"\x00\xff\xfe",
        "no flight record": {**good, "format": "another"},
        "is no flight record": [1, 2],
        "fields ['calls', 'epoch_of_rank'] of": without,
        "is no JSON: maximum recursion depth": "[" * 100_000,
        "calls is '3'": {**good, "calls": 3},
        "calls is '[]'": {**good, "calls": [[]]},
        "fields ['text', 'type'] of": {**good, "error": {}},
        "error.reported_by is '0'": {**good, "error": {**error, "reported_by": "0"}},
        "rank is 2, of 2 ranks": {**good, "rank": 2},
        "rank of error is -1": {**good, "error": {**error, "rank": -1}},
        "epoch_of_rank is not a number of each": {**good, "num_ranks": 1 << 60},
        "written_unix_s is 'nan'": {**good, "written_unix_s": float("nan")},
        "status.phase is '\\udc00'": {**good, "status": {**status, "phase": "\udc00"}},
        f"more than {MAX_BYTES} bytes": " " * (MAX_BYTES + 1),
    }
    path = tmp_path / "record.json"
    for text, content in cases.items():
        text_of = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text_of if isinstance(text_of, bytes) else text_of.encode())
        with pytest.raises(ArgumentError) as caught:
            read_record(str(path))
        assert text in str(caught.value)
        assert str(path) in str(caught.value)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--read", str(path)])
        assert ended.value.code == 2
        assert str(path) in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"groups of \[2, 4\] ranks"):
        diagnose([good, record(1, 4, timeout(3), CALLS)])
    with pytest.raises(SystemExit):
        main(["doctor", "--read"])


def parts_of(value) -> list[tuple]:
    """Every part of a JSON value, as its container and its key."""
    parts = []
    for key in (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    ):
        parts += [(value, key), *parts_of(value[key])]
    return parts


def test_random_files_raise_no_traceback(tmp_path: Path, capsys):
    """Records are changed at random; the command prints a diagnosis, or one line that names the file."""
    generator = random.Random(0)
    numbers = (None, True, -1, 0, 1, 1 << 70, 1.5, float("nan"), float("inf"), 1e300)
    texts = ("", "\ud800", "x" * 1000, "PeerAborted", "PeerTimeout", "this rank gave up: x")
    replacements = [*numbers, *texts, [], {}, [[]] * 3, {"rank": 1}]
    sentences = 0
    for _ in range(150):
        records = [
            json.loads(json.dumps(record(rank, 2, timeout(1 - rank), CALLS))) for rank in range(2)
        ]
        for _ in range(generator.randrange(4)):
            holder, key = generator.choice(parts_of(records))
            holder[key] = generator.choice(replacements)
        paths = []
        for number, record_values in enumerate(records):
            data = json.dumps(record_values).encode()
            if generator.random() < 0.1:
                start = generator.randrange(len(data))
                data = generator.choice(
                    [
                        data[:start],
                        data[:start] + generator.randbytes(3) + data[start + 3 :],
                        b"",
                        b"\0",
                    ]
                )
            (tmp_path / f"{number}.json").write_bytes(data)
            paths.append(str(tmp_path / f"{number}.json"))
        try:
            status = main(["doctor", "--read", *paths])
        except SystemExit as ended:
            status = ended.code
        output = capsys.readouterr()
        if status == 0:
            output.out.encode()
            sentences += 1
        else:
            assert status == 2
            *_, last = output.err.strip().splitlines()
            assert last.startswith("symmoe: error: ")
            assert str(tmp_path) in last or "the records are of groups" in last
    assert 25 < sentences < 140


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1"}, False),
        ({"RANK": "4", "LOCAL_RANK": "0"}, True),  # the first of the second node
        ({"RANK": "1"}, False),
        ({"RANK": "0"}, True),
        ({}, True),
    ],
)
def test_doctor_runs_in_the_first_process_of_a_node(
    variables: dict, is_first: bool, monkeypatch: pytest.MonkeyPatch, capsys
):
    examined: list = []
    monkeypatch.setattr(
        command, "examine", lambda environment, self_test: examined.append(environment) or []
    )
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert len(examined) == bool("".join(capsys.readouterr())) == is_first
