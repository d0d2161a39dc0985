"""Where a rank is: on which machine, and in which NVLink domain, if its GPU is in one that joins machines."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NVML = "libnvidia-ml.so.1"
_SUCCESS, _COMPLETED = 0, 3  # nvmlReturn_t, nvmlGpuFabricState_t
_MACHINE_BYTES, _FABRIC_BYTES = 36, 20


@dataclass(frozen=True, slots=True)
class Place:
    """A place that can be compared with those of other ranks.

    Attributes:
        machine: one that was booted once.
        fabric: an NVLink domain that may have GPUs on several machines; b"" if the GPU is in none.
    """

    machine: bytes
    fabric: bytes = b""

    NUM_BYTES = _MACHINE_BYTES + _FABRIC_BYTES

    @property
    def domain(self) -> bytes:
        """What this rank has in common with those whose memory it can reach."""
        return self.fabric or self.machine

    def pack(self) -> bytes:
        """NUM_BYTES."""
        return self.machine.ljust(_MACHINE_BYTES, b"\0") + self.fabric.ljust(_FABRIC_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Place:
        """The place that was packed."""
        fabric = packed[_MACHINE_BYTES : cls.NUM_BYTES]
        return cls(packed[:_MACHINE_BYTES].rstrip(b"\0"), fabric if any(fabric) else b"")


def find_place(gpu: str | None) -> Place:
    """This rank's place. gpu: the UUID of its GPU; None: it has none."""
    machine = _BOOT_ID.read_bytes().strip()[:_MACHINE_BYTES]
    return Place(machine, b"" if gpu is None else _find_fabric(gpu))


class _FabricInfo(ctypes.Structure):  # nvmlGpuFabricInfo_t
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    )


def _find_fabric(gpu: str) -> bytes:
    """The cluster and the clique of a GPU; b"" where NVML knows none: in one machine the cluster is all zeros."""
    device, info = ctypes.c_void_p(), _FabricInfo()
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return b""
        try:
            name = b"GPU-" + gpu.removeprefix("GPU-").encode()
            found = nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device))
            if found != _SUCCESS or nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)) != _SUCCESS:
                return b""
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one that is too old to know of domains
        return b""
    if info.state != _COMPLETED or info.status != _SUCCESS or not any(info.cluster):
        return b""
    return bytes(info.cluster) + int(info.clique).to_bytes(4, "little")
