"""Swapped transformers models as others see them: torch.compile, selective checkpointing, metrics, recorded routing."""

import contextlib
import copy
import weakref
from functools import partial

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import torch.distributed as dist
from hf_cases import FAMILIES, VOCABULARY, batch_of, random_model
from small_model import assert_same, check_metrics, counted_barriers, step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from worker import open_heap

import symmoe
from symmoe.errors import ArgumentError, ConfigMismatch, PeerTimeout, SymmoeError
from symmoe.integrations.transformers import StepConfig, swap_moe
from symmoe.integrations.transformers.families import experts_modules

H = 32  # of the tiny models
STATIC = {"capacity": 256, "max_tokens": 64}
OPERATOR = torch.ops.symmoe.moe_forward.default


def tokens(rank: int = 0, num: int = 18) -> torch.Tensor:
    return torch.randn(1, num, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()


# -- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_block_is_one_graph(heap, family: str):
    block = swap_moe(random_model(family), heap).model.layers[-1].mlp
    explanation = torch._dynamo.explain(block)(tokens())
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
    assert "symmoe.moe_forward" in explanation.graphs[0].code


@pytest.mark.parametrize("options", [{}, STATIC | {"stash": "none"}], ids=["exact", "static"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled_block_gives_the_eager_results(heap, family: str, options: dict):
    block = swap_moe(random_model(family), heap, step=StepConfig(**options)).model.layers[-1].mlp
    expected = step(block, tokens())
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(step(compiled, tokens()), expected)


@pytest.mark.slow
@run_on(2)
def test_whole_model_on_two_ranks(rank: int, num_ranks: int, heap: symmoe.SymmetricHeap) -> None:
    """Loss and gradients of a compiled model are those of the unmodified one."""
    reference = random_model("deepseek_v3", num_hidden_layers=2)  # the first is dense
    batch = batch_of(rank)
    want = reference(batch, labels=batch)
    want.loss.backward()
    model = swap_moe(copy.deepcopy(reference), heap)
    model.zero_grad()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(batch, labels=batch)
    got.loss.backward()
    own = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in own:  # all but the experts', which have seen other ranks' tokens
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)


def test_compiled_block_with_adapters(heap):
    block = swap_moe(random_model("qwen3_moe"), heap).model.layers[-1].mlp
    without = step(block, tokens())["y"]
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    adapters = symmoe.add_lora(block, rank=4, alpha=8.0)
    for adapter in adapters:
        nn.init.normal_(adapter, std=0.3)

    def found(module: nn.Module) -> list[torch.Tensor]:
        y = module(tokens())
        y = y[0] if isinstance(y, tuple) else y
        return [y, *torch.autograd.grad(y.square().sum(), adapters)]

    expected = found(block)
    assert not torch.allclose(expected[0], without, atol=1e-3)  # the adapters count
    for got, want in zip(found(torch.compile(block, fullgraph=True, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


# -- selective checkpointing --------------------------------------------------------------------------------------


def test_checkpoint_that_saves_the_operator_crosses_the_wire_once(heap):
    block = swap_moe(random_model("mixtral"), heap).model.layers[-1].mlp
    expected = step(block, tokens())
    forward, barriers = block.forward, {}
    policies = {"full": noop_context_fn, "saved": partial(create_selective_checkpoint_contexts, [OPERATOR])}
    for name, contexts in policies.items():
        block.forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        with counted_barriers(heap) as phases:
            assert_same(step(block, tokens()), expected)
        barriers[name] = len(phases)
    assert barriers["full"] - barriers["saved"] == 5  # plan 1, dispatch 2, combine 2


# -- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False])
@run_on(2)
def test_ranks_that_generate_at_unequal_lengths_hear_of_synced_gpus(rank: int, num_ranks: int, closes: bool) -> None:
    """Rank 0 ends first and leaves: the other's error says what would have kept it."""
    options = {"do_sample": False, "max_new_tokens": 2 + 4 * rank, "pad_token_id": VOCABULARY, "use_cache": True}
    with open_heap("cpu", timeout_s=4.0) as heap:
        model = swap_moe(random_model("qwen3_moe"), heap).eval()
        tokens = model.generate(batch_of(rank), synced_gpus=True, **options)
        assert tokens.shape == (2, 9 + 2 * rank + options["max_new_tokens"])
        kinds = ConfigMismatch if closes else PeerTimeout
        with pytest.raises(kinds, match="pass synced_gpus=True to generate") if rank else contextlib.nullcontext():
            model.generate(batch_of(rank), **options)
        closes or dist.barrier()
        with contextlib.suppress(SymmoeError):
            heap.close()
        left = weakref.ref(model)
        del model
        assert left() is None  # nothing of the swap keeps a model that has been dropped


# -- metrics and recorded routing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@run_on(2)
def test_metrics_and_recorded_routing_are_those_of_the_unmodified_model(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, family: str
) -> None:
    """Records of a swapped model beside what the unmodified one's experts were asked for."""
    reference = random_model(family)
    chosen: dict[str, torch.Tensor] = {}
    for path, experts in experts_modules(reference):
        experts.register_forward_pre_hook(lambda module, args, path=path: chosen.__setitem__(path, args[1].clone()))
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


def test_numbers_for_a_sink_leave_out_what_is_not_known(heap):
    model = swap_moe(random_model("qwen3_moe"), heap).train()
    seen: list[dict[str, float]] = []
    logger = symmoe.MetricsLogger(model, lambda numbers, _step: seen.append(numbers))
    model(batch_of(0))
    (record,) = logger.step(3)
    assert record.name == "model.layers.1.mlp.experts"
    assert seen[0]["moe/num_calls/max"] == 1.0
    assert not [name for name in seen[0] if "aux_loss" in name or "_s/" in name]


def test_a_compiled_model_is_watched_too(heap):
    model = swap_moe(random_model("qwen3_moe"), heap).train()
    experts = model.model.layers[1].mlp
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    compiled(tokens())
    logger = symmoe.MetricsLogger(experts)  # after it has been compiled
    experts(tokens())
    (want,) = logger.step(0)
    compiled(tokens())
    (got,) = logger.step(1)
    assert got == want
    assert got.num_calls == 1
    logger.close()
    compiled(tokens())
    assert logger.step(2)[0].num_calls == 0


def test_routing_cannot_be_given_to_transformers_routers(heap):
    model = swap_moe(random_model("olmoe"), heap)
    with torch.no_grad(), symmoe.record_routing(model) as routing:
        model(batch_of(0))
    text = r"layer 'model.layers.0.mlp.experts' \(ExpertParallelExperts\) must be a MoELayer"
    for context in (symmoe.replay_routing(model, routing), symmoe.balanced_routing(model)):
        with pytest.raises(ArgumentError, match=text), context:
            pass
