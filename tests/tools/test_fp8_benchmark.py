"""benchmarks/fp8_gemm.py on the CPU: what it checks before it times anything."""

import pytest
import torch

pytest.importorskip("triton")

import fp8_gemm

CPU = torch.device("cpu")
SIZES = fp8_gemm.TINY["tiny"]


def test_right_results_pass_and_wrong_ones_do_not():
    names = []
    for op in fp8_gemm.ops_of(SIZES, CPU):
        names.append(op.name)
        assert set(fp8_gemm.errors_of(op, SIZES[0])) == set(op.ways)
        op.ways["fp8"] = lambda: None
        with pytest.raises(SystemExit, match=f"{op.name}, fp8 is wrong: relative error nan"):
            fp8_gemm.errors_of(op, SIZES[0])
    assert names == ["fc1", "fc2", "dfc2", "dfc1", "wgrad1", "wgrad2"]
