"""plan_memory and `symmoe plan` against the measured memory of layers; test_schedules.py has the heap's exact size."""

import dataclasses
import re
from dataclasses import replace

import pytest
import torch
from cluster import run_on
from kept_memory import bytes_at_peak, bytes_kept
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap, cli, plan_memory
from symmoe.errors import ArgumentError
from symmoe.kernels.activation import Activation
from symmoe.precision import PRECISIONS

H, I, E, K, T = 16, 24, 8, 3, 37


@pytest.mark.parametrize("stash", ["all", "rows", "hidden", "none"])
@pytest.mark.parametrize("capacity", [None, 150])
@pytest.mark.parametrize("layout", ["packed", "expert-major"])
def test_planned_bytes_of_a_call_are_exact(stash: str, capacity: int | None, layout: str):
    config = MoEConfig(
        hidden=H, ffn=I, num_experts=E, top_k=K, stash=stash, capacity=capacity, layout=layout
    )
    plan = plan_memory(config, num_ranks=1, num_tokens=T, dtype=torch.float32)
    leased, ordinary = bytes_kept(config, T)
    assert (plan.lease_bytes_per_call, plan.activation_bytes_per_call) == (leased, ordinary)


@pytest.mark.parametrize("stash", ["all", "none"])
def test_programs_run_on_a_heap_of_the_planned_size(monkeypatch, stash: str):
    monkeypatch.setenv("SYMMOE_PROGRAMS", "on")
    monkeypatch.setenv("SYMMOE_FILL_MEMORY", "0")  # or leases that are parts of one do not overlap
    config = MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K, stash=stash, capacity=150)
    plan = plan_memory(config, num_ranks=1, num_tokens=T, num_layers=3, dtype=torch.float32)
    played = []
    for num_bytes in (plan.heap_bytes, 2 * plan.heap_bytes):
        with SymmetricHeap(num_bytes=num_bytes, backend="host") as heap:
            layers = [MoELayer(config, heap) for _ in range(3)]
            for _ in range(4):
                y = torch.randn(T, H)
                for layer in layers:
                    y, _ = layer(y)
                y.sum().backward()
                del y
            played.append(heap.programs.num_runs)
            assert heap.high_water_bytes <= plan.heap_bytes
    assert played[0] == played[1] > 10


@run_on(1, 2)
def test_the_planned_peak_is_that_of_a_step(rank: int, num_ranks: int, findings: Findings) -> None:
    sizes = {"hidden": 256, "ffn": 96, "num_experts": 8, "top_k": 2}
    x, dy = torch.randn(2, 256, 256).bfloat16()
    replicas = {"balance": "replicas", "replicas_per_rank": 3}
    for options in (
        {},
        {"layout": "expert-major"},
        {"stash": "rows"},
        {"stash": "none"},
        {"capacity": 640},
        replicas,
    ):
        config = MoEConfig(**sizes, **options)
        with open_heap("cpu", num_bytes=16 << 20, programs="off") as heap:
            actual = bytes_at_peak(
                MoELayer(config, heap, dtype=x.dtype), x.detach().requires_grad_(), dy
            )
        planned = plan_memory(config, num_ranks=num_ranks, num_tokens=len(x)).peak_bytes
        findings.check(
            abs(planned / actual - 1) < 0.05, f"{options}: planned {planned}, found {actual}"
        )


def test_rows_and_totals():
    config = MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K)
    base = plan_memory(config, num_ranks=4, num_tokens=100)
    assert base.num_rows == 300
    # A token misses the two experts of a rank with probability (6/8)(5/7)(4/6).
    assert base.num_packed_rows == -(-400 * (1 - 6 / 8 * 5 / 7 * 4 / 6) // 1)
    worst = plan_memory(config, num_ranks=4, num_tokens=100, routing="worst")
    assert (worst.num_rows, worst.num_packed_rows) == (800, 400)
    many = plan_memory(config, num_ranks=4, num_tokens=100, num_layers=3, num_in_flight=2)
    assert many.activation_bytes == 6 * base.activation_bytes_per_call
    assert many.heap_bytes > base.heap_bytes + 4 * base.lease_bytes_per_call
    static = plan_memory(
        MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K, capacity=350),
        num_ranks=4,
        num_tokens=100,
    )
    assert (static.num_rows, static.num_packed_rows) == (350, 350)
    plain = dataclasses.replace(config, activation=Activation(function="relu2", is_gated=False))
    narrow = plan_memory(plain, num_ranks=4, num_tokens=100)
    assert (
        base.activation_bytes_per_call - narrow.activation_bytes_per_call == 384 * I * 2
    )  # room for 300 rows


def test_plans_do_not_depend_on_the_callers_modes():
    config = MoEConfig(
        hidden=7168, ffn=2048, num_experts=256, top_k=8, precision=PRECISIONS["float8-block"]
    )
    sizes = {"num_ranks": 8, "num_tokens": 8192, "num_layers": 48, "num_in_flight": 4}
    want = plan_memory(config, **sizes)
    state = torch.get_rng_state()
    for switched in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with switched:
            assert plan_memory(config, **sizes) == want
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_ranks": 0}, "num_ranks (0) must be at least 1"),
        ({"num_ranks": 3}, "num_experts (8) must be divisible by the number of ranks (3)"),
        ({"num_tokens": 0}, "num_tokens (0) must be at least 1"),
        ({"num_layers": -1}, "num_layers (-1) must be at least 1"),
        ({"num_in_flight": 0}, "num_in_flight (0) must be at least 1"),
        ({"routing": "best"}, "routing ('best') must be one of ('uniform', 'worst')"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, text: str):
    config = MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K)
    with pytest.raises(ArgumentError) as caught:
        plan_memory(config, **{"num_ranks": 2, "num_tokens": 8, **change})
    assert text in str(caught.value)


ARGUMENTS = "plan --hidden 2048 --ffn 768 --experts 128 --top-k 8 --ranks 2 --tokens 8192".split()


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]):
    assert (
        cli.main([*ARGUMENTS, "--layers", "4", "--micro-batches", "2", "--capacity-factor", "1.5"])
        == 0
    )
    out = capsys.readouterr().out
    config = MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8, capacity=98304)
    plan = plan_memory(config, num_ranks=2, num_tokens=8192, num_layers=4, num_in_flight=2)
    assert "static, 1.5" in out
    assert cli._size(plan.heap_bytes) in out
    assert cli._size(plan.activation_bytes) in out
    assert cli._size(plan.peak_bytes) in out
    assert "131072" in out  # the worst case's rows


@pytest.mark.parametrize("wire", ["none", "forward", "both"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_command_plans_for_recipes(name: str, wire: str, capsys: pytest.CaptureFixture[str]):
    if wire != "none" and name == "nvfp4":
        pytest.skip("does not travel quantised")
    shown = []
    for extra in ((), ("--precision", name, "--quantized-wire", wire)):
        assert cli.main([*ARGUMENTS, "--capacity-factor", "1", *extra]) == 0
        shown.append(capsys.readouterr().out)
    full = MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8, capacity=65536)
    config = replace(full, precision=PRECISIONS[name], quantized_wire=wire)
    plans = [
        plan_memory(plan_config, num_ranks=2, num_tokens=8192) for plan_config in (full, config)
    ]
    for out, other_output, plan in ((*shown, plans[0]), (*shown[::-1], plans[1])):
        shown = set(re.findall("[0-9.]+ MiB", out))
        assert {cli._size(plan.activation_bytes), cli._size(plan.lease_bytes_per_call)} <= shown
        assert cli._size(plan.activation_bytes) not in other_output
    assert (plans[0].lease_bytes_per_call != plans[1].lease_bytes_per_call) or wire == "none"
