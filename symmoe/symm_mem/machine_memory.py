"""How much memory the machine has left for arenas."""

from __future__ import annotations

import warnings
from pathlib import Path


def warn_if_too_large(num_bytes: int, num_ranks: int) -> None:
    """Warns if arenas in shared memory may not fit. Pages are taken at the first write: an arena that is too large is
    made without an error, and a rank is killed in the middle of training."""
    free_bytes = available_bytes()
    if free_bytes is not None and num_bytes * num_ranks > free_bytes:
        warnings.warn(
            f"num_bytes ({num_bytes}) times {num_ranks} ranks on this machine is more than the memory that is free for "
            f"them ({free_bytes} bytes): a rank that fills its arena may be killed",
            stacklevel=5,
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes of this one's control group can still get; None if unknown.

    Args:
        root: root of the file system, for tests.
    """
    machine = _free_of_machine(root)
    return min([*([] if machine is None else [machine]), *_free_of_control_groups(root)], default=None)


def _free_of_machine(root: Path) -> int | None:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _free_of_control_groups(root: Path) -> list[int]:
    """Free bytes of this process's group and its ancestors (version 2). A container sees its group as the root."""
    top, found = root / "sys/fs/cgroup", []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            group = top / line[3:].strip().lstrip("/")
            for folder in (group, *group.parents):
                limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
                if limit is not None and used is not None:
                    found.append(max(0, limit - used))
                if folder == top:
                    break
    return found


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
