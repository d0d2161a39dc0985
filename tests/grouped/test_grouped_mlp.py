"""GroupedMLP: the fused path against a float64 oracle and, bit for bit, against three modules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from grouped_cases import (
    DTYPES,
    MAIN_GRAD_START,
    PATHS,
    SENTINEL,
    TINY,
    Buffers,
    Case,
    Sizes,
    assert_buffers_used,
    assert_near,
    assert_near_oracle,
    assert_same_bits,
    assert_same_results,
    check_case,
    check_discrete_weights,
    check_without_gradients,
    clamped_swiglu,
    fill,
    gating,
    interleaved_order,
    make_inputs,
    make_linear,
    matrix,
    mlp_oracle,
    refused,
    run_experts,
    scaled,
    srelu,
    swiglu,
    tanh_gelu,
    used,
)

from symmoe import GroupedMLP, ScaledClampedSwiGLU, ScaledSReLU, ScaledSwiGLU, Sequential
from symmoe.errors import ArgumentError
from symmoe.moe.ownership import named_parameters

PLAIN = Case(buffers=())
FUSED_PATHS = PATHS[1:]
# Where the fused kernels sum in an order of their own.
OTHER_ORDER = ("d_scale", "d_fc1.bias")


@pytest.mark.parametrize("path", ["modules", "fused"])
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_matrix(case, path):
    inputs = make_inputs(case)
    oracle = mlp_oracle(inputs, case)
    modules = run_experts("modules", case, inputs)
    for way in FUSED_PATHS if path == "fused" else ("modules",):
        assert_same_results(check_case(way, case, inputs, oracle), modules, TINY, close=OTHER_ORDER)


@pytest.mark.parametrize("path", FUSED_PATHS)
@pytest.mark.parametrize("case", [c for c in matrix() if len(c.buffers) == 2 and not c.is_nd], ids=str)
def test_discrete_weights_give_the_same_bits(case, path):
    check_discrete_weights(path, case, make_inputs(case))


@pytest.mark.parametrize("first", ["packed", "discrete"])
@pytest.mark.parametrize("second", ["packed", "discrete"])
def test_layers_of_either_form(first, second):
    inputs = make_inputs(PLAIN)
    fc1 = make_linear(PLAIN, inputs.w1, inputs.b1, weights=first)
    fc2 = make_linear(PLAIN, inputs.w2, inputs.b2, weights=second)
    model = Sequential(fc1, ScaledSwiGLU(), fc2)
    y = model(inputs.x, inputs.splits, inputs.scale, inputs.splits, op_kwargs={2: {"bias_scale": inputs.scale}})
    assert_same_bits(y, run_experts("modules", PLAIN, inputs).tensors["y"])


ACTIVATIONS = {
    "swiglu": (ScaledSwiGLU(), swiglu, None),
    "gpt-oss": (ScaledClampedSwiGLU(), lambda h: clamped_swiglu(h, alpha=1.702, limit=7.0, offset=1.0), None),
    "tight": (
        ScaledClampedSwiGLU(alpha=2.0, limit=0.5, offset=0.25),
        lambda h: clamped_swiglu(h, alpha=2.0, limit=0.5, offset=0.25),
        None,
    ),
    "srelu": (ScaledSReLU(), srelu, None),
    "gelu": (scaled("gelu", is_gated=False), torch.nn.functional.gelu, None),
    "tanh geglu": (scaled("gelu_tanh"), gating(tanh_gelu), None),
    "interleaved by 1": (ScaledClampedSwiGLU(interleave=1), None, 1),
    "interleaved by 4": (ScaledSwiGLU(interleave=4), None, 4),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype, path):
    activation, act, block = ACTIVATIONS[name]
    if block is not None:
        plain = ACTIVATIONS["gpt-oss" if block == 1 else "swiglu"][1]
        order = interleaved_order(2 * TINY.ffn, block)
        back = [order.index(column) for column in range(2 * TINY.ffn)]

        def act(h):
            return plain(h[back])

    case = Case(dtype=dtype)
    inputs = make_inputs(case, width=activation.activation.hidden_width(TINY.ffn))
    buffers = Buffers.of(case, inputs, out_features=TINY.hidden)
    ran = run_experts(path, case, inputs, buffers, activation=activation)
    # A rounded h may fall on the other side of a limit, where the derivative jumps.
    if name != "tight" or dtype is torch.float32:
        assert_near_oracle(ran, mlp_oracle(inputs, case, act=act), case, TINY)
    assert_buffers_used(ran, buffers, TINY)
    assert_same_results(ran, run_experts("modules", case, inputs, activation=activation), TINY, close=OTHER_ORDER)


@pytest.mark.parametrize("kind", ["int32", "int64", "list"])
@pytest.mark.parametrize("splits", [(3, 0, 2, 4), (0, 0, 0, 0), (12, 0, 0, 0), (0, 0, 0, 12)], ids=str)
def test_splits(kind, splits):
    given = {"int32": torch.tensor(splits, dtype=torch.int32), "int64": torch.tensor(splits), "list": list(splits)}
    sizes = Sizes(splits=splits)
    inputs = make_inputs(PLAIN, sizes=sizes)
    ran = run_experts("mlp", PLAIN, inputs, splits=given[kind])
    if sizes.num_used:
        assert_near_oracle(ran, mlp_oracle(inputs, PLAIN), PLAIN, sizes)
    else:
        for name, tensor in ran.tensors.items():
            assert not tensor.any(), name


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_no_rows(shape, bias):
    model = GroupedMLP(4, 16, 8, bias=bias)
    x, scale = torch.empty(*shape, 16, requires_grad=True), torch.empty(shape, requires_grad=True)
    y = model(x, [0] * 4, scale, out=torch.empty(*shape, 16), grad_input_out=torch.empty(*shape, 16))
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert scale.grad.shape == shape
    for parameter in model.parameters():
        assert not parameter.grad.any()


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
@pytest.mark.parametrize("buffers", [("out",), ("grad_input_out",), ("out", "grad_input_out")], ids=str)
def test_forward_without_gradients(mode, buffers):
    case = Case(is_nd=True, buffers=buffers)
    inputs = make_inputs(case)
    model = filled(case, inputs)
    want = run_experts("modules", case, inputs).tensors["y"]
    check_without_gradients(mode, case, inputs, model, partial(model, inputs.x, inputs.splits, inputs.scale), want)


def filled(case, inputs, **options) -> GroupedMLP:
    model = GroupedMLP(
        TINY.num_groups,
        TINY.hidden,
        TINY.ffn,
        bias=case.bias,
        accumulate_into_main_grad=case.main_grad,
        delay_wgrad=case.delayed,
        dtype=case.dtype,
        **options,
    )
    fill(model.fc1, inputs.w1, inputs.b1, case)
    fill(model.fc2, inputs.w2, inputs.b2, case)
    return model


@pytest.mark.parametrize("weights", ["packed", "discrete"])
def test_constructor(weights):
    inputs = make_inputs(PLAIN)
    model = filled(PLAIN, inputs, weights=weights)
    y = model(inputs.x, inputs.splits, inputs.scale)
    assert_near(used(y, TINY), mlp_oracle(inputs, PLAIN)["y"], torch.float32)
    assert all(is_expert for _, _, is_expert in named_parameters(model))
    other = GroupedMLP(TINY.num_groups, TINY.hidden, TINY.ffn, bias=True)
    other.load_state_dict(model.state_dict())
    assert_same_bits(other(inputs.x, inputs.splits, inputs.scale), y)


@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_gradients_come_from_one_call(main_grad):
    case = Case(delayed=True, main_grad=main_grad, buffers=())
    inputs = make_inputs(case)
    model = filled(case, inputs)
    for _ in range(2):
        model(inputs.x, inputs.splits, inputs.scale).backward(inputs.d_y)
    assert model.fc1.weight.grad is None
    for count in (1, 2):
        model.backward_dw()
        oracle = mlp_oracle(inputs, case)
        for name in ("fc1", "fc2"):
            weight = getattr(model, name).weight
            found, start = (weight.main_grad, MAIN_GRAD_START) if main_grad else (weight.grad, 0.0)
            assert not found.requires_grad
            assert_near(found, oracle[f"d_{name}.weight"] * count + start, torch.float32)
    model.backward_dw()


@pytest.mark.parametrize("first", [True, False])
def test_first_micro_batch_overwrites_both(first):
    case = Case(main_grad=True, buffers=())
    inputs = make_inputs(case)
    model = filled(case, inputs)
    model(inputs.x, inputs.splits, inputs.scale, is_first_microbatch=first).backward(inputs.d_y)
    oracle, start = mlp_oracle(inputs, case), 0.0 if first else MAIN_GRAD_START
    for name in ("fc1", "fc2"):
        found = getattr(model, name).weight.main_grad
        assert_near(found, oracle[f"d_{name}.weight"] + start, torch.float32)
        assert (found[1] == start).all(), "group 1 has no rows"


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "x", "scale", "bias"])
def test_some_inputs_take_no_gradient(frozen):
    inputs = make_inputs(PLAIN)
    model = filled(PLAIN, inputs)
    x, scale = inputs.x.clone().requires_grad_(frozen != "x"), inputs.scale.clone().requires_grad_(frozen != "scale")
    if frozen in ("fc1", "fc2"):
        getattr(model, frozen).requires_grad_(False)
    if frozen == "bias":
        model.fc1.bias.requires_grad_(False)
        model.fc2.bias.requires_grad_(False)
    model(x, inputs.splits, scale).backward(inputs.d_y)
    oracle = mlp_oracle(inputs, PLAIN)
    found = {"d_x": x.grad, "d_scale": scale.grad}
    for name in ("fc1", "fc2"):
        layer = getattr(model, name)
        found |= {f"d_{name}.weight": layer.weight.grad, f"d_{name}.bias": layer.bias.grad}
    for name, tensor in found.items():
        if frozen in name:
            assert tensor is None, name
        else:
            tensor = tensor[: TINY.num_used] if name in ("d_x", "d_scale") else tensor
            assert_near(tensor, oracle[name], torch.float32, name)


@pytest.mark.parametrize("weights", ["packed", "discrete"])
def test_autocast(weights):
    case = Case()
    inputs = make_inputs(case)
    model = filled(case, inputs, weights=weights)
    x, scale = inputs.x.clone().requires_grad_(), inputs.scale.clone().requires_grad_()
    out, grad_input_out = (torch.full((12, 16), SENTINEL, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x, inputs.splits, scale, out=out, grad_input_out=grad_input_out)
    assert y.dtype == torch.bfloat16
    assert y.data_ptr() == out.data_ptr()
    y.backward(inputs.d_y.bfloat16())
    oracle = mlp_oracle(inputs, case)
    assert_near(used(y, TINY), oracle["y"], torch.bfloat16)
    assert_near(used(x.grad, TINY), oracle["d_x"], torch.bfloat16)
    assert_near(scale.grad[: TINY.num_used], oracle["d_scale"], torch.bfloat16)
    assert (out[TINY.num_used :] == SENTINEL).all()
    for name in ("fc1", "fc2"):
        found = torch.stack([p.grad for p in getattr(model, name).weight_parameters()])
        assert found.dtype == torch.float32
        assert_near(found.view(oracle[f"d_{name}.weight"].shape), oracle[f"d_{name}.weight"], torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"rows": lambda x: x[:, :8]}, ["rows has shape [12, 8]", "[..., 16]"]),
        ({"rows": lambda x: x.double()}, ["rows is torch.float64", "torch.float32"]),
        ({"rows": lambda x: x[0]}, ["rows has shape [16]"]),
        ({"rows": lambda x: None}, ["rows (NoneType)"]),
        ({"rows": lambda x: x.to_sparse()}, ["rows (torch.sparse_coo) must be a strided tensor"]),
        ({"splits": lambda s: s.to("meta")}, ["splits is on meta; rows is on cpu"]),
        ({"row_probs": lambda p: p.to_sparse()}, ["row_probs (torch.sparse_coo) must be a strided tensor"]),
        ({"splits": lambda s: s[:3]}, ["splits has shape [3]", "[4]"]),
        ({"splits": lambda s: s + 1}, ["splits ([4, 1, 3, 5])", "12 rows"]),
        ({"splits": lambda s: s - 1}, ["splits ([2, -1, 1, 3])"]),
        ({"splits": lambda s: s.float()}, ["splits has dtype torch.float32"]),
        ({"row_probs": lambda p: p[:9]}, ["row_probs", "[9]", "[12]"]),
        ({"row_probs": lambda p: p[:, None]}, ["row_probs", "[12, 1]", "[12]"]),
        ({"row_probs": lambda p: p.long()}, ["row_probs", "torch.int64", "floating point"]),
        ({"row_probs": lambda p: p.tolist()}, ["row_probs (list)"]),
        ({"row_probs": lambda p: None}, ["row_probs (NoneType)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else " ".join(value),
)
def test_wrong_arguments(change, parts):
    inputs = make_inputs(PLAIN)
    model = filled(PLAIN, inputs)
    good = {"rows": inputs.x.nan_to_num(), "splits": inputs.splits, "row_probs": inputs.scale.nan_to_num()}
    want = model(**good)
    with refused(*parts):
        model(**{name: change.get(name, lambda same: same)(value) for name, value in good.items()})
    assert_same_bits(model(**good), want)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 8.0}, r"hidden \(8\.0\) must be an int, not float"),
        ({"hidden": 0}, r"hidden \(0\) must be at least 1"),
        ({"ffn": 0}, r"ffn \(0\) must be at least 1"),
        ({"num_groups": 0}, r"num_groups \(0\) must be at least 1"),
        ({"ffn": True}, r"ffn \(True\) must be an int, not bool"),
        ({"num_groups": None}, r"num_groups \(None\) must be an int, not NoneType"),
        ({"dtype": torch.int64}, r"dtype \(torch\.int64\) must be one of torch\.float32, "),
        ({"dtype": torch.complex64}, r"dtype \(torch\.complex64\) must be one of"),
        ({"dtype": torch.float8_e4m3fn}, r"dtype \(torch\.float8_e4m3fn\) must be one of"),
        ({"activation": "swiglu"}, r"activation \('swiglu'\) must be a ScaledActivation, or None"),
        ({"activation": ScaledSwiGLU}, r"activation \(<class .*\) must be a ScaledActivation, or None"),
    ],
)
def test_wrong_constructor_arguments(changes, text):
    with pytest.raises(ArgumentError, match=text):
        GroupedMLP(**({"num_groups": 2, "hidden": 4, "ffn": 4} | changes))


def test_float64_is_refused_as_the_default_dtype_and_after_a_cast():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ArgumentError, match=r"^dtype \(torch\.float64\) must be one of torch\.float32, "):
            GroupedMLP(2, 4, 4)
        model = GroupedMLP(2, 4, 4, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    x, scale = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3)
    want = model(x, [1, 2], scale)
    for part in (model, model.fc2):
        for under_autocast in (False, True):
            part.double()
            with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast), refused("are torch.float64", "float32"):
                model(x.to(model.fc1.weight.dtype), [1, 2], scale)
            assert_same_bits(model.bfloat16()(x, [1, 2], scale), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_is_deterministic(dtype):
    sizes = Sizes(splits=(500, 0, 20, 480), lead=(10, 101))
    case = Case(dtype=dtype, buffers=())
    inputs = make_inputs(case, sizes=sizes)
    first = run_experts("mlp", case, inputs)
    for _ in range(2):
        again = run_experts("mlp", case, inputs)
        assert_same_results(again, first, sizes)
        assert_same_bits(again.tensors["d_scale"], first.tensors["d_scale"])
