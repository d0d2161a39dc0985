"""Compiles the barrier, plan and row kernels for sm_90 without a GPU, with the arguments their launchers would pass.
What is checked is what the generated code must have: 16-byte accesses or TMA where rows move, the barrier's release,
acquire and clock, no other atomics, no spills."""

import re

import pytest
import torch

pytest.importorskip("triton")

import kernel_launches as layer
from ahead_of_time import since
from combinations import every_combination
from compiled_launches import atomics, meta
from kernel_launches import BF16, FP16, FP32, INT64, TRIPS

from symmoe.kernels.hopper import rows as hopper_rows
from symmoe.kernels.triton import nodes, plan, replicas, sync, tokens

MOST_REGISTERS = {"assign_rows_kernel": 160, "route_to_replicas_kernel": 168, "lay_out_kernel": 255}
LOAD, STORE = "cp.async.bulk.tensor.3d.shared", "cp.async.bulk.tensor.3d.global"
MODULES = sync, nodes, plan, replicas, tokens, hopper_rows


def check(launches, name, max_registers=128):
    """The code of the latest launch, without atomics, and in registers."""
    code = launches.compile(name)
    assert code.stack <= 16  # ptxas may put a loop invariant there for the sake of occupancy
    assert code.registers <= max_registers
    assert not re.search(r"\b(atom|red)\.(global|shared)", code.ptx)
    return code


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_barrier(launches, num_ranks):
    layer.launch_barrier(num_ranks)
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


def test_signals(launches):
    layer.launch_signals()
    code = launches.compile("send_signal_kernel")
    assert code.stack == 0
    assert code.registers <= 64
    # One store, a release that covers the payload of the kernels before it.
    (atomic,) = atomics(code.ptx)
    assert all(word in atomic for word in ("sys", "release", "exch"))
    ptx = check(launches, "wait_for_signal_kernel", 64).ptx
    assert ptx.count("ld.acquire.sys") == 1
    assert "%globaltimer" in ptx


@every_combination(dtype=[torch.bfloat16, torch.float32], table=[False, True])
def test_kernels_that_move_replicas(launches, dtype, table):
    layer.launch_replicas(dtype, table)
    push, add = (
        check(launches, f"{name}_kernel", 128) for name in ("push_replicas", "add_from_replicas")
    )
    assert "ld.global.v4" in push.ptx
    assert "st.global.v4" in push.ptx
    assert "ld.global.v4" in add.ptx


@every_combination(
    shape=TRIPS.keys(), id_dtype=[torch.int32, INT64], drop=[False, True], num_replica_slots=[0, 2]
)
def test_plan_kernels(launches, shape, id_dtype, drop, num_replica_slots):
    layer.launch_plan(shape, id_dtype, drop, num_replica_slots)
    assert len(launches) == 4 + drop + num_replica_slots
    for launch in launches:
        code = check(launches, launch.name, MOST_REGISTERS.get(launch.name, 128))
        assert code.ptx.count("fence.acq_rel.sys") == (launch.name == "lay_out_kernel")


@pytest.mark.parametrize("num_nodes", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_kernels_between_nodes(launches, num_nodes):
    names = (
        "rail_rows",
        "tell_header",
        "own_counts",
        "other_counts",
        "plan_in_node",
        "take_rows",
        "post_report",
        "count_exchange",
        "receive_fault_flags",
    )
    for shape, sizes in TRIPS.items():
        if sizes[-1] % num_nodes == 0:
            layer.launch_between_nodes(shape, num_nodes)
            for name in names:
                check(launches, f"{name}_kernel", 168)


@every_combination(shape=TRIPS.keys(), dtype=[BF16, FP16, FP32])
def test_rows_move_in_16_byte_accesses(launches, shape, dtype):
    layer.launch_rows(shape, dtype)
    *_, top_k, num_ranks = TRIPS[shape]
    # With one slot per token there are no secondary rows, with one rank no tokens of peers.
    assert len(launches) == 4 + (num_ranks > 1) + (num_ranks > 1 and top_k > 1)
    for launch in launches:
        # Of 64 ranks and 32 experts of a token one program per multiprocessor less.
        ptx = check(launches, launch.name, 144 if shape == "largest" else 128).ptx
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


@every_combination(num_ranks=[1, 2, 4, 8], top_k=[1, 2, 8])
def test_returned_rows_are_on_their_way_before_own_rows_are_summed(launches, num_ranks, top_k):
    slots, x = meta(8192, top_k), meta(8192, 2048, dtype=BF16)
    received, packed = meta(num_ranks, 3, dtype=INT64), meta(8192, num_ranks)
    index = packed, meta(num_ranks), slots, slots
    tokens.sum_home((x, x), index, (received, received), x, rank=num_ranks - 1)
    # Up to the first jump, which is that of the loop over own rows, or over the tile.
    code = re.sub(r"\bBRA\b.*", "", launches.compile("sum_home_kernel").sass, flags=re.DOTALL)
    assert code.count("LDG.E.128") == min(num_ranks, tokens.PEERS_UNROLL) * tokens.HOME_ACCESSES
    assert "FADD" not in code


@every_combination(shape=TRIPS.keys(), with_probs=[False, True])
def test_slot_kernels(launches, shape, with_probs):
    layer.launch_slots(shape, with_probs)
    assert len(launches) == 4
    for launch in launches:
        check(launches, launch.name)


# -- by TMA, on Hopper ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("hidden", "batch"), [(2048, 4), (7168, 1), (384, 16)])
def test_pushed_pieces_are_boxes_of_tma(launches, hidden, batch):
    x, offsets = meta(8192, hidden, dtype=BF16), meta(2, 3, dtype=INT64)
    hopper_rows.launch_push(
        x, meta(8192, 2), layer.peers_of(2, 0), offsets, column=0, rank=1, num_ctas=4
    )
    code = launches.compile_roles()
    # Four movers with two stages ahead, and one in the loop.
    assert (code.ptx.count(LOAD), code.ptx.count(STORE)) == (4 * 3 * batch, 4 * batch)


@pytest.mark.parametrize(("hidden", "top_k"), [(2048, 8), (7168, 2), (384, 12)])
def test_copied_pieces_are_boxes_of_tma(launches, hidden, top_k):
    hopper_rows.launch_fan_out(
        meta(8192, hidden, dtype=BF16), meta(8192, top_k), meta(3), source=1, num_ctas=4
    )
    code = launches.compile_roles()
    # Before the loop over batches, once or for each of two stages, and in it: the loop over a batch's pieces is a loop.
    assert code.ptx.count(LOAD) in (4 * 2, 4 * 3)
    assert code.ptx.count(STORE) == 4 * (top_k - 1)


@pytest.mark.parametrize(("hidden", "dtype"), [(2048, BF16), (7168, FP16), (384, BF16)])
def test_summed_pieces_are_boxes_of_tma(launches, hidden, dtype):
    out, table = meta(8192, hidden, dtype=dtype), meta(8192, 8)
    received, starts = meta(4, 3, dtype=INT64), meta(5)
    hopper_rows.launch_push_sums(
        out, table, starts, layer.peers_of(4, 2), received, column=0, home=1, num_ctas=8
    )
    pushed = launches.compile_roles()
    index = meta(8192, 4), starts[:4], table, table
    hopper_rows.launch_sum_home((out, out), index, (received, received), out, rank=2, num_ctas=8)
    for code, loads in ((pushed, 3 * 8), (launches.compile_roles(), 3 * 11)):
        assert code.ptx.count(LOAD) == loads
        assert "st.global.v4.b32" in code.ptx


def test_pieces_cover_what_is_moved_and_fit_into_boxes():
    for row_bytes in (256, 768, 4096, 8192, 14336, 65536):
        for most in (1024, 4096, 16384):
            cut = hopper_rows.cut_rows(row_bytes, most)
            assert 4 * cut.num_segments * cut.segment == row_bytes
            assert cut.segment <= 256
            assert cut.piece <= 256
            assert cut.piece & (cut.piece - 1) == 0
            assert cut.piece_bytes <= most
            assert row_bytes <= cut.num_pieces * cut.piece_bytes < row_bytes + cut.piece_bytes


def test_stages_fit_into_a_ring_and_rows_of_whole_units_are_taken():
    for width in (128, 384, 1024, 1792, 2048, 7168, 32768):
        sums = hopper_rows.cut_sums(2 * width)
        assert 4 <= sums.stages <= hopper_rows.MAX_SUM_STAGES
        assert sums.stages * sums.piece_bytes <= hopper_rows.SUM_RING_BYTES
    assert hopper_rows.takes_rows(meta(3, 2048, dtype=BF16))
    assert not hopper_rows.takes_rows(meta(3, 2056, dtype=BF16))
