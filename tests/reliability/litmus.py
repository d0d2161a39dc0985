"""Message passing between ranks: payload, then a flag; the flag, then the payload. No word that is read may be old.

An observation is one 4-byte word of payload that was read after its flag had been acquired and compared with the value
of its round. A case is some rounds of one kind, from every rank to the next:

    messages   many streams in one kernel: words and flag, wait and words, with the instructions of triton/sync.py
    signals    words into the peer's memory, heap.send_signal; heap._wait_for_signal, read
    pushes     words into the peer's memory, heap.barrier, read
    pulls      words into own memory, heap.barrier, read by the peer

with random delays of the writers between their words, of the readers before and after the wait, and of the hosts. The
last cases are controls: a flag that is sent before its words must give stale reads, or this test could not find any;
one that is sent without a release may (on GPUs; it is only reported).
"""

import random
import threading
import time
from functools import partial

import numpy as np
import torch

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks
from symmoe import SymmetricHeap
from symmoe.kernels import control
from symmoe.kernels.twin import sync

KINDS = ("messages", "signals", "pushes", "pulls")
NUM_CASES = 400
CONTROLS = ("flag first", "relaxed")  # the second on GPUs only
MOST_TRIES = 20  # of the control, until it finds what it is to find
TIMEOUT_S = 10.0  # of a kernel's waits
_FLAG_WORDS = 8
_SHORT_S = 200e-6


class TwinWords:
    """The same on CPUs, where a thread sends."""

    num_streams, num_messages, message_words, num_words = 1, 64, 256, 1 << 12
    num_rounds = 5

    def __init__(self, device: torch.device) -> None:
        self.counts = [0, 0, 0]

    def messages(
        self, sent: torch.Tensor, received: torch.Tensor, sent_flags: torch.Tensor, received_flags: torch.Tensor,
        *, value: int, seed: int, order: str, timeout_s: float
    ) -> None:  # fmt: skip
        sender = threading.Thread(
            target=self._send, args=(sent.numpy(), sent_flags.numpy(), value, seed, order)
        )
        sender.start()
        words, flags, generator = received.numpy(), received_flags.numpy(), random.Random(seed)
        deadline_ns = time.monotonic_ns() + timeout_s * 1e9
        for message in range(len(words)):
            if sync._wait(flags, message, value, deadline_ns):
                _dawdle(generator)
                self._compare(words[message], value)
            else:
                self.counts[2] += 1
        sender.join()

    @staticmethod
    def _send(words: np.ndarray, flags: np.ndarray, value: int, seed: int, order: str) -> None:
        generator = random.Random(seed + 1)
        for message in range(len(words)):
            if order == "flag first":
                flags[message, 0] = value
            words[message, ::2] = value
            _dawdle(generator)
            words[message, 1::2] = value
            if order == "released":
                flags[message, 0] = value

    def write(self, words: torch.Tensor, *, value: int, seed: int) -> None:
        generator = random.Random(seed)
        for part in np.array_split(words.numpy().reshape(-1), 4):
            part[:] = value
            _dawdle(generator)

    def read(self, words: torch.Tensor, *, value: int, seed: int) -> None:
        _dawdle(random.Random(seed))
        self._compare(words.numpy(), value)

    def _compare(self, words: np.ndarray, value: int) -> None:
        found = words.copy()
        self.counts[0] += found.size
        self.counts[1] += int((found != value).sum())

    def taken_counts(self) -> list[int]:
        counts, self.counts = self.counts, [0, 0, 0]
        return counts


def _dawdle(generator: random.Random) -> None:
    if generator.random() < 0.1:
        time.sleep(generator.random() * _SHORT_S)


class Rounds:
    """The rounds of all kinds over leases of one heap. Every rank writes to the next one."""

    def __init__(self, heap: SymmetricHeap) -> None:
        if heap.device.type == "cuda":
            from reliability.litmus_kernels import GpuWords as Words
        else:
            Words = TwinWords
        self.heap, self.ops = heap, Words(heap.device)
        self.next, self.previous = (
            (heap.rank + 1) % heap.num_ranks,
            (heap.rank - 1) % heap.num_ranks,
        )
        num_messages = Words.num_streams * Words.num_messages
        self._words = heap.lease((Words.num_words,), torch.int32, name="words")
        self._payload = heap.lease((num_messages, Words.message_words), torch.int32, name="payload")
        self._flags = heap.lease((num_messages, _FLAG_WORDS), torch.int64, name="flags")
        for lease in (self._words, self._payload, self._flags):
            lease.tensor.zero_()
        self._value = 0
        heap.barrier(control.PHASE_START)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compiles the kernels, each rank for itself, and forgets what they count."""
        flags, payload = self._flags.tensor, self._payload.tensor
        if self.heap.device.type == "cuda":
            for order in ("released", *CONTROLS):
                self._value += 1
                self.ops.messages(
                    payload,
                    payload,
                    flags,
                    flags,
                    value=self._value,
                    seed=0,
                    order=order,
                    timeout_s=TIMEOUT_S,
                )
            self.ops.write(self._words.tensor, value=1, seed=0)
            self.ops.read(self._words.tensor, value=1, seed=0)
            self.ops.taken_counts()
        self._value += len(CONTROLS) + 1
        self.heap.barrier(control.PHASE_START)
        self.heap.synchronize()

    def run(self, kind: str, seed: int) -> None:
        """One round."""
        self._value += 1
        if random.Random(f"{seed}, {self.heap.rank}").random() < 0.2:
            time.sleep(_SHORT_S)
        getattr(self, f"_{kind.replace(' ', '_')}")(self._value, seed % (1 << 30))

    def _messages(self, value: int, seed: int, order: str = "released") -> None:
        self.heap.barrier(
            control.PHASE_DISPATCH_READY
        )  # the words of the last round have been read
        tensors = (
            self._payload.peer(self.next),
            self._payload.tensor,
            self._flags.peer(self.next),
            self._flags.tensor,
        )
        self.ops.messages(*tensors, value=value, seed=seed, order=order, timeout_s=TIMEOUT_S)

    def _flag_first(self, value: int, seed: int) -> None:
        self._messages(value, seed, "flag first")

    def _relaxed(self, value: int, seed: int) -> None:
        self._messages(value, seed, "relaxed")

    def _signals(self, value: int, seed: int) -> None:
        self.heap.barrier(control.PHASE_DISPATCH_READY)
        self.ops.write(self._words.peer(self.next), value=value, seed=seed)
        self.heap._send_signal(self.next)
        self.heap._wait_for_signal(self.previous, control.PHASE_DISPATCH_DONE)
        self.ops.read(self._words.tensor, value=value, seed=seed)

    def _pushes(self, value: int, seed: int) -> None:
        self.heap.barrier(control.PHASE_DISPATCH_READY)
        self.ops.write(self._words.peer(self.next), value=value, seed=seed)
        self.heap.barrier(control.PHASE_DISPATCH_DONE)
        self.ops.read(self._words.tensor, value=value, seed=seed)

    def _pulls(self, value: int, seed: int) -> None:
        self.ops.write(self._words.tensor, value=value, seed=seed)
        self.heap.barrier(control.PHASE_COMBINE_READY)
        self.ops.read(self._words.peer(self.previous), value=value, seed=seed)
        self.heap.barrier(control.PHASE_COMBINE_DONE)

    def close(self) -> None:
        for lease in (self._words, self._payload, self._flags):
            lease.release()


def kind_of(number: int) -> str:
    """What case `number` does."""
    return KINDS[number % len(KINDS)] if number < NUM_CASES else CONTROLS[number - NUM_CASES]


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields per case."""
    with SymmetricHeap(
        num_bytes=32 << 20, backend="nvshmem" if device == "cuda" else "host"
    ) as heap:
        rounds = Rounds(heap)
        for number in numbers:
            start, kind, problems = time.perf_counter(), kind_of(number), []
            read = stale = late = 0
            for turn in range(MOST_TRIES * rounds.ops.num_rounds):
                rounds.run(kind, (seed * SEED_STRIDE + number) * 1000 + turn)
                if (turn + 1) % rounds.ops.num_rounds:
                    continue
                heap.synchronize()
                read, stale, late = map(
                    sum, zip((read, stale, late), rounds.ops.taken_counts(), strict=True)
                )
                # On a busy machine a rank may be late each time that a flag comes first. All ranks go on, or none.
                if kind != "flag first" or all(
                    map(any, heap.bootstrap.gather_bytes(bytes([stale > 0])))
                ):
                    break
            if late:
                problems.append(f"{late} flags did not come within {TIMEOUT_S} s")
            if kind in KINDS and (stale or not read):
                problems.append(f"{stale} of {read} words were stale ({kind})")
            if kind == "flag first" and not stale:
                problems.append(
                    f"none of {read} words was stale although their flags were sent first"
                )
            facts = {"kind": kind, "observations": read, "stale": stale}
            yield 1e3 * (time.perf_counter() - start), problems, facts
        rounds.close()


def summarize(outcomes: list[Outcome]) -> dict:
    """Sums over cases and ranks."""
    kinds: dict[str, dict[str, int]] = {}
    for facts in (outcome.facts for outcome in outcomes if outcome.facts):
        sums = kinds.setdefault(facts["kind"][0], {"observations": 0, "stale": 0})
        for name in sums:
            sums[name] += sum(facts[name])
    observations = sum(sums["observations"] for kind, sums in kinds.items() if kind in KINDS)
    return {"observations": observations, "kinds": kinds}


_RUN = partial(on_ranks, check=check, deadline_s=60.0)
SUITE = Suite(_RUN, NUM_CASES + 1, NUM_CASES + len(CONTROLS), summarize=summarize)
