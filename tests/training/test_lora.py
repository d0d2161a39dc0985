"""Adapters on grouped experts against experts computed one by one in float64, on one rank and expert-parallel."""

from unittest import mock

import oracle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from worker import Watching, assert_refused

from symmoe import GroupedMLP, MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.grouped import ScaledClampedSwiGLU
from symmoe.grouped.parameters import named_parameters
from symmoe.lora import LoRAGroupedLinear, add_lora, merge_lora, unmerge_lora
from symmoe.symm_mem.row_budget import RowBudget, RowHistory

GROUPS, H, I, RANK, ALPHA = 3, 16, 8, 4, 6.0
SPLITS = (4, 0, 5)


def make_mlp(
    *, train_b: bool = True, rank_dropout: float = 0.0, dtype=None, **options
) -> GroupedMLP:
    torch.manual_seed(0)
    mlp = GroupedMLP(GROUPS, H, I, **options)
    add_lora(mlp, rank=RANK, alpha=ALPHA, rank_dropout=rank_dropout, dtype=dtype)
    if train_b:
        fill_b(mlp)
    return mlp


def fill_b(module: nn.Module, seed: int = 1) -> None:
    """Gives B values other than zero, as after training."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("lora_b"):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(SPLITS), H, generator=generator)
    return (
        rows,
        torch.rand(len(rows), generator=generator) + 0.5,
        torch.randn(len(rows), H, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, ScaledClampedSwiGLU()])
def test_new_adapters_do_not_change_the_layer(dtype: torch.dtype, activation: nn.Module | None):
    mlp = make_mlp(train_b=False, dtype=torch.float32, activation=activation)
    assert all(is_expert for _, _, is_expert in named_parameters(mlp))
    plain = GroupedMLP(GROUPS, H, I, activation=activation)
    plain.load_state_dict(mlp.state_dict(), strict=False)
    rows, probs, _ = inputs()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert torch.equal(mlp(rows, SPLITS, probs), plain(rows, SPLITS, probs))
    rows = rows.bfloat16()
    for parameter in mlp.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    y = mlp(rows, SPLITS, probs)  # bf16 weights, fp32 adapters
    assert torch.equal(y, plain.bfloat16()(rows, SPLITS, probs))
    y.float().sum().backward()
    assert mlp.fc1.lora_b.grad.dtype == torch.float32
    assert mlp.fc1.lora_b.grad.any()
    assert not mlp.fc1.lora_a.grad.any()  # B is zero


def test_merge_and_unmerge_keep_the_results():
    mlp = make_mlp()
    rows, probs, _ = inputs()
    before = mlp(rows, SPLITS, probs)
    weight = mlp.fc1.weight.clone()
    merge_lora(mlp)
    merge_lora(mlp)  # once is enough
    merged = mlp(rows, SPLITS, probs)
    torch.testing.assert_close(merged, before, rtol=1e-5, atol=1e-6)
    assert not merged.requires_grad
    plain = GroupedMLP(GROUPS, H, I)
    plain.load_state_dict(mlp.state_dict())  # strict: no adapters in it
    assert torch.equal(plain(rows, SPLITS, probs), merged)
    unmerge_lora(mlp)
    torch.testing.assert_close(mlp.fc1.weight, weight, rtol=1e-5, atol=1e-6)
    assert not torch.equal(plain.fc1.weight, mlp.fc1.weight)
    torch.testing.assert_close(mlp(rows, SPLITS, probs), before, rtol=1e-5, atol=1e-6)
    for is_merged in (False, True):
        target = make_mlp(train_b=False)
        fill_b(target, seed=5)
        if is_merged:
            merge_lora(target)
        target.load_state_dict(mlp.state_dict())
        assert not target.fc1.is_merged
        assert torch.equal(target(rows, SPLITS, probs), mlp(rows, SPLITS, probs))
    merge_lora(target)
    target.load_state_dict(
        target.state_dict()
    )  # strict: what has no adapters goes into what has merged them
    assert target.fc1.is_merged


def test_a_step_of_the_optimizer_does_not_change_merged_adapters():
    mlp = make_mlp()
    rows, probs, dy = inputs()
    weight = mlp.fc1.weight.clone()
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.1)
    mlp(rows, SPLITS, probs).backward(dy)
    merge_lora(mlp)
    optimizer.step()
    unmerge_lora(mlp)
    torch.testing.assert_close(mlp.fc1.weight, weight, rtol=1e-5, atol=1e-6)
    mlp(rows, SPLITS, probs).backward(dy)
    assert mlp.fc1.lora_a.grad.any()


def test_rank_dropout_drops_ranks_in_training_only():
    mlp = make_mlp(rank_dropout=0.5)
    rows, probs, _ = inputs()
    without = make_mlp()(rows, SPLITS, probs)
    assert torch.equal(mlp.eval()(rows, SPLITS, probs), without)
    mlp.train()
    torch.manual_seed(0)
    delta = torch.stack([torch.bmm(b, a) for a, b in (mlp.fc1.adapters() for _ in range(4000))])
    assert not torch.equal(delta[0], delta[1])
    want = ALPHA / RANK * torch.bmm(mlp.fc1.lora_b, mlp.fc1.lora_a)
    torch.testing.assert_close(delta.mean(0), want, rtol=0, atol=0.1)
    ranks = {torch.linalg.matrix_rank(d, atol=1e-4).item() for d in delta[:50].flatten(0, 1)}
    assert ranks <= set(range(RANK + 1))
    assert len(ranks) > 2


def test_add_lora_refuses_wrong_arguments():
    for arguments, text in (
        ({"rank": 0}, r"rank \(0\)"),
        ({"rank_dropout": 1.0}, r"rank_dropout \(1.0\) must be in"),
    ):
        with pytest.raises(ArgumentError, match=text):
            add_lora(GroupedMLP(GROUPS, H, I), **({"rank": RANK, "alpha": ALPHA} | arguments))
    assert_refused(
        (lambda: add_lora(nn.Linear(2, 2), rank=RANK, alpha=ALPHA), "has no GroupedMLP"),
        (
            lambda: add_lora(make_mlp(), rank=RANK, alpha=ALPHA),
            r"fc1 \(LoRAGroupedLinear\) must be a GroupedLinear",
        ),
    )
    for option in ("delay_wgrad", "accumulate_into_main_grad"):
        mlp = GroupedMLP(GROUPS, H, I, **{option: True})
        with pytest.raises(ArgumentError, match=rf"fc1.{option} \(True\) must be False"):
            add_lora(mlp, rank=RANK, alpha=ALPHA)
        assert type(mlp.fc1) is not LoRAGroupedLinear
        assert mlp.fc1.weight.requires_grad


# -- expert-parallel --------------------------------------------------------------------------------------------------
EXPERTS, TOP_K = 4, 2


class Counted(nn.Module):
    """A parametrization that counts its evaluations."""

    num_calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return weight * 1.0


def dense(
    experts: GroupedMLP, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """The definition in float64, with adapters that are drawn once."""
    both = (experts.fc1, *experts.fc1.adapters()), (experts.fc2, *experts.fc2.adapters())
    w1, w2 = (fc.weight.double() + torch.bmm(b.double(), a.double()) for fc, a, b in both)
    biases = experts.fc1.bias.double(), experts.fc2.bias.double()
    return oracle.experts(x.double(), ids, probs.double(), w1, w2, biases)


@pytest.mark.parametrize("around", ["nothing", "reentrant checkpoint", "checkpoint"])
def test_a_call_draws_adapters_once(heap: SymmetricHeap, around: str):
    """Whether calls measure rows, have a row budget, or are repeated."""
    generator = torch.Generator().manual_seed(3)
    config = MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, router=None)
    layer = MoELayer(config, heap, experts=GroupedMLP(EXPERTS, H, I, bias=True))
    add_lora(layer, rank=RANK, alpha=ALPHA, rank_dropout=0.5)
    fill_b(layer)
    counts = []
    for fc in (layer.experts.fc1, layer.experts.fc2):
        for name in ("weight", "bias"):
            counts.append(Counted())
            parametrize.register_parametrization(fc, name, counts[-1])
    num_calls = [count.num_calls for count in counts]
    layer.set_experts(layer.experts)
    assert "bias=True" in str(layer)
    assert [count.num_calls for count in counts] == num_calls
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    budgets = {
        "measured": None,
        "budget": RowBudget(24, 0, 100, 100),
        "too small a budget": RowBudget(24, 0, 1, 1),
    }
    for number, (name, budget) in enumerate([*budgets.items()] * 3):
        x, dy = (torch.randn(12, H, generator=generator) for _ in range(2))
        ids = torch.rand(12, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        probs = torch.rand(12, TOP_K, generator=generator)
        torch.manual_seed(number)
        leaf = x.clone().requires_grad_()
        want = dense(layer.experts, leaf, ids, probs)
        state = torch.get_rng_state()
        expected = torch.autograd.grad((want * dy).sum(), [leaf, *trained])

        def forward(x: torch.Tensor, ids=ids, probs=probs) -> torch.Tensor:
            return layer(x, topk_idx=ids, probs=probs)[0]

        torch.manual_seed(number)
        before = [count.num_calls for count in counts]
        leaf = x.clone().requires_grad_()
        with mock.patch.object(RowHistory, "budget", lambda *_, budget=budget: budget):
            if around == "nothing":
                y = forward(leaf)
            else:
                y = checkpoint(forward, leaf, use_reentrant=around == "reentrant checkpoint")
            assert torch.equal(torch.get_rng_state(), state), name
            for parameter in trained:
                parameter.grad = None
            y.backward(dy)
        assert [count.num_calls for count in counts] == [
            n + 1 + (around != "nothing") for n in before
        ], name
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
        for parameter, gradient in zip([leaf, *trained], expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


class Backward(Watching):
    """Records the shapes of the results of the step's backward operator."""

    def look(self, func, arguments, result) -> None:
        if func is torch.ops.symmoe.moe_backward.default:
            self.noted += [tuple(gradient.shape) for gradient in result]


def test_the_operator_returns_no_gradients_of_frozen_weights(heap: SymmetricHeap):
    ffn = 3 * I  # no shape of a weight is that of an adapter
    layer = MoELayer(MoEConfig(hidden=H, ffn=ffn, num_experts=EXPERTS, top_k=TOP_K), heap)
    add_lora(layer, rank=RANK, alpha=ALPHA)
    frozen = {(EXPERTS, 2 * ffn, H), (EXPERTS, H, ffn)}
    for thaws in (False, True):
        layer.experts.fc1.weight.requires_grad_(thaws)
        with Backward() as mode:
            layer(torch.randn(7, H))[0].sum().backward()
        assert len(mode.noted) == 1 + 2 * thaws + 4  # probs, weights, A and B of both layers
        assert (frozen & set(mode.noted) != set()) == thaws


def test_adapters_in_torch_compile(heap: SymmetricHeap):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K), heap)
    add_lora(layer, rank=RANK, alpha=ALPHA)
    fill_b(layer)
    x, results = torch.randn(7, H), []
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y, _ = module(x)
        y.sum().backward()
        results.append([y.detach(), layer.experts.fc1.lora_a.grad, layer.experts.fc2.lora_b.grad])
        layer.zero_grad(set_to_none=True)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
