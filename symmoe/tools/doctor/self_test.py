"""One rank of the self-test, in a separate process: `python -m symmoe.tools.doctor.self_test`. trial.py starts it.

Builds a heap, sends integers to experts that multiply them and back, compares every sum, and times dispatch, combine
and a plain copy of as many bytes between peers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from symmoe.dispatch.plan import make_plan
from symmoe.errors import PeerError, WrongResult
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.tools.bench.ranks import Ranks, join
from symmoe.tools.bench.timing import Variant, clock_for, in_steps, measure

_WAITS = 3  # a wait on the heap takes at most the deadline's third: a rank may compile kernels while the others wait
_EXPERTS_PER_RANK, _HIDDEN = 2, 64
_REPETITIONS = 10
_GRACE_S = 5.0
_SPARE_BYTES = 32 << 20  # of the heap, in addition to what is below


class Load(NamedTuple):
    """What is timed: tokens of a rank, each sent to one other rank."""

    num_tokens: int
    hidden: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.hidden * self.dtype.itemsize


_LOADS = {"cpu": Load(512, 1024, torch.float32), "cuda": Load(8192, 7168, torch.bfloat16)}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Writes what it has found, or the error, to `--out` as JSON."""
    parser = argparse.ArgumentParser(prog="symmoe.tools.doctor.self_test", description=__doc__)
    for name in ("store", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "num-ranks", "deadline-s"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    signal.alarm(args.deadline_s)  # ends this process even if the process that has started it is gone
    found: dict[str, Any]
    lingers = False
    try:
        with join(f"file://{args.store}", args.rank, args.num_ranks) as ranks:
            found = dict(run(ranks, args.deadline_s / _WAITS))
    except Exception as error:  # noqa: BLE001 - whatever it is, doctor has to tell it
        found = {"error": type(error).__name__, "text": str(error)}
        lingers = isinstance(error, PeerError)
    with open(f"{args.out}.part", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{args.out}.part", args.out)  # the whole file or nothing
    if lingers:  # the rank that it is about shall end first: torch ends the others once one has failed
        time.sleep(_GRACE_S)
    return int("error" in found)


def run(ranks: Ranks, wait_s: float) -> dict[str, float]:
    """Figures of the group: `heap_s` and, in GB/s of the slowest rank, `dispatch_gbs`, `combine_gbs`, `copy_gbs`.

    The latter are not there on one rank, where nothing moves. A wait on the heap takes at most `wait_s`. Collective.

    Raises:
        WrongResult: on every rank, if sums are wrong on any.
    """
    load = _LOADS[ranks.device.type]
    start = time.perf_counter()
    # Rows, what the plain copy brings, and in combine a place for sums of as many tokens from each peer.
    num_bytes = (3 + ranks.num_ranks - 1) * load.num_bytes + _SPARE_BYTES
    with SymmetricHeap(num_bytes=num_bytes, timeout_s=wait_s, start_timeout_s=wait_s) as heap:
        found = {"heap_s": ranks.largest(time.perf_counter() - start)}
        check(heap, ranks, load.dtype)
        if ranks.num_ranks > 1:
            found |= speeds(heap, ranks, load)
    return found


def check(heap: SymmetricHeap, ranks: Ranks, dtype: torch.dtype) -> None:
    """Small integers, whose sums every dtype holds, to two experts or one, that multiply them, and back. Collective.

    Raises:
        WrongResult: on every rank, if any element is wrong on any.
    """
    rank, num_experts, device = ranks.rank, _EXPERTS_PER_RANK * ranks.num_ranks, heap.device
    token = torch.arange(60 + 5 * rank, device=device)
    x = ((31 * rank + 7 * token[:, None] + torch.arange(_HIDDEN, device=device)) % 8).to(dtype)
    first = (token + rank) % num_experts
    second = torch.where(token % 7 > 0, (first + 1 + token % (num_experts - 1)) % num_experts, -1)
    chosen = torch.stack([first, second], dim=1)
    plan = make_plan(chosen, num_experts=num_experts, heap=heap)
    rows, _ = dispatch_tokens(x, plan)
    factors = torch.arange(1, 1 + _EXPERTS_PER_RANK, device=device) + _EXPERTS_PER_RANK * rank
    factors = factors.repeat_interleave(plan.splits.long())
    is_wrong = len(rows) != len(factors)
    y = combine_tokens(rows if is_wrong else rows * factors[:, None].to(dtype), plan)
    is_wrong |= not torch.equal(y, x * (chosen + 1).sum(1, keepdim=True).to(dtype))  # -1 counts nothing
    if ranks.largest(float(is_wrong)):
        raise WrongResult("dispatch or combine moved wrong rows")


def speeds(heap: SymmetricHeap, ranks: Ranks, load: Load) -> dict[str, float]:
    """GB/s per rank and direction of dispatch, combine and a plain copy, all ranks at once. Collective."""
    token = torch.arange(load.num_tokens)
    destination = (ranks.rank + 1 + token % (ranks.num_ranks - 1)) % ranks.num_ranks  # one expert per rank
    plan = make_plan(destination[:, None].to(heap.device), num_experts=ranks.num_ranks, heap=heap)
    x = torch.ones((load.num_tokens, load.hidden), dtype=load.dtype, device=heap.device)
    share = load.num_tokens // (ranks.num_ranks - 1)  # tokens that the copy sends to each rank
    peers = [(ranks.rank + step) % ranks.num_ranks for step in range(1, ranks.num_ranks)]  # not all to one at a time
    with (
        heap.lease((plan.row_capacity, load.hidden), load.dtype, name="rows") as rows,
        heap.lease((ranks.num_ranks * share, load.hidden), load.dtype, name="copy") as copied,
    ):
        out, here = rows.tensor, slice(ranks.rank * share, (ranks.rank + 1) * share)
        targets = [copied.peer(peer)[here] for peer in peers]

        def copy() -> None:
            for target in targets:
                target.copy_(x[:share])

        def align() -> None:
            ranks.head_start()
            heap.barrier(control.PHASE_START)

        dispatch_tokens(x, plan, out=out)  # combine follows a dispatch
        steps = {
            "dispatch": lambda: dispatch_tokens(x, plan, out=out),
            "combine": lambda: combine_tokens(plan.rows_of(out), plan),
            "copy": copy,
        }
        variants = [Variant(name, ("forward",), in_steps(step), lambda: 0.0) for name, step in steps.items()]
        times = measure(variants, ranks, clock_for(heap.device), repetitions=_REPETITIONS, align=align)
    return {f"{name}_gbs": load.num_bytes / float(np.median(ms)) / 1e6 for name, ms in times.items()}


if __name__ == "__main__":
    sys.exit(main())
