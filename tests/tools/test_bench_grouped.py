"""The suite "grouped" on a CPU: every variant, its records, what is skipped, and what is wrong."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import bench
import pytest
import torch
from suites import grouped, pointer_loading
from suites.gemm import groups_error
from suites.grouped import copied_bytes

from symmoe.errors import WrongResult
from symmoe.kernels import twin
from symmoe.precision import PRECISIONS, swizzle_scales

HIDDEN, FFN, EXPERTS = 32, 64, 4
W1_BYTES, W2_BYTES = 2 * EXPERTS * 2 * FFN * HIDDEN, 2 * EXPERTS * FFN * HIDDEN
SIZES = f"--hidden {HIDDEN} --ffn {FFN} --experts {EXPERTS} --top-k 2 --tokens 40 --repetitions 2 --skew zipf".split()
LAYERS = {"GroupedLinear": W1_BYTES, "GroupedMLP": W1_BYTES + W2_BYTES}
CHOICES = ["bf16, host splits", *(f"{n}{s}" for n in ("bf16", *PRECISIONS) for s in ("", ", scattered"))]
STOCK = {"GroupedLinear": "torch._grouped_mm, Linear", "GroupedMLP": "torch._grouped_mm, MLP"}
SCALED, ENGINE = "torch._scaled_grouped_mm, row-wise FP8", "Transformer Engine GroupedLinear"


def measure(tmp_path: Path, *arguments: str) -> dict[tuple[str, str], dict]:
    """The suite's records by variant and direction."""
    path = tmp_path / "out.json"
    assert bench.main(["grouped", *SIZES, *arguments, "--json", str(path)]) == 0
    return {(r["variant"], r["direction"]): r for r in json.loads(path.read_text())}


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these choices are measured."""
    monkeypatch.setattr(grouped, "CHOICES", {name: grouped.CHOICES[name] for name in names})


def test_a_small_number_of_one_row_is_no_mistake():
    """Numbers of which a row has one are compared over all rows, and rows and weights by group."""
    spans = [slice(0, 7), slice(7, 8), slice(8, 8)]
    numbers = torch.tensor([3.0, -2.0, 4.0, 1.0, -5.0, 2.0, 3.0, 0.01])
    rows, weights = torch.arange(1.0, 17.0).view(8, 2), torch.ones(3, 2, 2)
    off_by_noise, wrong_group = numbers + 0.1, weights.clone()
    wrong_group[1] *= 1.5

    def error(*outputs: torch.Tensor) -> float:
        return groups_error(lambda g: [numbers[spans[g]], rows[spans[g]], weights[g]], list(outputs), spans)

    assert error(numbers, rows, weights) == 0
    assert error(off_by_noise, rows, weights) == pytest.approx(0.1 * 8**0.5 / float(numbers.norm()), rel=1e-4)
    assert error(numbers, rows, wrong_group) == pytest.approx(0.5)
    assert error(numbers.roll(1), rows, weights) > 1


@pytest.mark.slow
def test_every_choice_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture):
    records = measure(tmp_path)
    ours = {f"{layer}, {choice}" for layer in LAYERS for choice in CHOICES}
    both = ("forward", "backward")
    assert set(records) == {(name, direction) for name in ours | set(STOCK.values()) for direction in both}
    output = capsys.readouterr().out
    for (name, direction), record in records.items():
        assert 0 < record["ms_p10"] <= record["ms_median"] <= record["ms_p90"]
        assert record["host_us"] > 0
        assert record["launches"] is None  # there are none on CPUs
        assert f"{name} " in output
        if name not in ours:
            assert record["yardstick"] is None
            continue
        layer, precision, *how = name.split(", ")
        products = 2 if layer == "GroupedLinear" else 3
        flops = (1 + (direction == "backward")) * 2 * products * 40 * 2 * HIDDEN * FFN
        assert record["tflops"] == pytest.approx(flops / record["ms_median"] / 1e9, rel=1e-4)
        assert record["stock_tflops"] == records[STOCK[layer], direction]["tflops"]
        assert record["stock_ms"] == records[STOCK[layer], direction]["ms_median"]
        assert record["precision"] == str(PRECISIONS.get(precision, precision))
        assert (record["weights"], record["splits"]) == (
            "scattered" if "scattered" in how else "packed",
            "host" if "host splits" in how else "device",
        )
        if "scattered" not in how or precision == "bf16":
            assert record["weight_copy_bytes"] == 0
        else:  # kernels copy nothing, but the twin of the quantiser, which is seen too, makes a packed copy
            assert record["weight_copy_bytes"] == LAYERS[layer]


def test_what_a_machine_lacks_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    keep(monkeypatch, "bf16", "mxfp8")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    records = measure(tmp_path, "--ffn", "48")
    skipped = records["GroupedLinear, bf16", "forward"]["skipped"]
    assert set(skipped) == {"GroupedLinear, mxfp8", SCALED, ENGINE}
    assert "must be a multiple of 32" in skipped["GroupedLinear, mxfp8"]
    assert "_scaled_grouped_mm" in skipped[SCALED]
    assert "transformer_engine" in skipped[ENGINE]
    output = capsys.readouterr().out
    assert f"skipped {ENGINE}: " in output
    assert "wire GB/s" not in output  # a column that no record has


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
def test_a_wrong_kernel_is_not_timed(choice: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep(monkeypatch, choice)
    right = getattr(twin, kernel)

    def lost(*args, **options):
        right(*args, **options)
        inspect.signature(right).bind(*args, **options).arguments["out"].zero_()

    monkeypatch.setattr(twin, kernel, lost)
    with pytest.raises(WrongResult, match=f"GroupedLinear, {choice} is wrong"):
        measure(tmp_path)


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
