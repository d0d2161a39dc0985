"""Compiles the kernels that move rows by TMA without a GPU. See test_hopper_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from compiled_launches import catch_launches, meta

from symmoe.kernels.control import ControlLayout, Peers
from symmoe.kernels.hopper import rows

LOAD, STORE = "cp.async.bulk.tensor.3d.shared", "cp.async.bulk.tensor.3d.global"


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, rows)


def compiled(launches):
    """The code of the one launch, with registers for each role."""
    code = launches.compile()
    assert "setmaxnreg" in code.ptx
    assert code.spilled == 0
    return code


def peers_of(num_ranks, rank):
    arena = torch.empty(1 << 30, dtype=torch.uint8, device="meta")
    bases = meta(num_ranks, dtype=torch.int64)
    return Peers(rank=rank, num_ranks=num_ranks, bases=bases, views=(arena,) * num_ranks, layout=ControlLayout(1))


@pytest.mark.parametrize(("hidden", "batch"), [(2048, 4), (7168, 1), (384, 16)])
def test_push(launches, hidden, batch):
    x, table = meta(8192, hidden, dtype=torch.bfloat16), meta(8192, 2)
    rows.launch_push(x, table, peers_of(2, 0), meta(2, 3, dtype=torch.int64), column=0, rank=1, num_ctas=4)
    code = compiled(launches)
    # A piece is one box. Four movers with two stages ahead, and one in the loop.
    assert code.ptx.count(LOAD) == 4 * 3 * batch
    assert code.ptx.count(STORE) == 4 * batch


@pytest.mark.parametrize(("hidden", "top_k"), [(2048, 8), (7168, 2), (384, 12)])
def test_copies(launches, hidden, top_k):
    received, starts = meta(8192, hidden, dtype=torch.bfloat16), meta(3, dtype=torch.int32)
    packed_to_row = meta(8192, top_k, dtype=torch.int32)
    rows.launch_fan_out(received, packed_to_row, starts, source=1, num_ctas=4)
    code = compiled(launches)
    # Before the loop over batches, once or for each of two stages, and in it: the loop over a batch's pieces is a loop.
    assert code.ptx.count(LOAD) in (4 * 2, 4 * 3)
    assert code.ptx.count(STORE) == 4 * (top_k - 1)


@pytest.mark.parametrize(("hidden", "dtype"), [(2048, torch.bfloat16), (7168, torch.float16), (384, torch.bfloat16)])
def test_sums(launches, hidden, dtype):
    out, table = meta(8192, hidden, dtype=dtype), meta(8192, 8, dtype=torch.int32)
    received, starts = meta(4, 3, dtype=torch.int64), meta(5, dtype=torch.int32)
    rows.launch_push_sums(out, table, starts, peers_of(4, 2), received, column=0, home=1, num_ctas=8)
    code = compiled(launches)
    assert code.ptx.count(LOAD) == 3 * 8
    assert re.search(r"st\.global\.v4\.b32", code.ptx)
    packed = meta(8192, 4, dtype=torch.int32)
    rows.launch_sum_home(out, out, packed, starts[:4], table, table, received, received, out, rank=2, num_ctas=8)
    code = compiled(launches)
    assert code.ptx.count(LOAD) == 3 * 11
    assert re.search(r"st\.global\.v4\.b32", code.ptx)


def test_pieces():
    """They cover what is moved, in boxes that TMA takes and whose stages fit into a ring."""
    for row_bytes in (256, 768, 4096, 8192, 14336, 65536):
        for most in (1024, 4096, 16384):
            cut = rows.cut_rows(row_bytes, 2, 0, most)
            assert 4 * cut.num_segments * cut.segment == row_bytes
            assert cut.segment <= 256
            assert cut.piece <= 256
            assert cut.piece & (cut.piece - 1) == 0
            assert cut.piece_bytes <= most
            assert row_bytes <= cut.num_pieces * cut.piece_bytes < row_bytes + cut.piece_bytes


def test_stages_fit_into_a_ring():
    for width in (128, 384, 1024, 1792, 2048, 7168, 32768):
        sums = rows._sums(width, torch.bfloat16, 8, 4)
        assert 4 <= sums.stages <= rows.MAX_SUM_STAGES
        assert sums.stages * sums.cut.piece_bytes <= rows.SUM_RING_BYTES


def test_what_they_take():
    assert rows.takes_rows(meta(3, 2048, dtype=torch.bfloat16))
    assert not rows.takes_rows(meta(3, 2056, dtype=torch.bfloat16))
