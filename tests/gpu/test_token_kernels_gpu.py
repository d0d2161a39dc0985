"""The Triton barrier, plan and token kernels on one GPU: several ranks in one process, against the twins."""

import time

import pytest
import torch
from compared_launches import differences
from router_choices import (
    RULES,
    SIZES,
    TOLERANCE,
    all_losses,
    changed_by_counting,
    choices,
    wrong_extremes,
)
from simulated_ranks import CASES, Case, case_differences, empty_arenas, peers_of_arenas

from symmoe import kernels
from symmoe.kernels import control

DEVICE = "cuda"
REALISTIC = {
    "qwen3-30b, two ranks": Case(
        tokens=(5000, 1000),
        num_experts=128,
        top_k=8,
        hidden=2048,
        dtype=torch.bfloat16,
        ids="skewed",
    ),
    "four ranks": Case(
        tokens=(1024, 1023, 0, 1500),
        num_experts=128,
        top_k=8,
        hidden=2048,
        dtype=torch.bfloat16,
        ids="sparse",
    ),
    "fp16, dropping": Case(
        tokens=(1000, 2000),
        num_experts=64,
        top_k=6,
        hidden=1000,
        capacity=7000,
        drop=True,
        ids="skewed",
    ),
    "fp32, few programs": Case(
        tokens=(1000, 999, 1001),
        num_experts=96,
        top_k=4,
        hidden=1536,
        dtype=torch.float32,
        num_ctas=16,
    ),
    "bf16, few programs": Case(
        tokens=(1000, 900), num_experts=8, top_k=2, hidden=7168, dtype=torch.bfloat16, num_ctas=8
    ),
    "eight ranks, many experts": Case(
        tokens=(200,) * 8,
        num_experts=1024,
        top_k=32,
        hidden=64,
        dtype=torch.bfloat16,
        id_dtype=torch.int32,
    ),
    "bf16, duplicates": Case(
        tokens=(500, 600),
        num_experts=6,
        top_k=5,
        hidden=136,
        dtype=torch.bfloat16,
        ids="duplicates",
    ),
}


@pytest.fixture(scope="module")
def gpu():
    return kernels.for_device(torch.device(DEVICE))


@pytest.mark.parametrize("name", [*CASES, *REALISTIC])
def test_kernels_match_twins(gpu, name):
    for _ in range(2):  # results are the same every time
        assert case_differences(gpu, (CASES | REALISTIC)[name], DEVICE) == []


class Ranks:
    """Ranks of a barrier, each with an arena and a stream of its own on one GPU."""

    def __init__(self, gpu, num_ranks):
        self.gpu, self.num_ranks = gpu, num_ranks
        self.views = empty_arenas(num_ranks, DEVICE)
        self.peers = peers_of_arenas(self.views)
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        self.status = [
            torch.zeros(control.STATUS_WORDS, dtype=torch.int64, pin_memory=True)
            for _ in range(num_ranks)
        ]
        shape = (num_ranks, control.NUM_PUBLISHED)
        self.received = [
            torch.full(shape, -7, dtype=torch.int64, device=DEVICE) for _ in range(num_ranks)
        ]
        # Loading a kernel may wait for the GPU, so none is loaded while another one spins: an aborted rank does not.
        for rank in range(num_ranks):
            self.counters(rank)[control.ABORTED] = 1
            self.enter(rank)
        torch.cuda.synchronize()
        for view in self.views:
            view.zero_()
        torch.cuda.synchronize()

    def counters(self, rank):
        return self.peers[rank].counters(rank)

    def enter(
        self,
        rank,
        words=(0, 0, 0, 0),
        *,
        fault=False,
        timeout_s=10.0,
        call=control.PHASE_DISPATCH_DONE,
    ):
        self.gpu.barrier(
            self.peers[rank],
            words,
            self.received[rank],
            self.status[rank],
            call=call,
            fault=fault,
            timeout_ns=int(timeout_s * 1e9),
        )

    def enter_all(self, words, faults=(), calls=None):
        calls = [control.PHASE_DISPATCH_DONE] * self.num_ranks if calls is None else calls
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.enter(rank, words[rank], fault=rank in faults, call=calls[rank])
        torch.cuda.synchronize()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_barrier_exchanges_words(gpu, num_ranks):
    ranks = Ranks(gpu, num_ranks)
    for epoch in range(1, 21):
        words = [(epoch, 2**40 * epoch + rank, rank, -rank) for rank in range(num_ranks)]
        ranks.enter_all(words)
        for rank in range(num_ranks):
            assert ranks.received[rank].tolist() == [list(w) for w in words]
            assert ranks.counters(rank).tolist()[:2] == [epoch, 0]
            assert not ranks.status[rank].any()


def test_barrier_fault(gpu):
    ranks = Ranks(gpu, 3)
    ranks.enter_all([(1, 2, 3, 4)] * 3)
    ranks.enter_all([(1, 2, 3, 4)] * 3, faults=(1, 2))
    for rank in range(3):
        assert (ranks.received[rank] == -1).all()
        assert ranks.status[rank].tolist() == [
            control.STATUS_FAULT,
            control.PHASE_DISPATCH_DONE,
            1,
            2,
            2,
            2,
            0,
            0,
        ]
        assert ranks.counters(rank).tolist()[:3] == [2, 0, 1]
    ranks.enter(
        0, (4, 5, 6, 7)
    )  # returns at once and counts no epoch until the host has raised the error
    torch.cuda.synchronize()
    assert (ranks.received[0] == -1).all()
    assert ranks.counters(0).tolist()[:3] == [2, 0, 1]
    for rank in range(3):
        ranks.counters(rank)[control.FAULTED] = 0
    torch.cuda.synchronize()
    ranks.enter_all([(4, 5, 6, 7)] * 3)  # a fault is not the end
    assert ranks.received[0].tolist() == [[4, 5, 6, 7]] * 3
    assert ranks.counters(0).tolist()[:3] == [3, 0, 0]
    assert (
        ranks.status[0][control.STATUS_EPOCH] == 2
    )  # the first record stays until the host takes it


def test_barrier_of_ranks_in_different_calls(gpu):
    ranks = Ranks(gpu, 3)
    ranks.enter_all(
        [(1, 2, 3, 4)] * 3, calls=[control.pack_call(phase=2, hidden=h) for h in (64, 64, 128)]
    )
    own_call = control.pack_call(phase=2, hidden=64)
    peer_call = control.pack_call(phase=2, hidden=128)
    for rank in range(3):
        assert (ranks.received[rank] == -1).all()
        assert ranks.status[rank].tolist() == [
            control.STATUS_MISMATCH,
            2,
            2,
            own_call,
            peer_call,
            1,
            0,
            0,
        ]
        assert ranks.counters(rank).tolist()[:3] == [1, 0, 1]


def test_barrier_timeout(gpu):
    ranks = Ranks(gpu, 2)
    ranks.enter_all([(1, 2, 3, 4)] * 2)
    start = time.perf_counter()
    ranks.enter(0, timeout_s=0.05)
    torch.cuda.synchronize()
    assert 0.04 < time.perf_counter() - start < 1.0
    record = [control.STATUS_TIMEOUT, control.PHASE_DISPATCH_DONE, 1, 2, 1, 2, 0, 0]
    assert ranks.status[0].tolist() == record
    assert (ranks.received[0] == -1).all()
    assert ranks.counters(0).tolist()[:2] == [2, 1]

    ranks.received[0].fill_(-7)
    torch.cuda.synchronize()
    start = time.perf_counter()
    ranks.enter(0, timeout_s=10.0)  # returns at once from now on
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1.0
    assert (ranks.received[0] == -1).all()
    assert (ranks.counters(0).tolist()[:2], ranks.status[0].tolist()) == ([2, 1], record)
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000  # the context is alive


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_barrier_in_a_graph(gpu, num_ranks):
    ranks, graphs = Ranks(gpu, num_ranks), []
    for rank, stream in enumerate(ranks.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            ranks.enter(rank, (rank, 7, 8, 9))
    for replay in range(100):
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if replay % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for rank in range(num_ranks):
        assert ranks.counters(rank).tolist()[:2] == [100, 0]
        assert ranks.received[rank].tolist() == [[peer, 7, 8, 9] for peer in range(num_ranks)]
        assert not ranks.status[rank].any()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (3001, 128, 8), (3001, 240, 8)], ids=str)
def test_choice_of_experts(gpu, sizes, rule):
    for launch in choices(*sizes, rule):
        assert differences(launch, gpu, DEVICE, tolerance=TOLERANCE) == []
        if launch.kernel == "choose_experts":
            assert changed_by_counting(launch, gpu, DEVICE) == []


def test_losses_of_a_router(gpu):
    for launch in all_losses():
        assert differences(launch, gpu, DEVICE, tolerance=TOLERANCE) == []


def test_scores_of_extreme_logits(gpu):
    assert wrong_extremes(gpu, DEVICE) == []
