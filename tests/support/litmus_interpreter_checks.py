"""Run by test_litmus.py in a process with TRITON_INTERPRET=1: the litmus test's kernels, without time and waiting."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from without_waits import look_once, no_clock

sys.path.append(str(Path(__file__).resolve().parents[1]))

from reliability import litmus_kernels
from reliability.litmus_kernels import GpuWords

MESSAGES, WORDS = 3, 16


class FewWords(GpuWords):
    num_streams, num_messages, message_words = 2, MESSAGES, WORDS


def messages(
    order: str, *, stale: int, missing: int
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Counts, and what was sent, if so many of the words and flags that were received are old."""
    ops = FewWords(torch.device("cpu"))
    received = torch.full((2 * MESSAGES, WORDS), 7, dtype=torch.int32)
    received_flags = torch.full((2 * MESSAGES, 8), 7)
    received.view(-1)[5 : 5 + stale] = 6
    received_flags[2 * MESSAGES - missing :] = 6
    sent, sent_flags = torch.zeros_like(received), torch.zeros_like(received_flags)
    ops.messages(
        sent, received, sent_flags, received_flags, value=7, seed=3, order=order, timeout_s=1.0
    )
    return ops.taken_counts(), sent, sent_flags


def checks() -> Iterator[tuple[str, None]]:
    """Names of what is right."""
    litmus_kernels.wait_for_words, litmus_kernels.now_ns = look_once, no_clock
    for order in ("released", "flag first", "relaxed"):
        for stale, missing in ((0, 0), (9, 0), (1, 2)):
            counts, sent, flags = messages(order, stale=stale, missing=missing)
            assert counts == [(2 * MESSAGES - missing) * WORDS, stale, missing], (order, counts)
            assert bool((sent == 7).all())
            assert flags[:, 0].tolist() == [7] * (2 * MESSAGES)
            assert not flags[:, 1:].any()
            yield f"messages, {order}", None
    ops, words = GpuWords(torch.device("cpu")), torch.zeros(5000, dtype=torch.int32)
    ops.write(words[:4321], value=9, seed=4)
    assert int((words == 9).sum()) == 4321
    ops.read(words, value=9, seed=5)
    assert (ops.taken_counts(), ops.taken_counts()) == ([5000, 5000 - 4321, 0], [0, 0, 0])
    yield "words", None
