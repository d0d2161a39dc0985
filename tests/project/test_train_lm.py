"""The main job, on CPUs with the tiny preset. test_convergence.py and `make train` run it by torchrun."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from example_runs import module_of, output_of, process_of

from symmoe.checkpoint import read_manifest

STEPS = 20


def train(out: Path, *arguments: str, num_ranks: int) -> list[dict]:
    """Runs the example with the tiny preset, with sums in the order of experts, and returns its metrics."""
    output_of(
        "train_lm.py",
        "--preset=tiny",
        "--order=slot",
        f"--out={out}",
        *arguments,
        num_ranks=num_ranks,
    )
    return metrics_of(out)


def metrics_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an uninterrupted run on two ranks."""
    out = tmp_path_factory.mktemp("finished")
    train(out, num_ranks=2)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder, in which runs resume."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def losses(finished: Path) -> list[float]:
    """The losses of the uninterrupted run."""
    return [record["loss"] for record in metrics_of(finished)]


@pytest.fixture
def no_pictures(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides matplotlib: drawing takes longer than the training."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "matplotlib.py").write_text("raise ImportError\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_a_run_writes_metrics_pictures_sample_and_checkpoint(finished: Path):
    records = metrics_of(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    last = records[-1]
    assert records[0]["loss"] == pytest.approx(math.log(256), rel=1e-4)  # the head starts at zero
    assert last["heldout_bits_per_byte"] < 7.5 < 8
    assert 4 < last["byte_frequency_bits_per_byte"] < 5
    assert last["tokens_per_s"] > 0
    for record in records:  # every slot of the global batch, in every layer
        assert [sum(load) for load in record["expert_load"]] == [8 * 64 * 2] * 2
    for name in ("loss.png", "experts.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    assert (finished / "sample.txt").read_bytes().startswith(b"def ")
    assert read_manifest(finished / "checkpoints").step == STEPS


@pytest.mark.slow
def test_resumed_run_ends_in_the_same_bits(finished: Path, out: Path):
    # As a kill in step 15 leaves it: the newest checkpoint is of step 10, and a line was cut in the middle.
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:14]) + lines[14][:40])

    records = train(out, "--resume", num_ranks=2)
    expected = metrics_of(finished)
    for record in records + expected:
        del record["tokens_per_s"]
    assert records == expected
    names = [path.name for path in (finished / "checkpoints" / "step-00000020").iterdir()]
    assert len([name for name in names if name.endswith(".safetensors")]) == 2
    for name in names:  # parameters and moments of both ranks, and what the manifest says of them
        resumed, uninterrupted = (
            folder / "checkpoints" / "step-00000020" / name for folder in (out, finished)
        )
        assert resumed.read_bytes() == uninterrupted.read_bytes()
    assert (out / "sample.txt").read_bytes() == (finished / "sample.txt").read_bytes()


def test_muon_trains_experts_and_resumes(no_pictures: None, losses: list[float], tmp_path: Path):
    """Starts with AdamW's initial numbers; on one rank as on two, from a checkpoint of both optimizers' states."""
    records = train(tmp_path, "--muon", "--save-every=16", num_ranks=2)
    assert records[0]["loss"] == pytest.approx(losses[0], rel=1e-6)
    assert abs(records[-1]["loss"] - losses[-1]) > 1e-3
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    again = train(tmp_path, "--muon", "--resume", num_ranks=1)
    assert [entry["loss"] for entry in again] == pytest.approx(
        [entry["loss"] for entry in records], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(
    losses: list[float], tmp_path: Path, num_ranks: int
):
    records = train(tmp_path, num_ranks=num_ranks)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0] - 0.5  # it learns, so equal losses are no accident


@pytest.mark.slow
def test_float8_experts_and_wire_train(finished: Path, tmp_path: Path):
    """One step of the same run: the same loss, since the head starts at zero, and nearly the same gradients."""
    (record,) = train(tmp_path, "--precision", "float8-block", "--wire", "--steps=1", num_ranks=2)
    first = metrics_of(finished)[0]
    assert record["loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert record["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.05)
    assert record["grad_norm"] != first["grad_norm"]
    used = read_manifest(tmp_path / "checkpoints").extra["preset"]
    assert "precision=Float8Block(power_of_two=False)" in used
    assert "quantized_wire='both'" in used


@pytest.mark.slow
def test_replicas_balance_ranks_and_change_no_loss(losses: list[float], tmp_path: Path):
    records = train(tmp_path, "--replicas=2", num_ranks=2)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-4)
    limit = math.ceil(8 * 64 * 2 / 2 * 1.05)
    names = ("expert_load", "balanced_per_rank", "num_replicas")
    for record in records:
        for load, rows, count in zip(*map(record.get, names), strict=True):
            assert sum(rows) == sum(load)
            assert max(rows) <= limit
            assert (count > 0) == (max(sum(load[:2]), sum(load[2:])) > limit)
    assert sum(sum(record["num_replicas"]) for record in records) > 0
    assert "replicas_per_rank=2" in read_manifest(tmp_path / "checkpoints").extra["preset"]
    resumed = train(
        tmp_path, "--replicas=2", "--resume", f"--steps={STEPS + 1}", num_ranks=1
    )  # nothing moves
    assert (resumed[:STEPS], resumed[STEPS]["num_replicas"]) == (records, [0, 0])


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--wire", "--wire needs a --precision"),
        ("--steps=-3", "--steps (-3) must be at least 1"),
        ("--prompt=", "--prompt needs a text"),
        ("--replicas=0", "--replicas (0) must be at least 1"),
        ("--replicas=1 --precision=float8-block", "--replicas takes no --precision"),
    ],
)
def test_wrong_arguments_are_refused(
    argument: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *argument.split()])
    with pytest.raises(SystemExit, match="2"):
        module_of("train_lm").parse_arguments()
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_resume_refuses_another_run(finished: Path):
    arguments = ["--preset=tiny", "--order=slot", f"--out={finished}", "--resume", "--seed=1"]
    process = process_of("train_lm.py", *arguments, num_ranks=2)
    assert process.returncode != 0
    assert "seed is 1, but the checkpoint was made with 0" in process.stderr


def test_a_finished_run_is_extended_and_sampled(no_pictures: None, finished: Path, out: Path):
    options = ("train_lm.py", "--preset=tiny", "--order=slot", f"--out={out}")
    printed = output_of(*options, "--resume", f"--steps={STEPS + 2}", num_ranks=2)
    first, second, *_ = printed.splitlines()
    assert first.startswith("trains a byte-level language model (2 layers, 4 experts) on Python's")
    assert "22 steps on 2 processes, of preset tiny; its 20 steps take seconds" in first
    assert second == f"the checkpoint has {STEPS} steps, --steps is 22: 2 to train"
    assert "no loss.png and experts.png: matplotlib is not installed" in printed
    records = metrics_of(out)
    assert records[:STEPS] == metrics_of(finished)
    assert [record["step"] for record in records[STEPS:]] == [STEPS + 1, STEPS + 2]
    assert read_manifest(out / "checkpoints").step == STEPS + 2
    printed = output_of(*options, "--prompt=class", num_ranks=2)
    assert printed.startswith("--- sample ---\nclass")
    assert read_manifest(out / "checkpoints").step == STEPS + 2


@pytest.mark.slow
def test_a_finished_run_reports_that_no_step_remains(out: Path):
    options = ("--preset=tiny", "--order=slot", f"--out={out}", "--resume", "--steps=10")
    printed = output_of("train_lm.py", *options, num_ranks=2)
    assert f"the checkpoint has {STEPS} steps, --steps is 10: 0 to train" in printed


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(losses: list[float], out: Path):
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    resumed_losses = [record["loss"] for record in train(out, "--resume", num_ranks=1)]
    assert resumed_losses[:10] == losses[:10]
    # The first forward pass is the loaded model's; sums in another order make a difference only later.
    assert resumed_losses[10] == pytest.approx(losses[10], rel=1e-6)
    assert resumed_losses == pytest.approx(losses, rel=1e-4)
