"""Whether training in low precision ends where bf16 ends: the example with every recipe, same data, same initial model.

    python benchmarks/convergence.py --json convergence-cpu.json --plot convergence-cpu.png     # 2 CPUs, an hour
    python benchmarks/convergence.py --preset gpu-small --ranks 1 --seeds 0,1,2 --jobs 6 --seconds 900 \\
        --keep runs/convergence --json convergence-gpu.json --plot convergence-gpu.png

Runs examples/train_lm.py with --bf16 and each of the precisions, and compares what they end with on held-out text, seed
by seed. Seeds also show how far runs differ that differ in nothing else: a mean that is allowed, with a standard error
as large, says little. Exits with 1 if a way is further from bf16 than it may be, in the mean of the seeds, or if a run
has failed or is missing.

--jobs N runs so many side by side on the same devices. They share nothing, so their results are those of one after the
other; only tokens_per_s in their metrics is not. After --seconds nothing more starts; what has started may end, within
--timeout-s. The JSON is written again after every run that ends, so that a kill loses what was under way, no more.
--keep FOLDER keeps the runs (metrics, pictures, logs, no checkpoints), and takes those that are there already with the
same options: "kept" in the JSON says where they were made.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from symmoe.tools.bench.records import machine
from symmoe.tools.picture import BLACK, BLUE, GREY, ORANGE, PURPLE, SKY, picture

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
SMOOTHED_STEPS = 20
BASELINE = "bf16"
LOG_LINES = 60  # of a failed run that are shown: torchrun's own report comes last, and is half of them
POLL_S = 0.1
STOP_S = 45.0  # torchrun gives its ranks 30 s to end

Steps = list[dict[str, Any]]  # the metrics of one run
Curves = dict[str, dict[int, Steps]]  # by way and seed


@dataclass(frozen=True)
class Way:
    """One way to train: options of the example, and how much worse than bf16 it may end."""

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
        ranks, chosen: processes, and the options of the example but --out: what makes two runs the same.
    """

    way: str
    seed: int
    out: Path
    ranks: int
    chosen: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.way}, seed {self.seed}"

    @property
    def command(self) -> list[str]:
        """--standalone finds a free port, so that runs side by side do not meet."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*launcher, str(EXAMPLE), *self.chosen, "--out", str(self.out)]

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.out / "log.txt"

    def steps(self) -> Steps:
        """Of a run that has ended well."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def _note(self) -> Path:
        return self.out / "run.json"

    def note(self, env: dict[str, Any]) -> None:
        """Writes down that the run has ended well, and where."""
        made = {"ranks": self.ranks, "options": self.chosen, "env": env}
        self._note.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

    def forget(self) -> None:
        """Takes back the note of a run that is made again."""
        self._note.unlink(missing_ok=True)

    def env(self) -> dict[str, Any] | None:
        """Where the run was made that is there already; None if none, or one with other options, is."""
        if not self._note.exists():
            return None
        made = json.loads(self._note.read_text(encoding="utf-8"))
        same = (made["ranks"], tuple(made["options"])) == (self.ranks, self.chosen)
        return made["env"] if same else None


def runs_of(options: argparse.Namespace, folder: Path) -> list[Run]:
    """Seed by seed, each in all ways: if time is up, what is there can be compared."""
    steps = ("--steps", str(options.steps)) if options.steps else ()
    runs = []
    for seed in options.seeds:
        for name in (BASELINE, *(way for way in options.ways if way != BASELINE)):
            out = folder / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
            chosen = ("--preset", options.preset, "--bf16", "--seed", str(seed), *WAYS[name].options, *steps)
            runs.append(Run(name, seed, out, options.ranks, chosen))
    return runs


class Training:
    """A run that is under way."""

    def __init__(self, run: Run) -> None:
        self.run, self._start = run, time.monotonic()
        run.forget()
        run.out.mkdir(parents=True, exist_ok=True)
        threads = {"OMP_NUM_THREADS": "1"} | os.environ  # else every run would want all cores for itself
        with run.log.open("wb") as log:
            self._process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=threads)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def problem(self) -> str | None:
        """None while it runs; "" if it has ended well."""
        code = self._process.poll()
        return code if code is None else f"exit code {code}" if code else ""

    def ask_to_stop(self) -> None:
        """torchrun passes it on; its ranks lead sessions of their own, and would outlive a SIGKILL."""
        self._process.terminate()

    def stop(self) -> None:
        """Returns when it has ended."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def train(runs: Sequence[Run], *, num_jobs: int, seconds: float, timeout_s: float) -> Iterator[tuple[Run, float, str]]:
    """Trains, and yields each run as it ends: how long it took, and what has gone wrong ("": nothing).

    Args:
        num_jobs: most runs at a time.
        seconds: after which no run starts.
        timeout_s: after which a run is stopped.
    """
    waiting, started = deque(runs), list[Training]()
    start_until = time.monotonic() + seconds
    try:
        while True:
            while waiting and len(started) < num_jobs and time.monotonic() < start_until:
                print(waiting[0], shlex.join(waiting[0].chosen), flush=True)
                started.append(Training(waiting.popleft()))
            if not started:
                return
            for training in [*started]:
                problem = training.problem()
                if problem is None and training.seconds > timeout_s:
                    training.stop()
                    problem = f"stopped after {timeout_s:.0f} s"
                if problem is not None:
                    started.remove(training)
                    yield training.run, training.seconds, problem
            time.sleep(POLL_S)
    finally:
        for training in started:
            training.ask_to_stop()
        for training in started:
            training.stop()


def heldout(steps: Steps) -> dict[int, float]:
    """Bits per byte by step, wherever they were evaluated."""
    return {step["step"]: step["heldout_bits_per_byte"] for step in steps if "heldout_bits_per_byte" in step}


def final_bits(by_seed: dict[int, Steps]) -> dict[int, float]:
    """By seed, held-out bits per byte at the end."""
    return {seed: [*heldout(steps).values()][-1] for seed, steps in by_seed.items()}


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean, and its standard error from the spread of the values; None where there are too few."""
    if len(values) < 2:
        return (values[0] if values else None), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def more_than(baseline: dict[int, float], bits: dict[int, float]) -> list[float]:
    """The relative differences of the seeds that both have."""
    return [bits[seed] / baseline[seed] - 1 for seed in bits if seed in baseline]


def results_of(curves: Curves) -> dict[str, dict[str, Any]]:
    """By way: held-out curves of the seeds, their ends, and the difference to bf16, paired by seed."""
    final = {way: final_bits(by_seed) for way, by_seed in curves.items()}
    results = {}
    for way, by_seed in curves.items():
        evaluated = {seed: heldout(steps) for seed, steps in by_seed.items()}
        mean, error = mean_and_error([*final[way].values()])
        more, more_error = mean_and_error(more_than(final.get(BASELINE, {}), final[way]))
        results[way] = {
            "heldout_bits_per_byte": {
                "steps": [*next(iter(evaluated.values()))],
                "seeds": {seed: [*bits.values()] for seed, bits in evaluated.items()},
            },
            "final_bits_per_byte": {"seeds": final[way], "mean": mean, "standard_error": error},
            "more_than_bf16": more,
            "more_than_bf16_standard_error": more_error,
            "allowed": WAYS[way].allowed,
        }
    return results


def is_within(result: dict[str, Any]) -> bool:
    """Whether the mean is allowed. NaN is not."""
    return result["more_than_bf16"] is not None and result["more_than_bf16"] <= result["allowed"]


def line_of(way: str, result: dict[str, Any]) -> str:
    """A result for people."""
    final, more = result["final_bits_per_byte"], result["more_than_bf16"]
    each = ", ".join(f"{bits:.4f}" for bits in final["seeds"].values())
    line = f"{way:28} {each} held-out bits per byte"
    if final["standard_error"] is not None:
        line += f", mean {final['mean']:.4f} +- {final['standard_error']:.4f}"
    if way == BASELINE:
        return line
    if more is None:
        return f"{line}; no seed that bf16 has as well"
    error = result["more_than_bf16_standard_error"]
    spread = "" if error is None else f" +- {100 * error:.2f}"
    return f"{line}; {100 * more:+.2f}{spread} % against bf16 (at most {100 * result['allowed']:.0f})"


def draw(curves: Curves, path: str) -> None:
    """Training loss, smoothed, and the difference to bf16 of what was held out, paired by seed; means of the seeds.

    Shades are standard errors, and the spread of bf16's own seeds about their mean.
    """
    baseline = {seed: torch.tensor([*heldout(steps).values()]) for seed, steps in curves.get(BASELINE, {}).items()}
    with picture(path, height_inches=3.2) as figure:
        left, right = figure.subplots(1, 2)
        for way, by_seed in curves.items():
            loss = torch.tensor([[step["train_bits_per_byte"] for step in steps] for steps in by_seed.values()]).mean(0)
            smooth = loss.unfold(0, min(SMOOTHED_STEPS, len(loss)), 1).mean(1)
            left.plot(range(len(loss) - len(smooth) + 1, len(loss) + 1), smooth, label=way, **WAYS[way].line)
            at = [*heldout(next(iter(by_seed.values())))]
            bits = {seed: torch.tensor([*heldout(steps).values()]) for seed, steps in by_seed.items()}
            if way == BASELINE:
                all_bits = torch.stack([*bits.values()])
                spread = 100 * (all_bits / all_bits.mean(0) - 1)
                right.fill_between(at, spread.amin(0), spread.amax(0), color=GREY, alpha=0.3, label="bf16, other seeds")
            elif paired := [100 * (bits[seed] / baseline[seed] - 1) for seed in bits if seed in baseline]:
                more = torch.stack(paired)
                mean, line = more.mean(0), WAYS[way].line
                right.plot(at, mean, marker="o", markersize=3, **line)
                if len(paired) > 1:
                    error = more.std(0) / math.sqrt(len(paired))
                    right.fill_between(at, mean - error, mean + error, color=line["color"], alpha=0.15, linewidth=0)
        left.set(xlabel="step", ylabel=f"bits per byte, mean of {SMOOTHED_STEPS} steps", title="Training")
        right.axhline(0, color=BLACK, linewidth=0.8)
        right.set(xlabel="step", ylabel="% more bits than bf16", title="Held-out text")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        if baseline:
            right.legend()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seeds", type=_seeds, default=[0], help="with commas between (default: 0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=_list_of_ways())
    parser.add_argument("--jobs", type=_positive, default=1, help="runs side by side on the same devices (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more runs after that time")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where runs are kept, and looked for")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", help="where to draw the curves (PNG)")
    return parser.parse_args()


def _list_of_ways() -> str:
    return f"besides bf16 (default: all): {', '.join(repr(way) for way in WAYS if way != BASELINE)}"


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(seed) for seed in text.split(",")))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


class Comparison:
    """The runs that are wanted, and what is known of them so far."""

    def __init__(self, wanted: Sequence[Run], env: dict[str, Any]) -> None:
        self._wanted, self._env = wanted, env
        self._failed: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []
        self._found: Curves = {}

    def take_kept(self) -> list[Run]:
        """Takes the runs that are there already; returns the others."""
        others = []
        for run in self._wanted:
            if (env := run.env()) is None:
                others.append(run)
            else:
                self._kept.append({"way": run.way, "seed": run.seed, "env": env})
                self._found.setdefault(run.way, {})[run.seed] = run.steps()
        return others

    def add(self, run: Run, problem: str) -> None:
        """A run that has ended, well if there is no problem."""
        if problem:
            log = "\n".join(run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
            print(f"{run}: {problem}\n{log}", flush=True)
            self._failed.append({"way": run.way, "seed": run.seed, "problem": problem, "log": log})
        else:
            shutil.rmtree(run.out / "checkpoints", ignore_errors=True)  # a model and its moments, of every run
            run.note(self._env)
            self._found.setdefault(run.way, {})[run.seed] = run.steps()

    @property
    def curves(self) -> Curves:
        """Of the runs that have ended well, in the order of WAYS and seeds."""
        return {way: dict(sorted(self._found[way].items())) for way in WAYS if way in self._found}

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        ended = {(run["way"], run["seed"]) for run in self._failed}
        ended |= {(way, seed) for way, by_seed in self._found.items() for seed in by_seed}
        return {
            "env": self._env,
            "results": results_of(self.curves),
            "failed": self._failed,
            "missing": [{"way": r.way, "seed": r.seed} for r in self._wanted if (r.way, r.seed) not in ended],
            "kept": self._kept,
        }


def write(record: dict[str, Any], path: Path | None) -> None:
    """Writes the record, if anybody wants it: the old one stays until the new one is whole."""
    if path is not None:
        aside = path.with_name(path.name + ".part")
        aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who stops it still gets what is there
    on_gpu = options.preset.startswith("gpu") and torch.cuda.is_available()
    env = machine(torch.device("cuda" if on_gpu else "cpu")) | {"command": shlex.join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory() as temporary:
        comparison = Comparison(runs_of(options, options.keep or Path(temporary)), env)
        to_do = comparison.take_kept()
        try:
            training = train(to_do, num_jobs=options.jobs, seconds=options.seconds, timeout_s=options.timeout_s)
            with closing(training):
                for run, seconds, problem in training:
                    comparison.add(run, problem)
                    write(comparison.record(), options.json)
                    print(f"{run}: {'failed' if problem else 'done'} after {seconds:.0f} s", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    record, curves = comparison.record(), comparison.curves
    write(record, options.json)
    for way, result in record["results"].items():
        print(line_of(way, result))
    for run in record["failed"]:
        print(f"failed: {run['way']}, seed {run['seed']}: {run['problem']}")
    for run in record["missing"]:
        print(f"missing: {run['way']}, seed {run['seed']}")
    if options.plot and curves:
        draw(curves, options.plot)
    whole = not (record["failed"] or record["missing"])
    return 0 if whole and all(is_within(result) for result in record["results"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
