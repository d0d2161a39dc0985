"""Megatron-Core's GPTModel with our layer against the same model with its own alltoall layer, on CPUs over gloo.

With Megatron's experts everything is the same bits: losses, all gradients, router counts. With our experts it is equal
within fp32 rounding: their sigmoid is 1 / (1 + exp(-x)) and the derivative is written out, where Megatron has
torch's silu and its gradient; the largest difference of a tensor stays below ROUNDING of its largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_checkpoints
import megatron_pipeline
import megatron_training
import pytest
from cluster import Cluster
from megatron_cases import compare, compare_layers
from megatron_training import SIGMOID_BIAS

from symmoe.errors import ArgumentError, CapacityError, HeapExhausted

pytest.importorskip("megatron.core")
pytest.importorskip("psutil", reason="megatron's checkpoint writer hangs without it")

_SLOW = pytest.mark.slow
SHARED = {"moe_shared_expert_intermediate_size": 40}
FIELDS = {
    "plain": {},
    "aux loss, z loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 1e-3,
    },
    "sequence and global aux loss": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02],
    },
    "sigmoid, expert bias, groups": {
        **SIGMOID_BIAS,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "one expert per token": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sinkhorn": {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
    "capacity, by prob": {"moe_expert_capacity_factor": 0.6},
    "capacity, by position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "capacity, padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "shared expert with gate": {**SHARED, "moe_shared_expert_gate": True},
    "overlapped shared expert": {**SHARED, "moe_shared_expert_overlap": True},
    "overlapped shared expert with gate": {**SHARED, "moe_shared_expert_overlap": True, "moe_shared_expert_gate": True},
    "recomputed MoE layers": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recomputed layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recomputed shared experts": {
        **SHARED,
        "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts"],
    },
    "recomputed activations": {
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "clamped, gpt-oss": {"activation_func": "quick_gelu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "gelu": {"activation_func": "gelu", "gated_linear_unit": False},
    "squared relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Cluster]]:
    """`ranks(n)`: processes of this module alone, because the shim changes torch.cuda in them."""
    started: dict[int, Cluster] = {}

    def get(num_ranks: int) -> Cluster:
        if num_ranks not in started or not started[num_ranks].alive:
            started[num_ranks] = Cluster(num_ranks)
        return started[num_ranks]

    yield get
    for cluster in started.values():
        cluster.close()


@pytest.mark.parametrize("name", FIELDS)
def test_equals_alltoall_on_two_ranks(ranks, name: str):
    for result in ranks(2).run(compare, ep=2, fields=FIELDS[name]):
        assert result["num_zeros"] <= 4
        assert result["staging_copies"] == 0


def test_padded_capacity_is_sent_padded(ranks):
    """Both ranks send each expert ceil(24 tokens * 3 / 8 experts * 1.0) rows, chosen or not."""
    results = ranks(2).run(compare, ep=2, fields=FIELDS["capacity, padded"])
    assert all(rows == [2 * 9] * 4 for result in results for rows in result["received"])


@pytest.mark.parametrize("name", ["plain", "sigmoid, expert bias, groups", "overlapped shared expert"])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), *(pytest.param(4, ep, marks=_SLOW) for ep in (4, 2))])
def test_equals_alltoall_on_other_layouts(ranks, num_ranks: int, ep: int, name: str):
    ranks(num_ranks).run(compare, ep=ep, fields=FIELDS[name])


_NODES = {  # ranks, of a node, configuration, options
    "2 x 1": (2, 1, "overlapped shared expert", {}),
    "2 x 1, sums of nodes": (2, 1, "plain", {"order": "rank"}),
    "2 x 1, recomputed": (2, 1, "recomputed MoE layers", {}),
    "2 x 1, static": (2, 1, "aux loss, z loss", {"capacity": 150}),
    "2 x 2, shared expert": (4, 2, "shared expert with gate", {}),
    "2 x 2": (4, 2, "sigmoid, expert bias, groups", {}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if number == 0 else _SLOW) for number, name in enumerate(_NODES)]
)
def test_equals_alltoall_on_several_nodes(ranks, layout: str):
    """On virtual nodes, with Megatron's own layers as on one: the order "slot" has the same bits."""
    num_ranks, ranks_per_node, name, options = _NODES[layout]
    given = {"options": options, "ranks_per_node": ranks_per_node, "exact": "order" not in options}
    for result in ranks(num_ranks).run(compare, ep=num_ranks, fields=FIELDS[name], **given):
        assert result["num_zeros"] <= 4
        assert any(map(sum, result["received"]))


@pytest.mark.slow
def test_tensor_and_sequence_parallel(ranks):
    ranks(4).run(compare_layers, ep=4, tp=2)


@pytest.mark.parametrize("options", [{"order": "rank"}, {"capacity": 150}, {"capacity": 150, "order": "rank"}])
def test_options_of_dispatch_equal_alltoall(ranks, options: dict[str, Any]):
    results = ranks(2).run(compare, ep=2, fields={}, options=options, exact=False)
    assert all(result["staging_copies"] == 0 for result in results)


def test_ranks_with_different_numbers_of_tokens(ranks):
    results = ranks(2).run(compare, ep=2, fields=FIELDS["overlapped shared expert"], num_sequences=(3, 1))
    totals = [sum(result["received"][0]) for result in results]
    assert sum(totals) == (3 + 1) * 12 * 3


@pytest.mark.parametrize("recompute", ["plain", "recomputed MoE layers"])
def test_rank_and_expert_without_tokens(ranks, recompute: str):
    fields = {**SIGMOID_BIAS, **FIELDS[recompute]}
    results = ranks(2).run(compare, ep=2, fields=fields, bias=megatron_training.ALL_ON_RANK_0)
    assert all(min(rows) == 0 < max(rows) for rows in results[0]["received"])
    assert all(max(rows) == 0 for rows in results[1]["received"])


@pytest.mark.parametrize("fault", ["scaled combine", "rolled tokens", "detached probs"])
def test_mistakes_are_found(ranks, fault: str):
    ranks(2).run(compare, ep=2, fields={}, fault=fault)
    ranks(2).run(compare_layers, ep=2, tp=1, fault=fault)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), pytest.param(4, 2, marks=_SLOW), (2, 2)])
def test_main_grad_equals_megatrons_gradients(ranks, num_ranks: int, ep: int, overlap: bool):
    """Under Megatron's DDP, with two micro-batches: fused, delayed, both. Four ranks: experts have two replicas."""
    ranks(num_ranks).run(megatron_training.main_grads, ep=ep, overlap=overlap)


def test_main_grad_of_a_rank_without_tokens(ranks):
    """Its hooks must fire all the same, or a reduction that overlaps with backward would wait for ever."""
    first, second = ranks(2).run(megatron_training.main_grads, ep=2, overlap=True, bias=megatron_training.ALL_ON_RANK_0)
    assert all(max(rows) > 0 for rows in first)
    assert all(max(rows) == 0 for rows in second)


def test_wrong_main_grad_is_found(ranks):
    ranks(2).run(megatron_training.main_grads, ep=2, overlap=False, fault=True)


@pytest.mark.parametrize("name", ["plain", "overlapped shared expert", "recomputed MoE layers"])
def test_several_micro_batches_in_flight(ranks, name: str):
    ranks(2).run(megatron_pipeline.several_in_flight, fields=FIELDS[name])


@pytest.mark.parametrize("num_chunks", [2, pytest.param(None, marks=_SLOW)])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), pytest.param(4, 2, marks=_SLOW)])
@pytest.mark.parametrize("name", ["plain", "recomputed MoE layers", "recomputed layers", "overlapped shared expert"])
def test_pipeline_of_two_stages(ranks, num_ranks: int, ep: int, num_chunks: int | None, name: str):
    """By Megatron's 1F1B, and its interleaved schedule (chunks of the model), with four micro-batches."""
    ranks(num_ranks).run(megatron_pipeline.pipelined, ep=ep, num_chunks=num_chunks, fields=FIELDS[name])


_STAGES = {  # stage, of, layers of a chunk, micro-batches in turn, recomputed
    "first of 2": (0, 2, 2, 2, False),
    "last of 2": (1, 2, 1, 4, False),
    "second of 3, recomputed": (1, 3, 2, 4, True),
}


@pytest.mark.parametrize("name", _STAGES)
def test_heap_of_an_interleaved_stage_is_exact(ranks, name: str):
    """A heap of heap_bytes(num_layers = layers of a chunk * micro-batches in flight) is enough, no smaller one is."""
    names = ("stage", "num_stages", "layers_per_chunk", "group_size", "recompute")
    ranks(2).run(megatron_pipeline.heap_of_stage, **dict(zip(names, _STAGES[name], strict=True)))


@pytest.mark.parametrize("name", ["plain", "recomputed MoE layers"])
def test_a_step_leaves_nothing_on_the_heap(ranks, name: str):
    ranks(2).run(megatron_training.memory, fields=FIELDS[name], keeps_rows=name == "plain")


@pytest.mark.parametrize("name", ["plain", "recomputed MoE layers"])
def test_heap_of_the_planned_size_is_enough(ranks, name: str):
    ranks(2).run(megatron_training.smallest_heap, fields={**SIGMOID_BIAS, **FIELDS[name]})


@pytest.mark.parametrize("name", ["plain", "capacity, by prob", "recomputed layers"])
@pytest.mark.parametrize("form", ["experts", "dispatcher"])
def test_metrics_and_recorded_routing_are_those_of_megatrons_routers(ranks, form: str, name: str):
    ranks(2).run(megatron_training.watched, fields=FIELDS[name], form=form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["experts", "dispatcher"])
def test_torch_compile_leaves_the_trips_alone(ranks, form: str):
    ranks(2).run(megatron_training.compiled, form=form)


def test_half_precision_is_as_good_as_megatrons(ranks):
    ranks(2).run(megatron_training.half_precision)


def test_experts_start_from_megatrons_generators(ranks):
    first, second = ranks(2).run(megatron_training.initial_experts)
    weights = [*first, *second]
    for i, weight in enumerate(weights):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)  # init_method_std
        assert all(not weight.equal(other) for other in weights[:i])


def test_state_of_other_forms(ranks):
    ranks(2).run(megatron_training.other_state)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("expert tensor parallelism", ArgumentError, "expert_tensor_parallel_size (2) must be 1"),
        ("another group's heap", ArgumentError, "open the heap over that group"),
        ("capacity with others' experts", ArgumentError, "capacity (64) needs SymmExperts"),
        ("too small a capacity", CapacityError, "more than capacity (8)"),
        ("too small a heap", HeapExhausted, "lease 'received rows'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, what: str, error: type, text: str):
    ranks(2).run(megatron_training.refused, what=what, error=error, text=text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "per_expert_keys"),
    [
        ("symmoe", False),
        pytest.param("symmoe", True, marks=pytest.mark.slow),
        pytest.param("megatron", False, marks=pytest.mark.slow),
        ("megatron", True),
    ],
)
def test_checkpoints_move_between_layouts_and_kinds_of_layers(
    ranks, tmp_path: Path, saved_by: str, per_expert_keys: bool
):
    """Saved at EP 2; loaded at EP 2, EP 1 x 2 replicas, EP 4 and EP 2 x 2 replicas, by both kinds of layers."""
    layouts = ((2, 1), (4, 4)) if per_expert_keys else ((2, 2), (2, 1), (4, 4), (4, 2))
    how = {"path": str(tmp_path), "per_expert_keys": per_expert_keys}
    ranks(2).run(megatron_checkpoints.save, ep=2, form=saved_by, fault=False, **how)
    for num_ranks, ep in layouts:
        for loaded_by in ("symmoe", "megatron"):
            if loaded_by == saved_by == "megatron":
                continue
            results = ranks(num_ranks).run(megatron_checkpoints.load, ep=ep, form=loaded_by, **how)
            assert [result["wrong"] for result in results] == [[]] * num_ranks
            # All experts of both layers and both linears, on the ranks of each replica.
            assert sum(len(result["experts"]) for result in results) == 2 * 2 * 8 * num_ranks // ep


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
def test_distributed_optimizer(ranks, ep: int):
    """Parts of parameters on the data-parallel ranks: of all parameters at EP 1, of dense ones at EP 2."""
    ranks(2).run(megatron_checkpoints.trained, ep=ep)


@pytest.mark.slow
def test_wrong_checkpoint_is_found(ranks, tmp_path: Path):
    how = {"path": str(tmp_path), "per_expert_keys": False}
    ranks(2).run(megatron_checkpoints.save, ep=2, form="symmoe", fault=True, **how)
    wrong = [result["wrong"] for result in ranks(2).run(megatron_checkpoints.load, ep=1, form="symmoe", **how)]
    names = [f"decoder.layers.{layer}.mlp.experts.5.linear_fc1.weight" for layer in (0, 1)]
    assert wrong == [[text for name in names for text in (name, f"exp_avg of {name}")]] * 2
