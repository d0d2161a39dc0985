"""Whether training in low precision ends where bf16 ends: the example with every recipe, same data, same initial model.

    python benchmarks/convergence.py --out runs/cpu --json convergence-cpu.json --plot convergence-cpu.png     # an hour
    python benchmarks/convergence.py --preset gpu-small --ranks 1 --seeds 0,1,2 --jobs 6 --out runs/gpu --json gpu.json

Runs examples/train_lm.py with --bf16 and each of the precisions, and compares what they end with on held-out text, seed
by seed. Seeds also show how far runs differ that differ in nothing else: a mean that is allowed, with a standard error
as large, says little. Exits with 1 if a way is further from bf16 than it may be, in the mean of the seeds, or if a run
has failed.

--jobs N runs so many side by side on the same devices. They share nothing, so their results are those of one after the
other; only tokens_per_s in their metrics is not. --out FOLDER keeps metrics, pictures and logs, no checkpoints. Runs
that are there already with the same options are taken: "kept" in the JSON says where they were made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pictures import BLACK, BLUE, GREY, ORANGE, PURPLE, SKY, picture
from suites.cases import parser_of
from suites.records import machine, save

from symmoe.tools.shapes import Options

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
SMOOTHED_STEPS = 20
BASELINE = "bf16"
LOG_LINES = (
    60  # of a failed run that are shown: torchrun's own report comes last, and is half of them
)

Steps = list[dict[str, Any]]  # the metrics of one run
Curves = dict[str, dict[int, Steps]]  # by way and seed


@dataclass(frozen=True)
class Way:
    """A training recipe: options of the example, and how much worse than bf16 it may end."""

    options: tuple[str, ...]
    allowed: float
    line: dict[str, str]


WAYS = {
    BASELINE: Way((), 0.0, {"color": BLACK}),
    "float8-block": Way(("--precision", "float8-block"), 0.01, {"color": BLUE}),
    "float8-block, on the wire": Way(
        ("--precision", "float8-block", "--wire"), 0.01, {"color": SKY, "linestyle": "--"}
    ),
    "mxfp8": Way(("--precision", "mxfp8"), 0.01, {"color": ORANGE, "linestyle": "--"}),
    "nvfp4": Way(("--precision", "nvfp4"), 0.02, {"color": PURPLE, "linestyle": ":"}),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        out: its own folder, where it leaves everything.
        command: without the folder: what makes two runs the same.
    """

    way: str
    seed: int
    out: Path
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.way}, seed {self.seed}"

    def env(self) -> dict[str, Any] | None:
        """The machine of an existing run; None if there is none, or its command differs."""
        note = self.out / "run.json"
        saved = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
        return saved["env"] if saved.get("command") == list(self.command) else None

    def train(self, env: dict[str, Any]) -> str:
        """Runs the training; returns the end of the log if it failed, else ""."""
        note, log = self.out / "run.json", self.out / "log.txt"
        self.out.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        print(f"{self}: {shlex.join(self.command)}", flush=True)
        # --standalone finds a free port, so that runs side by side do not meet.
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with log.open("wb") as file:
            process = subprocess.run(
                [*launcher, *self.command, "--out", str(self.out)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1"} | os.environ,  # else every run would want all cores
            )
        if process.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join([f"exit code {process.returncode}", *lines[-LOG_LINES:]])
        # A model and its moments, of every run.
        shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
        save({"command": self.command, "env": env}, note)
        return ""

    def steps(self) -> Steps:
        """The metrics of a successful run."""
        return [
            json.loads(line)
            for line in (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]


def runs_of(options: argparse.Namespace) -> list[Run]:
    """All runs: for each seed, each recipe."""
    steps = ("--steps", str(options.steps)) if options.steps else ()
    runs = []
    for seed in options.seeds:
        for name in (BASELINE, *(recipe for recipe in options.ways if recipe != BASELINE)):
            out = options.out / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
            command = (
                f"--nproc-per-node={options.ranks}",
                str(EXAMPLE),
                "--preset",
                options.preset,
                "--bf16",
                "--seed",
                str(seed),
                *WAYS[name].options,
                *steps,
            )
            runs.append(Run(name, seed, out, command))
    return runs


def heldout(steps: Steps) -> dict[int, float]:
    """Held-out bits per byte by step, for steps with an evaluation."""
    return {
        step["step"]: step["heldout_bits_per_byte"]
        for step in steps
        if "heldout_bits_per_byte" in step
    }


def bits_of(by_seed: dict[int, Steps]) -> torch.Tensor:
    """[seeds, evaluations] held-out bits per byte."""
    return torch.tensor(
        [[*heldout(steps).values()] for steps in by_seed.values()], dtype=torch.float64
    )


def more_than_bf16(curves: Curves, recipe: str) -> torch.Tensor:
    """[seeds, evaluations] relative differences, for the seeds of both."""
    baseline = curves.get(BASELINE, {})
    both = [seed for seed in curves[recipe] if seed in baseline]
    bits, of_baseline = (
        bits_of({seed: by_seed[seed] for seed in both}) for by_seed in (curves[recipe], baseline)
    )
    return bits / of_baseline - 1


def mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mean over the first dimension, and its standard error from the spread of the values; None with too few
    values."""
    mean = values.mean(0) if len(values) else None
    return mean, values.std(0) / math.sqrt(len(values)) if len(values) > 1 else None


def results_of(curves: Curves) -> dict[str, dict[str, Any]]:
    """By recipe: held-out curves of the seeds, their ends, and the difference to bf16, paired by seed."""
    results = {}
    for recipe, by_seed in curves.items():
        bits = bits_of(by_seed)
        mean, error, difference, difference_error = (
            None if figure is None else figure[-1].item()
            for values in (bits, more_than_bf16(curves, recipe))
            for figure in mean_and_error(values)
        )
        results[recipe] = {
            "heldout_bits_per_byte": {
                "steps": [*heldout(next(iter(by_seed.values())))],
                "seeds": dict(zip(by_seed, bits.tolist(), strict=True)),
            },
            "final_bits_per_byte": {
                "seeds": dict(zip(by_seed, bits[:, -1].tolist(), strict=True)),
                "mean": mean,
                "standard_error": error,
            },
            "more_than_bf16": difference,
            "more_than_bf16_standard_error": difference_error,
            "allowed": WAYS[recipe].allowed,
        }
    return results


def is_within(result: dict[str, Any]) -> bool:
    """Whether the mean difference is allowed. NaN is not."""
    return result["more_than_bf16"] is not None and result["more_than_bf16"] <= result["allowed"]


def line_of(recipe: str, result: dict[str, Any]) -> str:
    """A result as a line of text."""
    final = result["final_bits_per_byte"]
    difference = result["more_than_bf16"]
    seeds = ", ".join(f"{bits:.4f}" for bits in final["seeds"].values())
    line = f"{recipe:28} {seeds} held-out bits per byte"
    if final["standard_error"] is not None:
        line += f", mean {final['mean']:.4f} +- {final['standard_error']:.4f}"
    if recipe == BASELINE:
        return line
    if difference is None:
        return f"{line}; no seed that bf16 has as well"
    error = result["more_than_bf16_standard_error"]
    spread = "" if error is None else f" +- {100 * error:.2f}"
    return f"{line}; {100 * difference:+.2f}{spread} % against bf16 (at most {100 * result['allowed']:.0f})"


def draw(curves: Curves, path: str) -> None:
    """Training loss, smoothed, and the difference to bf16 of what was held out, paired by seed; means of the seeds.

    Shades are standard errors, and the spread of bf16's own seeds about their mean.
    """
    with picture(path, height_inches=3.2) as figure:
        training_axis, heldout_axis = figure.subplots(1, 2)
        for recipe, by_seed in curves.items():
            loss = torch.tensor(
                [[step["train_bits_per_byte"] for step in steps] for steps in by_seed.values()]
            ).mean(0)
            smooth = loss.unfold(0, min(SMOOTHED_STEPS, len(loss)), 1).mean(1)
            at = range(len(loss) - len(smooth) + 1, len(loss) + 1)
            line = WAYS[recipe].line
            training_axis.plot(at, smooth, label=recipe, **line)
            at = [*heldout(next(iter(by_seed.values())))]
            if recipe == BASELINE:
                bits = bits_of(by_seed)
                bounds = 100 * (torch.stack(torch.aminmax(bits, dim=0)) / bits.mean(0) - 1)
                heldout_axis.fill_between(
                    at, *bounds, color=GREY, alpha=0.3, label="bf16, other seeds"
                )
                continue
            mean, error = mean_and_error(100 * more_than_bf16(curves, recipe))
            if mean is not None:
                heldout_axis.plot(at, mean, marker="o", markersize=3, **line)
            if error is not None:
                bounds = mean - error, mean + error
                heldout_axis.fill_between(at, *bounds, color=line["color"], alpha=0.15, linewidth=0)
        training_axis.set(
            xlabel="step", ylabel=f"bits per byte, mean of {SMOOTHED_STEPS} steps", title="Training"
        )
        heldout_axis.axhline(0, color=BLACK, linewidth=0.8)
        heldout_axis.set(xlabel="step", ylabel="% more bits than bf16", title="Held-out text")
        figure.legend(
            *training_axis.get_legend_handles_labels(), loc="outside lower center", ncols=3
        )
        if BASELINE in curves:
            heldout_axis.legend()


OPTIONS: Options = {
    "--preset": {"default": "cpu"},
    "--ranks": {"type": int, "default": 2},
    "--steps": {"type": int, "help": "default: the preset's"},
    "--seeds": {
        "type": lambda text: [*map(int, text.split(","))],
        "default": [0],
        "help": "as in 0,1 (0)",
    },
    "--ways": {
        "nargs": "+",
        "choices": WAYS,
        "default": list(WAYS),
        "help": "besides bf16 (all)",
    },
    "--jobs": {
        "type": int,
        "default": 1,
        "help": "runs side by side on the same devices (%(default)s)",
    },
    "--out": {
        "type": Path,
        "required": True,
        "metavar": "FOLDER",
        "help": "where runs are kept, and looked for",
    },
    "--json": {"type": Path, "help": "where to write the figures"},
    "--plot": {"help": "where to draw the curves (PNG)"},
}


def main() -> int:
    options = parser_of(__doc__, OPTIONS).parse_args()
    on_gpu = options.preset.startswith("gpu") and torch.cuda.is_available()
    env = machine(torch.device("cuda" if on_gpu else "cpu")) | {
        "command": shlex.join(["python", *sys.argv])
    }
    runs = runs_of(options)
    saved = [
        {"way": run.way, "seed": run.seed, "env": where}
        for run in runs
        if (where := run.env()) is not None
    ]
    to_do = [run for run in runs if run.env() is None]
    with ThreadPoolExecutor(options.jobs) as jobs:
        logs = dict(zip(to_do, jobs.map(lambda run: run.train(env), to_do), strict=True))
    failed = [{"way": run.way, "seed": run.seed, "log": log} for run, log in logs.items() if log]
    ended = [run for run in runs if not logs.get(run)]
    curves = {
        recipe: {run.seed: run.steps() for run in ended if run.way == recipe}
        for recipe in WAYS
        if any(run.way == recipe for run in ended)
    }
    results = results_of(curves)
    if options.json:
        record = {"env": env, "results": results, "failed": failed, "kept": saved}
        save(record, options.json)
    for recipe, result in results.items():
        print(line_of(recipe, result))
    for run in failed:
        print(f"failed: {run['way']}, seed {run['seed']}: {run['log']}")
    if options.plot and curves:
        draw(curves, options.plot)
    return 0 if not failed and all(map(is_within, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
