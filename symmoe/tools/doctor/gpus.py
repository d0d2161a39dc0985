"""The GPUs, and the connection of each pair of them."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from symmoe.kernels import architectures
from symmoe.tools.doctor.findings import Finding
from symmoe.tools.doctor.nvidia_smi import Device, Links, Report
from symmoe.tools.doctor.versions import cuda_major, release

_DRIVERS = {12: (525,), 13: (580,)}  # the oldest for each major version of CUDA
_REINSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_BUSY_BYTES = 2 << 30  # more than what contexts of a process or two take


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


def check_gpus(gpus: Gpus, smi: Report, *, torch_cuda: str | None, visible: str | None) -> list[Finding]:
    """What GPUs there are, and whether torch can use them.

    Args:
        torch_cuda: the CUDA that torch was built with; None for a CPU build.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if not gpus.gpus:
        return _check_none(gpus.error, smi, torch_cuda, visible)
    if torch_cuda is None:
        text = f"torch sees {gpus.gpus[0].name}, but is not built for CUDA: symmoe runs on NVIDIA GPUs and on CPUs"
        return [Finding("problem", "gpus", text, _REINSTALL)]
    found = _check_driver(smi, torch_cuda)
    for gpu in gpus.gpus:
        found += _check_gpu(gpu)
    used = {gpu.smi_index for gpu in gpus.gpus}
    for device in smi.devices:
        if device.index in used:
            found += _check_device(device)
    names = Counter((gpu.name, gpu.capability, gpu.memory_bytes) for gpu in gpus.gpus)
    if len(names) > 1:
        text = "the GPUs are not alike: every call of all ranks takes as long as on the slowest"
        found.append(Finding("note", "gpus", text, "CUDA_VISIBLE_DEVICES=... with those that are"))
    kinds = [
        f"{count} x {name} ({capability[0]}.{capability[1]}, {num_bytes / 2**30:.0f} GiB)"
        for (name, capability, num_bytes), count in names.items()
    ]
    driver = f", driver {smi.devices[0].driver}" if smi.devices else ", driver unknown: nvidia-smi does not answer"
    return [*found, Finding("ok", "gpus", ", ".join(kinds) + driver)]


def check_links(pairs: Sequence[Pair], links: Mapping[int, Links], *, visible: str | None) -> list[Finding]:
    """The connections between GPUs.

    Args:
        links: links of the GPUs that are used, by the index of nvidia-smi.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    found = []
    blocked = [pair for pair in pairs if not pair.can_access]
    if blocked:
        text = f"no peer access between GPUs {_listed(blocked)}: a heap over them cannot be built"
        found.append(Finding("problem", "links", text, _fix_access(pairs, visible)))
    slow = [pair for pair in pairs if pair.can_access and pair.connection and not _is_nvlink(pair)]
    if slow:
        text = f"GPUs {_listed(slow)} reach each other over PCIe, not NVLink: it works, several times slower"
        group = _largest_group([pair for pair in pairs if pair.can_access and _is_nvlink(pair)], visible)
        found.append(Finding("note", "links", text, f"export CUDA_VISIBLE_DEVICES={group}" if group else ""))
    down = {index: each for index, each in links.items() if each.num_down and each.num_up}
    if down:
        which = ", ".join(f"{each.num_down} of GPU {index}" for index, each in down.items())
        text = f"NVLinks that are down: {which} (as nvidia-smi numbers them)"
        fix = "nvidia-smi nvlink -e counts their errors; systemctl restart nvidia-fabricmanager, or reboot"
        found.append(Finding("note", "links", text, fix))
    fine = [pair for pair in pairs if pair.can_access and pair not in slow]
    if fine:
        kinds = sorted({pair.connection or "unknown to nvidia-smi" for pair in fine})
        rates = sorted({f"{each.gbs:.0f}" for each in links.values() if each.num_up})
        rate = f"; {' or '.join(rates)} GB/s per GPU and direction" if rates else ""
        which = "each pair" if len(fine) == len(pairs) else f"GPUs {_listed(fine)}"
        found.append(Finding("ok", "links", f"peer access between {which}, by {', '.join(kinds)}{rate}"))
    return found


def _check_none(error: str, smi: Report, torch_cuda: str | None, visible: str | None) -> list[Finding]:
    if not smi.devices:
        reason = f" ({error})" if error else ""
        text = f"no NVIDIA GPU{reason}: ranks are processes on the CPU, to develop and to test"
        return [Finding("note", "gpus", text, "docker run --gpus all, if this container's host has GPUs")]
    listed = f"nvidia-smi lists {len(smi.devices)} x {smi.devices[0].name}, torch sees none"
    if torch_cuda is None:
        return [Finding("problem", "gpus", f"{listed}: this torch is built for CPUs", _REINSTALL)]
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        text = f"{listed}: CUDA_VISIBLE_DEVICES={visible!r} hides them; ranks are processes on the CPU"
        return [Finding("note", "gpus", text, "unset CUDA_VISIBLE_DEVICES")]
    if driver := _check_driver(smi, torch_cuda):
        return driver
    fix = "python -c 'import torch; torch.cuda.init()' says more; reload the driver, or restart the container"
    if "not yet initialized" in error or "802" in error:
        fix = "systemctl start nvidia-fabricmanager"
    return [Finding("problem", "gpus", f"{listed}: {error or 'it does not say why'}", fix)]


def _check_driver(smi: Report, torch_cuda: str | None) -> list[Finding]:
    needed = _DRIVERS.get(cuda_major(torch_cuda), (0,))
    if not smi.devices or release(smi.devices[0].driver) >= needed:
        return []
    text = f"driver {smi.devices[0].driver} is too old for torch's CUDA {torch_cuda}: {needed[0]} or newer"
    return [Finding("problem", "gpus", text, f"install driver {needed[0]}: apt-get install nvidia-driver-{needed[0]}")]


def _check_gpu(gpu: Gpu) -> list[Finding]:
    label = f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    known = f"{label}: {architectures.status(gpu.capability)}"
    if gpu.capability < architectures.LEAST:
        fix = "export CUDA_VISIBLE_DEVICES=... with GPUs of 8.0 (Ampere) or newer"
        return [Finding("problem", "gpus", f"{known} below 8.0", fix)]
    if not known.endswith("measured"):
        return [Finding("note", "gpus", f"{known} (docs/doctor.md); measured is 9.0 (Hopper)")]
    return []


def _check_device(device: Device) -> list[Finding]:
    found, label = [], f"GPU {device.index} (as nvidia-smi numbers it)"
    if device.compute_mode == "Prohibited":
        fix = f"as root: nvidia-smi -i {device.index} -c DEFAULT"
        found.append(Finding("problem", "gpus", f"{label} takes no processes: compute mode Prohibited", fix))
    if device.has_mig:
        text = f"{label} is divided (MIG): its instances have no peer access"
        found.append(Finding("note", "gpus", text, f"as root, with the GPU idle: nvidia-smi -i {device.index} -mig 0"))
    if device.used_bytes is not None and device.used_bytes > _BUSY_BYTES:
        text = f"{label} is in use: {device.used_bytes / 2**30:.0f} GiB are taken, and figures are worth less"
        found.append(Finding("note", "gpus", text, "nvidia-smi lists the processes: end them, or take other GPUs"))
    return found


def _fix_access(pairs: Sequence[Pair], visible: str | None) -> str:
    group = _largest_group([pair for pair in pairs if pair.can_access], visible)
    if group:
        return f"export CUDA_VISIBLE_DEVICES={group}, GPUs that reach each other; nvidia-smi topo -p2p r has all"
    return "nvidia-smi topo -p2p r says why; on virtual machines and with an IOMMU, PCIe ACS has to be off (BIOS)"


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
