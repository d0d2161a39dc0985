"""benchmarks/convergence.py: its statistics, who runs when, and what is written if runs fail or time is up."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import convergence
import pytest
from limits import HANG_S

SCRIPT = Path(convergence.__file__)
# In the place of the example: metrics that are known, the time it took, and the end that its options ask for.
EXAMPLE = """
import json, os, pathlib, sys, time
start, options = time.time(), dict(zip(sys.argv, sys.argv[1:]))
out, seed, way = pathlib.Path(options["--out"]), int(options["--seed"]), options.get("--precision", "bf16")
print("begins", flush=True)
time.sleep(0.3 if seed < 90 else 3600.0)
if (way, seed) == ("nvfp4", 3):
    sys.exit("out of everything")
bits = {"bf16": 1.0, "mxfp8": 1.01 + 0.02 * seed, "nvfp4": 0.99}[way] * (2 + seed)
with open(out / "metrics.jsonl", "w") as file:
    for step in (1, 2, 3):
        record = {"step": step, "train_bits_per_byte": bits}
        print(json.dumps(record | ({"heldout_bits_per_byte": bits + 3 - step} if step != 2 else {})), file=file)
(out / "checkpoints").mkdir(exist_ok=True)
with open(out.parent / "times.jsonl", "a") as file:
    print(json.dumps([start, time.time()]), file=file)
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, dict]]]:
    """Runs the script, with that in the example's place; returns its exit code and its record."""
    example = tmp_path / "example.py"
    example.write_text(EXAMPLE)
    monkeypatch.setattr(
        convergence.Run,
        "command",
        property(lambda run: [sys.executable, str(example), *run.chosen, "--out", str(run.out)]),
    )
    handler = signal.getsignal(signal.SIGTERM)

    def main(*options: str, keep: Path = tmp_path / "runs") -> tuple[int, dict]:
        file = tmp_path / "record.json"
        monkeypatch.setattr("sys.argv", ["convergence.py", "--keep", str(keep), "--json", str(file), *options])
        return convergence.main(), json.loads(file.read_text())

    yield main
    signal.signal(signal.SIGTERM, handler)


def steps(*bits: float) -> list[dict]:
    return [{"step": 10 * i, "train_bits_per_byte": b, "heldout_bits_per_byte": b} for i, b in enumerate(bits, 1)]


def test_differences_are_those_of_pairs():
    """By hand. Seeds differ by a factor of two: without pairs, nothing could be said about one percent."""
    curves = {
        "bf16": {0: steps(5.0, 2.0), 1: steps(5.0, 4.0), 2: steps(5.0, 7.0)},
        "mxfp8": {0: steps(6.0, 2.02), 1: steps(6.0, 4.12)},
        "nvfp4": {5: steps(6.0, 2.5)},
    }
    results = convergence.results_of(curves)
    assert results["mxfp8"]["heldout_bits_per_byte"] == {"steps": [10, 20], "seeds": {0: [6.0, 2.02], 1: [6.0, 4.12]}}
    assert results["mxfp8"]["final_bits_per_byte"]["mean"] == pytest.approx(3.07)
    assert results["mxfp8"]["final_bits_per_byte"]["standard_error"] == pytest.approx(1.05)
    assert results["mxfp8"]["more_than_bf16"] == pytest.approx(0.02)  # of 0.01 and 0.03
    assert results["mxfp8"]["more_than_bf16_standard_error"] == pytest.approx(0.01)
    assert results["bf16"]["final_bits_per_byte"]["standard_error"] == pytest.approx(math.sqrt(19 / 9))
    assert results["bf16"]["more_than_bf16"] == results["bf16"]["more_than_bf16_standard_error"] == 0.0
    assert results["nvfp4"]["more_than_bf16"] is results["nvfp4"]["more_than_bf16_standard_error"] is None
    assert [convergence.is_within(results[way]) for way in ("bf16", "mxfp8", "nvfp4")] == [True, False, False]
    assert "+2.00 +- 1.00 % against bf16 (at most 1)" in convergence.line_of("mxfp8", results["mxfp8"])


def test_nan_is_not_within():
    results = convergence.results_of({"bf16": {0: steps(2.0)}, "mxfp8": {0: steps(math.nan)}})
    assert not convergence.is_within(results["mxfp8"])


def most_at_once(times: Path) -> int:
    spans = [json.loads(line) for line in times.read_text().splitlines()]
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


def most_started(output: str) -> int:
    """Runs that the script had under way at one time, by what it has printed."""
    changes = [("--preset" in line) - ("done after" in line) for line in output.splitlines()]
    return max(accumulate(changes))


def test_side_by_side_gives_the_results_of_one_after_the_other(
    compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = {}
    for jobs in (1, 3):
        folder = tmp_path / f"jobs-{jobs}"
        code, record = compare("--ways", "mxfp8", "--seeds", "0,1", f"--jobs={jobs}", keep=folder)
        assert code == 1  # 1 % and 3 % more than bf16
        assert most_started(capsys.readouterr().out) == jobs
        assert most_at_once(folder / "times.jsonl") <= jobs
        assert record["failed"] == record["missing"] == record["kept"] == []
        assert not list(folder.glob("*/checkpoints"))
        found[jobs] = record["results"]
    assert found[1] == found[3]
    assert found[1]["mxfp8"]["heldout_bits_per_byte"]["seeds"]["0"] == pytest.approx([4.02, 2.02])
    assert found[1]["mxfp8"]["more_than_bf16"] == pytest.approx(0.02)
    assert found[1]["mxfp8"]["more_than_bf16_standard_error"] == pytest.approx(0.01)


def test_a_run_that_fails_is_reported_and_the_others_go_on(compare, capsys: pytest.CaptureFixture[str]):
    code, record = compare("--ways", "nvfp4", "--seeds", "2,3,4", "--jobs", "2")
    assert code == 1
    (failed,) = record["failed"]
    assert (failed["way"], failed["seed"], failed["problem"]) == ("nvfp4", 3, "exit code 1")
    assert failed["log"] == "begins\nout of everything"
    assert [*record["results"]["nvfp4"]["final_bits_per_byte"]["seeds"]] == ["2", "4"]
    assert [*record["results"]["bf16"]["final_bits_per_byte"]["seeds"]] == ["2", "3", "4"]
    assert record["results"]["nvfp4"]["more_than_bf16"] == pytest.approx(-0.01)  # of the two pairs
    assert record["missing"] == []
    shown = capsys.readouterr().out
    assert "nvfp4, seed 3: exit code 1\nbegins\nout of everything" in shown
    assert "failed: nvfp4, seed 3" in shown


def test_kept_runs_are_taken_if_they_are_the_same(compare, tmp_path: Path):
    options = ("--ways", "nvfp4", "--plot", str(tmp_path / "curves.png"))
    assert compare(*options, "--seeds", "0")[0] == 0
    code, record = compare(*options, "--seeds", "0,1", "--seconds", "0")
    assert code == 1
    assert [(run["way"], run["seed"]) for run in record["kept"]] == [("bf16", 0), ("nvfp4", 0)]
    assert record["missing"] == [{"way": "bf16", "seed": 1}, {"way": "nvfp4", "seed": 1}]
    assert record["results"]["nvfp4"]["more_than_bf16"] == pytest.approx(-0.01)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    _, record = compare(*options, "--seeds", "0", "--steps", "7", "--seconds", "0")  # other runs
    assert not record["kept"]
    assert len(record["missing"]) == 2
    assert not record["results"]


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_stopped(compare):
    code, record = compare("--ways", "bf16", "--seeds", "0,90", "--jobs", "2", "--timeout-s", "15")
    assert code == 1
    assert [(run["seed"], run["problem"]) for run in record["failed"]] == [(90, "stopped after 15 s")]
    assert [*record["results"]["bf16"]["final_bits_per_byte"]["seeds"]] == ["0"]


def processes_of(folder: Path) -> list[str]:
    """Those that have the folder in their command."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text(errors="replace")
        except OSError:
            continue
        if str(folder) in command and int(file.parent.name) != os.getpid():
            found.append(command)
    return found


@pytest.mark.slow
def test_two_runs_of_the_example(tmp_path: Path):
    """The command itself, with torchrun and the example; then it is stopped in the middle of others."""
    keep, file = tmp_path / "runs", tmp_path / "record.json"
    command = [sys.executable, str(SCRIPT), "--preset=tiny", "--ranks=1", "--steps=1", "--ways", "mxfp8"]
    command += ["--jobs=2", f"--keep={keep}", f"--json={file}"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    record = json.loads(file.read_text())
    assert not record["failed"], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    final = {way: result["final_bits_per_byte"]["mean"] for way, result in record["results"].items()}
    assert [*final] == ["bf16", "mxfp8"]
    assert all(7 < bits < 8 for bits in final.values())  # after one step
    assert final["bf16"] != final["mxfp8"]  # so it is not the same run twice
    assert {path.name for path in (keep / "mxfp8-0").iterdir()} >= {"metrics.jsonl", "log.txt", "run.json"}

    others = subprocess.Popen([*command, "--seeds=0,1"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        while not processes_of(keep / "mxfp8-1"):
            assert others.poll() is None
            time.sleep(0.1)
        others.terminate()
        output, _ = others.communicate(timeout=HANG_S)
    finally:
        others.kill()
    assert "interrupted" in output
    assert "missing: mxfp8, seed 1" in output
    assert others.returncode == 1
    assert processes_of(keep) == []
    record = json.loads(file.read_text())
    assert len(record["kept"]) == len(record["missing"]) == 2
    assert record["results"]["bf16"]["final_bits_per_byte"]["mean"] == final["bf16"]
