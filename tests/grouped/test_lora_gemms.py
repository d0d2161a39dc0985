"""Adapters as low-rank GEMMs against dense weights W + s B A in float64: values, allocations, and FLOPs."""

import itertools

import oracle
import pytest
import reference
import torch
from worker import Watching

from symmoe import GroupedMLP, SymmetricHeap, make_plan
from symmoe.lora import add_lora, merge_lora
from symmoe.moe.ep_step import expert_parallel_mlp

FFN = 24
ALPHA = 6.0
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of the largest number of a tensor
NAMES = ("x", "probs", "fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")
Tensors = dict[str, torch.Tensor]


def random_parameters(
    num_experts: int, hidden: int, ffn: int, rank: int, dtype: torch.dtype, bias: bool
) -> Tensors:
    """The parameters of all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(num_experts, *shape, generator=generator) * scale).to(dtype)

    parameters = {}
    for name, out_features, in_features in (("fc1", 2 * ffn, hidden), ("fc2", hidden, ffn)):
        parameters[f"{name}.weight"] = normal(out_features, in_features, scale=in_features**-0.5)
        parameters[f"{name}.lora_a"] = normal(rank, in_features, scale=in_features**-0.5)
        parameters[f"{name}.lora_b"] = normal(out_features, rank, scale=0.5)
        if bias:
            parameters[f"{name}.bias"] = normal(out_features, scale=0.5)
    return parameters


def make_experts(parameters: Tensors, experts: slice, **options) -> GroupedMLP:
    """A GroupedMLP with adapters and the parameters of these experts."""
    num_experts, hidden, ffn = parameters["fc2.weight"][experts].shape
    mlp = GroupedMLP(
        num_experts,
        hidden,
        ffn,
        dtype=parameters["fc2.lora_a"].dtype,
        bias="fc1.bias" in parameters,
        **options,
    )
    add_lora(mlp, rank=parameters["fc2.lora_a"].shape[1], alpha=ALPHA)
    mlp.load_state_dict({name: parameter[experts] for name, parameter in parameters.items()})
    return mlp


def is_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.double().cpu() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max())


SPLITS, TAIL = (4, 0, 9, 1), 3
ROWS = sum(SPLITS)


def rows_of_experts(
    dtype: torch.dtype, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, probs and the gradient of the output; NaN past the last row."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, ROWS + TAIL, hidden, generator=generator).to(dtype)
    probs = torch.rand(ROWS + TAIL, generator=generator) + 0.5
    for tensor in (x, dy, probs):
        tensor[ROWS:] = torch.nan
    return x, probs, dy


def oracle_of_rows(
    parameters: Tensors, x: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """y, the gradients of NAMES and those of the weights, by W + s B A in float64; each row goes to one expert."""
    expert = torch.tensor([e for e, count in enumerate(SPLITS) for _ in range(count)])[:, None]
    leaves = {
        name: tensor.detach().double().requires_grad_() for name, tensor in parameters.items()
    }
    x, probs = (leaf[:ROWS].detach().double().requires_grad_() for leaf in (x, probs[:, None]))
    scaling = ALPHA / parameters["fc1.lora_a"].shape[1]
    dense, biases = zip(
        *(reference.weights_of([leaves], name, scaling) for name in ("fc1", "fc2")), strict=True
    )
    for weight in dense:
        weight.retain_grad()
    y = oracle.experts(x, expert, probs, *dense, biases)
    y.backward(dy[:ROWS].double())
    gradients = {"x": x.grad, "probs": probs.grad} | {name: leaves[name].grad for name in NAMES[2:]}
    return (
        y.detach(),
        gradients,
        {f"fc{n}.weight": weight.grad for n, weight in enumerate(dense, 1)},
    )


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
    parameters = random_parameters(len(SPLITS), hidden, FFN, lora_rank, dtype, bias=bias)
    mlp = make_experts(parameters, slice(None), weights=weights).to(device)
    x, probs, dy = rows_of_experts(dtype, hidden)
    want_y, want, _ = oracle_of_rows(parameters, x, probs, dy)
    x = x.to(device)
    probs = probs.to(device)
    dy = dy.to(device)
    out = torch.full_like(x, -77.0)
    grad_input_out = torch.full_like(x, -77.0)
    row_probs = probs.clone().requires_grad_()
    rows = x.clone().requires_grad_() * 1  # autograd hands the buffer to a producer
    recorded = []
    rows.register_hook(recorded.append)
    y = mlp(rows, list(SPLITS), row_probs, out=out, grad_input_out=grad_input_out)
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr()
    assert recorded[0].data_ptr() == grad_input_out.data_ptr()
    got = {
        "x": grad_input_out[:ROWS],
        "probs": row_probs.grad[:ROWS, None],
        **{name: mlp.get_parameter(name).grad for name in NAMES[2:]},
    }
    assert is_near(y.detach()[:ROWS], want_y, dtype)
    for name, gradient in got.items():
        assert is_near(gradient, want[name], dtype), name
    for buffer in (out, grad_input_out):
        assert (buffer[ROWS:] == -77).all()
    assert not row_probs.grad[ROWS:].any()
    assert all(
        parameter.grad is None for parameter in mlp.parameters() if not parameter.requires_grad
    )
    merge_lora(mlp)
    assert is_near(mlp(x, list(SPLITS), probs).detach()[:ROWS], want_y, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_layer_with_adapters(dtype: torch.dtype):
    parameters = random_parameters(len(SPLITS), 40, FFN, 4, dtype, bias=True)
    linear = make_experts(parameters, slice(None)).fc1
    x, _, _ = rows_of_experts(dtype, 40)
    leaves = {
        n: parameters[f"fc1.{n}"].double().requires_grad_()
        for n in ("weight", "bias", "lora_a", "lora_b")
    }
    rows64 = x[:ROWS].double().requires_grad_()
    dense = leaves["weight"] + ALPHA / 4 * leaves["lora_b"] @ leaves["lora_a"]
    groups = zip(rows64.split(SPLITS), dense, leaves["bias"], strict=True)
    want = torch.cat([rows @ weight.T + bias for rows, weight, bias in groups])
    d_y = torch.randn(x.shape[0], want.shape[1]).to(dtype)
    want.backward(d_y[:ROWS].double())
    rows = x.clone().requires_grad_()
    y = linear(rows, list(SPLITS))
    y.backward(d_y)
    assert is_near(y.detach()[:ROWS], want.detach(), dtype)
    assert not y[ROWS:].any()
    assert is_near(rows.grad[:ROWS], rows64.grad, dtype)
    for name in ("lora_a", "lora_b"):
        assert is_near(linear.get_parameter(name).grad, leaves[name].grad, dtype), name
    assert linear.weight.grad is None


def step(mlp: GroupedMLP, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, probs, dy = rows_of_experts(dtype, 40)
    y = mlp(x, list(SPLITS), probs)
    y.backward(dy)
    return y.detach()


def test_partly_frozen_and_merged_adapters():
    """Only B is trained (arXiv:2308.03303); one layer is merged; weights and biases are unfrozen."""
    parameters = random_parameters(len(SPLITS), 40, FFN, 4, torch.float32, bias=True)
    trained, only_b, half, thawed = (make_experts(parameters, slice(None)) for _ in range(4))
    y = step(trained)
    only_b.fc1.lora_a.requires_grad_(False)
    assert torch.equal(step(only_b), y)
    assert only_b.fc1.lora_a.grad is None
    assert torch.equal(only_b.fc1.lora_b.grad, trained.fc1.lora_b.grad)
    half.fc1.merge()
    torch.testing.assert_close(step(half), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half.fc2.lora_a.grad, trained.fc2.lora_a.grad, rtol=1e-4, atol=1e-4)
    assert half.fc1.lora_a.grad is None
    thawed.requires_grad_(True)
    assert torch.equal(step(thawed), y)
    _, _, weight_gradients = oracle_of_rows(parameters, *rows_of_experts(torch.float32, 40))
    for name, gradient in weight_gradients.items():
        assert is_near(thawed.get_parameter(name).grad, gradient, torch.float32), name
    assert thawed.fc1.bias.grad.any()
    assert thawed.fc2.bias.grad.any()
    assert torch.equal(thawed.fc1.lora_a.grad, trained.fc1.lora_a.grad)


# -- what it costs ----------------------------------------------------------------------------------------------------
class Allocations(Watching):
    """Records the number of elements of every tensor for which an operator allocates memory."""

    def look(self, func, arguments, result) -> None:
        argument_memory = {memory_of(tensor) for tensor in tensors_in(arguments)}
        for tensor in tensors_in(result):
            if memory_of(tensor) not in argument_memory:
                self.noted.append((tensor.untyped_storage().nbytes() // tensor.itemsize, str(func)))

    def of_at_least(self, numel: int) -> list[tuple[int, str]]:
        return [entry for entry in self.noted if entry[0] >= numel]


def tensors_in(values) -> list[torch.Tensor]:
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)
    ]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "variant", ["experts", *itertools.product(("all", "none"), ("packed", "expert-major"))], ids=str
)
def test_adapters_allocate_no_tensor_of_a_weights_size(variant):
    num_experts, hidden, ffn, num_rows = 8, 64, 48, 20
    smallest = num_experts * hidden * ffn  # elements of W2
    parameters = random_parameters(num_experts, hidden, ffn, 4, torch.float32, bias=True)
    x, dy = torch.randn(2, num_rows, hidden)
    probs = torch.rand(num_rows, 1)

    def run(experts: GroupedMLP) -> Allocations:
        rows = x.clone().requires_grad_()
        with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap, Allocations() as allocations:
            if variant == "experts":
                y = experts(rows, [5, 0, 3, 2, 2, 4, 0, 4], probs[:, 0])
            else:
                chosen = (torch.arange(num_rows, dtype=torch.int32) % num_experts)[:, None]
                plan = make_plan(chosen, num_experts=num_experts, heap=heap)
                y = expert_parallel_mlp(
                    rows, probs, experts, plan, stash=variant[0], layout=variant[1]
                )
            y.backward(dy)
            del y
        assert rows.grad.any()
        assert experts.fc1.lora_a.grad.any()
        return allocations

    experts = make_experts(parameters, slice(None))
    allocations = run(experts)
    assert len(allocations.noted) > 20
    assert allocations.of_at_least(smallest) == []
    experts.fc2.weight.requires_grad_(True)  # the control: its gradient is dense
    assert run(experts).of_at_least(smallest)
