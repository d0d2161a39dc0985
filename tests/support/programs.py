"""Programs in processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from limits import HANG_S


def printed_by(*arguments: str | Path, **options: Any) -> str:
    """The output of Python with these arguments; it has to succeed. options: of subprocess.run."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, **options
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
