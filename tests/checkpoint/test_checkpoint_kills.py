"""A fast slice of tests/reliability/checkpoint_kills.py, and proof that the suite notices what it is there for."""

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
# Each takes one promise away from symmoe.checkpoint; how many kills and flips show it, and as what.
BROKEN = {
    "old checkpoint of a step deleted before the new one is there": (
        "folder.saving = lambda directory, step, saving=folder.saving: "
        "(shutil.rmtree(directory / folder.name_of(step), ignore_errors=True), saving(directory, step))[1]",
        (12, 0, "no complete checkpoint"),
    ),
    "nothing verified": ("folder.verify = lambda *arguments: None", (0, 20, "another state")),
}


def run(file: Path, kills: int, flips: int, change: str = "") -> dict:
    """The suite's record, whose failures are those of its exit code, with a change of symmoe.checkpoint."""
    code = f"import shutil, sys\nfrom symmoe.checkpoint import folder\n{change}\n"
    code += "from tests.reliability.checkpoint_kills import main\nsys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        f"--kills={kills}",
        f"--flips={flips}",
        "--json",
        str(file),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert file.exists(), done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert done.returncode == bool(record["failures"])
    return record


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_noticed(tmp_path: Path, what: str):
    change, (kills, flips, text) = BROKEN[what]
    assert text in str(run(tmp_path / "record.json", kills, flips, change)["failures"])


@pytest.mark.slow
def test_kills_and_flips(tmp_path: Path):
    file = tmp_path / "record.json"
    record = run(file, 5, 20)
    assert (record["failures"], (record["kills"], record["flips"])) == ([], (5, 20))
    assert record["kills_that_hit"] >= 3
    assert record["flips_outcomes"] == {"CheckpointError": 15, "newest state": 5}
    command = "python -m tests.reliability.checkpoint_kills --kills=5 --flips=20 --json "
    assert (record["suite"], record["command"]) == ("checkpoint_kills", command + str(file))
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["commit"])
