"""The order of calls and of the reuse of memory over CUDA streams, with fake streams and events."""

import contextlib
import random
import threading
import types

import pytest
import torch

from symmoe.symm_mem import streams
from symmoe.symm_mem.memory import Arena
from symmoe.symm_mem.streams import Access, OneCall, StreamOrder


class Fake:
    """Two streams, 1 and 2, and the work of other streams that each has waited for, by stream."""

    def __init__(self) -> None:
        self.current, self.capture = 1, 0
        self.work = {1: 0, 2: 0}
        self.waited: dict[int, dict[int, int]] = {1: {}, 2: {}}

    def stream(self, number: int) -> types.SimpleNamespace:
        def wait_event(event: types.SimpleNamespace) -> None:
            waited = self.waited[number]
            waited[event.stream] = max(waited.get(event.stream, 0), event.work)

        def record_event() -> types.SimpleNamespace:
            return types.SimpleNamespace(stream=number, work=self.work[number])

        return types.SimpleNamespace(
            cuda_stream=number, wait_event=wait_event, record_event=record_event
        )

    def launch(self) -> int:
        """Launches a kernel on the current stream; returns the number of kernels on it."""
        self.work[self.current] += 1
        return self.work[self.current]

    def has_waited_for(self, stream: int, work: int) -> bool:
        return self.current == stream or self.waited[self.current].get(stream, 0) >= work


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(streams, "current_stream", lambda index: fake.current)
    monkeypatch.setattr(streams, "capture_id", lambda device: fake.capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.stream(fake.current))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda number, device=None: fake.stream(number)
    )
    return fake


@pytest.fixture
def order(fake: Fake) -> StreamOrder:
    return StreamOrder(torch.device("cuda", 0))


def one_call(order: StreamOrder) -> OneCall:
    return OneCall(Access(), threading.RLock(), order)


def call(fake: Fake, order: StreamOrder, stream: int) -> int:
    fake.current = stream
    with one_call(order):
        return fake.launch()


@pytest.mark.parametrize("part", [(512, 512), (1536, 512)])
def test_the_remainder_of_a_span_is_still_waited_for(
    fake: Fake, order: StreamOrder, part: tuple[int, int]
):
    fake.work[3], fake.waited[3] = 0, {}
    for stream in fake.work:
        call(fake, order, stream)
    fake.current = 1
    work = fake.launch()
    order.release((512, 1536, False))
    fake.current = 2
    order.acquire((1024, 512))  # its middle
    assert fake.has_waited_for(1, work)
    fake.current = 3
    order.acquire((2048, 512))  # next to it
    order.acquire((0, 512))
    assert not fake.has_waited_for(1, work)
    order.acquire(part)
    assert fake.has_waited_for(1, work)


@pytest.mark.parametrize("seed", range(3))
def test_calls_and_uses_of_memory_wait_for_earlier_work(fake: Fake, order: StreamOrder, seed: int):
    """Calls follow each other, also after one that raises. A stream that acquires memory has waited for its earlier
    uses: for the work of the stream that released the memory, or of all streams if it was dropped. A single stream
    keeps no marks, and the number of marks is bounded. Against a table of every 512 bytes, with random streams."""
    arena = Arena(0, 1 << 20)
    draw = random.Random(seed)
    fake.work[3], fake.waited[3] = 0, {}
    needed: dict[int, dict[int, int]] = {}  # by unit of 512 bytes: the work of each stream
    ended: list[tuple[int, int]] = []  # of each call: the stream, and its work so far
    spans, num_marks = [], []
    for turn in range(2000):
        fake.current = draw.choice([1, 2, 3]) if turn > 50 else 1
        if fake.current not in dict(ended) or draw.random() < 0.1:
            with contextlib.suppress(ValueError), one_call(order):
                assert not ended or fake.has_waited_for(*ended[-1])
                ended.append((fake.current, fake.launch()))
                raise ValueError("in the middle")
        span = arena.take(512 * draw.randint(1, 100))
        order.acquire(span)
        spans.append(span)
        for unit in units(span):
            assert all(fake.has_waited_for(*use) for use in needed.pop(unit, {}).items())
        while len(spans) > draw.randint(0, 12):
            span = spans.pop(draw.randrange(len(spans)))
            fake.launch()  # a kernel that is no call of the heap
            if draw.random() < 0.2:
                uses = dict(fake.work)
                order.release((*span, True))
            else:
                uses = {fake.current: fake.work[fake.current]}
                order.release((*span, False))
            needed |= dict.fromkeys(units(span), uses)
            arena.give_back(*span)
        num_marks.append(len(order._eager.released))
    # The marks are of released spans that are still free: their number depends on the live spans, not on the turns.
    assert max(num_marks[:51]) == 0
    assert max(num_marks) < 60


def units(span: tuple[int, int]) -> range:
    offset, size = span
    return range(offset // 512, (offset + size) // 512)


def test_a_capture_has_a_separate_order(fake: Fake, order: StreamOrder):
    call(fake, order, 1)
    fake.capture = 7
    call(fake, order, 2)
    assert fake.waited == {1: {}, 2: {}}  # an event of another stream would end the capture
    work = call(fake, order, 2)
    call(fake, order, 1)
    assert fake.has_waited_for(2, work)
    fake.capture = 0
    fake.waited = {1: {}, 2: {}}
    call(fake, order, 1)
    assert fake.waited == {1: {}, 2: {}}
