"""Whether training in low precision ends where bf16 ends: the example with every recipe, same data, same initial model.

    python benchmarks/convergence.py --json convergence-cpu.json --plot convergence-cpu.png     # 2 CPUs, an hour
    python benchmarks/convergence.py --preset gpu --ranks 4 --steps 100 --json ... --plot ...

Runs examples/train_lm.py with --bf16 and each of the precisions, one after the other, and compares what they end with
on held-out text. Fails if one is further from bf16 than it may be. --keep FOLDER keeps the runs, and takes those that
are there already.
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
from symmoe.picture import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, picture

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


def train(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The records of every step; of a run that is there already, or of a new one."""
    out = folder / name.replace(", ", "-").replace(" ", "-")
    metrics = out / "metrics.jsonl"
    if not metrics.exists() or "heldout_bits_per_byte" not in metrics.read_text().splitlines()[-1]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += [str(EXAMPLE), "--preset", options.preset, "--bf16", "--seed", str(options.seed), "--out", str(out)]
        command += ["--steps", str(options.steps)] if options.steps else []
        print(f"{name}:", *command[command.index(str(EXAMPLE)) :], *WAYS[name].options, flush=True)
        subprocess.run(
            [*command, *WAYS[name].options], check=True, stdout=subprocess.DEVNULL, timeout=options.timeout_s
        )
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def draw(curves: dict[str, list[dict[str, Any]]], path: str) -> None:
    """Training loss, smoothed, and the difference to bf16 of what was held out."""
    with picture(path, height_inches=3.2) as figure:
        left, right = figure.subplots(1, 2)
        for name, steps in curves.items():
            loss = torch.tensor([step["train_bits_per_byte"] for step in steps])
            smooth = loss.unfold(0, min(SMOOTHED_STEPS, len(loss)), 1).mean(1)
            left.plot(range(len(loss) - len(smooth) + 1, len(loss) + 1), smooth, label=name, **WAYS[name].line)
            if name != BASELINE:
                at, bits = heldout(steps)
                relative = [100 * (b / a - 1) for a, b in zip(heldout(curves[BASELINE])[1], bits, strict=True)]
                right.plot(at, relative, marker="o", markersize=3, label=name, **WAYS[name].line)
        left.set(xlabel="step", ylabel=f"training bits per byte, mean of {SMOOTHED_STEPS} steps", title="Training")
        right.axhline(0, color=BLACK, linewidth=0.8)
        right.set(xlabel="step", ylabel="% more bits than bf16", title="Held-out text")
        left.legend()


def heldout(steps: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Steps and bits per byte of all evaluations."""
    found = [(step["step"], step["heldout_bits_per_byte"]) for step in steps if "heldout_bits_per_byte" in step]
    return [at for at, _ in found], [bits for _, bits in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where runs are kept, and looked for")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--plot", help="where to draw the curves (PNG)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        curves = {name: train(name, options, options.keep or Path(temporary)) for name in WAYS}
    final = {name: steps[-1]["heldout_bits_per_byte"] for name, steps in curves.items()}
    missed = []
    for name, bits in final.items():
        more = bits / final[BASELINE] - 1
        print(
            f"{name:28} {bits:.4f} held-out bits per byte, {100 * more:+.2f} % (at most {100 * WAYS[name].allowed:.0f})"
        )
        if more > WAYS[name].allowed:
            missed.append(name)
    if options.json:
        results = {
            name: {
                "heldout_bits_per_byte": dict(zip(*heldout(steps), strict=True)),
                "more_than_bf16": final[name] / final[BASELINE] - 1,
                "allowed": WAYS[name].allowed,
                "train_bits_per_byte": [round(step["train_bits_per_byte"], 4) for step in steps[9::10]],
            }
            for name, steps in curves.items()
        }
        device = torch.device("cuda" if options.preset == "gpu" else "cpu")
        facts = machine(device) | {"command": " ".join(["python", *sys.argv])}
        Path(options.json).write_text(
            json.dumps({"env": facts, "seed": options.seed, "results": results}, indent=1) + "\n"
        )
    if options.plot:
        draw(curves, options.plot)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
