"""benchmarks/trainer.py and torchtitan_trainer.py on CPU processes."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_runs import output_of

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = "--tiny --layers 2 --context 32 --sequences 2 --steps 2 --warm-up 1 --repetitions 2".split()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trainer_measures_equal_losses_in_all_ways(tmp_path: Path, num_ranks: int):
    pytest.importorskip("transformers", minversion="5.17")
    path = tmp_path / "out.json"
    ways = "--ways", "symmoe,grouped_mm,eager"
    output_of(
        str(FOLDER / "trainer.py"),
        *SIZES,
        *ways,
        "--json",
        str(path),
        num_ranks=num_ranks if num_ranks > 1 else None,
    )
    results = json.loads(path.read_text())["results"]
    assert [result["way"] for result in results] == ["symmoe", "grouped_mm", "eager"]
    losses = [loss for result in results for loss in result["loss"]]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-3)
    for result in results:
        assert result["ranks"] == num_ranks
        assert [list(losses) for losses in result["losses"]] == [["1", "2", "3"]] * 2
        assert len(result["tokens_per_s"]) == 2
        assert min(result["tokens_per_s"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not find_spec("torchtitan"), reason="needs torchtitan, which only `make test-all` installs"
)
def test_torchtitan_has_equal_losses_in_all_ways(tmp_path: Path):
    path, script = tmp_path / "out.json", FOLDER / "torchtitan_trainer.py"
    sizes = "--tiny --layers 2 --context 32 --steps 20".split()
    for variant in ("step", "dispatcher", "standard"):
        output_of(str(script), *sizes, "--way", variant, "--json", str(path), num_ranks=2)
    *results, standard = map(json.loads, path.read_text().splitlines())
    for result, tolerance in zip(
        results, (1e-2, 2e-3), strict=True
    ):  # a step's experts start from other numbers
        assert result["losses"] == pytest.approx(standard["losses"], rel=tolerance)
    assert standard["losses"]["20"] < standard["losses"]["1"]
