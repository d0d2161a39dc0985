"""benchmarks/trainer.py on CPU processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("transformers", minversion="5.17")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trainer.py"
SIZES = "--tiny --layers 2 --context 32 --sequences 2 --steps 2 --warm-up 1 --repetitions 2".split()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ways_learn_the_same_and_are_timed(tmp_path: Path, num_ranks: int):
    path = tmp_path / "out.json"
    done = run(
        *TORCHRUN * (num_ranks > 1), str(SCRIPT), *SIZES, "--ways", "symmoe,grouped_mm,eager", "--json", str(path)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(path.read_text())["results"]
    assert [result["way"] for result in results] == ["symmoe", "grouped_mm", "eager"]
    losses = [loss for result in results for loss in result["losses"]]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-3)
    for result in results:
        assert result["ranks"] == num_ranks
        assert len(result["tokens_per_s"]) == 2
        assert min(result["tokens_per_s"]) > 0
