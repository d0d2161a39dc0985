"""benchmarks/convergence.py: its statistics, the started runs, and the record if some runs fail."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import convergence
import pytest
from programs import printed_by

SCRIPT = Path(convergence.__file__)
# In the place of the example: metrics that are known.
EXAMPLE = """
import json, pathlib, sys
options = dict(zip(sys.argv, sys.argv[1:]))
out, seed, way = pathlib.Path(options["--out"]), int(options["--seed"]), options.get("--precision", "bf16")
print("begins", flush=True)
if (way, seed) == ("nvfp4", 3):
    sys.exit("out of everything")
bits = {"bf16": 1.0, "mxfp8": 1.01 + 0.02 * seed, "nvfp4": 0.99}[way] * (2 + seed)
with open(out / "metrics.jsonl", "w") as file:
    for step in (1, 2, 3):
        record = {"step": step, "train_bits_per_byte": bits}
        print(json.dumps(record | ({"heldout_bits_per_byte": bits + 3 - step} if step != 2 else {})), file=file)
(out / "checkpoints").mkdir(exist_ok=True)
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict]]:
    """Runs the script with a stand-in for the example, on one rank each. Returns the exit code and the record."""
    example = tmp_path / "example.py"
    example.write_text(EXAMPLE)
    monkeypatch.setattr(convergence, "EXAMPLE", example)

    def main(*options: str, out: Path = tmp_path / "runs") -> tuple[int, dict]:
        file = tmp_path / "record.json"
        command = ["convergence.py", "--ranks=1", "--out", str(out), "--json", str(file), *options]
        monkeypatch.setattr("sys.argv", command)
        return convergence.main(), json.loads(file.read_text())

    return main


def steps(*bits: float) -> list[dict]:
    return [
        {"step": 10 * i, "train_bits_per_byte": b, "heldout_bits_per_byte": b}
        for i, b in enumerate(bits, 1)
    ]


def test_differences_are_taken_between_pairs():
    """Against values by hand. Seeds differ by a factor of two: without pairs no difference of one percent is
    significant."""
    curves = {
        "bf16": {0: steps(5.0, 2.0), 1: steps(5.0, 4.0), 2: steps(5.0, 7.0)},
        "mxfp8": {0: steps(6.0, 2.02), 1: steps(6.0, 4.12)},
        "nvfp4": {5: steps(6.0, 2.5)},
    }
    results = convergence.results_of(curves)
    assert results["mxfp8"]["heldout_bits_per_byte"] == {
        "steps": [10, 20],
        "seeds": {0: [6.0, 2.02], 1: [6.0, 4.12]},
    }
    assert results["mxfp8"]["final_bits_per_byte"]["mean"] == pytest.approx(3.07)
    assert results["mxfp8"]["final_bits_per_byte"]["standard_error"] == pytest.approx(1.05)
    assert results["mxfp8"]["more_than_bf16"] == pytest.approx(0.02)  # of 0.01 and 0.03
    assert results["mxfp8"]["more_than_bf16_standard_error"] == pytest.approx(0.01)
    assert results["bf16"]["final_bits_per_byte"]["standard_error"] == pytest.approx(
        math.sqrt(19 / 9)
    )
    assert (
        results["bf16"]["more_than_bf16"] == results["bf16"]["more_than_bf16_standard_error"] == 0.0
    )
    assert (
        results["nvfp4"]["more_than_bf16"]
        is results["nvfp4"]["more_than_bf16_standard_error"]
        is None
    )
    assert [convergence.is_within(results[recipe]) for recipe in ("bf16", "mxfp8", "nvfp4")] == [
        True,
        False,
        False,
    ]
    assert "+2.00 +- 1.00 % against bf16 (at most 1)" in convergence.line_of(
        "mxfp8", results["mxfp8"]
    )
    results = convergence.results_of({"bf16": {0: steps(2.0)}, "mxfp8": {0: steps(math.nan)}})
    assert not convergence.is_within(results["mxfp8"])


@pytest.mark.slow
def test_failed_runs_are_reported_and_equal_saved_runs_are_reused(compare, tmp_path: Path):
    options = ("--ways", "nvfp4", "--jobs", "2", "--plot", str(tmp_path / "curves.png"))
    assert compare(*options, "--seeds", "2")[0] == 0
    code, record = compare(*options, "--seeds", "2,3")
    assert code == 1
    assert [(run["way"], run["seed"]) for run in record["kept"]] == [("bf16", 2), ("nvfp4", 2)]
    (failed,) = record["failed"]
    assert (failed["way"], failed["seed"]) == ("nvfp4", 3)
    assert failed["log"].startswith("exit code 1\nbegins\nout of everything")
    assert [*record["results"]["nvfp4"]["final_bits_per_byte"]["seeds"]] == ["2"]
    assert [*record["results"]["bf16"]["final_bits_per_byte"]["seeds"]] == ["2", "3"]
    assert record["results"]["nvfp4"]["more_than_bf16"] == pytest.approx(-0.01)  # of the one pair
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not compare(*options, "--seeds", "2", "--steps", "7")[1]["kept"]  # other runs


@pytest.mark.slow
def test_two_runs_of_the_example(tmp_path: Path):
    """The command with torchrun and the example."""
    out, file = tmp_path / "runs", tmp_path / "record.json"
    arguments = ["--preset=tiny", "--ranks=1", "--steps=1", "--ways", "mxfp8", "--jobs=2"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    printed_by(SCRIPT, *arguments, f"--out={out}", f"--json={file}", env=environment)
    final = {
        recipe: runs["final_bits_per_byte"]["mean"]
        for recipe, runs in json.loads(file.read_text())["results"].items()
    }
    assert [*final] == ["bf16", "mxfp8"]
    assert all(7 < bits < 8 for bits in final.values())  # after one step
    assert final["bf16"] != final["mxfp8"]  # so it is not the same run twice
    assert {path.name for path in (out / "mxfp8-0").iterdir()} >= {
        "metrics.jsonl",
        "log.txt",
        "run.json",
    }
