"""examples/finetune_transformers.py, run as its users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("transformers", minversion="5.17")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_transformers.py"


def run(out: Path, *arguments: str, num_ranks: int) -> str:
    """What the example prints on CPUs; it must succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\d+\.\d+)  [\d,]+ tokens/s", text)}


@pytest.mark.slow
def test_learns_saves_and_goes_on(tmp_path: Path):
    text = run(tmp_path / "first", "--steps", "20", num_ranks=2)
    first = losses(text)
    assert set(first) == {1, 10, 20}
    assert 5.4 < first[1] < 5.9  # ln 256 is 5.55, and the auxiliary loss
    assert first[20] < 4.2
    ours, theirs = re.search(r"held-out loss (\S+); of .* in plain transformers (\S+)", text).groups()
    assert float(theirs) == pytest.approx(float(ours), abs=2e-4)

    index = json.loads((tmp_path / "first" / "model.safetensors.index.json").read_text())
    assert "model.layers.3.mlp.experts.15.down_proj.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) >= 3
    assert {path.name for path in tmp_path.iterdir()} == {"first"}

    # A process without torchrun goes on where two ended.
    second = losses(run(tmp_path / "second", "--steps", "1", f"--checkpoint={tmp_path / 'first'}", num_ranks=1))
    assert second[1] < 4.2


def test_refuses_a_folder_with_something_in_it(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 2
    assert "is not empty" in done.stderr
