"""Triton kernels of the litmus test: writers and readers of words, with random delays. How a flag is sent and waited
for is what kernels/triton/sync.py does: stores, a barrier of the program, an exchange with release at system scope;
`wait_for_words`, a barrier of the program, loads. Every wait has a deadline."""

import torch
import triton
import triton.language as tl

from symmoe.kernels.triton.sync import now_ns, wait_for_words

FLAG_BYTES = tl.constexpr(64)  # a cache line each, like mailbox slots
RELEASED, FLAG_FIRST, RELAXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ORDERS = {"released": 0, "flag first": 1, "relaxed": 2}
NUM_COUNTS = tl.constexpr(
    3
)  # of a program: words read, stale words among them, flags that did not come in time
BLOCK = 1024  # words that a program writes or reads at a time
NUM_CTAS = 64


@triton.jit
def dawdle(seed, number, MOST: tl.constexpr):
    """Looks at the clock up to MOST - 1 times, in every other case not at all. MOST is a power of two."""
    drawn = tl.max(tl.randint(seed, number + tl.arange(0, 1)), axis=0)
    if (drawn & 1) != 0:
        for _ in range((drawn >> 1) & (MOST - 1)):
            now_ns()


@triton.jit
def count(counts, which, amount):
    """Adds to a count of this program."""
    place = counts + tl.program_id(0) * NUM_COUNTS + which
    tl.store(place, tl.load(place) + amount)


@triton.jit
def send_messages(
    payload,
    flags,
    value,
    seed,
    stream,
    MESSAGES: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    ORDER: tl.constexpr,
):
    word = tl.arange(0, CHUNK)
    for message in range(MESSAGES):
        number = stream * MESSAGES + message
        words = payload.to(tl.pointer_type(tl.int32)) + number * WORDS
        flag = (flags + number * FLAG_BYTES).to(tl.pointer_type(tl.int64))
        if ORDER == FLAG_FIRST:
            tl.atomic_xchg(flag, value, sem="release", scope="sys")
        for first in range(0, WORDS, CHUNK):
            tl.store(words + first + word, tl.full((CHUNK,), value, tl.int64).to(tl.int32))
            dawdle(seed, number * WORDS + first, 16)
        if ORDER == RELEASED:
            tl.debug_barrier()
            tl.atomic_xchg(flag, value, sem="release", scope="sys")
        if ORDER == RELAXED:
            tl.atomic_xchg(flag, value, sem="relaxed", scope="sys")


@triton.jit
def receive_messages(
    payload,
    flags,
    value,
    counts,
    seed,
    timeout_ns,
    stream,
    MESSAGES: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    word, lane = tl.arange(0, CHUNK), tl.arange(0, 1)
    deadline = now_ns() + timeout_ns
    for message in range(MESSAGES):
        number = stream * MESSAGES + message
        words = payload.to(tl.pointer_type(tl.int32)) + number * WORDS
        dawdle(seed, number * WORDS, 64)
        # The old words come into this SM's cache: after the wait they must not be found there.
        old = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, WORDS, CHUNK):
            old += tl.load(words + first + word)
        seen = tl.max(wait_for_words(flags + number * FLAG_BYTES + lane, value, deadline), axis=0)
        tl.debug_barrier()  # what any thread has acquired holds for all
        if seen >= value:
            dawdle(seed, number * WORDS + 1, 16)
            stale = tl.zeros((CHUNK,), tl.int32)
            for first in range(0, WORDS, CHUNK):
                found = tl.load(words + first + word)
                stale += (found != value.to(tl.int32)).to(tl.int32)
            count(counts, 0, WORDS)
            count(counts, 1, tl.sum(stale, axis=0))
        else:
            count(counts, 2, 1)
        if (
            tl.sum(old, axis=0) == -1
        ):  # never: values are positive. The loads of the old words are needed for it
            count(counts, 2, 1)


@triton.jit(
    do_not_specialize=[
        "sent",
        "sent_flags",
        "received",
        "received_flags",
        "value",
        "seed",
        "timeout_ns",
    ]
)
def messages_kernel(
    sent: tl.int64,  # addresses at the peer
    sent_flags: tl.int64,
    received: tl.int64,  # own ones
    received_flags: tl.int64,
    counts,
    value: tl.int64,
    seed: tl.int32,
    timeout_ns: tl.int64,
    STREAMS: tl.constexpr,
    MESSAGES: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    ORDER: tl.constexpr,
):
    program = tl.program_id(0)
    if program < STREAMS:  # the first programs write: they wait for nobody
        send_messages(sent, sent_flags, value, seed, program, MESSAGES, WORDS, CHUNK, ORDER)
    else:
        stream = program - STREAMS
        receive_messages(
            received,
            received_flags,
            value,
            counts,
            seed,
            timeout_ns,
            stream,
            MESSAGES,
            WORDS,
            CHUNK,
        )


@triton.jit(do_not_specialize=["address", "num_words", "value", "seed"])
def write_kernel(
    address: tl.int64, num_words: tl.int32, value: tl.int32, seed: tl.int32, BLOCK: tl.constexpr
):
    word = tl.arange(0, BLOCK)
    words = address.to(tl.pointer_type(tl.int32))
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        tl.store(
            words + first + word, tl.full((BLOCK,), value, tl.int32), mask=first + word < num_words
        )
        dawdle(seed, first, 16)


@triton.jit(do_not_specialize=["address", "num_words", "value", "seed"])
def read_kernel(
    address: tl.int64,
    counts,
    num_words: tl.int32,
    value: tl.int32,
    seed: tl.int32,
    BLOCK: tl.constexpr,
):
    word = tl.arange(0, BLOCK)
    words = address.to(tl.pointer_type(tl.int32))
    num_read = tl.zeros((BLOCK,), tl.int32)
    stale = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        dawdle(seed, first, 16)
        here = first + word < num_words
        found = tl.load(words + first + word, mask=here, other=value)
        num_read += here.to(tl.int32)
        stale += (found != value).to(tl.int32)
    count(counts, 0, tl.sum(num_read, axis=0))
    count(counts, 1, tl.sum(stale, axis=0))


class GpuWords:
    """What the suite does with words, in kernels on the current stream.

    Args:
        device: of the counts.
    """

    num_streams, num_messages, message_words, num_words = 32, 64, 1024, 1 << 20
    num_rounds = 50  # of a case

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(
            (2 * NUM_CTAS, NUM_COUNTS.value), dtype=torch.int64, device=device
        )

    def messages(
        self, sent: torch.Tensor, received: torch.Tensor, sent_flags: torch.Tensor, received_flags: torch.Tensor,
        *, value: int, seed: int, order: str, timeout_s: float
    ) -> None:  # fmt: skip
        """Sends messages to one rank and receives those of another, in one kernel. Words int32, flags int64."""
        sizes = {
            "STREAMS": self.num_streams,
            "MESSAGES": self.num_messages,
            "WORDS": self.message_words,
        }
        messages_kernel[(2 * self.num_streams,)](
            *(each.data_ptr() for each in (sent, sent_flags, received, received_flags)),
            *(self.counts, value, seed, int(timeout_s * 1e9)),
            **sizes,
            CHUNK=self.message_words // 4,
            ORDER=ORDERS[order],
            num_warps=4,
        )

    def write(self, words: torch.Tensor, *, value: int, seed: int) -> None:
        """Sets int32 words, here or at a peer."""
        write_kernel[(NUM_CTAS,)](words.data_ptr(), words.numel(), value, seed, BLOCK=BLOCK)

    def read(self, words: torch.Tensor, *, value: int, seed: int) -> None:
        """Counts the words that are not `value`, here or at a peer."""
        read_kernel[(NUM_CTAS,)](
            words.data_ptr(), self.counts, words.numel(), value, seed, BLOCK=BLOCK
        )

    def taken_counts(self) -> list[int]:
        """Words read, stale ones, flags that did not come, since the last call. Waits for the stream."""
        counts = self.counts.sum(0).tolist()
        self.counts.zero_()
        return counts
