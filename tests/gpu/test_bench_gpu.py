"""`symmoe bench` on GPUs: every suite at small sizes, captured steps included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SIZES = ["--hidden", "256", "--ffn", "128", "--experts", "8", "--top-k", "2", "--tokens", "256,16", "--skew", "zipf"]
SUITES = ["steps", "layer", "variants", "plan", "dispatch", "combine", "gemm", "overhead"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_suite_measures(num_ranks: int, tmp_path: Path):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA GPUs, this machine has {torch.cuda.device_count()}")
    path = tmp_path / "out.json"
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    command = [sys.executable, "-m", *torchrun, "symmoe", "bench", *SUITES, *SIZES, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    records = json.loads(path.read_text())
    found = {(record["suite"], record["variant"], record["direction"]): record for record in records}
    for direction in ("forward", "backward"):
        for variant in ("static", "exact", "serial", "graph", "serial graph", "gemms alone", "stock torch"):
            assert found["layer", variant, direction]["ms_median"] > 0
        assert found["variants", "static", direction]["peak_ordinary_bytes"] > 0
        assert (found["dispatch", "packed", direction]["copy_gbs"] is not None) == (num_ranks > 1)
    for variant in ("layer", "layer, static", "layer, graph", "experts", "experts, static", "experts, graph"):
        step = found["steps", variant, "step"]
        assert step["launches"] > 0
        assert step["copies"] == 0
        assert (step["waits"] > 0) == (variant in ("layer", "experts"))  # for the plan
    for record in records:
        assert record["ep"] == num_ranks
        assert record["gpu"] == torch.cuda.get_device_name()
        assert record["driver"]
        assert record["error"] < 0.03
