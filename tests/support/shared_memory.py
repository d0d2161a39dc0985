"""Names in /dev/shm that processes have left."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm."""
    return frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset()


def left_in_shared_memory(before: frozenset[str], *, wait_s: float = 60.0) -> set[str]:
    """Names in /dev/shm that are new and that no process uses: other jobs of this machine have theirs mapped."""
    deadline = time.monotonic() + wait_s
    while created := shared_memory() - before:
        in_use = "".join(_maps_of_all_processes())
        unused = {name for name in created if f"/dev/shm/{name}" not in in_use}
        if not unused or time.monotonic() > deadline:
            return unused
        time.sleep(0.1)
    return set()


def _maps_of_all_processes() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield maps.read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is not ours
