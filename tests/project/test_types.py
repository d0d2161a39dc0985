"""Annotations: a user's type checker reads those of an installed symmoe. `make lint` runs mypy --strict on the package
itself."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from example_runs import output_of
from limits import HANG_S
from programs import printed_by

pytest.importorskip("mypy", reason="checks types: pip install '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parents[1] / "support" / "typed_user.py"

WRONG = """import torch
import symmoe
symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, order='ranks')
def f(heap: symmoe.SymmetricHeap, x: torch.Tensor, plan: symmoe.dispatch.Plan) -> torch.Tensor:
    y: torch.Tensor = symmoe.MoELayer(symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2), heap)(x)
    rows, row_probs, handle = symmoe.dispatch_tokens(x, plan)
    return y + rows + row_probs
symmoe.no_such_name
"""


@pytest.mark.slow
def test_mypy_reports_wrong_calls_of_a_users_program(tmp_path: Path) -> None:
    python, installed = _environment_with_symmoe(tmp_path)
    program, wrong = shutil.copy(PROGRAM, tmp_path), tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    assert _mypy(tmp_path, python, program) == (0, "Success: no issues found in 1 source file\n")
    status, printed = _mypy(tmp_path, python, wrong)
    assert status == 1
    errors = [
        (int(line), code)
        for line, code in re.findall(r"wrong\.py:(\d+): error: .* \[([\w-]+)\]", printed)
    ]
    assert errors == [(3, "arg-type"), (5, "assignment"), (7, "operator"), (8, "attr-defined")]
    (installed / "py.typed").unlink()
    status, printed = _mypy(tmp_path, python, program)
    assert status == 1
    assert "missing library stubs or py.typed marker" in printed
    num_asserted = PROGRAM.read_text(encoding="utf-8").count("assert_type(")
    # Of None and of classes that mypy does not know, it says nothing.
    assert printed.count("[assert-type]") >= num_asserted // 2


def test_the_program_runs() -> None:
    assert output_of(str(PROGRAM), num_ranks=None) == "[5, 16] [5, 16]\n[64, 16] [5, 16]\n"


def _environment_with_symmoe(folder: Path) -> tuple[Path, Path]:
    """The Python of an environment with symmoe installed and with the other packages of these tests; and the path of
    symmoe."""
    environment = folder / "environment"
    printed_by("-m", "venv", "--without-pip", environment)
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(environment)}))
    installed = packages / "symmoe"
    shutil.copytree(ROOT / "symmoe", installed, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment / "bin" / "python", installed


def _mypy(folder: Path, python: Path, program: Path | str) -> tuple[int, str]:
    """Status and output of mypy --strict on a user's program."""
    alone = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")
    }
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--untyped-calls-exclude=torch",
        "--python-executable",
        python,
    ]
    process = subprocess.run(
        [*command, "--cache-dir", folder / "cache", program],
        cwd=folder,
        env=alone,  # or another symmoe may be found, with its marker
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert not process.stderr
    return process.returncode, process.stdout
