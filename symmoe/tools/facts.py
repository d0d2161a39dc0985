"""What this machine's programs and packages say of themselves."""

from __future__ import annotations

import subprocess
from importlib import metadata


def output_of(*command: str, timeout_s: float = 30.0) -> str:
    """What a command prints; "" if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=timeout_s
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def version_of(distribution: str) -> str | None:
    """What is installed; None if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
