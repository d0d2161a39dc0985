"""The benchmarks as users run them, on 1 and 2 CPU processes; and that a kernel that is wrong is not timed."""

import inspect
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import balance_model
import bench
import pytest
import torch
from example_runs import output_of
from suites import grouped, pointer_loading, stock_torch
from suites.gemm import groups_error
from suites.grouped import copied_bytes

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
    | {f"float8-block{how}" for how in ("", ", wire", ", wire, constant weights")},
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
        f"{product}, {way}"
        for products, ways in (
            (("fc1", "fc2", "dfc2", "dfc1"), ("fp8", "scattered")),
            (("wgrad1", "wgrad2"), ("fp8", "add fp32", "add to scattered")),
        )
        for product in products
        for way in ways
    },
    "overhead": {"GroupedMLP packed", "GroupedMLP discrete"}
    | {f"{way}, one layer" for way in ("copy_data_ptrs_to_device", "copy_host_to_device")}
    | {f"pack_weight_ptrs, {loaded}" for loaded in ("both layers", "mxfp8 scales", "nvfp4 scales")}
    | {
        f"{way}, {loaded}"
        for way in ("torch.tensor", "a copy each")
        for loaded in ("one layer", "both layers", "mxfp8 scales", "nvfp4 scales")
    },
}


def run(num_ranks: int, folder: Path, *arguments: str) -> tuple[list[dict], str]:
    """Records and output of benchmarks/bench.py in processes of its own."""
    path, launched = folder / "out.json", num_ranks if num_ranks > 1 else None
    said = output_of(bench.__file__, *arguments, *SIZES, "--json", str(path), num_ranks=launched)
    return json.loads(path.read_text()), said


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
def test_memory(tmp_path: Path):
    """Narrow experts hold packed rows, 24 of 32 bytes in blocks of 512; ordinary memory of CPUs is not counted."""
    *layers, stock = run(1, tmp_path, "memory")[0]
    assert [record["variant"] for record in (*layers, stock)] == [
        "layer",
        "layer, packed",
        "stock torch",
    ]
    assert [record["held_heap_bytes"] for record in (*layers, stock)] == [1024, 1024, 0]
    for record in layers:
        assert record["peak_heap_bytes"] > 1024
        assert 0 < record["error"] < 0.03
        assert (record["held_ordinary_bytes"], record["ms_median"], record["repetitions"]) == (
            None,
            None,
            1,
        )


@pytest.mark.slow
def test_rails(tmp_path: Path):
    """Between two virtual nodes."""
    *exchanges, meeting = run(2, tmp_path, "rail", "--ranks-per-node", "1")[0]
    assert meeting["variant"] == "meeting"
    assert [record["wire_bytes"] for record in exchanges] == [
        1 << 16,
        1 << 20,
        1 << 24,
        1 << 26,
        24 * 16 * 2,
    ]
    for record in exchanges:
        assert record["wire_gbs"] == pytest.approx(
            record["wire_bytes"] / record["ms_median"] / 1e6, rel=1e-4
        )
        assert (record["error"], record["nodes"]) == (0, 2)


@pytest.mark.slow
def test_balance(tmp_path: Path):
    """Both ways of a layer for routings of which the last gives rank 0 all rows."""
    records, _ = run(2, tmp_path, "balance")
    assert [record["variant"] for record in records] == ["none", "replicas"] * 3
    assert records[-1]["load"] == records[-2]["load"] == 2
    assert all(
        record["command"] and record["gpu"] and record["ms_median"] > 0 for record in records
    )


def test_the_model_of_balance():
    """It gives what is committed and on the page, and is near to what it was fitted to."""
    results, page = (
        balance_model.RECORD.parent,
        Path(balance_model.__file__).parents[1] / "docs" / "balance.md",
    )
    committed = json.loads((results / "balance-model.json").read_text())
    for name, recorded in balance_model.RECORDED.items():
        rates, replica = (
            balance_model.fit(name),
            balance_model.replica_gb(balance_model.SHAPES[name]),
        )
        for row in json.loads(balance_model.RECORD.read_text()):
            num_moved = {1.0: 0, 1.2: 1, 1.5: 2, 2.0: 4}[
                round(row["load"], 1)
            ]  # experts, of two ranks' tokens
            moving = rates["slope"] + rates["cost"] + 1e3 * num_moved * replica / rates["rate"]
            if row["preset"] == recorded:
                extra = moving if row["variant"] == "replicas" else rates["slope"] * row["load"]
                assert rates["base"] + extra == pytest.approx(row["ms_median"], rel=0.02)
        found = balance_model.predict(name, 8, 0.5, rates)
        assert found == [
            one for one in committed if (one["shape"], one["ep"], one["zipf"]) == (name, 8, 0.5)
        ]
        times = [
            [one[field] / one["uniform_ms"] for field in ("ms", "balanced_ms")] for one in found
        ]
        cells = ["{:.2f} -> {:.2f}".format(*pair) for pair in times]
        assert (
            f"| {name} | 0.5 | {cells[0]} | {cells[2]} |" in page.read_text()
        )  # 2 places, random and sorted


def test_every_suite_measures(measured: tuple[int, list[dict], str]):
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


def test_figures_follow_from_times(measured: tuple[int, list[dict], str]):
    num_ranks, records, _ = measured
    by_name = {(r["suite"], r["variant"], r["direction"]): r for r in records}
    flops = 6 * 24 * 2 * 16 * 16
    for column, direction in enumerate(("forward", "backward")):
        ours, ceiling, stock_layer = (
            by_name["layer", v, direction] for v in ("static", "gemms alone", "stock torch")
        )
        for record in (ours, ceiling, stock_layer):
            assert record["tflops"] == pytest.approx(
                (1 + column) * flops / record["ms_median"] / 1e9, rel=1e-4
            )
        assert (ours["ceiling_tflops"], ours["stock_tflops"]) == (
            ceiling["tflops"],
            stock_layer["tflops"],
        )
    loaded = [r for r in records if r["variant"].startswith("pack_weight_ptrs")]
    assert {r["preset"] for r in loaded} == {f"{experts}x128x128" for experts in (8, 64, 256)}
    for record in loaded:
        assert record["yardstick"] == "stock_ms"
        assert 0 < record["in_a_row_us"] < 50 * 1e3 * record["ms_p90"]
        against = record["variant"].replace("pack_weight_ptrs", "torch.tensor")
        (stock,) = [
            r for r in records if (r["variant"], r["preset"]) == (against, record["preset"])
        ]
        assert record["stock_ms"] == stock["ms_median"]
        assert stock["yardstick"] is None
    for layer, choice in itertools.product(LAYERS, GROUPED):
        for column, direction in enumerate(("forward", "backward")):
            record = by_name["grouped", f"{layer}, {choice}", direction]
            stock = by_name[
                "grouped", f"torch._grouped_mm, {layer.removeprefix('Grouped')}", direction
            ]
            assert stock["yardstick"] is None
            assert record["stock_ms"] == stock["ms_median"]
            rows_flops = (1 + column) * 2 * LAYERS[layer] * 24 * 2 * 16 * 16
            assert record["tflops"] == pytest.approx(
                rows_flops / record["ms_median"] / 1e9, rel=1e-4
            )
            precision, *how = choice.split(", ")
            assert record["precision"] == str(PRECISIONS.get(precision, precision))
            assert record["weights"] == ("scattered" if "scattered" in how else "packed")
            assert record["splits"] == ("host" if "host splits" in how else "device")
            assert record["host_us"] > 0
            assert record["launches"] is None  # there are none on CPUs
            # Kernels copy nothing, but the twin of the quantiser, which is seen too, makes a packed copy.
            copied = (
                0
                if "scattered" not in how or precision == "bf16"
                else 2 * EXPERTS_BYTES[layer] // num_ranks
            )
            assert record["weight_copy_bytes"] == copied
    step = by_name["steps", "layer", "step"]
    assert step["tflops"] == pytest.approx(3 * flops / step["ms_median"] / 1e9, rel=1e-4)
    both_ways = by_name["layer", "static", "forward"]["wire_bytes"]
    dispatch = by_name["dispatch", "packed", "forward"]
    rank, slot = (
        by_name["combine", f"order={order}", "forward"]["wire_bytes"] for order in ("rank", "slot")
    )
    if num_ranks == 1:
        assert both_ways == dispatch["wire_bytes"] == rank == slot == 0
        assert dispatch["wire_gbs"] is dispatch["copy_gbs"] is None
        return
    copy = by_name["dispatch", "copy", "forward"]
    row_bytes = 16 * 2
    # Every token of rank 1 goes to the hot expert on rank 0, once: no rank can send more.
    assert dispatch["wire_bytes"] == copy["wire_bytes"] == 24 * row_bytes
    assert dispatch["wire_gbs"] == pytest.approx(
        dispatch["wire_bytes"] / dispatch["ms_median"] / 1e6, rel=1e-4
    )
    assert dispatch["copy_gbs"] == pytest.approx(
        copy["wire_bytes"] / copy["ms_median"] / 1e6, rel=1e-4
    )
    assert 24 * row_bytes == rank <= slot <= 2 * 24 * row_bytes
    assert both_ways == dispatch["wire_bytes"] + rank
    assert (
        by_name["variants", "order=slot", "forward"]["wire_bytes"] == dispatch["wire_bytes"] + slot
    )
    # E4M3, and the scale of one block: 20 bytes, in whole 16.
    quantized = [
        by_name["precision", "float8-block, wire", d]["wire_bytes"] for d in ("forward", "backward")
    ]
    assert quantized == [24 * 32 + rank] * 2
    # No FP8 is expected to be faster on a CPU.
    taken = {
        v: by_name["precision", v, "forward"]["precision"]
        for v in ("float8-auto", "float8-block, wire")
    }
    assert taken == {"float8-auto": "bf16", "float8-block, wire": "Float8Block(power_of_two=False)"}
    assert by_name["precision", "float8-auto", "forward"]["wire_bytes"] == both_ways


def test_every_product_of_fp8_is_compared(tmp_path: Path):
    path = tmp_path / "out.json"
    bench.main(["fp8", *SIZES, "--hidden=272", "--ffn=144", "--json", str(path)])
    errors = {record["variant"]: record["error"] for record in json.loads(path.read_text())}
    assert errors.keys() == VARIANTS["fp8"]
    assert all(0 < error < 0.01 for error in errors.values())


def _add_to_a_column(tensor: torch.Tensor) -> None:
    tensor[..., 0] += 1


def _spoil(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    argument: str,
    change: Callable[[torch.Tensor], object] = _add_to_a_column,
) -> None:
    """The twin of that name leaves its result in `argument`, or in a part of it, changed."""
    kernel = getattr(twin, name)

    def spoiled(*args, **kwargs):
        result = kernel(*args, **kwargs)
        first, *rest = argument.split(".")
        changed = inspect.signature(kernel).bind(*args, **kwargs).arguments[first]
        for name in rest:
            changed = changed[int(name)] if name.isdigit() else getattr(changed, name)
        change(changed)
        return result

    monkeypatch.setattr(twin, name, spoiled)


def test_steps_are_measured_unless_a_suite_is_named(tmp_path: Path):
    path = tmp_path / "out.json"
    bench.main([*SIZES, "--json", str(path)])
    records = json.loads(path.read_text())
    assert {record["suite"] for record in records} == {"steps"}
    assert {record["variant"] for record in records} == VARIANTS["steps"] | {"stock torch"}
    assert all(record["ms_median"] > 0 and set(KEYS) <= set(record) for record in records)


SPOILED = {  # of each suite kernels, and the argument, or the part of one, that they spoil
    "layer": dict.fromkeys(("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"), "out")
    | {"push_rows": "x", "grouped_gemm_act": "results.1"},
    "gemm": {"grouped_gemm": "out", "grouped_gemm_dact": "gradients.2"},
    "dispatch": {"push_rows": "x", "replica_rows": "rows"},
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


@pytest.mark.parametrize(
    ("suite", "kernel"), [(suite, kernel) for suite in SPOILED for kernel in SPOILED[suite]]
)
def test_a_wrong_kernel_is_not_timed(suite: str, kernel: str, monkeypatch: pytest.MonkeyPatch):
    _spoil(monkeypatch, kernel, SPOILED[suite][kernel])
    with pytest.raises(WrongResult, match="relative error"):
        bench.main([suite, *SIZES])


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [
        ("bf16", "grouped_gemm"),
        ("bf16, host splits", "grouped_gemm_dgrad"),
        ("bf16, scattered", "grouped_gemm_wgrad"),
        ("float8-block", "grouped_gemm_quantized"),
        ("float8-block, scattered", "grouped_gemm_wgrad_quantized"),
        ("mxfp8", "grouped_gemm_quantized"),
        ("nvfp4", "grouped_gemm_quantized"),
        ("nvfp4, scattered", "grouped_gemm_wgrad_quantized"),
    ],
)
def test_a_wrong_kernel_of_a_module_is_not_timed(
    choice: str, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grouped, "CHOICES", {choice: grouped.CHOICES[choice]})
    _spoil(monkeypatch, kernel, "out", torch.zero_)
    with pytest.raises(WrongResult, match=f"GroupedLinear, {choice} is wrong"):
        bench.main(["grouped", *SIZES, "--hidden", "32", "--ffn", "64", "--skew", "zipf"])


def test_a_wrong_yardstick_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    right = stock_torch.swiglu
    monkeypatch.setattr(stock_torch, "swiglu", lambda h, scale: right(h, scale * 1.1))
    with pytest.raises(WrongResult, match="stock torch is wrong"):
        bench.main(SIZES)


def test_what_a_machine_lacks_is_noted(
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
    for name, why in (
        ("GroupedLinear, mxfp8", "must be a multiple of 32"),
        (scaled, "_scaled_grouped_mm"),
    ):
        assert why in skipped[name]
    output = capsys.readouterr().out
    assert f"skipped {engine}: " in output
    assert "wire GB/s" not in output  # a column that no record has


def test_a_small_number_of_one_row_is_no_mistake():
    """Numbers of which a row has one are compared over all rows, and rows and weights by group."""
    spans = [slice(0, 7), slice(7, 8), slice(8, 8)]
    numbers = torch.tensor([3.0, -2.0, 4.0, 1.0, -5.0, 2.0, 3.0, 0.01])
    rows, weights = torch.arange(1.0, 17.0).view(8, 2), torch.ones(3, 2, 2)
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
    weight, other = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8)

    class TwoCopies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            ctx.save_for_backward(weight)
            return torch.stack([weight, other]).sum()

        @staticmethod
        def backward(ctx, d_y):
            d_weight = other.clone()
            d_weight[:2].copy_(ctx.saved_tensors[0][:2])
            return d_weight

    assert copied_bytes(lambda: TwoCopies.apply(weight).backward(), [weight]) == (4 + 2) * 8 * 4
    assert copied_bytes(lambda: weight.detach().double() @ other.double().t(), [weight]) == 0


@pytest.mark.parametrize("shape", [(256, 4), (128, 8), (129, 5), (7, 1)])
def test_the_swizzle_of_pointer_loading_is_that_of_the_package(shape: tuple[int, int]):
    scale = torch.randint(256, shape, dtype=torch.uint8)
    wanted = swizzle_scales(scale, torch.tensor([0, shape[0]], dtype=torch.int32))
    assert torch.equal(pointer_loading._swizzled(scale), wanted.flatten())
