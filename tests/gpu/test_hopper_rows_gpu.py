"""The kernels that move rows by TMA against the twins, on one GPU with the arenas of all ranks: the same bytes."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from simulated_ranks import Case, case_differences, run_case

from symmoe.kernels import gpu, hopper_choice
from symmoe.kernels.hopper import rows

if hopper_choice.hopper_kernels(torch.device("cuda", 0), torch.bfloat16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = pytest.mark.timeout(60, method="thread")

CASES = {  # by T, H, K
    "777, 2048, 8": Case(tokens=(777, 300), num_experts=16, top_k=8, hidden=2048, ids="sparse"),
    "500, 7168, 8": Case(tokens=(500, 20, 0, 65), num_experts=32, top_k=8, hidden=7168),
    "333, 4096, 2": Case(tokens=(333, 400), num_experts=8, top_k=2, hidden=4096, ids="skewed"),
    "65, 256, 1": Case(tokens=(65, 1, 700), num_experts=12, top_k=1, hidden=256),
    "1, 384, 12": Case(tokens=(1, 70) * 4, num_experts=64, top_k=12, hidden=384, ids="sparse"),
    "400, 16384, 4": Case(tokens=(400,), num_experts=8, top_k=4, hidden=16384),
    "failed": Case(tokens=(100, 90), num_experts=8, top_k=4, hidden=2048, trip_fails=True),
}


@pytest.mark.parametrize("num_ctas", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rows_and_sums(name, dtype, num_ctas):
    case = replace(CASES[name], dtype=dtype, num_ctas=num_ctas)
    assert case_differences(gpu, case, "cuda") == []


def test_few_programs_mean_tma(monkeypatch):
    """Where rows are multiples of 256 bytes: of all four kernels."""
    launched = set()
    launch = rows.launch

    def note(kernel, *args):
        launched.add(kernel)
        launch(kernel, *args)

    monkeypatch.setattr(rows, "launch", note)
    case = Case(tokens=(64, 64), num_experts=8, top_k=4, dtype=torch.bfloat16, num_ctas=2)
    for hidden, num_kernels in ((2048, 4), (2056, 0)):
        launched.clear()
        run_case(gpu, replace(case, hidden=hidden), "cuda")
        assert len(launched) == num_kernels
