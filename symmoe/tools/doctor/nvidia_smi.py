"""What nvidia-smi says, as values. Every call is bounded; a machine without it gives empty answers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

_TIMEOUT_S = 10.0  # without persistence mode, the first call wakes every GPU
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.used", "compute_mode", "mig.mode.current")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the topology's header is underlined
_NIC = re.compile(r"^\s*(NIC\d+): (\S+)\s*$", re.MULTILINE)
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
_LINK = re.compile(r"Link \d+: (?:([\d.]+) GB/s|<inactive>)")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as nvidia-smi numbers it, which is not always how torch does.

    Attributes:
        used_bytes: memory in use; None if nvidia-smi does not say.
        compute_mode: "Default", "Exclusive_Process" or "Prohibited".
        has_mig: whether the GPU is divided into instances.
    """

    index: int
    uuid: str
    name: str
    driver: str
    used_bytes: int | None
    compute_mode: str
    has_mig: bool


@dataclass(frozen=True, kw_only=True)
class Links:
    """NVLinks of one GPU.

    Attributes:
        gbs: gigabytes (1e9) per second and direction of all that are up.
        num_up, num_down: how many links are up, and how many are not.
    """

    gbs: float
    num_up: int
    num_down: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """All answers of nvidia-smi.

    Attributes:
        devices: the GPUs of the machine, whether torch sees them or not.
        topology: by pair of indices, smaller first, how two GPUs are connected: NV18, PIX, PHB...
        nics: by index and name of an RDMA NIC, how the GPU is connected to it: PIX, PXB, PHB, NODE, SYS, ever farther.
        links: NVLinks by index.
    """

    devices: tuple[Device, ...] = ()
    topology: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nics: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    links: Mapping[int, Links] = field(default_factory=dict)


def ask() -> Report:
    """Starts nvidia-smi up to three times, at most 10 s each."""
    devices = parse_devices(_output_of(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    if not devices:
        return Report()
    topology, links = _output_of("topo", "-m"), _output_of("nvlink", "-s")
    return Report(
        devices=devices, topology=parse_topology(topology), nics=parse_nics(topology), links=parse_links(links)
    )


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices in the answer to a query of all fields, as CSV without a header and without units."""
    devices = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS) or not values[0].isdigit():
            continue  # "No devices were found", or a warning
        index, uuid, name, driver, used, compute_mode, mig = values
        device = Device(
            index=int(index),
            uuid=uuid,
            name=name,
            driver=driver,
            used_bytes=int(used) << 20 if used.isdigit() else None,
            compute_mode=compute_mode,
            has_mig=mig == "Enabled",
        )
        devices.append(device)
    return tuple(devices)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of GPUs in the matrix of `nvidia-smi topo -m`."""
    pairs = {(row, _gpu_of(column)): connection for (row, column), connection in _matrix(text).items()}
    return {(row, column): connection for (row, column), connection in pairs.items() if row < column}


def parse_nics(text: str) -> dict[int, dict[str, str]]:
    """NICs of each GPU in the matrix of `nvidia-smi topo -m`, by the names that the legend below it gives them."""
    names = dict(_NIC.findall(text))
    nics: dict[int, dict[str, str]] = {}
    for (row, column), connection in _matrix(text).items():
        if _gpu_of(column) < 0 and connection in _PCIE:
            nics.setdefault(row, {})[names.get(column, column)] = connection
    return nics


def parse_links(text: str) -> dict[int, Links]:
    """Links by GPU in the answer to `nvidia-smi nvlink -s`."""
    rates: dict[int, list[float | None]] = {}
    index = -1
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            index = int(gpu.group(1))
        elif (link := _LINK.search(line)) and index >= 0:
            rates.setdefault(index, []).append(float(link.group(1)) if link.group(1) else None)
    links = {}
    for index, each in rates.items():
        up = [rate for rate in each if rate is not None]
        links[index] = Links(gbs=sum(up), num_up=len(up), num_down=len(each) - len(up))
    return links


def _matrix(text: str) -> dict[tuple[int, str], str]:
    """The rows of GPUs in the matrix of `nvidia-smi topo -m`: by the GPU's index and the name of the column."""
    cells: dict[tuple[int, str], str] = {}
    columns: list[str] = []
    for line in _STYLE.sub("", text).splitlines():
        words = line.split()
        if not words or _gpu_of(words[0]) < 0:
            continue
        if not columns:
            columns = words
            continue
        cells |= {(_gpu_of(words[0]), column): word for column, word in zip(columns, words[1:], strict=False)}
    return cells


def _gpu_of(name: str) -> int:
    """The number in the name of a GPU; -1: it is none."""
    return int(name[3:]) if re.fullmatch(r"GPU\d+", name) else -1


def _output_of(*arguments: str) -> str:
    """What nvidia-smi prints; "" if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
