"""examples/fsdp2_moe.py as a user runs it: trains, saves, and resumes with another layout."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from example_runs import module_of, output_of


def losses(out: Path, *arguments: str, num_ranks: int) -> dict[int, float]:
    """Runs the example to its end, and returns the loss of every step."""
    output = output_of(
        "fsdp2_moe.py", "--preset=tiny", f"--out={out}", *arguments, num_ranks=num_ranks
    )
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)
    }


@pytest.mark.slow
def test_trains_saves_and_resumes_with_another_layout(tmp_path: Path):
    uninterrupted = losses(tmp_path, "--steps=12", "--save-every=6", num_ranks=2)
    assert list(uninterrupted) == list(range(1, 13))
    assert uninterrupted[12] < uninterrupted[1] - 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000012"]
    shutil.rmtree(tmp_path / "step-000012")
    resumed = losses(tmp_path, "--steps=8", "--resume", "--ep=1", num_ranks=2)
    assert list(resumed) == [7, 8]
    # The first of them has seen what was saved and nothing else. Later ones differ by more than rounding: the balance
    # loss counts the load of an EP group, which is a single rank now.
    assert resumed[7] == pytest.approx(uninterrupted[7], rel=1e-6)
    assert resumed[8] == pytest.approx(uninterrupted[8], rel=1e-3)


@pytest.mark.slow
def test_without_checkpoints(tmp_path: Path):
    assert list(losses(tmp_path / "none", "--steps=2", "--save-every=0", num_ranks=1)) == [1, 2]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_preset_is_that_of_the_machine_unless_given(monkeypatch: pytest.MonkeyPatch, has_gpu: bool):
    example = module_of("fsdp2_moe")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sys, "argv", ["fsdp2_moe.py"])
    assert example.parse_arguments().preset == ("gpu" if has_gpu else "cpu")
    monkeypatch.setattr(sys, "argv", ["fsdp2_moe.py", "--preset", "tiny"])
    assert example.parse_arguments().preset == "tiny"
