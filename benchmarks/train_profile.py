"""Where the time of the example's training steps goes on CPUs: products, optimizer, waiting, everything else.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 benchmarks/train_profile.py [--steps 8] [--repeats 7] [--top 10]

products    mm, addmm, bmm, and scaled-dot-product attention, which is one kernel (its softmax counts as a product)
optimizer   the whole of optimizer.step and zero_grad
waiting     for the other ranks: polling in barriers, and all-reduces from their start to their end
rest        everything else: operations, Python between them, autograd, batches; and what profiling costs

Every repeat trains the same steps from the same initial model, which does the same operations in each (their names and
the losses are compared). torch.profiler's timeline of a step is cut wherever an operation begins or ends, and a piece
counts with the least time that it took in a repeat, but for waiting, of which it is the median: another process that
takes the core away hits other pieces in each repeat. Take more repeats on a machine that is busy. What is printed of a
step is from the rank where the rest has the largest share of what is not waiting.

The profiler costs up to 1 us per operation, which all counts as rest. So each repeat also runs the steps without it:
"unprofiled" is CPU time of the thread (the least of the repeats), without what it polls, and less products and
optimizer as the profiler has seen them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import symmoe
from symmoe.kernels.twin import sync

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from lm.data import Corpus, load_corpus, train_batch
from lm.model import LanguageModel, heap_bytes, init_parameters
from lm.presets import PRESETS, Preset
from lm.ranks import Ranks, open_ranks
from train_lm import learning_rate, train_step

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", _ATTENTION, f"{_ATTENTION}_backward"}
STEP, POLLING, REDUCING = "training step", "polling in a barrier", "all-reduce"
KINDS = ("products", "optimizer", "waiting", "rest")


@dataclass
class Timeline:
    """The pieces of one profiled step, in order: what each belongs to, and its microseconds in every repeat."""

    owners: list[tuple[str, str]]  # kind and name of the innermost operation
    num_calls: Counter[str]
    repeats_us: list[list[float]]

    def pieces_us(self) -> Iterator[tuple[str, str, float]]:
        """(kind, name, microseconds) of each piece."""
        for (kind, name), piece_us in zip(self.owners, zip(*self.repeats_us, strict=True), strict=True):
            yield kind, name, statistics.median(piece_us) if kind == "waiting" else min(piece_us)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=[n for n, p in PRESETS.items() if p.device == "cpu"], default="cpu")
    parser.add_argument("--first", type=int, default=10, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=10, help="operations of the rest that are listed")
    return parser.parse_args()


@contextmanager
def named_waits() -> Iterator[list[float]]:
    """Gives waiting a name in the profile; sums up, in the list's one element, what it takes of the thread's time."""
    cpu_s = [0.0]

    def named(wait: Callable, name: str) -> Callable:
        def timed(*args: object, **options: object) -> object:
            began = time.thread_time()
            with _RecordFunctionFast(name):  # record_function takes 10 us
                result = wait(*args, **options)
            cpu_s[0] += time.thread_time() - began
            return result

        return timed

    with (
        mock.patch.object(sync, "_wait", named(sync._wait, POLLING)),
        mock.patch.object(dist, "all_reduce", named(dist.all_reduce, REDUCING)),
    ):
        yield cpu_s


class Run:
    """The same training from its first step on, as often as it is asked for."""

    def __init__(self, preset: Preset, ranks: Ranks, heap: symmoe.SymmetricHeap, corpus: Corpus) -> None:
        self._preset, self._ranks, self._corpus, self._rank = preset, ranks, corpus, heap.rank
        self._model = LanguageModel(preset, heap, device=ranks.device)

    def restart(self) -> None:
        """The initial model, and an optimizer that has done nothing."""
        init_parameters(self._model, seed=0, ep_rank=self._rank)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def step(self, step: int) -> float:
        """One step; its loss."""
        preset = self._preset
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(preset, step=step, steps=preset.steps)
        sequences = self._ranks.share(preset.sequences)
        batch = train_batch(self._corpus, seed=0, step=step, sequences=sequences, context=preset.context)
        return train_step(self._model, self._optimizer, batch, self._ranks)["loss"]


def pieces(event: FunctionEvent, kind: str = "rest") -> Iterator[tuple[str, str, float]]:
    """(kind, name, microseconds) of an event's pieces: between its children its own, and theirs."""
    if kind == "rest":  # what is called in the optimizer, or in a wait, belongs to it
        kind = kind_of(event.name)
    own_name = "Python of the step" if event.name == STEP else event.name
    # An operation inside of a product is not the product.
    inherited = "rest" if kind == "products" else kind
    time_us = event.time_range.start
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield kind, own_name, child.time_range.start - time_us
        yield from pieces(child, inherited)
        time_us = child.time_range.end
    yield kind, own_name, event.time_range.end - time_us


def kind_of(name: str) -> str:
    """Of an operation that is not part of another kind's."""
    if name in PRODUCTS:
        return "products"
    if name in (POLLING, REDUCING):
        return "waiting"
    return "optimizer" if name.startswith("Optimizer.") else "rest"


def measure(run: Run, first: int, num_steps: int) -> tuple[list[FunctionEvent], list[float], list[float]]:
    """One repeat: the profiled steps, the losses, and CPU microseconds of the unprofiled steps without polling."""
    losses, cpu_us = [], []
    with named_waits() as waited_s:
        run.restart()
        for step in range(first):
            run.step(step)
        for step in range(first, first + num_steps):
            began, waited = time.thread_time(), waited_s[0]
            run.step(step)
            cpu_us.append(1e6 * (time.thread_time() - began - (waited_s[0] - waited)))
        run.restart()
        for step in range(first):
            run.step(step)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for step in range(first, first + num_steps):
                with record_function(STEP):
                    losses.append(run.step(step))
    steps = [event for event in profiler.events() if event.name == STEP and event.cpu_parent is None]
    return sorted(steps, key=lambda event: event.time_range.start), losses, cpu_us


def main() -> None:
    arguments = parse_arguments()
    preset = PRESETS[arguments.preset]
    timelines: list[Timeline] = []
    all_losses, all_cpu_us = [], []
    with open_ranks("cpu") as ranks:
        num_bytes = heap_bytes(preset, num_ranks=ranks.size)
        with symmoe.SymmetricHeap(ranks.group, num_bytes=num_bytes, backend="host") as heap:
            run = Run(preset, ranks, heap, load_corpus())
            for _ in range(arguments.repeats):
                steps, losses, cpu_us = measure(run, arguments.first, arguments.steps)
                add_repeat(timelines, steps)
                all_losses.append(losses)
                all_cpu_us.append(cpu_us)
        if any(losses != all_losses[0] for losses in all_losses):
            raise RuntimeError("repeats of the same steps have different losses: they cannot be compared")
        table = []
        for timeline, step_cpu_us in zip(timelines, zip(*all_cpu_us, strict=True), strict=True):
            kinds_us = dict.fromkeys(KINDS, 0.0)
            for kind, _, piece_us in timeline.pieces_us():
                kinds_us[kind] += piece_us
            table.append([*kinds_us.values(), min(step_cpu_us)])
        tables = [table]
        if ranks.group is not None:
            tables = [None] * ranks.size
            dist.all_gather_object(tables, table, group=ranks.group)
        if ranks.is_main:
            show(tables, arguments.first)
            show_rest(timelines, arguments.top)


def add_repeat(timelines: list[Timeline], steps: list[FunctionEvent]) -> None:
    """Another repeat of the same steps.

    Raises:
        RuntimeError: it has done other operations than the repeats before it.
    """
    for i, step in enumerate(steps):
        cut = list(pieces(step))
        owners = [(kind, name) for kind, name, _ in cut]
        if i == len(timelines):
            timelines.append(Timeline(owners, count_calls(step), []))
        if owners != timelines[i].owners:
            raise RuntimeError("repeats of the same step do different operations: they cannot be compared")
        timelines[i].repeats_us.append([piece_us for _, _, piece_us in cut])


def count_calls(event: FunctionEvent) -> Counter[str]:
    """Operations by name, below an event."""
    counted = Counter(child.name for child in event.cpu_children)
    for child in event.cpu_children:
        counted += count_calls(child)
    return counted


def show(tables: list[list[list[float]]], first: int) -> None:
    """Milliseconds and shares of every step, on the rank where the rest's share is largest; then the largest."""
    print("                         milliseconds                   share of the rest, %")
    print("step rank | products optimizer waiting    rest |  busy  with waiting  unprofiled")
    largest = (0.0, 0.0, 0.0)
    for i, on_ranks in enumerate(zip(*tables, strict=True)):
        shares = [share_of(*row) for row in on_ranks]
        rank = max(range(len(shares)), key=lambda rank: shares[rank][0])
        products, optimizer, waiting, rest = (us / 1e3 for us in on_ranks[rank][:4])
        busy, with_waiting, unprofiled = shares[rank]
        print(f"{first + i + 1:4} {rank:4} | {products:8.1f} {optimizer:9.1f} {waiting:7.1f} {rest:7.1f}", end="")
        print(f" | {busy:5.1f} {with_waiting:13.1f} {unprofiled:11.1f}")
        largest = tuple(max(values) for values in zip(largest, *shares, strict=True))
    print(f"largest, of any step and rank                 | {largest[0]:5.1f} {largest[1]:13.1f} {largest[2]:11.1f}")


def share_of(products: float, optimizer: float, waiting: float, rest: float, cpu: float) -> tuple[float, float, float]:
    """Per cent: the rest of what is not waiting; rest and waiting of everything; the rest of the unprofiled step."""
    busy = products + optimizer + rest
    return 100 * rest / busy, 100 * (rest + waiting) / (busy + waiting), 100 * (1 - (products + optimizer) / cpu)


def show_rest(timelines: list[Timeline], top: int) -> None:
    """The largest operations of the rest on rank 0: means over the steps."""
    rest_us = Counter()
    for timeline in timelines:
        for kind, name, piece_us in timeline.pieces_us():
            if kind == "rest":
                rest_us[name] += piece_us / len(timelines)
    calls = timelines[0].num_calls
    print(f"rank 0: {calls.total():,} operations in a step; the largest of the rest, ms of their own, and calls:")
    for name, time_us in rest_us.most_common(top):
        print(f"  {time_us / 1e3:6.2f} {calls.get(name, 1):6}  {name}")


if __name__ == "__main__":
    main()
