"""The parts of benchmarks/bench.py: routings, timing, records, regression check, command line."""

import argparse
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import compare
import numpy as np
import pytest
import torch
from cluster import run_on
from suites import records
from suites.cases import HOT_EXPERT, Case, choose_experts, shapes_of
from suites.layer import CEILING, Choice, bench_layer, experts_only
from suites.problem import (
    MAX_ERROR,
    Places,
    Problem,
    Routing,
    packed_rows_of,
    relative_error,
    row_error,
    rows_of,
)
from suites.reference import Reference
from suites.stock_torch import STOCK
from suites.timing import HostEvent, Run, Variant, measure

from symmoe import GroupedMLP, SymmetricHeap
from symmoe.errors import WrongResult
from symmoe.tools.ranks import WARM_UP, Ranks
from symmoe.tools.shapes import PRESETS, Shape

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, NUM_TOKENS = 16, 4, 20_000


def experts_of(skew: str, seed: int = 0) -> torch.Tensor:
    case = Case(Shape("tiny", 8, 8, NUM_EXPERTS, TOP_K), NUM_TOKENS, skew)
    return choose_experts(case, torch.Generator().manual_seed(seed))


WEIGHTS = {  # with which first choices are drawn, by the expert's position
    "uniform": torch.ones(NUM_EXPERTS),
    "zipf": 1 / torch.arange(1, NUM_EXPERTS + 1),
    "hot": torch.eye(NUM_EXPERTS)[0],
}


@pytest.mark.parametrize("skew", WEIGHTS)
def test_routing_has_distinct_experts_by_weight(skew: str):
    """The experts of a token are distinct. The first is drawn with the weight of its position."""
    experts = experts_of(skew)
    assert experts.shape == (NUM_TOKENS, TOP_K)
    assert set(experts.unique().tolist()) == set(range(NUM_EXPERTS))
    assert (experts.sort(dim=1).values.diff(dim=1) > 0).all()
    counts = torch.bincount(experts[:, 0], minlength=NUM_EXPERTS)
    expected = NUM_TOKENS * WEIGHTS[skew] / WEIGHTS[skew].sum()
    # Six standard deviations of a count.
    assert ((counts.sort(descending=True).values - expected).abs() <= 6 * expected.sqrt()).all()
    if skew == "hot":
        assert counts.argmax() == HOT_EXPERT
    if skew == "zipf":
        second = torch.bincount(experts_of(skew, seed=1)[:, 0]).argsort()[-4:]
        assert torch.equal(counts.argsort()[-4:], second)
        assert sorted(second.tolist()) != [0, 1, 2, 3]  # not all of them on the first rank


def test_routing_and_places_of_a_hand_made_case():
    # Rank 0 has experts 0 and 1, rank 1 has 2 and 3. Rows are ordered expert, source rank, token, k.
    routing = Routing(
        [torch.tensor([[1, 0], [2, 3]]), torch.tensor([[1, 2], [1, 3]])], num_experts=4
    )
    assert routing.splits.tolist() == [[1, 3], [2, 2]]
    assert routing.num_rows == [4, 4]
    places = Places.of(routing)
    assert places.slot_to_row.tolist() == [[[1, 0], [0, 2]], [[2, 1], [3, 3]]]
    assert places.slot_to_rank.tolist() == [[[0, 0], [1, 1]], [[0, 1], [0, 1]]]
    tokens, slots = rows_of(routing, 0)
    assert (tokens.tolist(), slots.tolist()) == ([0, 0, 2, 3], [1, 0, 4, 6])
    packed, row_to_packed = packed_rows_of(routing, 0)
    assert (packed.tolist(), row_to_packed.tolist()) == ([0, 2, 3], [0, 0, 1, 2])


def test_preset_accepts_several_names():
    sizes = dict.fromkeys(("hidden", "ffn", "experts", "top_k"))
    for preset, names in {
        "olmoe,qwen3-30b,olmoe": ["olmoe", "qwen3-30b"],
        "all": [*PRESETS],
        "": ["olmoe"],
    }.items():
        assert [
            shape.name for shape in shapes_of(argparse.Namespace(preset=preset, **sizes), "olmoe")
        ] == names


# -- timing -----------------------------------------------------------------------------------------------------------
class FakeEvent(float):
    """A timing event whose time is chosen by the test."""

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end - self


def recording_variant(name: str, log: list[str], lengths: list[float]) -> Variant:
    remaining = iter(lengths)

    def call(clock):
        log.append(name)
        return [FakeEvent(0), FakeEvent(next(remaining))]

    return Variant(name, ("forward",), call, lambda: 0.0)


def test_variants_take_turns_after_a_warm_up():
    log: list[str] = []
    ranks = Ranks(CPU)
    ranks.barrier = lambda: log.append("barrier")
    variants = [recording_variant(name, log, list(range(100))) for name in "ab"]
    times, _ = measure(Run(ranks, None, 5), variants, align=lambda _: log.append("align"), block=3)
    assert log[: 4 * WARM_UP] == ["align", "a"] * WARM_UP + ["align", "b"] * WARM_UP
    blocks = " ".join(log[4 * WARM_UP :]).split("barrier")
    assert [block.split()[::2] for block in blocks] == [[], ["align"] * 6, ["align"] * 4, []]
    turns = [
        turn
        for block in blocks
        for turn in zip(block.split()[1::4], block.split()[3::4], strict=True)
    ]
    assert {"".join(turn) for turn in turns} == {
        "ab",
        "ba",
    }  # in either order, each once in every turn
    assert times["b"].tolist() == [[WARM_UP + i] for i in range(5)]


def test_reused_marks_are_read_before_the_next_call():
    marks = [FakeEvent(0), FakeEvent(0)]
    lengths = iter(range(100))

    def call(clock):
        marks[1] = FakeEvent(next(lengths))
        return marks

    captured = Variant("captured", ("forward",), call, lambda: 0.0, reuses_marks=True)
    times, _ = measure(Run(Ranks(CPU), None, 7), [captured], block=3)
    assert times["captured"].squeeze(1).tolist() == [WARM_UP + i for i in range(7)]


def test_choices_apart_are_measured_alone(monkeypatch: pytest.MonkeyPatch, heap: SymmetricHeap):
    log: list = []

    @contextmanager
    def block(experts: GroupedMLP) -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    def measure(_: Run, variants: list[Variant]):
        log.append([variant.name for variant in variants])
        return {variant.name: np.ones((1, 2)) for variant in variants}, dict.fromkeys(log[-1], 0.0)

    monkeypatch.setattr("suites.layer.measure", measure)
    problem = Problem(Case(Shape("tiny", 8, 8, 4, 2), 3, "uniform"), Ranks(CPU))
    choices = {"a": Choice(), **dict.fromkeys("bc", Choice(apart=True, block=block))}
    records = bench_layer(problem, Run(Ranks(CPU), heap, 1), choices)
    assert log == [["a", CEILING, STOCK], "begin", ["b"], "end", "begin", ["c"], "end"]
    assert [record["variant"] for record in records[::2]] == ["a", CEILING, STOCK, "b", "c"]
    assert records[-1]["stock_ms"] == 1  # the yardstick is measured once for all choices


@run_on(2)
def test_a_repetition_takes_as_long_as_on_its_slowest_rank(rank: int, num_ranks: int) -> None:
    lengths = [0.0] * WARM_UP + ([1.0, 5.0, 2.0] if rank == 0 else [4.0, 3.0, 2.5])
    times, _ = measure(Run(Ranks(CPU), None, 3), [recording_variant("a", [], lengths)])
    assert times["a"].squeeze(1).tolist() == [4.0, 5.0, 2.5]


@run_on(2)
def test_an_error_on_one_rank_refuses_the_variant_on_all(rank: int, num_ranks: int) -> None:
    variant = Variant(
        "a", ("forward",), lambda clock: [], lambda: float("nan") if rank else 0.0, 0.1
    )
    with pytest.raises(WrongResult, match=r"^a is wrong: relative error nan, allowed 0\.1$"):
        measure(Run(Ranks(CPU), None, 1), [variant])


def test_relative_errors_of_tensors_and_rows():
    ones = torch.ones(3)
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(ones, ones) == 0
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert row_error(rows, rows) == 0
    assert row_error(rows + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), rows) == pytest.approx(0.2)
    assert row_error(rows + 1, rows) == float("inf")  # where zeros belong
    assert np.isnan(relative_error(ones * float("nan"), ones))


# -- records and their comparison -------------------------------------------------------------------------------------
def record(**fields) -> dict:
    defaults = {
        "suite": "layer",
        "variant": "static",
        "preset": "olmoe",
        "ep": 2,
        "tokens": 8,
        "skew": "uniform",
    }
    return records.new_record(
        np.array([1.0, 2.0, 3.0]), **{**defaults, "direction": "forward", **fields}
    )


def layer(tflops: float, ceiling_tflops: float, **fields) -> dict:
    return record(
        tflops=tflops, ceiling_tflops=ceiling_tflops, yardstick="ceiling_tflops", **fields
    )


def test_ratios_are_better_when_larger():
    assert records.ratio(layer(30.0, 40.0)) == 0.75
    assert records.ratio(record(tflops=30.0, stock_tflops=20.0, yardstick="stock_tflops")) == 1.5
    assert records.ratio(record(wire_gbs=30.0, copy_gbs=40.0, yardstick="copy_gbs")) == 0.75
    assert records.ratio(record(stock_ms=3.0, yardstick="stock_ms")) == 1.5
    assert records.ratio(record(tflops=30.0)) is None
    assert records.ratio(record(yardstick="copy_gbs")) is None


def test_check_compares_ratios_and_not_times():
    before = [layer(30.0, 40.0), layer(30.0, 40.0, direction="backward")]
    slower_machine = [layer(15.0, 20.0), layer(13.6, 20.0, direction="backward")]  # 0.75 and 0.68
    assert compare.compare(slower_machine, before)[0]
    worse = [layer(30.0, 40.0), layer(26.9, 40.0, direction="backward")]  # 0.6725 of 0.75
    passed, report = compare.compare([*worse, layer(1, 2, tokens=16)], [*before, layer(1, 2, ep=4)])
    assert not passed
    for line in (
        r"dropped .*layer, variant static.* backward: 0\.750 -> 0\.672 \(-10\.3%\)",
        "missing  suite layer, variant static, preset olmoe, ep 4",
        "extra    suite layer, variant static, preset olmoe, ep 2, tokens 16",
    ):
        assert re.search(line, report)
    assert not compare.compare(before, [layer(1.0, 2.0, skew="zipf")])[0]  # nothing to compare


def test_records_are_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = str(tmp_path / "now.json")
    doctored = str(tmp_path / "baseline.json")
    now = [
        layer(30.0, 40.0, tokens=tokens, direction=d)
        for tokens in (8, 16)
        for d in ("forward", "backward")
    ]
    records.save(now, path)
    records.save([{**r, "tflops": r["tflops"] * 1.2} for r in now], doctored)
    assert compare.main([path, "--check", path]) == 0
    assert "4 ratios compared, 0 dropped" in capsys.readouterr().out
    assert compare.main([path, "--check", doctored]) == 1
    assert "4 dropped by more than 10%" in capsys.readouterr().out
    committed = Path(compare.__file__).parent / "results" / "layer-h200-ep2.json"
    assert compare.main([path, str(committed)]) == 0
    assert {"olmoe", "mixtral-8x7b"} < set(capsys.readouterr().out.split())
    for text in ("{}", '[{"x": 1}]', '[{"suite"'):
        (tmp_path / "now.json").write_text(text)
        with pytest.raises(SystemExit, match=r"now\.json"):
            compare.main([path])


# -- memory -----------------------------------------------------------------------------------------------------------
def test_the_yardstick_keeps_no_gradients_of_weights():
    problem = Problem(Case(Shape("tiny", 32, 24, 4, 2), 8, "uniform"), Ranks(CPU))
    variant = experts_only(problem, Reference(problem))
    assert variant.verify() < MAX_ERROR
    variant.call(HostEvent)
    alive = [
        tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    ]
    for weight in (problem.w1, problem.w2):
        assert {tensor.data_ptr() for tensor in alive if tensor.shape == weight.shape} == {
            weight.data_ptr()
        }
