"""Peers of `symmoe bench`: what they are told and give is right, with stand-ins for the packages; and what may go wrong
with a peer costs that peer alone.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from limits import HANG_S

from symmoe.tools.bench.cases import Case, Shape
from symmoe.tools.bench.peers import deepep, liger, torch_nvshmem, transformer_engine
from symmoe.tools.bench.peers.run import measure_peers
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.timing import HostClock

CASE = Case(Shape("tiny", 32, 16, 8, 3), 20, "zipf")
CPU = torch.device("cpu")


def errors_of(module: types.ModuleType, opened: object, ranks: Ranks) -> dict[str, tuple[float, int, int]]:
    """By suite: whether it is right, its directions, bytes that leave. Each variant is called once as well."""
    found = {}
    for measured in module.make_variants(Problem(CASE, ranks), ranks, opened):
        variant = measured.variant
        error = variant.verify()
        assert len(variant.call(HostClock())) == len(variant.directions) + 1
        ranks.barrier()
        found[measured.suite] = (error <= variant.max_error, len(variant.directions), measured.leaving_bytes)
    return found


# -- DeepEP -----------------------------------------------------------------------------------------------------------


class DeepEPBuffer:
    """deep_ep.Buffer's calls, by gloo."""

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        self.local = num_experts // dist.get_world_size()
        ranks = torch.arange(dist.get_world_size())
        in_rank = (topk_idx[:, :, None] // self.local == ranks).any(1)
        return in_rank.sum(0).int(), None, torch.bincount(topk_idx.reshape(-1), minlength=num_experts), in_rank, None

    def dispatch(self, x, handle=None, *, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None):  # fmt: skip
        if handle is not None:
            assert topk_idx is None
            return self._send(x, handle), None, None, None, None, None
        sent = num_tokens_per_rank.long()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tokens = torch.cat([column.nonzero().squeeze(1) for column in is_token_in_rank.t()])
        handle = (tokens, sent.tolist(), received.tolist(), len(x))
        idx = self._send(topk_idx, handle) - dist.get_rank() * self.local
        mine = (idx >= 0) & (idx < self.local)
        idx = idx.masked_fill(~mine, -1)
        weights = self._send(topk_weights, handle).masked_fill(~mine, 0)
        counts = torch.bincount(idx[mine], minlength=self.local).tolist()
        return self._send(x, handle), idx, weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        return self._home(x, handle), None if topk_weights is None else self._home(topk_weights, handle), None

    def _send(self, rows, handle):
        tokens, sent, received, _ = handle
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows[tokens], received, sent)
        return out

    def _home(self, rows, handle):
        tokens, sent, received, num_tokens = handle
        back = rows.new_empty(len(tokens), *rows.shape[1:])
        dist.all_to_all_single(back, rows.contiguous(), sent, received)
        return rows.new_zeros(num_tokens, *rows.shape[1:]).float().index_add(0, tokens, back.float()).to(rows.dtype)


def _deepep(rank: int, num_ranks: int) -> dict:
    return errors_of(deepep, DeepEPBuffer(), Ranks(CPU))


def test_deepep_is_told_what_it_needs(cluster):
    for found in cluster(2).run(_deepep):
        assert {suite: result[:2] for suite, result in found.items()} == {
            "layer": (True, 2),
            "dispatch": (True, 2),
            "combine": (True, 1),
        }
        assert found["dispatch"][2] > 0


# -- Transformer Engine -----------------------------------------------------------------------------------------------


class GroupedLinear(torch.nn.Module):
    """Transformer Engine's module."""

    def __init__(self, num_gemms, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        assert not bias
        for g in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            setattr(self, f"weight{g}", torch.nn.Parameter(weight))

    def forward(self, inp, m_splits):
        return torch.cat([x @ getattr(self, f"weight{g}").t() for g, x in enumerate(inp.split(m_splits))])


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens):
    """Rows sorted by expert, then token; the map is [T, E] of bool."""
    expert, token = routing_map.t().nonzero(as_tuple=True)
    assert len(token) == num_out_tokens
    return inp[token], probs[token, expert], token


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    """The chunks in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    """Rows and their probs."""
    return tuple(moe_sort_chunks_by_index(each, split_sizes, sorted_index) for each in (inp, probs))


def moe_unpermute(inp, row_id_map, restore_shape):
    """The sum of every token's rows."""
    return torch.zeros(restore_shape, dtype=inp.dtype).index_add(0, row_id_map, inp)


def _transformer_engine(rank: int, num_ranks: int) -> dict:
    names = "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.permutation"
    stand_ins = [types.ModuleType(name) for name in names]
    stand_ins[1].GroupedLinear = GroupedLinear
    for function in (
        moe_permute_with_probs,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
        moe_unpermute,
    ):
        setattr(stand_ins[2], function.__name__, function)
    sys.modules.update(zip(names, stand_ins, strict=True))
    try:
        return errors_of(transformer_engine, None, Ranks(CPU))
    finally:
        for name in names:
            del sys.modules[name]


def test_transformer_engine_is_told_what_it_needs(cluster):
    assert cluster(2).run(_transformer_engine) == [{"layer": (True, 2, 0)}] * 2


# -- liger-cute-kernels -----------------------------------------------------------------------------------------------


class LigerKernels(types.ModuleType):
    """liger_cute_kernels.tvm_ffi on one rank; forwards are a stack."""

    def __init__(self) -> None:
        super().__init__("liger_cute_kernels.tvm_ffi")
        self.stack: list[torch.Tensor] = []

    def moe_fused_fwd_bf16(self, x, indices, weights, gate, up, down, num_experts, top_k, team):
        assert (indices.dtype, weights.dtype, top_k, num_experts) == (torch.int32, torch.bfloat16, 3, len(gate))
        assert all(w.is_contiguous() for w in (gate, up, down))
        leaves = [t.detach().float().requires_grad_() for t in (x, gate, up, down, weights)]
        x32, gate32, up32, down32, weights32 = leaves
        y = 0
        with torch.enable_grad():
            for k in range(top_k):
                e = indices[:, k].long()
                a = torch.nn.functional.silu(torch.einsum("th,tih->ti", x32, gate32[e]))
                a = a * torch.einsum("th,tih->ti", x32, up32[e])
                y = y + weights32[:, k, None] * torch.einsum("ti,thi->th", a, down32[e])
        self.stack.append(y)
        self.leaves = leaves
        return y.detach().to(x.dtype), "x_sorted", "y_buf", "expert_offsets", "slots", "tile_ids", 128

    def moe_fused_bwd_bf16(self, dy, y_buf, x_sorted, slots, tile_ids, expert_offsets, indices, weights, *rest):
        assert (y_buf, x_sorted, slots, tile_ids, expert_offsets) == (
            "y_buf", "x_sorted", "slots", "tile_ids", "expert_offsets",
        )  # fmt: skip
        assert rest[3:] == (8, 3, 7, 128)
        return tuple(g.bfloat16() for g in torch.autograd.grad(self.stack[-1], self.leaves, dy.float()))

    def moe_pop_fwd(self):
        self.stack.pop()


def test_liger_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    package, kernels, configured = types.ModuleType("liger_cute_kernels"), LigerKernels(), []
    package.tvm_ffi = kernels
    package.nvshmem = types.SimpleNamespace(team_world=lambda: 7)
    package.MoEConfig = lambda **sizes: sizes
    package.configure = lambda **arguments: configured.append(arguments)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels", package)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels.tvm_ffi", kernels)
    ranks = Ranks(CPU)
    other = Case(Shape("wide", 64, 8, 4, 2), 10, "uniform")
    opened = liger.open_peer([CASE, other], ranks)
    sizes = {"max_tokens": 20, "hidden_size": 64, "num_experts": 8, "top_k": 3, "num_hosts": 1, "gpus_per_host": 1}
    assert configured == [{"device": CPU, "moe": sizes}]
    assert errors_of(liger, opened, ranks) == {"layer": (True, 2, 0)}
    assert not kernels.stack


# -- torch's NVSHMEM all-to-all ---------------------------------------------------------------------------------------


def _all_to_all_vdev(inp, out, in_splits, out_splits_offsets, group_name):
    sent = in_splits.clone()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    dist.all_to_all_single(out[: received.sum()], inp[: sent.sum()], received.tolist(), sent.tolist())


def _torch_nvshmem(rank: int, num_ranks: int) -> dict:
    numel = 2 * CASE.num_slots * CASE.shape.hidden
    splits = torch.empty(num_ranks, dtype=torch.int64)
    here, there = (torch.empty(numel, dtype=torch.bfloat16) for _ in range(2))
    buffers = torch_nvshmem._Buffers(here, there, splits, torch.empty(2, num_ranks, dtype=torch.int64))
    right = torch.ops.symm_mem.all_to_all_vdev
    torch.ops.symm_mem.all_to_all_vdev = _all_to_all_vdev
    try:
        return errors_of(torch_nvshmem, buffers, Ranks(CPU))
    finally:
        torch.ops.symm_mem.all_to_all_vdev = right


def test_torch_nvshmem_is_told_what_it_needs(cluster):
    for found in cluster(2).run(_torch_nvshmem):
        assert {suite: result[:2] for suite, result in found.items()} == {"dispatch": (True, 1), "combine": (True, 1)}
        assert found["dispatch"][2] > 0


# -- what may go wrong ------------------------------------------------------------------------------------------------

PEER = """
import os, time
from symmoe.tools.bench.layer import stock_step
from symmoe.tools.bench.peers.common import Measured
from symmoe.tools.bench.reference import Reference

def find_problem(device, num_ranks):
    return ""

def open_peer(cases, ranks):
    {open_peer}

def make_variants(problem, ranks, opened):
    if problem.case.num_tokens > 8:
        os.abort()
    return [Measured("layer", stock_step(problem, Reference(problem)))]
"""
CASES = [Case(Shape("tiny", 16, 8, 4, 2), num_tokens, "uniform") for num_tokens in (8, 16)]


def write_peer(folder: Path, name: str, open_peer: str) -> None:
    (folder / f"{name}.py").write_text(PEER.format(open_peer=open_peer))


@pytest.fixture
def peer_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules this process and its children can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parent.parent}")
    return tmp_path


@pytest.mark.slow
def test_records_from_before_a_crash_are_kept(peer_folder: Path):
    write_peer(peer_folder, "peer_that_crashes", "pass")
    records, reasons = measure_peers(
        CASES, ["layer"], Ranks(CPU), repetitions=2, timeout_s=HANG_S, peers={"crashes": "peer_that_crashes"}
    )
    assert [(r["tokens"], r["direction"], r["variant"]) for r in records] == [
        (8, "forward", "stock torch"),
        (8, "backward", "stock torch"),
    ]
    assert all(r["tflops"] > 0 and r["error"] < 0.03 for r in records)
    assert "exit status -6" in reasons["crashes"]


def test_a_peer_that_does_not_end_is_ended(peer_folder: Path):
    write_peer(peer_folder, "peer_that_hangs", "time.sleep(3600)")
    records, reasons = measure_peers(
        CASES, ["layer"], Ranks(CPU), repetitions=2, timeout_s=0.5, peers={"hangs": "peer_that_hangs"}
    )
    assert (records, list(reasons)) == ([], ["hangs"])
    assert "did not end within 0.5 s" in reasons["hangs"]


def _one_rank_fails(rank: int, num_ranks: int, folder: str) -> tuple[int, dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parent.parent}")
        peers = {"fails": "peer_that_fails_on_rank_1"}
        records, reasons = measure_peers(CASES[:1], ["layer"], Ranks(CPU), repetitions=2, timeout_s=HANG_S, peers=peers)
        return len(records), reasons


@pytest.mark.slow
def test_a_failure_of_one_rank_ends_all_and_is_told_by_all(cluster, tmp_path: Path):
    action = "if ranks.rank == 1:\n        raise RuntimeError('no such kernel')\n    time.sleep(3600)"
    write_peer(tmp_path, "peer_that_fails_on_rank_1", action)
    (zero, reasons), other = cluster(2).run(_one_rank_fails, str(tmp_path))
    assert (zero, reasons) == other
    assert zero == 0
    assert reasons["fails"] == "exit status 1: RuntimeError: no such kernel"


def test_what_is_not_installed_or_not_on_a_gpu_is_told():
    records, reasons = measure_peers(CASES, ["layer"], Ranks(CPU), repetitions=2, timeout_s=HANG_S)
    assert records == []
    assert reasons == {
        "deepep": "deep_ep is not installed",
        "liger-cute-kernels": "liger_cute_kernels is not installed",
        "transformer-engine": "transformer_engine is not installed",
        "torch-nvshmem": "torch's symmetric memory needs a GPU, this is a CPU",
    }
