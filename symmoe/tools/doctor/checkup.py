"""All of `symmoe doctor`: reads the facts of the machine, and runs every check on its part of them."""

from __future__ import annotations

from collections.abc import Mapping

from symmoe.tools.doctor import nvidia_smi
from symmoe.tools.doctor.environment import check_environment
from symmoe.tools.doctor.findings import Finding
from symmoe.tools.doctor.gpus import Gpus, check_gpus, check_links, read_gpus
from symmoe.tools.doctor.nvidia_smi import Report
from symmoe.tools.doctor.system import check_limits, check_system, read_system
from symmoe.tools.doctor.trial import MAX_GPUS, check_trial, run_trial
from symmoe.tools.doctor.versions import check_versions, read_versions


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Looks at this machine without running anything of symmoe on it."""
    return _examine(environment)[0]


def examine_and_try(environment: Mapping[str, str]) -> list[Finding]:
    """Looks at this machine and runs the self-test: on up to 8 GPUs, one process each, else on 2 CPU processes."""
    found, gpus, smi = _examine(environment)
    num_gpus = min(len(gpus.gpus), MAX_GPUS)
    trial = run_trial(num_gpus or 2, environment)
    return found + check_trial(trial, on_gpus=num_gpus > 0, link_gbs=_link_gbs(gpus, smi))


def _examine(environment: Mapping[str, str]) -> tuple[list[Finding], Gpus, Report]:
    system, versions, smi = read_system(environment), read_versions(), nvidia_smi.ask()
    gpus, visible = read_gpus(smi), environment.get("CUDA_VISIBLE_DEVICES")
    has_gpu = bool(gpus.gpus)
    used = {gpu.smi_index for gpu in gpus.gpus}
    links = {index: each for index, each in smi.links.items() if index in used}
    found = [
        *check_system(system, has_gpu=has_gpu),
        *check_versions(versions, has_gpu=has_gpu),
        *check_gpus(gpus, smi, torch_cuda=versions.torch_cuda, visible=visible),
        *check_links(gpus.pairs, links, visible=visible),
        *check_limits(system, has_gpu=has_gpu),
        *check_environment(environment, has_gpu=has_gpu, num_cores=system.num_cores),
    ]
    return found, gpus, smi


def _link_gbs(gpus: Gpus, smi: Report) -> float | None:
    """GB/s of all NVLinks of the GPU with the slowest ones; None if there are none, or it is not known."""
    indices = [gpu.smi_index for gpu in gpus.gpus if gpu.smi_index is not None]
    rates = [smi.links[index].gbs for index in indices if index in smi.links]
    return min(rates) if len(rates) > 1 and min(rates) > 0 else None
