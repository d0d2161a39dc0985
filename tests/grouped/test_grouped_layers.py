"""Grouped layers in every form, one linear layer or experts: against a float64 oracle, and with the same bits as each
other."""

from functools import partial

import grouped_cases as cases
import numpy as np
import pytest
import torch

from symmoe import GroupedMLP
from symmoe.errors import ArgumentError
from symmoe.grouped import ScaledSwiGLU
from symmoe.grouped.parameters import named_parameters

PLAIN = cases.Case(buffers=())
FORMS = ("packed", "discrete")
ONE_LAYER_OR_MLP = ("linear", "mlp")


def filled(case, inputs, **options) -> GroupedMLP:
    model = GroupedMLP(
        cases.TINY.num_groups, cases.TINY.hidden, cases.TINY.ffn, **case.options, **options
    )
    cases.fill(model.fc1, inputs.w1, inputs.b1, case)
    cases.fill(model.fc2, inputs.w2, inputs.b2, case)
    return model


def cut(matrix: list[cases.Case]) -> list:
    """The cases with half of them marked slow: every three options meet in the quick ones. Cases of fp16 are slow, as
    they repeat those of bf16."""
    parameters = []
    for case in matrix:
        flags = case.is_nd, case.bias, case.main_grad, case.delayed, case.dtype == torch.bfloat16
        is_slow = sum(flags) % 2 == 1 or case.dtype == torch.float16
        parameters.append(pytest.param(case, marks=[pytest.mark.slow] * is_slow))
    return parameters


@cases.everywhere
@pytest.mark.parametrize("path", cases.WAYS)
@pytest.mark.parametrize("case", cut(cases.matrix()), ids=str)
def test_all_options_equal_the_oracle(case, path, sizes, device):
    cases.check_case(path, case, sizes, device)


@cases.everywhere
@pytest.mark.parametrize("path", cases.WAYS)
@pytest.mark.parametrize(
    "case", cut([c for c in cases.matrix() if len(c.buffers) == 2 and not c.is_nd]), ids=str
)
def test_discrete_weights_give_the_same_bits(case, path, sizes, device):
    cases.check_discrete_weights(path, case, sizes, device)


@pytest.mark.parametrize("main_grad", [False, True])
def test_more_than_64_discrete_weights(main_grad):
    case = cases.Case(main_grad=main_grad)
    cases.check_discrete_weights("linear", case, cases.Sizes(splits=(1, 0, 2) * 34, lead=(26, 4)))


@cases.everywhere
@pytest.mark.parametrize("path", cases.PATHS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("name", cases.ACTIVATIONS)
def test_activations(name, dtype, path, sizes, device):
    cases.check_activation(path, name, dtype, sizes, device)


INTEGERS = ("int32", "int64", "int8", "int16", "uint8", "uint16", "uint32", "uint64")
SPLITS = {
    **{name: partial(torch.tensor, dtype=getattr(torch, name)) for name in INTEGERS},
    "list": list,
    "tuple": tuple,
    "NumPy integers": lambda splits: list(np.array(splits)),
    "NumPy bytes": lambda splits: [np.uint8(n) for n in splits],
    "array": np.array,
    "strided array": lambda splits: np.array([splits, splits], dtype=np.int16).T[:, 0],
    "reversed array": lambda splits: np.array(splits[::-1], dtype=np.uint32)[::-1],
    "strided": lambda splits: torch.tensor([splits, splits]).t().contiguous()[:, 0],
}


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize(
    "splits", [(3, 0, 2, 4), (0, 0, 0, 0), (12, 0, 0, 0), (0, 0, 0, 12), (1, 1, 1, 1)], ids=str
)
def test_splits(kind, splits):
    cases.check_splits("linear", SPLITS[kind](splits), cases.Sizes(splits=splits))
    if kind in ("int32", "list"):
        cases.check_splits("mlp", SPLITS[kind](splits), cases.Sizes(splits=splits))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("path", ONE_LAYER_OR_MLP)
def test_calls_without_rows(shape, bias, path):
    case = cases.Case(bias=bias, buffers=())
    inputs = cases.inputs_of(path, case)
    columns = inputs.d_y.shape[-1]
    inputs.x = torch.empty(*shape, 16, requires_grad=True)
    inputs.scale = torch.empty(shape, requires_grad=True)
    call, layers = cases.make_way(path, case, inputs)
    arguments = inputs.x, inputs.scale, torch.zeros_like(inputs.splits)
    y = call(*arguments, out=torch.empty(*shape, columns), grad_input_out=torch.empty(*shape, 16))
    assert y.shape == (*shape, columns)
    y.sum().backward()
    assert inputs.x.grad.shape == (*shape, 16)
    assert path == "linear" or inputs.scale.grad.shape == shape
    assert not any(
        parameter.grad.any() for layer in layers.values() for parameter in layer.parameters()
    )


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
@pytest.mark.parametrize("buffers", cases.BUFFERS, ids=str)
@pytest.mark.parametrize("is_nd", [False, True])
@pytest.mark.parametrize("path", ONE_LAYER_OR_MLP)
def test_forward_without_gradients(mode, buffers, is_nd, path):
    case = cases.Case(is_nd=is_nd, buffers=buffers)
    inputs = cases.inputs_of(path, case)
    want = cases.run_way("linear" if path == "linear" else "modules", case, inputs).tensors["y"]
    call, layers = cases.make_way(path, case, inputs)
    buffer_arguments = cases.Buffers.of(case, inputs, out_features=want.shape[-1])
    for layer in layers.values() if mode == "eval" else ():
        layer.eval().requires_grad_(False)
    with {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[
        mode
    ]():
        for _ in range(2):  # a buffer may be used again
            y = call(inputs.x, inputs.scale, inputs.splits, **vars(buffer_arguments))
    assert not y.requires_grad
    cases.assert_same_bits(cases.used(y, cases.TINY), cases.used(want, cases.TINY))
    if buffer_arguments.out is not None:
        assert y.data_ptr() == buffer_arguments.out.data_ptr()
        assert (buffer_arguments.out.flatten(0, -2)[cases.TINY.num_used :] == cases.SENTINEL).all()
    if buffer_arguments.grad_input_out is not None:
        assert (buffer_arguments.grad_input_out == cases.SENTINEL).all()


@cases.everywhere
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("path", cases.WAYS)
def test_autocast(main_grad, delayed, weights, path, sizes, device):
    cases.check_autocast(
        path, cases.Case(main_grad=main_grad, delayed=delayed), weights, sizes, device
    )


# -- GroupedMLP -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", FORMS)
def test_a_grouped_mlp_of_its_own_layers(weights):
    inputs = cases.make_inputs(PLAIN)
    model = filled(PLAIN, inputs, weights=weights)
    y = model(inputs.x, inputs.splits, inputs.scale)
    cases.assert_near(
        cases.used(y, cases.TINY), cases.mlp_oracle(inputs, PLAIN)["y"], torch.float32
    )
    assert all(is_expert for _, _, is_expert in named_parameters(model))
    mlp = GroupedMLP(cases.TINY.num_groups, cases.TINY.hidden, cases.TINY.ffn, bias=True)
    mlp.load_state_dict(model.state_dict())
    cases.assert_same_bits(mlp(inputs.x, inputs.splits, inputs.scale), y)


@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_gradients_come_from_one_call(main_grad):
    case = cases.Case(delayed=True, main_grad=main_grad, buffers=())
    inputs = cases.make_inputs(case)
    model = filled(case, inputs)
    for _ in range(2):
        model(inputs.x, inputs.splits, inputs.scale).backward(inputs.d_y)
    assert model.fc1.weight.grad is None
    for count in (1, 2):
        model.backward_dw()
        oracle = cases.mlp_oracle(inputs, case)
        for name in ("fc1", "fc2"):
            weight = getattr(model, name).weight
            actual, start = (
                (weight.main_grad, cases.MAIN_GRAD_START) if main_grad else (weight.grad, 0.0)
            )
            assert not actual.requires_grad
            cases.assert_near(actual, oracle[f"d_{name}.weight"] * count + start, torch.float32)
    model.backward_dw()


@pytest.mark.parametrize("first", [True, False])
def test_first_micro_batch_overwrites_both(first):
    case = cases.Case(main_grad=True, buffers=())
    inputs = cases.make_inputs(case)
    model = filled(case, inputs)
    model(inputs.x, inputs.splits, inputs.scale, is_first_microbatch=first).backward(inputs.d_y)
    oracle = cases.mlp_oracle(inputs, case)
    start = 0.0 if first else cases.MAIN_GRAD_START
    for name in ("fc1", "fc2"):
        main_grad = getattr(model, name).weight.main_grad
        cases.assert_near(main_grad, oracle[f"d_{name}.weight"] + start, torch.float32)
        assert (main_grad[1] == start).all(), "group 1 has no rows"


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "fc", "weight", "x", "scale", "bias", "nothing"])
@pytest.mark.parametrize("path", ONE_LAYER_OR_MLP)
def test_inputs_without_gradients(path, frozen):
    """The gradient buffer of x is written if x requires a gradient."""
    inputs = cases.inputs_of(path, PLAIN)
    buffers = cases.Buffers(grad_input_out=torch.full_like(inputs.x, cases.SENTINEL))
    call, layers = cases.make_way(path, PLAIN, inputs)
    x = inputs.x.clone().requires_grad_(frozen != "x")
    scale = inputs.scale.clone().requires_grad_(frozen != "scale")
    parameters = {
        f"d_{name}.{n}": p for name, layer in layers.items() for n, p in layer.named_parameters()
    }
    for name, parameter in parameters.items():
        parameter.requires_grad_(frozen not in name)
    call(x, scale, inputs.splits, **vars(buffers)).backward(inputs.d_y)
    actual = {"d_x": x.grad, "d_scale": scale.grad} | {
        name: p.grad for name, p in parameters.items()
    }
    for name, want in cases.oracle_of(path, PLAIN, inputs).items():
        if frozen in name:
            assert actual[name] is None, name
        elif name != "y":
            cases.assert_near(
                cases.of_groups(name, actual[name], cases.TINY), want, torch.float32, name
            )
    assert (buffers.grad_input_out == cases.SENTINEL).all() == (frozen == "x")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"rows": lambda x: x[:, :8]}, ["rows has shape [12, 8]", "[..., N, 16]"]),
        ({"rows": lambda x: x.to_sparse()}, ["rows (torch.sparse_coo) must be a strided tensor"]),
        (
            {"row_probs": lambda p: p.to_sparse()},
            ["row_probs (torch.sparse_coo) must be a strided tensor"],
        ),
        ({"splits": lambda s: s[:3]}, ["splits has shape [3]", "[4]"]),
        ({"row_probs": lambda p: p[:9]}, ["row_probs", "[9]", "[12]"]),
        ({"row_probs": lambda p: p[:, None]}, ["row_probs", "[12, 1]", "[12]"]),
        ({"row_probs": lambda p: p.long()}, ["row_probs", "torch.int64", "floating point"]),
        ({"row_probs": lambda p: p.tolist()}, ["row_probs (list)"]),
        ({"row_probs": lambda p: None}, ["row_probs (NoneType)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else " ".join(value),
)
def test_wrong_arguments_are_refused(change, parts):
    inputs = cases.make_inputs(PLAIN)
    model = filled(PLAIN, inputs)
    good = {
        "rows": inputs.x.nan_to_num(),
        "splits": inputs.splits,
        "row_probs": inputs.scale.nan_to_num(),
    }
    want = model(**good)
    with cases.refused(*parts):
        model(**{name: change.get(name, lambda same: same)(value) for name, value in good.items()})
    cases.assert_same_bits(model(**good), want)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 8.0}, r"hidden \(8\.0\) must be an int, not float"),
        ({"ffn": 0}, r"ffn \(0\) must be at least 1"),
        ({"num_groups": None}, r"num_groups \(None\) must be an int, not NoneType"),
        ({"dtype": torch.int64}, r"dtype \(torch\.int64\) must be one of torch\.float32, "),
        (
            {"activation": "gelu"},
            r"activation \('gelu'\) must be a ScaledActivation, or None; it takes an Activation: .*gelu.*run by parts",
        ),
        (
            {"activation": ScaledSwiGLU},
            r"activation \(<class .*\) must be a ScaledActivation, or None",
        ),
    ],
)
def test_wrong_constructor_arguments_are_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        GroupedMLP(**({"num_groups": 2, "hidden": 4, "ffn": 4} | changes))


def test_float64_is_refused_as_the_default_dtype_and_after_a_cast():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(
            ArgumentError, match=r"^dtype \(torch\.float64\) must be one of torch\.float32, "
        ):
            GroupedMLP(2, 4, 4)
        model = GroupedMLP(2, 4, 4, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    scale = torch.ones(3)
    want = model(x, [1, 2], scale)
    for part in (model, model.fc2):
        for under_autocast in (False, True):
            part.double()
            cast = torch.autocast("cpu", torch.bfloat16, enabled=under_autocast)
            with cast, cases.refused("are torch.float64", "float32"):
                model(x.to(model.fc1.weight.dtype), [1, 2], scale)
            cases.assert_same_bits(model.bfloat16()(x, [1, 2], scale), want)
