"""Sequence-wise and global balance losses and padding in losses, against loops in float64."""

from __future__ import annotations

import pytest
import torch
from worker import Findings

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.moe import balance
from symmoe.moe.balance import balance_step

SEQUENCES, LENGTH, EXPERTS, TOP_K, H, I = 3, 7, 6, 2, 16, 8
TOKENS = SEQUENCES * LENGTH


def make_scores(seed: int = 0) -> torch.Tensor:
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return logits.sigmoid().requires_grad_()


def make_mask() -> torch.Tensor:
    """Another number of tokens in each sequence, none in the last."""
    mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    mask[0, 5:] = False
    mask[2] = False
    return mask.flatten()


def loop_loss(scores: torch.Tensor, load: list[float], tokens: list[int]) -> torch.Tensor:
    """E * sum f_i P_i over `tokens`, with the fractions of `load`; float64, differentiable."""
    if not tokens:
        return torch.zeros((), dtype=torch.float64)
    scores = scores.double()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(EXPERTS):
        mean = sum(scores[t, i] / scores[t].sum() for t in tokens) / len(tokens)
        total = total + EXPERTS * load[i] / max(sum(load), 1) * mean
    return total


def count(ids: torch.Tensor, tokens: list[int]) -> list[float]:
    load = [0.0] * EXPERTS
    for t in tokens:
        for i in ids[t].tolist():
            if i >= 0:
                load[i] += 1
    return load


@pytest.mark.parametrize("masked", [False, True])
def test_sequence_loss_equals_a_loop(masked: bool):
    scores, reference = make_scores(), make_scores()
    mask = make_mask() if masked else None
    ids = scores.detach().topk(TOP_K).indices.int()
    if masked:
        ids[~mask] = -1
    losses = []
    for s in range(SEQUENCES):
        tokens = [t for t in range(s * LENGTH, (s + 1) * LENGTH) if mask is None or mask[t]]
        losses.append(loop_loss(reference, count(ids, tokens), tokens))
    want = sum(losses) / SEQUENCES
    got = balance.sequence_balance_loss(balance.normalised(scores), ids, LENGTH, mask)
    got.backward()
    want.backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.grad, reference.grad, rtol=1e-4, atol=1e-8)
    whole = balance.load_balance_loss(balance.normalised(make_scores()), torch.tensor(count(ids, range(TOKENS))), mask)
    assert abs(float(whole.detach()) - float(got.detach())) > 1e-3  # a loss over all tokens is something else


@pytest.mark.parametrize("loss", ["load", "z"])
def test_padding_does_not_count(loss: str):
    mask = make_mask()
    load = torch.tensor([5, 1, 0, 9, 2, 3])

    def value(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return balance.z_loss(scores, mask) if loss == "z" else balance.load_balance_loss(scores, load, mask)

    scores, alone = make_scores(), make_scores()
    got, want = value(scores, mask), value(alone[mask], None)
    got.backward()
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.grad, alone.grad, rtol=1e-5, atol=1e-9)
    assert not scores.grad[~mask].any()
    assert abs(float(value(make_scores(), None).detach() - want.detach())) > 1e-3
    nowhere = value(make_scores(), torch.zeros_like(mask))
    assert nowhere.item() == 0


def test_coefficient_of_variation():
    assert balance.coefficient_of_variation(torch.tensor([2, 4, 4, 6])).item() == pytest.approx(0.5**0.5 / 2)
    assert balance.coefficient_of_variation(torch.zeros(4, dtype=torch.int32)).item() == 0


# -- in a layer -------------------------------------------------------------------------------------------------------


def make_layer(heap: SymmetricHeap, **options) -> MoELayer:
    torch.manual_seed(1)
    config = MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, aux_loss_coef=0.5, **options)
    return MoELayer(config, heap)


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(SEQUENCES, LENGTH, H, generator=torch.Generator().manual_seed(10 * rank + number)) + 0.2


def check_layer_losses(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer = make_layer(heap, aux_loss="sequence", z_loss_coef=0.1, capacity_factor=0.5)
        x, mask = batch(rank, 0), make_mask().view(SEQUENCES, LENGTH)
        _, metrics = layer(x, mask)
        findings.check(int(metrics.num_over_capacity) > 0, "the capacity factor drops nothing")
        plain = make_layer(heap)
        plain.load_state_dict(layer.state_dict())
        routed = plain.router(x.view(-1, H))
        losses = []
        for s in range(SEQUENCES):
            tokens = [t for t in range(s * LENGTH, (s + 1) * LENGTH) if mask.flatten()[t]]
            losses.append(loop_loss(routed.scores, count(routed.topk_idx, tokens), tokens))
        z = routed.logits[mask.flatten()].double().logsumexp(1).square().mean()
        findings.close("sequence", metrics.aux_loss, 0.5 * sum(losses) / SEQUENCES + 0.1 * z, rtol=1e-6, atol=0)

        layer = make_layer(heap, aux_loss="global")
        seen: list[torch.Tensor] = []  # everybody's choice so far in the step
        for number in (0, 1, 2, 3):
            if number == 3:  # the next step
                balance_step(layer)
                seen.clear()
            y, metrics = layer(batch(rank, number))
            seen += [layer.router(batch(r, number).view(-1, H)).topk_idx for r in range(num_ranks)]
            load = [float(n) for n in torch.bincount(torch.cat(seen).flatten(), minlength=EXPERTS)]
            routed = layer.router(batch(rank, number).view(-1, H))
            want = 0.5 * loop_loss(routed.scores, load, list(range(TOKENS)))
            findings.close(f"global, micro-batch {number}", metrics.aux_loss, want, rtol=1e-6, atol=0)
            alone = 0.5 * loop_loss(routed.scores, count(routed.topk_idx, list(range(TOKENS))), list(range(TOKENS)))
            is_alone = num_ranks == 1 and number in (0, 3)
            differs = abs(float(alone.detach()) - float(want.detach())) > 1e-3
            findings.check(differs != is_alone, f"micro-batch {number} would do with its own load")
            (gradient,) = torch.autograd.grad(metrics.aux_loss, layer.router.weight, retain_graph=True)
            (wanted,) = torch.autograd.grad(want, layer.router.weight)
            findings.close("gradient of global", gradient, wanted, rtol=1e-4, atol=1e-7)
            (y.sum() + metrics.aux_loss).backward()

        layer = make_layer(heap, capacity_factor=0.75)
        _, metrics = layer(x)
        routed = layer.router(x.view(-1, H))
        findings.check(bool((routed.topk_idx < 0).any()), "the capacity factor drops nothing")
        load = count(routed.chosen_idx, list(range(TOKENS)))
        want = 0.5 * loop_loss(routed.scores, load, list(range(TOKENS)))
        findings.close("before drops", metrics.aux_loss, want, rtol=1e-6, atol=0)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_losses_of_a_layer(cluster, num_ranks: int):
    assert cluster(num_ranks).findings(check_layer_losses) == []
