"""Runs the tests of Megatron-LM or of transformers, from a checkout of theirs, with symmoe's layers put in.

    python tests/upstream/run.py megatron CHECKOUT --record megatron.json
    python tests/upstream/run.py transformers CHECKOUT --record transformers.json

First as the checkout is ("plain"), then with symmoe in the place of the project's own parts, each form in processes of
its own. It prints and records how the tests ended and why; symmoe's calls are counted, so that a green result cannot be
empty. Exit status 1: symmoe has not run at all, or a test that passes without it fails with it, unless symmoe refuses
by name what the test asks for.

Needs what the checkout's own tests need: for Megatron-LM pytest, pytest-timeout, six, regex, pyyaml; for transformers
pytest, pytest-timeout, parameterized, datasets. Where torch sees no GPU, Megatron's tests run on CPUs (on_cpus.py).
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

REFUSALS = ("ArgumentError", "StalePlan")  # what symmoe raises where it does not do what is asked

ONLY_WITH_SYMMOE = "failed with symmoe only"
ONLY_WAITED = (
    "imed out",
    "Connection closed",
    "PeerTimeout",
    "Wait timeout",
)  # words of reasons of such ranks

Endings = dict[str, dict[str, Any]]  # by test: outcome, reason, num_calls, of recorder.Ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """How the tests of a project run."""

    plugin: str  # the module that puts symmoe in
    forms: tuple[str, ...]  # what the plugin can put in
    sources: tuple[str, ...]  # folders of the checkout on the module path
    tests: tuple[str, ...]  # that are run, in the checkout
    left_out: dict[str, str]  # parts of names of tests that are not, and why
    num_ranks: int  # processes of a run
    version_of: str  # the module whose version is recorded


PROJECTS = {
    "megatron": Project(
        plugin="swap_megatron",
        forms=("dispatcher", "experts"),
        sources=(".",),
        tests=tuple(  # those that run an MoE layer or its dispatcher
            f"tests/unit_tests/transformer/moe/test_{name}.py"
            for name in (
                "a2a_token_dispatcher",
                "token_dispatcher",
                "moe_layer_discrepancy",
                "shared_experts",
                "moe_layer",
                "sequential_mlp",
            )
        ),
        left_out={},
        num_ranks=2,  # a GPU machine may have the 8 that most of these tests are written for
        version_of="megatron.core",
    ),
    "transformers": Project(
        plugin="swap_transformers",
        forms=("experts",),
        sources=("src",),
        tests=tuple(
            f"tests/models/{name}/test_modeling_{name}.py"
            for name in ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
        ),
        left_out={
            **dict.fromkeys(
                ("test_tp_", "test_ep_", "test_fsdp2_"),
                "starts processes of its own, without the plugin",
            ),
            "compil": "compiles the plugin's code for minutes; symmoe's operator is compiled in tests/integrations",
        },
        num_ranks=1,
        version_of="transformers",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--tests", nargs="+", help="files or ids, in the checkout")
    parser.add_argument("--ranks", type=int, help="processes of a run")
    parser.add_argument(
        "--leave-out",
        nargs="*",
        default=[],
        metavar="PART",
        help="of names of tests, e.g. that hang",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=3600.0, help="of a run of all tests in one form"
    )
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    project = PROJECTS[options.project]
    tests = options.tests or project.tests
    num_ranks = options.ranks or project.num_ranks
    names = " and ".join(f"not {part}" for part in (*project.left_out, *options.leave_out))
    selection = [*tests, *(("-k", names) if names else ())]
    endings_by_form = {
        form: merged(
            run_form(project, options.checkout, form, selection, num_ranks, options.timeout_s)
        )
        for form in ("plain", *project.forms)
    }
    report = {
        "project": options.project,
        "commit": _commit(options.checkout),
        "version": _version(project, options.checkout),
        "symmoe": _commit(ROOT),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"python tests/upstream/run.py {options.project} CHECKOUT --ranks {num_ranks}",
        "tests": tests,
        "left_out": {**project.left_out, **dict.fromkeys(options.leave_out, "by --leave-out")},
        "forms": {
            form: summary(endings, endings_by_form["plain"])
            for form, endings in endings_by_form.items()
        },
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.record is not None:
        options.record.write_text(text + "\n")
    return int(
        any(problems(endings_by_form[form], endings_by_form["plain"]) for form in project.forms)
    )


def run_form(
    project: Project, checkout: Path, form: str, tests: list[str], num_ranks: int, timeout_s: float
) -> list[Endings]:
    """How the tests ended on each rank. A rank that has written nothing counts as one failed test."""
    checkout = checkout.resolve()
    paths = [
        *(checkout / source for source in project.sources),
        ROOT,
        HERE,
        HERE.parent / "support",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            options = f"-q --timeout=200 -p recorder -p {project.plugin} -p no:cacheprovider -o addopts=".split()
            options += [f"--symmoe-form={form}", f"--symmoe-endings={folder}/{rank}.json"]
            command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, *tests]
            log = open(f"{folder}/{rank}.log", "w")  # the process has it
            ranks.append(
                subprocess.Popen(
                    command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
            log.close()
        endings = []
        for rank, process in enumerate(ranks):
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
            written = Path(folder, f"{rank}.json")
            if written.exists():
                endings.append(json.loads(written.read_text()))
            else:
                last = Path(folder, f"{rank}.log").read_text().splitlines()[-30:]
                print(f"{form}, rank {rank}:", *last, sep="\n", file=sys.stderr)
                endings.append(
                    {
                        "(run)": {
                            "outcome": "failed",
                            "reason": "no result was written",
                            "num_calls": 0,
                        }
                    }
                )
        return endings


def merged(ranks: list[Endings]) -> Endings:
    """One ending per test: the worst of all ranks, with the first reason, and the calls of all of them. Reasons of
    ranks that only waited for one that failed come last."""
    actual: Endings = {}
    for name in dict.fromkeys(name for endings in ranks for name in endings):
        of_test = [endings[name] for endings in ranks if name in endings]
        worst = min(
            of_test, key=lambda ending: ("failed", "skipped", "passed").index(ending["outcome"])
        )
        same = [ending for ending in of_test if ending["outcome"] == worst["outcome"]]
        first = min(same, key=lambda ending: any(word in ending["reason"] for word in ONLY_WAITED))
        actual[name] = {**first, "num_calls": sum(ending["num_calls"] for ending in of_test)}
    return actual


def summary(endings: Endings, plain: Endings) -> dict[str, Any]:
    """Counts, and the tests that have not passed by kind and reason; of skips, of which there are hundreds, numbers."""
    counts = Counter(ending["outcome"] for ending in endings.values())
    not_passed: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(Counter))
    for name, ending in endings.items():
        if ending["outcome"] == "skipped":
            not_passed["skipped"].setdefault(ending["reason"], 0)
            not_passed["skipped"][ending["reason"]] += 1
        elif ending["outcome"] == "failed":
            not_passed[_kind(ending, plain.get(name, {}))][ending["reason"]][
                name.partition("[")[0]
            ] += 1
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "skipped", "failed")},
        "passed_in_which_symmoe_ran": sum(_has_run(ending) for ending in endings.values()),
        "calls_of_symmoe": sum(ending["num_calls"] for ending in endings.values()),
        "not_passed": not_passed,
    }


def problems(endings: Endings, plain: Endings) -> list[str]:
    """What is wrong with symmoe: tests that fail only with it, or that it has not run at all."""
    messages = [
        name
        for name, ending in endings.items()
        if _kind(ending, plain.get(name, {})) == ONLY_WITH_SYMMOE
    ]
    return (
        messages
        if any(map(_has_run, endings.values()))
        else [*messages, "symmoe has run in no test that passed"]
    )


def _has_run(ending: dict[str, Any]) -> bool:
    return ending["outcome"] == "passed" and ending["num_calls"] > 0


def _kind(ending: dict[str, Any], plain: dict[str, Any]) -> str:
    """Of a failure, by how the test ends without symmoe; else ""."""
    if ending["outcome"] != "failed":
        return ""
    if plain.get("outcome") == "failed":
        return "failed without symmoe too"
    is_refusal = any(f"symmoe.errors.{error}" in ending["reason"] for error in REFUSALS)
    return "refused by symmoe" if is_refusal else ONLY_WITH_SYMMOE


def _commit(folder: Path) -> str:
    return _output("git", "-C", str(folder), "rev-parse", "HEAD")


def _version(project: Project, checkout: Path) -> str:
    paths = os.pathsep.join(str(checkout.resolve() / source) for source in project.sources)
    code = f"import {project.version_of} as module; print(module.__version__)"
    return _output("env", f"PYTHONPATH={paths}", sys.executable, "-W", "ignore", "-c", code)


def _output(*command: str) -> str:
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        or "unknown"
    )


if __name__ == "__main__":
    sys.exit(main())
