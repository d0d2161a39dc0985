"""Which precision is expected to be faster: the formulas against bytes of real calls and by hand, and who decides."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_layer import flat, tokens_of
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer
from symmoe.cli import main
from symmoe.errors import ArgumentError, ConfigMismatch
from symmoe.kernels import twin
from symmoe.precision import MXFP8, NVFP4, Float8Block, Float8Rowwise
from symmoe.tools.bench.cases import PRESETS
from symmoe.training import precision_choice
from symmoe.training.precision_choice import (
    PrecisionRates,
    choose_precision,
    expect,
    in_full,
    rates_of,
)

STASHES = ("all", "rows", "hidden", "none")


def config_of(preset: str = "deepseek-like", **options) -> MoEConfig:
    shape = PRESETS[preset]
    sizes = {name: getattr(shape, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    return MoEConfig(**{"precision": Float8Block(), "quantized_wire": "both", **sizes, **options})


def seconds(kernels) -> dict[tuple[str, str], float]:
    return {(kernel.direction, kernel.name): kernel.seconds for kernel in kernels}


# -- the formulas -----------------------------------------------------------------------------------------------------

# One byte or FLOP a second; a launch is nothing.
UNITS = PrecisionRates(
    **dict.fromkeys((field for field in asdict(PrecisionRates()) if field not in ("launch_s", "least_gain")), 1.0),
    launch_s=0.0,
)


def test_a_step_by_hand():
    """64 tokens of 256 features, two of four experts of 128 each, one rank; a second is a byte."""
    config = MoEConfig(hidden=256, ffn=128, num_experts=4, top_k=2, precision=Float8Block(), layout="expert-major")
    expectation = expect(config, num_ranks=1, num_tokens=64, rates=replace(UNITS, memory_bytes=1e9))
    full, quantized = seconds(expectation.full), seconds(expectation.quantized)
    rows, e4m3 = 128 + 4 * 64, 33 / 32  # with half a tile for every expert
    product = 2 * rows * 256 * 128
    for step in (full, quantized):
        assert step["forward", "FC1"] == step["backward", "FC1 dgrad"] == 2 * product
        assert step["forward", "FC2"] == step["backward", "FC2 dgrad"] == product
        assert step["backward", "wgrad"] == 3 * product
        assert step["forward", "push"] == step["backward", "push"] == 0
        assert step["backward", "FC1 again"] == 0
    assert full["forward", "fan-out"] == full["backward", "fan-out"] == (128 - 64) * 256 * 2
    assert quantized["forward", "rows"] == quantized["backward", "rows"] == 128 * 256 * (2 + e4m3)
    assert quantized["backward", "columns"] == 2 * 128 * 256 * (2 + e4m3)
    assert quantized["forward", "weights"] == 4 * 3 * 256 * 128 * (2 + 2 * e4m3)
    assert quantized["forward", "activation"] == 128 * 128 * (4 + e4m3)
    assert quantized["backward", "activation gradient"] == 128 * 128 * (2 + 4 + 5 * e4m3)
    assert expectation.full_s == sum(full.values())
    assert expectation.quantized_s == sum(quantized.values())


def test_what_travels():
    config = MoEConfig(hidden=1024, ffn=64, num_experts=4, top_k=4, precision=Float8Block(), schedule="serial")
    link = 340e9
    for wire, sent_bytes in (("none", (2048, 2048)), ("forward", (1056, 2048)), ("both", (1056, 1056))):
        step = expect(replace(config, quantized_wire=wire), num_ranks=4, num_tokens=100)
        full, quantized = seconds(step.full), seconds(step.quantized)
        for direction, row_bytes in zip(("forward", "backward"), sent_bytes, strict=True):
            # All four experts of a token: a row to each of three peers.
            assert quantized[direction, "push"] == pytest.approx(300 * row_bytes / link)
            assert full[direction, "push"] == pytest.approx(300 * 2048 / link)
    for stash, pushes in (("all", 1), ("rows", 1), ("hidden", 2), ("none", 2)):
        step = expect(replace(config, stash=stash, quantized_wire="both"), num_ranks=4, num_tokens=100)
        assert seconds(step.quantized)["backward", "push"] == pytest.approx(pushes * 300 * 1056 / link)
        assert seconds(step.full)["backward", "push"] == pytest.approx(pushes * 300 * 2048 / link)
    # Beside a GEMM it costs no more than by itself.
    beside = expect(replace(config, schedule="overlapped"), num_ranks=4, num_tokens=10**6)
    assert 0 < seconds(beside.full)["forward", "push"] < 0.5 * 3e6 * 2048 / link


def test_a_step_that_recomputes():
    for stash in STASHES:
        step = expect(config_of(stash=stash), num_ranks=2, num_tokens=8192)
        full, quantized = seconds(step.full), seconds(step.quantized)
        again = stash in ("rows", "none")
        assert full["backward", "FC1 again"] == again * full["forward", "FC1"]
        first = quantized["forward", "FC1"] + quantized["forward", "activation"]
        assert quantized["backward", "FC1 again"] == again * first
        assert (quantized["backward", "weights again"] > quantized["forward", "weights"]) == again
    once, shared = (expect(config_of(), num_ranks=2, num_tokens=8192, num_micro_batches=n) for n in (1, 4))
    weights = seconds(once.quantized)["forward", "weights"]
    assert once.quantized_s - shared.quantized_s == pytest.approx(0.75 * weights)


def test_few_rows_are_bound_by_the_weights():
    step = expect(config_of(), num_ranks=2, num_tokens=1, rates=replace(UNITS, flops=1e30, quantized_flops=1e30))
    matrices = 32 * 7168 * 2048
    assert seconds(step.full)["forward", "FC2"] == pytest.approx(2 * matrices)
    assert seconds(step.quantized)["forward", "FC2"] == pytest.approx(matrices, rel=0.04)


# Which row of the table a kernel is, and which of its arguments it reads and writes once.
COUNTED = {
    "encode_rows": ("quantise", ("x", "out")),
    "quantize_rows": ("rows", ("rows", "data", "scale")),
    "unpack_rows": ("rows", ("wire", "data", "scale")),
    "quantize_columns": ("columns", ("rows", "data", "scale")),
    "requantize_columns": ("columns", ("wire", "data", "scale")),
    "quantize_weight_pairs": ("weights", ("weight", "data", "scale", "transposed_data", "transposed_scale")),
    "act_quantize": ("activation", ("h", "rows")),
    "dact_quantize": ("activation gradient", ("da", "h", "rows", "columns", "a_columns")),
}


def counted(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes by row of the table, from now on; rows that are gathered count as often as they are read."""
    found: dict[str, int] = defaultdict(int)

    def counting(kernel, label: str, names: tuple[str, ...]):
        signature = inspect.signature(kernel)

        def count(*args, **options):
            given = signature.bind(*args, **options).arguments
            index = given.get("row_index")
            for place, name in enumerate(names):
                tensors = given[name] if name in given else list(given.values())[place]
                for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
                    gathered = index is not None and name in ("rows", "wire")
                    found[label] += tensor[0].nbytes * index.shape[0] if gathered else tensor.nbytes
            return kernel(*args, **options)

        return count

    for name, (label, arguments) in COUNTED.items():
        patch.setattr(twin, name, counting(getattr(twin, name), label, arguments))
    return found


def check_bytes(rank: int, num_ranks: int, wire: str) -> list[str]:
    """The quantising kernels of a real step read and write as many bytes as the formulas have seconds."""
    findings = Findings()
    config = MoEConfig(
        hidden=256, ffn=128, num_experts=2, top_k=2, precision=Float8Block(), quantized_wire=wire, layout="packed"
    )
    with open_heap("cpu", num_bytes=32 << 20) as heap, pytest.MonkeyPatch.context() as patch:
        layer = MoELayer(config, heap, dtype=torch.bfloat16)
        found = counted(patch)
        y, _ = layer(tokens_of(rank, 2048, 256).bfloat16().requires_grad_())
        y.float().sum().backward()
        del y
    step = expect(config, num_ranks=1, num_tokens=2048, rates=UNITS)
    wanted: dict[str, float] = defaultdict(float)
    for kernel in step.quantized:
        wanted["quantise" if kernel.name.startswith("quantise") else kernel.name] += kernel.seconds
    findings.check(
        set(found) == {label for label, _ in COUNTED.values()} - ({"quantise"} if wire == "none" else set()),
        f"{set(found)}",
    )
    for label, num_bytes in found.items():
        # Columns are padded to tiles, by one in sixteen for each of two groups at most.
        ratio = num_bytes / wanted[label]
        findings.check(0.97 < ratio < 1.08, f"{wire}, {label}: {num_bytes} bytes, expected {wanted[label]}")
    return findings.texts


@pytest.mark.parametrize("wire", ["none", "both"])
def test_bytes_of_a_real_step(cluster, wire: str):
    assert flat(cluster(1).run(check_bytes, wire)) == []


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_layers_of_known_models():
    """8,192 tokens on 2 GPUs: wide experts with many rows gain, narrow ones lose to what is quantised for them."""
    pays = {name: expect(config_of(name), num_ranks=2, num_tokens=8192).pays for name in PRESETS}
    assert pays["mixtral-8x7b"]
    assert pays["deepseek-like"]
    assert not pays["qwen3-30b"]


def test_the_choice_follows_the_rates():
    """Qwen3-30B's layer: quantising that costs next to nothing pays; GEMMs that are no faster never do."""
    config, numbers = config_of("qwen3-30b"), {"num_ranks": 2, "num_tokens": 8192}
    names = ("row_bytes", "column_bytes", "weight_bytes", "act_bytes", "dact_bytes")
    free = PrecisionRates(**dict.fromkeys(names, 1e15))
    assert expect(config, **numbers, rates=free).pays
    for name in names:  # each of them counts
        slow = replace(free, **{name: 2e11})
        assert not expect(config, **numbers, rates=slow).pays, name
    assert not expect(config, **numbers, rates=replace(free, least_gain=0.6)).pays
    assert not expect(config, **numbers, rates=replace(free, launch_s=1e-3)).pays
    same = replace(PrecisionRates(), quantized_flops=670e12, quantized_wgrad_flops=670e12)
    assert not any(expect(config_of(name), **numbers, rates=same).pays for name in PRESETS)


RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "precision-h200-ep2.json"
FULL, QUANTIZED, CONSTANT = "static", "float8-block, wire", "float8-block, wire, constant weights"
MEASURED_PRESETS = ("qwen3-30b", "mixtral-8x7b", "deepseek-like")


def records_of(preset: str, variant: str) -> dict[str, dict]:
    """By direction, of steps on 2 H200s; what was measured is what is expected here."""
    found = {}
    for record in json.loads(RECORD.read_text(encoding="utf-8")):
        if (record["suite"], record["preset"], record["variant"]) == ("precision", preset, variant):
            assert record["direction"] not in found
            found[record["direction"]] = record
    assert found.keys() == {"forward", "backward"}
    config = config_of(preset)
    wanted = {name: getattr(config, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    wanted |= {"ep": 2, "tokens": 8192, "skew": "uniform", "gpu": "NVIDIA H200", "dtype": "bfloat16"}
    wanted["precision"] = "bf16" if variant == FULL else str(config.precision)
    for record in found.values():
        assert {name: record[name] for name in wanted} == wanted
    return found


def measured(preset: str, variant: str) -> float:
    """Time of both ways in bf16 by their time in FP8."""
    full, quantized = (
        sum(record["ms_median"] for record in records_of(preset, name).values()) for name in (FULL, variant)
    )
    return full / quantized


def expected(preset: str, num_micro_batches: int = 1) -> float:
    step = expect(config_of(preset), num_ranks=2, num_tokens=8192, num_micro_batches=num_micro_batches)
    return step.full_s / step.quantized_s


@pytest.mark.parametrize("name", MEASURED_PRESETS)
def test_the_formulas_follow_what_was_measured(name):
    assert expected(name) == pytest.approx(measured(name, QUANTIZED), rel=0.04)
    # Weights that were quantised before cost a step nothing.
    assert expected(name, num_micro_batches=10**6) == pytest.approx(measured(name, CONSTANT), rel=0.04)


def test_what_is_said_of_the_gain_that_is_wanted():
    said = " ".join(PrecisionRates.__doc__.split())
    of_steps, of_formulas = re.search(r"were ([\d., and]+); these formulas expect ([\d., and]+)\.", said).groups()
    assert of_steps == "{:.2f}, {:.2f} and {:.2f}".format(*(measured(name, QUANTIZED) for name in MEASURED_PRESETS))
    assert of_formulas == "{:.2f}, {:.2f} and {:.2f}".format(*map(expected, MEASURED_PRESETS))


def changes(config: MoEConfig, num_ranks: int) -> list[bool]:
    """What is chosen for more and more tokens, each choice once."""
    taken = [expect(config, num_ranks=num_ranks, num_tokens=2**i).pays for i in range(22)]
    return [one for i, one in enumerate(taken) if i == 0 or one != taken[i - 1]]


@pytest.mark.parametrize("preset", PRESETS)
def test_more_tokens_never_change_it_back(preset: str):
    """But where a trip in bf16 hides beside GEMMs and one of rows to be quantised cannot: not on one or two ranks."""
    for wire in ("none", "forward", "both"):
        for stash in STASHES:
            for num_ranks in (1, 2, 4, 8):
                serial = config_of(preset, quantized_wire=wire, stash=stash, schedule="serial")
                assert changes(serial, num_ranks) in ([False], [False, True])
            for num_ranks in (1, 2):
                overlapped = config_of(preset, quantized_wire=wire, stash=stash)
                assert changes(overlapped, num_ranks) in ([False], [False, True])
    assert changes(config_of("mixtral-8x7b"), 2) == [False, True]


def on_h200(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H200") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_a_config_is_taken_as_it_is_or_in_full(monkeypatch):
    numbers = {"num_ranks": 2, "num_tokens": 8192}
    big, small = config_of(stash="rows", capacity=70_000), config_of("qwen3-30b", stash="rows", capacity=70_000)
    for config in (big, small):  # CPUs
        assert choose_precision(config, **numbers, device="cpu") == in_full(config)
    on_h200(monkeypatch)
    assert choose_precision(big, **numbers, device="cuda:1") is big
    assert choose_precision(big, num_ranks=2, num_tokens=64, device="cuda") == in_full(big)
    chosen = choose_precision(small, **numbers, device=torch.device("cuda", 0))
    assert (chosen.precision, chosen.quantized_wire) == (None, "none")
    assert chosen.received_layout == "expert-major"
    assert replace(chosen, precision=small.precision, quantized_wire=small.quantized_wire) == small
    power = replace(big, precision=Float8Block(power_of_two=True))
    assert choose_precision(power, **numbers, device="cuda") is power
    for other in (Float8Rowwise(), MXFP8(), NVFP4()):
        config = replace(big, precision=other, quantized_wire="none")
        assert choose_precision(config, **numbers, device="cuda") == in_full(config)


def test_micro_batches_that_share_weights_count(monkeypatch):
    on_h200(monkeypatch)
    config = config_of("gpt-oss-120b")
    alone, shared = (
        choose_precision(config, num_ranks=2, num_tokens=8192, device="cuda", num_micro_batches=n) for n in (1, 8)
    )
    assert alone == in_full(config)
    assert shared is config


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA A100-SXM4-80GB"]
)
def test_other_gpus_compute_in_full(monkeypatch, name: str):
    on_h200(monkeypatch, name)
    assert rates_of(torch.device("cuda")) is None
    config = config_of()
    assert choose_precision(config, num_ranks=2, num_tokens=8192, device="cuda") == in_full(config)
    on_h200(monkeypatch)
    assert rates_of(torch.device("cuda")) == PrecisionRates()
    assert rates_of(torch.device("cpu")) is None


def test_wrong_numbers():
    numbers = {"num_ranks": 2, "num_tokens": 8192, "num_micro_batches": 1}
    for name in numbers:
        with pytest.raises(ArgumentError, match=rf"{name} \(0\) must be at least 1"):
            expect(config_of(), **{**numbers, name: 0})
    with pytest.raises(ArgumentError, match=r"num_experts \(64\) must be divisible by num_ranks \(3\)"):
        expect(config_of(), **{**numbers, "num_ranks": 3})
    with pytest.raises(ArgumentError, match=r"precision \(None\)"):
        choose_precision(in_full(config_of()), **numbers, device="cpu")


def check_ranks(rank: int, num_ranks: int) -> list[str]:
    """Ranks on different GPUs choose differently, and both say so in their first call; the layer shows what it took."""
    findings = Findings()
    config = MoEConfig(hidden=64, ffn=32, num_experts=4, top_k=2, precision=Float8Block(), quantized_wire="both")
    with open_heap("cpu") as heap, pytest.MonkeyPatch.context() as patch:
        for rates in ((None, None), (UNITS, UNITS), (UNITS, None)):
            findings.where = f"rank {rank}, {rates}"
            mine = None if rates[rank] is None else replace(UNITS, quantized_flops=1e9, quantized_wgrad_flops=1e9)
            patch.setattr(precision_choice, "rates_of", lambda device, mine=mine: mine)
            chosen = choose_precision(config, num_ranks=num_ranks, num_tokens=4096, device=heap.device)
            layer = MoELayer(chosen, heap)
            taken = Float8Block() if mine is not None else None
            findings.equal("taken", layer.experts.precision, taken)
            findings.equal("shown", "precision=Float8Block" in repr(layer), mine is not None)
            x = tokens_of(rank, 20, 64).bfloat16()
            try:
                layer(x)
                findings.check(rates[0] == rates[1], "ranks that differ went on")
            except ConfigMismatch:
                findings.check(rates[0] != rates[1], "ranks that agree do not")
    return findings.texts


def test_ranks_that_choose_differently_find_out(cluster):
    assert flat(cluster(2).run(check_ranks)) == []


# -- the command ------------------------------------------------------------------------------------------------------

SIZES = {
    "mixtral-8x7b": "--hidden 4096 --ffn 14336 --experts 8 --top-k 2",
    "qwen3-30b": "--hidden 2048 --ffn 768 --experts 128 --top-k 8",
}


@pytest.mark.parametrize(
    ("preset", "taken", "same"),
    [("mixtral-8x7b", "float8-block", ("float8-block", "both")), ("qwen3-30b", "bf16", None)],
)
def test_the_command_says_what_it_takes(capsys, preset: str, taken: str, same):
    """The times of both, their sums, and the memory of the one that is taken."""
    plan = ["plan", *SIZES[preset].split(), "--ranks", "2", "--tokens", "8192"]
    assert main([*plan, "--precision", "float8-auto", "--quantized-wire", "both"]) == 0
    memory, times = capsys.readouterr().out.split("\n\n")
    numbers = [[float(n) for n in re.findall(r"\d+\.\d", line)] for line in times.splitlines()[1:-1]]
    *rows, total = numbers
    assert sum(n for row in rows for n in row) == pytest.approx(sum(total), rel=1e-3)
    assert f"float8-auto takes {taken}: " in times
    ratio, least = map(float, re.findall(r"\d+\.\d\d", times.splitlines()[-1]))
    assert ratio == pytest.approx(total[1] / total[0], abs=0.006)
    assert (ratio > least) == (taken == "float8-block")
    main(plan if same is None else [*plan, "--precision", same[0], "--quantized-wire", same[1]])
    assert capsys.readouterr().out.rstrip() == memory
