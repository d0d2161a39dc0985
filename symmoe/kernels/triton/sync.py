"""The barrier over peer pointers, and the status record that kernels write for the host.

Only three helpers of the protocol use inline assembly: `now_ns`, `system_fence` and `wait_for_words`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from symmoe.kernels import control
from symmoe.kernels.launch.launch import (
    Constants,
    cached_constants,
    cached_sizes,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.triton.tiles import constants_of

CONTROL = constants_of(control)
SPOIL_WORDS = tl.constexpr(
    512
)  # int64 words that one warp sets at a time, 8 accesses of 16 bytes per thread


@triton.jit
def now_ns():
    """The GPU's clock in nanoseconds, which advances about every microsecond."""
    return cuda.globaltimer()


@triton.jit
def system_fence():
    """A fence: the host and peers see all earlier writes of this thread before its later writes."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_words(address, value, deadline):
    """Spins until the int64 at each address has reached value or the clock has passed the deadline; the values seen.

    Every lane spins on its own address; replicated lanes spin on the same address, without effect.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred again;
        .reg .u64 now;
        SPIN:
        mov.u64 now, %globaltimer;
        ld.acquire.sys.global.s64 $0, [$1];
        setp.lt.s64 again, $0, $2;
        setp.lt.and.u64 again, now, $3, again;
        @again bra SPIN;
        }""",
        "=&l,l,l,l",
        [address, value, deadline],
        dtype=tl.int64,
        is_pure=False,  # must not be dropped or moved across other accesses
        pack=1,
    )


@triton.jit
def epoch_words(words):
    """The values of the words before a rank aborted."""
    return tl.where(words >= CONTROL.ABORT, words & CONTROL.EPOCH_MASK, words)


@triton.jit
def aborting_rank(word):
    """The rank that has aborted and written this word >= ABORT."""
    return (word - CONTROL.ABORT) >> CONTROL.ABORT_RANK_SHIFT


@triton.jit
def spoil(address, num_words):
    """Sets all bits of num_words int64 at the address: NaN in every dtype of rows."""
    words = address.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, SPOIL_WORDS)
    for first in range(0, num_words, SPOIL_WORDS):
        tl.store(
            words + first + lane,
            tl.full((SPOIL_WORDS,), -1, tl.int64),
            mask=first + lane < num_words,
        )


@triton.jit
def write_record(status, kind, phase, peer, expected, actual, epoch, where):
    """Writes a status record to the address `status` unless one is pending: the first record counts."""
    record = status.to(tl.pointer_type(tl.int64))
    pending = tl.load(record + CONTROL.STATUS_KIND, volatile=True)
    tl.debug_barrier()  # all threads have read before one writes
    if pending == CONTROL.STATUS_OK:
        words = (phase, peer, expected, actual, epoch, where)  # from STATUS_PHASE to STATUS_WHERE
        for i in tl.static_range(CONTROL.STATUS_WHERE - CONTROL.STATUS_PHASE + 1):
            tl.store(record + (CONTROL.STATUS_PHASE + i), words[i])
        system_fence()  # the kind is written last: a host that sees it sees the whole record
        tl.store(record + CONTROL.STATUS_KIND, kind)


@triton.jit
def barrier_epoch(bases, RANK: tl.constexpr, COUNTERS: tl.constexpr):
    """The epoch of this rank's last barrier."""
    counters = (tl.load(bases + RANK) + COUNTERS).to(tl.pointer_type(tl.int64))
    return tl.load(counters + CONTROL.BARRIER_EPOCH)


@fast_jit([])
def barrier_kernel(
    bases,
    received,
    status: tl.int64,
    word_0: tl.int64,
    word_1: tl.int64,
    word_2: tl.int64,
    word_3: tl.int64,
    call: tl.int64,
    fault: tl.int32,
    timeout_ns: tl.int64,
    spoiled: tl.int64,
    num_spoiled_words: tl.int64,
    SIZES: tl.constexpr,
):
    # `status` is the address of pinned host memory, for the device, too; `spoiled` is arbitrary if there are no words.
    peer = tl.arange(0, SIZES.lanes)
    is_peer = peer < SIZES.num_ranks
    own_base = tl.load(bases + SIZES.rank)
    counters = (own_base + SIZES.layout.counters).to(tl.pointer_type(tl.int64))
    epoch = tl.load(counters + CONTROL.BARRIER_EPOCH) + 1
    stopped = tl.load(counters + CONTROL.ABORTED) | tl.load(counters + CONTROL.FAULTED)
    fault |= tl.load(counters + CONTROL.RAIL_FAULT).to(tl.int32)
    tl.debug_barrier()  # all threads have read the counters before one changes them
    answer = received + peer * CONTROL.NUM_PUBLISHED
    if stopped != 0:
        for word in tl.static_range(CONTROL.NUM_PUBLISHED):
            tl.store(answer + word, tl.full((SIZES.lanes,), -1, tl.int64), mask=is_peer)
        spoil(spoiled, num_spoiled_words)
    else:
        tl.store(counters + CONTROL.BARRIER_EPOCH, epoch)
        half = SIZES.layout.mailbox + (epoch & 1) * (SIZES.num_ranks * CONTROL.MAIL_WORDS * 8)
        peer_mail = (
            tl.load(bases + peer, mask=is_peer, other=0)
            + half
            + SIZES.rank * CONTROL.MAIL_WORDS * 8
        )
        slot = peer_mail.to(tl.pointer_type(tl.int64))
        words = (word_0, word_1, word_2, word_3)
        for i in tl.static_range(CONTROL.NUM_PUBLISHED):
            tl.store(slot + (1 + i), words[i], mask=is_peer)
        tl.store(slot + CONTROL.MAIL_CALL, call, mask=is_peer)
        tl.debug_barrier()
        # The release covers the words (the barrier above) and the payload of all earlier kernels of this stream: a
        # kernel's end orders its stores before this kernel, and a release at system scope is cumulative.
        tl.atomic_xchg(slot, 2 * epoch + fault, mask=is_peer, sem="release", scope="sys")

        repeated = tl.minimum(peer, SIZES.num_ranks - 1)  # spare lanes repeat the last peer
        own_mail = own_base + half + repeated * (CONTROL.MAIL_WORDS * 8)
        actual = wait_for_words(own_mail, 2 * epoch, now_ns() + timeout_ns)
        tl.debug_barrier()  # one thread's acquire then holds for all threads
        late = is_peer & (actual < 2 * epoch)
        reached = epoch_words(actual)
        faulted = is_peer & (reached == 2 * epoch + 1)
        given_up = is_peer & (actual >= CONTROL.ABORT) & (reached < 2 * epoch)
        first_given_up = tl.min(tl.where(given_up, peer, SIZES.lanes), axis=0)
        first_late = tl.min(tl.where(late, peer, SIZES.lanes), axis=0)
        first_faulted = tl.min(tl.where(faulted, peer, SIZES.lanes), axis=0)
        mail = own_mail.to(tl.pointer_type(tl.int64))
        calls = tl.load(mail + CONTROL.MAIL_CALL, mask=is_peer, other=0, volatile=True)
        first_call = tl.sum(tl.where(peer == 0, calls, 0), axis=0)
        first_other = tl.min(tl.where(is_peer & (calls != first_call), peer, SIZES.lanes), axis=0)
        came = (first_given_up == SIZES.lanes) & (first_late == SIZES.lanes)
        good = came & (first_faulted == SIZES.lanes) & (first_other == SIZES.lanes)
        for word in tl.static_range(CONTROL.NUM_PUBLISHED):
            # volatile: read from memory, after the wait
            value = tl.load(mail + 1 + word, mask=is_peer, other=-1, volatile=True)
            tl.store(answer + word, tl.where(good, value, -1), mask=is_peer)
        if not good:
            spoil(spoiled, num_spoiled_words)
        phase = call & 0xFF
        if first_given_up < SIZES.lanes:
            tl.store(counters + CONTROL.ABORTED, 1)
            written = tl.sum(tl.where(peer == first_given_up, actual, 0), axis=0)
            write_record(
                status,
                CONTROL.STATUS_ABORT,
                phase,
                aborting_rank(written),
                epoch,
                written,
                epoch,
                0,
            )
        elif first_late < SIZES.lanes:
            tl.store(counters + CONTROL.ABORTED, 1)
            # The other half may have the peer's last epoch.
            other_half = own_mail + (1 - 2 * (epoch & 1)) * (
                SIZES.num_ranks * CONTROL.MAIL_WORDS * 8
            )
            before = tl.load(
                other_half.to(tl.pointer_type(tl.int64)), mask=is_peer, other=0, volatile=True
            )
            last = (
                tl.sum(
                    tl.where(peer == first_late, tl.maximum(reached, epoch_words(before)), 0),
                    axis=0,
                )
                >> 1
            )
            write_record(status, CONTROL.STATUS_TIMEOUT, phase, first_late, epoch, last, epoch, 0)
        elif first_faulted < SIZES.lanes:
            tl.store(counters + CONTROL.FAULTED, 1)
            write_record(status, CONTROL.STATUS_FAULT, phase, first_faulted, epoch, epoch, epoch, 0)
        elif first_other < SIZES.lanes:
            tl.store(counters + CONTROL.FAULTED, 1)
            other_call = tl.sum(tl.where(peer == first_other, calls, 0), axis=0)
            write_record(
                status,
                CONTROL.STATUS_MISMATCH,
                phase,
                first_other,
                first_call,
                other_call,
                epoch,
                0,
            )


def _constants(peers: control.Peers) -> Constants:
    return cached_sizes(
        rank=peers.rank,
        num_ranks=peers.num_ranks,
        lanes=next_power_of_2(peers.num_ranks),
        layout=peers.layout,
        num_warps=1,
    )


def barrier(peers, words, received, status, *, call, fault, timeout_ns, nan_on_failure=None):
    launch(
        barrier_kernel,
        (1,),
        _constants(peers),
        peers.bases,
        received,
        status.data_ptr(),
        *words,
        call,
        int(fault),
        timeout_ns,
        *_words_of(nan_on_failure),
    )


def _words_of(tensor: torch.Tensor | None) -> tuple[int, int]:
    """A tensor's address and its number of int64 words."""
    return (
        (0, 0)
        if tensor is None
        else (tensor.data_ptr(), tensor.numel() * tensor.element_size() // 8)
    )


@fast_jit([])
def send_signal_kernel(bases, rank: tl.int32, SIZES: tl.constexpr):
    counters = (tl.load(bases + SIZES.rank) + SIZES.layout.counters).to(tl.pointer_type(tl.int64))
    if (tl.load(counters + CONTROL.ABORTED) | tl.load(counters + CONTROL.FAULTED)) == 0:
        slot = (
            tl.load(bases + rank) + SIZES.layout.signals + SIZES.rank * (CONTROL.SIGNAL_WORDS * 8)
        )
        # The release covers the payload, as in the barrier.
        slot = slot.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(slot, tl.load(counters + CONTROL.BARRIER_EPOCH), sem="release", scope="sys")


def send_signal(peers, rank):
    launch(send_signal_kernel, (1,), _constants(peers), peers.bases, rank)


@fast_jit([])
def wait_for_signal_kernel(
    bases,
    arrived,
    status: tl.int64,
    rank: tl.int32,
    phase: tl.int32,
    timeout_ns: tl.int64,
    spoiled: tl.int64,
    num_spoiled_words: tl.int64,
    SIZES: tl.constexpr,
):
    own_base = tl.load(bases + SIZES.rank)
    counters = (own_base + SIZES.layout.counters).to(tl.pointer_type(tl.int64))
    epoch = tl.load(counters + CONTROL.BARRIER_EPOCH)
    lane = tl.arange(0, 1)  # wait_for_words takes a tensor
    result = lane.to(tl.int64) - 1
    if (tl.load(counters + CONTROL.ABORTED) | tl.load(counters + CONTROL.FAULTED)) == 0:
        slot = own_base + SIZES.layout.signals + rank * (CONTROL.SIGNAL_WORDS * 8)
        actual = tl.max(wait_for_words(slot + lane, epoch, now_ns() + timeout_ns), axis=0)
        tl.debug_barrier()  # one thread's acquire then holds for all threads
        if epoch_words(actual) >= epoch:
            result += 1
        elif actual >= CONTROL.ABORT:
            tl.store(counters + CONTROL.ABORTED, 1)
            write_record(
                status, CONTROL.STATUS_ABORT, phase, aborting_rank(actual), epoch, actual, epoch, 0
            )
        else:
            tl.store(counters + CONTROL.ABORTED, 1)
            write_record(status, CONTROL.STATUS_TIMEOUT, phase, rank, epoch, actual, epoch, 0)
    tl.store(arrived + lane, result)
    if tl.max(result, axis=0) < 0:
        spoil(spoiled, num_spoiled_words)


def wait_for_signal(peers, rank, arrived, status, *, phase, timeout_ns, nan_on_failure=None):
    launch(
        wait_for_signal_kernel,
        (1,),
        _constants(peers),
        peers.bases,
        arrived,
        status.data_ptr(),
        rank,
        phase,
        timeout_ns,
        *_words_of(nan_on_failure),
    )


@fast_jit([])
def count_exchange_kernel(counts, progress: tl.int64, which: tl.int32):
    number = tl.load(counts + which) + 1
    tl.store(counts + which, number)
    tl.store(progress.to(tl.pointer_type(tl.int64)) + which, number)  # pinned host memory


def count_exchange(counts, progress, *, which):
    launch(
        count_exchange_kernel,
        (1,),
        cached_constants(num_warps=1),
        counts,
        progress.data_ptr(),
        which,
    )


@fast_jit([])
def receive_fault_flags_kernel(heard, fault, num_words: tl.int32, BLOCK: tl.constexpr):
    word, max_flag = tl.arange(0, BLOCK), tl.load(fault)
    for first in range(0, num_words, BLOCK):
        flags = tl.load(heard + first + word, mask=first + word < num_words, other=0)
        max_flag = tl.maximum(max_flag, tl.max(flags, axis=0))
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(fault, max_flag)


def receive_fault_flags(heard, fault):
    launch(
        receive_fault_flags_kernel,
        (1,),
        cached_constants(BLOCK=32, num_warps=1),
        heard,
        fault,
        heard.numel(),
    )
