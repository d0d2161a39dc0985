"""What nvidia-smi says, as values. Every call is bounded; a machine without it gives empty answers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_TIMEOUT_S = 10.0  # without persistence mode, the first call wakes every GPU
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.used", "compute_mode", "mig.mode.current")


@dataclass(frozen=True)
class Device:
    """A GPU as nvidia-smi numbers it, which is not always how torch does. None: nvidia-smi does not say."""

    index: int
    uuid: str
    name: str
    driver: str
    used_bytes: int | None
    compute_mode: str  # "Default", "Exclusive_Process" or "Prohibited"
    has_mig: bool  # the GPU is divided into instances


class Links(NamedTuple):
    """NVLinks of one GPU: gigabytes (1e9) per second and direction of all that are up; how many are up, and are not."""

    gbs: float
    num_up: int
    num_down: int


class Report(NamedTuple):
    """All answers of nvidia-smi: the machine's GPUs, whether torch sees them or not; by pair of indices, smaller first,
    how two GPUs are connected (NV18, PIX, PHB...); NVLinks by index."""

    devices: tuple[Device, ...] = ()
    topology: Mapping[tuple[int, int], str] = {}
    links: Mapping[int, Links] = {}


def ask() -> Report:
    """Starts nvidia-smi up to three times, at most 10 s each."""
    devices = parse_devices(_output_of(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    if not devices:
        return Report()
    return Report(devices, parse_topology(_output_of("topo", "-m")), parse_links(_output_of("nvlink", "-s")))


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices in the answer to a query of all fields, as CSV without a header and without units."""
    devices = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_FIELDS) and values[0].isdigit():  # not "No devices were found", or a warning
            index, uuid, name, driver, used, compute_mode, mig = values
            used_bytes = int(used) << 20 if used.isdigit() else None
            devices.append(Device(int(index), uuid, name, driver, used_bytes, compute_mode, mig == "Enabled"))
    return tuple(devices)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of GPUs in the matrix of `nvidia-smi topo -m`, whose header is underlined."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header, *rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])] or [[]]
    cells = [(row[0], column, word) for row in rows for column, word in zip(header, row[1:], strict=False)]
    pairs = {(int(a[3:]), int(b[3:])): word for a, b, word in cells if re.fullmatch(r"GPU\d+", b)}
    return {(a, b): word for (a, b), word in pairs.items() if a < b}


def parse_links(text: str) -> dict[int, Links]:
    """Links by GPU in the answer to `nvidia-smi nvlink -s`."""
    links = {}
    for block in re.split(r"^(?=GPU \d+:)", text, flags=re.MULTILINE):
        states = re.findall(r"Link \d+: (?:([\d.]+) GB/s|<inactive>)", block)
        if states and (gpu := re.match(r"GPU (\d+):", block)):
            up = [float(rate) for rate in states if rate]
            links[int(gpu.group(1))] = Links(sum(up), len(up), len(states) - len(up))
    return links


def _output_of(*arguments: str) -> str:
    """What nvidia-smi prints; "" if it is not there, fails or takes too long."""
    command = ("nvidia-smi", *arguments)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
