"""Kernels get discrete weights and gradients that lie like a packed tensor as one tensor, and others as a table."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial

import grouped_cases as cases
import pytest
import torch
from torch import nn

from symmoe import GroupedLinear
from symmoe.errors import ArgumentError
from symmoe.grouped.weights import lay_side_by_side, packed_view
from symmoe.kernels import twin
from symmoe.kernels.operands import TensorTable

G = cases.TINY.num_groups


def kinds(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, list[str]]:
    """The forms of matrices in later calls of these kernels: "packed" or "table", by name."""
    calls: dict[str, list[str]] = {name: [] for name in names}

    def recording(
        name: str, kernel: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        matrices = args[3 if name == "grouped_gemm_wgrad" else 1]
        calls[name].append("table" if isinstance(matrices, TensorTable) else "packed")
        assert isinstance(matrices, TensorTable) or matrices.is_contiguous()
        return kernel(*args, **kwargs)

    for name in names:
        monkeypatch.setattr(twin, name, partial(recording, name, getattr(twin, name)))
    return calls


def scatter(layer: GroupedLinear) -> None:
    """Moves every weight into separate memory."""
    for weight in layer.weight_parameters():
        weight.data = weight.data.clone()


def descend(layer: GroupedLinear) -> None:
    """Moves weights side by side, but the last one first, like parameters in Megatron's buffers."""
    weights = layer.weight_parameters()
    packed = torch.stack([weight.data for weight in reversed(weights)])
    for weight, part in zip(reversed(weights), packed, strict=True):
        weight.data = part


def leave_gaps(layer: GroupedLinear) -> None:
    """Moves weights to equal distances, with gaps."""
    weights = layer.weight_parameters()
    packed = torch.stack(
        [part for weight in weights for part in (weight.data, torch.full_like(weight, 7.0))]
    )
    for weight, part in zip(weights, packed[::2], strict=True):
        weight.data = part


def move_one(layer: GroupedLinear) -> None:
    """Moves one weight in the middle."""
    layer.weight2.data = layer.weight2.data.clone()


def join_others(layer: GroupedLinear) -> None:
    """Moves weights into the middle of a larger storage, like a trainer's buffer."""
    weights = layer.weight_parameters()
    memory = torch.cat(
        [torch.zeros(64), *(weight.data.flatten() for weight in weights), torch.zeros(64)]
    )
    size = weights[0].numel()
    for g, weight in enumerate(weights):
        weight.data = memory[64 + g * size : 64 + (g + 1) * size].view(weight.shape)


MOVES = {
    "table": (scatter, descend, leave_gaps, move_one),
    "packed": (
        lambda layer: None,
        join_others,
        lambda layer: layer.to(torch.float64).to(torch.float32),
    ),
}


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize(
    ("kind", "move"), [(kind, move) for kind, moves in MOVES.items() for move in moves]
)
def test_linear_passes_adjacent_weights_as_packed(monkeypatch, kind, move, main_grad):
    """Packed or as a table, the bits are those of a packed weight."""
    case = cases.Case(main_grad=main_grad, buffers=())
    inputs = cases.linear_inputs(case)
    want = cases.run_linear(case, inputs)
    layer = cases.make_linear(case, inputs.w1, inputs.b1, weights="discrete")
    move(layer)
    calls = kinds(monkeypatch, "grouped_gemm", "grouped_gemm_dgrad")
    got = cases.run(lambda x, scale: layer(x, inputs.splits), {"fc": layer}, inputs, case)
    assert calls == {"grouped_gemm": [kind], "grouped_gemm_dgrad": [kind]}
    cases.assert_same_results(got, want, cases.TINY)
    cases.assert_near_oracle(got, cases.linear_oracle(inputs, case), case, cases.TINY)


def test_weights_may_move_between_forward_and_backward(monkeypatch):
    case = cases.Case(buffers=())
    inputs = cases.linear_inputs(case)
    layer = cases.make_linear(case, inputs.w1, inputs.b1, weights="discrete")
    calls = kinds(monkeypatch, "grouped_gemm", "grouped_gemm_dgrad")
    x = inputs.x.clone().requires_grad_()
    y = layer(x, inputs.splits)
    scatter(layer)
    y.backward(inputs.d_y)
    first, x.grad = x.grad, None
    layer(x, inputs.splits).backward(inputs.d_y)
    cases.assert_same_bits(x.grad[: cases.TINY.num_used], first[: cases.TINY.num_used])
    assert (calls["grouped_gemm"], calls["grouped_gemm_dgrad"][1]) == (["packed", "table"], "table")


@pytest.mark.parametrize("moved", [(), ("fc1",), ("fc2",), ("fc1", "fc2")], ids=str)
def test_layers_of_an_mlp_are_packed_separately(monkeypatch, moved):
    case = cases.Case(buffers=())
    inputs = cases.make_inputs(case)
    call, layers = cases.make_way("mlp", case, inputs, weights="discrete")
    for name in moved:
        scatter(layers[name])
    calls = kinds(
        monkeypatch, "grouped_gemm_act", "grouped_gemm", "grouped_gemm_dact", "grouped_gemm_dgrad"
    )
    ran = cases.run(lambda x, scale: call(x, scale, inputs.splits), layers, inputs, case)
    expected = {name: ["table" if name in moved else "packed"] for name in layers}
    assert [*calls.values()] == [expected["fc1"], expected["fc2"], expected["fc2"], expected["fc1"]]
    cases.assert_near_oracle(ran, cases.mlp_oracle(inputs, case), case, cases.TINY)


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("where", ["fresh", "side by side", "anywhere", "descending"])
def test_adjacent_gradients_are_written_as_packed(monkeypatch, where, delayed):
    case = cases.Case(main_grad=where != "fresh", delayed=delayed, buffers=())
    inputs = cases.linear_inputs(case)
    packed, layer = (
        cases.make_linear(case, inputs.w1, inputs.b1, weights=form)
        for form in ("packed", "discrete")
    )
    gradients = torch.full((G, *layer.weight0.shape), 0.5)
    if where in ("side by side", "descending"):
        order = layer.weight_parameters()
        for weight, part in zip(
            order if where == "side by side" else reversed(order), gradients, strict=True
        ):
            weight.main_grad = part
    elif where == "anywhere":
        layer.weight2.main_grad = torch.full_like(layer.weight2, 0.5)
    calls = kinds(monkeypatch, "grouped_gemm_wgrad")
    want, got = (
        cases.run(
            lambda x, _, module=module: module(x, inputs.splits),
            {"fc": module},
            inputs,
            case,
            finish=module.backward_dw,
        )
        for module in (packed, layer)
    )
    assert calls["grouped_gemm_wgrad"] == [
        "packed",
        "packed" if where in ("fresh", "side by side") else "table",
    ]
    cases.assert_same_results(got, want, cases.TINY)
    if where == "fresh":  # and so can be reduced as one
        assert packed_view([weight.grad for weight in layer.weight_parameters()]) is not None


# -- moves of weights -------------------------------------------------------------------------------------------------
def saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(layer: nn.Module) -> nn.Module:
    layer_to_load = GroupedLinear(G, 8, 16, weights="discrete")
    layer_to_load.load_state_dict(
        {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    )
    return layer_to_load


def assigned(layer: nn.Module) -> nn.Module:
    layer_to_load = GroupedLinear(G, 8, 16, weights="discrete", device="meta")
    layer_to_load.load_state_dict(
        {name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True
    )
    return layer_to_load


def from_meta(layer: nn.Module) -> nn.Module:
    layer_to_load = GroupedLinear(G, 8, 16, weights="discrete", device="meta").to_empty(
        device="cpu"
    )
    layer_to_load.load_state_dict(layer.state_dict())
    return layer_to_load


@pytest.mark.parametrize(
    ("move", "stays"),
    [
        (lambda layer: layer, True),
        (lambda layer: layer.to("cpu"), True),
        (lambda layer: layer.to(torch.bfloat16).float(), True),
        (lambda layer: nn.ModuleList([layer]).double().float()[0], True),
        (lambda layer: layer.share_memory(), True),
        (loaded, True),
        (saved, True),
        (from_meta, True),
        (lambda layer: pickle.loads(pickle.dumps(layer)), None),  # as the version of torch has it
        (copy.deepcopy, None),
        (assigned, False),
    ],
    ids=[
        "new",
        "to",
        "dtype",
        "parent",
        "share_memory",
        "loaded",
        "saved",
        "meta",
        "pickle",
        "deepcopy",
        "assigned",
    ],
)
def test_results_do_not_depend_on_moves_of_weights(move, stays):
    torch.manual_seed(0)
    layer = GroupedLinear(G, 8, 16, weights="discrete")
    with torch.no_grad():
        for weight in layer.weight_parameters():  # that bf16 can hold
            weight.copy_(torch.randint(-8, 8, weight.shape))
    layer.bias.data.zero_()
    x = torch.randn(12, 8)
    want = layer(x, [3, 0, 2, 7])
    after = move(layer)
    cases.assert_same_bits(after(x, [3, 0, 2, 7]), want)
    if stays is not None:
        assert (packed_view(after.weight_parameters()) is not None) == stays


def test_unmoved_weights_stay_in_a_trainers_buffer():
    """A `.to()` that changes nothing must not take parameters out of the buffer that an optimizer writes to."""
    layer = GroupedLinear(G, 8, 16, weights="discrete")
    descend(layer)
    buffer = layer.weight3.untyped_storage().data_ptr()
    layer.to("cpu").float()
    assert {weight.untyped_storage().data_ptr() for weight in layer.weight_parameters()} == {buffer}
    scatter(layer)
    places = [weight.data_ptr() for weight in layer.weight_parameters()]
    layer.to("cpu").float()
    assert [weight.data_ptr() for weight in layer.weight_parameters()] == places


def test_optimizers_keep_their_parameters():
    layer = GroupedLinear(G, 8, 16, weights="discrete")
    before = layer.weight_parameters()
    layer.to(torch.float64)
    assert all(
        earlier is later for earlier, later in zip(before, layer.weight_parameters(), strict=True)
    )
    assert all(weight.is_leaf and weight.requires_grad for weight in before)


# -- packed_view ------------------------------------------------------------------------------------------------------
def test_packed_view_is_the_same_memory_without_history():
    packed = torch.randn(3, 4, 8)
    matrices = [nn.Parameter(part) for part in packed]
    view = packed_view(matrices)
    assert (view.data_ptr(), tuple(view.shape), view.stride()) == (
        packed.data_ptr(),
        (3, 4, 8),
        (32, 8, 1),
    )
    assert torch.equal(view, packed)
    assert not view.requires_grad
    assert view.grad_fn is None
    assert torch.equal(packed_view(matrices[1:]), packed[1:])
    assert torch.equal(packed_view(matrices[2:]), packed[2:])


def test_neighbours_in_different_storages_are_not_packed():
    """A view over the first storage would not keep the second one alive."""
    memory = bytearray(2 * 4 * 8 * 4 + 64)
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16
    parts = [
        torch.frombuffer(memory, dtype=torch.float32, count=32, offset=offset + 128 * i)
        for i in range(2)
    ]
    matrices = [part.view(4, 8) for part in parts]
    assert matrices[1].data_ptr() == matrices[0].data_ptr() + matrices[0].nbytes
    assert packed_view(matrices) is None
    both = torch.frombuffer(memory, dtype=torch.float32, count=64, offset=offset).view(2, 4, 8)
    assert packed_view(list(both)) is not None


@pytest.mark.parametrize(
    "matrices",
    [
        lambda tensor: [tensor[1], tensor[0]],
        lambda tensor: [tensor[0], tensor[2]],
        lambda tensor: [tensor[0], tensor[0]],
        lambda tensor: [tensor[0], tensor[1], tensor[1]],
        lambda tensor: [tensor[0].t(), tensor[1].t()],
        lambda tensor: [part[:, :4] for part in tensor],
        lambda tensor: list(tensor.flatten()[1:65].view(2, 4, 8)),
        lambda tensor: [tensor[0], torch.empty(4, 8, device="meta")],
    ],
    ids=["descending", "gap", "same", "repeated", "transposed", "columns", "misaligned", "meta"],
)
def test_other_views_are_not_packed(matrices):
    assert packed_view(matrices(torch.zeros(3, 4, 8))) is None


@pytest.mark.parametrize("weights", ["packed", "discrete"])
def test_misaligned_weights_are_refused(weights: str):
    layer = GroupedLinear(G, 8, 16, weights=weights)
    for parameter in layer.parameters():
        memory = torch.zeros(parameter.numel() + 4)
        begin = 1 + -memory.data_ptr() // 4 % 4  # one element past the next 16 bytes
        parameter.data = memory[begin : begin + parameter.numel()].view(parameter.shape)
    with pytest.raises(ArgumentError, match=r"starts at address \d+; it must be aligned to 16"):
        layer(torch.zeros(4, 8), [1, 1, 1, 1])


def test_only_plain_parameters_alike_are_laid_side_by_side():
    mixed = [nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8, dtype=torch.float64))]
    places = [parameter.data_ptr() for parameter in mixed]
    lay_side_by_side(mixed)
    assert [parameter.data_ptr() for parameter in mixed] == places
    alike = [nn.Parameter(torch.full((4, 8), float(i))) for i in range(3)]
    lay_side_by_side(alike)
    assert torch.equal(packed_view(alike)[:, 0, 0], torch.arange(3.0))
