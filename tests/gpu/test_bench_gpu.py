"""The benchmarks on GPUs: every suite at small sizes, captured steps included."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import bench
import pytest
import torch
from suites.grouped import CHOICES
from suites.layer import PRECISION

SIZES = [
    "--hidden",
    "256",
    "--ffn",
    "128",
    "--experts",
    "8",
    "--top-k",
    "2",
    "--tokens",
    "256,16",
    "--skew",
    "zipf",
]
SUITES = [
    "steps",
    "layer",
    "variants",
    "precision",
    "plan",
    "dispatch",
    "combine",
    "gemm",
    "overhead",
]


def measure(suites: list[str], num_ranks: int, path: Path) -> list[dict]:
    """The records of benchmarks/bench.py, in processes of its own."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [
        sys.executable,
        "-m",
        *torchrun,
        bench.__file__,
        *suites,
        *SIZES,
        "--json",
        str(path),
    ]
    python_path = os.pathsep.join(
        [str(Path(bench.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"PYTHONPATH": python_path}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_suite_measures(num_ranks: int, tmp_path: Path):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA GPUs, this machine has {torch.cuda.device_count()}")
    records = measure(SUITES, num_ranks, tmp_path / "out.json")
    by_case = {
        (record["suite"], record["variant"], record["direction"]): record for record in records
    }
    for direction in ("forward", "backward"):
        for variant in (
            "static",
            "exact",
            "serial",
            "graph",
            "serial graph",
            "gemms alone",
            "stock torch",
        ):
            assert by_case["layer", variant, direction]["ms_median"] > 0
        assert {variant for suite, variant, _ in by_case if suite == "precision"} >= set(PRECISION)
        assert by_case["variants", "static", direction]["peak_ordinary_bytes"] > 0
        assert (by_case["dispatch", "packed", direction]["copy_gbs"] is not None) == (num_ranks > 1)
    for variant in (
        "layer",
        "layer, static",
        "layer, graph",
        "experts",
        "experts, static",
        "experts, graph",
    ):
        step = by_case["steps", variant, "step"]
        assert step["launches"] > 0
        assert step["copies"] == 0
        assert (step["waits"] > 0) == (variant in ("layer", "experts"))  # for the plan
    for table in ("pack_weight_ptrs", "torch.tensor", "a copy each"):
        assert by_case["overhead", f"{table}, nvfp4 scales", "forward"]["error"] == 0
    for record in records:
        assert (record["ep"], record["gpu"]) == (num_ranks, torch.cuda.get_device_name())
        assert record["driver"]
        assert record["error"] < (0.15 if "float8" in record["variant"] else 0.03)


def test_modules_by_themselves_are_measured(tmp_path: Path):
    records = measure(["grouped"], 1, tmp_path / "out.json")
    by_variant = {(record["variant"], record["direction"]): record for record in records}
    for layer, choice in itertools.product(("GroupedLinear", "GroupedMLP"), CHOICES):
        for direction in ("forward", "backward"):
            record = by_variant[f"{layer}, {choice}", direction]
            assert record["launches"] > 0
            assert record["yardstick"] == "stock_tflops"
            assert record["weight_copy_bytes"] == 0 or "scattered" in choice
    skipped = by_variant["GroupedLinear, bf16", "forward"]["skipped"]
    for name in ("torch._scaled_grouped_mm, row-wise FP8", "Transformer Engine GroupedLinear"):
        assert ((name, "forward") in by_variant) != (name in skipped)
