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
        found = fp8_gemm.measure(op, SIZES[0], list(op.ways), CPU)
        assert all(result["error"] < fp8_gemm.MAX_ERROR for result in found.values())

        def fails():
            raise ValueError("not here")

        op.ways |= {"nothing": lambda: None, "fails": fails}
        op.checked |= dict.fromkeys(("nothing", "fails"), op.checked["twin"])
        found = fp8_gemm.measure(op, SIZES[0], ["nothing", "fails"], CPU)
        assert found["nothing"] == {"failed": "wrong: relative error nan"}
        assert found["fails"] == {"failed": "ValueError: not here"}
    assert names == ["fc1", "fc2", "dfc2", "dfc1", "wgrad1", "wgrad2"]


def test_what_is_printed_and_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "fp8.json"
    monkeypatch.setattr("sys.argv", ["fp8_gemm.py", "--ops", "wgrad2", "--json", str(file)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fp8_gemm.main() == 0
    assert "tiny          wgrad2  twin (" in capsys.readouterr().out
    assert '"way": "twin add fp32"' in file.read_text()
