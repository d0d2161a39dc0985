"""Swapped transformers models in other tools: torch.compile, metrics, recorded routing."""

import contextlib
import copy
import weakref
from functools import partial

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import torch.distributed as dist
import transformers
from hf_cases import FAMILIES, VOCABULARY, batch_of, random_model
from hf_models import tiny_model
from small_model import assert_same, check_metrics, other_routing, step, weigh
from torch import nn
from worker import open_heap

import symmoe
from symmoe.integrations.transformers import StepConfig, swap_moe
from symmoe.integrations.transformers.forms import experts_modules

H = 32  # of the tiny models
STATIC = {"capacity": 256, "max_tokens": 64}
OPERATOR = torch.ops.symmoe.moe_forward.default


def tokens(rank: int = 0, num: int = 18) -> torch.Tensor:
    return torch.randn(1, num, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()


# -- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="exact"),
        pytest.param(STATIC | {"stash": "none"}, id="static", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_block_gives_the_eager_results(heap, family: str, options: dict):
    block = swap_moe(random_model(family), heap, step=StepConfig(**options)).model.layers[-1].mlp
    expected = step(block, tokens())
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(step(compiled, tokens()), expected)
    with symmoe.routing.record_routing(block) as routing, torch.no_grad():
        block(tokens())
    with symmoe.routing.replay_routing(block, other_routing(routing, 3)):
        result = step(block, tokens())
        assert_same(step(compiled, tokens()), result)
    assert not torch.allclose(result["y"], expected["y"], atol=1e-3)


# -- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False])
@run_on(2)
def test_generation_of_unequal_lengths_names_synced_gpus_in_its_error(
    rank: int, num_ranks: int, closes: bool
) -> None:
    """Rank 0 ends first; the error of the other rank names the argument that would prevent this."""
    options = {
        "do_sample": False,
        "max_new_tokens": 2 + 4 * rank,
        "pad_token_id": VOCABULARY,
        "use_cache": True,
    }
    with open_heap("cpu", timeout_s=4.0) as heap:
        model = swap_moe(random_model("qwen3_moe"), heap).eval()
        tokens = model.generate(batch_of(rank), synced_gpus=True, **options)
        assert tokens.shape == (2, 9 + 2 * rank + options["max_new_tokens"])
        kinds = symmoe.errors.ConfigMismatch if closes else symmoe.errors.PeerTimeout
        with (
            pytest.raises(kinds, match="pass synced_gpus=True to generate")
            if rank
            else contextlib.nullcontext()
        ):
            model.generate(batch_of(rank), **options)
        closes or dist.barrier()
        with contextlib.suppress(symmoe.errors.SymmoeError):
            heap.close()
        model_ref = weakref.ref(model)
        del model
        assert model_ref() is None  # nothing of the swap keeps a model that has been dropped


# -- metrics and recorded routing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@run_on(2)
def test_metrics_and_recorded_routing_are_those_of_the_unmodified_model(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, family: str
) -> None:
    """Records of a swapped model equal the arguments of the unmodified model's experts."""
    reference = random_model(family)
    chosen: dict[str, torch.Tensor] = {}
    for path, experts in experts_modules(reference):
        experts.register_forward_pre_hook(
            lambda module, args, path=path: chosen.__setitem__(path, args[1].clone())
        )
    batch = batch_of(rank)
    with torch.no_grad():
        reference(batch)
    model = swap_moe(reference, heap).train()
    # Order "rank": once per token and other rank, of which there is one.
    rows = {path: int((ids // 4 != rank).any(1).sum()) for path, ids in chosen.items()}
    expected = {path: (ids, H * 4 * rows[path], H * 4 * rows[path]) for path, ids in chosen.items()}
    assert expected
    routing = check_metrics(model, expected, lambda: model(batch, labels=batch).loss)
    assert all(torch.equal(routing[path], ids.int()) for path, ids in chosen.items())
    assert {ids.dtype for ids in routing.values()} == {torch.int32}


def test_numbers_for_a_sink_omit_unknown_values(heap):
    model = swap_moe(random_model("qwen3_moe"), heap).train()
    published: list[dict[str, float]] = []
    logger = symmoe.metrics.MetricsLogger(model, lambda numbers, _step: published.append(numbers))
    model(batch_of(0))
    (record,) = logger.step(3)
    assert record.name == "model.layers.1.mlp.experts"
    assert published[0]["moe/num_calls/max"] == 1.0
    assert not [name for name in published[0] if "aux_loss" in name or "_s/" in name]


# -- routing that is given ----------------------------------------------------------------------------------------


def route_by_hand(block: nn.Module, ids: torch.Tensor) -> None:
    """Makes the router of a stock block weigh these experts, by the model's paper; -1 has no weight."""
    router = getattr(block, "gate", None) or block.router
    is_v3 = hasattr(router, "e_score_correction_bias")
    rule = (
        {"score": "sigmoid", "scale": router.routed_scaling_factor}
        if is_v3
        else {"score": "softmax"}
    )

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(x.view(-1, H), router.weight, getattr(router, "bias", None))
        return logits, *weigh(logits, ids, **rule)

    router.forward = forward


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@run_on(2)
def test_transformers_routers_replay_routing(rank: int, num_ranks: int, heap, family: str) -> None:
    """A replay of recorded routing has the same bits. Other experts give the results of a model with all experts and
    the router of route_by_hand. Two micro-batches, whose activations one backward recomputes, give their sum."""
    reference = random_model(family).train()
    batch = batch_of(rank)
    model = swap_moe(copy.deepcopy(reference), heap)

    def results(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        loss = module(batch, labels=batch).loss
        loss.backward()
        return [
            loss.detach(),
            *(p.grad for name, p in module.named_parameters() if ".experts." not in name),
        ]

    with symmoe.routing.record_routing(model) as routing:
        want = results(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    with symmoe.routing.replay_routing(model, routing):
        got = results(model)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), gradients))

    choices, actual = [other_routing(routing, seed) for seed in (rank, 2 + rank)], []
    for choice in choices:
        for name, ids in choice.items():
            route_by_hand(reference.get_submodule(name.rpartition(".")[0]), ids)
        with symmoe.routing.replay_routing(model, choice):
            actual.append(results(model))
        torch.testing.assert_close(actual[-1], results(reference), rtol=1e-4, atol=1e-5)
        assert not all(map(partial(torch.allclose, rtol=1e-3, atol=1e-4), actual[-1], want))
    model.zero_grad()
    model.gradient_checkpointing_enable()
    with symmoe.routing.replay_routing(model, choices):
        losses = [model(batch, labels=batch).loss for _ in choices]
        sum(losses).backward()
    got = [
        parameter.grad for name, parameter in model.named_parameters() if ".experts." not in name
    ]
    assert all(torch.equal(loss, choice[0]) for loss, choice in zip(losses, actual, strict=True))
    torch.testing.assert_close(
        got, [a + b for a, b in zip(actual[0][1:], actual[1][1:], strict=True)]
    )
    with (
        symmoe.routing.balanced_routing(model),
        symmoe.routing.record_routing(model) as balanced,
        torch.no_grad(),
    ):
        model(batch)
    assert all(ids.flatten().bincount(minlength=8).float().std() < 1 for ids in balanced.values())
    assert all(not vars(module).get("forward") for module in model.modules())


def test_replay_scores_the_groups_of_the_replayed_experts(heap):
    """DeepSeek-V2 scores only the experts of its best groups; replayed experts may be in others."""
    config = tiny_model("deepseek_v2").config
    x = tokens().detach()
    groups, recorded = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}, []
    model = transformers.DeepseekV2ForCausalLM(type(config)(**{**config.to_dict(), **groups}))
    block = swap_moe(model, heap).model.layers[-1].mlp
    block.experts.register_forward_pre_hook(lambda _experts, args: recorded.append(args[1:]))
    choice = torch.rand(18, 8).argsort(1)[:, :2]
    with symmoe.routing.replay_routing(block, {"experts": choice}):
        block(x)
    with symmoe.routing.balanced_routing(block):
        block(x)
    block(x)
    assert torch.equal(recorded[0][0], choice)
    assert all(len(ids.unique()) == 8 for ids, _ in recorded[:2])
    for ids, weights in recorded:
        expected = (x[0] @ block.gate.weight.T).softmax(1).gather(
            1, ids
        ) * block.gate.routed_scaling_factor
        torch.testing.assert_close(weights, expected)


def test_hash_layers_are_not_recorded(heap):
    """DeepSeek-V4's first layers choose by the tokens' ids."""
    model, outputs = swap_moe(tiny_model("deepseek_v4"), heap), []
    for replayed in ({}, {"model.layers.1.mlp.experts": torch.rand(18, 8).argsort(1)[:, :2].int()}):
        with (
            symmoe.routing.replay_routing(model, replayed)
            if replayed
            else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            with symmoe.routing.record_routing(model) as routing:
                outputs.append(model(batch_of(0), use_cache=False)[0])
        assert routing.keys() == {"model.layers.1.mlp.experts"}
    assert all(torch.equal(ids, replayed[name]) for name, ids in routing.items())
    assert not torch.allclose(*outputs, atol=1e-3)
    stage = model.model.layers[0]  # of a pipeline, with no layer of which a router chooses
    with symmoe.routing.record_routing(stage) as routing, symmoe.routing.replay_routing(stage, {}):
        assert routing == {}
    with pytest.raises(symmoe.errors.ArgumentError, match="the model has 0"):
        symmoe.routing.routing_from_array(stage, torch.zeros(18, 1, 2, dtype=torch.int32))


def test_balanced_and_replayed_routing_of_no_tokens(heap):
    block = swap_moe(random_model("qwen3_moe"), heap).model.layers[-1].mlp
    for choice in (
        symmoe.routing.balanced_routing(block),
        symmoe.routing.replay_routing(block, {"experts": torch.zeros(0, 3).int()}),
    ):
        with choice, symmoe.routing.record_routing(block) as routing:
            block(tokens(num=0))
        assert routing["experts"].shape == (0, 3)


@run_on(2)
def test_routing_that_does_not_fit_raises_on_every_rank(rank: int, num_ranks: int, heap) -> None:
    model = swap_moe(random_model("olmoe"), heap)
    batch = batch_of(0)
    name = "model.layers.1.mlp.experts"
    with torch.no_grad(), symmoe.routing.record_routing(model) as routing:
        model(batch)
    part = routing[name].index_fill(1, torch.tensor(1), -1)
    wrong = {
        r"is for the layers \['model.layers.1.*the model has \['model.layers.0": {
            name: routing[name]
        },
        r"has shape \[5, 3\]; the call has \[tokens, K\] \[18, 3\]": routing
        | {name: routing[name][:5]},
        r"has for token 0 \[.*1\d.*\]; the layer has 8": routing | {name: routing[name] + 8},
        r"has for token 0 \[\d, -1": routing | {name: part},
        r"is of 0 micro-batches; layer 'model.layers.0.*runs in call 0": [],
    }
    for culprit in range(num_ranks):
        for text, spoilt in wrong.items():
            passed = spoilt if rank == culprit else [routing]
            with (
                pytest.raises(symmoe.errors.ArgumentError, match=text),
                torch.no_grad(),
                symmoe.routing.replay_routing(model, passed),
            ):
                model(batch)
