"""What nvidia-smi and torch say of made-up machines, and which findings are not ok."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from symmoe.tools.doctor.findings import Finding

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPHB\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t0-31\t0\t\tN/A\n"
    "GPU2\tPHB\tSYS\t X \tNODE\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
NVLINK = (
    "GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-22222222-bbbb)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
)
QUERY = (
    "0, GPU-11111111-aaaa, NVIDIA H200, 580.159.03, 4, Default, Disabled\n"
    "1, GPU-22222222-bbbb, NVIDIA H200, 580.159.03, 60000, Exclusive_Process, [N/A]\n"
)
# What torch says, by name of the function in torch.cuda; its first GPU is the second one of nvidia-smi.
TORCH = {
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "get_device_properties": lambda index: SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=140 << 30,
        uuid=("22222222-BBBB", "11111111-aaaa")[index],
    ),
    "can_device_access_peer": lambda device, peer: device < peer,  # one way is not enough
}


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program nvidia-smi that answers so, first on the PATH."""
    program = folder / "nvidia-smi"
    answers = {"--query*": QUERY, "topo": TOPOLOGY, "nvlink": NVLINK}
    cases = "".join(f"{name}) printf '%s' '{text}';;\n" for name, text in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def fake_torch(monkeypatch: pytest.MonkeyPatch, **changes: Callable) -> None:
    """torch.cuda reports the machine of TORCH, with some functions changed."""
    for name, function in (TORCH | changes).items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def assert_one_wrong(findings: list[Finding], level: str, text: str, fix: str) -> None:
    """One finding is not ok: it has this level, and contains this text and this fix."""
    [finding] = wrong(findings)
    assert (finding.level, text in finding.text, fix in finding.fix) == (level, True, True), finding
    assert bool(fix) == bool(finding.fix)
