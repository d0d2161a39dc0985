"""The GPUs that torch and nvidia-smi see, and the connection of each pair."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from symmoe.kernels import architectures
from symmoe.tools.doctor.findings import Finding, Row, findings_about, first, first_line
from symmoe.tools.doctor.versions import output_of, release

_TIMEOUT_S = 10.0  # without persistence mode, the first call wakes every GPU
_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.used",
    "compute_mode",
    "mig.mode.current",
)
_DRIVERS = {12: (525,), 13: (580,)}  # the oldest for each major version of CUDA
_REINSTALL = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)
_BUSY_MIB = 2 << 10  # more than the contexts of one or two processes
Device = Mapping[str, str]  # nvidia-smi's data of a GPU: a value for each of _FIELDS


class Links(NamedTuple):
    """The NVLinks of one GPU: gigabytes (1e9) per second and direction of all links that are up together; the numbers
    of links that are up and down."""

    gbs: float
    num_up: int
    num_down: int


class Report(NamedTuple):
    """The answers of nvidia-smi: the machine's GPUs, by index; the connection of two GPUs (NV18, PIX, PHB...) by pair
    of indices, smaller first; NVLinks by index. The indices may differ from torch's."""

    devices: Mapping[int, Device] = {}
    topology: Mapping[tuple[int, int], str] = {}
    links: Mapping[int, Links] = {}

    def index_of(self, gpu: Any) -> int | None:
        """The index of a GPU of torch; None if nvidia-smi does not list it."""
        uuid = str(gpu.uuid).removeprefix("GPU-").lower()
        return next(
            (
                index
                for index, device in self.devices.items()
                if device["uuid"].removeprefix("GPU-").lower() == uuid
            ),
            None,
        )


class Pair(NamedTuple):
    """Two GPUs of torch, `first` < `second`: the word of `nvidia-smi topo -m` for their connection (NV18: 18 NVLinks;
    PIX to SYS: PCIe, by distance; None: unknown), and whether each can address the other's memory."""

    first: int
    second: int
    connection: str | None
    can_access: bool


class Gpus(NamedTuple):
    """The properties of torch's GPUs, all pairs of GPUs, and the error if a CUDA build of torch sees no GPU."""

    gpus: tuple[Any, ...] = ()
    pairs: tuple[Pair, ...] = ()
    error: str = ""


def read_gpus(smi: Report) -> Gpus:
    """torch's GPUs. Creates no CUDA context: a GPU may allow only one process, which the self-test needs."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not torch.cuda.is_available():
                return Gpus(error=" ".join(str(warning.message) for warning in caught))
            gpus = [
                torch.cuda.get_device_properties(index)
                for index in range(torch.cuda.device_count())
            ]
            pairs, indices = [], [smi.index_of(gpu) for gpu in gpus]
            for pair in itertools.combinations(range(len(gpus)), 2):
                in_smi = sorted(
                    index for position in pair if (index := indices[position]) is not None
                )
                connection = smi.topology.get((in_smi[0], in_smi[1])) if len(in_smi) == 2 else None
                access = (torch.cuda.can_device_access_peer(*order) for order in (pair, pair[::-1]))
                pairs.append(Pair(*pair, connection, all(access)))
            return Gpus(tuple(gpus), tuple(pairs))
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # e.g. a GPU off the bus, a replaced driver
        return Gpus(error=first_line(error))


def check_gpus(
    gpus: Gpus, smi: Report, *, torch_cuda: str | None, visible: str | None
) -> list[Finding]:
    """The GPUs, and whether torch can use them. torch_cuda: torch's CUDA version, None for a CPU build; visible:
    CUDA_VISIBLE_DEVICES, None if not set."""
    version = next((device["driver_version"] for device in smi.devices.values()), "")
    needed = _DRIVERS.get(release(torch_cuda)[0], (0,)) if torch_cuda else (0,)
    driver: Row = (
        version and release(version) < needed,
        "problem",
        f"driver {version} is too old for torch's CUDA {torch_cuda}: {needed[0]} or newer",
        f"install driver {needed[0]}: apt-get install nvidia-driver-{needed[0]}",
    )
    if not gpus.gpus:
        return findings_about("gpus", *_check_none(gpus.error, smi, torch_cuda, visible, driver))
    if torch_cuda is None:
        return findings_about(
            "gpus",
            (
                True,
                "problem",
                f"torch sees {gpus.gpus[0].name}, but is not built for CUDA: symmoe runs on NVIDIA GPUs and on CPUs",
                _REINSTALL,
            ),
        )
    used = {smi.index_of(gpu) for gpu in gpus.gpus}
    names = Counter((gpu.name, gpu.major, gpu.minor, gpu.total_memory) for gpu in gpus.gpus)
    kinds = [
        f"{n} x {name} ({a}.{b}, {size / 2**30:.0f} GiB)" for (name, a, b, size), n in names.items()
    ]
    return findings_about(
        "gpus",
        driver,
        *(row for index, gpu in enumerate(gpus.gpus) for row in _check_kind(index, gpu)),
        *(
            row
            for i, device in smi.devices.items()
            if i in used
            for row in _check_device(i, device)
        ),
        (
            len(names) > 1,
            "note",
            "the GPUs are not alike: every call of all ranks takes as long as on the slowest",
            "CUDA_VISIBLE_DEVICES=... with those that are",
        ),
        (
            True,
            "ok",
            f"{', '.join(kinds)}, driver {version or 'unknown: nvidia-smi does not answer'}",
            "",
        ),
    )


def _check_kind(index: int, gpu: Any) -> list[Row]:
    capability = gpu.major, gpu.minor
    status = architectures.status(capability)
    label = f"GPU {index} ({gpu.name}) has compute capability {gpu.major}.{gpu.minor}: {status}"
    return first(
        (
            capability < architectures.MIN_CAPABILITY,
            "problem",
            f"{label} below 8.0",
            "export CUDA_VISIBLE_DEVICES=... with GPUs of 8.0 (Ampere) or newer",
        ),
        (
            status != "measured",
            "note",
            f"{label} (docs/doctor.md); measured is 9.0 (Hopper)",
            "",
        ),
    )


def _check_device(index: int, device: Device) -> list[Row]:
    label = f"GPU {index} (as nvidia-smi numbers it)"
    used_mib = int(device["memory.used"]) if device["memory.used"].isdigit() else 0
    return [
        (
            device["compute_mode"] == "Prohibited",
            "problem",
            f"{label} takes no processes: compute mode Prohibited",
            f"as root: nvidia-smi -i {index} -c DEFAULT",
        ),
        (
            device["mig.mode.current"] == "Enabled",
            "note",
            f"{label} is divided (MIG): its instances have no peer access",
            f"as root, with the GPU idle: nvidia-smi -i {index} -mig 0",
        ),
        (
            used_mib > _BUSY_MIB,
            "note",
            f"{label} is in use: {used_mib / 1024:.0f} GiB are taken, and figures are worth less",
            "nvidia-smi lists the processes: end them, or take other GPUs",
        ),
    ]


def _check_none(
    error: str, smi: Report, torch_cuda: str | None, visible: str | None, driver: Row
) -> list[Row]:
    name = next((device["name"] for device in smi.devices.values()), "")
    listed = f"nvidia-smi lists {len(smi.devices)} x {name}, torch sees none"
    return first(
        (
            not smi.devices,
            "note",
            f"no NVIDIA GPU{f' ({error})' if error else ''}: ranks are processes on the CPU, to develop and to test",
            "docker run --gpus all, if this container's host has GPUs",
        ),
        (
            torch_cuda is None,
            "problem",
            f"{listed}: this torch is built for CPUs",
            _REINSTALL,
        ),
        (
            visible is not None and visible.split(",")[0].strip() in ("", "-1"),
            "note",
            f"{listed}: CUDA_VISIBLE_DEVICES={visible!r} hides them; ranks are processes on the CPU",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        driver,
        (
            "not yet initialized" in error or "802" in error,
            "problem",
            f"{listed}: {error}",
            "systemctl start nvidia-fabricmanager",
        ),
        (
            True,
            "problem",
            f"{listed}: {error or 'it does not say why'}",
            "python -c 'import torch; torch.cuda.init()' says more; reload the driver, or restart the container",
        ),
    )


def check_links(
    pairs: Sequence[Pair], links: Mapping[int, Links], *, visible: str | None
) -> list[Finding]:
    """The connections between GPUs; links of the used GPUs, by nvidia-smi's index."""
    blocked = [pair for pair in pairs if not pair.can_access]
    reached = [pair for pair in pairs if pair.can_access]
    fast = [pair for pair in reached if pair.connection and pair.connection.startswith("NV")]
    slow = [pair for pair in reached if pair.connection and pair not in fast]
    fine = [pair for pair in reached if pair not in slow]
    down = [
        f"{link.num_down} of GPU {index}"
        for index, link in links.items()
        if link.num_down and link.num_up
    ]
    group = _largest_group(reached, visible)
    reach = (
        f"export CUDA_VISIBLE_DEVICES={group}, GPUs that reach each other; nvidia-smi topo -p2p r has all"
        if group
        else "nvidia-smi topo -p2p r says why; on virtual machines and with an IOMMU, PCIe ACS has to be off (BIOS)"
    )
    fastest = _largest_group(fast, visible)
    which = "each pair" if len(fine) == len(pairs) else f"GPUs {_listed(fine)}"
    kinds = sorted({pair.connection or "unknown to nvidia-smi" for pair in fine})
    rates = sorted({f"{link.gbs:.0f}" for link in links.values() if link.num_up})
    rate = f"; {' or '.join(rates)} GB/s per GPU and direction" if rates else ""
    return findings_about(
        "links",
        (
            blocked,
            "problem",
            f"no peer access between GPUs {_listed(blocked)}: a heap over them cannot be built",
            reach,
        ),
        (
            slow,
            "note",
            f"GPUs {_listed(slow)} reach each other over PCIe, not NVLink: it works, several times slower",
            f"export CUDA_VISIBLE_DEVICES={fastest}" if fastest else "",
        ),
        (
            down,
            "note",
            f"NVLinks that are down: {', '.join(down)} (as nvidia-smi numbers them)",
            "nvidia-smi nvlink -e counts their errors; systemctl restart nvidia-fabricmanager, or reboot",
        ),
        (fine, "ok", f"peer access between {which}, by {', '.join(kinds)}{rate}", ""),
    )


def ask() -> Report:
    """The answers of nvidia-smi, from up to three calls of at most 10 s each."""

    def answer(*arguments: str) -> str:
        return output_of("nvidia-smi", *arguments, timeout_s=_TIMEOUT_S)

    devices = parse_devices(
        answer(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    )
    if not devices:
        return Report()
    return Report(
        devices, parse_topology(answer("topo", "-m")), parse_links(answer("nvlink", "-s"))
    )


def parse_devices(text: str) -> dict[int, Device]:
    """The devices in the answer to a query of all fields, as CSV without a header and without units."""
    lines = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    devices = [
        dict(zip(_FIELDS, values, strict=True)) for values in lines if len(values) == len(_FIELDS)
    ]
    return {
        int(device["index"]): device for device in devices if device["index"].isdigit()
    }  # and no warnings


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of GPUs in the matrix of `nvidia-smi topo -m`, whose header is underlined."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header, *rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])] or [[]]
    cells = [
        (row[0], column, word)
        for row in rows
        for column, word in zip(header, row[1:], strict=False)
    ]
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


def _largest_group(pairs: Sequence[Pair], visible: str | None) -> str:
    """The largest set of GPUs that are all paired with each other, for CUDA_VISIBLE_DEVICES; "" without pairs."""
    linked = {(pair.first, pair.second) for pair in pairs}
    indices = sorted({index for two in linked for index in two})
    best = next(
        (
            group
            for size in range(len(indices), 1, -1)
            for group in itertools.combinations(indices, size)
            if linked.issuperset(itertools.combinations(group, 2))
        ),
        (),
    )
    return ",".join(visible.split(",")[index].strip() if visible else str(index) for index in best)


def _listed(pairs: Sequence[Pair]) -> str:
    return ", ".join(
        f"{a}-{b}{f' ({connection})' if connection else ''}" for a, b, connection, _ in pairs
    )
