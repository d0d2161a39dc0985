"""plan_network and `symmoe plan --nodes` against random routings, published ratios and the tables of docs/nodes.md."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layers import layer_config

from symmoe import MoEConfig, RouterConfig, cli
from symmoe.errors import ArgumentError
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.overlap import H200, Sizes
from symmoe.moe.router import Route, route_tokens
from symmoe.precision import Float8Block
from symmoe.tools.shapes import PRESETS, config_of
from symmoe.training.network_plan import Forward, NetworkPlan, plan_network

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
QWEN = MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8)
DEEPSEEK = MoEConfig(
    hidden=7168,
    ffn=2048,
    num_experts=256,
    top_k=8,
    router=RouterConfig(score="sigmoid", num_expert_groups=8, topk_groups=4),
)


def of_layer(config: MoEConfig, num_ranks: int, **changes: object) -> NetworkPlan:
    return plan_network(
        config, num_ranks=num_ranks, num_nodes=num_ranks // 8, num_tokens=8192, **changes
    )


def routings(
    num_experts: int, top_k: int, num_groups: int, top_groups: int
) -> list[tuple[int, ...]]:
    """All choices of groups, and of experts of those groups."""
    size = num_experts // num_groups
    return [
        experts
        for groups in itertools.combinations(range(num_groups), top_groups)
        for experts in itertools.combinations(
            [e for e in range(num_experts) if e // size in groups], top_k
        )
    ]


@pytest.mark.parametrize(
    "case",
    [
        (12, 3, 1, 1),
        (12, 3, 2, 1),
        (12, 3, 6, 2),
        (12, 3, 4, 3),
        (12, 4, 12, 4),
        (12, 6, 2, 1),
        (8, 8, 1, 1),
    ],
)
def test_rows_per_token_are_the_means_of_all_routings(case: tuple[int, int, int, int]):
    """A token of each rank with each routing; on 2 nodes of 1 and 2, and on 4 of 1."""
    num_experts, top_k, num_groups, top_groups = case
    chosen = routings(*case)
    groups = {"num_expert_groups": num_groups, "topk_groups": top_groups}
    config = layer_config(hidden=16, ffn=8, num_experts=num_experts, top_k=top_k, **groups)
    for num_ranks, num_nodes in ((2, 2), (4, 2), (4, 4)):
        if num_groups == 6 and num_ranks == 4:  # no such plan
            continue
        per_rank, per_node = num_experts // num_ranks, num_ranks // num_nodes
        slots = ranks = nodes = link = read = 0
        for home in range(num_ranks):
            for experts in chosen:
                expert_ranks = [e // per_rank for e in experts]
                away = [rank for rank in expert_ranks if rank // per_node != home // per_node]
                slots += len(away)
                ranks += len(set(away))
                nodes += len({rank // per_node for rank in away})
                link += sum(
                    rank % per_node != home % per_node for rank in set(expert_ranks)
                )  # the rail keeps the index
                read += sum(rank % per_node != home % per_node for rank in expert_ranks)
        plan = plan_network(config, num_ranks=num_ranks, num_nodes=num_nodes, num_tokens=100)
        total = num_ranks * len(chosen)
        sent, home_trip = plan.dispatch, plan.combine
        assert sent.slots.rows == home_trip.slots.rows == pytest.approx(slots / total)
        assert sent.ranks.rows == home_trip.ranks.rows == pytest.approx(ranks / total)
        assert sent.nodes.rows == home_trip.nodes.rows == pytest.approx(nodes / total)
        assert sent.link.rows == pytest.approx(link / total)
        assert home_trip.link.rows == pytest.approx(read / total)


def test_the_page_shows_the_nodes_of_a_router_with_groups():
    """The numbers of docs/nodes.md for DeepSeek-V3's rule, best two of a group, with random scores of its router."""
    torch.manual_seed(0)
    rule = RoutingRule(score="sigmoid", num_expert_groups=8, topk_groups=4)
    x = torch.randn(20_000, 256)
    experts = route_tokens(Route(x, torch.eye(256), None, None, 8, rule)).topk_idx.long()
    documented = re.search(
        r"reaches (\S+), (\S+) and (\S+) other nodes", " ".join(PAGE.split())
    ).groups()
    for num_nodes, text in zip((2, 4, 8), documented, strict=True):
        actual = torch.zeros(len(x), num_nodes).scatter(1, experts // (256 // num_nodes), 1).mean()
        assert float(actual) * (num_nodes - 1) == pytest.approx(float(text), abs=0.015)
        assert of_layer(DEEPSEEK, 8 * num_nodes).dispatch.nodes.rows < float(text)


def test_bounds_of_layers_are_those_of_published_ratios():
    """Ratios from other sources: GEMMs over the network; and the effect of FP8 on the way out."""
    few = of_layer(QWEN, 16).exact
    assert few.gemms_s / few.hidden_s == pytest.approx(0.71, abs=0.005)
    bounds = {n: of_layer(DEEPSEEK, n).exact for n in (16, 32, 64)}
    assert {n: forward_at.bound for n, forward_at in bounds.items()} == {
        16: "GEMMs",
        32: "network",
        64: "network",
    }
    assert bounds[32].gemms_s / bounds[32].hidden_s == pytest.approx(0.86, abs=0.005)
    assert bounds[64].gemms_s / bounds[64].hidden_s == pytest.approx(0.595, abs=0.005)
    quantized = replace(DEEPSEEK, precision=Float8Block(), quantized_wire="forward")
    assert of_layer(quantized, 32).exact.network_s == pytest.approx(
        7.8e-3, rel=0.03
    )  # scales travel, too
    assert of_layer(quantized, 32).exact.gemms_s < bounds[32].gemms_s
    forward = Forward(network_s=1.0, link_s=4.0, gemms_s=2.0)
    assert (forward.serial_s, forward.hidden_s, forward.bound) == (7.0, 4.0, "NVLink")


def test_sizes_of_a_static_capacity_and_of_one_node():
    config = replace(QWEN, capacity=80_000, rail_capacity=5000)
    assert of_layer(config, 32).dispatch.fixed.num_bytes == pytest.approx(3 * 5000 * 4096)
    assert of_layer(QWEN, 32, dtype=torch.float32).dispatch.fixed.num_bytes == pytest.approx(
        3 * 8192 * 8192
    )
    one_node = of_layer(QWEN, 8)
    assert one_node.exact.network_s == one_node.fixed.network_s == 0
    sizes = Sizes(
        num_rows=65536, hidden=2048, ffn=768, top_k=8, num_experts=128, num_ranks=8, item_bytes=2
    )
    assert one_node.dispatch.link.num_bytes == pytest.approx(sizes.wire_bytes)
    assert one_node.dispatch.link.seconds == pytest.approx(sizes.wire_bytes / H200.link_bytes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_nodes": 3}, "num_ranks (16) must be divisible by num_nodes (3)"),
        ({"num_nodes": 0}, "num_nodes (0) must be at least 1"),
        ({"num_tokens": 0}, "num_tokens (0) must be at least 1"),
        ({"num_ranks": 24}, "num_experts (128) must be divisible by the number of ranks (24)"),
        ({"nic_gbs": 0.0}, "nic_gbs (0.0) must be finite and greater than 0"),
        ({"nic_gbs": float("nan")}, "nic_gbs (nan) must be finite"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, text: str):
    with pytest.raises(ArgumentError) as caught:
        plan_network(QWEN, **{"num_ranks": 16, "num_nodes": 2, "num_tokens": 8, **change})
    assert text in str(caught.value)


def test_groups_that_do_not_fit_are_refused():
    config = replace(QWEN, num_experts=24, router=RouterConfig(num_expert_groups=6, topk_groups=4))
    with pytest.raises(
        ArgumentError,
        match=r"num_expert_groups \(6\) must divide num_ranks \(4\), or be divisible by it",
    ):
        plan_network(config, num_ranks=4, num_nodes=2, num_tokens=8)


PLAN = "plan --hidden 2048 --ffn 768 --experts 128 --top-k 8 --ranks 16 --tokens 8192 --nodes"


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]):
    options = ["4", "--nic-gbs", "40", "--rail-capacity", "6000", "--groups=8", "--topk-groups=4"]
    assert cli.main([*PLAN.split(), *options]) == 0
    out = capsys.readouterr().out
    config = replace(
        QWEN,
        router=RouterConfig(num_expert_groups=8, topk_groups=4),
        capacity=80_000,
        rail_capacity=6000,
    )
    plan = plan_network(config, num_ranks=16, num_nodes=4, num_tokens=8192, nic_gbs=40)
    for name, trip in (("dispatch", plan.dispatch), ("combine", plan.combine)):
        for label, field in cli.TRAFFIC_SHOWN:
            part = getattr(trip, field)
            figures = re.search(
                rf"^{name}: {label} +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE
            ).groups()
            assert figures == (
                f"{part.rows:.2f}",
                f"{part.num_bytes / 1e6:.0f}",
                f"{part.seconds * 1e6:.0f}",
            )
    assert f" {plan.exact.gemms_s * 1e6:.0f}\n" in out
    for part in (plan.exact, plan.fixed):
        assert (
            f"serial {part.serial_s * 1e6:.0f} us; all hidden {part.hidden_s * 1e6:.0f} us, bound by network"
            in out
        )
    assert (
        f"forward {plan.step_forward_s * 1e6:.0f} us, backward {plan.step_backward_s * 1e6:.0f} us\n"
        in out
    )
    with pytest.raises(SystemExit):
        cli.main([*PLAN.split(), "3"])
    assert "num_ranks (16) must be divisible by num_nodes (3)" in capsys.readouterr().err


# GB/s that a rank sent in messages of a layer's size when the records were made, by file and number of tokens.
RATES = {
    "steps-h100-nodes2.json": {
        ("qwen3-30b", 2048): 155,
        ("qwen3-30b", 8192): 235,
        ("deepseek-like", 8192): 250,
    },
    "steps-h100-nodes2-capped.json": {
        ("qwen3-30b", 2048): 20
    },  # of up to 16 MiB: NCCL takes one channel for them
}


@pytest.mark.parametrize(
    ("file", "usual"), [("steps-h100-nodes2.json", 235), ("steps-h100-nodes2-capped.json", 42)]
)
def test_planned_steps_are_near_measured_ones(file: str, usual: int):
    """Within 15 %: two layers, two numbers of tokens, as graphs, which wait for no host."""
    records = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    measured = {
        (record["preset"], record["tokens"]): record["ms_median"]
        for record in records
        if record["variant"] == "layer, graph"
    }
    assert len(measured) == 4
    for (preset, num_tokens), ms in measured.items():
        gbs = RATES[file].get((preset, num_tokens), usual)
        sizes = {"num_ranks": 2, "num_nodes": 2, "num_tokens": num_tokens, "nic_gbs": gbs}
        plan = plan_network(config_of(PRESETS[preset]), **sizes)
        assert (plan.step_forward_s + plan.step_backward_s) * 1e3 == pytest.approx(ms, rel=0.15), (
            preset,
            num_tokens,
        )
