"""Message passing between ranks: words into memory of a peer or its own, and a signal or a barrier of the heap; then
the other rank reads. No word that is read may be old.

An observation is one 4-byte word that was read after the heap's wait and compared with the value of its round. A case
is some rounds of one kind, from every rank to the next:

    signals    words into the peer's memory, heap._send_signal; heap._wait_for_signal, read
    pushes     words into the peer's memory, heap.barrier, read
    pulls      words into own memory, heap.barrier, read by the peer

with random delays of the writers between their words, of the readers before they read, and of the hosts. The last case
is the control: words that follow their signal must be stale in some try, or this test could not find any."""

import random
import time
from collections.abc import Callable
from functools import partial

import torch

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks
from symmoe import SymmetricHeap
from symmoe.kernels import control

KINDS = ("signals", "pushes", "pulls")
NUM_CASES = 400
CONTROL = "flag first"
MOST_TRIES = 20  # of the control, until it finds what it is to find
SHORT_S = 200e-6
SHORT_CYCLES = 200_000


class Rounds:
    """The rounds of all kinds over a lease of one heap. Every rank writes to the next one."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self.heap = heap
        self.is_on_gpu = heap.device.type == "cuda"
        self.num_rounds = 50 if self.is_on_gpu else 5  # of a case
        self.next = (heap.rank + 1) % heap.num_ranks
        self.previous = (heap.rank - 1) % heap.num_ranks
        self.words = heap.lease((1 << (20 if self.is_on_gpu else 14),), torch.int32, name="words")
        self.words.tensor.zero_()
        self.num_stale = torch.zeros((), dtype=torch.int64, device=heap.device)
        self.value = 0
        self.draw = random.Random()

    def run(self, kind: str, seed: int) -> None:
        """Runs one round."""
        self.value += 1
        self.draw.seed(f"{seed}, {self.heap.rank}")
        if self.draw.random() < 0.2:
            time.sleep(SHORT_S)
        self.heap.barrier(control.PHASE_DISPATCH_READY)  # the last round's words have been read
        rounds: dict[str, Callable[[], None]] = {
            "signals": self.signals,
            "pushes": self.pushes,
            "pulls": self.pulls,
            CONTROL: self.flag_first,
        }
        rounds[kind]()

    def signals(self) -> None:
        self.write(self.words.peer(self.next))
        self.heap._send_signal(self.next)
        self.heap._wait_for_signal(self.previous, control.PHASE_DISPATCH_DONE)
        self.read(self.words.tensor)

    def pushes(self) -> None:
        self.write(self.words.peer(self.next))
        self.heap.barrier(control.PHASE_DISPATCH_DONE)
        self.read(self.words.tensor)

    def pulls(self) -> None:
        self.write(self.words.tensor)
        self.heap.barrier(control.PHASE_COMBINE_READY)
        self.read(self.words.peer(self.previous))

    def flag_first(self) -> None:
        self.heap._send_signal(self.next)
        self.heap._wait_for_signal(self.previous, control.PHASE_DISPATCH_DONE)
        self.read(self.words.tensor)
        self.write(self.words.peer(self.next))

    def write(self, words: torch.Tensor) -> None:
        for part in words.chunk(4):
            part.fill_(self.value)
            self.dawdle()

    def read(self, words: torch.Tensor) -> None:
        self.dawdle()
        self.num_stale += (words != self.value).sum()

    def dawdle(self) -> None:
        """Delays the device at random, as the host's delays do for CPUs."""
        if self.draw.random() > 0.1:
            return
        if self.is_on_gpu:
            torch.cuda._sleep(int(self.draw.random() * SHORT_CYCLES))
        else:
            time.sleep(self.draw.random() * SHORT_S)


def kind_of(number: int) -> str:
    """The kind of case `number`."""
    return KINDS[number % len(KINDS)] if number < NUM_CASES else CONTROL


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each case."""
    backend = "nvshmem" if device == "cuda" else "host"
    with SymmetricHeap(num_bytes=32 << 20, backend=backend) as heap:
        rounds = Rounds(heap)
        for number in numbers:
            start = time.perf_counter()
            kind = kind_of(number)
            problems = []
            read = stale = 0
            for turn in range(MOST_TRIES * rounds.num_rounds):
                rounds.run(kind, (seed * SEED_STRIDE + number) * 1000 + turn)
                if (turn + 1) % rounds.num_rounds:
                    continue
                heap.synchronize()
                read += rounds.num_rounds * rounds.words.tensor.numel()
                stale += int(rounds.num_stale)
                rounds.num_stale.zero_()
                # A rank may be late each time that a flag comes first. All ranks go on, or none.
                is_stale_by_rank = heap.bootstrap.gather_bytes(bytes([stale > 0]))
                if kind != CONTROL or all(map(any, is_stale_by_rank)):
                    break
            if kind in KINDS and stale:
                problems.append(f"{stale} of {read} words were stale ({kind})")
            if kind == CONTROL and not stale:
                problems.append(f"none of {read} words was stale although their flags came first")
            facts = {"kind": kind, "observations": read, "stale": stale}
            yield 1e3 * (time.perf_counter() - start), problems, facts
        rounds.words.release()


def summarize(outcomes: list[Outcome]) -> dict:
    """Sums over cases and ranks."""
    kinds: dict[str, dict[str, int]] = {}
    for facts in (outcome.facts for outcome in outcomes if outcome.facts):
        sums = kinds.setdefault(facts["kind"][0], {"observations": 0, "stale": 0})
        for name in sums:
            sums[name] += sum(facts[name])
    observations = sum(sums["observations"] for kind, sums in kinds.items() if kind in KINDS)
    return {"observations": observations, "kinds": kinds}


SUITE = Suite(partial(on_ranks, check=check, deadline_s=60.0), NUM_CASES + 1, summarize=summarize)
