"""Output of a run: a progress line, `metrics.jsonl`, and two pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

Record = dict[str, int | float | list[int] | list[list[int]]]


class Reporter:
    """Prints and records one step after another. On ranks other than 0 it does nothing.

    On a terminal one line updates in place; elsewhere every evaluation prints a line.
    """

    def __init__(self, path: Path, *, steps: int, start: int, enabled: bool) -> None:
        self._enabled = enabled
        self._in_place = enabled and sys.stderr.isatty()
        self._heldout = "-"  # until the first evaluation
        self._bar = tqdm(
            total=steps, initial=start, disable=not self._in_place, unit="step", dynamic_ncols=True
        )
        if enabled:
            _truncate(path, last_step=start)
            self._file = path.open("a")

    def record(self, record: Record) -> None:
        """Appends one step to `metrics.jsonl` and refreshes the progress line."""
        if not self._enabled:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        evaluated = "heldout_bits_per_byte" in record
        if evaluated:
            self._heldout = f"{record['heldout_bits_per_byte']:.3f}"
        line = (
            f"loss {record['loss']:.3f} | held-out {self._heldout} bits/byte"
            f" | {record['tokens_per_s']:,.0f} tokens/s | imbalance {record['imbalance']:.2f}"
        )
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update()
        if evaluated and not self._in_place:
            print(f"step {record['step']}: {line}", flush=True)

    def close(self) -> None:
        self._bar.close()
        if self._enabled:
            self._file.close()


def _truncate(path: Path, *, last_step: int) -> None:
    """Keeps the records up to `last_step`: the run repeats those after it. An incomplete last line is removed, too."""
    remaining = (
        [r for r in read_records(path) if r["step"] <= last_step]
        if last_step and path.exists()
        else []
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in remaining))


def read_records(path: Path) -> list[Record]:
    """The whole lines of `metrics.jsonl`."""
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def plot(folder: Path) -> None:
    """Draws `loss.png` and `experts.png` from `metrics.jsonl`; prints a note if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no loss.png and experts.png: matplotlib is not installed (pip install matplotlib)")
        return
    import plot_load

    matplotlib.use("Agg")
    records = read_records(folder / "metrics.jsonl")
    _plot_loss(records, folder / "loss.png")
    plot_load.draw(folder / "metrics.jsonl", folder / "experts.png")


def _plot_loss(records: list[Record], path: Path) -> None:
    from matplotlib import pyplot as plt

    steps = [r["step"] for r in records]
    evaluated = [r for r in records if "heldout_bits_per_byte" in r]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(
        steps,
        [r["train_bits_per_byte"] for r in records],
        lw=0.8,
        color="0.6",
        label="training batch",
    )
    heldout = [r["heldout_bits_per_byte"] for r in evaluated]
    axes.plot([r["step"] for r in evaluated], heldout, "o-", label="held-out")
    axes.axhline(
        records[-1]["byte_frequency_bits_per_byte"], ls="--", color="C3", label="byte frequencies"
    )
    axes.set(
        xlabel="step", ylabel="bits per byte", ylim=(0, None), title="Byte-level MoE language model"
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
