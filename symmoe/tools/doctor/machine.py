"""The host: operating system, compiler, memory, limits, and relevant environment variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from symmoe.symm_mem import host_backend
from symmoe.tools.doctor.findings import Finding, Row, findings_about, first

_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_SHM_BYTES = 64 << 20  # NCCL's buffers of a few ranks; Docker's default, minus used space
_GOOD_SHM_BYTES = 1 << 30  # also has batches of DataLoader workers
_NEEDED_MEMORY_BYTES = 1 << 30  # two ranks with torch take some 600 MB
_NEEDED_FILES, _GOOD_FILES = 256, 1024
_GOOD_PROCESSES = 512  # threads count: NCCL's, Gloo's, autograd's and OpenMP's of every rank
_FIX_SHM = "docker run --shm-size=8g or --ipc=host; as root: mount -o remount,size=8g /dev/shm"

_PREFIXES = ("NVSHMEM_", "SYMMOE_", "TORCH_", "TRITON_", "CUDA_MPS_")
_NAMES = {
    *(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
    ),
    *(
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
}
_SHOWN = 80  # characters of a value
_ON = {"1", "true", "yes", "on", "y", "t"}
# Variables of ranks on GPUs: harmful values ("on", "off", or all but these), the level, and why.
_HURTS = {
    "TRITON_INTERPRET": (
        "on",
        "problem",
        "kernels run in Triton's interpreter on the CPU, not on the GPUs",
    ),
    "NVSHMEM_DISABLE_P2P": (
        "on",
        "problem",
        "ranks get no address of peers' memory, and no heap can be built",
    ),
    "NVSHMEM_DISABLE_NVLS": (
        "off",
        "note",
        "NVSHMEM sets up NVLink multicast, which symmoe does not use",
    ),
    "NVSHMEM_REMOTE_TRANSPORT": (
        "none",
        "note",
        "NVSHMEM looks for a network at start; symmoe uses one node",
    ),
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": ("off", "note", "a thread of every rank keeps a core busy"),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": (
        "lo =lo",
        "note",
        "NVSHMEM listens outside of this machine at start",
    ),
    "NVSHMEM_SYMMETRIC_SIZE": (
        "",
        "note",
        "symmoe sets it to what the heap's num_bytes needs; this has no effect",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "on",
        "note",
        "every launch waits: nothing overlaps, and graphs cannot be captured",
    ),
    "NCCL_P2P_DISABLE": (
        "on",
        "note",
        "NCCL goes through host memory: gradients get slow, symmoe's trips do not",
    ),
}
# Folders that must be writable: the level of a failure, and why.
_FOLDERS = {
    "SYMMOE_FLIGHT_DIR": ("note", "ranks leave no flight records"),
    "TRITON_CACHE_DIR": ("problem", "Triton cannot compile kernels"),
}


class System(NamedTuple):
    """Facts of the host; None: no limit, unknown, or missing."""

    os_name: str
    os_release: str
    machine: str
    python: str
    host_problem: str  # why the host backend cannot work
    num_cores: int  # usable by this process
    free_bytes: int | None  # of memory, in this container
    shm_bytes: int | None
    shm_free_bytes: int | None
    max_files: int | None  # the soft limit of this process
    max_processes: int | None  # still allowed, including threads
    compiler: str | None  # the C compiler that Triton would use
    has_python_headers: bool


def read_system(environment: Mapping[str, str]) -> System:
    """The facts of this host."""
    shm = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    paths = (shutil.which(name, path=environment.get("PATH")) for name in compilers)
    files, processes = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    problem = host_backend.preflight()
    try:
        os.close(os.memfd_create("symmoe-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        problem = problem or f"memfd_create: {error.strerror}"
    return System(
        os_name=platform.system(),
        os_release=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        host_problem=problem,
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        free_bytes=host_backend.available_bytes(),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        max_files=None if files == resource.RLIM_INFINITY else files,
        max_processes=min(
            (
                limit
                for limit in (processes, *host_backend.left_by_groups("pids"))
                if limit != resource.RLIM_INFINITY
            ),
            default=None,
        ),
        compiler=next((path for path in paths if path), None),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
    )


def check_system(system: System, *, has_gpu: bool) -> list[Finding]:
    """Findings about the host, and whether the kernels' launchers can be compiled."""
    problem = system.host_problem
    if problem and system.os_name != "Linux":
        return findings_about(
            "system",
            (True, "problem", problem, "run it on Linux: a container or a virtual machine will do"),
        )
    no_heap = "note" if has_gpu else "problem", f"no heap in host memory: {problem}"
    use = "Triton compiles a launcher for every kernel"
    free = "" if system.free_bytes is None else f", {_size(system.free_bytes)} of memory free"
    return findings_about(
        "system",
        *first(
            (
                "memfd" in problem,
                *no_heap,
                "allow memfd_create: docker run --security-opt seccomp=unconfined, or newer Docker and kernel",
            ),
            (
                problem,
                *no_heap,
                "" if has_gpu else "run it on a machine with x86-64, or with GPUs",
            ),
        ),
        (
            has_gpu and system.compiler is None,
            "problem",
            f"no C compiler: {use}",
            "apt-get install gcc, or set CC to the compiler's path",
        ),
        (
            has_gpu and not system.has_python_headers,
            "problem",
            f"Python.h is not there: {use}",
            f"apt-get install python{'.'.join(system.python.split('.')[:2])}-dev",
        ),
        (
            True,
            "ok",
            f"{system.os_name} {system.os_release}, {system.machine}, Python {system.python}, "
            f"{system.num_cores} core{'s' * (system.num_cores != 1)}{free}",
            "",
        ),
    )


def check_limits(system: System, *, has_gpu: bool) -> list[Finding]:
    """Memory, /dev/shm (for NCCL's buffers, not for the host heap), open files and processes."""
    files = system.max_files
    free = system.shm_free_bytes or 0
    total = system.shm_bytes or 0
    without_shm = "problem" if has_gpu else "note"
    rows: list[Row] = [
        (
            system.free_bytes is not None and system.free_bytes < _NEEDED_MEMORY_BYTES,
            "problem",
            f"{_size(system.free_bytes or 0)} of memory are free; two ranks take {_size(_NEEDED_MEMORY_BYTES)}",
            "end other jobs, or docker run --memory=8g",
        ),
        *first(
            (
                None in (system.shm_free_bytes, system.shm_bytes),
                without_shm,
                "there is no /dev/shm: NCCL, NVSHMEM and DataLoader workers need it, the host heap does not",
                _FIX_SHM,
            ),
            (
                free < _NEEDED_SHM_BYTES,
                without_shm,
                f"/dev/shm has {_size(free)} of {_size(total)} free: too little for NCCL, NVSHMEM and DataLoader "
                "workers",
                _FIX_SHM,
            ),
            (
                total < _GOOD_SHM_BYTES,
                "note",
                f"/dev/shm has {_size(total)}: the batches of DataLoader workers may not fit (bus error)",
                _FIX_SHM,
            ),
        ),
        (
            files is not None and files < _GOOD_FILES,
            "problem" if (files or 0) < _NEEDED_FILES else "note",
            f"{files} open files per process: connections to peers and shared memory take some each",
            "ulimit -n 65536, or docker run --ulimit nofile=65536",
        ),
        (
            system.max_processes is not None and system.max_processes < _GOOD_PROCESSES,
            "note",
            f"{system.max_processes} more processes and threads may be started; a rank has a hundred or so",
            "ulimit -u 65536, or docker run --pids-limit=-1",
        ),
    ]
    fine = f"/dev/shm {_size(free)} of {_size(total)} free, open files {files or 'no limit'}"
    return findings_about("limits", *rows, (not first(*rows), "ok", fine, ""))


def check_environment(
    environment: Mapping[str, str], *, has_gpu: bool, num_cores: int
) -> list[Finding]:
    """Problems of relevant variables, then one line with their values. symmoe sets NVSHMEM's variables only if the
    environment has not set them."""
    matters = [name for name in sorted(environment) if name in _NAMES or name.startswith(_PREFIXES)]
    values = {name: environment[name].encode("unicode_escape").decode() or "''" for name in matters}
    shown = {
        name: f"{name}={v if len(v) <= _SHOWN else v[: _SHOWN - 3] + '...'}"
        for name, v in values.items()
    }
    threads = environment.get("OMP_NUM_THREADS", "")
    return findings_about(
        "environment",
        *(
            (
                has_gpu and name in environment and _is_harmful(environment[name], wrong),
                level,
                f"{shown.get(name)}: {text}",
                f"unset {name}",
            )
            for name, (wrong, level, text) in _HURTS.items()
        ),
        *(
            (
                name.startswith("SYMMOE_") and name not in _FOLDERS,
                "note",
                f"{name}: symmoe reads no such variable, only SYMMOE_FLIGHT_DIR",
                f"unset {name}",
            )
            for name in matters
        ),
        *(
            (
                (has_gpu or level == "note")
                and environment.get(name)
                and not _is_writable(Path(environment[name])),
                level,
                f"{shown.get(name)} cannot be written to: {text}",
                f"export {name}=... to a folder of your own",
            )
            for name, (level, text) in _FOLDERS.items()
        ),
        (
            threads.isdigit() and int(threads) > num_cores,
            "note",
            f"OMP_NUM_THREADS={threads} on {num_cores} cores: every rank starts as many threads",
            "export OMP_NUM_THREADS=1",
        ),
        (True, "ok", " ".join(shown.values()) or "no variable that matters is set", ""),
    )


def _is_harmful(value: str, wrong: str) -> bool:
    """Whether a value is one of `wrong`, as in _HURTS."""
    word = value.strip().lower()
    return (word in _ON) == (wrong == "on") if wrong in ("on", "off") else word not in wrong.split()


def _is_writable(folder: Path) -> bool:
    """Whether files can be created in the folder; for a missing folder, whether the folder can be created."""
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/")
    )
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _size(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes >> 10} KiB"
