"""The GPUs as torch and nvidia-smi see them, and the connection of each pair of them."""

from __future__ import annotations

import itertools
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from symmoe.kernels import architectures
from symmoe.tools.doctor.findings import Said, about
from symmoe.tools.doctor.versions import release

_TIMEOUT_S = 10.0  # without persistence mode, the first call wakes every GPU
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.used", "compute_mode", "mig.mode.current")
_DRIVERS = {12: (525,), 13: (580,)}  # the oldest for each major version of CUDA
_REINSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_BUSY_BYTES = 2 << 30  # more than what contexts of a process or two take


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


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch numbers it, and as nvidia-smi does; None: it does not know it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    smi_index: int | None


class Pair(NamedTuple):
    """Two GPUs of torch, `first` < `second`: the word of `nvidia-smi topo -m` for their connection (NV18: 18 NVLinks;
    PIX to SYS: PCIe, ever farther; None: unknown), and whether each can address the other's memory."""

    first: int
    second: int
    connection: str | None
    can_access: bool


class Gpus(NamedTuple):
    """The GPUs that torch sees, all pairs of them, and why it sees none although it was built for CUDA."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    error: str = ""


def read_gpus(smi: Report) -> Gpus:
    """The GPUs that torch sees. Uses no GPU: it may allow only one process, which the self-test needs."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not torch.cuda.is_available():
                return Gpus(error=" ".join(str(each.message) for each in caught))
            indices = {_bare(device.uuid): device.index for device in smi.devices}
            gpus = tuple(_gpu(index, indices) for index in range(torch.cuda.device_count()))
            return Gpus(gpus=gpus, pairs=tuple(_pair(*two, smi) for two in itertools.combinations(gpus, 2)))
    except (RuntimeError, AssertionError) as error:  # a GPU that has fallen off the bus, a driver that was replaced
        return Gpus(error=str(error).split("\n", 1)[0])


@about("gpus")
def check_gpus(gpus: Gpus, smi: Report, *, torch_cuda: str | None, visible: str | None) -> Iterator[Said]:
    """What GPUs there are, and whether torch can use them.

    Args:
        torch_cuda: the CUDA that torch was built with; None for a CPU build.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if not gpus.gpus:
        yield from _check_none(gpus.error, smi, torch_cuda, visible)
        return
    if torch_cuda is None:
        text = f"torch sees {gpus.gpus[0].name}, but is not built for CUDA: symmoe runs on NVIDIA GPUs and on CPUs"
        yield "problem", text, _REINSTALL
        return
    yield from _check_driver(smi, torch_cuda)
    for gpu in gpus.gpus:
        major, minor = gpu.capability
        known = f"GPU {gpu.index} ({gpu.name}) has compute capability {major}.{minor}: "
        known += architectures.status(gpu.capability)
        if gpu.capability < architectures.LEAST:
            yield "problem", f"{known} below 8.0", "export CUDA_VISIBLE_DEVICES=... with GPUs of 8.0 (Ampere) or newer"
        elif not known.endswith("measured"):
            yield "note", f"{known} (docs/doctor.md); measured is 9.0 (Hopper)", ""
    used = {gpu.smi_index for gpu in gpus.gpus}
    for device in smi.devices:
        if device.index in used:
            yield from _check_device(device)
    names = Counter((gpu.name, gpu.capability, gpu.memory_bytes) for gpu in gpus.gpus)
    if len(names) > 1:
        text = "the GPUs are not alike: every call of all ranks takes as long as on the slowest"
        yield "note", text, "CUDA_VISIBLE_DEVICES=... with those that are"
    kinds = [
        f"{count} x {name} ({capability[0]}.{capability[1]}, {num_bytes / 2**30:.0f} GiB)"
        for (name, capability, num_bytes), count in names.items()
    ]
    driver = f", driver {smi.devices[0].driver}" if smi.devices else ", driver unknown: nvidia-smi does not answer"
    yield "ok", ", ".join(kinds) + driver, ""


@about("links")
def check_links(pairs: Sequence[Pair], links: Mapping[int, Links], *, visible: str | None) -> Iterator[Said]:
    """The connections between GPUs.

    Args:
        links: links of the GPUs that are used, by the index of nvidia-smi.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if blocked := [pair for pair in pairs if not pair.can_access]:
        text = f"no peer access between GPUs {_listed(blocked)}: a heap over them cannot be built"
        group = _largest_group([pair for pair in pairs if pair.can_access], visible)
        fix = "nvidia-smi topo -p2p r says why; on virtual machines and with an IOMMU, PCIe ACS has to be off (BIOS)"
        if group:
            fix = f"export CUDA_VISIBLE_DEVICES={group}, GPUs that reach each other; nvidia-smi topo -p2p r has all"
        yield "problem", text, fix
    slow = [pair for pair in pairs if pair.can_access and pair.connection and not _is_nvlink(pair)]
    if slow:
        text = f"GPUs {_listed(slow)} reach each other over PCIe, not NVLink: it works, several times slower"
        group = _largest_group([pair for pair in pairs if pair.can_access and _is_nvlink(pair)], visible)
        yield "note", text, f"export CUDA_VISIBLE_DEVICES={group}" if group else ""
    if down := {index: each for index, each in links.items() if each.num_down and each.num_up}:
        which = ", ".join(f"{each.num_down} of GPU {index}" for index, each in down.items())
        text = f"NVLinks that are down: {which} (as nvidia-smi numbers them)"
        fix = "nvidia-smi nvlink -e counts their errors; systemctl restart nvidia-fabricmanager, or reboot"
        yield "note", text, fix
    if fine := [pair for pair in pairs if pair.can_access and pair not in slow]:
        kinds = sorted({pair.connection or "unknown to nvidia-smi" for pair in fine})
        rates = sorted({f"{each.gbs:.0f}" for each in links.values() if each.num_up})
        rate = f"; {' or '.join(rates)} GB/s per GPU and direction" if rates else ""
        which = "each pair" if len(fine) == len(pairs) else f"GPUs {_listed(fine)}"
        yield "ok", f"peer access between {which}, by {', '.join(kinds)}{rate}", ""


def _check_none(error: str, smi: Report, torch_cuda: str | None, visible: str | None) -> Iterator[Said]:
    if not smi.devices:
        text = f"no NVIDIA GPU{f' ({error})' if error else ''}: ranks are processes on the CPU, to develop and to test"
        yield "note", text, "docker run --gpus all, if this container's host has GPUs"
        return
    listed = f"nvidia-smi lists {len(smi.devices)} x {smi.devices[0].name}, torch sees none"
    driver = list(_check_driver(smi, torch_cuda)) if torch_cuda else []
    if torch_cuda is None:
        yield "problem", f"{listed}: this torch is built for CPUs", _REINSTALL
    elif visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        text = f"{listed}: CUDA_VISIBLE_DEVICES={visible!r} hides them; ranks are processes on the CPU"
        yield "note", text, "unset CUDA_VISIBLE_DEVICES"
    elif driver:
        yield from driver
    else:
        fix = "python -c 'import torch; torch.cuda.init()' says more; reload the driver, or restart the container"
        if "not yet initialized" in error or "802" in error:
            fix = "systemctl start nvidia-fabricmanager"
        yield "problem", f"{listed}: {error or 'it does not say why'}", fix


def _check_driver(smi: Report, torch_cuda: str) -> Iterator[Said]:
    needed = _DRIVERS.get(release(torch_cuda)[0], (0,))
    if smi.devices and release(smi.devices[0].driver) < needed:
        text = f"driver {smi.devices[0].driver} is too old for torch's CUDA {torch_cuda}: {needed[0]} or newer"
        yield "problem", text, f"install driver {needed[0]}: apt-get install nvidia-driver-{needed[0]}"


def _check_device(device: Device) -> Iterator[Said]:
    label = f"GPU {device.index} (as nvidia-smi numbers it)"
    if device.compute_mode == "Prohibited":
        fix = f"as root: nvidia-smi -i {device.index} -c DEFAULT"
        yield "problem", f"{label} takes no processes: compute mode Prohibited", fix
    if device.has_mig:
        text = f"{label} is divided (MIG): its instances have no peer access"
        yield "note", text, f"as root, with the GPU idle: nvidia-smi -i {device.index} -mig 0"
    if device.used_bytes is not None and device.used_bytes > _BUSY_BYTES:
        text = f"{label} is in use: {device.used_bytes / 2**30:.0f} GiB are taken, and figures are worth less"
        yield "note", text, "nvidia-smi lists the processes: end them, or take other GPUs"


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


def _largest_group(pairs: Sequence[Pair], visible: str | None) -> str:
    """The largest set of GPUs of which each two are among the pairs, for CUDA_VISIBLE_DEVICES; "" without pairs."""
    linked = {frozenset((pair.first, pair.second)) for pair in pairs}
    indices = sorted(frozenset().union(*linked))
    for size in range(len(indices), 1, -1):
        for group in itertools.combinations(indices, size):
            if all(frozenset(two) in linked for two in itertools.combinations(group, 2)):
                return ",".join(visible.split(",")[index].strip() if visible else str(index) for index in group)
    return ""


def _listed(pairs: Sequence[Pair]) -> str:
    kinds = [f" ({pair.connection})" if pair.connection else "" for pair in pairs]
    return ", ".join(f"{pair.first}-{pair.second}{kind}" for pair, kind in zip(pairs, kinds, strict=True))


def _is_nvlink(pair: Pair) -> bool:
    return pair.connection is not None and pair.connection.startswith("NV")


def _gpu(index: int, smi_indices: Mapping[str, int]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        smi_index=smi_indices.get(_bare(str(properties.uuid))),
    )


def _pair(first: Gpu, second: Gpu, smi: Report) -> Pair:
    indices = [gpu.smi_index for gpu in (first, second) if gpu.smi_index is not None]
    both = (first.index, second.index)
    return Pair(
        first=first.index,
        second=second.index,
        connection=smi.topology.get((min(indices), max(indices))) if len(indices) == 2 else None,
        can_access=all(torch.cuda.can_device_access_peer(*order) for order in (both, both[::-1])),
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()
