"""Routing from outside the router: recorded and replayed, and balanced by force."""

from contextlib import nullcontext
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from activation_formula import SCORES
from cluster import run_on
from layers import layer_config
from stacks import Stack
from torch import nn
from torch.utils.checkpoint import checkpoint
from worker import assert_refused

from symmoe import MoEConfig, MoELayer, Router, RouterConfig, SymmetricHeap
from symmoe import routing as replay
from symmoe.errors import ArgumentError, ExpertIdError
from symmoe.kernels.routing_rule import Score
from symmoe.routing import (
    balanced_choice,
    balanced_routing,
    record_routing,
    replay_routing,
    routing_from_array,
    routing_to_array,
)

EXPERTS, TOP_K, H, I, TOKENS = 6, 3, 16, 8, 11


def make_model(heap: SymmetricHeap, **options) -> Stack:
    return Stack(heap, layer_config(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **options))


def tokens(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(0)).requires_grad_(
        requires_grad
    )


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("renormalize", [False, True])
def test_probs_of_a_replayed_choice_equal_the_reference(score: str, renormalize: bool):
    """Values and gradients in float64, for a choice that the router would not make, with a repeated expert and an empty
    slot."""
    fields = {"score": score, "renormalize": renormalize, "route_scale": 1.5, "expert_bias": True}
    router = Router(layer_config(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **fields))
    x = tokens()
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(1))
    ids[0] = torch.tensor([4, 4, 2])
    ids[1] = torch.tensor([-1, 3, -1])
    ids[2] = -1
    routed = router(x, topk_idx=ids)
    factors = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(2))
    (routed.probs * factors).sum().backward()
    assert torch.equal(routed.topk_idx, ids.int())
    assert not torch.equal(router(x).topk_idx, ids.int())

    weight = router.weight.detach().double().requires_grad_()
    logits = x.double() @ weight.T
    scores = SCORES[score](logits)
    probs = scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    if renormalize:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(routed.probs.double(), 1.5 * probs, rtol=1e-5, atol=1e-7)
    (1.5 * probs * factors).sum().backward()
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("router", [RouterConfig(), None])
def test_an_id_that_int32_cannot_hold_is_an_error(
    heap: SymmetricHeap, router: RouterConfig | None, monkeypatch: pytest.MonkeyPatch
):
    layer = MoELayer(
        MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, router=router), heap
    )
    ids = torch.arange(TOP_K).repeat(TOKENS, 1)
    ids[3, 1] = 2**32 + 1  # its lower half is an expert
    with pytest.raises(ExpertIdError, match="flat position 10"):
        layer(tokens(), topk_idx=ids, probs=torch.rand(TOKENS, TOP_K) if router is None else None)
    if router is not None:
        monkeypatch.setattr(
            replay, "_problem", lambda layers, routing: None
        )  # as if they were on a GPU
        with (
            pytest.raises(ExpertIdError, match="flat position 10"),
            replay_routing(layer, {"": ids}),
        ):
            layer(tokens())


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 0.8}, {"order": "slot", "expert_bias": True}], ids=str
)
def test_a_replayed_forward_is_the_recorded_one(heap: SymmetricHeap, options: dict):
    model = make_model(heap, **options)
    with record_routing(model) as routing:
        want = model(tokens())
    want.sum().backward()
    expected = model.gradients()
    assert set(routing) == {"layers.0", "layers.1"}
    assert all(
        ids.dtype == torch.int32 and ids.shape == (TOKENS, TOP_K) for ids in routing.values()
    )
    with replay_routing(model, routing):
        got = model(tokens())
    got.sum().backward()
    assert torch.equal(got, want)
    torch.testing.assert_close(model.gradients(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(tokens()), want)  # the hooks are gone
    ids = routing["layers.0"].clone()
    with record_routing(model.layers[0]) as again:
        model.layers[0](tokens(), topk_idx=ids)
    ids.zero_()  # a buffer of the caller's
    assert torch.equal(again[""], routing["layers.0"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0), None], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_uses_the_routing_of_its_micro_batch(
    heap: SymmetricHeap, use_reentrant: bool, order: tuple[int, ...] | None
):
    """The routing is of a rollout by another policy. Two micro-batches are in flight, with backwards in this order, or
    with one backward."""
    rollout = make_model(heap)
    policy = make_model(heap)
    batches = (tokens(True), tokens(True).flip(1))
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    routings, replayed, expected, again = (
        [],
        [],
        [],
        partial(checkpoint, use_reentrant=use_reentrant),
    )
    for x in batches:
        with torch.no_grad(), record_routing(rollout) as routing:
            rollout(x)
        routings.append(routing)
    policy.layers[1].router.register_forward_hook(lambda *a: replayed.append(a[2].topk_idx))
    for call in (policy, partial(again, policy)):
        for x, routing in zip(batches, routings, strict=True):
            with replay_routing(policy, routing):
                call(x).square().sum().backward()
            assert torch.equal(replayed[-1], routing["layers.1"])
        expected.append(policy.gradients())
    with replay_routing(policy, routings):
        losses = [policy(x, lambda layer, x: again(layer, x)[0]).square().sum() for x in batches]
        for loss in (sum(losses),) if order is None else map(losses.__getitem__, order):
            loss.backward()
    for want in expected:
        torch.testing.assert_close(want, [parameter.grad for parameter in policy.parameters()])
    with (
        nullcontext()
        if not use_reentrant
        else pytest.raises(ArgumentError, match="runs in call None")
    ):
        with replay_routing(policy, routings):
            sum(again(policy, x).sum() for x in batches).backward()


AGAIN = {
    "kept": lambda layer, x: layer(x),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "nested": lambda layer, x: checkpoint(AGAIN["reentrant"], layer, x, use_reentrant=True),
}


@pytest.mark.parametrize("again", list(AGAIN)[1:])
def test_backward_may_begin_at_a_middle_layer(heap: SymmetricHeap, again: str):
    """After the backward of the other micro-batch, through a retained graph, after a failed pass, and together with
    it."""
    model = make_model(heap)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(4 * TOKENS)]).int()
    routings = [
        dict(zip(("layers.0", "layers.1"), two, strict=True)) for two in ids.view(2, 2, TOKENS, -1)
    ]
    gradients = []
    for through in (AGAIN["kept"], AGAIN[again]):
        middles, batches = [], [tokens(True), tokens(True).flip(1).detach().requires_grad_()]

        def record_middle(
            layer: nn.Module, x: torch.Tensor, through=through, middles=middles
        ) -> torch.Tensor:
            middles.append(through(layer, x)[0])
            return middles[-1]

        with replay_routing(model, routings):
            ends = [model(x, record_middle).square().sum() for x in batches]
            first, _, second, _ = (middle.square().sum() for middle in middles)
            failing = batches[1].register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ends[1].backward(retain_graph=True)
            failing.remove()
            model.zero_grad()
            first.backward(retain_graph=True)
            ends[1].backward(retain_graph=True)
            first.backward(retain_graph=True)
            (ends[0] + second).backward()
        gradients.append([*[x.grad for x in batches], *model.gradients()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_arrays_of_an_engine_convert_to_routing_and_back(heap: SymmetricHeap, dtype: str):
    """With dense layers, packed sequences and padding, in this rank's order of rows."""
    model = make_model(heap)
    x = tokens()
    with torch.no_grad(), record_routing(model) as routing:
        y = model(x)
    array = routing_to_array(routing)
    with torch.no_grad(), record_routing(model) as in_turn:
        for layer in reversed(model.layers):
            layer(x)
    assert list(in_turn) == list(routing)
    assert array.dtype == torch.int16
    assert all(
        torch.equal(array[:, index], ids.short()) for index, ids in enumerate(routing.values())
    )
    engines = np.zeros((TOKENS, 5, TOP_K), dtype)  # layers 0, 2 and 3 are dense
    engines[:, [1, 4]] = array.numpy()
    padded = torch.zeros(3, 5, H)
    is_token = torch.arange(15).view(3, 5) % 4 > 0
    padded[is_token] = x
    rank_rows = torch.tensor([7, -1, 0, 10])
    for rows, its_tokens, is_real, expected in (
        (None, x, torch.ones(TOKENS, dtype=torch.bool), y),
        (is_token, padded, is_token, y),
        (rank_rows.numpy(), x[rank_rows], rank_rows >= 0, y[rank_rows[rank_rows >= 0]]),
    ):
        result = routing_from_array(model, engines, layers=(1, 4), rows=rows)
        if rows is None:  # in the engine's own dtype, too
            result = {name: engines[:, index] for name, index in zip(routing, (1, 4), strict=True)}
        with replay_routing(model, result), torch.no_grad():
            got = model(its_tokens)
        assert torch.equal(got[is_real], expected)
        assert torch.equal(got[~is_real], its_tokens[~is_real])  # no experts


def test_arrays_of_packed_sequences_with_a_common_prefix(heap: SymmetricHeap):
    """As vLLM and SGLang return `routed_experts`: [sequence - 1, layers, K] of each sequence, without the last token,
    and without a prefix that the cache had from an earlier sequence."""
    model = make_model(heap)
    first = tokens()[:6]
    second = torch.cat([first[:2], tokens()[6:9]])
    packed = torch.cat([first, second])
    with torch.no_grad(), record_routing(model) as routing:
        y = model(packed)
    full = routing_to_array(routing).numpy()
    of_first, of_second = full[:5], full[6:10][2:]
    rows = np.array([0, 1, 2, 3, 4, -1, 0, 1, 5, 6, -1])
    result = routing_from_array(model, np.concatenate([of_first, of_second]), rows=rows)
    with replay_routing(model, result), torch.no_grad():
        got = model(packed)
    assert torch.equal(got[rows >= 0], y[rows >= 0])
    assert torch.equal(got[rows < 0], packed[rows < 0])  # no experts: nobody reads the last token


@run_on(2)
def test_arrays_that_do_not_fit_raise_on_every_rank(
    rank: int, num_ranks: int, heap: SymmetricHeap
) -> None:
    model = make_model(heap)
    array = torch.zeros(TOKENS, 2, TOP_K, dtype=torch.int16)
    wrong = {
        r"layers are \[1\] of the 2 of array; the model has 2": {"layers": [1]},
        r"layers are \[0, 2\] of the 2 of array; the model has 2": {"layers": [0, 2]},
        "rows has 12 tokens; array has 11": {"rows": torch.ones(12, dtype=torch.bool)},
        "rows has 13 tokens; array has 11": {"rows": torch.arange(13)},
        r"rows \(torch.int64\) must be a mask of torch.bool, or numbers": {
            "rows": np.arange(TOKENS) // 9
        },
        r"rows \(torch.float32\) must be a mask": {"rows": torch.arange(11.0)},
        r"routing\['layers.0'\] has for token 0 \[-3, -3, -3\]; the layer has 6": {
            "array": array - 3
        },
        r"routing\['layers.0'\] has shape \[9, 3\].* \[11, 3\]": {"array": array[2:]},
        r"routing\['layers.0'\] has shape \[11, 2\].* \[11, 3\]": {"array": array[..., :2]},
        r"array has shape \[11, 6\]; it must be \[tokens, layers, K\]": {"array": array.flatten(1)},
        r"routing\['layers.0'\] \(torch.float32 \[11, 3\]\) must be of integers": {
            "array": array.float()
        },
    }
    for culprit in range(num_ranks):
        for text, arguments in wrong.items():
            passed = {"array": array, **(arguments if rank == culprit else {})}
            with pytest.raises(ArgumentError, match=text), torch.no_grad():
                with replay_routing(model, routing_from_array(model, **passed)):
                    model(tokens())


def test_recording_and_replaying_refuse_wrong_calls(heap: SymmetricHeap):
    model = make_model(heap)
    with record_routing(model) as routing:
        model(tokens())
        with pytest.raises(ArgumentError, match=r"layer 'layers.0' is called twice"):
            model(tokens())
    compiled = torch.compile(model, backend="eager")
    compiled(tokens())
    with record_routing(model) as again:
        compiled(tokens())
    assert all(torch.equal(again[name], ids) for name, ids in routing.items())
    for context in (replay_routing(model, routing), balanced_routing(model)):
        with (
            pytest.raises(
                ArgumentError, match="have not been called, or in a model compiled before"
            ),
            context,
        ):
            compiled(tokens())
    with replay_routing(model, routing):
        y = model(tokens(True), lambda layer, x: checkpoint(layer, x, use_reentrant=False)[0])
        assert_refused(
            (record_routing(nn.Linear(2, 2)).__enter__, "has no MoELayer"),
            (replay_routing(model, routing).__enter__, "is given its experts by another context"),
            (
                replay_routing(model, routing_to_array(routing)).__enter__,
                r"routing \(Tensor\) must be of dicts",
            ),
        )
    with replay_routing(model, routing):
        model(tokens())
        with pytest.raises(ArgumentError, match=r"layer 'layers.1' runs in call None"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(64, 8, 128), (37, 2, 6), (5, 4, 4), (100, 3, 7)]
)
def test_balanced_choice_has_equal_loads(num_tokens: int, top_k: int, num_experts: int):
    ids = balanced_choice(num_tokens, top_k, num_experts)
    load = torch.bincount(ids.flatten(), minlength=num_experts)
    assert ids.dtype == torch.int32
    assert ids.shape == (num_tokens, top_k)
    assert int(load.max() - load.min()) <= 1
    assert all(len(set(token)) == top_k for token in ids.tolist())


def test_balanced_choice_is_spread_over_ranks():
    """As far as random choices are: 8 of 128 experts on 8 ranks are on 5.3 ranks on average."""
    ranks = balanced_choice(4096, 8, 128) // 16
    mean = sum(len(set(token)) for token in ranks.tolist()) / 4096
    assert 4.5 < mean <= 8


def test_balanced_routing_of_a_model(heap: SymmetricHeap):
    model, loads = make_model(heap), []
    for layer in model.layers:
        layer.register_forward_hook(lambda *a: loads.append(a[2][1].expert_load))
    x = tokens().repeat(6, 1)
    with balanced_routing(model):
        y = model(x)
    y.sum().backward()
    assert [load.tolist() for load in loads] == [[33] * EXPERTS] * 2
    assert all(parameter.grad.any() for parameter in model.parameters())
    model(x)
    assert any(load.max() > 33 for load in loads[2:])
