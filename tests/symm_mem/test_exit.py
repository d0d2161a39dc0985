"""How processes end that close and destroy nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def ends(num_pairs: int, way: str, folder: Path) -> tuple[list[int], str]:
    """Exit statuses of pairs of ranks, and what they have printed to stderr."""
    command = [sys.executable, ROOT / "tests" / "support" / "many_ends.py", str(num_pairs), way, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=True)
    return ast.literal_eval(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a heap", "a layer"])
def test_programs_that_forget_everything_end_well(tmp_path: Path, way: str):
    codes, errors = ends(20, way, tmp_path)
    assert codes == [0] * len(codes), errors
    assert len(codes) >= 4  # 40, unless other processes are busy too


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python does not end other threads any more")
def test_without_a_heap_some_do_not(tmp_path: Path):
    """Else the test above would not see what they are for. What is at fault is in torch (symm_mem/bootstrap.py)."""
    codes, errors = ends(100, "without a heap", tmp_path)
    assert set(codes) <= {0, -6}
    assert -6 in codes
    assert "terminate called without an active exception" in errors
