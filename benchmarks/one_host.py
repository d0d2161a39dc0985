"""Checks and measures what all GPUs of one machine do together, in bounded time.

    python benchmarks/one_host.py out                                  all steps, on all GPUs
    python benchmarks/one_host.py out --steps steps,layer,nodes-2x4    some
    python benchmarks/one_host.py out --ranks 2                        without GPUs: on CPUs, with small sizes

A step is a command: `symmoe doctor`, `symmoe bench`, pytest, a suite of tests/reliability, an example. It ends in time
or is ended, the next one follows whatever has come of it, and all together take no longer than --seconds and half a
minute for what has to be ended. The folder gets, for a GPU and a number of ranks: one-host-h200-ep8.json with every
step's command, result and seconds, what it has found, and the machine (records of `symmoe bench` are in files of their
own, such as layer-h200-ep8.json), and one-host-h200-ep8.log with the ends of the steps' output. The exit status is 0 if
all steps have passed that could run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 560.0  # so that a command of ten minutes has time to end its last step
GRACE_S = 35.0  # torchrun gives its processes 30 s before it kills them
LEAST_S = 5.0  # a step that would get less is not begun
PATIENCE = 10.0  # times as long, on CPUs: nothing there measures speed, and a machine may be busy
LOG_TAIL = 6000  # characters of a step's output that are kept
PRESETS = "qwen3-30b,qwen3-235b,mixtral-8x7b,deepseek-like"
# NVLink multicast is not used; nobody else shall either.
ENVIRONMENT = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
SMALL = {"SYMMOE_CASE": ",".join(map(str, range(14)))}  # of the oracles' routings, one of each kind
DESCRIBE = """
import json, sys, torch
from symmoe.tools.bench.records import machine
print(json.dumps(machine(torch.device(sys.argv[1]))))
"""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        command: what python runs; "OUT" stands for the path of the file that it writes.
        limit_s: after which it is ended.
        writes: what that file is: "bench" (records), "json", "pytest" (JUnit's XML) or "stdout" (it prints JSON).
        needs: a module without which it is skipped.
    """

    command: tuple[str, ...]
    limit_s: float
    writes: str
    needs: str = "symmoe"


def steps_of(num_ranks: int, device: str, soak_steps: int) -> dict[str, Step]:
    """All steps by name, in their order. On CPUs with small sizes."""
    on_gpus = device == "cuda"
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    small = f"--hidden 64 --ffn 32 --experts {2 * num_ranks} --top-k 2 --tokens 64 --repetitions 2".split()

    def shapes(presets: str, *options: str) -> tuple[str, ...]:
        return ("--preset", presets, *options) if on_gpus else tuple(small)

    def bench(*arguments: str) -> tuple[str, ...]:
        return (*torchrun, "-m", "symmoe", "bench", *arguments, "--json", "OUT")

    def tests(*arguments: str) -> tuple[str, ...]:
        marked = "gpu" if on_gpus else "not gpu"
        return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *arguments, "--junitxml", "OUT")

    def suite(name: str, cases: int, jobs: int) -> tuple[str, ...]:
        group = ("--device", device, "--ranks", str(num_ranks), "--jobs", str(jobs))
        patience = () if on_gpus else ("--patience", f"{PATIENCE:.0f}")
        return ("-m", "tests.reliability", name, *group, *patience, "--cases", str(cases), "--json", "OUT")

    oracles = [f"tests/test_{name}.py" for name in ("dispatch_oracle", "combine_oracle", "layer")]
    of_this_size = f"({num_ranks} and GPUs) or [{num_ranks}-cuda" if on_gpus else f"[{num_ranks}] or [{num_ranks}-cpu"
    of_any_size = () if on_gpus else ("-k", f"[{num_ranks}-")  # GPUs: 1, 2, 4, 8, as many as there are
    found = {
        "doctor": Step(("-m", "symmoe", "doctor", "--json"), 60, "stdout"),
        "oracle": Step(tests(*oracles, "-k", of_this_size), 120, "pytest"),
        "invariance": Step(tests("tests/test_ep_invariance.py", *of_any_size), 100, "pytest"),
        "steps": Step(bench("steps", *shapes(PRESETS, "--repetitions", "5")), 120, "bench"),
        "layer": Step(bench("layer", *shapes(PRESETS)), 100, "bench"),
        "trips": Step(
            (*torchrun, "benchmarks/bench.py", "dispatch", "combine", *shapes(PRESETS), "--json", "OUT"), 60, "bench"
        ),
        "deepep": Step(
            (*torchrun, "benchmarks/deepep.py", *shapes(PRESETS, "--repetitions", "5"), "--json", "OUT"),
            60,
            "bench",
            needs="deep_ep",
        ),
    }
    if num_ranks >= 4:
        groups = ["tests/test_heap.py", *["tests/gpu/test_step_gpu.py"] * on_gpus]
        chosen = f"disjoint_groups and ([{num_ranks}-{device} or [{num_ranks}])"
        found["groups"] = Step(tests(*groups, "-k", chosen), 60, "pytest")
    for size in sorted({num_ranks // 2, 2} if num_ranks > 2 else {1}, reverse=True):
        nodes = ("--ranks-per-node", str(size))
        found[f"nodes-{num_ranks // size}x{size}"] = Step(bench("layer", *shapes("qwen3-30b"), *nodes), 40, "bench")
    found["faults"] = Step(suite("faults", *((24, 8) if on_gpus else (6, 1))), 130, "json")
    found["soak"] = Step(suite("soak", soak_steps, 1), 90, "json")
    training = ("--preset", "qwen3-30b", "--steps", "10") if on_gpus else ("--steps", "6")
    example = (*torchrun, "examples/megatron_gpt.py", *training, "--layer-steps", "0", "--json", "OUT")
    found["megatron"] = Step(example, 90, "json", needs="megatron")
    return found if on_gpus else {name: replace(step, limit_s=PATIENCE * step.limit_s) for name, step in found.items()}


def run_step(step: Step, folder: Path, limit_s: float) -> dict[str, Any]:
    """Runs a step in a folder of its own. Returns its entry in the record; what has been found is in "found"."""
    out, log = folder / "out", folder / "log"
    command = [str(out) if word == "OUT" else word for word in step.command]
    entry: dict[str, Any] = {"command": shlex.join(["python", *step.command]), "limit_s": round(limit_s, 1)}
    if importlib.util.find_spec(step.needs) is None:
        return {**entry, "result": "skipped", "reason": f"{step.needs} is not installed"}
    start = time.monotonic()
    code = _run([sys.executable, *command], out if step.writes == "stdout" else None, log, limit_s)
    entry["seconds"] = round(time.monotonic() - start, 1)
    found = None
    with suppress(OSError, ValueError, ElementTree.ParseError):
        found = _tests_in(out) if step.writes == "pytest" else json.loads(out.read_text(encoding="utf-8"))
    problem = f"ran past {limit_s:.0f} s" if code is None else f"ended with {code}" if code else ""
    if not problem and not found:
        problem = "no record"
    if not problem and step.writes == "pytest" and not found["passed"]:
        problem = "no test has run"
    return {**entry, "result": "failed" if problem else "passed", "reason": problem, "found": found}


def _run(command: list[str], out: Path | None, log: Path, limit_s: float) -> int | None:
    """The exit code; None if the command was ended because its time was up."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    small = {} if torch.cuda.is_available() else SMALL
    with log.open("wb") as errors, (out or log).open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**small, **os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors if out else subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):  # suites and torchrun end what they have started
            if process.poll() is None:
                os.killpg(process.pid, signal_number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)


def _tests_in(path: Path) -> dict[str, Any]:
    """Numbers of tests in JUnit's XML, and the names of those that have failed."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    kinds = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in (*kinds["failure"], *kinds["error"])]
    return {
        "passed": len(cases) - len(failed) - len(kinds["skipped"]),
        "failed": failed,
        "skipped": len(kinds["skipped"]),
    }


class Report:
    """The record of a run, which is written after every step: a run may be cut off."""

    def __init__(self, folder: Path, facts: dict[str, Any], device: str, num_ranks: int) -> None:
        name = facts["gpu"].split()[-1].lower() if device == "cuda" else "cpu"
        self._folder, self._of = folder, f"{name}-ep{num_ranks}"
        self._record: dict[str, Any] = {**facts, "ranks": num_ranks, "device": device, "steps": {}}
        self._logs: list[str] = []

    def add(self, name: str, step: Step, entry: dict[str, Any], log: str = "") -> None:
        """Notes a step, and prints a line of it."""
        if step.writes == "bench" and (records := entry.pop("found", None)):
            entry["file"] = f"{name}-{self._of}.json"
            self._write(entry["file"], json.dumps(records, indent=1))
        self._record["steps"][name] = entry
        self._logs.append(f"== {name}: {entry['command']}\n{log[-LOG_TAIL:]}")
        self._write(f"one-host-{self._of}.json", json.dumps(self._record, indent=1))
        self._write(f"one-host-{self._of}.log", "\n".join(self._logs))
        print(f"{name:12} {entry['result']:8} {entry.get('seconds', 0.0):6.1f} s  {entry['reason']}", flush=True)

    def summary(self) -> str:
        """How many steps have come to what end, and which have not passed."""
        results = {name: entry["result"] for name, entry in self._record["steps"].items()}
        kinds = {kind: [name for name in results if results[name] == kind] for kind in ("failed", "not run", "skipped")}
        passed = f"{list(results.values()).count('passed')} passed"
        return "; ".join(
            [passed, *(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in kinds.items() if names)]
        )

    @property
    def is_good(self) -> bool:
        """Whether every step that could run has passed."""
        return all(entry["result"] in ("passed", "skipped") for entry in self._record["steps"].values())

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(f"{text}\n", encoding="utf-8")


def run_all(steps: dict[str, Step], report: Report, seconds: float) -> bool:
    """Runs the steps one after the other. Returns whether all have passed that could run."""
    deadline = time.monotonic() + seconds
    for name, step in steps.items():
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            command = shlex.join(["python", *step.command])
            report.add(name, step, {"command": command, "result": "not run", "reason": "no time was left"})
            continue
        with tempfile.TemporaryDirectory(prefix="symmoe-one-host-") as folder:
            entry = run_step(step, Path(folder), min(step.limit_s, left_s))
            log = Path(folder, "log")
            report.add(name, step, entry, log.read_text(errors="replace") if log.exists() else "")
    print(report.summary(), flush=True)
    return report.is_good


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    device, num_gpus = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", 0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets the records")
    parser.add_argument("--ranks", type=int, default=num_gpus or 2, help="of the EP group (all GPUs; on CPUs 2)")
    parser.add_argument("--steps", help="comma-separated names (all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together (%(default)s)")
    parser.add_argument(
        "--soak-steps", type=int, default=5000 if num_gpus else 200, help="of the soak (%(default)s on this machine)"
    )
    options = parser.parse_args(arguments)
    steps = steps_of(options.ranks, device, options.soak_steps)
    names = options.steps.split(",") if options.steps else list(steps)
    if unknown := [name for name in names if name not in steps]:
        parser.error(f"steps ({', '.join(unknown)}) must be of {', '.join(steps)}")
    if num_gpus and options.ranks > num_gpus:
        parser.error(f"ranks ({options.ranks}) must be at most {num_gpus}, the number of GPUs")
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended, and the record is there
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # In a process of its own: this one leaves the GPUs alone.
    described = subprocess.run([sys.executable, "-c", DESCRIBE, device], env=paths, capture_output=True, check=True)
    given = sys.argv[1:] if arguments is None else arguments
    facts = {**json.loads(described.stdout), "command": shlex.join(["python", "benchmarks/one_host.py", *given])}
    report = Report(options.folder, facts, device, options.ranks)
    try:
        return 0 if run_all({name: steps[name] for name in names}, report, options.seconds) else 1
    except KeyboardInterrupt:
        print(f"interrupted: {report.summary()}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
