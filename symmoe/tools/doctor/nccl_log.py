"""What NCCL says that it uses between nodes. There is no call that tells: it is in its log, if it writes one."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

_CHANNEL = re.compile(r"Channel \d+/\d+ : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(?:send|receive)\] )?via (.+?)\s*$")
_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM"}


class NcclLog:
    """A file that NCCL writes to while it exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def transports(self) -> list[str]:
        """The ways between this process and others of which the log speaks, see :func:`parse_transports`."""
        try:
            return parse_transports(self._path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return []


@contextmanager
def nccl_log(environment: MutableMapping[str, str]) -> Iterator[NcclLog]:
    """Has NCCL write its log to a file, if it starts in here: it looks at the environment once. What the environment
    has said about the log holds again afterwards."""
    with tempfile.TemporaryDirectory(prefix="symmoe-doctor-") as folder:
        path = Path(folder, "nccl.log")
        wanted = _VARIABLES | {"NCCL_DEBUG_FILE": str(path)}
        before = {name: environment.get(name) for name in wanted}
        environment.update(wanted)
        try:
            yield NcclLog(path)
        finally:
            for name, value in before.items():
                if value is None:
                    del environment[name]
                else:
                    environment[name] = value


def parse_transports(text: str) -> list[str]:
    """Ways of channels in NCCL's log, each once: "NET/IB/GDRDMA", "NET/IB", "NET/Socket", "P2P/CUMEM", "SHM/direct". Of
    a network only its name and whether GPUs' memory is read by the NIC is kept."""
    found = set()
    for line in text.splitlines():
        if channel := _CHANNEL.search(line):
            parts = channel.group(3).split("/")
            is_direct = parts[0] == "NET" and any(part.startswith("GDRDMA") for part in parts[2:])
            found.add("/".join([*parts[:2], *["GDRDMA"] * is_direct]))
    return sorted(found)
