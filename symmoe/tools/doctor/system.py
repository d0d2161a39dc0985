"""The host: operating system, memory, shared memory, limits of processes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from symmoe.symm_mem import host_backend
from symmoe.symm_mem.machine_memory import available_bytes
from symmoe.tools.doctor.findings import Finding

_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_SHM_BYTES = 64 << 20  # NCCL's buffers of a few ranks; Docker's default is this, less what is in use
_GOOD_SHM_BYTES = 1 << 30  # the batches of DataLoader workers lie there too
_NEEDED_MEMORY_BYTES = 1 << 30  # two ranks with torch take some 600 MB
_NEEDED_FILES, _GOOD_FILES = 256, 1024
_GOOD_PROCESSES = 512  # threads count: NCCL's, Gloo's, autograd's and OpenMP's of every rank


@dataclass(frozen=True, kw_only=True)
class System:
    """Facts of the host.

    Attributes:
        os_name, os_release, machine, python: values from `platform`.
        host_problem: what keeps the host backend from working; "" if nothing does.
        num_cores: cores that this process may use.
        free_bytes: memory that this container can still use; None is unknown.
        shm_bytes, shm_free_bytes: size and free bytes of /dev/shm; None if there is none.
        max_files, max_locked_bytes: soft limits of this process; None is no limit.
        max_processes: how many, threads counted, may still be started; None is no limit that is known.
        compiler: the C compiler that Triton would take; None if there is none.
        has_python_headers: whether Python.h is there.
    """

    os_name: str
    os_release: str
    machine: str
    python: str
    host_problem: str
    num_cores: int
    free_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    max_files: int | None
    max_locked_bytes: int | None
    max_processes: int | None
    compiler: str | None
    has_python_headers: bool


def read_system(environment: Mapping[str, str]) -> System:
    """This host."""
    shm = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    found = (shutil.which(name, path=environment.get("PATH")) for name in compilers)
    group = _control_group()
    return System(
        os_name=platform.system(),
        os_release=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        host_problem=host_backend.preflight() or _memfd_problem(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_bytes=available_bytes(),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        max_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        max_processes=_least(_soft_limit(resource.RLIMIT_NPROC), _left(group, "pids")),
        compiler=next((path for path in found if path), None),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
    )


def check_system(system: System, *, has_gpu: bool) -> list[Finding]:
    """Findings about the host, and whether the kernels' launchers can be compiled."""
    found = []
    if system.host_problem and system.os_name != "Linux":
        fix = "run it on Linux: a container or a virtual machine will do"
        return [Finding("problem", "system", system.host_problem, fix)]
    if system.host_problem:
        level = "note" if has_gpu else "problem"
        text = f"no heap in host memory: {system.host_problem}"
        fix = "" if has_gpu else "run it on a machine with x86-64, or with GPUs"
        if "memfd" in system.host_problem:
            fix = "allow memfd_create: docker run --security-opt seccomp=unconfined, or newer Docker and kernel"
        found.append(Finding(level, "system", text, fix))
    if has_gpu and system.compiler is None:
        text = "no C compiler: Triton compiles a launcher for every kernel"
        found.append(Finding("problem", "system", text, "apt-get install gcc, or set CC to the compiler's path"))
    if has_gpu and not system.has_python_headers:
        text = "Python.h is not there: Triton compiles a launcher for every kernel"
        version = ".".join(system.python.split(".")[:2])
        found.append(Finding("problem", "system", text, f"apt-get install python{version}-dev"))
    cores = "1 core" if system.num_cores == 1 else f"{system.num_cores} cores"
    memory = "" if system.free_bytes is None else f", {_size(system.free_bytes)} of memory free"
    text = f"{system.os_name} {system.os_release}, {system.machine}, Python {system.python}, {cores}{memory}"
    return [*found, Finding("ok", "system", text)]


def check_limits(system: System, *, has_gpu: bool) -> list[Finding]:
    """Memory, /dev/shm, open files and processes."""
    found = []
    if system.free_bytes is not None and system.free_bytes < _NEEDED_MEMORY_BYTES:
        text = f"{_size(system.free_bytes)} of memory are free; two ranks take {_size(_NEEDED_MEMORY_BYTES)}"
        found.append(Finding("problem", "limits", text, "end other jobs, or docker run --memory=8g"))
    found += _check_shared_memory(system, has_gpu)
    if system.max_files is not None and system.max_files < _GOOD_FILES:
        level = "problem" if system.max_files < _NEEDED_FILES else "note"
        text = f"{system.max_files} open files per process: connections to peers and shared memory take some each"
        found.append(Finding(level, "limits", text, "ulimit -n 65536, or docker run --ulimit nofile=65536"))
    if system.max_processes is not None and system.max_processes < _GOOD_PROCESSES:
        text = f"{system.max_processes} more processes and threads may be started; a rank has a hundred or so"
        found.append(Finding("note", "limits", text, "ulimit -u 65536, or docker run --pids-limit=-1"))
    if found:
        return found
    free, total = system.shm_free_bytes, system.shm_bytes
    shm = "none" if free is None or total is None else f"{_size(free)} of {_size(total)} free"
    files = "no limit" if system.max_files is None else str(system.max_files)
    locked = "no limit" if system.max_locked_bytes is None else _size(system.max_locked_bytes)
    text = f"/dev/shm {shm}, open files {files}, locked memory {locked} (more is for RDMA, which symmoe does not use)"
    return [Finding("ok", "limits", text)]


def _check_shared_memory(system: System, has_gpu: bool) -> list[Finding]:
    """Checks /dev/shm. The host heap does not lie there; NCCL's buffers and DataLoader's batches do."""
    free, total = system.shm_free_bytes, system.shm_bytes
    fix = "docker run --shm-size=8g or --ipc=host; as root: mount -o remount,size=8g /dev/shm"
    if free is None or total is None:
        text = "there is no /dev/shm: NCCL, NVSHMEM and DataLoader workers need it, the host heap does not"
    elif free < _NEEDED_SHM_BYTES:
        text = f"/dev/shm has {_size(free)} of {_size(total)} free: too little for NCCL, NVSHMEM and DataLoader workers"
    elif total < _GOOD_SHM_BYTES:
        text = f"/dev/shm has {_size(total)}: the batches of DataLoader workers may not fit (bus error)"
        return [Finding("note", "limits", text, fix)]
    else:
        return []
    return [Finding("problem" if has_gpu else "note", "limits", text, fix)]


def _memfd_problem() -> str:
    """Why an anonymous file cannot be made; "" if it can."""
    try:
        os.close(os.memfd_create("symmoe-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    return ""


def _control_group() -> Path | None:
    """This process's directory of control groups (version 2)."""
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup", line[3:].strip().lstrip("/"))
    return None


def _left(group: Path | None, controller: str) -> int | None:
    """How much a limit of the control group leaves; None if it has no limit."""
    if group is None:
        return None
    limit, used = (_text(group / f"{controller}.{name}") for name in ("max", "current"))
    if not limit or not used or limit.strip() == "max":
        return None
    return max(0, int(limit) - int(used))


def _soft_limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _size(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes >> 10} KiB"
