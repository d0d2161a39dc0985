"""The order of calls and of the reuse of memory over CUDA streams, with streams and events that only take notes."""

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
    """Two streams, 1 and 2, and what each has waited for: (stream, how much was on it)."""

    def __init__(self) -> None:
        self.current, self.capture = 1, 0
        self.work = {1: 0, 2: 0}
        self.seen: dict[int, dict[int, int]] = {1: {}, 2: {}}

    def stream(self, number: int) -> types.SimpleNamespace:
        def wait_event(event: types.SimpleNamespace) -> None:
            seen = self.seen[number]
            seen[event.stream] = max(seen.get(event.stream, 0), event.work)

        def record_event() -> types.SimpleNamespace:
            return types.SimpleNamespace(stream=number, work=self.work[number])

        return types.SimpleNamespace(
            cuda_stream=number, wait_event=wait_event, record_event=record_event
        )

    def launch(self) -> int:
        """A kernel on the current stream; how much is on it then."""
        self.work[self.current] += 1
        return self.work[self.current]

    def has_waited_for(self, stream: int, work: int) -> bool:
        return self.current == stream or self.seen[self.current].get(stream, 0) >= work


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
def test_what_is_left_of_a_span_is_still_waited_for(
    fake: Fake, order: StreamOrder, part: tuple[int, int]
):
    fake.work[3], fake.seen[3] = 0, {}
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
def test_every_wait_that_is_needed(fake: Fake, order: StreamOrder, seed: int):
    """Calls follow each other, also one that raises; and whoever takes memory has waited for what has used it: for the
    work of the stream that released it, and of all streams if nobody did. One stream alone keeps no marks, and marks do
    not pile up. Against a table of every 512 bytes, with random streams."""
    arena = Arena(0, 1 << 20)
    draw = random.Random(seed)
    fake.work[3], fake.seen[3] = 0, {}
    needed: dict[int, dict[int, int]] = {}  # by unit of 512 bytes: how much of each stream
    ended: list[tuple[int, int]] = []  # of each call: its stream, and how much was on it
    taken, num_marks = [], []
    for turn in range(2000):
        fake.current = draw.choice([1, 2, 3]) if turn > 50 else 1
        if fake.current not in dict(ended) or draw.random() < 0.1:
            with contextlib.suppress(ValueError), one_call(order):
                assert not ended or fake.has_waited_for(*ended[-1])
                ended.append((fake.current, fake.launch()))
                raise ValueError("in the middle")
        span = arena.take(512 * draw.randint(1, 100))
        order.acquire(span)
        taken.append(span)
        for unit in units(span):
            assert all(fake.has_waited_for(*use) for use in needed.pop(unit, {}).items())
        while len(taken) > draw.randint(0, 12):
            span = taken.pop(draw.randrange(len(taken)))
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
    # Spans of memory nobody has taken again; their number depends on how many are out at a time, not on how often.
    assert max(num_marks[:51]) == 0
    assert max(num_marks) < 60


def units(span: tuple[int, int]) -> range:
    offset, size = span
    return range(offset // 512, (offset + size) // 512)


def test_a_capture_has_an_order_of_its_own(fake: Fake, order: StreamOrder):
    call(fake, order, 1)
    fake.capture = 7
    call(fake, order, 2)
    assert fake.seen == {1: {}, 2: {}}  # an event of another stream would end the capture
    work = call(fake, order, 2)
    call(fake, order, 1)
    assert fake.has_waited_for(2, work)
    fake.capture = 0
    fake.seen = {1: {}, 2: {}}
    call(fake, order, 1)
    assert fake.seen == {1: {}, 2: {}}
