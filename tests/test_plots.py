"""Pictures: what they draw is what was logged and measured, read back from the figures themselves."""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from symmoe import MetricsLogger, MoEConfig, MoELayer, SymmetricHeap, cli, tensorboard_sink
from symmoe.errors import ArgumentError
from symmoe.tools import picture
from symmoe.tools.bench.records import load
from symmoe.tools.plot import bench
from symmoe.tools.plot import load as load_picture
from symmoe.tools.plot.load_log import append_records, read_loads
from symmoe.training.metrics import LayerRecord

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS_BYTES = 150_000


def assert_is_picture(path: Path, max_bytes: int = DOCS_BYTES) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 880
    assert 200 < height < 2000
    assert len(data) <= max_bytes


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by the name of their file, as they are when they are written."""
    seen: dict[str, Any] = {}

    @contextmanager
    def keep(path: str, *, height_inches: float) -> Iterator[Any]:
        with picture.picture(path, height_inches=height_inches) as figure:
            yield figure
            seen[Path(path).name] = figure

    for module in (bench, load_picture):
        monkeypatch.setattr(module, "picture", keep)
    return seen


# -- expert load ------------------------------------------------------------------------------------------------------


def layer_record(name: str, load: list[int], dropped: int) -> LayerRecord:
    fields = dict.fromkeys(LayerRecord.__dataclass_fields__, 0)
    ranks = (sum(load[: len(load) // 2]), sum(load[len(load) // 2 :]))
    return LayerRecord(
        **fields | {"name": name, "tokens_per_expert": tuple(load), "tokens_per_rank": ranks, "num_dropped": dropped}
    )


def made_up_log(path: Path, num_layers: int = 3, num_steps: int = 40, num_experts: int = 6) -> np.ndarray:
    """Writes a log; [L, S, E]."""
    choose = random.Random(5)
    loads = np.array(
        [
            [[choose.randrange(0, 4 + 20 * layer) for _ in range(num_experts)] for _ in range(num_steps)]
            for layer in range(num_layers)
        ]
    )
    loads[1, 7:] *= np.array([1, 0, 1, 1, 1, 1])  # an expert that dies
    for step in range(num_steps):
        records = [layer_record(f"block{i}.moe", loads[i, step].tolist(), 3 * step) for i in range(num_layers)]
        append_records(path, step + 1, records)
    return loads


def test_what_a_logger_has_seen_comes_back_from_its_log(tmp_path: Path):
    path, counted = tmp_path / "load.jsonl", []
    torch.manual_seed(2)
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer = MoELayer(MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2), heap)
        logger = MetricsLogger(layer)
        for step in range(3):
            _, metrics = layer(torch.randn(10 + step, 16))
            counted.append([int((metrics.topk_idx == expert).sum()) for expert in range(4)])
            append_records(path, step, logger.step(step))
        logger.close()
    (found,) = read_loads(path)
    assert [list(load) for load in found.tokens_per_expert] == counted
    assert (found.steps, found.num_dropped, found.num_ranks) == ((0, 1, 2), (0, 0, 0), 1)


def test_the_heat_map_has_every_expert_and_step(tmp_path: Path, figures: dict[str, Any]):
    log = tmp_path / "load.jsonl"
    loads = made_up_log(log)
    assert cli.main(["plot", "load", str(log), "--png", str(tmp_path / "load.png")]) == 0
    assert_is_picture(tmp_path / "load.png")
    axes = figures["load.png"].axes
    for place in range(3):
        drawn = axes[place].collections[0].get_array()
        for step in range(40):
            mean = sum(loads[place, step]) / 6
            for expert in range(6):
                assert drawn[expert, step] == pytest.approx(loads[place, step, expert] / mean)
        assert axes[place].get_title(loc="left") == f"block{place}.moe"
    most, mean, _ = (line.get_ydata() for line in axes[3].lines)
    uneven = [[max(row) / (sum(row) / 6) for row in layer] for layer in loads.tolist()]
    assert most == pytest.approx(np.max(uneven, 0))
    assert mean == pytest.approx(np.mean(uneven, 0))
    assert list(axes[4].lines[0].get_ydata()) == [sum(row.count(0) for row in loads[:, s].tolist()) for s in range(40)]
    dropped = next(axis for axis in axes if axis.get_ylabel() == "% of slots").lines[0].get_ydata()
    assert dropped == pytest.approx([100 * 9 * s / loads[:, s].sum() for s in range(40)])
    assert np.std(most) > 0.1  # a flat line would be right whatever was drawn
    assert dropped[-1] > 1


def test_long_logs_are_averaged_and_many_layers_are_chosen_from(tmp_path: Path, figures: dict[str, Any]):
    log = tmp_path / "load.jsonl"
    loads = made_up_log(log, num_layers=6, num_steps=1000)
    load_picture.draw_load(read_loads(log), str(tmp_path / "load.png"))
    assert_is_picture(tmp_path / "load.png", 2 * DOCS_BYTES)  # noise compresses badly
    axes = figures["load.png"].axes
    drawn = axes[0].collections[0].get_array()
    assert drawn.shape == (6, 334)
    names = [axis.get_title(loc="left") for axis in axes[:4]]
    uneven = {f"block{i}.moe": np.mean(loads[i].max(1) / np.maximum(loads[i].mean(1), 1e-9)) for i in range(6)}
    assert names == sorted(sorted(uneven, key=uneven.get)[2:])
    place = int(names[0][5])
    shares = [loads[place, s, 0] / loads[place, s].mean() for s in range(3)]
    assert drawn[0, 0] == pytest.approx(sum(shares) / 3)


def test_the_example_jobs_log_is_read_and_half_a_line_is_not(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "loss": 1.0, "expert_load": [[s, 2, 3, 0], [1, 1, 1, 1]]} for s in (1, 2, 2)]
    lines[2]["expert_load"][0][0] = 9  # step 2 again, after a restart
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "expert_')
    first, second = read_loads(path)
    assert (first.name, first.steps, first.num_dropped, first.num_ranks) == ("layer 0", (1, 2), None, None)
    assert first.tokens_per_expert == ((1, 2, 3, 0), (9, 2, 3, 0))
    assert second.tokens_per_expert == ((1, 1, 1, 1),) * 2
    load_picture.draw_load([first, second], str(tmp_path / "load.png"))
    assert_is_picture(tmp_path / "load.png")


@pytest.mark.parametrize("text", ["", "not json\n", '{"loss": 1}\n', "[1]\n", "two models"])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "x.jsonl"
    models = ('{"step": 1, "expert_load": [[1, 2]]}\n', '{"step": 2, "expert_load": [[1, 2, 3]]}\n')
    path.write_text("".join(models) if text == "two models" else text)
    with pytest.raises(ArgumentError, match=r"no whole line|no log of expert loads|different models"):
        read_loads(path)


# -- benchmarks -------------------------------------------------------------------------------------------------------


def committed(*names: str) -> list[dict]:
    return [record for name in names for record in load(str(RESULTS / f"{name}.json"))]


def sweep(records: list[dict], tokens: tuple[int, ...]) -> list[dict]:
    """A made-up run over numbers of tokens, newer than any."""
    made = []
    for record in records:
        for number in tokens:
            times = {key: record[key] * number / record["tokens"] + 0.1 for key in ("ms_median", "ms_p10", "ms_p90")}
            made.append(record | times | {"tokens": number, "tflops": 1.0, "date": "2099-01-01", "command": "made up"})
    return made


LAYER = ("layer-h200-ep2", "layer-h200-ep4")
LABELS = {
    "symmoe": "static",
    "symmoe, CUDA graph": "graph",
    "stock torch": "stock torch",
    "the GEMMs alone": "gemms alone",
}


def bars_of(axis: Any) -> dict[str, list[float]]:
    """Label to heights, from left to right."""
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}


@pytest.mark.parametrize(
    ("name", "files", "along", "figure", "num_panels"),
    [
        ("layer-h200.png", LAYER, "preset", "tflops", 4),
        ("skew-h200.png", ("layer-h200-ep2", "layer-skew-h200-ep2"), "skew", "ms_median", 2),
    ],
)
def test_bars_are_the_records(
    name: str, files: tuple[str, ...], along: str, figure: str, num_panels: int, tmp_path: Path, figures: dict[str, Any]
):
    records = committed(*files)
    bench.draw_benchmarks(records, str(tmp_path))
    assert_is_picture(tmp_path / name)
    assert len(figures[name].axes) == num_panels
    for axis in figures[name].axes:
        direction, *preset, ranks = axis.get_title(loc="left").split(", ")
        mine = [r for r in records if (r["direction"], f"{r['ep']} GPUs") == (direction, ranks)]
        mine = [r for r in mine if r["preset"] in (preset or r["preset"])]
        places = [tick.get_text() for tick in axis.get_xticklabels()]
        assert len(places) == 3
        bars = bars_of(axis)
        assert set(bars) == set(LABELS)
        for label, heights in bars.items():
            of = {r[along]: r[figure] for r in mine if r["variant"] == LABELS[label]}
            assert heights == [of[place] for place in places]


def test_time_over_tokens_comes_from_the_sweep_alone(tmp_path: Path, figures: dict[str, Any]):
    qwen = [record for record in committed("layer-h200-ep2") if record["preset"] == "qwen3-30b"]
    made = sweep(qwen, (128, 2048, 8192))
    paths = bench.draw_benchmarks([*committed("layer-h200-ep2"), *made], str(tmp_path))
    assert [Path(path).name for path in paths] == ["layer-h200.png", "tokens-h200.png"]
    for path in paths:
        assert_is_picture(Path(path))
    for axis, direction in zip(figures["tokens-h200.png"].axes, ("forward", "backward"), strict=True):
        assert axis.get_xlabel() == "tokens per GPU"
        lines = {line.get_label(): line for line in axis.lines}
        assert set(lines) == set(LABELS)
        for label, line in lines.items():
            mine = [r for r in made if (r["variant"], r["direction"]) == (LABELS[label], direction)]
            assert list(line.get_xdata()) == [128, 2048, 8192]
            assert sorted(line.get_ydata()) == sorted(r["ms_median"] for r in mine)
    # The sweep has qwen3-30b at 8192 tokens too, and newer: it must not get between runs that compare presets.
    drawn = bars_of(figures["layer-h200.png"].axes[0])["symmoe"]
    assert len(drawn) == 3
    assert drawn[0] == next(r["tflops"] for r in qwen if (r["variant"], r["direction"]) == ("static", "forward"))


def test_the_latest_figures_count_and_others_get_their_own(tmp_path: Path, figures: dict[str, Any]):
    records = committed("layer-h200-ep2")
    again = [r | {"tflops": 1.0, "date": "2099-01-01"} for r in records if r["variant"] == "static"]
    peer = [r | {"variant": "deepep", "tflops": 99.0} for r in records if r["variant"] == "stock torch"]
    other = [record | {"gpu": "NVIDIA B200 (PCIe)"} for record in records]
    for order in ([*records, *again, *peer, *other], [*again, *other, *peer, *records]):
        paths = bench.draw_benchmarks(order, str(tmp_path))
        assert [Path(path).name for path in paths] == ["layer-b200-pcie.png", "layer-h200.png"]
        bars = bars_of(figures["layer-h200.png"].axes[0])
        assert (bars["symmoe"], bars["deepep"]) == ([1.0] * 3, [99.0] * 3)
        assert min(bars["stock torch"]) > 1
        assert "deepep" not in bars_of(figures["layer-b200-pcie.png"].axes[0])


def test_the_same_records_give_the_same_bytes_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(RESULTS / f"{name}.json") for name in (*LAYER, "layer-skew-h200-ep2")]
    for folder in ("a", "b"):
        assert cli.main(["plot", "bench", *files, "--out", str(tmp_path / folder)]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["layer-h200.png", "skew-h200.png"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert str(tmp_path / "b" / "layer-h200.png") in capsys.readouterr().out


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"pip install 'symmoe\[plots\]'"):
        bench.draw_benchmarks(committed("layer-h200-ep2"), str(tmp_path))


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def log_steps(folder: Path, jsonl: Path) -> None:
    """Three steps of two layers in both kinds of log."""
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    config = MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, capacity=12, max_tokens=9, overflow="drop")
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap, SummaryWriter(str(folder)) as writer:
        model = torch.nn.ModuleDict({"first": MoELayer(config, heap), "second": MoELayer(config, heap)})
        logger = MetricsLogger(model, tensorboard_sink(writer), times_forward=True)
        for step in (10, 20, 30):
            for layer in model.values():
                layer(torch.randn(9, 16))
            append_records(jsonl, step, logger.step(step))


def test_event_files_hold_what_json_lines_hold(tmp_path: Path, figures: dict[str, Any]):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, jsonl = tmp_path / "runs", tmp_path / "load.jsonl"
    log_steps(folder, jsonl)
    loads = read_loads(folder)
    assert loads == read_loads(jsonl)
    assert [load.name for load in loads] == ["first", "second"]
    assert all(dropped == 18 - 12 for load in loads for dropped in load.num_dropped)
    for log in (folder, jsonl):
        assert cli.main(["plot", "load", str(log), "--png", str(tmp_path / f"{log.name}.png")]) == 0
    assert (tmp_path / "runs.png").read_bytes() == (tmp_path / "load.jsonl.png").read_bytes()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    for field in ("max_violation", "num_dropped", "dispatch_s", "combine_s"):
        for place in ("first/{}", "{}/max"):
            values = events.Scalars(f"moe/{place.format(field)}")
            assert [value.step for value in values] == [10, 20, 30]
            assert all(value.value > 0 for value in values), field


def test_a_step_that_is_cut_off_is_left_out_of_event_files(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            for expert in range(4 if step == 1 else 3):
                writer.add_scalar(f"moe/layer/tokens_per_expert/{expert}", 7 + expert, step)
            writer.add_scalar("moe/layer/num_dropped", 0, step)
    (load,) = read_loads(tmp_path)
    assert (load.steps, load.tokens_per_expert) == ((1,), ((7, 8, 9, 10),))


def test_folders_that_are_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = "tensorboard.backend.event_processing.event_accumulator"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        with pytest.raises(ArgumentError, match=r"pip install 'symmoe\[tensorboard\]'"):
            read_loads(tmp_path)
    pytest.importorskip(package)
    with pytest.raises(ArgumentError, match="holds no event files"):
        read_loads(tmp_path)


# -- docs -------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for SummaryWriter and for a run of wandb."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self.scalars += [(name, value, step) for name, value in numbers.items()]


def module(name: str, **members: Callable[..., object]) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def test_the_pages_snippets_run_and_its_adapters_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = (ROOT / "docs" / "timeline.md").read_text(encoding="utf-8")
    assert max(map(len, page.splitlines())) <= 220  # tables
    tensorboard, wandb = Recorder(), Recorder()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module("tb", SummaryWriter=lambda folder: tensorboard))
    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=lambda project: wandb))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 4
    sinks = []
    for snippet in snippets:
        exec(compile(snippet, "docs/timeline.md", "exec"), scope)
        sinks += [scope.pop("sink")] if "sink" in scope else []
    assert {path.name for path in tmp_path.iterdir()} >= {"step.json", "step.png", "step.txt", "load.jsonl"}
    assert read_loads("load.jsonl")[0].steps == (1, 2, 3)
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer = MoELayer(MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2), heap)
        for sink in sinks:
            logger = MetricsLogger(layer, sink)
            layer(torch.ones(5, 16))
            logger.step(11)
            logger.close()
    for seen in (tensorboard, wandb):
        assert ("moe/max_violation/max", 1.0, 11) in seen.scalars  # 5 tokens alike: two experts of four get all
        assert len(seen.scalars) > 10
