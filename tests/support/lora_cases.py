"""Experts with adapters, and what they must compute: dense weights W + s B A in float64."""

import oracle
import reference
import torch

from symmoe import GroupedMLP
from symmoe.lora import add_lora

FFN = 24
ALPHA = 6.0
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of the largest number of a tensor
NAMES = ("x", "probs", "fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")
Tensors = dict[str, torch.Tensor]


def random_parameters(
    num_experts: int, hidden: int, ffn: int, rank: int, dtype: torch.dtype, bias: bool
) -> Tensors:
    """Of all experts; the same on every rank."""
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


def make_experts(parameters: Tensors, mine: slice, **options) -> GroupedMLP:
    """A GroupedMLP with adapters that has the parameters of these experts."""
    num_experts, hidden, ffn = parameters["fc2.weight"][mine].shape
    dtype, rank = parameters["fc2.lora_a"].dtype, parameters["fc2.lora_a"].shape[1]
    mlp = GroupedMLP(
        num_experts, hidden, ffn, dtype=dtype, bias="fc1.bias" in parameters, **options
    )
    add_lora(mlp, rank=rank, alpha=ALPHA)
    mlp.load_state_dict({name: parameter[mine] for name, parameter in parameters.items()})
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
    """y, the gradients of NAMES and those of the weights, by the weights W + s B A, in float64, of rows that go to one
    expert each."""
    expert = torch.tensor([e for e, count in enumerate(SPLITS) for _ in range(count)])[:, None]
    leaves = {
        name: tensor.detach().double().requires_grad_() for name, tensor in parameters.items()
    }
    x, probs = (each[:ROWS].detach().double().requires_grad_() for each in (x, probs[:, None]))
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
