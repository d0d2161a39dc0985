"""The global loss, the expert bias and measures of balance. Losses of layers, also with padding: test_features.py."""

from typing import get_args

import pytest
import reference
import torch
from cluster import run_on
from worker import Findings

from symmoe import MoEConfig, MoELayer, RouterConfig, SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.kernels.routing_rule import Score
from symmoe.moe import balance

SEQUENCES, LENGTH, EXPERTS, TOP_K, H, I = 3, 7, 6, 2, 16, 8
TOKENS = SEQUENCES * LENGTH


def make_scores() -> torch.Tensor:
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    return logits.sigmoid().requires_grad_()


def test_normalised_scores_add_up_to_one():
    scores = make_scores().detach()
    scores[3] = 0.0
    shares = balance.normalised(scores.half())
    expected = torch.ones(TOKENS)
    expected[3] = 0.0
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(1), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        shares[0].double(), (r := scores[0].half().double()) / r.sum(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 300])  # of blocks of 128
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("coefs", [(0.5, 0.0), (0.0, 0.25), (0.5, 0.25)], ids=str)
def test_kernels_compute_the_losses_and_their_gradients(
    num_tokens: int, is_masked: bool, score: str, coefs: tuple[float, float]
):
    """The reference is the formulas, differentiated by autograd. One token's scores are all 0, and padding is NaN."""
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, 20, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(num_tokens, 20, dtype=torch.float64)
    scores[1:2] = 0.0
    scores.requires_grad_()
    load = torch.randint(0, 9, (20,))
    mask = torch.rand(num_tokens) < 0.7 if is_masked else None
    loss = balance.RouterLoss(*coefs, score, None)
    expected = loss(logits, scores, load, load, mask)
    (expected * 3).backward()
    copies = [tensor.detach().float() for tensor in (logits, scores)]
    if mask is not None:
        for tensor in copies:
            tensor[~mask] = torch.nan
    inputs = [tensor.requires_grad_() for tensor in copies]
    actual = balance.router_loss(loss, *inputs, load, load.int(), mask)
    (actual * 3).backward()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-7)
    for tensor, of_formula in zip(inputs, (logits, scores), strict=True):
        options = {"rtol": 1e-4, "atol": 1e-7, "check_dtype": False}
        torch.testing.assert_close(tensor.grad, of_formula.grad, **options)  # None is not zero


def test_no_tokens_give_zero_with_a_graph():
    scores = torch.empty(0, EXPERTS, requires_grad=True)
    total = balance.load_balance_loss(
        scores, torch.zeros(EXPERTS, dtype=torch.int32)
    ) + balance.z_loss(scores)
    ids = torch.empty(0, TOP_K, dtype=torch.int32)
    mask = torch.empty(0, dtype=torch.bool)
    for length in (0, 5):
        total = total + balance.sequence_balance_loss(scores, ids, length, mask)
    assert total.item() == 0
    total.backward()
    assert scores.grad.shape == (0, EXPERTS)


@pytest.mark.parametrize(
    ("bias", "load", "rate", "expected"),
    [
        ([0.5, -0.25, 0.0, 1.0], [10, 0, 4, 2], 0.01, [0.49, -0.24, 0.0, 1.01]),
        # 2^24 + 1 is not an fp32 number: a rounded mean would call expert 0 balanced.
        ([0.0] * 4, [2**24 + 1, 2**24 - 1, 2**24, 2**24], 1.0, [-1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_update_expert_bias_moves_towards_the_exact_mean(
    bias: list, load: list, rate: float, expected: list
):
    moved = torch.tensor(bias)
    balance.update_expert_bias(moved, torch.tensor(load, dtype=torch.int32), rate)
    torch.testing.assert_close(moved, torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize("bias", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3)])
def test_update_expert_bias_refuses_half_precision_and_another_shape(bias: torch.Tensor):
    with pytest.raises(ArgumentError, match=r"bias \(torch.*\) must be torch.float32 .* \(4,\)"):
        balance.update_expert_bias(bias, torch.ones(4, dtype=torch.int32), 0.01)


@pytest.mark.parametrize(
    ("load", "violation", "variation", "entropy"),
    [
        ([5, 5, 5, 5], 0, 0, 1),
        ([8, 0, 0, 0], 3, 3**0.5, 0),
        ([4, 4, 0, 0], 1, 1, 0.5),
        ([2, 4, 4, 6], 0.5, 0.5**0.5 / 2, 0.952820),
    ],
)
def test_measures_of_a_load(load: list[int], violation: float, variation: float, entropy: float):
    load = torch.tensor(load, dtype=torch.int32)
    assert balance.max_violation(load).item() == violation
    assert balance.coefficient_of_variation(load).item() == pytest.approx(variation)
    assert balance.load_entropy(load).item() == pytest.approx(entropy)
    for figure in (balance.max_violation, balance.coefficient_of_variation, balance.load_entropy):
        assert figure(torch.zeros_like(load)).item() == 0


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(SEQUENCES, LENGTH, H, generator=generator) + 0.2


@run_on(1, 2)
def test_the_global_loss_uses_the_load_of_the_step(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """The load of all micro-batches since the start of the step."""
    torch.manual_seed(1)
    sizes = {"hidden": H, "ffn": I, "num_experts": EXPERTS, "top_k": TOP_K}
    layer = MoELayer(
        MoEConfig(**sizes, router=RouterConfig(aux_loss_coef=0.5, aux_loss="global")), heap
    )
    load = torch.zeros(EXPERTS)
    for number in (0, 1, 2, 3):
        if number == 3:  # the next step
            balance.balance_step(layer)
            load.zero_()
        x = batch(rank, number)
        y, metrics = layer(x)
        for source in range(num_ranks):
            chosen = layer.router(batch(source, number).view(-1, H)).topk_idx
            load += reference.slots_of(layer.config, chosen)
        routed = layer.router(x.view(-1, H))
        want = reference.aux_loss(layer.config, x, None, load, routed)
        findings.close(f"global, micro-batch {number}", metrics.aux_loss, want, rtol=1e-6, atol=0)
        own_load = reference.slots_of(layer.config, routed.topk_idx)
        of_rank = reference.aux_loss(layer.config, x, None, own_load, routed)
        is_whole = num_ranks == 1 and number in (0, 3)
        differs = abs(float(of_rank.detach()) - float(want.detach())) > 1e-3
        findings.check(differs != is_whole, f"micro-batch {number} would do with its own load")
        (gradient,) = torch.autograd.grad(metrics.aux_loss, layer.router.weight, retain_graph=True)
        (expected,) = torch.autograd.grad(want, layer.router.weight)
        findings.close("gradient of global", gradient, expected, rtol=1e-4, atol=1e-7)
        (y.sum() + metrics.aux_loss).backward()


def needed_biases(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T, E] in float64: the bias that each token would need for each expert, by sorting the token's scores."""
    biased = (scores + bias).double().sort(1, descending=True).values
    return biased[:, top_k : top_k + 1] - scores.double()


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_quantile_of_a_histogram_is_near_the_exact_one(is_masked: bool):
    """Bins are (max - min + 2) / 1000 wide. Histograms of parts of the tokens sum to that of all."""
    generator = torch.Generator().manual_seed(5)
    scores = (torch.randn(900, 12, generator=generator) + torch.linspace(-2, 2, 12)).sigmoid()
    bias = torch.linspace(0.3, -0.4, 12)
    mask = torch.rand(900, generator=generator) < 0.6 if is_masked else None
    histogram = sum(
        balance.needed_bias_histogram(scores[part], bias, 3, None if mask is None else mask[part])
        for part in (slice(0, 500), slice(500, 500), slice(500, 900))
    )
    needed = needed_biases(scores, bias, 3)[slice(None) if mask is None else mask]
    assert histogram.sum(1).tolist() == [len(needed)] * 12
    expected = needed.quantile(3 / 12, dim=0)
    balance.update_bias_to_quantile(bias, histogram, 3)
    torch.testing.assert_close(
        bias.double(), expected - expected.mean(), rtol=0, atol=2 * 2.7 / 1000
    )


def test_a_bias_without_tokens_or_choice_stays():
    for num_tokens, top_k in (0, 2), (9, 4):
        bias = torch.tensor([0.1, -0.2, 0.3, 0.0])
        scores = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(1))
        histogram = balance.needed_bias_histogram(scores, bias, top_k)
        assert not histogram.any()
        balance.update_bias_to_quantile(bias, histogram, top_k)
        assert torch.equal(bias, torch.tensor([0.1, -0.2, 0.3, 0.0]))


@run_on(2)
def test_quantiles_balance_the_group(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """All tokens prefer the same experts; ranks have different numbers of tokens, in two micro-batches."""
    router = RouterConfig(score="sigmoid", expert_bias=True, bias_update="quantile")
    config = MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, router=router)
    torch.manual_seed(1)
    layer = MoELayer(config, heap)
    prefers = torch.randn(H, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(rank)
    calls = [torch.randn(900 + 200 * n + 100 * rank, H, generator=generator) for n in (0, 1)]
    violations = []
    for _ in range(6):
        results = [layer((call + prefers).requires_grad_()) for call in calls]
        for y, _ in results:
            y.sum().backward()
        violations.append(max(float(metrics.max_violation) for _, metrics in results))
        counted = layer.router.step_histogram.sum(1).tolist()
        findings.equal("own tokens", counted, [2000 + 200 * rank] * EXPERTS)
        balance.balance_step(layer)
        findings.check(not layer.router.step_histogram.any(), "the step has not started anew")
    findings.check(violations[0] > 0.8 and violations[-1] < 0.1, f"violations {violations}")
    biases = [torch.empty_like(layer.router.expert_bias) for _ in range(num_ranks)]
    torch.distributed.all_gather(biases, layer.router.expert_bias)
    findings.check(torch.equal(*biases), "ranks have other biases")


def test_compiled_and_retained_calls_count_once(heap: SymmetricHeap):
    router = RouterConfig(score="sigmoid", expert_bias=True, bias_update="quantile")
    config = MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, router=router)
    layer = MoELayer(config, heap)
    loads = []
    for call in layer, torch.compile(layer, backend="aot_eager"):
        y, _ = call(batch(0, 0).flatten(0, 1).requires_grad_())
        assert not layer.router.step_histogram.any()
        y.sum().backward(retain_graph=True)
        if call is layer:
            y.sum().backward()
        loads.append(layer.router.step_histogram.clone())
        layer.router.start_step()
    assert loads[0].sum() == TOKENS * EXPERTS
    assert torch.equal(*loads)
