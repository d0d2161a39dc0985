"""The Triton barrier, plan and token kernels on one GPU: several ranks in one process, against the twins."""

import time

import pytest
import torch
from router_choices import RULES, SIZES, choices, differing, fits, hard_logits
from simulated_ranks import CASES, Case, differences, run_case

from symmoe.kernels import control, twin
from symmoe.kernels.control import ControlLayout, Peers, PlanIntegers, plan_layout
from symmoe.kernels.routing_rule import RoutingRule

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
REALISTIC = {
    "qwen3-30b, two ranks": Case(
        tokens=(5000, 1000), num_experts=128, top_k=8, hidden=2048, dtype=torch.bfloat16, ids="skewed"
    ),
    "four ranks": Case(
        tokens=(1024, 1023, 0, 1500), num_experts=128, top_k=8, hidden=2048, dtype=torch.bfloat16, ids="sparse"
    ),
    "fp16, dropping": Case(
        tokens=(1000, 2000), num_experts=64, top_k=6, hidden=1000, capacity=7000, drop=True, ids="skewed"
    ),
    "fp32, few programs": Case(
        tokens=(1000, 999, 1001), num_experts=96, top_k=4, hidden=1536, dtype=torch.float32, num_ctas=16
    ),
    "bf16, few programs": Case(
        tokens=(1000, 900), num_experts=8, top_k=2, hidden=7168, dtype=torch.bfloat16, num_ctas=8
    ),
    "eight ranks, many experts": Case(
        tokens=(200,) * 8, num_experts=1024, top_k=32, hidden=64, dtype=torch.bfloat16, id_dtype=torch.int32
    ),
    "bf16, duplicates": Case(
        tokens=(500, 600), num_experts=6, top_k=5, hidden=136, dtype=torch.bfloat16, ids="duplicates"
    ),
}


@pytest.fixture(scope="module")
def gpu():
    from symmoe.kernels import gpu

    return gpu


@pytest.mark.parametrize("name", [*CASES, *REALISTIC])
def test_kernels_match_twins(gpu, name):
    from symmoe.kernels import twin

    case = (CASES | REALISTIC)[name]
    theirs = run_case(twin, case, DEVICE)
    for _ in range(2):  # results are the same every time
        assert not differences(run_case(gpu, case, DEVICE), theirs)


class Ranks:
    """Ranks of a barrier, each with an arena and a stream of its own on one GPU."""

    def __init__(self, gpu, num_ranks):
        self.gpu, self.num_ranks = gpu, num_ranks
        layout = ControlLayout(num_ranks)
        self.views = tuple(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks))
        bases = torch.tensor([view.data_ptr() for view in self.views], device=DEVICE)
        self.peers = [
            Peers(rank=rank, num_ranks=num_ranks, bases=bases, views=self.views, layout=layout)
            for rank in range(num_ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        self.status = [torch.zeros(control.STATUS_WORDS, dtype=torch.int64, pin_memory=True) for _ in range(num_ranks)]
        shape = (num_ranks, control.NUM_PUBLISHED)
        self.received = [torch.full(shape, -7, dtype=torch.int64, device=DEVICE) for _ in range(num_ranks)]
        # Loading a kernel may wait for the GPU, so none is loaded while another one spins: an aborted rank does not.
        for rank in range(num_ranks):
            self.counters(rank)[control.ABORTED] = 1
            self.enter(rank)
        torch.cuda.synchronize()
        for view in self.views:
            view.zero_()
        torch.cuda.synchronize()

    def counters(self, rank):
        offset = self.peers[rank].layout.counters
        return self.peers[rank].region(rank, offset, (control.NUM_COUNTERS,), torch.int64)

    def enter(self, rank, words=(0, 0, 0), *, fault=False, timeout_s=10.0, call=control.PHASE_DISPATCH_DONE):
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
        words = [(epoch, 2**40 * epoch + rank, rank) for rank in range(num_ranks)]
        ranks.enter_all(words)
        for rank in range(num_ranks):
            assert ranks.received[rank].tolist() == [list(w) for w in words]
            assert ranks.counters(rank).tolist()[:2] == [epoch, 0]
            assert not ranks.status[rank].any()


def test_barrier_fault(gpu):
    ranks = Ranks(gpu, 3)
    ranks.enter_all([(1, 2, 3)] * 3)
    ranks.enter_all([(1, 2, 3)] * 3, faults=(1, 2))
    for rank in range(3):
        assert (ranks.received[rank] == -1).all()
        assert ranks.status[rank].tolist() == [control.STATUS_FAULT, control.PHASE_DISPATCH_DONE, 1, 2, 2, 2, 0, 0]
        assert ranks.counters(rank).tolist()[:3] == [2, 0, 1]
    ranks.enter(0, (4, 5, 6))  # returns at once and counts no epoch until the host has raised the error
    torch.cuda.synchronize()
    assert (ranks.received[0] == -1).all()
    assert ranks.counters(0).tolist()[:3] == [2, 0, 1]
    for rank in range(3):
        ranks.counters(rank)[control.FAULTED] = 0
    torch.cuda.synchronize()
    ranks.enter_all([(4, 5, 6)] * 3)  # a fault is not the end
    assert ranks.received[0].tolist() == [[4, 5, 6]] * 3
    assert ranks.counters(0).tolist()[:3] == [3, 0, 0]
    assert ranks.status[0][control.STATUS_EPOCH] == 2  # the first record stays until the host takes it


def test_barrier_of_ranks_in_different_calls(gpu):
    ranks = Ranks(gpu, 3)
    ranks.enter_all([(1, 2, 3)] * 3, calls=[control.pack_call(phase=2, hidden=h) for h in (64, 64, 128)])
    here, there = control.pack_call(phase=2, hidden=64), control.pack_call(phase=2, hidden=128)
    for rank in range(3):
        assert (ranks.received[rank] == -1).all()
        assert ranks.status[rank].tolist() == [control.STATUS_MISMATCH, 2, 2, here, there, 1, 0, 0]
        assert ranks.counters(rank).tolist()[:3] == [1, 0, 1]


def test_barrier_timeout(gpu):
    ranks = Ranks(gpu, 2)
    ranks.enter_all([(1, 2, 3)] * 2)
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
    assert ranks.counters(0).tolist()[:2] == [2, 1]
    assert ranks.status[0].tolist() == record
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000  # the context is alive


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_barrier_in_a_graph(gpu, num_ranks):
    ranks = Ranks(gpu, num_ranks)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            ranks.enter(rank, (rank, 7, 8))
    for replay in range(100):
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if replay % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for rank in range(num_ranks):
        assert ranks.counters(rank).tolist()[:2] == [100, 0]
        assert ranks.received[rank].tolist() == [[peer, 7, 8] for peer in range(num_ranks)]
        assert not ranks.status[rank].any()


def test_layer_call_in_a_graph(gpu):
    """All kernels of a call on one rank in one graph; the routing changes from replay to replay."""
    num_tokens, hidden, num_experts, top_k, capacity = 1000, 512, 16, 4, 4000
    layout = ControlLayout(1)
    arena = torch.zeros(layout.num_bytes + (64 << 20), dtype=torch.uint8, device=DEVICE)
    bases = torch.tensor([arena.data_ptr()], device=DEVICE)
    peers = Peers(rank=0, num_ranks=1, bases=bases, views=(arena,), layout=layout)
    status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64, pin_memory=True)
    offsets = (layout.num_bytes, layout.num_bytes + (32 << 20), layout.num_bytes + (48 << 20))
    topk_idx = torch.zeros((num_tokens, top_k), dtype=torch.int64, device=DEVICE)
    x = torch.randn((num_tokens, hidden), device=DEVICE, dtype=torch.bfloat16)
    probs = torch.rand((num_tokens, top_k), device=DEVICE)

    def int32(*shape):
        return torch.empty(shape, dtype=torch.int32, device=DEVICE)

    def barrier(words):
        received = torch.empty((1, control.NUM_PUBLISHED), dtype=torch.int64, device=DEVICE)
        gpu.barrier(peers, words, received, status, call=1, fault=False, timeout_ns=10**9)
        return received

    def call():
        num_blocks = -(-num_tokens // control.TOKENS_PER_BLOCK)
        counts, starts = int32(num_blocks, num_experts + 3), int32(num_blocks, num_experts)
        gpu.count_slots(topk_idx, counts, num_experts=num_experts, num_ranks=1)
        words = {control.HEAD_NUM_TOKENS: num_tokens, control.HEAD_CAPACITY: capacity, control.HEAD_PACKED_CAPACITY: -1}
        header = tuple(words.get(word, 0) for word in range(control.HEADER_WORDS))
        gpu.send_counts(counts, topk_idx, header, starts, peers, num_experts=num_experts)
        numel, layout = plan_layout(num_tokens, top_k, num_experts, 1)
        plan = PlanIntegers(int32(numel), layout)
        options = {"capacity": capacity, "packed_capacity": -1, "drop": False, "record_errors": True}
        gpu.lay_out(peers, barrier((0, 0, 0)), status, plan, **options)
        gpu.assign_rows(topk_idx, starts, plan)
        gpu.assign_packed_rows(plan)
        ready = barrier(offsets)
        gpu.push_rows(x, plan.token_to_primary_row, peers, ready, column=0)
        gpu.push_slots(
            plan.slot_to_row,
            plan.slot_to_rank,
            probs,
            plan.token_to_packed_row,
            plan.block_tokens,
            plan.packed_start,
            plan.packed_limit,
            peers,
            ready,
            row_column=1,
            prob_column=2,
        )
        gpu.send_signal(peers, 0)
        arrived = torch.empty(1, dtype=torch.int64, device=DEVICE)
        gpu.wait_for_signal(peers, 0, arrived, status, phase=3, timeout_ns=10**9)
        gpu.split_by_source(plan.source_to_row_start, plan.source_to_rows, rank=0)
        packed_to_row, row_to_packed = int32(num_tokens, top_k), int32(capacity)
        row_probs = torch.empty(capacity, device=DEVICE)
        source_start, slots = plan.source_to_packed_start, (plan.slot_to_rank, plan.slot_to_row)
        gpu.index_rows(
            peers.region(0, offsets[1], (num_tokens, top_k), torch.int32),
            peers.region(0, offsets[2], (num_tokens, top_k), torch.float32),
            source_start[:1],
            source_start[1:],
            ready,
            arrived,
            packed_to_row,
            row_to_packed,
            row_probs,
        )
        rows = peers.region(0, offsets[0], (capacity, hidden), torch.bfloat16)
        gpu.place_rows(x, *slots, rows, ready, rank=0)
        by_slot, by_rank, values = torch.empty_like(x), torch.empty_like(x), torch.empty_like(probs)
        gpu.pull_rows(*slots, peers, ready, by_slot, column=0)
        gpu.gather_values(
            row_probs,
            packed_to_row,
            source_start[1:],
            peers.region(0, offsets[2], (num_tokens, top_k), torch.float32),
        )
        packed = plan.token_to_packed_row
        gpu.sum_home(rows, rows, packed, source_start[:1], *slots, ready, arrived, by_rank, rank=0)
        gpu.pull_values(plan.slot_to_rank, packed, peers, ready, values, column=2)
        barrier((0, 0, 0))
        return by_slot, by_rank, values, plan.expert_load, plan.source_to_rows

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_slot, by_rank, values, load, parts = call()
    for seed in range(3):
        torch.manual_seed(seed)
        topk_idx.copy_(torch.randint(-1, num_experts, topk_idx.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert not status.any()
        assert torch.equal(load.long(), torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts))
        assert torch.equal(parts[0, 1] - parts[0, 0], load)
        assert torch.equal(parts[0, 1], load.cumsum(0).int())
        expected = torch.zeros_like(x, dtype=torch.float32)
        for k in range(top_k):
            expected += x.float() * (topk_idx[:, k : k + 1] >= 0)
        assert torch.equal(by_slot, expected.bfloat16())
        assert torch.equal(by_rank, expected.bfloat16())
        assert torch.equal(values, probs * (topk_idx >= 0))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [*SIZES, (3001, 128, 8), (3001, 240, 8)])
def test_choice_of_experts(gpu, num_tokens: int, num_experts: int, top_k: int, rule: RoutingRule):
    if not fits(rule, num_experts, top_k):
        pytest.skip("no configuration has them together")
    logits = hard_logits(num_tokens, num_experts)
    for biased, given in ((False, False), (True, False), (False, True)):
        wanted = choices(twin, logits, top_k, rule, biased, given)
        assert differing(choices(gpu, logits.to(DEVICE), top_k, rule, biased, given), wanted) == []
