"""Every error text of docs/troubleshooting.md is provoked here, and the fix that stands beside it is followed."""

from __future__ import annotations

import inspect
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, RankFailure

import symmoe
from symmoe import errors
from symmoe.bench import stock
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.cli import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
SHAPE = {"hidden": 32, "ffn": 16, "num_experts": 8, "top_k": 2}
ANY = "..."  # in a text of the page: what differs from run to run

Provocation = Callable[..., tuple[str, str]]
ALONE: list[Provocation] = []  # called without arguments in the test's process, in a folder of its own
TOGETHER: list[Provocation] = []  # called with (rank, num_ranks) on two ranks


def alone(function: Provocation) -> Provocation:
    ALONE.append(function)
    return function


def together(function: Provocation) -> Provocation:
    TOGETHER.append(function)
    return function


def raised_by(function: Callable[[], object]) -> tuple[str, str]:
    """Name and text of the error that `function` must raise."""
    with pytest.raises(errors.SymmoeError) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def open_heap(num_bytes: int = 4 << 20, **options) -> symmoe.SymmetricHeap:
    return symmoe.SymmetricHeap(num_bytes=num_bytes, backend="host", **options)


def layer(heap: symmoe.SymmetricHeap, **options) -> symmoe.MoELayer:
    return symmoe.MoELayer(symmoe.MoEConfig(**SHAPE | options), heap)


# -- one rank ---------------------------------------------------------------------------------------------------------


@alone
def experts_and_ranks() -> tuple[str, str]:
    found = raised_by(lambda: symmoe.MoEConfig(**SHAPE | {"num_experts": 2, "top_k": 4}))
    symmoe.MoEConfig(**SHAPE | {"num_experts": 4, "top_k": 4})
    return found


@alone
def heap_below_its_least_size() -> tuple[str, str]:
    found = raised_by(lambda: open_heap(1024))
    open_heap(symmoe.plan_memory(symmoe.MoEConfig(**SHAPE), num_ranks=1, num_tokens=16).heap_bytes).close()
    return found


@alone
def logits_that_are_not_finite() -> tuple[str, str]:
    with open_heap() as heap:
        model, x = layer(heap), torch.zeros(4, 32)
        x[2, 5] = float("nan")
        found = raised_by(lambda: model(x))
        model(x.nan_to_num())
    return found


@alone
def buffer_of_another_shape() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16)
    rows, splits = torch.ones(6, 32), torch.tensor([2, 4])
    found = raised_by(lambda: fc(rows, splits, out=torch.empty(6, 32)))
    fc(rows, splits, out=torch.empty(6, 16))
    return found


@alone
def expert_id_out_of_range() -> tuple[str, str]:
    with open_heap() as heap:
        topk_idx = torch.tensor([[0, 1], [2, 8]])
        found = raised_by(lambda: symmoe.make_plan(topk_idx, num_experts=8, heap=heap))
        symmoe.make_plan(topk_idx.masked_fill(topk_idx == 8, -1), num_experts=8, heap=heap)
    return found


@alone
def more_rows_than_capacity() -> tuple[str, str]:
    with open_heap() as heap:
        x = torch.ones(16, 32)
        found = raised_by(lambda: layer(heap, capacity=24)(x))
        layer(heap, capacity=32)(x)
        layer(heap, capacity=24, overflow="drop")(x)
        layer(heap)(x)
    return found


@alone
def heap_too_small() -> tuple[str, str]:
    x = torch.ones(256, 32)
    with open_heap(64 << 10) as heap:
        found = raised_by(lambda: layer(heap)(x))
    plan = symmoe.plan_memory(
        symmoe.MoEConfig(**SHAPE), num_ranks=1, num_tokens=256, dtype=torch.float32, routing="worst"
    )
    with open_heap(plan.heap_bytes) as heap:
        layer(heap)(x)[0].sum().backward()
    return found


@alone
def use_after_close() -> tuple[str, str]:
    heap = open_heap()
    model, x = layer(heap), torch.ones(4, 32)
    model(x)
    heap.close()
    found = raised_by(lambda: model(x))
    with open_heap() as again:
        layer(again)(x)
    return found


@alone
def lease_after_release() -> tuple[str, str]:
    with open_heap() as heap:
        lease = heap.lease((4, 32), torch.float32, name="rows")
        lease.release()
        found = raised_by(lambda: lease.tensor)
        with heap.lease((4, 32), torch.float32, name="rows") as rows:
            rows.tensor.zero_()
    return found


@alone
def buffer_of_a_released_lease() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16)
    rows, splits = torch.ones(6, 32), torch.tensor([2, 4])
    with open_heap() as heap:
        lease = heap.lease((6, 16), torch.float32, name="out")
        out = lease.tensor
        lease.release()
        found = raised_by(lambda: fc(rows, splits, out=out))
        lease = heap.lease((6, 16), torch.float32, name="out")
        fc(rows, splits, out=lease.tensor)
        lease.release()
    return found


@alone
def combine_before_dispatch() -> tuple[str, str]:
    with open_heap() as heap:
        plan = symmoe.make_plan(torch.tensor([[0, 1], [2, 3]]), num_experts=8, heap=heap)
        found = raised_by(lambda: symmoe.combine_tokens(torch.ones(plan.num_rows, 32), plan))
        rows, _ = symmoe.dispatch_tokens(torch.ones(2, 32), plan)
        assert symmoe.combine_tokens(rows, plan).tolist() == [[2.0] * 32] * 2
    return found


@alone
def rows_overwritten_before_backward_dw() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16, delay_wgrad=True)
    splits = torch.tensor([2, 4])

    def step(early: bool) -> None:
        x = torch.ones(6, 32)
        fc(x, splits).sum().backward()
        if early:
            x.zero_()
        fc.backward_dw()
        x.zero_()

    found = raised_by(lambda: step(early=True))
    step(early=False)
    assert fc.weight.grad is not None
    return found


@alone
def checkpoint_of_another_model() -> tuple[str, str]:
    save_checkpoint("runs/a", 40, model=torch.nn.Linear(8, 4))
    found = raised_by(lambda: load_checkpoint("runs/a", model=torch.nn.Linear(8, 6)))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)).step == 40
    return found


@alone
def checkpoint_with_a_flipped_byte() -> tuple[str, str]:
    for step in (20, 40):
        save_checkpoint("runs/a", step, model=torch.nn.Linear(8, 4))
    (path,) = Path("runs/a/step-00000040").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = raised_by(lambda: load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4), step=20).step == 20
    return found


@alone
def no_gpu_for_nvshmem() -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        found = raised_by(lambda: symmoe.SymmetricHeap(num_bytes=4 << 20, backend="nvshmem"))
        symmoe.SymmetricHeap(num_bytes=4 << 20).close()
    return found


@alone
def benchmark_of_what_is_wrong() -> tuple[str, str]:
    sizes = "--hidden 16 --ffn 8 --experts 4 --top-k 2 --tokens 24 --repetitions 3".split()
    with pytest.MonkeyPatch.context() as patch:
        right = stock.swiglu
        patch.setattr(stock, "swiglu", lambda h, scale: right(h, scale * 1.1))
        return raised_by(lambda: main(["bench", "layer", *sizes, "--peers", "none"]))


# -- two ranks --------------------------------------------------------------------------------------------------------


@together
def wrong_on_one_rank(rank: int, num_ranks: int) -> tuple[str, str] | None:
    with open_heap() as heap:
        topk_idx = torch.tensor([[0, 1]])
        mine = topk_idx.float() if rank == 1 else topk_idx
        name, text = raised_by(lambda: symmoe.make_plan(mine, num_experts=8, heap=heap))
        symmoe.make_plan(topk_idx, num_experts=8, heap=heap)
    assert text.startswith("on rank 1: ") == (rank == 0)
    return (name, text) if rank == 0 else None


@together
def experts_that_ranks_cannot_share(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        found = raised_by(lambda: layer(heap, num_experts=7))
        layer(heap, num_experts=6)
    return found


@together
def heaps_of_different_sizes(rank: int, num_ranks: int) -> tuple[str, str]:
    found = raised_by(lambda: open_heap((4 + rank) << 20))
    open_heap().close()
    return found


@together
def ranks_in_different_calls(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        topk_idx, x = torch.tensor([[0, 1]]), torch.ones(1, 32)
        plan = symmoe.make_plan(topk_idx, num_experts=8, heap=heap)
        if rank == 0:
            found = raised_by(lambda: symmoe.make_plan(topk_idx, num_experts=8, heap=heap))
        else:
            found = raised_by(lambda: symmoe.dispatch_tokens(x, plan))
        symmoe.dispatch_tokens(x, plan)
    return found


@together
def widths_that_differ(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        plan = symmoe.make_plan(torch.tensor([[0, 1]]), num_experts=8, heap=heap)
        found = raised_by(lambda: symmoe.dispatch_tokens(torch.ones(1, 32 + 32 * rank), plan))
        symmoe.dispatch_tokens(torch.ones(1, 32), plan)
    return found


@together
def checkpoint_of_dense_parameters_that_differ(rank: int, num_ranks: int) -> tuple[str, str]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 4)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        found = raised_by(lambda: save_checkpoint(shared[0], 40, model=model))
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        save_checkpoint(shared[0], 40, model=model)
        dist.barrier()
    return found


@together
def a_rank_that_does_not_come(rank: int, num_ranks: int) -> tuple[str, str] | None:
    heap, x = open_heap(timeout_s=0.5), torch.ones(4, 32)
    model = layer(heap)
    found = raised_by(lambda: model(x)) if rank == 0 else None
    dist.barrier()
    _close_broken(heap)
    with open_heap(timeout_s=10.0) as patient:
        model = layer(patient)
        if rank == 1:
            time.sleep(0.7)
        model(x)
    return found


@together
def a_rank_that_raises(rank: int, num_ranks: int) -> tuple[str, str] | None:
    def train(heap: symmoe.SymmetricHeap) -> None:
        with heap:
            model = layer(heap)
            if rank == 1:
                raise ValueError("bad sample")
            model(torch.ones(4, 32))

    if rank == 0:
        return raised_by(lambda: train(open_heap()))
    with pytest.raises(ValueError, match="bad sample"):
        train(open_heap())
    return None


@together
def a_heap_after_a_timeout(rank: int, num_ranks: int) -> tuple[str, str] | None:
    heap = open_heap(timeout_s=0.5)
    model, x, found = layer(heap), torch.ones(4, 32), None
    if rank == 0:
        raised_by(lambda: model(x))
        found = raised_by(lambda: model(x))
    dist.barrier()
    _close_broken(heap)
    with open_heap() as again:
        layer(again)(x)
    return found


def _close_broken(heap: symmoe.SymmetricHeap) -> None:
    try:
        heap.close()
    except errors.PeerAborted:
        assert heap.rank == 1  # is told that it has been given up


def end_during_construction(rank: int, num_ranks: int, path: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    name, text = raised_by(lambda: open_heap(start_timeout_s=5.0))
    Path(path).write_text(f"{name}\n{text}")
    os._exit(7)  # the process group is broken


# -- the page ---------------------------------------------------------------------------------------------------------


def entries() -> list[tuple[str, str]]:
    """(class, text) of every error on the page."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = section.split("\n", 1)[0].strip()
        for text in re.findall(r"^```text\n(.*?)\n```$", section, re.DOTALL | re.MULTILINE):
            found.append((name, " ".join(text.split())))
    return found


def on_page(found: tuple[str, str]) -> list[tuple[str, str]]:
    """The entries of the page that say what was raised."""
    name, text = found

    def says(entry: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in entry.split(ANY))
        return re.fullmatch(pattern, text, re.DOTALL) is not None

    return [entry for entry in entries() if entry[0] == name and says(entry[1])]


def assert_on_page(found: tuple[str, str]) -> None:
    assert len(on_page(found)) == 1, found


@pytest.mark.parametrize("provoke", ALONE, ids=lambda function: function.__name__)
def test_on_one_rank(provoke: Provocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert_on_page(provoke())


@pytest.mark.parametrize("provoke", TOGETHER, ids=lambda function: function.__name__)
def test_on_two_ranks(provoke: Provocation, cluster):
    for found in filter(None, cluster(2).run(provoke)):
        assert_on_page(found)


def test_a_lost_rank(tmp_path: Path):
    ranks = Cluster(2)
    try:
        with pytest.raises(RankFailure, match="died with exit code"):
            ranks.run(end_during_construction, str(tmp_path / "found"), timeout_s=30)
    finally:
        ranks.close()
    name, text = (tmp_path / "found").read_text().split("\n", 1)
    assert_on_page((name, text))


def test_every_text_of_the_page_is_provoked():
    assert len(set(entries())) == len(entries()) == len(ALONE) + len(TOGETHER) + 1


def test_every_class_is_on_the_page():
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.SymmoeError)}
    bases = {base for c in classes for base in c.__bases__} - {errors.ArgumentError}  # which is raised itself
    named = {name for name, _ in entries()}
    assert named == {c.__name__ for c in classes - bases}


def test_another_text_is_not_on_the_page():
    """Negative control: the comparison can fail."""
    name, text = next((name, text) for name, text in entries() if ANY not in text)
    assert on_page((name, text)) == [(name, text)]
    assert not on_page((name, text + "."))
    assert not on_page(("SymmoeError", text))
