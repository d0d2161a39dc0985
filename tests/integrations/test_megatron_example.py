"""The Megatron example, run as its users run it: torchrun, two CPU processes."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
from megatron_shim import EXAMPLES

pytest.importorskip("megatron.core")

STEPS = 12


def losses_of(*arguments: str) -> list[float]:
    """The losses that a run of a few steps prints."""
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(EXAMPLES / "megatron_gpt.py"), f"--steps={STEPS}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^step (\d+) loss (\S+) tokens/s (\d+)$", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == list(range(1, STEPS + 1))
    assert all(int(speed) > 0 for _, _, speed in lines)
    assert re.search(r"^median tokens/s \d+$", done.stdout, flags=re.MULTILINE)
    return [float(loss) for _, loss, _ in lines]


def test_learns_and_agrees_with_megatrons_layer_on_other_layouts():
    ours, theirs = losses_of(), losses_of("--dispatcher=alltoall")
    replicated = losses_of("--expert-parallel=1", "--experts=megatron", "--order=slot")
    assert ours[0] == pytest.approx(math.log(256), rel=0.02)
    assert ours[-1] < ours[0] - 0.5
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert replicated == pytest.approx(theirs, rel=1e-3)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
