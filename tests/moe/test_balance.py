"""Balance losses, padding in losses, the expert bias and figures of balance, against loops in float64 and by hand."""

from collections.abc import Callable, Sequence

import pytest
import torch
from cluster import run_on
from worker import Findings

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.moe import balance

SEQUENCES, LENGTH, EXPERTS, TOP_K, H, I = 3, 7, 6, 2, 16, 8
TOKENS = SEQUENCES * LENGTH
ALL = range(TOKENS)


def make_scores() -> torch.Tensor:
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    return logits.sigmoid().requires_grad_()


def make_mask() -> torch.Tensor:
    """Another number of tokens in each sequence, none in the last."""
    mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    mask[0, 5:] = False
    mask[2] = False
    return mask.flatten()


def loop_loss(
    scores: torch.Tensor, load: Sequence[float], tokens: Sequence[int] = ALL
) -> torch.Tensor:
    """E * sum f_i P_i over `tokens`, with the fractions of `load`; float64, differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(EXPERTS):
        mean = sum(scores[t].double()[i] / scores[t].double().sum() for t in tokens) / max(
            len(tokens), 1
        )
        total = total + EXPERTS * load[i] / max(sum(load), 1) * mean
    return total


def count(ids: torch.Tensor, tokens: Sequence[int] | None = None) -> list[int]:
    chosen = [i for t in (range(len(ids)) if tokens is None else tokens) for i in ids[t].tolist()]
    return [chosen.count(i) for i in range(EXPERTS)]


def loop_of_sequences(scores: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the sequences of their losses."""
    sequences = [
        [t for t in range(s * LENGTH, (s + 1) * LENGTH) if mask[t]] for s in range(SEQUENCES)
    ]
    return sum(loop_loss(scores, count(ids, tokens), tokens) for tokens in sequences) / SEQUENCES


def assert_same(
    got: torch.Tensor, want: torch.Tensor, scores: torch.Tensor, reference: torch.Tensor
) -> None:
    """Values, and gradients of what they were computed from."""
    got.backward()
    want.backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.grad, reference.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    "shares", [balance.normalised, lambda x: x.softmax(-1)], ids=["normalised", "softmax"]
)
def test_load_balance_loss_equals_a_loop(shares: Callable[[torch.Tensor], torch.Tensor]):
    scores, reference = make_scores(), make_scores()
    load = count(scores.topk(TOP_K).indices)
    got, want = (
        balance.load_balance_loss(shares(scores), torch.tensor(load)),
        loop_loss(shares(reference), load),
    )
    assert (
        abs(want.item() - 1) > 0.005
    )  # the case is unbalanced enough for the test to mean something
    assert_same(got, want, scores, reference)


@pytest.mark.parametrize("masked", [False, True])
def test_sequence_loss_equals_a_loop(masked: bool):
    scores, reference = make_scores(), make_scores()
    mask = make_mask() if masked else None
    ids = scores.detach().topk(TOP_K).indices.int()
    if masked:
        ids[~mask] = -1
    want = loop_of_sequences(reference, ids, make_mask() if masked else [True] * TOKENS)
    assert_same(
        balance.sequence_balance_loss(balance.normalised(scores), ids, LENGTH, mask),
        want,
        scores,
        reference,
    )
    whole = balance.load_balance_loss(
        balance.normalised(make_scores()), torch.tensor(count(ids)), mask
    )
    assert (
        abs(float(whole.detach()) - float(want.detach())) > 1e-3
    )  # a loss over all tokens is something else


def test_z_loss_equals_float64():
    scores, reference = make_scores(), make_scores()
    assert_same(
        balance.z_loss(scores), reference.double().logsumexp(1).square().mean(), scores, reference
    )


def test_normalised_scores_add_up_to_one():
    scores = make_scores().detach()
    scores[3] = 0.0
    shares, wanted = balance.normalised(scores.half()), torch.ones(TOKENS)
    wanted[3] = 0.0
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(1), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        shares[0].double(), (r := scores[0].half().double()) / r.sum(), rtol=1e-6, atol=0
    )


LOAD = torch.tensor([5, 1, 0, 9, 2, 3])
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    "z": balance.z_loss,
    "load": lambda scores, mask: balance.load_balance_loss(scores, LOAD, mask),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_does_not_count(loss: str):
    value, mask, scores, kept = LOSSES[loss], make_mask(), make_scores(), make_scores()
    want = value(kept[mask], None)
    assert_same(value(scores, mask), want, scores, kept)
    assert not scores.grad[~mask].any()
    assert abs(float(value(make_scores(), None).detach() - want.detach())) > 1e-3
    assert value(make_scores(), torch.zeros_like(mask)).item() == 0


def test_no_tokens_give_zero_with_a_graph():
    scores = torch.empty(0, EXPERTS, requires_grad=True)
    total = balance.load_balance_loss(
        scores, torch.zeros(EXPERTS, dtype=torch.int32)
    ) + balance.z_loss(scores)
    ids, mask = torch.empty(0, TOP_K, dtype=torch.int32), torch.empty(0, dtype=torch.bool)
    for length in (0, 5):
        total = total + balance.sequence_balance_loss(scores, ids, length, mask)
    assert total.item() == 0
    total.backward()
    assert scores.grad.shape == (0, EXPERTS)


@pytest.mark.parametrize(
    ("bias", "load", "rate", "wanted"),
    [
        ([0.5, -0.25, 0.0, 1.0], [10, 0, 4, 2], 0.01, [0.49, -0.24, 0.0, 1.01]),
        # 2^24 + 1 is not an fp32 number: a rounded mean would call expert 0 balanced.
        ([0.0] * 4, [2**24 + 1, 2**24 - 1, 2**24, 2**24], 1.0, [-1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_update_expert_bias_moves_towards_the_exact_mean(
    bias: list, load: list, rate: float, wanted: list
):
    moved = torch.tensor(bias)
    balance.update_expert_bias(moved, torch.tensor(load, dtype=torch.int32), rate)
    torch.testing.assert_close(moved, torch.tensor(wanted), rtol=0, atol=1e-7)


@pytest.mark.parametrize("bias", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3)])
def test_update_expert_bias_refuses_half_precision_and_another_shape(bias: torch.Tensor):
    with pytest.raises(ArgumentError, match=r"bias \(torch.*\) must be torch.float32 .* \(4,\)"):
        balance.update_expert_bias(bias, torch.ones(4, dtype=torch.int32), 0.01)


@pytest.mark.parametrize(
    ("load", "imbalance", "variation"),
    [
        ([5, 5, 5, 5], 1, 0),
        ([8, 0, 0, 0], 4, 3**0.5),
        ([3, 1, 0, 0], 3, 1.5**0.5),
        ([2, 4, 4, 6], 1.5, 0.5**0.5 / 2),
    ],
)
def test_figures_of_a_load(load: list[int], imbalance: float, variation: float):
    load = torch.tensor(load, dtype=torch.int32)
    assert balance.imbalance(load).item() == imbalance == balance.max_violation(load).item() + 1
    assert balance.coefficient_of_variation(load).item() == pytest.approx(variation)
    for figure in (balance.imbalance, balance.max_violation, balance.coefficient_of_variation):
        assert figure(torch.zeros_like(load)).item() == 0


# -- in a layer -------------------------------------------------------------------------------------------------------
def make_layer(heap: SymmetricHeap, **options) -> MoELayer:
    torch.manual_seed(1)
    config = MoEConfig(
        hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, aux_loss_coef=0.5, **options
    )
    return MoELayer(config, heap)


def batch(rank: int, number: int) -> torch.Tensor:
    return (
        torch.randn(
            SEQUENCES, LENGTH, H, generator=torch.Generator().manual_seed(10 * rank + number)
        )
        + 0.2
    )


@run_on(1, 2)
def test_the_global_loss_of_a_layer(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    layer = make_layer(heap, aux_loss="global")
    seen: list[torch.Tensor] = []  # everybody's choice so far in the step
    for number in (0, 1, 2, 3):
        if number == 3:  # the next step
            balance.balance_step(layer)
            seen.clear()
        y, metrics = layer(batch(rank, number))
        seen += [layer.router(batch(r, number).view(-1, H)).topk_idx for r in range(num_ranks)]
        routed = layer.router(batch(rank, number).view(-1, H))
        want = 0.5 * loop_loss(routed.scores, count(torch.cat(seen)))
        findings.close(f"global, micro-batch {number}", metrics.aux_loss, want, rtol=1e-6, atol=0)
        of_rank = 0.5 * loop_loss(routed.scores, count(routed.topk_idx))
        is_whole = num_ranks == 1 and number in (0, 3)
        differs = abs(float(of_rank.detach()) - float(want.detach())) > 1e-3
        findings.check(differs != is_whole, f"micro-batch {number} would do with its own load")
        (gradient,) = torch.autograd.grad(metrics.aux_loss, layer.router.weight, retain_graph=True)
        (wanted,) = torch.autograd.grad(want, layer.router.weight)
        findings.close("gradient of global", gradient, wanted, rtol=1e-4, atol=1e-7)
        (y.sum() + metrics.aux_loss).backward()
