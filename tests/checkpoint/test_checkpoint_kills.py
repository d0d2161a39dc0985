"""A fast slice of tests/reliability/checkpoint_kills.py."""

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


@pytest.mark.slow
def test_kills_and_flips(tmp_path: Path):
    file, words = tmp_path / "record.json", ["--kills", "5", "--flips", "20", "--json"]
    command = [sys.executable, "-m", "tests.reliability.checkpoint_kills", *words, str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["failures"] == []
    assert (record["kills"], record["flips"]) == (5, 20)
    assert record["kills_that_hit"] >= 3
    assert record["flips_outcomes"] == {"CheckpointError": 15, "newest state": 5}
    command = "python -m tests.reliability.checkpoint_kills --kills 5 --flips 20 --json "
    assert (record["suite"], record["command"]) == ("checkpoint_kills", command + str(file))
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["commit"])
