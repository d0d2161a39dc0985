"""The network cards of a machine, and how far they are from its GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from symmoe.tools.doctor.findings import Finding

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")  # as nvidia-smi calls them, ever farther
_NEAR = DISTANCES[:3]  # without the way between two CPUs
_SYSTEM = Path("/sys/class")


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network card, or one port of it.

    Attributes:
        name: "mlx5_0" of an RDMA device, "eth0" of a network device.
        kind: "InfiniBand", "RoCE" or another fabric's name for RDMA devices; "" for others.
        rate: as the kernel says it, e.g. "400 Gb/sec (4X NDR)"; "" if it does not.
        is_up: whether the port has a link.
    """

    name: str
    kind: str
    rate: str
    is_up: bool

    def __str__(self) -> str:
        what = ", ".join(filter(None, [self.kind, self.rate, "" if self.is_up else "down"]))
        return f"{self.name} ({what})" if what else self.name


def read_nics(system: Path = _SYSTEM) -> list[Nic]:
    """RDMA devices, then network devices that are hardware and up."""
    return [*_rdma_devices(system / "infiniband"), *_network_devices(system / "net")]


def rate_of(device: str, system: Path = _SYSTEM) -> str:
    """What the kernel says of a network device; "" if it does not."""
    megabits = _text(system / "net" / device / "speed") if device else ""
    return f"{int(megabits) / 1000:g} Gb/s" if megabits.isdigit() else ""


def check_nics(nics: Sequence[Nic], distances: Mapping[int, Mapping[str, str]], gpus: Sequence[int]) -> list[Finding]:
    """Findings of one machine.

    Args:
        nics: its cards.
        distances: by index of the GPU and name of the card, one of DISTANCES; what is not there is not known.
        gpus: the GPUs that ranks use, as nvidia-smi numbers them.
    """
    found = []
    fabric = [nic for nic in nics if nic.kind]
    down = [nic.name for nic in fabric if not nic.is_up]
    if down:
        fix = f"ibstat {down[0]} says why; NCCL_IB_HCA=... names those that are up"
        found.append(Finding("note", "nics", f"no link at {', '.join(down)}", fix))
    usable = [nic.name for nic in fabric if nic.is_up]
    nearest = {gpu: _nearest(distances.get(gpu, {}), usable) for gpu in gpus}
    far = {gpu: way for gpu, (names, way) in nearest.items() if names and way not in _NEAR}
    if far:
        which = ", ".join(f"GPU {gpu} ({way})" for gpu, way in far.items())
        text = f"no NIC is near to {which}: what they send crosses the CPU's interconnect"
        found.append(Finding("note", "nics", text, "nvidia-smi topo -m; a NIC in a slot of the GPU's PCIe switch"))
    if fabric:
        text = ", ".join(map(str, fabric))
    elif gpus:
        devices = ", ".join(map(str, nics)) or "no network device"
        text = f"no RDMA NIC: what goes between nodes goes over TCP; {devices}"
        fix = "in a container: docker run --device=/dev/infiniband --cap-add=IPC_LOCK, if the host has NICs"
        return [*found, Finding("note", "nics", text, fix)]
    else:
        text = "no RDMA NIC; " + (", ".join(map(str, nics)) or "no network device that is hardware")
    ways = [f"GPU {gpu}: {' '.join(names)} ({way})" for gpu, (names, way) in nearest.items() if names]
    unknown = [f"GPU {gpu}" for gpu, (names, _) in nearest.items() if fabric and not names]
    if ways:
        text += f"; nearest to {', '.join(ways)}"
    if unknown:
        text += f"; nvidia-smi does not say which is near to {', '.join(unknown)}"
    return [*found, Finding("ok", "nics", text if gpus else f"no GPU; {text}")]


def _nearest(distances: Mapping[str, str], usable: Sequence[str]) -> tuple[list[str], str]:
    """The cards that are nearest to a GPU, and how near."""
    for way in DISTANCES:
        if names := [name for name in usable if distances.get(name) == way]:
            return names, way
    return [], ""


def _rdma_devices(folder: Path) -> Iterator[Nic]:
    for device in sorted(folder.glob("*")):
        ports = sorted((device / "ports").glob("*"))
        layers = {_text(port / "link_layer") for port in ports}
        states = [_text(port / "state") for port in ports]
        rates = [_text(port / "rate") for port in ports]
        kind = " ".join(sorted("RoCE" if layer == "Ethernet" else layer or "RDMA" for layer in layers)) or "RDMA"
        is_up = any("ACTIVE" in state for state in states)
        yield Nic(name=device.name, kind=kind, rate=rates[0] if rates else "", is_up=is_up)


def _network_devices(folder: Path) -> Iterator[Nic]:
    for device in sorted(folder.glob("*")):
        if (device / "device").exists() and _text(device / "operstate") == "up":
            yield Nic(name=device.name, kind="", rate=rate_of(device.name, folder.parent), is_up=True)


def _text(path: Path) -> str:
    """What the kernel says there, in one line; "" if it does not."""
    try:
        return re.sub(r"\s+", " ", path.read_text(encoding="utf-8")).strip()
    except OSError:
        return ""
