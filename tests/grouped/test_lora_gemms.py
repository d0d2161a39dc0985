"""Adapters as low-rank GEMMs against dense weights W + s B A in float64: values, what is allocated, and FLOPs."""

import itertools

import lora_cases as cases
import pytest
import torch
from worker import Watching

from symmoe import GroupedMLP, SymmetricHeap, make_plan
from symmoe.lora import merge_lora
from symmoe.moe.ep_step import expert_parallel_mlp


# -- experts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora_rank", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("weights", ["packed", "discrete"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_in_buffers_of_the_caller(
    device: str, bias: bool, weights: str, lora_rank: int, dtype: torch.dtype
):
    hidden = (
        40 if device == "cpu" else 520
    )  # wide enough for Hopper's own kernels, and no multiple of a tile
    parameters = cases.random_parameters(
        len(cases.SPLITS), hidden, cases.FFN, lora_rank, dtype, bias=bias
    )
    mlp = cases.make_experts(parameters, slice(None), weights=weights).to(device)
    x, probs, dy = cases.rows_of_experts(dtype, hidden)
    want_y, want, _ = cases.oracle_of_rows(parameters, x, probs, dy)
    x, probs, dy = x.to(device), probs.to(device), dy.to(device)
    out, grad_input_out = torch.full_like(x, -77.0), torch.full_like(x, -77.0)
    leaf, row_probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    rows = leaf * 1  # autograd hands the buffer to a producer
    seen = []
    rows.register_hook(seen.append)
    y = mlp(rows, list(cases.SPLITS), row_probs, out=out, grad_input_out=grad_input_out)
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr()
    assert seen[0].data_ptr() == grad_input_out.data_ptr()
    got = {
        "x": grad_input_out[: cases.ROWS],
        "probs": row_probs.grad[: cases.ROWS, None],
        **{name: mlp.get_parameter(name).grad for name in cases.NAMES[2:]},
    }
    assert cases.is_near(y.detach()[: cases.ROWS], want_y, dtype)
    for name, gradient in got.items():
        assert cases.is_near(gradient, want[name], dtype), name
    for buffer in (out, grad_input_out):
        assert (buffer[cases.ROWS :] == -77).all()
    assert not row_probs.grad[cases.ROWS :].any()
    assert all(
        parameter.grad is None for parameter in mlp.parameters() if not parameter.requires_grad
    )
    merge_lora(mlp)
    assert cases.is_near(mlp(x, list(cases.SPLITS), probs).detach()[: cases.ROWS], want_y, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_layer_with_adapters(dtype: torch.dtype):
    parameters = cases.random_parameters(len(cases.SPLITS), 40, cases.FFN, 4, dtype, bias=True)
    linear = cases.make_experts(parameters, slice(None)).fc1
    x, _, _ = cases.rows_of_experts(dtype, 40)
    leaves = {
        n: parameters[f"fc1.{n}"].double().requires_grad_()
        for n in ("weight", "bias", "lora_a", "lora_b")
    }
    rows64 = x[: cases.ROWS].double().requires_grad_()
    dense = leaves["weight"] + cases.ALPHA / 4 * leaves["lora_b"] @ leaves["lora_a"]
    groups = zip(rows64.split(cases.SPLITS), dense, leaves["bias"], strict=True)
    want = torch.cat([rows @ weight.T + bias for rows, weight, bias in groups])
    d_y = torch.randn(x.shape[0], want.shape[1]).to(dtype)
    want.backward(d_y[: cases.ROWS].double())
    rows = x.clone().requires_grad_()
    y = linear(rows, list(cases.SPLITS))
    y.backward(d_y)
    assert cases.is_near(y.detach()[: cases.ROWS], want.detach(), dtype)
    assert not y[cases.ROWS :].any()
    assert cases.is_near(rows.grad[: cases.ROWS], rows64.grad, dtype)
    for name in ("lora_a", "lora_b"):
        assert cases.is_near(linear.get_parameter(name).grad, leaves[name].grad, dtype), name
    assert linear.weight.grad is None


def step(mlp: GroupedMLP, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, probs, dy = cases.rows_of_experts(dtype, 40)
    y = mlp(x, list(cases.SPLITS), probs)
    y.backward(dy)
    return y.detach()


def test_some_of_the_parameters():
    """Only B is trained (arXiv:2308.03303); one layer is merged; weights and biases are trained after all."""
    parameters = cases.random_parameters(
        len(cases.SPLITS), 40, cases.FFN, 4, torch.float32, bias=True
    )
    whole, only_b, half, thawed = (cases.make_experts(parameters, slice(None)) for _ in range(4))
    y = step(whole)
    only_b.fc1.lora_a.requires_grad_(False)
    assert torch.equal(step(only_b), y)
    assert only_b.fc1.lora_a.grad is None
    assert torch.equal(only_b.fc1.lora_b.grad, whole.fc1.lora_b.grad)
    half.fc1.merge()
    torch.testing.assert_close(step(half), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half.fc2.lora_a.grad, whole.fc2.lora_a.grad, rtol=1e-4, atol=1e-4)
    assert half.fc1.lora_a.grad is None
    thawed.requires_grad_(True)
    assert torch.equal(step(thawed), y)
    _, _, weight_gradients = cases.oracle_of_rows(
        parameters, *cases.rows_of_experts(torch.float32, 40)
    )
    for name, gradient in weight_gradients.items():
        assert cases.is_near(thawed.get_parameter(name).grad, gradient, torch.float32), name
    assert thawed.fc1.bias.grad.any()
    assert thawed.fc2.bias.grad.any()
    assert torch.equal(thawed.fc1.lora_a.grad, whole.fc1.lora_a.grad)


# -- what it costs ----------------------------------------------------------------------------------------------------
class Allocations(Watching):
    """Notes the elements of every tensor that an operator makes new memory for."""

    def look(self, func, given, result) -> None:
        known = {memory_of(tensor) for tensor in tensors_in(given)}
        for tensor in tensors_in(result):
            if memory_of(tensor) not in known:
                self.seen.append((tensor.untyped_storage().nbytes() // tensor.itemsize, str(func)))

    def of_at_least(self, numel: int) -> list[tuple[int, str]]:
        return [entry for entry in self.seen if entry[0] >= numel]


def tensors_in(values) -> list[torch.Tensor]:
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)
    ]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "way", ["experts", *itertools.product(("all", "none"), ("packed", "expert-major"))], ids=str
)
def test_nothing_of_the_size_of_a_weight_is_made(way):
    num_experts, hidden, ffn, num_rows = 8, 64, 48, 20
    smallest = num_experts * hidden * ffn  # elements of W2
    parameters = cases.random_parameters(num_experts, hidden, ffn, 4, torch.float32, bias=True)
    x, dy = torch.randn(2, num_rows, hidden)
    probs = torch.rand(num_rows, 1)

    def run(experts: GroupedMLP) -> Allocations:
        rows = x.clone().requires_grad_()
        with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap, Allocations() as allocations:
            if way == "experts":
                y = experts(rows, [5, 0, 3, 2, 2, 4, 0, 4], probs[:, 0])
            else:
                chosen = (torch.arange(num_rows, dtype=torch.int32) % num_experts)[:, None]
                plan = make_plan(chosen, num_experts=num_experts, heap=heap)
                y = expert_parallel_mlp(rows, probs, experts, plan, stash=way[0], layout=way[1])
            y.backward(dy)
            del y
        assert rows.grad.any()
        assert experts.fc1.lora_a.grad.any()
        return allocations

    experts = cases.make_experts(parameters, slice(None))
    allocations = run(experts)
    assert len(allocations.seen) > 20
    assert allocations.of_at_least(smallest) == []
    experts.fc2.weight.requires_grad_(True)  # the control: its gradient is dense
    assert run(experts).of_at_least(smallest)
