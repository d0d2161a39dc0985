"""Compiles the barrier, plan and row kernels for sm_90 without a GPU. What is checked is what the generated code must
have: 16-byte accesses or TMA where rows move, the barrier's release, acquire and clock, no other atomics, no spills."""

import re
from itertools import product

import pytest

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import Case, atomics, code_cases
from launch_table import BF16, FP16, FP32, SIZES, TRIPS, Launch

from symmoe.kernels import control
from symmoe.kernels.hopper import rows as hopper_rows
from symmoe.kernels.triton import tokens

MOST_REGISTERS = {
    "assign_rows": 160,
    "route_to_replicas": 168,
    "lay_out": 255,
    "send_counts": since(("3.6", 128), ("3.9", 160)),
}
FENCE, LOAD, STORE = (
    "fence.acq_rel.sys",
    "cp.async.bulk.tensor.3d.shared",
    "cp.async.bulk.tensor.3d.global",
)
WIDE_LOAD, WIDE_STORE = "ld.global.v4", "st.global.v4"
ANY_SPILLED = 10**6  # where the bound is that of the stack


def has_no_atomics(code):
    assert not re.search(r"\b(atom|red)\.(global|shared)", code.ptx)


def in_registers(launch, most_registers=128, ptx=None, also=(), **options):
    """The code of a launch, without atomics."""
    # ptxas may put a loop invariant there for the sake of occupancy
    bounds = {"stack": 16, "registers": most_registers, "spilled": ANY_SPILLED}
    return Case(launch, ptx=ptx or {}, bounds=bounds, also=(has_no_atomics, *also), **options)


def barrier(num_ranks):
    lanes_per_thread = max(1, num_ranks // 32)

    def releases_and_acquires(code):
        ptx, instructions = code.ptx, atomics(code.ptx)
        assert len(instructions) == lanes_per_thread
        assert all("sys" in line and "release" in line and "exch" in line for line in instructions)
        # In this order: the words, the release, the wait, the peers' words, which are read from memory.
        release = ptx.index(instructions[0])
        assert ptx.index("bar.sync") < release or "bar.warp.sync" in ptx[:release]
        assert release < ptx.index("ld.acquire.sys") < ptx.index("ld.volatile.global", release)

    ptx = {
        "ld.acquire.sys.global.s64": lanes_per_thread,
        "%globaltimer": lanes_per_thread + 1,
        # One for each kind of record; a rank alone cannot be in another call than its peers. From Triton 3.8 on all
        # records but one share it, and the store of the kind behind it.
        FENCE: since(("3.6", 3 if num_ranks == 1 else 4), ("3.8", 2)),
    }
    bounds = {"stack": 0, "spilled": ANY_SPILLED}
    return Case(
        Launch("barrier", {"T": 1, "E": num_ranks, "R": num_ranks}),
        ptx=ptx,
        bounds=bounds,
        also=(releases_and_acquires,),
    )


def stores_once_and_releases(code):
    """The release covers the payload of the kernels before it."""
    (atomic,) = atomics(code.ptx)
    assert all(word in atomic for word in ("sys", "release", "exch"))


def plan_case(kernel, sizes, ids, drop=False, num_replica_slots=0):
    changes = {"topk_idx": f"{ids} T K"} if kernel not in ("lay_out", "place_replicas") else {}
    if kernel == "lay_out":
        changes["overflow"] = control.OVERFLOW_DROP if drop else control.OVERFLOW_REPEAT
    if kernel == "assign_rows":
        changes["drop"] = drop
    launch = Launch(kernel, SIZES[sizes] | {"S": num_replica_slots}, changes=changes)
    ptx = {FENCE: int(kernel == "lay_out")}
    count = 1 + (drop and kernel == "assign_rows")
    return in_registers(launch, MOST_REGISTERS.get(kernel, 128), ptx, count=count)


def of_plan(kernel):
    """Of ids, with replicas of the copies that are chosen for them."""
    if kernel == "route_to_replicas":
        return [
            plan_case(kernel, *options, num_replica_slots=2)
            for options in product(TRIPS, ("i32", "i64"))
        ]
    if kernel == "place_replicas":
        return [plan_case(kernel, sizes, "i32", num_replica_slots=2) for sizes in TRIPS]
    ways = [("i32", 0), ("i64", 0), ("i32", 2)]
    drops = (False, True) if kernel in ("lay_out", "assign_rows") else (False,)
    return [
        plan_case(kernel, sizes, ids, drop, num_replica_slots)
        for sizes, (ids, num_replica_slots), drop in product(TRIPS, ways, drops)
    ]


BETWEEN_NODES = "rail_rows publish_header own_counts other_counts plan_in_node take_rows".split()


def between_nodes(kernel, num_nodes):
    return [
        in_registers(Launch(kernel, SIZES[name] | {"L": num_nodes}), 168)
        for name in TRIPS
        if SIZES[name]["R"] % num_nodes == 0
    ]


def moves_16_bytes(code):
    for line in code.ptx.splitlines():
        if re.search(r"\bst\.global", line):
            assert "st.global.v4.b32" in line
        if re.search(r"\bld\.global", line) and ".v4.b32" not in line:
            assert re.search(r"ld\.global\.b(32|64) ", line)  # a row number, base or offset


def of_rows(kernel, sizes, dtype):
    shapes = SIZES[sizes]
    ptx = {"ld.global.v4.b32": True, ".ftz": False, "fma.": False}
    if "qwen" in sizes or "deepseek" in sizes:
        ptx["bar.sync"] = False  # row numbers are loaded by the threads that use them
    # With one slot per token there are no secondary rows, with one rank no tokens of peers.
    needs = {"fan_out": shapes["R"] > 1 and shapes["K"] > 1, "push_sums": shapes["R"] > 1}
    # Of 64 ranks and 32 experts of a token one program per multiprocessor less.
    return in_registers(
        Launch(kernel, sizes, dtype),
        144 if sizes == "largest" else 128,
        ptx,
        (moves_16_bytes,),
        count=int(needs.get(kernel, True)),
    )


def of_slots(kernel):
    ways = ("no-probs", "") if kernel in ("push_slots", "index_rows") else ("",)
    return [
        in_registers(Launch(kernel, sizes, ways=variant)) for sizes, variant in product(TRIPS, ways)
    ]


def sum_at_home(num_ranks, top_k):
    def loads_before_it_sums(code):
        """Up to the first jump, which is that of the loop over own rows, or over the tile."""
        start = re.sub(r"\bBRA\b.*", "", code.sass, flags=re.DOTALL)
        num_loads = min(num_ranks, tokens.PEERS_UNROLL) * tokens.HOME_ACCESSES
        assert start.count("LDG.E.128") == num_loads
        assert "FADD" not in start

    sizes = {"T": 8192, "H": 2048, "E": 8, "K": top_k, "R": num_ranks}
    return Case(
        Launch("sum_home", sizes), bounds={"spilled": ANY_SPILLED}, also=(loads_before_it_sums,)
    )


def by_tma(kernel, hidden, num_ranks, top_k, ptx, dtype=BF16, also=()):
    sizes = {"T": 8192, "H": hidden, "E": 8, "K": top_k, "R": num_ranks}
    return Case(Launch(kernel, sizes, dtype), ptx={"setmaxnreg": True, **ptx}, also=also)


def loads_before_its_loops(code):
    """Before the loop over batches, once or for each of two stages, and in it, where pieces are a loop."""
    assert code.ptx.count(LOAD) in (4 * 2, 4 * 3)


SECTIONS = {
    "barrier": [barrier(num_ranks) for num_ranks in (1, 2, 3, 4, 8, 64)],
    "signals": [
        Case(
            Launch("send_signal"),
            bounds={"stack": 0, "registers": 64},
            also=(stores_once_and_releases,),
        ),
        in_registers(Launch("wait_for_signal"), 64, {"ld.acquire.sys": 1, "%globaltimer": True}),
    ],
    **{
        kernel: [
            in_registers(Launch(kernel, dtype=dtype, ways=ways), ptx=ptx)
            for dtype, ways in product((BF16, FP32), ("", "table"))
        ]
        for kernel, ptx in (
            ("push_replicas", {WIDE_LOAD: True, WIDE_STORE: True}),
            ("add_from_replicas", {WIDE_LOAD: True}),
        )
    },
    **{
        kernel: of_plan(kernel)
        for kernel in (
            "place_replicas",
            "route_to_replicas",
            "count_slots",
            "send_counts",
            "lay_out",
            "assign_rows",
        )
    },
    **{f"{kernel} of two nodes": between_nodes(kernel, 2) for kernel in BETWEEN_NODES},
    **{f"{kernel} of four nodes": between_nodes(kernel, 4) for kernel in BETWEEN_NODES},
    "words": [
        in_registers(Launch(kernel, SIZES["qwen3-30b"] | {"L": 4}), 168)
        for kernel in ("post_report", "count_exchange", "receive_fault_flags")
    ],
    **{
        kernel: [of_rows(kernel, *options) for options in product(TRIPS, (BF16, FP16, FP32))]
        for kernel in ("push_rows", "place_rows", "fan_out", "push_sums", "pull_rows", "sum_home")
    },
    "returned rows are on their way before own rows are summed": [
        sum_at_home(*options) for options in product((1, 2, 4, 8), (1, 2, 8))
    ],
    **{
        kernel: of_slots(kernel)
        for kernel in ("push_slots", "index_rows", "gather_values", "pull_values")
    },
    # By TMA, on Hopper. Four movers with two stages ahead, and one in the loop.
    "launch_push": [
        by_tma("launch_push", hidden, 2, 8, {LOAD: 4 * 3 * batch, STORE: 4 * batch})
        for hidden, batch in ((2048, 4), (7168, 1), (384, 16))
    ],
    "launch_fan_out": [
        by_tma(
            "launch_fan_out",
            hidden,
            2,
            top_k,
            {STORE: 4 * (top_k - 1)},
            also=(loads_before_its_loops,),
        )
        for hidden, top_k in ((2048, 8), (7168, 2), (384, 12))
    ],
    **{
        kernel: [
            by_tma(kernel, hidden, 4, 8, {LOAD: num_loads, "st.global.v4.b32": True}, dtype)
            for hidden, dtype in ((2048, BF16), (7168, FP16), (384, BF16))
        ]
        for kernel, num_loads in (("launch_push_sums", 3 * 8), ("launch_sum_home", 3 * 11))
    },
}


@code_cases(SECTIONS)
def test_code(launches, case):
    case.check(launches)


def test_pieces_cover_what_is_moved_and_fit_into_boxes():
    for row_bytes, max_bytes in product((256, 768, 4096, 8192, 14336, 65536), (1024, 4096, 16384)):
        cut = hopper_rows.cut_rows(row_bytes, max_bytes)
        assert 4 * cut.num_segments * cut.segment == row_bytes
        assert cut.segment <= 256
        assert cut.piece <= 256
        assert cut.piece & (cut.piece - 1) == 0
        assert cut.piece_bytes <= max_bytes
        assert row_bytes <= cut.num_pieces * cut.piece_bytes < row_bytes + cut.piece_bytes


def test_stages_fit_into_a_ring_and_rows_of_whole_units_are_taken():
    for width in (128, 384, 1024, 1792, 2048, 7168, 32768):
        sums = hopper_rows.cut_sums(2 * width)
        assert 4 <= sums.stages <= hopper_rows.MAX_SUM_STAGES
        assert sums.stages * sums.piece_bytes <= hopper_rows.SUM_RING_BYTES
    rows = Launch("place_rows", "qwen3-30b").arguments()["x"]
    assert hopper_rows.takes_rows(rows)
    assert not hopper_rows.takes_rows(rows[:, :2040])
