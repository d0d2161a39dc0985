"""`symmoe doctor`: machines made by hand, each with one defect; and this machine."""

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cluster import run_on
from doctor_cases import NVLINK, QUERY, TOPOLOGY, assert_one_wrong, fake_smi, fake_torch, wrong
from limits import HANG_S, PROMPT_S
from programs import printed_by

import symmoe
from symmoe.cli import main
from symmoe.tools.doctor import command as doctor
from symmoe.tools.doctor import self_test
from symmoe.tools.doctor.findings import Finding, render, worst_level
from symmoe.tools.doctor.gpus import (
    Device,
    Gpus,
    Links,
    Pair,
    Report,
    ask,
    check_gpus,
    check_links,
    parse_devices,
    parse_links,
    parse_topology,
    read_gpus,
)
from symmoe.tools.doctor.machine import (
    System,
    check_environment,
    check_limits,
    check_system,
    read_system,
)
from symmoe.tools.doctor.self_test import Trial, check_trial, run_trial
from symmoe.tools.doctor.versions import Versions, check_versions, read_versions
from symmoe.tools.ranks import Ranks

GIB = 1 << 30

# -- machines -----------------------------------------------------------------------------------------------------

HOST = System(
    os_name="Linux", os_release="6.1", machine="x86_64", python="3.11.7", host_problem="", num_cores=16,
    free_bytes=100 * GIB, shm_bytes=64 * GIB, shm_free_bytes=63 * GIB, max_files=1 << 20,
    max_processes=1 << 16, compiler="/usr/bin/gcc", has_python_headers=True,
)  # fmt: skip
INSTALLED = {
    "symmoe": "0.1.0", "torch": "2.11.0+cu130", "triton": "3.6.0", "nvidia-nvshmem-cu13": "3.4.5",
    "nvshmem4py-cu13": "0.4.1", "cuda-core": "1.2.2",
}  # fmt: skip
PINS = {"nvidia-nvshmem-cu13": "3.4.5", "triton": "3.6.0"}


def versions(
    torch_cuda: str | None = "13.0", without: str = "", pin: str = "3.6.0", **installed: str
) -> Versions:
    """The tested versions with changes; "_" in names stands for "-". pin: the Triton that torch requires."""
    distributions = INSTALLED | {
        name.replace("_", "-"): version for name, version in installed.items()
    }
    distributions.pop(without, None)
    return Versions(
        installed=distributions, torch_cuda=torch_cuda, torch_pins=PINS | {"triton": pin}
    )


def device(index: int, **overrides: str) -> Device:
    """A GPU as nvidia-smi lists it."""
    names = {"driver": "driver_version", "used": "memory.used", "mig": "mig.mode.current"}
    defaults = {
        "index": f"{index}",
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "driver_version": "580.159.03",
        "memory.used": "0",
        "compute_mode": "Default",
        "mig.mode.current": "Disabled",
    }
    return defaults | {names.get(name, name): value for name, value in overrides.items()}


def gpu(index: int, **overrides) -> SimpleNamespace:
    """A GPU as torch lists it."""
    defaults = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "total_memory": 140 * GIB,
        "uuid": index,
    }
    return SimpleNamespace(**(defaults | overrides))


def pair(first: int, second: int, connection: str | None = "NV18", can_access: bool = True) -> Pair:
    return Pair(first=first, second=second, connection=connection, can_access=can_access)


SMI = Report(devices={0: device(0), 1: device(1)})
GPUS = Gpus(gpus=(gpu(0), gpu(1)), pairs=(pair(0, 1),))


# -- findings -----------------------------------------------------------------------------------------------------


def test_a_healthy_machine_has_only_findings_of_level_ok():
    findings = [
        *check_system(HOST, has_gpu=True),
        *check_versions(versions(), has_gpu=True),
        *check_gpus(GPUS, SMI, torch_cuda="13.0", visible=None),
        *check_links(GPUS.pairs, {0: Links(gbs=478.1, num_up=18, num_down=0)}, visible=None),
        *check_limits(HOST, has_gpu=True),
        *check_environment(
            {"PATH": "/usr/bin", "NVSHMEM_DISABLE_NVLS": "1"}, has_gpu=True, num_cores=16
        ),
        *of_trial(copy=390.0, dispatch=270.0),
    ]
    assert wrong(findings) == []
    assert worst_level(findings) == "ok"
    text = render(findings)
    for word in (
        "2 x NVIDIA H200 (9.0, 140 GiB)",
        "driver 580.159.03",
        "NV18",
        "478 GB/s",
        "torch 2.11.0+cu130",
        "NVSHMEM 3.4.5",
        "nvshmem4py 0.4.1",
        "NVSHMEM_DISABLE_NVLS=1",
    ):
        assert word in text
    assert "/usr/bin" not in text  # irrelevant variables may be private
    assert text.endswith("No problems, 0 notes: symmoe can run here.")


def test_findings_render_on_one_screen():
    fix = "a command " * 20
    findings = [
        Finding("ok", "a", "fine"),
        Finding("note", "b", "x " * 150),
        Finding("problem", "d", "bad", fix),
    ]
    assert [worst_level(findings[:number]) for number in range(4)] == [
        "ok",
        "ok",
        "note",
        "problem",
    ]
    shown = render(findings).splitlines()
    assert all(len(line) <= 110 for line in shown if "->" not in line)
    assert any(line.endswith(f"-> {fix}") for line in shown)  # in one piece, to be copied
    assert shown[-1] == "1 problem, 1 note: what stands behind -> helps."
    for level, text in (("problem", "without a fix"), ("warning", "no level")):
        with pytest.raises(AssertionError):
            Finding(level, "d", text)


# -- defects ------------------------------------------------------------------------------------------------------


def of_system(has_gpu: bool, **change) -> list[Finding]:
    return check_system(HOST._replace(**change), has_gpu=has_gpu)


def of_limits(has_gpu: bool, **change) -> list[Finding]:
    return check_limits(HOST._replace(**change), has_gpu=has_gpu)


def of_versions(torch_cuda: str | None = "13.0", **change: str) -> list[Finding]:
    return check_versions(versions(torch_cuda, **change), has_gpu=True)


def of_gpus(
    gpus: Gpus = GPUS, smi: Report = SMI, cuda: str | None = "13.0", visible: str | None = None
):
    return check_gpus(gpus, smi, torch_cuda=cuda, visible=visible)


def of_links(*pairs: Pair, visible: str | None = None, nvlink: str = "") -> list[Finding]:
    return check_links(pairs, parse_links(nvlink), visible=visible)


def of_environment(has_gpu: bool = True, num_cores: int = 16, **variables: str) -> list[Finding]:
    return check_environment(variables, has_gpu=has_gpu, num_cores=num_cores)


def of_trial(
    copy: float, dispatch: float, *, on_gpus: bool = True, link_gbs: float | None = 478.0
) -> list[Finding]:
    figures = {"heap_s": 0.5, "dispatch_gbs": dispatch, "combine_gbs": dispatch, "copy_gbs": copy}
    return check_trial(
        Trial(num_ranks=2, took_s=8.0, figures=figures), on_gpus=on_gpus, link_gbs=link_gbs
    )


def of_failed_trial(error: str, text: str = "") -> list[Finding]:
    return check_trial(Trial(num_ranks=2, took_s=5.0, error=error, text=text), on_gpus=True)


def smi(*devices: Device) -> Report:
    return Report(devices={int(device["index"]): device for device in devices})


def gpus(*properties: SimpleNamespace, error: str = "") -> Gpus:
    return Gpus(gpus=properties, error=error)


SMALL_SHM = {"shm_free_bytes": 60 << 20, "shm_bytes": 64 << 20}
ARM = {"machine": "aarch64", "host_problem": "needs x86-64"}
PCIE = (pair(0, 1), pair(0, 2, "PHB"), pair(1, 2, "SYS"))
TWO_PAIRS = tuple(
    pair(a, b, can_access=(a < 2) == (b < 2)) for a in range(4) for b in range(a + 1, 4)
)
THREE_OF_FOUR = (
    pair(0, 1),
    pair(0, 2),
    pair(1, 2),
    *(pair(a, 3, can_access=False) for a in range(3)),
)
HURTING = {  # each by itself
    "TRITON_INTERPRET": "1", "NVSHMEM_DISABLE_P2P": "true", "NVSHMEM_DISABLE_NVLS": "0",
    "NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "0",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth0", "NVSHMEM_SYMMETRIC_SIZE": "1G", "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
}  # fmt: skip
BINDINGS = "pip install 'nvshmem4py-cu13>=0.4.1,<0.5'"
WRONG = [  # findings; of the one that is not ok: its level, words of its text and of its fix
    (
        of_system(False, os_name="Darwin", host_problem="the host backend needs Linux"),
        "problem",
        "Linux",
        "on Linux",
    ),
    (of_system(False, **ARM), "problem", "x86-64", "machine with x86-64"),
    (of_system(True, **ARM), "note", "x86-64", ""),
    (
        of_system(False, host_problem="memfd_create: not permitted"),
        "problem",
        "memfd",
        "seccomp=unconfined",
    ),
    (of_system(True, compiler=None), "problem", "C compiler", "apt-get install gcc"),
    (
        of_system(True, has_python_headers=False),
        "problem",
        "Python.h",
        "apt-get install python3.11-dev",
    ),
    (of_limits(True, **SMALL_SHM), "problem", "60 MiB of 64 MiB", "--shm-size"),
    (of_limits(False, **SMALL_SHM), "note", "60 MiB of 64 MiB", "--shm-size"),
    (
        of_limits(True, shm_free_bytes=500 << 20, shm_bytes=512 << 20),
        "note",
        "512 MiB",
        "mount -o remount",
    ),
    (of_limits(True, shm_free_bytes=None, shm_bytes=None), "problem", "no /dev/shm", "--ipc=host"),
    (of_limits(False, free_bytes=700 << 20), "problem", "700 MiB", "--memory=8g"),
    (of_limits(False, max_files=128), "problem", "128 open files", "ulimit -n 65536"),
    (of_limits(True, max_files=512), "note", "512 open files", "ulimit -n 65536"),
    (of_limits(False, max_processes=100), "note", "100 more processes", "--pids-limit"),
    (of_versions(torch="2.10.1+cu130"), "problem", "torch 2.10.1+cu130", "'torch>=2.11'"),
    (
        of_versions(torch="2.16.0"),
        "note",
        "torch 2.16.0 has not been tested, 2.11 to 2.15 have",
        "'torch==2.15.*'",
    ),
    (of_versions(torch="2.15.1"), "note", "tested on CPUs only; on GPUs 2.11", "'torch==2.11.*'"),
    (
        of_versions(without="triton"),
        "problem",
        "Triton is not installed",
        "pip install triton==3.6.0",
    ),
    (of_versions(triton="3.5.1"), "note", "Triton 3.5.1", "pip install triton==3.6.0"),
    (of_versions(triton="3.7.1"), "note", "asks for, 3.6.0", "pip install triton==3.6.0"),
    (of_versions(triton="3.10.0"), "note", "34 us", "pip install triton==3.6.0"),
    (of_versions(triton="3.10.0", pin="3.10.*"), "note", "34 us", "pip install 'torch==2.15.*'"),
    (
        of_versions(triton="3.9.1", pin="3.8.*"),
        "note",
        "asks for, 3.8.*",
        "pip install 'triton==3.8.*'",
    ),
    (
        of_versions(nvidia_nvshmem_cu13="3.7.0"),
        "problem",
        "NVSHMEM 3.7.0 with Triton 3.6.0",
        "nvshmem-cu13==3.4.5",
    ),
    (
        of_versions(nvidia_nvshmem_cu13="3.8.0"),
        "problem",
        "NVSHMEM 3.8.0 with Triton 3.6.0",
        "nvshmem-cu13==3.4.5",
    ),
    (of_versions(nvidia_nvshmem_cu13="3.6.5"), "note", "3.6.5", "nvidia-nvshmem-cu13==3.4.5"),
    (
        of_versions(without="nvidia-nvshmem-cu13"),
        "problem",
        "without nvidia-nvshmem-cu13",
        "nvshmem-cu13==3.4.5",
    ),
    (of_versions(without="nvshmem4py-cu13"), "problem", "nvshmem4py-cu13 is not", BINDINGS),
    (of_versions(nvshmem4py_cu13="0.2.2"), "problem", "0.2.2 does not work", BINDINGS),
    (of_versions(nvshmem4py_cu13="0.3.1"), "note", "older than what was tested", BINDINGS),
    (of_versions(cuda_core="0.4.0"), "problem", "cuda-core 0.4.0", "pip install 'cuda-core>=0.7'"),
    (
        of_versions(without="cuda-core"),
        "problem",
        "cuda-core (not installed)",
        "pip install 'cuda-core>=0.7'",
    ),
    (
        of_versions("12.8"),
        "problem",
        "cu13 is, which is not for torch's CUDA 12.8",
        "nvshmem4py-cu12>=0.4.1,<0.5'",
    ),
    (of_versions(megatron_core="0.16.1"), "note", "checkpoints hang", "psutil"),
    (of_gpus(gpus(), smi(), cuda=None), "note", "no NVIDIA GPU", "docker run --gpus all"),
    (of_gpus(gpus(), cuda=None), "problem", "built for CPUs", "--index-url"),
    (of_gpus(gpus(), visible=""), "note", "hides them", "unset CUDA_VISIBLE_DEVICES"),
    (of_gpus(gpus(), visible="-1"), "note", "hides them", "unset CUDA_VISIBLE_DEVICES"),
    (
        of_gpus(gpus(error="CUDA unknown error")),
        "problem",
        "CUDA unknown error",
        "torch.cuda.init()",
    ),
    (
        of_gpus(gpus(error="Error 802: system not yet initialized")),
        "problem",
        "802",
        "nvidia-fabricmanager",
    ),
    (
        of_gpus(gpus(), smi(device(0, driver="550.54.15"))),
        "problem",
        "driver 550.54.15",
        "install driver 580",
    ),
    (
        of_gpus(gpus(gpu(0)), smi(device(0, driver="510.1")), "12.8"),
        "problem",
        "driver 510.1",
        "install driver 525",
    ),
    (of_gpus(gpus(gpu(0, major=7, minor=5))), "problem", "7.5: refused", "CUDA_VISIBLE_DEVICES"),
    (
        of_gpus(gpus(gpu(0, major=8))),
        "note",
        "8.0: compiled only; FP8, MXFP8 and NVFP4 are refused",
        "",
    ),
    (of_gpus(gpus(gpu(0, major=10))), "note", "10.0: compiled only (", ""),
    (of_gpus(gpus(gpu(0, major=8, minor=7))), "note", "8.7: not compiled; FP8", ""),
    (
        of_gpus(gpus(gpu(0), gpu(1, name="NVIDIA H100"))),
        "note",
        "not alike",
        "CUDA_VISIBLE_DEVICES",
    ),
    (of_gpus(cuda=None), "problem", "not built for CUDA", "--index-url"),
    (
        of_gpus(smi=smi(device(0), device(1, compute_mode="Prohibited"))),
        "problem",
        "GPU 1",
        "-i 1 -c DEFAULT",
    ),
    (of_gpus(smi=smi(device(0, mig="Enabled"), device(1))), "note", "MIG", "-i 0 -mig 0"),
    (of_gpus(smi=smi(device(0, used="61440"), device(1))), "note", "60 GiB", "nvidia-smi"),
    (
        of_links(*PCIE),
        "note",
        "0-2 (PHB), 1-2 (SYS) reach each other over PCIe, not NVLink",
        "VISIBLE_DEVICES=0,1",
    ),
    (
        of_links(*PCIE, visible="4, 6,7"),
        "note",
        "0-2",
        "VISIBLE_DEVICES=4,6",
    ),  # as the user numbers them
    (of_links(pair(0, 1, "PHB")), "note", "not NVLink", ""),
    (
        of_links(pair(0, 1, "PHB", can_access=False)),
        "problem",
        "between GPUs 0-1 (PHB)",
        "nvidia-smi topo -p2p r",
    ),
    (
        of_links(*TWO_PAIRS),
        "problem",
        "0-2 (NV18), 0-3 (NV18), 1-2 (NV18), 1-3",
        "VISIBLE_DEVICES=0,1",
    ),
    (of_links(*THREE_OF_FOUR), "problem", "0-3", "VISIBLE_DEVICES=0,1,2"),
    (of_links(pair(0, 1), nvlink=NVLINK), "note", "1 of GPU 1", "nvidia-fabricmanager"),
    *(
        (
            of_environment(**{n: v}),
            "problem" if n in [*HURTING][:2] else "note",
            f"{n}=",
            f"unset {n}",
        )
        for n, v in HURTING.items()
    ),
    (
        of_environment(OMP_NUM_THREADS="64"),
        "note",
        "OMP_NUM_THREADS=64",
        "export OMP_NUM_THREADS=1",
    ),
    (of_environment(SYMMOE_FLIGHT="/tmp"), "note", "SYMMOE_FLIGHT", "unset SYMMOE_FLIGHT"),
    (
        of_environment(SYMMOE_FLIGHT_DIR="/dev/null/records"),
        "note",
        "FLIGHT_DIR=",
        "export SYMMOE_FLIGHT_DIR",
    ),
    (
        of_environment(TRITON_CACHE_DIR="/dev/null/cache"),
        "problem",
        "CACHE_DIR=",
        "export TRITON_CACHE_DIR",
    ),
    (of_trial(150.0, 120.0), "note", "150 GB/s of the 478", "nvlink -e"),
    (of_trial(390.0, 90.0), "note", "90 GB/s", "benchmarks/bench.py dispatch"),
    (
        of_failed_trial("BackendUnavailable", "no: pip install 'x'"),
        "problem",
        "no:",
        "pip install 'x'",
    ),
    (
        of_failed_trial("WrongResult", "moved wrong rows"),
        "problem",
        "moved wrong",
        "symmoe doctor --json",
    ),
    (
        of_failed_trial("rank 1 was ended by SIGKILL"),
        "problem",
        "rank 1 was ended by SIGKILL",
        "--memory",
    ),
    (
        of_failed_trial("rank 1 ended with status 255", "boom"),
        "problem",
        "boom",
        "NVSHMEM_DEBUG=INFO",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_defect_is_one_finding_with_its_fix(number: int):
    assert_one_wrong(*WRONG[number])


UNUSUAL = "3, GPU-3, NVIDIA GB10, 590.1, [N/A], Default, [N/A]\n"


def test_harmless_differences_are_no_findings(tmp_path: Path):
    newer = {"triton": "3.7.1", "nvidia-nvshmem-cu13": "3.7.2"}
    cpu = Versions({"symmoe": "0.1.0", "torch": "2.13.0+cpu"}, None)
    variables = {
        "NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=lo",
        "CUDA_LAUNCH_BLOCKING": "0", "OMP_NUM_THREADS": "2", "SYMMOE_FLIGHT_DIR": str(tmp_path / "made" / "later"),
        "NCCL_NVLS_ENABLE": "0", "TORCH_LOGS": "a\nok       b" + "x" * 200, "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
    unused_device = device(2, used="61440", compute_mode="Prohibited")
    fine = [  # findings, and words of their text
        (of_system(False, compiler=None, has_python_headers=False), ""),
        (of_limits(True, max_files=None, max_processes=None, free_bytes=None),
         "open files no limit"),
        (of_versions(torch="2.11.2+cu130"), ""),
        (check_versions(Versions({"torch": "2.15.1", "triton": "3.9.1"}, None, {"triton": "3.9.*"}), has_gpu=False),
         ""),
        (of_versions(megatron_core="0.16.1", psutil="7.0"), ""),
        (check_versions(Versions(INSTALLED | newer, "13.0", newer), has_gpu=True), ""),
        (check_versions(cpu, has_gpu=False),
         "Triton not installed, NVSHMEM not installed, nvshmem4py not installed; torch is built for"),
        (of_gpus(smi=smi(device(0), device(1), unused_device)), ""),
        (of_gpus(smi=smi()), "nvidia-smi does not answer"),
        (of_gpus(gpus(gpu(3)), Report(parse_devices(UNUSUAL))), ""),
        (of_links(pair(0, 1, None)), ""),
        (of_environment(num_cores=2, **variables), "NCCL_NVLS_ENABLE=0"),
        (of_environment(num_cores=2, **variables), "xxx..."),
        (of_environment(has_gpu=False, **HURTING), ""),
        (of_environment(), ""),
        (of_trial(20.0, 12.0, link_gbs=None), ""),  # over PCIe
        (of_trial(3.0, 0.3, on_gpus=False), ""),
        (check_trial(Trial(num_ranks=1, took_s=5.0, figures={"heap_s": 0.5}), on_gpus=True), ""),
    ]  # fmt: skip
    for (finding,), word in fine:
        assert finding.level == "ok", finding
        assert word in finding.text
        assert "\n" not in finding.text
        assert "secret" not in finding.text  # irrelevant variables may be private
    assert of_links() == []  # one GPU
    assert "by NV18; 27 or 53 GB/s" in of_links(pair(0, 1), nvlink=NVLINK)[-1].text


# -- this machine -------------------------------------------------------------------------------------------------


def test_read_system_reads_this_host(tmp_path: Path):
    system = read_system(dict(os.environ))
    assert (system.os_name, system.host_problem) == ("Linux", "")
    assert system.num_cores == len(os.sched_getaffinity(0))
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1)) << 10
    assert 0 < system.free_bytes <= total
    assert 0 < system.shm_free_bytes <= system.shm_bytes
    fake = tmp_path / "my-cc"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    assert read_system({"CC": str(fake)}).compiler == str(fake)
    assert read_system({"PATH": str(tmp_path)}).compiler is None  # neither gcc nor clang there
    versions = read_versions()
    assert (versions.installed["torch"], versions.torch_cuda) == (
        torch.__version__,
        torch.version.cuda,
    )


def test_read_versions_reads_torchs_requirements(monkeypatch):
    requirements = [
        'triton~=3.9.0; platform_system == "Linux"',
        "nvidia-nvshmem-cu13==3.7.2",
        "sympy>=1.13.3",
    ]
    monkeypatch.setattr("symmoe.tools.doctor.versions.metadata.requires", lambda name: requirements)
    assert read_versions().torch_pins == {"triton": "3.9.*", "nvidia-nvshmem-cu13": "3.7.2"}


LINKS = {
    0: Links(gbs=2 * 26.562, num_up=2, num_down=0),
    1: Links(gbs=26.562, num_up=1, num_down=1),
}
NO_LINKS = "NVML: Unable to retrieve NVLink information as all links are inActive\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\n"


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_devices, "No devices were found\n", {}),
        (parse_devices, MISMATCH, {}),
        (
            parse_devices,
            UNUSUAL,
            {3: device(3, name="NVIDIA GB10", driver="590.1", used="[N/A]", mig="[N/A]")},
        ),
        (parse_topology, TOPOLOGY, {(0, 1): "NV18", (0, 2): "PHB", (1, 2): "SYS"}),
        (parse_topology, "", {}),
        (parse_links, NVLINK, LINKS),
        (parse_links, NO_LINKS, {}),
    ],
)
def test_answers_of_nvidia_smi_are_parsed(parse: Callable[[str], dict], text: str, expected: dict):
    assert parse(text) == expected


def test_a_slow_or_failing_nvidia_smi_is_an_empty_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = fake_smi(tmp_path, monkeypatch)
    report = ask()
    assert [*report.devices] == [0, 1] == sorted(report.links)
    assert report.topology[0, 1] == "NV18"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("symmoe.tools.doctor.gpus._TIMEOUT_S", 0.2)
    start = time.monotonic()
    assert ask() == Report()
    assert time.monotonic() - start < 50
    program.write_text("#!/bin/sh\necho broken; exit 9\n")
    assert ask() == Report()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert ask() == Report()


def test_gpus_of_torch_are_matched_with_nvidia_smi_by_uuid(monkeypatch: pytest.MonkeyPatch):
    fake_torch(monkeypatch)
    smi = Report(
        devices=parse_devices(QUERY), topology=parse_topology(TOPOLOGY), links=parse_links(NVLINK)
    )
    from_torch = read_gpus(smi)
    assert [smi.index_of(properties) for properties in from_torch.gpus] == [1, 0]
    assert from_torch.pairs == (pair(0, 1, "NV18", can_access=False),)
    fake_torch(monkeypatch, can_device_access_peer=lambda device, peer: True)
    assert read_gpus(smi).pairs == (pair(0, 1, "NV18"),)
    without = read_gpus(Report())
    assert [Report().index_of(properties) for properties in without.gpus] == [None, None]
    assert without.pairs == (pair(0, 1, None),)


def test_read_gpus_has_the_error_of_torch(monkeypatch: pytest.MonkeyPatch):
    def warn() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: unspecified\nmore about it")

    fake_torch(monkeypatch, is_available=warn)
    assert read_gpus(SMI) == Gpus(error="CUDA initialization: the driver is too old")
    fake_torch(monkeypatch, get_device_properties=fail)
    assert read_gpus(SMI) == Gpus(error="CUDA error: unspecified")


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "rates"), [(0, 2, None), (1, 1, None), (8, 8, 400.0), (10, 8, 400.0)]
)
def test_the_self_test_starts_one_rank_per_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_ranks: int, rates: float | None
):
    started, judged = [], []
    gpus = tuple(gpu(index) for index in range(num_gpus))
    links = {index: Links(gbs=400.0 + index, num_up=18, num_down=0) for index in range(num_gpus)}
    report = Report(devices={index: device(index) for index in range(num_gpus)}, links=links)
    monkeypatch.setattr(doctor, "ask", lambda: report)
    monkeypatch.setattr(doctor, "read_gpus", lambda smi: Gpus(gpus=gpus))
    monkeypatch.setattr(doctor, "run_trial", lambda ranks, environment: started.append(ranks))
    monkeypatch.setattr(
        doctor, "check_trial", lambda trial, **options: judged.append(options) or []
    )
    doctor.examine({}, self_test=True)
    assert started == [num_ranks]
    assert judged == [{"on_gpus": num_gpus > 0, "link_gbs": rates}]


# -- self-test ----------------------------------------------------------------------------------------------------


HEAD = """
import json, os, signal, sys, time
args = json.loads(sys.argv[-1])
rank = args["rank"]
def tell(**found):
    open(args["out"], "w").write(json.dumps(found))
"""


def fake_rank(tmp_path: Path, body: str) -> list[str]:
    """A command that gets the arguments of a rank."""
    (tmp_path / "rank.py").write_text(HEAD + body)
    return [sys.executable, "-S", "-E", str(tmp_path / "rank.py")]


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("if rank: time.sleep(3600)\nprint('a line'); print('the last one'); sys.exit(3)",
         "rank 0 ended with status 3", "the last one"),
        ("if rank: os.kill(os.getpid(), signal.SIGBUS)\ntime.sleep(3600)", "rank 1 was ended by SIGBUS", "has printed"),
        ("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntell(error='PeerLost', text='x'); time.sleep(3600)",
         "rank 1 was ended by SIGKILL", ""),
        ("tell(error='OSError' if rank else 'PeerLost', text=f'of {rank}')\nif not rank: time.sleep(3600)\nsys.exit(1)",
         "OSError", "of 1"),
        ("if rank: time.sleep(3600)\ntell(error='PeerTimeout', text='rank 1 did not come'); sys.exit(1)",
         "PeerTimeout", "rank 1 did not come"),
        ("tell(error=os.environ['SYMMOE_FLIGHT_DIR'] or 'none', text=os.environ['OMP_NUM_THREADS']); sys.exit(1)",
         "none", "1"),
        ("print('here', flush=True); time.sleep(60)", "rank 0 did not end in time", "here"),
    ],
)  # fmt: skip
def test_a_trial_reports_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: str, text: str
):
    monkeypatch.setenv("SYMMOE_FLIGHT_DIR", str(tmp_path))
    deadline_s = 3.0 if "in time" in error else HANG_S
    trial = run_trial(2, dict(os.environ), deadline_s=deadline_s, command=fake_rank(tmp_path, body))
    assert (trial.figures, trial.error) == (None, error)
    assert text in trial.text
    assert worst_level(check_trial(trial, on_gpus=False)) == "problem"


@pytest.mark.parametrize(
    ("error", "lingers"),
    [(symmoe.errors.PeerError("rank 1 is lost"), True), (OSError("of this rank"), False)],
)
def test_a_rank_that_lost_a_peer_ends_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, lingers: bool
):
    slept: list[float] = []
    monkeypatch.setattr(self_test, "join", Mock(side_effect=error))
    monkeypatch.setattr(self_test.signal, "alarm", lambda _: None)
    monkeypatch.setattr(self_test.time, "sleep", slept.append)
    out = tmp_path / "found"
    arguments = {
        "store": "x",
        "num_ranks": 2,
        "deadline_s": 9,
        "job": None,
        "rank": 0,
        "out": str(out),
    }
    assert self_test.be_rank(json.dumps(arguments), Mock()) == 1
    assert json.loads(out.read_text()) == {"error": type(error).__name__, "text": str(error)}
    assert bool(slept) == lingers


@pytest.mark.parametrize(("load_per_core", "times"), [(0.1, 1), (9.0, 9), (50.0, 10)])
def test_a_busy_machine_gets_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_per_core, times
):
    monkeypatch.setattr(
        os, "getloadavg", lambda: (load_per_core * len(os.sched_getaffinity(0)), 0.0, 0.0)
    )
    trial = run_trial(
        1, dict(os.environ), command=fake_rank(tmp_path, "tell(deadline_s=args['deadline_s'])")
    )
    assert trial.figures == {"deadline_s": 180 * times + 1}


def test_a_trial_kills_all_descendants(tmp_path: Path):
    pids = tmp_path / "pids"
    body = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        f"open(f'{pids}{{rank}}', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"while not all(os.path.exists({str(pids)!r} + other) for other in '01'): time.sleep(0.02)\n"
        "if not rank: sys.exit(3)\n"
        "time.sleep(3600)\n"
    )
    run_trial(2, dict(os.environ), deadline_s=HANG_S, command=fake_rank(tmp_path, body))
    started = [int(pid) for rank in (0, 1) for pid in Path(f"{pids}{rank}").read_text().split()]
    assert len(started) == 4
    deadline = (
        time.monotonic() + PROMPT_S
    )  # run_trial kills descendants of ranks and does not wait for their end
    while (running := [pid for pid in started if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running == []


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie (Z) and a dead process (X) do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_a_rank_ends_by_itself_after_the_deadline(tmp_path: Path):
    """Rank 1 never arrives, and no parent ends rank 0."""
    arguments = {"store": f"{tmp_path}/store", "num_ranks": 2, "deadline_s": 1, "job": None}
    arguments |= {"rank": 0, "out": f"{tmp_path}/found"}
    command = [sys.executable, "-m", "symmoe.tools.doctor.self_test", json.dumps(arguments)]
    process = subprocess.run(command, timeout=HANG_S, check=False, capture_output=True)
    assert process.returncode == -14  # SIGALRM


@run_on(2, 3)
def test_the_self_test_fits_into_its_heap(rank: int, num_ranks: int) -> None:
    """Few bytes are spare in this test, as on GPUs in comparison with the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "_SPARE_BYTES", 1 << 20)
        figures = self_test.run(Ranks(torch.device("cpu")), HANG_S)
    assert figures.keys() == {"heap_s", "dispatch_gbs", "combine_gbs", "copy_gbs"}


@pytest.mark.parametrize("wrong_part", ["none", "rows", "sums"])
def test_the_self_test_finds_wrong_rows(
    heap: symmoe.SymmetricHeap, monkeypatch: pytest.MonkeyPatch, wrong_part: str
):
    def dispatch(*args, **kwargs):
        rows, probs, handle = symmoe.dispatch_tokens(*args, **kwargs)
        if wrong_part == "rows":
            rows[3], rows[4] = rows[4].clone(), rows[3].clone()  # two rows have changed places
        return rows, probs, handle

    def combine(rows: torch.Tensor, handle) -> torch.Tensor:
        if wrong_part == "sums":
            rows[-1, 0] += 1
        return symmoe.combine_tokens(rows, handle)

    monkeypatch.setattr(self_test, "dispatch_tokens", dispatch)
    monkeypatch.setattr(self_test, "combine_tokens", combine)
    right = (
        nullcontext()
        if wrong_part == "none"
        else pytest.raises(symmoe.errors.WrongResult, match="moved wrong rows")
    )
    with right:
        self_test.check(heap, Ranks(torch.device("cpu")), torch.bfloat16)


# -- the command --------------------------------------------------------------------------------------------------


def test_no_self_test_prints_all_other_subjects(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "run_trial", None)  # would be called
    assert main(["doctor", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    for subject in ("system", "versions", "gpus", "limits", "environment"):
        assert re.search(rf"^(ok|note) +{subject} ", text, re.MULTILINE), subject
    assert "self-test" not in text
    assert len(text.splitlines()) <= 40  # one screen


def test_a_problem_is_exit_status_1(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "read_versions", lambda: versions(nvidia_nvshmem_cu13="3.7.0"))
    assert main(["doctor", "--no-self-test"]) == 1
    text = capsys.readouterr().out
    assert "-> pip install nvidia-nvshmem-cu13==3.4.5" in text
    assert main(["doctor", "--no-self-test", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["level"] == "problem"


@pytest.mark.slow
def test_the_command_passes_this_machine_and_leaves_no_file(tmp_path: Path):
    """The whole command, as users start it, where neither Triton nor NVSHMEM can be imported; it leaves no file."""
    missing, folder = tmp_path / "missing", tmp_path / "temporary"
    for name in ("triton", "nvshmem"):
        (missing / name).mkdir(parents=True)
        (missing / name / "__init__.py").write_text(
            f"raise ImportError('{name} is not to be imported here')\n"
        )
    folder.mkdir()
    paths = os.pathsep.join(filter(None, [str(missing), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment |= {"SYMMOE_FLIGHT_DIR": str(folder / "records"), "TMPDIR": str(folder)}
    report = json.loads(printed_by("-m", "symmoe", "doctor", "--json", env=environment))
    assert report["level"] in ("ok", "note")
    assert [finding["subject"] for finding in report["findings"]].count("self-test") == 1
    assert re.search(
        r"2 ranks on CPUs: .* exact; dispatch [\d.e+]+, combine [\d.e+]+, plain copy [\d.e+]+ GB/s",
        text_of_ok(report, "self-test"),
    )
    assert "SYMMOE_FLIGHT_DIR" in text_of_ok(report, "environment")
    assert list(folder.iterdir()) == []


def text_of_ok(report: dict, subject: str) -> str:
    """The text of the finding about a subject whose level is ok."""
    [text] = (
        finding["text"]
        for finding in report["findings"]
        if (finding["subject"], finding["level"]) == (subject, "ok")
    )
    return text


@pytest.mark.gpu
def test_the_command_passes_a_machine_with_gpus(capsys: pytest.CaptureFixture):
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    text = text_of_ok(report, "self-test")
    assert "dispatch and combine are exact" in text
    assert torch.cuda.get_device_name() in text_of_ok(report, "gpus")
    assert status == int(report["level"] == "problem")
    if torch.cuda.device_count() > 1:
        rates = [float(rate) for rate in re.findall(r"(?:dispatch|combine|copy) ([\d.e+]+)", text)]
        assert len(rates) == 3
        assert min(rates) > 1  # GB/s: they were measured on GPUs
