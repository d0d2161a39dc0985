"""Compiles the kernels that move rows by TMA without a GPU. See test_hopper_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from compiled_launches import catch_launches, meta

from symmoe.kernels.control import ControlLayout, Peers
from symmoe.kernels.gemm_parts import SUM_RING_BYTES, SUM_STAGES, sum_stage
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


@pytest.mark.parametrize(
    ("hidden", "columns", "dtype"),
    [
        (2048, None, torch.bfloat16),
        (7168, (1792, 3584), torch.float16),
        (4096, (0, 1024), torch.bfloat16),
    ],
)
def test_sums(launches, hidden, columns, dtype):
    out, table = meta(8192, hidden, dtype=dtype), meta(8192, 8, dtype=torch.int32)
    rows.launch_pre_reduce(out, table, meta(3, dtype=torch.int32), rank=1, columns=columns, num_ctas=8)
    code = compiled(launches)
    assert code.ptx.count(LOAD) == 3 * 8  # the loop over a stage's tokens is a loop
    primary, received = meta(8192, 4, dtype=torch.int32), meta(4, 3, dtype=torch.int64)
    options = {"column": 0, "columns": columns, "num_ctas": 8}
    rows.launch_pull(primary, table, table, peers_of(4, 2), received, out, **options)
    code = compiled(launches)
    assert code.ptx.count(LOAD) == 3 * 11
    assert re.search(r"st\.global\.v4\.b32", code.ptx)


def test_pieces():
    """They cover what is moved, in boxes that TMA takes and whose stages fit into a ring."""
    for row_bytes in (256, 768, 4096, 8192, 14336, 5760, 65536):
        for part in (None, (0, row_bytes), (256, row_bytes) if row_bytes > 256 else None):
            for most in (1024, 4096, 16384):
                if row_bytes % 256:
                    continue
                cut = rows.cut_rows(row_bytes, 2, 0, most, part)
                first, end = part or (0, row_bytes)
                assert (4 * cut.first_segment * cut.segment, 4 * cut.end_segment * cut.segment) == (first, end)
                assert cut.segment <= 256
                assert cut.piece <= 256
                assert cut.piece & (cut.piece - 1) == 0
                assert cut.piece_bytes <= most
                covered = cut.num_pieces * cut.piece_bytes
                assert end - first <= covered < end - first + cut.piece_bytes


def test_stages_fit_into_a_ring():
    for row_bytes in (256, 768, 2048, 3584, 4096, 14336, 65536):
        for sources in range(1, rows.MAX_SOURCES + 1):
            piece_bytes, tokens = sum_stage(row_bytes, sources)
            assert piece_bytes & (piece_bytes - 1) == 0
            assert tokens >= 1
            assert SUM_STAGES * tokens * sources * piece_bytes <= SUM_RING_BYTES
            cut = rows.cut_rows(row_bytes, 2, 0, piece_bytes)
            assert 0 < cut.piece_bytes <= piece_bytes


def test_what_they_take():
    assert rows.takes_rows(meta(3, 2048, dtype=torch.bfloat16))
    assert not rows.takes_rows(meta(3, 2056, dtype=torch.bfloat16))
    assert rows.takes_sums(8, 8)
    assert not rows.takes_sums(8, 9)
    assert not rows.takes_sums(rows.MAX_SOURCES + 1, 1)
