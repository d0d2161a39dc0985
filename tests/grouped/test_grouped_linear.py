"""GroupedLinear: every form of splits, weights, buffers and gradients, against a float64 oracle and against itself."""

import copy
import itertools
import math
import re

import grouped_cases as cases
import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

from symmoe import GroupedLinear, GroupedMLP, MoEConfig, MoELayer
from symmoe.errors import ArgumentError, StaleRows

OUT = cases.LINEAR_OUT
PLAIN = cases.Case(buffers=())
FORMS = ("packed", "discrete")


def layer_and_inputs(case: cases.Case = PLAIN, **options) -> tuple[GroupedLinear, cases.Inputs]:
    inputs = cases.linear_inputs(case)
    return cases.make_linear(case, inputs.w1, inputs.b1, **options), inputs


def test_rows_need_not_be_contiguous():
    layer, inputs = layer_and_inputs()
    want = cases.run_linear(PLAIN, inputs)
    x = inputs.x.t().contiguous().t().requires_grad_()
    y = layer(x, inputs.splits)
    y.backward(inputs.d_y.t().contiguous().t())
    cases.assert_same_bits(y, want.tensors["y"])
    cases.assert_same_bits(x.grad.contiguous(), want.tensors["d_x"])


# -- splits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        ([3, 0, 2, 8], ["splits ([3, 0, 2, 8])", "at most 12"]),
        (torch.tensor([3, 0, 2, 8]), ["splits ([3, 0, 2, 8])", "at most 12"]),
        ([3, -1, 2, 4], ["splits ([3, -1, 2, 4])"]),
        (torch.tensor([3, -1, 2, 4], dtype=torch.int32), ["splits ([3, -1, 2, 4])"]),
        ([3, 0, 2], ["splits has shape [3]", "[4]"]),
        (torch.tensor([3, 0, 2, 4, 0]), ["splits has shape [5]", "[4]"]),
        (torch.tensor([[3, 0, 2, 4]]), ["splits has shape [1, 4]", "[4]"]),
        (torch.tensor(9), ["splits has shape []", "[4]"]),
        (torch.tensor([3.0, 0, 2, 4]), ["torch.float32", "torch.int32", "torch.int64"]),
        (
            torch.tensor([3, 0, 2, 4], dtype=torch.complex64),
            ["torch.complex64", "torch.int32", "torch.int64"],
        ),
        (torch.tensor([3, 0, 2, 4]).to("meta"), ["splits is on meta; rows is on cpu"]),
        (
            torch.tensor([3, 0, 2, 4]).to_sparse(),
            ["splits (torch.sparse_coo) must be a strided tensor"],
        ),
        (
            torch.tensor([3, 0, 2, 255], dtype=torch.uint8),
            ["splits ([3, 0, 2, 255])", "at most 12"],
        ),
        (torch.tensor([3, -1, 2, 4], dtype=torch.int8), ["splits ([3, -1, 2, 4])"]),
        (
            torch.tensor([0, 0, 0, 2**64 - 1], dtype=torch.uint64),
            ["18446744073709551615", "at most 12"],
        ),
        (np.array([3, 0, 2, 8]), ["splits ([3, 0, 2, 8])", "at most 12"]),
        (np.array([3.0, 0, 2, 4]), ["splits has dtype float64", "torch.int64"]),
        (np.array([True, False, True, True]), ["splits has dtype bool", "torch.int64"]),
        (np.array([3, 0, 2, 4], dtype=object), ["splits has dtype object"]),
        (np.array([[3, 0, 2, 4]]), ["splits has shape [1, 4]", "[4]"]),
        ([True, False, True, True], ["splits ([True, False, True, True])"]),
        ([np.float32(3), 0, 2, 4], ["splits ([np.float32(3.0), 0, 2, 4])"]),
        ([[3], [0], [2], [4]], ["splits ([[3], [0], [2], [4]])"]),
        (torch.tensor([True, False, True, True]), ["torch.bool", "torch.int64"]),
        ([3.0, 0, 2, 4], ["splits ([3.0, 0, 2, 4])"]),
        (["3", 0, 2, 4], ["splits (['3', 0, 2, 4])"]),
        ([2**31, 0, 2**31, 4], ["at most 12"]),
        (9, ["splits"]),
        (None, ["splits"]),
    ],
    ids=str,
)
def test_wrong_splits_are_refused(splits, parts):
    layer, inputs = layer_and_inputs()
    with cases.refused(*parts):
        layer(inputs.x, splits)
    cases.assert_same_bits(
        layer(inputs.x, inputs.splits), cases.run_linear(PLAIN, inputs).tensors["y"]
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda x: x.to_sparse(), ["x (torch.sparse_coo) must be a strided tensor"]),
        (lambda x: x.to_mkldnn(), ["x (torch._mkldnn) must be a strided tensor"]),
        (lambda x: x.tolist(), ["x (list)", "tensor"]),
        (lambda x: x[0], ["x has shape [16]", "[..., N, 16]"]),
        (lambda x: x[:, :8], ["x has shape [12, 8]", "[..., N, 16]"]),
        (lambda x: x.double(), ["torch.float64", "torch.float32"]),
        (lambda x: x.bfloat16(), ["torch.bfloat16", "torch.float32"]),
        (lambda x: x.int(), ["torch.int32"]),
        (lambda x: x.to("meta"), ["x is on meta", "cpu"]),
    ],
)
def test_a_wrong_x_is_refused(change, parts):
    layer, inputs = layer_and_inputs()
    with cases.refused(*parts):
        layer(change(inputs.x), inputs.splits)


def test_rows_and_weights_on_meta():
    layer, inputs = layer_and_inputs()
    with pytest.raises(
        ArgumentError,
        match="x and the weights are on meta; they must be on a CUDA device or the CPU",
    ):
        layer.to("meta")(inputs.x.to("meta"), inputs.splits)


def test_a_sparse_gradient():
    layer, inputs = layer_and_inputs()
    y = layer(inputs.x, inputs.splits)
    with pytest.raises(ArgumentError, match=r"d_y \(torch\.sparse_coo\) must be a strided tensor"):
        y.backward(inputs.d_y.to_sparse())
    y.backward(inputs.d_y)
    cases.assert_near(
        layer.weight.grad, cases.linear_oracle(inputs, PLAIN)["d_fc.weight"], torch.float32
    )


SIZES = dict.fromkeys(("num_groups", "in_features", "out_features"), 4)
NO_DTYPES = (
    torch.float64,
    torch.int32,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    "float32",
    float,
)
WRONG = [
    *itertools.product(SIZES, (8.0, True, "8", None), ("an int, not",)),
    *itertools.product(SIZES, (-1, 0), ("at least 1",)),
    ("weights", "loose", "one of ('packed', 'discrete')"),
    *(("dtype", dtype, "one of torch.float32, ") for dtype in NO_DTYPES),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
def test_wrong_constructor_arguments_are_refused(name, value, expected):
    with pytest.raises(
        ArgumentError, match=rf"^{name} \({re.escape(repr(value))}\) must be {re.escape(expected)}"
    ):
        GroupedLinear(**(SIZES | {name: value}))


# -- parameters -------------------------------------------------------------------------------------------------------
def test_views_of_a_packed_weight():
    layer, inputs = layer_and_inputs()
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    for g in range(cases.TINY.num_groups):
        view = getattr(layer, f"weight{g}")
        cases.assert_same_bits(view, inputs.w1[g])
        cases.assert_same_bits(getattr(layer, f"bias{g}"), inputs.b1[g])
        assert view.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        layer.weight2.fill_(3.0)
    assert (layer.weight[2] == 3).all()
    assert not (layer.weight[1] == 3).any()
    for name in ("weight4", "bias4", "weightx", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(layer, name)
    assert not hasattr(GroupedLinear(2, 4, 4, bias=False), "bias0")


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "net.experts."])
def test_state_dicts_of_either_form(source, target, bias, prefix):
    def wrapped(layer):
        return (
            torch.nn.ModuleDict({"net": torch.nn.ModuleDict({"experts": layer})})
            if prefix
            else layer
        )

    source_layer, inputs = layer_and_inputs(cases.Case(bias=bias, buffers=()), weights=source)
    state = {name: tensor.clone() for name, tensor in wrapped(source_layer).state_dict().items()}
    saved = dict(state)
    target_layer = GroupedLinear(
        cases.TINY.num_groups, cases.TINY.hidden, OUT, bias=bias, weights=target
    )
    result = wrapped(target_layer).load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert state.keys() == saved.keys(), "the caller's state dict is not changed"
    cases.assert_same_bits(
        target_layer(inputs.x, inputs.splits), source_layer(inputs.x, inputs.splits)
    )


def test_state_dict_with_a_bias_per_group():
    source_layer, inputs = layer_and_inputs()
    state = {f"weight{g}": inputs.w1[g] for g in range(4)} | {
        f"bias{g}": inputs.b1[g] for g in range(4)
    }
    for weights in FORMS:
        target_layer = GroupedLinear(4, cases.TINY.hidden, OUT, weights=weights)
        target_layer.load_state_dict(state)
        cases.assert_same_bits(
            target_layer(inputs.x, inputs.splits), source_layer(inputs.x, inputs.splits)
        )


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight": None, "weight3": None}, r"Missing key.*weight"),
        ({"another": torch.zeros(1)}, r"Unexpected key.*another"),
        ({"weight": torch.zeros(4, 8, 9)}, "size mismatch"),
        ({"weight": torch.zeros(3, 8, 8)}, r"size mismatch for weight|Missing key.*weight3"),
    ],
    ids=["missing", "unexpected", "width", "groups"],
)
def test_wrong_state_dicts_are_refused(target, changes, text):
    layer = GroupedLinear(4, 8, 8, weights=target)
    base_state = {} if isinstance(changes.get("weight"), torch.Tensor) else layer.state_dict()
    state = {"bias": torch.zeros(4, 8), **base_state, **changes}
    with pytest.raises(RuntimeError, match=text):
        layer.load_state_dict({name: value for name, value in state.items() if value is not None})


@pytest.mark.parametrize("weights", FORMS)
def test_init(weights):
    torch.manual_seed(0)
    layer = GroupedLinear(3, 64, 32, weights=weights)
    bound = 1 / math.sqrt(64)
    for parameter in layer.parameters():
        assert bound / 2 < parameter.abs().max() <= bound
        assert parameter.std() > bound / 3
    layer = GroupedLinear(3, 64, 32, weights=weights, init_method=lambda w: w.fill_(w.shape[0]))
    assert all((getattr(layer, f"weight{g}") == 32).all() for g in range(3))
    assert not layer.bias.any()


@pytest.mark.parametrize("weights", FORMS)
def test_copies_are_independent(weights):
    layer, inputs = layer_and_inputs(weights=weights)
    want = layer(inputs.x, inputs.splits)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    cases.assert_same_bits(copied(inputs.x, inputs.splits), want)


# -- bias -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("buffers", [(), ("out", "grad_input_out")], ids=str)
def test_return_bias(bias, buffers):
    case = cases.Case(bias=bias, buffers=buffers)
    layer, inputs = layer_and_inputs(case, return_bias=True)
    arguments = cases.Buffers.of(case, inputs, out_features=OUT)
    y, returned = layer(
        inputs.x, inputs.splits, out=arguments.out, grad_input_out=arguments.grad_input_out
    )
    without = cases.Case(bias=False, buffers=())
    cases.assert_near(
        cases.used(y, cases.TINY), cases.linear_oracle(inputs, without)["y"], torch.float32
    )
    if not bias:
        assert returned is None
        return
    cases.assert_same_bits(returned, inputs.b1)
    (cases.used(y, cases.TINY).sum() + (2 * returned).sum()).backward()
    assert (layer.bias.grad == 2).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("is_nd", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_scale(dtype, is_nd, scale_dtype):
    case = cases.Case(dtype=dtype, is_nd=is_nd)
    layer, inputs = layer_and_inputs(case)
    inputs.scale = inputs.scale.to(scale_dtype)
    buffers = cases.Buffers.of(case, inputs, out_features=OUT)

    def call(x, scale):
        return layer(
            x,
            inputs.splits,
            bias_scale=scale,
            out=buffers.out,
            grad_input_out=buffers.grad_input_out,
        )

    ran = cases.run(call, {"fc": layer}, inputs, case)
    assert ran.tensors["d_scale"].dtype == scale_dtype
    oracle = cases.linear_oracle(inputs, case, scale_bias=True)
    if scale_dtype is torch.bfloat16:
        d_scale = cases.used_values(ran.tensors.pop("d_scale"), cases.TINY)
        cases.assert_near(d_scale, oracle.pop("d_scale"), torch.bfloat16)
    cases.assert_near_oracle(ran, oracle, case, cases.TINY)
    cases.assert_buffers_used(ran, buffers, cases.TINY)
    if "d_scale" in ran.tensors:
        assert not ran.tensors["d_scale"].flatten()[cases.TINY.num_used :].any()


@pytest.mark.parametrize(
    ("options", "change", "parts"),
    [
        ({"bias": False}, lambda s: s, ["bias_scale", "needs a bias"]),
        ({"return_bias": True}, lambda s: s, ["bias_scale", "needs a bias"]),
        ({}, lambda s: s[:-1], ["bias_scale", "[11]", "[12]"]),
        ({}, lambda s: s[:, None], ["bias_scale", "[12, 1]", "[12]"]),
        ({}, lambda s: s.int(), ["bias_scale", "torch.int32"]),
        ({}, lambda s: s.tolist(), ["bias_scale (list)"]),
        ({}, lambda s: s.to("meta"), ["bias_scale", "meta"]),
        ({}, lambda s: s.to_sparse(), ["bias_scale (torch.sparse_coo) must be a strided tensor"]),
        ({"bias": False}, lambda s: 3.0, ["bias_scale (float)", "needs a bias"]),
    ],
)
def test_a_wrong_bias_scale_is_refused(options, change, parts):
    inputs = cases.linear_inputs(PLAIN)
    layer = GroupedLinear(4, cases.TINY.hidden, OUT, **options)
    with cases.refused(*parts):
        layer(inputs.x, inputs.splits, bias_scale=change(inputs.scale.nan_to_num()))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_bias_gradient_is_deterministic_and_exact(dtype):
    """Sums of 500 terms that cancel: fp32 in a fixed order, rounded once."""
    sizes = cases.Sizes(splits=(500, 0, 20, 480), lead=(10, 101))
    case = cases.Case(dtype=dtype, buffers=())
    inputs = cases.linear_inputs(case, sizes=sizes)
    first = cases.run_linear(case, inputs).tensors["d_fc.bias"]
    for _ in range(3):
        cases.assert_same_bits(cases.run_linear(case, inputs).tensors["d_fc.bias"], first)
    want = cases.linear_oracle(inputs, case)["d_fc.bias"]
    ulps = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    torch.testing.assert_close(first.double(), want, rtol=ulps[dtype], atol=1e-3)
    assert not first[1].any()


# -- weight gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_micro_batches_accumulate(weights, main_grad, delayed):
    """Two micro-batches with different splits, and with the same buffers and leaf x."""
    case = cases.Case(main_grad=main_grad, delayed=delayed)
    sizes = [cases.Sizes(splits=splits) for splits in ((3, 0, 2, 4), (0, 5, 0, 7))]
    inputs = [
        cases.linear_inputs(case, sizes=batch_sizes, seed=i) for i, batch_sizes in enumerate(sizes)
    ]
    layer = cases.make_linear(case, inputs[0].w1, inputs[0].b1, weights=weights)
    out = torch.empty(12, OUT)
    grad_input_out = torch.empty(12, cases.TINY.hidden)
    x = inputs[0].x.clone().requires_grad_()
    oracles = []
    for batch in inputs:
        batch.w1 = inputs[0].w1
        batch.b1 = inputs[0].b1
        with torch.no_grad():
            x.copy_(batch.x)
        layer(x, batch.splits, out=out, grad_input_out=grad_input_out).backward(batch.d_y)
        layer.backward_dw()
        oracles.append(cases.linear_oracle(batch, case))
    for name, parameters in (
        ("d_fc.weight", layer.weight_parameters()),
        ("d_fc.bias", [layer.bias]),
    ):
        want = oracles[0][name] + oracles[1][name]
        if main_grad and name == "d_fc.weight":
            actual, want = [p.main_grad for p in parameters], want + cases.MAIN_GRAD_START
        else:
            actual = [p.grad for p in parameters]
        cases.assert_near(torch.stack(actual).view(want.shape), want, torch.float32, name)
    want = torch.zeros(12, cases.TINY.hidden, dtype=torch.float64)
    for oracle in oracles:
        want[: len(oracle["d_x"])] += oracle["d_x"]
    used_by_both = 9
    cases.assert_near(x.grad[:used_by_both], want[:used_by_both], torch.float32, "d_x")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("mode", ["call", "attribute", "accumulate"])
def test_main_grad_of_groups_without_rows(dtype, weights, mode):
    case = cases.Case(dtype=dtype, main_grad=True, buffers=())
    layer, inputs = layer_and_inputs(case, weights=weights)
    for parameter in layer.weight_parameters():
        parameter.overwrite_main_grad = mode == "attribute"
    layer(inputs.x, inputs.splits, is_first_microbatch=mode == "call").backward(inputs.d_y)
    main_grads = torch.stack([p.main_grad for p in layer.weight_parameters()]).view(inputs.w1.shape)
    before = cases.MAIN_GRAD_START if mode == "accumulate" else 0.0
    assert main_grads.dtype == torch.float32
    assert (main_grads[1] == before).all(), "group 1 has no rows"
    cases.assert_near(main_grads, cases.linear_oracle(inputs, case)["d_fc.weight"] + before, dtype)


def test_main_grad_accumulates_in_fp32():
    """256 + 1 is 256 in bf16, and 257 where sums are fp32."""
    layer = GroupedLinear(1, 1, 1, bias=False, accumulate_into_main_grad=True, dtype=torch.bfloat16)
    layer.weight.main_grad = torch.full((1, 1, 1), 256.0)
    for _ in range(2):
        layer(torch.ones(1, 1, dtype=torch.bfloat16), [1]).sum().backward()
    assert layer.weight.main_grad.item() == 258


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("has_flag", [True, False])
def test_trainer_protocol(weights, has_flag):
    layer, inputs = layer_and_inputs(cases.Case(main_grad=True, buffers=()), weights=weights)
    hooks = []
    for parameter in layer.weight_parameters():
        if not has_flag:
            del parameter.grad_added_to_main_grad
        parameter.register_post_accumulate_grad_hook(
            lambda p: hooks.append(getattr(p, "grad_added_to_main_grad", None))
        )
    layer(inputs.x, inputs.splits).backward(inputs.d_y)
    assert hooks == [True if has_flag else None] * len(layer.weight_parameters()), (
        "the trainer's hooks run, and after the accumulation"
    )
    for parameter in layer.weight_parameters():
        assert getattr(parameter, "grad_added_to_main_grad", False) == has_flag
        assert (parameter.grad is not None) == has_flag
        assert not has_flag or parameter.grad.shape == parameter.shape
        assert not has_flag or not parameter.grad.any()


def test_main_grad_is_read_when_it_is_needed():
    layer, inputs = layer_and_inputs(cases.Case(main_grad=True))
    del layer.weight.main_grad
    created = []

    def get_main_grad():
        created.append(torch.zeros_like(layer.weight))
        return created[-1]

    layer.weight.get_main_grad = get_main_grad
    y = layer(inputs.x, inputs.splits)
    assert not created
    y.backward(inputs.d_y)
    cases.assert_near(created[0], cases.linear_oracle(inputs, PLAIN)["d_fc.weight"], torch.float32)


def test_placeholder_gradients_are_not_shared_state():
    """If a trainer writes into a placeholder gradient of zeros, no other layer may see the values."""
    case = cases.Case(main_grad=True)
    layers = [layer_and_inputs(case)[0] for _ in range(2)]
    _, inputs = layer_and_inputs(case)
    layers[0](inputs.x, inputs.splits).backward(inputs.d_y)
    layers[0].weight.grad.add_(1.0)
    layers[1](inputs.x, inputs.splits).backward(inputs.d_y)
    assert not layers[1].weight.grad.any()


@pytest.mark.parametrize(
    ("main_grad", "parts"),
    [
        (None, ["main_grad is missing", "[4, 24, 16]"]),
        (
            torch.zeros(4, 24, 16, dtype=torch.bfloat16),
            ["main_grad is torch.bfloat16", "torch.float32"],
        ),
        (torch.zeros(4, 24, 8), ["main_grad", "[4, 24, 8]", "[4, 24, 16]"]),
        (torch.zeros(4, 16, 24).transpose(1, 2), ["main_grad", "contiguous"]),
        (torch.zeros(4, 24, 16, device="meta"), ["main_grad", "meta", "cpu"]),
    ],
    ids=["none", "dtype", "shape", "strided", "device"],
)
def test_a_wrong_main_grad_is_refused(main_grad, parts):
    layer, inputs = layer_and_inputs(cases.Case(main_grad=True))
    layer.weight.main_grad = main_grad
    with cases.refused(*parts):
        layer(inputs.x, inputs.splits).backward(inputs.d_y)
    layer.weight.main_grad = torch.zeros(4, 24, 16)
    layer(inputs.x, inputs.splits).backward(inputs.d_y)
    cases.assert_near(
        layer.weight.main_grad, cases.linear_oracle(inputs, PLAIN)["d_fc.weight"], torch.float32
    )


# -- delay_wgrad ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", ["delay_wgrad", "accumulate_into_main_grad"])
def test_gradients_that_a_parametrization_would_lose_are_refused(option: str):
    layer = GroupedLinear(2, 8, 8, bias=False, **{option: True})
    parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    y = layer(torch.randn(4, 8), [2, 2])
    with pytest.raises(
        ArgumentError, match=rf"{option} \(True\) must be False: weights of a .* are made of others"
    ):
        y.sum().backward()


@pytest.mark.parametrize("weights", FORMS)
def test_backward_dw_runs_the_oldest_first_and_accumulates(weights):
    case = cases.Case(delayed=True, buffers=())
    inputs = [cases.linear_inputs(case, seed=i) for i in range(3)]
    layer = cases.make_linear(case, inputs[0].w1, inputs[0].b1, weights=weights)
    trainers = [torch.full_like(p, 2.0) for p in layer.weight_parameters()]
    for parameter, gradient in zip(layer.weight_parameters(), trainers, strict=True):
        parameter.grad = gradient
    for batch in inputs:
        batch.w1 = inputs[0].w1
        batch.b1 = inputs[0].b1
        layer(batch.x, batch.splits).backward(batch.d_y)
    assert all((gradient == 2).all() for gradient in trainers)
    want = torch.full_like(inputs[0].w1, 2.0)
    for batch in inputs:
        layer.backward_dw()
        want = want + cases.linear_oracle(batch, case)["d_fc.weight"]
        actual = torch.stack(trainers).view(want.shape)
        cases.assert_near(actual, want, torch.float32)
    layer.backward_dw()  # nothing is left
    cases.assert_same_bits(torch.stack(trainers).view(want.shape), actual)
    for parameter, gradient in zip(layer.weight_parameters(), trainers, strict=True):
        assert parameter.grad is gradient, "a gradient buffer of the trainer stays the one in use"


def test_hooks_after_backward_dw():
    layer, inputs = layer_and_inputs(cases.Case(delayed=True))
    calls = []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        lambda: calls.append(layer.weight.grad is not None)
    )
    layer.backward_dw()
    assert not calls
    layer(inputs.x, inputs.splits).backward(inputs.d_y)
    assert not calls
    layer.backward_dw()
    layer.backward_dw()
    assert calls == [True]
    assert layer.weight.skip_backward_post_hook
    assert not hasattr(layer_and_inputs()[0].weight, "skip_backward_post_hook")


def test_frozen_weights_delay_no_gradient():
    layer, inputs = layer_and_inputs(cases.Case(delayed=True))
    layer.weight.requires_grad_(False)
    layer(inputs.x.clone().requires_grad_(), inputs.splits).backward(inputs.d_y)
    layer.backward_dw()
    assert layer.weight.grad is None


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
@pytest.mark.parametrize("overwritten", ["x", "d_y"])
def test_delayed_gradients_of_overwritten_rows_are_refused(overwritten, shape):
    """backward_dw reads x and d_y later; if they were overwritten in between, the gradient would be wrong. Later calls
    run programs."""
    layer, inputs = layer_and_inputs(cases.Case(delayed=True, buffers=()))
    for _ in range(4):
        x, d_y = (tensor.clone().view(*shape, -1) for tensor in (inputs.x, inputs.d_y))
        layer(x, inputs.splits).backward(d_y)
        {"x": x, "d_y": d_y}[overwritten].fill_(1e6)
        with pytest.raises(StaleRows, match=rf"^{overwritten} \[12"):
            layer.backward_dw()
        assert layer.weight.grad is None


# -- autocast, second backward ----------------------------------------------------------------------------------------
def test_a_weight_changed_before_backward_is_refused():
    layer, inputs = layer_and_inputs()
    y = layer(inputs.x.clone().requires_grad_(), inputs.splits)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.d_y)


# -- discrete weights that were changed -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda w: w.t().contiguous().t(), ["has strides", "contiguous"]),
        (lambda w: w.double(), ["weight1 has dtype torch.float64", "torch.float32"]),
        (lambda w: w[:8], ["weight1 has shape torch.Size([8, 16])", "[24, 16]"]),
    ],
    ids=["strides", "dtype", "shape"],
)
def test_discrete_weights_of_different_shapes_are_refused(change, parts):
    layer, inputs = layer_and_inputs(weights="discrete")
    layer.weight1.data = change(layer.weight1.data)
    with cases.refused(*parts):
        layer(inputs.x, inputs.splits)


@pytest.mark.parametrize("g", [0, 2])
def test_discrete_weights_of_two_dtypes_are_refused_also_where_calls_cast_them(heap, g):
    """A layer has one dtype; the first weight's does not decide."""
    mlp, (x, scale) = GroupedMLP(4, 16, 16, weights="discrete"), (torch.ones(4, 16), torch.ones(4))
    getattr(mlp.fc1, f"weight{g}").data = getattr(mlp.fc1, f"weight{g}").data.bfloat16()
    calls = {"linear": lambda: mlp.fc1(x, [1] * 4), "mlp": lambda: mlp(x, [1] * 4, scale)}
    layer = MoELayer(MoEConfig(hidden=16, ffn=16, num_experts=4, top_k=2), heap, experts=mlp)
    for cast in (None, torch.bfloat16, torch.float16):
        for call in (*calls.values(), lambda: layer(x)):
            with (
                torch.autocast("cpu", cast, enabled=cast is not None),
                cases.refused("torch.bfloat16"),
            ):
                call()


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_frozen_weight_gets_no_gradient(main_grad, delayed):
    """The other weights get theirs."""
    case = cases.Case(main_grad=main_grad, delayed=delayed)
    inputs = cases.linear_inputs(case)
    all_trained, partly_frozen = (
        cases.make_linear(case, inputs.w1, inputs.b1, weights="discrete") for _ in range(2)
    )
    partly_frozen.weight2.requires_grad_(False)
    for layer in (
        (all_trained, partly_frozen) if main_grad else ()
    ):  # side by side, which are written as one
        together = torch.full((4, *layer.weight0.shape), cases.MAIN_GRAD_START)
        for weight, part in zip(layer.weight_parameters(), together, strict=True):
            weight.main_grad = part
    for layer in (all_trained, partly_frozen):
        layer(inputs.x, inputs.splits).backward(inputs.d_y)
        layer.backward_dw()
    name = "main_grad" if main_grad else "grad"
    assert partly_frozen.weight2.grad is None
    assert not main_grad or (partly_frozen.weight2.main_grad == cases.MAIN_GRAD_START).all()
    for g in (0, 1, 3):
        assert torch.equal(
            getattr(getattr(partly_frozen, f"weight{g}"), name),
            getattr(getattr(all_trained, f"weight{g}"), name),
        )
