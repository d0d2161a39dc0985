"""The faster precision: the table against its record, and choices for other sizes, GPUs and ranks."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from layers import tokens_of
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer
from symmoe.cli import main
from symmoe.errors import ArgumentError
from symmoe.kernels.control import QUANTIZED_WIRES
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.tools.shapes import PRESETS
from symmoe.training import precision_choice as choices

NUMBERS = {"num_ranks": 2, "num_tokens": 8192}


def config_of(preset: str = "deepseek-like", **options) -> MoEConfig:
    shape = PRESETS[preset]
    sizes = {name: getattr(shape, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    return MoEConfig(**{"precision": Float8Block(), "quantized_wire": "both", **sizes, **options})


def pays(config: MoEConfig, **numbers: int) -> bool:
    return choices.best_measured(config, **{**NUMBERS, **numbers})[1] >= choices.LEAST_SPEED_UP


# -- the table --------------------------------------------------------------------------------------------------------
RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "precision-h200-ep2.json"
# The variants of the record for the table's columns.
VARIANTS = {
    "full_ms": "static",
    "quantized_ms": "float8-block",
    "wire_ms": "float8-block, wire",
    "constant_weights_ms": "float8-block, wire, constant weights",
}
CHOICES = {"mixtral-8x7b": True, "deepseek-like": True, "qwen3-30b": False}


def measured_ms(preset: str, variant: str) -> float:
    """Times of both directions on 2 H200s, of the layers for which the table chooses."""
    results = {}
    for record in json.loads(RECORD.read_text(encoding="utf-8")):
        if (record["suite"], record["preset"], record["variant"]) == ("precision", preset, variant):
            assert record["direction"] not in results
            results[record["direction"]] = record
    assert results.keys() == {"forward", "backward"}
    config = config_of(preset)
    expected = {
        **{name: getattr(config, name) for name in ("hidden", "ffn", "num_experts", "top_k")},
        "ep": 2,
        "tokens": 8192,
        "skew": "uniform",
        "gpu": "NVIDIA H200",
        "dtype": "bfloat16",
    }
    expected["precision"] = "bf16" if variant == "static" else str(config.precision)
    for record in results.values():
        assert {name: record[name] for name in expected} == expected
    return sum(record["ms_median"] for record in results.values())


def test_the_table_is_that_of_the_record():
    assert [layer.name for layer in choices.MEASURED] == [*CHOICES]
    for layer in choices.MEASURED:
        shape = PRESETS[layer.name]
        assert (layer.hidden, layer.ffn) == (shape.hidden, shape.ffn)
        assert layer.rows_per_expert == 2 * 8192 * shape.top_k // shape.num_experts
        for column, variant in VARIANTS.items():
            assert f"{getattr(layer, column):.4g}" == f"{measured_ms(layer.name, variant):.4g}", (
                layer.name,
                column,
            )
    assert f"benchmarks/results/{RECORD.name}" in Path(choices.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", CHOICES)
def test_measured_layers_get_the_faster_precision(preset: str):
    for wire, faster in (("both", "float8-block, wire"), ("none", "float8-block")):
        layer, speed_up = choices.best_measured(config_of(preset, quantized_wire=wire), **NUMBERS)
        assert layer.name == preset
        assert speed_up == pytest.approx(
            measured_ms(preset, "static") / measured_ms(preset, faster), rel=1e-3
        )
        assert (speed_up >= choices.LEAST_SPEED_UP) == CHOICES[preset]
    # Weights that were quantised before cost a step nothing.
    _, speed_up = choices.best_measured(config_of(preset), **NUMBERS, num_micro_batches=10**6)
    expected = measured_ms(preset, "static") / measured_ms(preset, VARIANTS["constant_weights_ms"])
    assert speed_up == pytest.approx(expected, rel=1e-3)


# -- choices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_low_precision_stays_chosen_for_larger_layers(preset: str):
    """Larger numbers of tokens, ranks, micro-batches and features, and quantised rows on the wire."""
    for wire, num_ranks, num_micro_batches in itertools.product(
        QUANTIZED_WIRES, (1, 2, 4), (1, 4, 1000)
    ):
        config = config_of(preset, quantized_wire=wire)
        options = {"num_micro_batches": num_micro_batches}
        choices_by_size = [
            pays(config, num_ranks=num_ranks, num_tokens=2**i, **options) for i in range(22)
        ]
        assert choices_by_size == sorted(choices_by_size)
        for i in [i for i, is_taken in enumerate(choices_by_size) if is_taken]:
            numbers = {"num_ranks": num_ranks, "num_tokens": 2**i}
            assert pays(config, **{**numbers, "num_ranks": 2 * num_ranks}, **options)
            assert pays(config, **numbers, num_micro_batches=num_micro_batches + 1)
            assert pays(replace(config, quantized_wire="both"), **numbers, **options)
            for name in ("hidden", "ffn"):
                assert pays(
                    replace(config, **{name: 2 * getattr(config, name)}), **numbers, **options
                )


def test_layers_smaller_than_measured_ones_compute_in_full():
    for preset in ("mixtral-8x7b", "deepseek-like"):
        config = config_of(preset)
        for name in ("hidden", "ffn"):
            assert not pays(replace(config, **{name: getattr(config, name) - 16}))
        assert not pays(config, num_tokens=8191)
    assert choices.best_measured(config_of("gpt-oss-120b"), **NUMBERS) == (None, 0.0)


def on_h200(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H200") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_configs_keep_their_recipe_or_compute_in_full(monkeypatch):
    big = config_of(stash="rows", capacity=70_000)
    small = config_of("qwen3-30b", stash="rows", capacity=70_000)
    for config in (big, small):  # CPUs
        assert choices.choose_precision(config, **NUMBERS, device="cpu") == choices.in_full(config)
    on_h200(monkeypatch)
    assert choices.choose_precision(big, **NUMBERS, device="cuda:1") is big
    assert choices.choose_precision(
        big, num_ranks=2, num_tokens=64, device="cuda"
    ) == choices.in_full(big)
    chosen = choices.choose_precision(small, **NUMBERS, device=torch.device("cuda", 0))
    assert (chosen.precision, chosen.quantized_wire) == (None, "none")
    assert chosen.received_layout == "expert-major"
    assert replace(chosen, precision=small.precision, quantized_wire=small.quantized_wire) == small
    power = replace(big, precision=Float8Block(power_of_two=True))
    assert choices.choose_precision(power, **NUMBERS, device="cuda") is power
    for recipe in (MXFP8(), NVFP4()):
        config = replace(big, precision=recipe, quantized_wire="none")
        assert choices.choose_precision(config, **NUMBERS, device="cuda") == choices.in_full(config)


def test_micro_batches_that_share_weights_count(monkeypatch):
    on_h200(monkeypatch)
    config = config_of("qwen3-30b")
    alone, shared = (
        choices.choose_precision(config, **NUMBERS, device="cuda", num_micro_batches=n)
        for n in (1, 8)
    )
    assert alone == choices.in_full(config)
    assert shared is config


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA L40S"]
)
def test_other_gpus_compute_in_full(monkeypatch, name: str):
    config = config_of()
    for gpu, chosen in ((name, choices.in_full(config)), ("NVIDIA H200", config)):
        on_h200(monkeypatch, gpu)
        assert choices.choose_precision(config, **NUMBERS, device="cuda") == chosen


def test_wrong_numbers_are_refused():
    numbers = {**NUMBERS, "num_micro_batches": 1}
    for name in numbers:
        with pytest.raises(ArgumentError, match=rf"{name} \(0\) must be at least 1"):
            choices.best_measured(config_of(), **{**numbers, name: 0})
    with pytest.raises(
        ArgumentError, match=r"num_experts \(64\) must be divisible by the number of ranks \(3\)"
    ):
        choices.best_measured(config_of(), **{**numbers, "num_ranks": 3})
    with pytest.raises(ArgumentError, match=r"precision \(None\)"):
        choices.choose_precision(choices.in_full(config_of()), **numbers, device="cpu")


@run_on(2)
def test_ranks_with_different_choices_raise(rank: int, num_ranks: int, findings: Findings) -> None:
    """Ranks on different GPUs choose differently, and both raise in their first call; the layer shows its choice."""
    config = MoEConfig(
        hidden=64, ffn=32, num_experts=4, top_k=2, precision=Float8Block(), quantized_wire="both"
    )
    with open_heap("cpu") as heap, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            choices,
            "MEASURED",
            (choices.MeasuredLayer("small", 64, 32, 1, 2.0, 1.0, 1.0, 1.0),),
        )
        for measured in ((False, False), (True, True), (True, False)):
            findings.where = f"rank {rank}, {measured}"
            patch.setattr(
                choices, "_was_measured", lambda device, was_measured=measured[rank]: was_measured
            )
            chosen = choices.choose_precision(
                config, num_ranks=num_ranks, num_tokens=4096, device=heap.device
            )
            layer = MoELayer(chosen, heap)
            findings.equal(
                "taken", layer.experts.precision, Float8Block() if measured[rank] else None
            )
            findings.equal("shown", "precision=Float8Block" in repr(layer), measured[rank])
            error, _ = outcome(layer, tokens_of(rank, 20, 64).bfloat16())
            findings.equal("error", error, "" if measured[0] == measured[1] else "ConfigMismatch")


# -- the command ------------------------------------------------------------------------------------------------------
SIZES = {
    "mixtral-8x7b": "--hidden 4096 --ffn 14336 --experts 8 --top-k 2",
    "qwen3-30b": "--hidden 2048 --ffn 768 --experts 128 --top-k 8",
}


@pytest.mark.parametrize(
    ("preset", "choice", "same"),
    [("mixtral-8x7b", "float8-block", ("float8-block", "both")), ("qwen3-30b", "bf16", None)],
)
def test_the_command_prints_its_choice(capsys, preset: str, choice: str, same):
    """The command prints the measured layer, the speed-up, and the memory of its choice."""
    plan = ["plan", *SIZES[preset].split(), "--ranks", "2", "--tokens", "8192"]
    assert main([*plan, "--precision", "float8-auto", "--quantized-wire", "both"]) == 0
    memory, reason = capsys.readouterr().out.split("\n\n")
    assert reason.startswith(f"float8-auto takes {choice}: ")
    assert f"the layer of {preset} " in reason
    ratio, min_ratio = map(float, re.findall(r"\d+\.\d\d", reason))
    assert ratio == pytest.approx(choices.best_measured(config_of(preset), **NUMBERS)[1], abs=0.006)
    assert (ratio > min_ratio) == (choice == "float8-block")
    main(plan if same is None else [*plan, "--precision", same[0], "--quantized-wire", same[1]])
    assert capsys.readouterr().out.rstrip() == memory
    assert main([*plan, "--ffn", "16", "--precision", "float8-auto"]) == 0
    assert "float8-auto takes bf16: no layer was measured" in capsys.readouterr().out
