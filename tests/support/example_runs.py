"""Runs of the examples, on ranks that fork or as their users start them, and their modules."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from forked import run_forked
from limits import HANG_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def process_of(name: str, *arguments: str, num_ranks: int | None) -> subprocess.CompletedProcess[str]:
    """Runs an example, or the script of a path, on CPUs."""
    return run_forked(EXAMPLES / name, *arguments, num_ranks=num_ranks, environment=_environment())


def _environment() -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def output_of(name: str, *arguments: str, num_ranks: int | None) -> str:
    """What a run prints; it must end well."""
    return _printed_by(process_of(name, *arguments, num_ranks=num_ranks))


def launch(name: str, *arguments: str, num_ranks: int) -> str:
    """The same by torchrun. --standalone: no two take one port."""
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    options = {"capture_output": True, "text": True, "timeout": HANG_S, "env": _environment()}
    return _printed_by(subprocess.run(command, check=False, **options))


def printed_by_one(script: Path, *arguments: str) -> str:
    """What a program prints without a launcher; it must end well."""
    return output_of(str(script), *arguments, num_ranks=None)


def _printed_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_of(name: str) -> ModuleType:
    """An example's module, which is not run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
