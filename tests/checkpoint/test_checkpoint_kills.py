"""A fast slice of tests/reliability/checkpoint_kills.py, and proof that the suite notices what it is there for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[2]

# Each takes one promise away from symmoe.checkpoint, in the launcher and the ranks that it forks.
BROKEN = {
    # The old checkpoint of a step that is saved again goes before the new one is there.
    "kills": (
        "saving = folder.saving\n"
        "def broken(directory, step):\n"
        "    shutil.rmtree(directory / folder.name_of(step), ignore_errors=True)\n"
        "    return saving(directory, step)\n"
        "folder.saving = broken\n",
        ["--kills", "12", "--flips", "0"],
    ),
    "flips": ("folder.verify = lambda *arguments: None\n", ["--kills", "0", "--flips", "20"]),
}


def run(prelude: str, *arguments: str, record: Path) -> tuple[int, dict]:
    code = f"import shutil, sys\nfrom symmoe.checkpoint import folder\n{prelude}"
    code += "from reliability.checkpoint_kills import main\nsys.exit(main(sys.argv[1:]))\n"
    command = [sys.executable, "-c", code, *arguments, "--json", str(record)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert record.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(record.read_text())


@pytest.mark.slow
def test_kills_and_flips(tmp_path: Path):
    code, record = run("", "--kills", "5", "--flips", "20", record=tmp_path / "record.json")
    assert (code, record["failures"]) == (0, [])
    assert (record["kills"], record["flips"]) == (5, 20)
    assert record["kills_that_hit"] >= 3
    assert record["flips_outcomes"] == {"CheckpointError": 15, "newest state": 5}
    command = "python -m tests.reliability.checkpoint_kills --kills 5 --flips 20 --json "
    assert (record["suite"], record["command"]) == ("checkpoint_kills", command + str(tmp_path / "record.json"))
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["commit"])


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_the_suite_fails_where_a_promise_is_broken(tmp_path: Path, what: str):
    code, record = run(*BROKEN[what][:1], *BROKEN[what][1], record=tmp_path / "record.json")
    assert code == 1
    problems = " ".join(problem for failure in record["failures"] for problem in failure["problems"])
    assert ("no complete checkpoint" if what == "kills" else "another state") in problems
