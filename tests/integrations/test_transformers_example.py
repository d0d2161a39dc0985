"""examples/finetune_transformers.py as a user runs it."""

import json
import re
import sys
from pathlib import Path

import pytest
from example_runs import module_of, output_of

pytest.importorskip("transformers", minversion="5.17")

EXAMPLE = "finetune_transformers.py"


def losses(text: str) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"step +(\d+)  loss (\d+\.\d+)  [\d,]+ tokens/s", text)
    }


@pytest.mark.slow
def test_learns_saves_and_resumes(tmp_path: Path):
    text = output_of(EXAMPLE, "--steps=20", f"--out={tmp_path / 'first'}", num_ranks=2)
    first = losses(text)
    assert set(first) == {1, 10, 20}
    assert 5.4 < first[1] < 5.9  # ln 256 is 5.55, and the auxiliary loss
    assert first[20] < 4.2
    swapped, reference = re.search(
        r"held-out loss (\S+); of .* in plain transformers (\S+)", text
    ).groups()
    assert float(reference) == pytest.approx(float(swapped), abs=2e-4)

    index = json.loads((tmp_path / "first" / "model.safetensors.index.json").read_text())
    assert "model.layers.3.mlp.experts.15.down_proj.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) >= 3
    assert {path.name for path in tmp_path.iterdir()} == {"first"}

    # A process without torchrun goes on where two ended.
    options = ["--steps=1", f"--checkpoint={tmp_path / 'first'}", f"--out={tmp_path / 'second'}"]
    assert losses(output_of(EXAMPLE, *options, num_ranks=None))[1] < 4.2


def test_refuses_a_folder_that_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine").write_text("precious")
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        module_of("finetune_transformers").parse_arguments()
    assert "is not empty" in capsys.readouterr().err
