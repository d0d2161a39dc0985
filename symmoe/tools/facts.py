"""Facts from this machine's programs and packages."""

from __future__ import annotations

import subprocess
from importlib import metadata


def output_of(*command: str, timeout_s: float = 30.0) -> str:
    """A command's output; "" if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=timeout_s
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
