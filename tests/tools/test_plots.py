"""Pictures show the logged and measured values; the tests read these back from the figures."""

import itertools
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import module_of

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.metrics import MetricsLogger, tensorboard_sink

pytest.importorskip("matplotlib")

import plots
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
plot_load = module_of("plot_load")
SHOWN_RECORDS = ("layer-h200-ep2", "layer-h200-ep4", "layer-skew-h200-ep2")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The saved figures by file name. No file is written: this would take most of the time."""
    by_name: dict[str, Figure] = {}

    def keep(figure: Figure, path: str, **options) -> None:
        by_name[Path(path).name] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    return by_name


# -- benchmarks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "along", "figure", "num_groups"),
    [
        ("layer", "preset", "tflops", 3),
        ("skew", "skew", "ms_median", 3),
        ("tokens", "tokens", "ms_median", 5),
    ],
)
def test_bars_and_lines_show_the_records(
    name: str, along: str, figure: str, num_groups: int, tmp_path: Path, figures: dict[str, Figure]
):
    plots.PICTURES[f"{name}-h200.png"](str(tmp_path / "x.png"))
    files = ["layer-tokens-h200-ep2"] if name == "tokens" else SHOWN_RECORDS
    all_records = plots.records(*files)
    for axis in figures["x.png"].axes:
        direction, *preset, ranks = axis.get_title(loc="left").split(", ")
        shown = [
            r for r in all_records if (r["direction"], f"{r['ep']} GPUs") == (direction, ranks)
        ]
        shown = [r for r in shown if (r["preset"] in preset if preset else r["skew"] == "uniform")]
        groups = [tick.get_text() for tick in axis.get_xticklabels()]
        for number, (variant, (label, *_)) in enumerate(plots.SHOWN.items()):
            values = {r[along]: r[figure] for r in shown if r["variant"] == variant}
            assert len(values) >= num_groups
            if name == "tokens":
                line = axis.lines[number]
                assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == values
            else:
                bars = axis.containers[number]
                assert (bars.get_label(), len(groups)) == (label, num_groups)
                assert [bar.get_height() for bar in bars] == [values[group] for group in groups]
        assert len(axis.containers or axis.lines) == len(plots.SHOWN)


@pytest.mark.parametrize("name", plots.PICTURES)
def test_committed_pictures_show_the_records(name: str, tmp_path: Path):
    plots.PICTURES[name](str(tmp_path / name))
    now, committed = (
        re.search(rb"tEXtShown\0([0-9a-f]{64})", (folder / name).read_bytes())
        for folder in (tmp_path, ROOT / "docs" / "images")
    )
    assert committed is not None, "make plots"
    assert committed[1] == now[1], "make plots"


def records_of_cpus(
    presets: str = "tiny", tokens: tuple = (8,), skews: str = "uniform", times: float = 0.25
) -> list[dict]:
    """Records as of CPUs, where there are no graphs, and TFLOP/s are small."""
    common = {
        "suite": "layer",
        "ep": 2,
        "driver": None,
        "gpu": "A processor with a name that is long " * 4,
    }
    return [
        {
            **common,
            "preset": preset,
            "tokens": count,
            "skew": skew,
            "direction": direction,
            "variant": variant,
        }
        | {"tflops": 0.004 * (index + 1), "ms_median": 0.25, "ms_p10": 0.125, "ms_p90": 0.5}
        for preset, count, skew in itertools.product(presets.split(), tokens, skews.split())
        for direction in ("forward", "backward")
        for index, variant in enumerate(("gemms alone", "static", "exact", "stock torch"))
    ]


RECORDS_OF_CPUS = {
    "presets": records_of_cpus("16x16x4x2 olmoe"),
    "tokens": records_of_cpus(tokens=(8, 64, 512)),
    "skews": records_of_cpus(skews="uniform zipf"),
}


@pytest.mark.parametrize("name", RECORDS_OF_CPUS)
def test_pictures_of_cpu_records_have_numbers_and_no_overlaps(
    name: str, tmp_path: Path, figures: dict[str, Figure]
):
    (tmp_path / "now.json").write_text(
        json.dumps([*RECORDS_OF_CPUS[name], {"suite": "steps"}]), encoding="utf-8"
    )
    plots.draw_own(str(tmp_path / "x.png"), [str(tmp_path / "now.json")])
    figure = figures["x.png"]
    figure.draw_without_rendering()
    (legend,) = figure.legends
    boxes = [
        *(
            text.get_window_extent()
            for axis in figure.axes
            for text in (axis.title, axis._left_title)
        ),
        figure._suptitle.get_window_extent(),
        legend.get_window_extent(),
    ]
    width, height = figure.get_size_inches() * figure.dpi
    assert all(box.x0 >= 0 <= box.y0 and box.x1 <= width and box.y1 <= height for box in boxes)
    for axis in figure.axes:
        assert not axis.get_window_extent().overlaps(legend.get_window_extent())
        assert axis.get_title(loc="left").endswith("2 ranks")
        numbers = [text.get_text() for text in axis.texts]
        presets = ["0.004"] * 2 + ["0.008"] * 2 + ["0.016"] * 2
        assert numbers == {"tokens": [], "presets": presets}.get(name, ["0.25"] * 6)
    assert [text.get_text() for text in legend.get_texts()] == [
        "the GEMMs alone",
        "symmoe",
        "stock torch",
    ]
    assert "per GPU" not in "".join(axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes)


# -- expert load ------------------------------------------------------------------------------------------------------
def write_log(path: Path, num_layers: int, num_steps: int, **fields: list[int]) -> np.ndarray:
    """Writes a log whose layers all have `fields`. Returns the loads [L, S, E]."""
    highest = 4 + 20 * np.arange(num_layers)[:, None, None]
    loads = np.random.default_rng(5).integers(0, highest, (num_layers, num_steps, 6))
    loads[1, 7:] *= np.array([1, 0, 1, 1, 1, 1])  # an expert that dies
    with path.open("w") as log:
        for step in range(num_steps):
            layers = [
                {"name": f"block{i}", "tokens_per_expert": load, "num_dropped": 3 * step, **fields}
                for i, load in enumerate(loads[:, step].tolist())
            ]
            print(json.dumps({"step": step + 1, "layers": layers}), file=log)
    return loads


def draw_log(
    folder: Path, figures: dict[str, Figure], num_layers: int = 3, num_steps: int = 40, **fields
) -> tuple[np.ndarray, list[Axes]]:
    """The loads of a new log, and the axes of its picture."""
    loads = write_log(folder / "log", num_layers, num_steps, **fields)
    plot_load.draw(folder / "log", folder / "x.png")
    return loads, figures["x.png"].axes


def test_heat_maps_and_lines_show_the_log(
    tmp_path: Path, figures: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
):
    """The program runs as a user starts it."""
    loads = write_log(tmp_path / "log", num_layers=3, num_steps=40)
    arguments = ["plot_load.py", str(tmp_path / "log"), str(tmp_path / "x.png")]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(plot_load.__file__, run_name="__main__")
    axes = figures["x.png"].axes
    over_mean = loads / loads.mean(2, keepdims=True).clip(1e-30)
    for index in range(3):
        assert np.asarray(axes[index].collections[0].get_array()) == pytest.approx(
            over_mean[index].T
        )
        assert axes[index].get_title(loc="left") == f"block{index}"
    maximum, mean = (line.get_ydata() for line in axes[3].lines)
    assert maximum == pytest.approx(over_mean.max(2).max(0))
    assert mean == pytest.approx(over_mean.max(2).mean(0))
    shares = loads / loads.sum(2, keepdims=True)
    entropies = -(shares * np.log(shares.clip(1e-30))).sum(2) / np.log(loads.shape[2])
    minimum, mean_entropy = (line.get_ydata() for line in axes[4].lines[:2])
    assert minimum == pytest.approx(entropies.min(0))
    assert mean_entropy == pytest.approx(entropies.mean(0))
    dead, dropped = (line.get_ydata() for line in axes[5].lines)
    assert list(dead) == (loads == 0).sum((0, 2)).tolist()
    assert dropped == pytest.approx(100 * 9 * np.arange(40) / loads.sum((0, 2)))


def test_ranks_before_and_after_balance_are_drawn(tmp_path: Path, figures: dict[str, Figure]):
    loads, axes = draw_log(tmp_path, figures, balanced_per_rank=[5, 7, 6])
    (axis,) = (axis for axis in axes if axis.get_ylabel() == "largest rank\nover the mean")
    before, after = (line.get_ydata() for line in axis.lines)
    of_ranks = loads[:, :, 0::2] + loads[:, :, 1::2]
    assert before == pytest.approx((of_ranks.max(2) / of_ranks.mean(2).clip(1e-30)).max(0))
    assert after == pytest.approx([7 / 6] * 40)
    _, axes_without_balance = draw_log(tmp_path, figures, balanced_per_rank=None)
    assert len(axes_without_balance) == len(axes) - 1


def test_long_logs_show_means_of_the_most_uneven_layers(tmp_path: Path, figures: dict[str, Figure]):
    loads, axes = draw_log(tmp_path, figures, num_layers=6, num_steps=1000)
    over_mean = loads / loads.mean(2, keepdims=True).clip(1e-30)
    shown = sorted(np.argsort(over_mean.max(2).mean(1))[2:])
    assert [axis.get_title(loc="left") for axis in axes[:4]] == [f"block{i}" for i in shown]
    drawn = np.asarray(axes[0].collections[0].get_array())
    assert drawn.shape == (6, 334)
    assert drawn[:, 0] == pytest.approx(over_mean[shown[0], :3].mean(0))


def test_read_log_ignores_an_incomplete_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "expert_load": [[s, 2, 3, 0], [1, 1, 1, 1]]} for s in (1, 2, 2)]
    lines[2]["expert_load"][0][0] = 9  # step 2 again, after a restart
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "expert_')
    steps, names, (first, second), dropped, ranks, masses = plot_load.read_log(path)
    assert masses == []
    assert (steps, names, dropped, ranks.size) == ([1, 2], ["layer 0", "layer 1"], None, 0)
    assert first.tolist() == [[1, 2, 3, 0], [9, 2, 3, 0]]
    assert second.tolist() == [[1, 1, 1, 1]] * 2
    for line, balanced in zip(
        lines, ([[5, 1]], [[4, 4]], [[14]]), strict=True
    ):  # resumed on one rank
        line["balanced_per_rank"] = balanced
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_load.read_log(path)[4].tolist() == [[[1.0, 5 / 3]], [[1.0, 1.0]]]


def test_the_smallest_gate_mass_is_drawn(tmp_path: Path, figures: dict[str, Figure]):
    sizes = {"num_layers": 2, "num_steps": 3}
    _, axes = draw_log(tmp_path, figures, **sizes, gate_mass=[1.0, 1, 1, 1, 1, 0.1])
    _, _, loads, *_, masses = plot_load.read_log(tmp_path / "log")
    minimum = axes[3].lines[2].get_ydata()
    expected = [
        min(
            mass[step][e] / mass[step].sum() * load[step].sum() / load[step][e]
            for load, mass in zip(loads, masses, strict=True)
            for e in range(6)
            if load[step][e]
        )
        for step in range(3)
    ]
    assert minimum == pytest.approx(expected)
    assert max(minimum) < 1


def test_an_empty_log_is_refused(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no whole line"):
        plot_load.read_log(path)


def test_event_files_have_the_loggers_values(tmp_path: Path, heap: SymmetricHeap):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    config = MoEConfig(
        hidden=16, ffn=8, num_experts=4, top_k=2, capacity=12, max_tokens=9, overflow="drop"
    )
    with SummaryWriter(str(tmp_path)) as writer:
        model = torch.nn.ModuleDict(
            {"first": MoELayer(config, heap), "second": MoELayer(config, heap)}
        )
        logger, loads = MetricsLogger(model, tensorboard_sink(writer), times_forward=True), []
        for step in (10, 20, 30):
            for layer in model.values():
                layer(torch.randn(9, 16))
            loads.append({record.name: record.tokens_per_expert for record in logger.step(step)})
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("first", "second"):
        for expert in range(4):
            scalars = events.Scalars(f"moe/{name}/tokens_per_expert/{expert}")
            assert [scalar.value for scalar in scalars] == [load[name][expert] for load in loads]
    for field in ("max_violation", "num_dropped", "dispatch_s", "combine_s"):
        for pattern in ("first/{}", "{}/max"):
            values = events.Scalars(f"moe/{pattern.format(field)}")
            assert [value.step for value in values] == [10, 20, 30]
            assert all(value.value > 0 for value in values), field
