"""What functions that run on ranks share: a heap whose memory begins as NaN, and findings that ranks collect."""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from limits import HANG_S
from torch.utils._python_dispatch import TorchDispatchMode

from symmoe.errors import ArgumentError
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.symm_mem.heap import SymmetricHeap


@contextlib.contextmanager
def open_heap(
    device: str,
    *,
    num_bytes: int = 8 << 20,
    programs: str | None = None,
    fills: str = "1",
    **kwargs,
) -> Iterator[SymmetricHeap]:
    """A heap on `device`, with SYMMOE_PROGRAMS and SYMMOE_FILL_MEMORY as given. As long as it is open, every
    torch.empty of this rank begins as NaN, too; integers as huge ones."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    backend = "nvshmem" if device == "cuda" else "host"
    if device == "cpu":  # which may be busy
        kwargs.setdefault("timeout_s", HANG_S / 2)
    try:
        words = {"SYMMOE_FILL_MEMORY": fills} | (
            {} if programs is None else {"SYMMOE_PROGRAMS": programs}
        )
        with mock.patch.dict(os.environ, words):
            opened = SymmetricHeap(num_bytes=num_bytes, backend=backend, **kwargs)
        with opened as heap:
            yield heap
    finally:
        torch.use_deterministic_algorithms(was)


def wait_for_arrivals(heap: SymmetricHeap, ranks: Iterable[int]) -> None:
    """Returns when these ranks of a heap on CPUs wait in the barrier that comes next."""
    epoch = heap.epoch + 1
    sent = heap.peers.mailbox(heap.rank)[epoch & 1, :, 0]
    while not all(sent[rank] >= 2 * epoch for rank in ranks):
        time.sleep(0.01)


def free_bytes(heap: SymmetricHeap) -> int:
    """Size of the largest lease that fits now."""
    return heap.memory.arena.largest_free_bytes


def is_unwritten(memory: torch.Tensor) -> bool:
    """Whether nobody has written there since the lease began, see builder.fill."""
    return memory.numel() == 0 or bool((memory.contiguous().view(torch.int16) == 0x7FFF).all())


def experts_of(w1: torch.Tensor, w2: torch.Tensor, **options) -> GroupedMLP:
    """A GroupedMLP with these weights, [G, 2I, H] and [G, H, I]."""
    experts = GroupedMLP(
        w1.shape[0], w1.shape[2], w2.shape[2], dtype=w1.dtype, device=w1.device, **options
    )
    with torch.no_grad():
        experts.fc1.weight.copy_(w1)
        experts.fc2.weight.copy_(w2)
    return experts


def give_budget(heap: SymmetricHeap, kind: tuple[int, int], num_tokens: int, num_rows: int) -> None:
    """The next call with exact capacity and so many tokens gets a budget of little more than num_rows rows; it measures
    if that is 0. kind: the numbers of experts and of those of a token. The same on all ranks but for num_tokens."""
    heap.row_histories.pop((*kind, 0), None)
    heap.row_histories[(*kind, 0)].note(num_tokens, num_rows, num_rows)


def mlp_with_budget(
    heap: SymmetricHeap, topk_idx, x, probs, experts: GroupedMLP, *, num_experts: int, **options
) -> torch.Tensor:
    """What a layer does with exact capacity once tokens are routed, with a large enough budget, too small a one, or
    none to begin with; options: of MoEConfig."""
    top_k = topk_idx.shape[1]
    sizes = {
        "hidden": experts.hidden,
        "ffn": experts.ffn,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    config = MoEConfig(**sizes, **options)
    num_rows = random.Random(heap.epoch).choice((0, 1, 30, 1000))  # the same on all ranks
    give_budget(heap, (num_experts, top_k), len(x), num_rows)
    return RoutedExperts.of(config, heap, experts).run(x, probs, topk_idx, experts)[0]


class Watching(TorchDispatchMode):
    """Operators run unchanged; `noted` lists them, or the facts that a subclass notes. Under any mode a layer's step is
    an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look(func, (args, kwargs), result)
        return result

    def look(self, func, arguments, result) -> None:
        """An operator has run with `arguments`, args and kwargs, and has returned `result`."""
        self.noted.append(func)


class Findings:
    """Problems, as text. A rank that raised would leave its peers waiting, so ranks collect and go on."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.texts: list[str] = []

    def check(self, ok: bool, text: str) -> None:
        """Notes `text` unless `ok`."""
        if not ok:
            self.texts.append(f"{self.where}: {text}")

    def equal(self, name: str, got: object, want: object) -> None:
        """Notes a value that is not the wanted one. Tensors, arrays and lists of integers compare as integers."""
        if isinstance(got, torch.Tensor):
            got = got.detach().cpu().numpy()
        if isinstance(want, torch.Tensor):
            want = want.detach().cpu().numpy()
        if not isinstance(got, np.ndarray) and not isinstance(want, np.ndarray):
            self.check(got == want, f"{name} is {got!r}, want {want!r}")
            return
        got = np.asarray(got)
        want = np.asarray(want)
        if got.shape != want.shape:
            self.check(False, f"{name} has shape {got.shape}, want {want.shape}")
            return
        places = np.argwhere(got != want)
        for first in map(tuple, places[:1].tolist()):
            differ = f"({len(places)} differ)"
            self.check(False, f"{name}{list(first)} is {got[first]}, want {want[first]} {differ}")

    def same_bits(
        self, got: Iterable[torch.Tensor | None], want: Iterable, text: str = "other bits"
    ) -> None:
        """Notes which tensors of these two lists are not equal bit for bit. None is equal to nothing but None."""
        same = [
            a is b if a is None or b is None else torch.equal(a, b)
            for a, b in zip(got, want, strict=True)
        ]
        self.check(all(same), f"{text}: {same}")

    def close(
        self, name: str, got: torch.Tensor, want: torch.Tensor, *, rtol: float, atol: float
    ) -> None:
        """Notes a tensor that is further than the tolerance from the wanted one."""
        pair = [tensor.detach().cpu().double() for tensor in (got, want)]
        try:
            torch.testing.assert_close(*pair, rtol=rtol, atol=atol)
        except AssertionError as error:
            self.check(False, f"{name}: {error}")


def assert_refused(
    *cases: tuple[Callable[[], object], str], error: type[Exception] = ArgumentError
) -> list[str]:
    """Each of these calls raises, with a text that fits its pattern. Returns the whole texts."""
    texts = []
    for call, text in cases:
        with pytest.raises(error, match=text) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def difference(setting: str, culprit: int, usual: object, changed: object) -> str:
    """The text of a ConfigMismatch between all ranks and one culprit: it names rank 0 and the first that differs."""
    zero, first, value = (changed, 1, usual) if culprit == 0 else (usual, culprit, changed)
    return f"{setting}: rank 0 has {zero}, rank {first} has {value}"


def on_device(tensor: torch.Tensor, heap: SymmetricHeap) -> torch.Tensor:
    """`tensor` on the heap's device."""
    return tensor.to(heap.device)
