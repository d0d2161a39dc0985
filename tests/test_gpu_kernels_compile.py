"""Compiles the barrier, plan and token kernels for sm_90 without a GPU, with the arguments their launchers would pass.

What is checked is what the generated code must have: 16-byte accesses where rows move, the barrier's release, acquire
and clock, no other atomics, no spills.
"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from ahead_of_time import compile_for  # noqa: E402
from simulated_ranks import Case, run_case  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import driver  # noqa: E402

from symmoe.kernels import control, gpu  # noqa: E402
from symmoe.kernels.control import ControlLayout, Peers  # noqa: E402
from symmoe.kernels.triton import plan, sync, tokens  # noqa: E402

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
# T, H, E, K, R
SHAPES = {
    "qwen3-30b": (8192, 2048, 128, 8, 4),
    "deepseek-v3": (4096, 7168, 256, 8, 8),
    "qwen3-30b, two ranks": (8192, 2048, 128, 8, 2),
    "odd": (100, 1000, 12, 3, 3),
    "largest": (33, 512, 1024, 32, 64),
    "most experts per rank": (64, 512, 1024, 1, 1),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compiled:
    """Stands in for a kernel: compiles each launch for Hopper, as the JIT would specialise it."""

    def __init__(self, kernel):
        self.kernel, self.result = kernel, None

    def __getitem__(self, grid):
        assert grid[0] > 0
        return self.launch

    def launch(self, *args, **kwargs):
        values = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values.pop(parameter.name)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[i,] = [["tt.divisibility", 16]]
            else:  # an integer that is neither baked in nor of a type that depends on its value
                assert parameter.do_not_specialize
                signature[parameter.name] = parameter.annotation_type
        source = ASTSource(self.kernel, signature, constants, attributes)
        self.result = compile_for(90, source, values)

    @property
    def ptx(self):
        return self.result.asm["ptx"]

    def dump(self, tmp_path, what):
        path = tmp_path / "kernel.cubin"
        path.write_bytes(self.result.asm["cubin"])
        return subprocess.run([CUOBJDUMP, what, path], capture_output=True, text=True, check=True).stdout

    def resources(self, tmp_path):
        """(registers per thread, bytes of local memory per thread)."""
        text = self.dump(tmp_path, "--dump-resource-usage")
        return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


@pytest.fixture
def compiled(monkeypatch):
    """Every kernel, replaced by what compiles its launches."""
    result = {}
    for module in (sync, plan, tokens):
        for name in dir(module):
            if name.endswith("_kernel"):
                result[name] = Compiled(getattr(module, name))
                monkeypatch.setattr(module, name, result[name])
    return result


def make_peers(num_ranks):
    bases = torch.zeros(num_ranks, dtype=torch.int64)
    return Peers(rank=num_ranks - 1, num_ranks=num_ranks, bases=bases, views=(), layout=ControlLayout(num_ranks))


def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def check(kernel, tmp_path, max_registers):
    registers, local_bytes = kernel.resources(tmp_path)
    print(kernel.kernel.__name__, registers, "registers,", kernel.result.metadata.shared, "bytes shared")
    assert local_bytes <= 16  # ptxas may put a loop invariant there for the sake of occupancy
    assert registers <= max_registers
    assert not re.search(r"\b(atom|red)\.(global|shared)", kernel.ptx)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_barrier(compiled, tmp_path, num_ranks):
    status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    received = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64)
    sync.barrier(make_peers(num_ranks), (1, 2, 3), received, status, call=1, fault=False, timeout_ns=10**9)
    kernel = compiled["barrier_kernel"]
    registers, local_bytes = kernel.resources(tmp_path)
    print("barrier", num_ranks, registers, "registers")
    assert local_bytes == 0
    lanes_per_thread = max(1, num_ranks // 32)
    atomics = [line for line in kernel.ptx.splitlines() if re.search(r"\b(atom|red)\.", line)]
    assert len(atomics) == lanes_per_thread
    assert all("sys" in line and "release" in line and "exch" in line for line in atomics)
    assert kernel.ptx.count("ld.acquire.sys.global.s64") == lanes_per_thread
    assert kernel.ptx.count("%globaltimer") == lanes_per_thread + 1
    # One for each kind of record; a rank alone cannot be in another call than its peers.
    assert kernel.ptx.count("fence.acq_rel.sys") == (3 if num_ranks == 1 else 4)
    # In this order: the words, the release, the wait, the peers' words, which are read from memory.
    release, acquire = kernel.ptx.index(atomics[0]), kernel.ptx.index("ld.acquire.sys")
    assert kernel.ptx.index("bar.sync") < release or "bar.warp.sync" in kernel.ptx[:release]
    assert release < acquire < kernel.ptx.index("ld.volatile.global", release)
    # Without a bound, the wait looks at nothing but the words.
    sync.barrier(make_peers(num_ranks), (1, 2, 3), received, status, call=1, fault=False, timeout_ns=None)
    kernel = compiled["barrier_kernel"]
    assert "%globaltimer" not in kernel.ptx
    assert kernel.ptx.count("ld.acquire.sys.global.s64") == lanes_per_thread


def test_signals(compiled, tmp_path):
    peers, status = make_peers(4), torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    sync.send_signal(peers, 3)
    kernel = compiled["send_signal_kernel"]
    registers, local_bytes = kernel.resources(tmp_path)
    assert local_bytes == 0
    assert registers <= 64
    # One store, a release that covers the payload of the kernels before it.
    (atomic,) = [line for line in kernel.ptx.splitlines() if re.search(r"\b(atom|red)\.", line)]
    assert "sys" in atomic
    assert "release" in atomic
    assert "exch" in atomic
    sync.wait_for_signal(peers, 3, torch.zeros(1, dtype=torch.int64), status, phase=3, timeout_ns=10**9)
    kernel = compiled["wait_for_signal_kernel"]
    check(kernel, tmp_path, 64)
    assert kernel.ptx.count("ld.acquire.sys") == 1
    assert "%globaltimer" in kernel.ptx


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_plan_kernels(compiled, tmp_path, shape, id_dtype):
    num_tokens, _, num_experts, top_k, num_ranks = SHAPES[shape]
    num_blocks = -(-num_tokens // control.TOKENS_PER_BLOCK)
    peers = make_peers(num_ranks)
    topk_idx = empty(num_tokens, top_k, dtype=id_dtype)
    block_counts, block_starts = empty(num_blocks, num_experts + num_ranks + 2), empty(num_blocks, num_experts)
    slot_start, slot_limit, packed_start = empty(num_experts), empty(num_experts), empty(num_ranks)
    slot_to_row, slot_to_rank = empty(num_tokens, top_k), empty(num_tokens, top_k)
    block_tokens, token_to_row = empty(num_blocks, num_ranks), empty(num_tokens, num_ranks)

    plan.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)
    check(compiled["count_slots_kernel"], tmp_path, 128)
    header = tuple(range(control.HEADER_WORDS))
    plan.send_counts(block_counts, topk_idx, header, block_starts, peers, num_experts=num_experts)
    check(compiled["send_counts_kernel"], tmp_path, 128)
    plan.assign_rows(
        topk_idx,
        block_starts,
        slot_start,
        slot_limit,
        slot_to_row,
        slot_to_rank,
        block_tokens,
        experts_per_rank=num_experts // num_ranks,
    )
    check(compiled["assign_rows_kernel"], tmp_path, 200)
    plan.assign_packed_rows(slot_to_row, slot_to_rank, block_tokens, packed_start, token_to_row, token_to_row)
    check(compiled["assign_packed_rows_kernel"], tmp_path, 200)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_lay_out(compiled, tmp_path, shape, drop):
    _, _, num_experts, _, num_ranks = SHAPES[shape]
    plan.lay_out(
        make_peers(num_ranks),
        empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64),
        torch.zeros(control.STATUS_WORDS, dtype=torch.int64),
        num_experts=num_experts,
        capacity=1000,
        drop=drop,
        record_errors=True,
        splits=empty(num_experts // num_ranks),
        row_range=empty(2, num_experts // num_ranks),
        slot_start=empty(num_experts),
        slot_limit=empty(num_experts),
        packed_start=empty(num_ranks),
        packed_limit=empty(num_ranks),
        source_to_packed_start=empty(num_ranks + 1),
        source_to_row_start=empty(num_ranks + 1, num_experts // num_ranks),
        expert_load=empty(num_experts),
        report=empty(control.SUMMARY_WORDS),
    )
    kernel = compiled["lay_out_kernel"]
    check(kernel, tmp_path, 255)
    assert kernel.ptx.count("fence.acq_rel.sys") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_split_by_source(compiled, tmp_path, shape):
    _, _, num_experts, _, num_ranks = SHAPES[shape]
    local = num_experts // num_ranks
    plan.split_by_source(empty(num_ranks + 1, local), empty(num_ranks, 2, local), rank=num_ranks - 1)
    check(compiled["split_by_source_kernel"], tmp_path, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_move_in_16_byte_accesses(compiled, tmp_path, shape, dtype):
    num_tokens, hidden, _, top_k, num_ranks = SHAPES[shape]
    peers = make_peers(num_ranks)
    x, rows = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens * 2, hidden, dtype=dtype)
    token_to_row, packed_to_row, num_packed = empty(num_tokens, num_ranks), empty(num_tokens, top_k), empty(1)
    slots, starts = empty(num_tokens, top_k), empty(num_ranks + 1)
    received = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64)

    tokens.push_rows(x, token_to_row, peers, received, column=0)
    tokens.fan_out(rows, packed_to_row, num_packed, num_packed)
    for columns in (None, (hidden // 2 // 8 * 8, hidden)):
        tokens.pre_reduce(rows, packed_to_row, starts, rank=peers.rank, columns=columns)
        tokens.pull_rows(slots, slots, peers, received, x, column=0, columns=columns)
        check_rows_kernel(compiled["pull_rows_kernel"], tmp_path, f"pull_rows, {shape}, {columns}")
        for num_ctas in (None, 8):
            tokens.pull_sums(
                token_to_row, slots, slots, peers, received, x, column=0, columns=columns, num_ctas=num_ctas
            )
            check_rows_kernel(compiled["pull_sums_kernel"], tmp_path, f"pull_sums, {shape}, {columns}, {num_ctas}")
        for name in ("push_rows", "fan_out", "pre_reduce"):
            # With one slot per token there are no secondary rows, with one rank no tokens of peers.
            if name == "push_rows" or (top_k > 1 and (name == "fan_out" or num_ranks > 1)):
                check_rows_kernel(compiled[f"{name}_kernel"], tmp_path, f"{name}, {shape}, {columns}")


@pytest.mark.parametrize("num_ctas", [None, 8])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_peers_rows_are_on_their_way_before_own_rows_are_summed(compiled, tmp_path, num_ranks, top_k, num_ctas):
    slots, x = empty(8192, top_k), empty(8192, 2048, dtype=torch.bfloat16)
    received, primary = empty(num_ranks, control.NUM_PUBLISHED, dtype=torch.int64), empty(8192, num_ranks)
    tokens.pull_sums(primary, slots, slots, make_peers(num_ranks), received, x, column=0, num_ctas=num_ctas)
    # Up to the first jump, which is that of the loop over own rows, or over the tile.
    code = re.sub(r"\bBRA\b.*", "", compiled["pull_sums_kernel"].dump(tmp_path, "-sass"), flags=re.DOTALL)
    is_wide = num_ctas is not None and num_ranks <= 2
    accesses = tokens.WIDE_SUM_ACCESSES if is_wide else tokens.SUM_ACCESSES
    assert code.count("LDG.E.128") == min(num_ranks, tokens.PEERS_UNROLL) * accesses
    assert "FADD" not in code


def check_rows_kernel(kernel, tmp_path, name):
    check(kernel, tmp_path, 128)
    assert "ld.global.v4.b32" in kernel.ptx, name
    for line in kernel.ptx.splitlines():
        if re.search(r"\bst\.global", line):
            assert "st.global.v4.b32" in line, f"{name}: {line}"
        if re.search(r"\bld\.global", line) and ".v4.b32" not in line:
            assert re.search(r"ld\.global\.b(32|64) ", line), f"{name}: {line}"  # a row number, base or offset
    if "qwen" in name or "deepseek" in name:
        assert "bar.sync" not in kernel.ptx, name  # row numbers are loaded by the threads that use them
    assert ".ftz" not in kernel.ptx
    assert "fma." not in kernel.ptx


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_slot_kernels(compiled, tmp_path, shape, with_probs):
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
        check(compiled[f"{name}_kernel"], tmp_path, 128)


class HopperDriver:
    """As much of a driver as the JIT needs to compile without launching."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class WarmedUp:
    """Stands in for a kernel: the JIT takes the launch as it is, compiles if it has to, and launches nothing."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel.run(*args, grid=grid, warmup=True, **kwargs)

    @property
    def num_variants(self):
        return len(self.kernel.device_caches[0][0])


def test_steps_do_not_compile_again(monkeypatch):
    """Numbers that change from step to step (tokens, capacity, offsets, phases) are not part of the compiled code.

    A rank that compiles lets its peers wait in a barrier.
    """
    monkeypatch.setattr(driver, "_active", HopperDriver())
    kernels = []
    for module in (sync, plan, tokens):
        for name in dir(module):
            if name.endswith("_kernel"):
                kernels.append(WarmedUp(getattr(module, name)))
                monkeypatch.setattr(module, name, kernels[-1])

    def step(case, number):
        run_case(gpu, case)
        status, received = torch.zeros(control.STATUS_WORDS, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
        words = (number, 2**40 * number, 16)
        peers, arrived = make_peers(2), torch.zeros(1, dtype=torch.int64)
        sync.barrier(peers, words, received, status, call=number, fault=number == 1, timeout_ns=number)
        sync.send_signal(peers, number % 2)
        sync.wait_for_signal(peers, number % 2, arrived, status, phase=number, timeout_ns=number)

    case = Case(tokens=(64, 32), num_experts=24, top_k=3, hidden=320, dtype=torch.bfloat16, capacity=1600)
    step(case, 0)
    before = [kernel.num_variants for kernel in kernels]
    assert all(before)
    step(replace(case, tokens=(1, 35), capacity=1), 1)
    step(replace(case, tokens=(7, 100), capacity=3000), 2)
    assert [kernel.num_variants for kernel in kernels] == before
