"""The Megatron example as a user runs it: torchrun with two CPU processes. And its comparisons and timings, which could
mislead."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from example_runs import module_of, output_of
from torch import nn

pytest.importorskip("megatron.core")

STEPS = 12


def run(*arguments: str) -> str:
    """The output of two ranks."""
    return output_of("megatron_gpt.py", *arguments, num_ranks=2)


def assert_ordered(summary: dict[str, float]) -> None:
    assert summary.keys() == {"median", "p10", "p90"}
    assert 0 < summary["p10"] <= summary["median"] <= summary["p90"]


def losses_of(*arguments: str) -> list[float]:
    """The losses that a run of a few steps prints."""
    text = run(f"--steps={STEPS}", "--layer-steps=0", *arguments)
    lines = re.findall(r"^step (\d+) loss (\S+) tokens/s (\d+)$", text, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == list(range(1, STEPS + 1))
    assert all(int(speed) > 0 for _, _, speed in lines)
    assert re.search(r"^median tokens/s \d+$", text, flags=re.MULTILINE)
    figures = json.loads(text.splitlines()[-1])
    assert figures["timed_steps"] == STEPS - 5
    assert_ordered(figures["step_ms"])
    assert "layers" not in figures
    return [float(loss) for _, loss, _ in lines]


@pytest.mark.slow
def test_learns_and_agrees_with_megatrons_layer_on_other_layouts():
    symmoe_losses = losses_of()
    megatron_losses = losses_of("--dispatcher=alltoall")
    halves = [
        "--micro-batch=2",
        "--micro-batches=2",
    ]  # the same sequences; their aux loss is another
    theirs_in_halves = losses_of("--dispatcher=alltoall", *halves)
    replicated = losses_of("--expert-parallel=1", "--experts=megatron", "--order=slot", *halves)
    assert symmoe_losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert symmoe_losses[-1] < symmoe_losses[0] - 0.5
    assert symmoe_losses == pytest.approx(megatron_losses, rel=1e-4)
    assert replicated == pytest.approx(theirs_in_halves, rel=1e-4)
    assert theirs_in_halves != pytest.approx(megatron_losses, rel=1e-4)
    assert symmoe_losses[0] == pytest.approx(megatron_losses[0], rel=1e-5)


@pytest.mark.slow
def test_compares_layers_before_it_times_them(tmp_path: Path):
    """All dispatchers with all experts, in bf16 as on GPUs."""
    from megatron.core.transformer.moe import experts

    grouped = "GroupedMLP" if hasattr(experts, "GroupedMLP") else "SequentialMLP"
    classes = {
        "alltoall+megatron": grouped,
        "alltoall+symmoe": "SymmExperts",
        "symmoe+symmoe": "SymmExperts",
        "symmoe+megatron": grouped,
        "alltoall+sequential": "SequentialMLP",
    }
    file = tmp_path / "figures.jsonl"
    compared = ["alltoall", "alltoall+symmoe", "symmoe", "symmoe+megatron", "alltoall+sequential"]
    options = ["--steps=0", "--dtype=bf16", "--force-balance", "--layer-steps=3", f"--json={file}"]
    text = run(f"--compare={','.join(compared)}", *options)
    figures = json.loads(text.splitlines()[-1])
    assert json.loads(file.read_text()) == figures
    assert {name: layer["experts"] for name, layer in figures["layers"].items()} == classes
    first = figures["layers"]["alltoall+megatron"]["total_ms"]["median"]
    for layer in figures["layers"].values():
        for phase in ("forward_ms", "backward_ms", "total_ms"):
            assert_ordered(layer[phase])
        assert layer["speedup"] == pytest.approx(first / layer["total_ms"]["median"], abs=1e-3)
    assert (figures["ranks"], figures["dtype"], figures["timed_layer_steps"]) == (2, "bfloat16", 3)
    assert "step_ms" not in figures


@pytest.mark.slow
def test_trains_in_bf16_with_a_capacity_and_times_its_layer():
    text = run("--steps=6", "--dtype=bf16", "--load-factor=2", "--layer-steps=2")
    figures = json.loads(text.splitlines()[-1])
    assert figures["trained"] == "symmoe+symmoe"
    assert figures["last_loss"] < figures["first_loss"]
    assert list(figures["layers"]) == ["symmoe+symmoe"]


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scaled(nn.Module):
    """A stand-in for an MoE layer: x times a weight, with a gradient of x that is `wrong` times too large."""

    def __init__(self, weight: float, wrong: float = 1.0) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.tensor(weight)), wrong

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = x * self.weight
        if y.requires_grad:
            x.register_hook(lambda gradient: gradient * self.wrong)
        return y, None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Scaled(2.0), None),
        (Scaled(2.002), "output of b differs"),
        (Scaled(2.0, wrong=1.01), "input gradient of b differs"),
        (Scaled(math.nan), "output of b differs"),
    ],
    ids=["same", "output", "gradient", "NaN"],
)
def test_layers_with_different_results_are_not_timed(layer: nn.Module, text: str | None):
    time_layers = module_of("megatron_layers").time_layers
    x = torch.randn(4, 2, 8)
    layers: dict = {"a": Scaled(2.0), "b": layer}
    seeds: list[int] = []
    arguments = {"repetitions": 2, "reseed": lambda: seeds.append(0)}
    if text is None:
        assert time_layers(layers, x, torch.randn_like(x), **arguments).keys() == {"a", "b"}
        assert len(seeds) == 2
        assert layer.weight.grad is None
        return
    with pytest.raises(RuntimeError, match=text):
        time_layers(layers, x, torch.randn_like(x), **arguments)


@pytest.mark.parametrize("num_groups", [4, 2])
def test_fused_attention(num_groups: int):
    """The output is the softmax of the scaled scores of a position and all earlier ones, times their values; heads
    share the keys and values of a group."""
    generator = torch.Generator().manual_seed(0)
    length, batch, num_heads, width = 5, 3, 4, 8
    query = torch.randn(length, batch, num_heads, width, generator=generator)
    key, value = (
        torch.randn(length, batch, num_groups, width, generator=generator) for _ in range(2)
    )
    actual = module_of("megatron_without_te").FusedAttention(None, 1)(query, key, value, None)
    want = torch.zeros(length, batch, num_heads, width)
    for position in range(length):
        for head in range(num_heads):
            group = head * num_groups // num_heads
            scores = torch.einsum(
                "bd,sbd->sb", query[position, :, head], key[: position + 1, :, group]
            ) / math.sqrt(width)
            want[position, :, head] = torch.einsum(
                "sb,sbd->bd", scores.softmax(0), value[: position + 1, :, group]
            )
    torch.testing.assert_close(actual, want.flatten(2))
