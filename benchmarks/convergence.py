"""Whether training in low precision ends where bf16 ends: the example with every recipe, same data, same initial model.

    python benchmarks/convergence.py --json convergence-cpu.json --plot convergence-cpu.png     # 2 CPUs, an hour
    python benchmarks/convergence.py --preset gpu-small --ranks 1 --seeds 0,1 --json ... --plot ...

Runs examples/train_lm.py with --bf16 and each of the precisions, one after the other, and compares what they end with
on held-out text, in the mean of the seeds. Fails if one is further from bf16 than it may be. Seeds also show how far
runs differ that differ in nothing else. --keep FOLDER keeps the runs, and takes those that are there already.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from symmoe.bench.records import machine
from symmoe.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, picture

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
SMOOTHED_STEPS = 20
BASELINE = "bf16"


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
    "float8-rowwise": Way(("--precision", "float8-rowwise"), 0.01, {"color": GREEN, "linestyle": "-."}),
    "mxfp8": Way(("--precision", "mxfp8"), 0.01, {"color": ORANGE, "linestyle": "--"}),
    "nvfp4": Way(("--precision", "nvfp4"), 0.02, {"color": PURPLE, "linestyle": ":"}),
}


def train(name: str, seed: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The records of every step; of a run that is there already, or of a new one."""
    out = folder / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
    metrics = out / "metrics.jsonl"
    if not metrics.exists() or "heldout_bits_per_byte" not in metrics.read_text().splitlines()[-1]:
        chosen = ["--preset", options.preset, "--bf16", "--seed", str(seed), "--out", str(out), *WAYS[name].options]
        chosen += ["--steps", str(options.steps)] if options.steps else []
        print(name, *chosen, flush=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command = [*launcher, str(EXAMPLE), *chosen]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=options.timeout_s)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def heldout(runs: list[list[dict[str, Any]]]) -> tuple[list[int], torch.Tensor]:
    """Steps, and bits per byte [seeds, evaluations]."""
    evaluations = [[step for step in steps if "heldout_bits_per_byte" in step] for steps in runs]
    bits = [[step["heldout_bits_per_byte"] for step in steps] for steps in evaluations]
    return [step["step"] for step in evaluations[0]], torch.tensor(bits, dtype=torch.float64)


def draw(curves: dict[str, list[list[dict[str, Any]]]], path: str) -> None:
    """Training loss, smoothed, and the difference to bf16 of what was held out; means of the seeds."""
    baseline = heldout(curves[BASELINE])[1].mean(0)
    with picture(path, height_inches=3.2) as figure:
        left, right = figure.subplots(1, 2)
        for name, runs in curves.items():
            loss = torch.tensor([[step["train_bits_per_byte"] for step in steps] for steps in runs]).mean(0)
            smooth = loss.unfold(0, min(SMOOTHED_STEPS, len(loss)), 1).mean(1)
            left.plot(range(len(loss) - len(smooth) + 1, len(loss) + 1), smooth, label=name, **WAYS[name].line)
            at, bits = heldout(runs)
            if name == BASELINE:
                spread = 100 * (bits / baseline - 1)
                right.fill_between(at, spread.amin(0), spread.amax(0), color=GREY, alpha=0.3, label="bf16, other seeds")
            else:
                right.plot(at, 100 * (bits.mean(0) / baseline - 1), marker="o", markersize=3, **WAYS[name].line)
        left.set(xlabel="step", ylabel=f"bits per byte, mean of {SMOOTHED_STEPS} steps", title="Training")
        right.axhline(0, color=BLACK, linewidth=0.8)
        right.set(xlabel="step", ylabel="% more bits than bf16", title="Held-out text")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        right.legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seeds", default="0", help="with commas between (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where runs are kept, and looked for")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--plot", help="where to draw the curves (PNG)")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        curves = {name: [train(name, seed, options, folder) for seed in seeds] for name in WAYS}
    final = {name: heldout(runs)[1][:, -1] for name, runs in curves.items()}
    baseline = final[BASELINE].mean()
    results, missed = {}, []
    for name, bits in final.items():
        more, allowed = float(bits.mean() / baseline - 1), WAYS[name].allowed
        each = ", ".join(f"{float(b):.4f}" for b in bits)
        print(f"{name:28} {each} held-out bits per byte, {100 * more:+.2f} % (at most {100 * allowed:.0f})")
        if more > allowed:
            missed.append(name)
        at, evaluated = heldout(curves[name])
        results[name] = {
            "heldout_bits_per_byte": {"steps": at, "seeds": dict(zip(seeds, evaluated.tolist(), strict=True))},
            "more_than_bf16": more,
            "allowed": allowed,
        }
    if options.json:
        device = torch.device("cuda" if options.preset.startswith("gpu") else "cpu")
        facts = machine(device) | {"command": " ".join(["python", *sys.argv])}
        Path(options.json).write_text(json.dumps({"env": facts, "results": results}, indent=1) + "\n")
    if options.plot:
        draw(curves, options.plot)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
