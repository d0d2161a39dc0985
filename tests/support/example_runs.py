"""Runs of the examples on ranks that fork, and their modules."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from forked import run_forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def process_of(name: str, *arguments: str, num_ranks: int | None) -> subprocess.CompletedProcess[str]:
    """Runs an example, or the script of a path, on CPUs."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return run_forked(EXAMPLES / name, *arguments, num_ranks=num_ranks, environment=environment)


def output_of(name: str, *arguments: str, num_ranks: int | None) -> str:
    """What a run prints; it must end well."""
    done = process_of(name, *arguments, num_ranks=num_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_of(name: str) -> ModuleType:
    """An example's module, which is not run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
