"""One rank of the self-test, in a separate process: `python -m symmoe.tools.doctor.self_test`. trial.py starts it.

Builds a heap, compares dispatch and combine with loops over integers, element by element, and times them
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
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from symmoe.dispatch.plan import make_plan
from symmoe.errors import WrongResult
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.tools.bench.ranks import Ranks, join
from symmoe.tools.bench.timing import Variant, clock_for, in_steps, measure

_WAITS = 3  # a wait on the heap takes at most the deadline's third: a rank may compile kernels while the others wait
_EXPERTS_PER_RANK, _TOP_K, _HIDDEN = 2, 2, 64
_REPETITIONS = 10


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is timed: tokens of a rank, each sent to one other rank."""

    num_tokens: int
    hidden: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.hidden * self.dtype.itemsize


_LOADS = {
    "cpu": Load(num_tokens=512, hidden=1024, dtype=torch.float32),
    "cuda": Load(num_tokens=8192, hidden=7168, dtype=torch.bfloat16),
}
_SPARE_BYTES = 32 << 20  # of the heap, in addition to what is below


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Writes what it has found, or the error, to `--out` as JSON."""
    parser = argparse.ArgumentParser(prog="symmoe.tools.doctor.self_test", description=__doc__)
    for name in ("store", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "num-ranks", "deadline-s"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    signal.alarm(args.deadline_s)  # ends this process even if the process that has started it is gone
    try:
        with join(f"file://{args.store}", args.rank, args.num_ranks) as ranks:
            found = run(ranks, args.deadline_s / _WAITS)
    except Exception as error:  # noqa: BLE001 - whatever it is, doctor has to tell it
        _write(args.out, {"error": type(error).__name__, "text": str(error)})
        return 1
    _write(args.out, found)
    return 0


def run(ranks: Ranks, wait_s: float) -> dict[str, float]:
    """Figures of the group: `heap_s` and, in GB/s of the slowest rank, `dispatch_gbs`, `combine_gbs`, `copy_gbs`.

    The latter are not there on one rank, where nothing moves. A wait on the heap takes at most `wait_s`. Collective.

    Raises:
        WrongResult: on every rank, if rows or sums are wrong on any.
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
    """Dispatch and combine of small integers, whose sums every dtype holds. Collective.

    Raises:
        WrongResult: on every rank, if any element is wrong on any.
    """
    rank, num_experts = ranks.rank, _EXPERTS_PER_RANK * ranks.num_ranks
    tokens = [_tokens_of(each) for each in range(ranks.num_ranks)]
    routing = [_routing_of(each, num_experts) for each in range(ranks.num_ranks)]
    x = torch.from_numpy(tokens[rank]).to(heap.device, dtype)
    plan = make_plan(torch.from_numpy(routing[rank]).to(heap.device), num_experts=num_experts, heap=heap)
    rows, _ = dispatch_tokens(x, plan)

    expected, factors = [], []
    for expert in range(rank * _EXPERTS_PER_RANK, (rank + 1) * _EXPERTS_PER_RANK):
        for source in range(ranks.num_ranks):
            for token, chosen in enumerate(routing[source]):
                if expert in chosen:
                    expected.append(tokens[source][token])
                    factors.append(expert + 1)
    got = rows.float().cpu().numpy()
    _refuse("dispatch", ranks, got.shape != (len(expected), _HIDDEN) or (got != np.stack(expected)).any())

    factor = torch.tensor(factors, dtype=dtype, device=heap.device)[:, None]
    y = combine_tokens(rows * factor, plan).float().cpu().numpy()
    sums = [sum(expert + 1 for expert in chosen if expert >= 0) for chosen in routing[rank]]
    _refuse("combine", ranks, (y != tokens[rank] * np.array(sums)[:, None]).any())


def speeds(heap: SymmetricHeap, ranks: Ranks, load: Load) -> dict[str, float]:
    """GB/s per rank and direction of dispatch, combine and a plain copy, all ranks at once. Collective."""
    token = torch.arange(load.num_tokens)
    destination = (ranks.rank + 1 + token % (ranks.num_ranks - 1)) % ranks.num_ranks  # one expert per rank
    plan = make_plan(destination[:, None].to(heap.device), num_experts=ranks.num_ranks, heap=heap)
    x = torch.ones((load.num_tokens, load.hidden), dtype=load.dtype, device=heap.device)
    share = load.num_tokens // (ranks.num_ranks - 1)  # tokens that the copy sends to each rank
    peers = [(ranks.rank + step) % ranks.num_ranks for step in range(1, ranks.num_ranks)]  # not all to one at a time
    size = (ranks.num_ranks * share, load.hidden)
    with (
        heap.lease((plan.row_capacity, load.hidden), load.dtype, name="rows") as rows,
        heap.lease(size, load.dtype, name="copy") as copied,
    ):
        out, here = rows.tensor, slice(ranks.rank * share, (ranks.rank + 1) * share)
        targets = [copied.peer(peer)[here] for peer in peers]

        def dispatch() -> None:
            dispatch_tokens(x, plan, out=out)

        def combine() -> None:
            combine_tokens(plan.rows_of(out), plan)

        def copy() -> None:
            for target in targets:
                target.copy_(x[:share])

        def align() -> None:
            ranks.head_start()
            heap.barrier(control.PHASE_START)

        dispatch()  # combine follows a dispatch
        steps = {"dispatch": dispatch, "combine": combine, "copy": copy}
        variants = [Variant(name, ("forward",), in_steps(step), lambda: 0.0) for name, step in steps.items()]
        times = measure(variants, ranks, clock_for(heap.device), repetitions=_REPETITIONS, align=align)
    return {f"{name}_gbs": load.num_bytes / float(np.median(ms)) / 1e6 for name, ms in times.items()}


def _tokens_of(rank: int) -> npt.NDArray[np.float32]:
    """float32 [T, H] of integers from 0 to 7; T and the values are the rank's own."""
    token, column = np.arange(60 + 5 * rank)[:, None], np.arange(_HIDDEN)
    return ((31 * rank + 7 * token + column) % 8).astype(np.float32)


def _routing_of(rank: int, num_experts: int) -> npt.NDArray[np.int64]:
    """int64 [T, K]: different experts, and every seventh token without a second one."""
    token = np.arange(60 + 5 * rank)
    first = (token + rank) % num_experts
    second = (first + 1 + token % (num_experts - 1)) % num_experts
    return np.stack([first, np.where(token % 7, second, -1)], axis=1)


def _refuse(what: str, ranks: Ranks, is_wrong: bool) -> None:
    if ranks.largest(float(is_wrong)):
        raise WrongResult(f"{what} moved wrong rows")


def _write(path: str, found: dict[str, Any]) -> None:
    """Writes the whole file or nothing."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    sys.exit(main())
