"""Compiles the barrier, plan and token kernels for sm_90 without a GPU, with the arguments their launchers would pass.

What is checked is what the generated code must have: 16-byte accesses where rows move, the barrier's release, acquire
and clock, no other atomics, no spills.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import atomics, catch_launches
from compiled_launches import meta as empty

from symmoe.kernels import control
from symmoe.kernels.control import ControlLayout, Peers, PlanIntegers, plan_layout
from symmoe.kernels.triton import plan, sync, tokens

# T, H, E, K, R
SHAPES = {
    "qwen3-30b": (8192, 2048, 128, 8, 4),
    "deepseek-v3": (4096, 7168, 256, 8, 8),
    "qwen3-30b, two ranks": (8192, 2048, 128, 8, 2),
    "odd": (100, 1000, 12, 3, 3),
    "largest": (33, 512, 1024, 32, 64),
    "most experts per rank": (64, 512, 1024, 1, 1),
}


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, sync, plan, tokens)


def make_peers(num_ranks):
    bases = torch.zeros(num_ranks, dtype=torch.int64)
    return Peers(rank=num_ranks - 1, num_ranks=num_ranks, bases=bases, views=(), layout=ControlLayout(num_ranks))


def check(launches, name, max_registers=128):
    """The code of the latest launch, without atomics, and in registers."""
    code = launches.compile(name)
    assert code.stack <= 16  # ptxas may put a loop invariant there for the sake of occupancy
    assert code.registers <= max_registers
    assert not re.search(r"\b(atom|red)\.(global|shared)", code.ptx)
    return code


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_barrier(launches, num_ranks):
    status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    received = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64)
    sync.barrier(make_peers(num_ranks), (1, 2, 3), received, status, call=1, fault=False, timeout_ns=10**9)
    code = launches.compile("barrier_kernel")
    ptx, found = code.ptx, atomics(code.ptx)
    assert code.stack == 0
    lanes_per_thread = max(1, num_ranks // 32)
    assert len(found) == lanes_per_thread
    assert all("sys" in line and "release" in line and "exch" in line for line in found)
    assert ptx.count("ld.acquire.sys.global.s64") == lanes_per_thread
    assert ptx.count("%globaltimer") == lanes_per_thread + 1
    # One for each kind of record; a rank alone cannot be in another call than its peers. From Triton 3.8 on all records
    # but one share it, and the store of the kind behind it.
    assert ptx.count("fence.acq_rel.sys") == since(("3.6", 3 if num_ranks == 1 else 4), ("3.8", 2))
    # In this order: the words, the release, the wait, the peers' words, which are read from memory.
    release, acquire = ptx.index(found[0]), ptx.index("ld.acquire.sys")
    assert ptx.index("bar.sync") < release or "bar.warp.sync" in ptx[:release]
    assert release < acquire < ptx.index("ld.volatile.global", release)
    # Without a bound, the wait looks at nothing but the words.
    sync.barrier(make_peers(num_ranks), (1, 2, 3), received, status, call=1, fault=False, timeout_ns=None)
    ptx = launches.compile("barrier_kernel").ptx
    assert "%globaltimer" not in ptx
    assert ptx.count("ld.acquire.sys.global.s64") == lanes_per_thread


def test_signals(launches):
    peers, status = make_peers(4), torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    sync.send_signal(peers, 3)
    code = launches.compile("send_signal_kernel")
    assert code.stack == 0
    assert code.registers <= 64
    # One store, a release that covers the payload of the kernels before it.
    (atomic,) = atomics(code.ptx)
    assert "sys" in atomic
    assert "release" in atomic
    assert "exch" in atomic
    sync.wait_for_signal(peers, 3, torch.zeros(1, dtype=torch.int64), status, phase=3, timeout_ns=10**9)
    ptx = check(launches, "wait_for_signal_kernel", 64).ptx
    assert ptx.count("ld.acquire.sys") == 1
    assert "%globaltimer" in ptx


def integers_of(*sizes: int) -> PlanIntegers:
    numel, layout = plan_layout(*sizes)
    return PlanIntegers(empty(numel), layout)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_plan_kernels(launches, shape, id_dtype):
    num_tokens, _, num_experts, top_k, num_ranks = SHAPES[shape]
    num_blocks = -(-num_tokens // control.TOKENS_PER_BLOCK)
    peers = make_peers(num_ranks)
    topk_idx = empty(num_tokens, top_k, dtype=id_dtype)
    block_counts, block_starts = empty(num_blocks, num_experts + num_ranks + 2), empty(num_blocks, num_experts)
    integers = integers_of(num_tokens, top_k, num_experts, num_ranks)

    plan.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)
    check(launches, "count_slots_kernel")
    header = tuple(range(control.HEADER_WORDS))
    plan.send_counts(block_counts, topk_idx, header, block_starts, peers, num_experts=num_experts)
    check(launches, "send_counts_kernel")
    plan.assign_rows(topk_idx, block_starts, integers)
    check(launches, "assign_rows_kernel", 200)
    plan.assign_packed_rows(integers)
    check(launches, "assign_packed_rows_kernel", 200)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_lay_out(launches, shape, drop):
    _, _, num_experts, _, num_ranks = SHAPES[shape]
    plan.lay_out(
        make_peers(num_ranks),
        empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64),
        torch.zeros(control.STATUS_WORDS, dtype=torch.int64),
        integers_of(5, 1, num_experts, num_ranks),
        capacity=1000,
        packed_capacity=-1,
        drop=drop,
        record_errors=True,
    )
    assert check(launches, "lay_out_kernel", 255).ptx.count("fence.acq_rel.sys") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_split_by_source(launches, shape):
    _, _, num_experts, _, num_ranks = SHAPES[shape]
    local = num_experts // num_ranks
    plan.split_by_source(empty(num_ranks + 1, local), empty(num_ranks, 2, local), rank=num_ranks - 1)
    check(launches, "split_by_source_kernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_move_in_16_byte_accesses(launches, shape, dtype):
    num_tokens, hidden, _, top_k, num_ranks = SHAPES[shape]
    peers = make_peers(num_ranks)
    x, rows = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens * 2, hidden, dtype=dtype)
    token_to_row, packed_to_row = empty(num_tokens, num_ranks), empty(num_tokens, top_k)
    slots, starts = empty(num_tokens, top_k), empty(num_ranks + 1)
    received = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64)

    tokens.push_rows(x, token_to_row, peers, received, column=0)
    tokens.place_rows(x, slots, slots, rows, received, rank=peers.rank)
    check_rows_kernel(launches, "place_rows_kernel", shape)
    tokens.fan_out(rows, packed_to_row, starts, rank=peers.rank)
    tokens.push_sums(rows, packed_to_row, starts, peers, received, column=0)
    tokens.pull_rows(slots, slots, peers, received, x, column=0)
    check_rows_kernel(launches, "pull_rows_kernel", shape)
    home = (token_to_row, empty(num_ranks), slots, slots, received, received, x)
    tokens.sum_home(rows, rows, *home, rank=peers.rank)
    check_rows_kernel(launches, "sum_home_kernel", shape)
    for name in ("push_rows", "fan_out", "push_sums"):
        # With one slot per token there are no secondary rows, with one rank no tokens of peers.
        if name == "push_rows" or (num_ranks > 1 and (name == "push_sums" or top_k > 1)):
            check_rows_kernel(launches, f"{name}_kernel", shape)


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_returned_rows_are_on_their_way_before_own_rows_are_summed(launches, num_ranks, top_k):
    slots, x = empty(8192, top_k), empty(8192, 2048, dtype=torch.bfloat16)
    received, packed = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64), empty(8192, num_ranks)
    tokens.sum_home(x, x, packed, empty(num_ranks), slots, slots, received, received, x, rank=num_ranks - 1)
    # Up to the first jump, which is that of the loop over own rows, or over the tile.
    code = re.sub(r"\bBRA\b.*", "", launches.compile("sum_home_kernel").sass, flags=re.DOTALL)
    assert code.count("LDG.E.128") == min(num_ranks, tokens.PEERS_UNROLL) * tokens.HOME_ACCESSES
    assert "FADD" not in code


def check_rows_kernel(launches, name, shape):
    ptx = check(launches, name).ptx
    assert "ld.global.v4.b32" in ptx
    for line in ptx.splitlines():
        if re.search(r"\bst\.global", line):
            assert "st.global.v4.b32" in line
        if re.search(r"\bld\.global", line) and ".v4.b32" not in line:
            assert re.search(r"ld\.global\.b(32|64) ", line)  # a row number, base or offset
    if "qwen" in shape or "deepseek" in shape:
        assert "bar.sync" not in ptx  # row numbers are loaded by the threads that use them
    assert ".ftz" not in ptx
    assert "fma." not in ptx


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_slot_kernels(launches, shape, with_probs):
    num_tokens, _, _, top_k, num_ranks = SHAPES[shape]
    peers = make_peers(num_ranks)
    slots, num_packed, rows = empty(num_tokens, top_k), empty(1), empty(num_tokens)
    values, row_values = empty(num_tokens, top_k, dtype=torch.float32), empty(num_tokens, dtype=torch.float32)
    probs, row_probs = (values, row_values) if with_probs else (None, None)
    per_rank, token_to_row, block_tokens = empty(num_ranks), empty(num_tokens, num_ranks), empty(1, num_ranks)
    received = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64)
    tokens.push_slots(
        slots,
        slots,
        probs,
        token_to_row,
        block_tokens,
        per_rank,
        per_rank,
        peers,
        received,
        row_column=1,
        prob_column=2,
    )
    tokens.index_rows(slots, probs, num_packed, num_packed, received, received, slots, rows, row_probs)
    tokens.gather_values(row_values, slots, num_packed, values)
    tokens.pull_values(slots, token_to_row, peers, received, values, column=1)
    for name in ("push_slots", "index_rows", "gather_values", "pull_values"):
        check(launches, f"{name}_kernel")
