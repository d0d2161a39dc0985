"""The benchmarks as users run them, on 1 and 2 CPU processes. A wrong kernel is not timed."""

import inspect
import json
import sys
from pathlib import Path

import balance_model
import bench
import pytest
import torch
from example_runs import output_of
from suites import grouped, overhead, stock_torch
from suites.gemm import groups_error
from suites.grouped import CopiesOf

from symmoe.errors import WrongResult
from symmoe.kernels import twin
from symmoe.precision import PRECISIONS, swizzle_scales

SIZES = [
    "--hidden",
    "16",
    "--ffn",
    "16",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--tokens",
    "24",
    "--repetitions",
    "3",
]
KEYS = (
    "suite preset ep tokens skew direction ms_median ms_p10 ms_p90 tflops ceiling_tflops stock_tflops wire_bytes "
    "wire_gbs copy_gbs gpu driver torch triton nvshmem commit command date"
).split()
LAYERS = {"GroupedLinear": 2, "GroupedMLP": 3}  # products of a row
GROUPED = [
    *(
        f"{numbers}{weights}"
        for numbers in ("bf16", "float8-block")
        for weights in ("", ", scattered")
    ),
    "bf16, host splits",
]
CAPACITIES = {"static", "exact"}
EAGER = CAPACITIES | {"serial"}
EXPERTS_BYTES = {
    "GroupedLinear": 4 * 2 * 16 * 16,
    "GroupedMLP": 4 * 3 * 16 * 16,
}  # at a byte a number
VARIANTS = {
    "steps": {"layer", "layer, losses", "layer, static", "experts", "experts, static"},
    "layer": EAGER,
    "variants": EAGER
    | {"order=slot", "stash=rows", "stash=hidden", "stash=none", "public parts"}
    | {"packed", "expert-major", "serial packed", "serial expert-major"},
    "precision": {"static", "float8-auto"}
    | {f"float8-block{suffix}" for suffix in ("", ", wire", ", wire, constant weights")},
    "plan": CAPACITIES,
    "dispatch": {
        f"{layout}{numbers}"
        for layout in ("packed", "expert-major")
        for numbers in ("", ", float8-block")
    },
    "combine": {"order=rank", "order=slot"},
    "gemm": {f"{p}{plain}" for p in ("fc1", "dfc2", "wgrad1", "wgrad2") for plain in ("", "-plain")}
    | {"fc2", "dfc1"},
    "grouped": {f"{layer}, {choice}" for layer in LAYERS for choice in GROUPED},
    "router": {"ours", "fp32", "tf32", "bf16"},
    "fp8": {
        f"{product}, {variant}"
        for products, ways in (
            (("fc1", "fc2", "dfc2", "dfc1"), ("fp8", "scattered")),
            (("wgrad1", "wgrad2"), ("fp8", "add fp32", "add to scattered")),
        )
        for product in products
        for variant in ways
    },
    "overhead": {"GroupedMLP packed", "GroupedMLP discrete"}
    | {f"{variant}, one layer" for variant in ("copy_data_ptrs_to_device", "copy_host_to_device")}
    | {f"pack_weight_ptrs, {loaded}" for loaded in ("both layers", "mxfp8 scales", "nvfp4 scales")}
    | {
        f"{variant}, {loaded}"
        for variant in ("torch.tensor", "a copy each")
        for loaded in ("one layer", "both layers", "mxfp8 scales", "nvfp4 scales")
    },
}


def run(num_ranks: int, folder: Path, *arguments: str) -> tuple[list[dict], str]:
    """Records and output of benchmarks/bench.py in processes of its own."""
    path = folder / "out.json"
    output = output_of(
        bench.__file__,
        *arguments,
        *SIZES,
        "--json",
        str(path),
        num_ranks=num_ranks if num_ranks > 1 else None,
    )
    return json.loads(path.read_text()), output


@pytest.fixture(
    scope="module", params=[pytest.param(num_ranks, marks=pytest.mark.slow) for num_ranks in (1, 2)]
)
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict], str]:
    """Number of ranks, records, output, on routing with a hot expert."""
    return request.param, *run(
        request.param, tmp_path_factory.mktemp("bench"), *VARIANTS, "--skew", "hot"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "arguments", "variants", "expected"),
    [
        # Narrow experts hold packed rows, 24 of 32 bytes in blocks of 512; no ordinary memory of CPUs is counted.
        (
            1,
            ["memory"],
            ["layer", "layer, packed", "stock torch"],
            {"held_heap_bytes": [1024, 1024, 0], "held_ordinary_bytes": [None] * 3},
        ),
        # Between two virtual nodes.
        (
            2,
            ["rail", "--ranks-per-node", "1"],
            None,
            {"wire_bytes": [1 << 16, 1 << 20, 1 << 24, 1 << 26, 24 * 16 * 2], "nodes": [2] * 5},
        ),
        # Both settings of `balance` for three routings, the last of which gives rank 0 all rows.
        (2, ["balance"], ["none", "replicas"] * 3, {"load": [2, 2]}),
    ],
    ids=["memory", "rail", "balance"],
)
def test_small_suites_report_the_expected_records(
    tmp_path: Path, num_ranks: int, arguments: list[str], variants, expected
):
    records, _ = run(num_ranks, tmp_path, *arguments)
    assert variants in (None, [record["variant"] for record in records])
    if arguments[0] == "rail":
        assert records.pop()["variant"] == "meeting"
    for field, values in expected.items():
        assert [record[field] for record in records[-len(values) :]] == values
    for record in records:
        assert record["command"]
        assert record.get("error") is None or record["error"] < 0.03
        if record.get("wire_gbs"):
            by_time = record["wire_bytes"] / record["ms_median"] / 1e6
            assert record["wire_gbs"] == pytest.approx(by_time, rel=1e-4)


def test_the_balance_model_reproduces_committed_figures():
    """Predictions equal the committed file and the page, and are within 4 % of the fitted measurements."""
    results, page = (
        balance_model.RECORD.parent,
        Path(balance_model.__file__).parents[1] / "docs" / "balance.md",
    )
    committed = json.loads((results / "balance-model.json").read_text())
    for name, recorded in balance_model.RECORDED.items():
        rates = balance_model.fit(name)
        replica = balance_model.replica_gb(balance_model.SHAPES[name])
        for row in json.loads(balance_model.RECORD.read_text()):
            num_moved = {1.0: 0, 1.2: 1, 1.5: 2, 2.0: 4}[
                round(row["load"], 1)
            ]  # experts, of two ranks' tokens
            moving = rates["slope"] + rates["cost"] + 1e3 * num_moved * replica / rates["rate"]
            if row["preset"] == recorded:
                extra = moving if row["variant"] == "replicas" else rates["slope"] * row["load"]
                assert rates["base"] + extra == pytest.approx(row["ms_median"], rel=0.04)
        predicted = balance_model.predict(name, 8, 0.5, rates)
        assert predicted == [
            row for row in committed if (row["shape"], row["ep"], row["zipf"]) == (name, 8, 0.5)
        ]
        times = [
            [row[field] / row["uniform_ms"] for field in ("ms", "balanced_ms")] for row in predicted
        ]
        cells = ["{:.2f} -> {:.2f}".format(*pair) for pair in times]
        assert (
            f"| {name} | 0.5 | {cells[0]} | {cells[2]} |" in page.read_text()
        )  # 2 replica slots, random and sorted


def test_every_suite_reports_its_variants(measured: tuple[int, list[dict], str]):
    num_ranks, records, output = measured
    for suite, names in VARIANTS.items():
        assert names <= {record["variant"] for record in records if record["suite"] == suite}, suite
    for record in records:
        assert set(KEYS) <= set(record)
        assert 0 < record["ms_p10"] <= record["ms_median"] <= record["ms_p90"]
        assert (record["ep"], record["repetitions"]) == (num_ranks, 3)
        assert record["direction"] in (
            ("step",) if record["suite"] == "steps" else ("forward", "backward")
        )
        assert record["suite"] != "steps" or record["host_us"] > 0
        assert record["torch"]
        assert record["gpu"]
        assert "bench.py steps layer" in record["command"]
        assert ("torchrun --nproc-per-node=2" in record["command"]) == (num_ranks == 2)
        assert record["variant"] in output


def test_figures_follow_from_measured_times(measured: tuple[int, list[dict], str]):
    """TFLOP/s follow from the rows' products, and yardsticks equal the records of their own."""
    num_ranks, records, _ = measured
    by_name = {(r["suite"], r["preset"], r["variant"], r["direction"]): r for r in records}
    rows_flops = 24 * 2 * 2 * 16 * 16
    num_products = {"layer": 3, "steps": 9, "GroupedLinear": 2, "GroupedMLP": 3}
    passes = {"forward": 1, "step": 1, "backward": 2}
    for (suite, preset, variant, direction), record in by_name.items():
        layer, _, choice = variant.partition(", ")
        count = num_products.get(layer if suite == "grouped" else suite)
        if count and record["tflops"]:
            flops = count * passes[direction] * rows_flops
            assert record["tflops"] == pytest.approx(flops / record["ms_median"] / 1e9, rel=1e-4)
        if suite == "grouped" and choice in GROUPED:
            stock = f"torch._grouped_mm, {layer.removeprefix('Grouped')}"
            assert record["stock_ms"] == by_name[suite, preset, stock, direction]["ms_median"]
            precision, _, placement = choice.partition(", ")
            assert record["precision"] == str(PRECISIONS.get(precision, precision))
            assert record["host_us"] > 0
            # Kernels copy nothing, but the twin of the quantiser, which is seen too, makes a packed copy.
            copies = placement == "scattered" and precision != "bf16"
            assert record["weight_copy_bytes"] == 2 * EXPERTS_BYTES[layer] // num_ranks * copies
        if suite == "layer" and variant == "static":
            for field, name in (("ceiling_tflops", "gemms alone"), ("stock_tflops", "stock torch")):
                assert record[field] == by_name[suite, preset, name, direction]["tflops"]
        if variant.startswith("pack_weight_ptrs"):
            stock = variant.replace("pack_weight_ptrs", "torch.tensor")
            assert record["stock_ms"] == by_name[suite, preset, stock, direction]["ms_median"]


def test_wire_bytes_are_those_of_the_routing(measured: tuple[int, list[dict], str]):
    """Every token of rank 1 goes to the hot expert on rank 0, once: no rank can send more."""
    num_ranks, records, _ = measured
    forward = {(r["suite"], r["variant"]): r for r in records if r["direction"] == "forward"}
    sent = {name: record.get("wire_bytes") for name, record in forward.items()}
    one_way = 24 * 16 * 2 * (num_ranks == 2)
    assert sent["dispatch", "packed"] == sent["combine", "order=rank"] == one_way
    assert one_way <= sent["combine", "order=slot"] <= 2 * one_way
    assert sent["layer", "static"] == sent["precision", "float8-auto"] == 2 * one_way
    assert sent["variants", "order=slot"] == one_way + sent["combine", "order=slot"]
    # E4M3, and the scale of one block: 20 bytes, in whole 16.
    assert sent["precision", "float8-block, wire"] == one_way // 32 * (32 + 32)
    assert forward["precision", "float8-auto"]["precision"] == "bf16"  # on a CPU
    dispatch = forward["dispatch", "packed"]
    if num_ranks == 1:
        assert dispatch["wire_gbs"] is dispatch["copy_gbs"] is None
        return
    for field, record in (("wire_gbs", dispatch), ("copy_gbs", forward["dispatch", "copy"])):
        by_time = one_way / record["ms_median"] / 1e6
        assert dispatch[field] == pytest.approx(by_time, rel=1e-4)


def test_the_fp8_suite_compares_every_product(tmp_path: Path):
    path = tmp_path / "out.json"
    bench.main(["fp8", *SIZES, "--hidden=272", "--ffn=144", "--json", str(path)])
    errors = {record["variant"]: record["error"] for record in json.loads(path.read_text())}
    assert errors.keys() == VARIANTS["fp8"]
    assert all(0 < error < 0.01 for error in errors.values())


def _spoil(monkeypatch: pytest.MonkeyPatch, name: str, argument: str) -> None:
    """Replaces a twin by one that leaves zeros, or a wrong integer, in `argument` or in a part of it."""
    kernel = getattr(twin, name)

    def spoiled(*args, **kwargs):
        result = kernel(*args, **kwargs)
        first, *parts = argument.split(".")
        changed = inspect.signature(kernel).bind(*args, **kwargs).arguments[first]
        for part in parts:
            changed = changed[int(part)] if part.isdigit() else getattr(changed, part)
        if changed.is_floating_point():
            changed.zero_()
        else:
            changed[..., 0] += 1  # zeros would be null pointers
        return result

    monkeypatch.setattr(twin, name, spoiled)


SPOILED = {  # by suite: kernels, and the argument, or part of an argument, that is spoiled
    "layer": dict.fromkeys(("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"), "out")
    | {"push_rows": "x", "grouped_gemm_act": "results.1"},
    "gemm": {"grouped_gemm": "out", "grouped_gemm_dact": "gradients.2"},
    "dispatch": {"push_rows": "x", "place_rows": "rows"},
    "combine": {"pull_rows": "out", "sum_home": "out", "pull_values": "out"},
    "plan": {"assign_rows": "plan.slot_to_row"},
    "router": {"router_gemm": "logits"},
    "fp8": {"grouped_gemm_quantized": "out", "grouped_gemm_wgrad_quantized": "out"},
    "overhead": {
        "grouped_gemm": "out",
        "copy_host_to_device": "destination",
        "swizzle_scales": "swizzled",
    },
}


SPOILED_MODULES = {
    "bf16": "grouped_gemm",
    "bf16, host splits": "grouped_gemm_dgrad",
    "bf16, scattered": "grouped_gemm_wgrad",
    "float8-block": "grouped_gemm_quantized",
    "float8-block, scattered": "grouped_gemm_wgrad_quantized",
    "mxfp8": "grouped_gemm_quantized",
    "nvfp4": "grouped_gemm_quantized",
    "nvfp4, scattered": "grouped_gemm_wgrad_quantized",
}


@pytest.mark.parametrize(
    ("suite", "choice", "kernel", "argument"),
    [
        *(
            pytest.param(suite, "", *kernel_and_argument, marks=[pytest.mark.slow] * (index > 0))
            for suite, kernels in SPOILED.items()
            for index, kernel_and_argument in enumerate(kernels.items())
        ),
        *(
            pytest.param("grouped", choice, kernel, "out", marks=[pytest.mark.slow] * (index > 3))
            for index, (choice, kernel) in enumerate(SPOILED_MODULES.items())
        ),
    ],
)
def test_a_suite_refuses_to_time_a_wrong_kernel(
    suite: str, choice: str, kernel: str, argument: str, monkeypatch: pytest.MonkeyPatch
):
    options = []
    text = "relative error"
    if choice:
        monkeypatch.setattr(grouped, "CHOICES", {choice: grouped.CHOICES[choice]})
        options = ["--hidden=32", "--ffn=64", "--skew=zipf"]
        text = f"{choice} is wrong"
    _spoil(monkeypatch, kernel, argument)
    with pytest.raises(WrongResult, match=text):
        bench.main([suite, *SIZES, *options])


def test_a_suite_refuses_to_time_a_wrong_yardstick(monkeypatch: pytest.MonkeyPatch):
    right = stock_torch.swiglu
    monkeypatch.setattr(stock_torch, "swiglu", lambda h, scale: right(h, scale * 1.1))
    with pytest.raises(WrongResult, match="stock torch is wrong"):
        bench.main(SIZES)


def test_variants_that_the_machine_lacks_are_listed_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(
        grouped, "CHOICES", {name: grouped.CHOICES[name] for name in ("bf16", "mxfp8")}
    )
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    path, scaled, engine = (
        tmp_path / "x",
        "torch._scaled_grouped_mm, row-wise FP8",
        "Transformer Engine GroupedLinear",
    )
    bench.main(["grouped", *SIZES, "--hidden=32", "--ffn=48", "--json", str(path)])
    skipped = json.loads(path.read_text())[0]["skipped"]
    assert set(skipped) == {"GroupedLinear, mxfp8", scaled, engine}
    for name, reason in (
        ("GroupedLinear, mxfp8", "must be a multiple of 32"),
        (scaled, "_scaled_grouped_mm"),
    ):
        assert reason in skipped[name]
    output = capsys.readouterr().out
    assert f"skipped {engine}: " in output
    assert "wire GB/s" not in output  # a column that no record has


def test_the_error_of_a_group_is_relative_to_all_rows():
    """A tensor with one number per row is compared over all rows, other tensors by group: a group of one row with a
    small number would have a large relative error."""
    spans = [slice(0, 7), slice(7, 8), slice(8, 8)]
    numbers = torch.tensor([3.0, -2.0, 4.0, 1.0, -5.0, 2.0, 3.0, 0.01])
    rows = torch.arange(1.0, 17.0).view(8, 2)
    weights = torch.ones(3, 2, 2)
    off_by_noise, wrong_group = numbers + 0.1, weights.clone()
    wrong_group[1] *= 1.5

    def error(*outputs: torch.Tensor) -> float:
        return groups_error(
            lambda g: [numbers[spans[g]], rows[spans[g]], weights[g]], list(outputs), spans
        )

    assert error(numbers, rows, weights) == 0
    assert error(off_by_noise, rows, weights) == pytest.approx(
        0.1 * 8**0.5 / float(numbers.norm()), rel=1e-4
    )
    assert error(numbers, rows, wrong_group) == pytest.approx(0.5)
    assert error(numbers.roll(1), rows, weights) > 1


def test_copies_are_counted_forward_and_backward():
    weight = torch.ones(4, 8, requires_grad=True)
    second = torch.ones(4, 8)

    class TwoCopies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return torch.stack([weight, second]).sum()

        @staticmethod
        def backward(ctx, d_y):
            d_weight = second.clone()
            d_weight[:2].copy_(ctx.saved_tensors[0][:2])
            return d_weight

    with CopiesOf([weight]) as copies:
        TwoCopies.apply(weight).backward()
        weight.detach().double() @ second.double().t()
    assert copies.num_bytes == (4 + 2) * 8 * 4


@pytest.mark.parametrize("shape", [(256, 4), (128, 8), (129, 5), (7, 1)])
def test_the_suites_swizzle_equals_that_of_the_package(shape: tuple[int, int]):
    scale = torch.randint(256, shape, dtype=torch.uint8)
    expected = swizzle_scales(scale, torch.tensor([0, shape[0]], dtype=torch.int32))
    assert torch.equal(overhead._swizzled(scale), expected.flatten())
