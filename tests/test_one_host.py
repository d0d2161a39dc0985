"""benchmarks/one_host.py: steps end in time, the next one follows whatever comes, and the record says what has come."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import bench
import one_host
import pytest
from limits import HANG_S, PROMPT_S

from symmoe import cli
from symmoe.tools.bench.command import shapes_of

GOOD = "import json, sys; json.dump({'answer': 42}, open(sys.argv[1], 'w'))"
HANGS = """
import os, sys, time
if child := os.fork():
    open(sys.argv[1], "w").write(str(child))
time.sleep(3600)
"""
ONE_PASSES = "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip()\n"
NONE_RUNS = "import pytest\ndef test_one(): pytest.skip()\n"
ONE_FAILS = "def test_one(): assert 0\ndef test_two(): pass\n"


def report_in(folder: Path) -> one_host.Report:
    return one_host.Report(folder, {"gpu": "NVIDIA H200", "date": "today"}, "cuda", 8)


def record_in(folder: Path) -> dict:
    return json.loads((folder / "one-host-h200-ep8.json").read_text())


@pytest.mark.slow
def test_every_step_has_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps = {
        "good": one_host.Step(("-c", GOOD, "OUT"), HANG_S, "json"),
        "records": one_host.Step(("-c", GOOD, "OUT"), HANG_S, "bench"),
        "prints": one_host.Step(("-c", "print('[1]')"), HANG_S, "stdout"),
        "fails": one_host.Step(("-c", f"{GOOD}; print('why'); sys.exit(3)", "OUT"), HANG_S, "json"),
        "writes nothing": one_host.Step(("-c", "pass", "OUT"), HANG_S, "json"),
        "absent": one_host.Step(("-c", GOOD, "OUT"), HANG_S, "json", needs="no_such_module"),
    }
    for name, text in {"one passes": ONE_PASSES, "none runs": NONE_RUNS, "one fails": ONE_FAILS}.items():
        file = tmp_path / f"test_{name.replace(' ', '_')}.py"
        file.write_text(text)
        steps[name] = one_host.Step(("-m", "pytest", str(file), "--junitxml", "OUT"), HANG_S, "pytest")
    assert not one_host.run_all(steps, report_in(tmp_path), HANG_S)
    record = record_in(tmp_path)
    assert (record["gpu"], record["date"], record["ranks"]) == ("NVIDIA H200", "today", 8)
    found = record["steps"]
    assert {name: (entry["result"], entry["reason"]) for name, entry in found.items()} == {
        "good": ("passed", ""),
        "records": ("passed", ""),
        "prints": ("passed", ""),
        "fails": ("failed", "ended with 3"),
        "writes nothing": ("failed", "no record"),
        "absent": ("skipped", "no_such_module is not installed"),
        "one passes": ("passed", ""),
        "none runs": ("failed", "no test has run"),
        "one fails": ("failed", "ended with 1"),
    }
    assert found["good"]["found"] == found["fails"]["found"] == {"answer": 42}
    assert json.loads((tmp_path / found["records"]["file"]).read_text()) == {"answer": 42}
    assert found["prints"]["found"] == [1]
    assert found["one passes"]["found"] == {"passed": 1, "failed": [], "skipped": 1}
    (failed,) = found["one fails"]["found"].pop("failed")
    assert failed.endswith("test_one_fails::test_one")
    assert found["one fails"]["found"] == {"passed": 1, "skipped": 0}
    assert "why" in (tmp_path / "one-host-h200-ep8.log").read_text()
    assert (
        "4 passed; 4 failed (fails, writes nothing, none runs, one fails); 1 skipped (absent)"
        in capsys.readouterr().out
    )
    assert one_host.run_all({"good": steps["good"], "absent": steps["absent"]}, report_in(tmp_path), HANG_S)


def test_what_hangs_is_ended_with_its_children(tmp_path: Path):
    child = tmp_path / "child"
    steps = {
        "hangs": one_host.Step(("-c", HANGS, str(child)), 5.0, "json"),  # on a busy machine it takes a while to start
        "late": one_host.Step(("-c", GOOD, "OUT"), HANG_S, "json"),
    }
    start = time.monotonic()
    assert not one_host.run_all(steps, report_in(tmp_path), one_host.LEAST_S + 4.0)  # less than 5 s are left for it
    assert time.monotonic() - start < PROMPT_S
    found = record_in(tmp_path)["steps"]
    assert (found["hangs"]["result"], found["hangs"]["reason"]) == ("failed", "ran past 5 s")
    assert (found["late"]["result"], found["late"]["reason"]) == ("not run", "no time was left")
    deadline = time.monotonic() + PROMPT_S
    while is_running(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_steps_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        one_host.main([str(tmp_path), "--steps", "layer,laier"])
    assert ended.value.code == 2
    assert "steps (laier) must be of doctor, oracle" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_steps_of_eight_ranks(device: str, monkeypatch: pytest.MonkeyPatch):
    steps = one_host.steps_of(8, device, 5000)
    assert {"doctor", "oracle", "invariance", "groups", "nodes-2x4", "nodes-4x2", "faults", "soak"} < set(steps)
    assert not {"groups", "nodes-4x2"} & set(one_host.steps_of(2, device, 5000))
    parsed = []
    monkeypatch.setattr("symmoe.tools.bench.command.run", lambda options, suites: parsed.append(options) or 0)
    for step in steps.values():
        if "symmoe" in step.command and "bench" in step.command:
            assert cli.main(list(step.command[step.command.index("bench") :])) == 0
        elif "benchmarks/bench.py" in step.command:
            assert bench.main(list(step.command[step.command.index("benchmarks/bench.py") + 1 :])) == 0
    assert [options.ranks_per_node for options in parsed] == [None, None, None, 4, 2]
    shapes = [{shape.name for shape in shapes_of(options)} for options in parsed]
    if device == "cuda":
        four = {"qwen3-30b", "qwen3-235b", "mixtral-8x7b", "deepseek-like"}
        assert shapes == [four, four, four, {"qwen3-30b"}, {"qwen3-30b"}]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "device"), [(8, "cuda"), (4, "cuda"), (4, "cpu"), (2, "cpu")])
def test_the_tests_that_are_chosen(num_ranks: int, device: str):
    """Each has some of every file, and all of them are of this number of ranks; invariance on GPUs of any number."""
    for name, step in one_host.steps_of(num_ranks, device, 1).items():
        if step.writes != "pytest":
            continue
        command = [sys.executable, *step.command[:-2], "--collect-only"]
        shown = subprocess.run(command, cwd=one_host.ROOT, capture_output=True, text=True, timeout=HANG_S).stdout
        found = [line for line in shown.splitlines() if "::" in line]
        assert {line.partition("::")[0] for line in found} == {w for w in step.command if w.startswith("tests/")}
        if name != "invariance" or device == "cpu":
            assert all(f"[{num_ranks}" in line for line in found), found


@pytest.mark.slow
@pytest.mark.timeout(4 * HANG_S)  # minutes, ten of them on a busy machine; each step is bounded by itself
def test_a_rehearsal_on_two_cpu_ranks(tmp_path: Path):
    """All steps, with small sizes; their records are there and say where they were made."""
    command = [sys.executable, "benchmarks/one_host.py", str(tmp_path), "--ranks", "2", "--seconds", str(3 * HANG_S)]
    done = subprocess.run(command, cwd=one_host.ROOT, capture_output=True, text=True, timeout=3 * HANG_S + PROMPT_S)
    record = json.loads((tmp_path / "one-host-cpu-ep2.json").read_text())
    steps = record["steps"]
    assert done.returncode == 0, (done.stdout, {name: step["reason"] for name, step in steps.items()})
    assert list(steps) == list(one_host.steps_of(2, "cpu", 1))
    skipped = {name for name, step in steps.items() if step["result"] == "skipped"}
    assert skipped <= {"deepep", "megatron"}
    assert {record[key] is not None for key in ("gpu", "torch", "commit", "date", "command")} == {True}
    assert record["ranks"] == 2
    for name in ("steps", "layer", "trips", "nodes-2x1"):
        rows = json.loads((tmp_path / steps[name]["file"]).read_text())
        assert {row["ep"] for row in rows} == {2}
        assert all(row["ms_median"] > 0 and row["date"] and row["command"] for row in rows)
    assert {row["suite"] for row in json.loads((tmp_path / "trips-cpu-ep2.json").read_text())} == {
        "dispatch",
        "combine",
    }
    assert steps["doctor"]["found"]["level"] in ("ok", "note")
    assert steps["oracle"]["found"]["passed"] > 2
    assert steps["invariance"]["found"]["passed"] > 5
    kinds = steps["faults"]["found"]["kinds"]
    assert {kind: kinds[kind]["cases"] for kind in kinds} == {"kill": 2, "stop": 2, "raise": 2}
    assert steps["soak"]["found"]["cases_run"] == 200
    if "megatron" not in skipped:
        assert steps["megatron"]["found"]["expert_parallel"] == 2
