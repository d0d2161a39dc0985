"""Layers that compute in a recipe's numbers: against float64, and against the same layers run in other ways."""

import copy
from dataclasses import replace
from functools import partial

import grouped_cases as cases
import low_precision_cases as recipes
import low_precision_oracle as oracle
import pytest
import torch
from low_precision_oracle import relative_error
from row_ranges import whole_groups
from torch.utils._pytree import tree_leaves
from worker import Watching

from symmoe import GroupedLinear, GroupedMLP
from symmoe.grouped import ScaledClampedSwiGLU, ScaledSReLU, ScaledSwiGLU, Sequential
from symmoe.kernels import for_device, twin
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.precision.operands import gradient_seeds


def linear_inputs(case: cases.Case, **options):
    return cases.make_inputs(
        case, sizes=recipes.SIZES, width=recipes.OUT, out_features=recipes.OUT, **options
    )


on_gpus = partial(pytest.param, marks=recipes.ON_GPUS)


# -- against float64 --------------------------------------------------------------------------------------------------
PLAIN = cases.Case(bias=False, buffers=())
# Sums are fp32; an element that lies between two numbers of a format may be rounded to the other one.
SAME_NUMBERS = 2e-3


def spread_out(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, so that it matters which of them share a scale."""
    exponents = torch.randint(-14, 3, tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor * torch.exp2(exponents.float())


@pytest.mark.parametrize("recipe", recipes.NUMBERS, ids=str)
def test_a_linear_layer_multiplies_these_numbers(recipe):
    inputs = linear_inputs(PLAIN)
    inputs = replace(inputs, x=spread_out(inputs.x, 1), d_y=spread_out(inputs.d_y, 2))
    ran = cases.run_linear(PLAIN, inputs, precision=recipe)
    x, d_y = (tensor[: recipes.SIZES.num_used].numpy() for tensor in (inputs.x, inputs.d_y))
    for candidate in (recipe, *(r for r in recipes.NUMBERS if r != recipe)):
        layer = oracle.Linear(recipes.NUMBERS[candidate], inputs.w1, recipes.SIZES.splits)
        want = {"y": layer.forward(x), "d_x": layer.input_gradient(d_y)}
        want["d_fc.weight"] = layer.weight_gradient(d_y, x)
        errors = {
            name: relative_error(
                cases.of_groups(name, ran.tensors[name], recipes.SIZES), want[name]
            )
            for name in want
        }
        if candidate == recipe:
            assert all(error < 1e-6 for error in errors.values()), errors
        elif "NVFP4" in str(recipe) and "NVFP4" in str(
            candidate
        ):  # they differ only in weight gradients
            assert errors["d_fc.weight"] > 1e-2, (candidate, errors)
        else:  # the comparison can tell one recipe from another
            assert all(error > 3e-6 for error in errors.values()), (candidate, errors)


@pytest.mark.parametrize("recipe", recipes.NUMBERS, ids=str)
def test_a_bias_is_rounded_once_with_the_product(recipe):
    case = cases.Case(dtype=torch.bfloat16, buffers=())
    inputs = linear_inputs(case)
    layer = cases.make_linear(case, inputs.w1, inputs.b1, precision=recipe)
    y = cases.used(layer(inputs.x, inputs.splits, bias_scale=inputs.scale), recipes.SIZES).detach()
    x = inputs.x.float().numpy()
    scale = inputs.scale.double().numpy()
    bias = inputs.b1.double().numpy()
    exact = oracle.Linear(recipes.NUMBERS[recipe], inputs.w1, recipes.SIZES.splits)

    def rounded(numbers):
        return torch.from_numpy(numbers).to(case.dtype)

    added = exact.forward(x, bias, scale)
    product = exact.forward(x)
    twice = rounded(added - product + rounded(product).double().numpy())
    for right, min_error, max_error in ((rounded(added), 0, 1e-3), (twice, 0.02, 1)):
        assert min_error <= (y != right).double().mean() <= max_error


MOST = [
    ("cpu", torch.float32, recipes.SIZES, SAME_NUMBERS),
    ("cpu", torch.bfloat16, recipes.SIZES, 6e-3),
    *(on_gpus("cuda", torch.bfloat16, sizes, 1e-2) for sizes in (recipes.LARGE, recipes.LARGE_ODD)),
]


@pytest.mark.parametrize(("device", "dtype", "sizes", "max_error"), MOST, ids=str)
@pytest.mark.parametrize("recipe", recipes.NUMBERS, ids=str)
def test_experts_multiply_these_numbers(recipe, device, dtype, sizes, max_error):
    case = cases.Case(dtype=dtype, bias=False, buffers=())
    inputs = cases.make_inputs(case, sizes=sizes, device=device)
    ran = cases.run_experts("mlp", case, inputs, precision=recipe)
    arguments = (inputs.x, inputs.scale, (inputs.w1, inputs.w2), inputs.d_y, sizes.splits)

    def rounded(values):
        return torch.from_numpy(values).to(dtype).float().numpy()

    for name, numbers in oracle.mlp(recipes.NUMBERS[recipe], *arguments, round_to=rounded).items():
        assert (
            relative_error(cases.of_groups(name, ran.tensors[name], sizes), numbers) < max_error
        ), name


@recipes.every_recipe
def test_errors_are_those_of_the_format(recipe):
    """Errors against the experts in float64 without any rounding, including biases."""
    case = cases.Case(dtype=torch.bfloat16, buffers=())
    inputs = cases.make_inputs(case, sizes=recipes.SMALL)
    ran = cases.run_experts("mlp", case, inputs, precision=recipe)
    max_error = recipes.TWO_LAYERS[recipe.row_format.element]
    for name, exact in cases.mlp_oracle(inputs, case).items():
        error = relative_error(cases.of_groups(name, ran.tensors[name], recipes.SMALL), exact)
        assert error < max_error, name
        # FC2's bias is added to what has been multiplied: its gradient has not seen a quantised number.
        assert error > (0.02 if name != "d_fc2.bias" else 0.0), name


# -- the caller's buffers, and further options of layers ---------------------------------------------------------------
SMALL_BLOCKS = replace(
    recipes.SMALL, ffn=128
)  # quantised in one kernel with the activation, by blocks of 128 too
FUSED = {
    "cpu": [
        (None, torch.bfloat16, False, SMALL_BLOCKS),
        (None, torch.bfloat16, True, SMALL_BLOCKS),
        (None, torch.bfloat16, False, recipes.SMALL),
        (ScaledClampedSwiGLU(interleave=2), torch.float16, True, recipes.SMALL),
        (ScaledSReLU(), torch.float32, True, recipes.SMALL),
    ],
    "cuda": [
        (None, torch.bfloat16, False, recipes.LARGE),
        (None, torch.bfloat16, True, recipes.LARGE),
        (None, torch.bfloat16, True, recipes.LARGE_ODD),
        (ScaledClampedSwiGLU(interleave=8), torch.bfloat16, False, recipes.LARGE),
        (ScaledSReLU(), torch.bfloat16, True, recipes.LARGE_ODD),
    ],
}


@pytest.mark.parametrize("device", ["cpu", on_gpus("cuda")])
@recipes.every_recipe
def test_fused_experts_are_three_modules(recipe, device):
    for activation, dtype, bias, sizes in FUSED[device]:
        case = cases.Case(dtype=dtype, bias=bias, is_nd=bias)
        width = sizes.ffn if isinstance(activation, ScaledSReLU) else None
        inputs = cases.make_inputs(case, sizes=sizes, width=width, device=device)
        options = {"activation": activation, "precision": recipe}
        separate = cases.run_experts("modules", replace(case, buffers=()), inputs, **options)
        for path in cases.PATHS[1:]:
            buffers = cases.Buffers.of(case, inputs, out_features=sizes.hidden)
            fused = cases.run_experts(path, case, inputs, buffers, **options)
            cases.assert_same_results(fused, separate, sizes)
            cases.assert_buffers_used(fused, buffers, sizes)


@recipes.every_recipe
@pytest.mark.parametrize(
    ("kind", "device", "dtype"),
    [
        ("packed", "cpu", torch.float32),
        ("scattered", "cpu", torch.bfloat16),
        ("delayed", "cpu", torch.bfloat16),
        *(on_gpus(kind, "cuda", torch.bfloat16) for kind in ("packed", "scattered", "delayed")),
    ],
    ids=str,
)
def test_bias_gradients_have_the_bits_of_a_kernel_that_only_sums(recipe, kind, device, dtype):
    """Bias gradients of GroupedLinear, with and without a scale, and of both layers of GroupedMLP."""
    case = cases.Case(dtype=dtype, buffers=(), delayed=kind == "delayed")
    sizes = replace(recipes.SIZES, splits=(260, 0, 1, 25), lead=(40, 9))
    inputs = cases.make_inputs(case, sizes=sizes, device=device)

    def sums(d_y, scale=None):
        dbias = inputs.b1.new_empty(sizes.num_groups, d_y.shape[1])
        for_device(inputs.x.device).grouped_bias_grad(
            d_y.contiguous(), whole_groups(sizes.splits, device), dbias, scale=scale
        )
        return dbias

    def layer(weight, bias):
        linear = cases.make_linear(
            case,
            weight,
            bias,
            precision=recipe,
            weights="packed" if kind == "packed" else "discrete",
        )
        for parameter in linear.weight_parameters() if kind == "scattered" else ():
            parameter.data = parameter.data.clone()
        return linear

    x = inputs.x.clone().requires_grad_()
    for scale in (None, inputs.scale):
        fc2 = layer(inputs.w2.mT.contiguous(), inputs.b1[:, : sizes.ffn].contiguous())
        d_y = inputs.d_y[:, : sizes.ffn].contiguous()
        fc2(x, inputs.splits, bias_scale=scale).backward(d_y)
        cases.assert_same_bits(fc2.bias.grad, sums(d_y, scale))
    mlp = GroupedMLP(sizes.num_groups, sizes.hidden, sizes.ffn, device=device)
    mlp.fc1 = layer(inputs.w1, inputs.b1)
    mlp.fc2 = layer(inputs.w2, inputs.b2)
    mlp(x, inputs.splits, inputs.scale).backward(inputs.d_y)
    cases.assert_same_bits(mlp.fc2.bias.grad, sums(inputs.d_y, inputs.scale))
    # FC1's: out of three modules, the first of which gets the gradient of h.
    fc1 = layer(inputs.w1, inputs.b1)
    fc2 = layer(inputs.w2, inputs.b2)
    h = fc1(x, inputs.splits)
    h.retain_grad()
    fc2(ScaledSwiGLU()(h, inputs.scale), inputs.splits, bias_scale=inputs.scale).backward(
        inputs.d_y
    )
    for actual in (fc1, mlp.fc1):
        cases.assert_same_bits(actual.bias.grad, sums(h.grad))


def test_layers_of_two_precisions_are_not_fused():
    case = cases.Case(dtype=torch.bfloat16, bias=False)
    inputs = cases.make_inputs(case, sizes=recipes.SMALL)
    fc1 = cases.make_linear(case, inputs.w1, inputs.b1, precision=MXFP8())
    fc2 = cases.make_linear(case, inputs.w2, inputs.b2)
    activation = ScaledSwiGLU()
    actual = Sequential(fc1, activation, fc2)(inputs.x, inputs.splits, inputs.scale, inputs.splits)
    a = activation(fc1(inputs.x, inputs.splits), inputs.scale)
    cases.assert_same_bits(
        cases.used(actual, recipes.SMALL), cases.used(fc2(a, inputs.splits), recipes.SMALL)
    )


@recipes.every_recipe
def test_buffers_of_the_caller_get_the_same_bits(recipe):
    """With buffers the bits are the same as without, and tails stay unchanged, as in test_grouped_linear.py."""
    want = {}
    for case in recipes.CASES:
        inputs = cases.make_inputs(case, sizes=recipes.TINY, width=32, out_features=32)
        buffers = cases.Buffers.of(case, inputs, out_features=32)
        ran = cases.run_linear(case, inputs, buffers, precision=recipe)
        cases.assert_buffers_used(ran, buffers, recipes.TINY)
        plain = case.dtype, case.is_nd, case.bias, case.main_grad
        if plain not in want:
            want[plain] = cases.run_linear(
                replace(case, buffers=(), delayed=False), inputs, precision=recipe
            )
            for name in ("y", "d_x"):
                tail = want[plain].tensors[name].flatten(0, -2)[recipes.TINY.num_used :]
                assert not tail.any(), "a tail allocated here is zero"
        cases.assert_same_results(ran, want[plain], recipes.TINY)
        dtypes = {name: tensor.dtype for name, tensor in ran.tensors.items()}
        assert dtypes.pop("d_fc.weight") == (torch.float32 if case.main_grad else case.dtype)
        assert set(dtypes.values()) == {case.dtype}
        exact = cases.linear_oracle(inputs, replace(case, bias=False))["d_x"]
        error = relative_error(cases.used(ran.tensors["d_x"], recipes.TINY), exact)
        assert error < 1.5 * recipes.ONE_PRODUCT[recipe.row_format.element]


@recipes.every_recipe
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_discrete_weights_give_the_same_bits(recipe, main_grad, scattered):
    case = cases.Case(dtype=torch.bfloat16, main_grad=main_grad)
    inputs = cases.make_inputs(
        case, sizes=recipes.SMALL, width=recipes.OUT, out_features=recipes.OUT
    )
    layer = cases.make_linear(case, inputs.w1, inputs.b1, precision=recipe, weights="discrete")
    for parameter in layer.weight_parameters() if scattered else ():
        parameter.data = parameter.data.clone()
        if main_grad:
            parameter.main_grad = parameter.main_grad.clone()
    ran = cases.run(lambda x, _: layer(x, inputs.splits), {"fc": layer}, inputs, case)
    want = cases.run_linear(replace(case, buffers=()), inputs, precision=recipe)
    cases.assert_same_results(ran, want, recipes.SMALL)
    if main_grad:  # gradients without rows are unchanged
        assert (layer.weight1.main_grad == cases.MAIN_GRAD_START).all()
        again = cases.run(
            lambda x, _: layer(x, inputs.splits, is_first_microbatch=True),
            {"fc": layer},
            inputs,
            case,
        )
        assert not layer.weight1.main_grad.any()
        start = ran.tensors["d_fc.weight"] - cases.MAIN_GRAD_START
        assert relative_error(again.tensors["d_fc.weight"], start) < 1e-5


class CopiesSeen(Watching):
    """Records operators of torch that copy tensors as large as a weight, or add such tensors."""

    least_numel: int

    def look(self, func, args, result) -> None:
        name = func.overloadpacket.__name__
        if any(word in name for word in ("copy", "clone", "stack", "cat", "add", "contiguous")):
            if any(
                isinstance(leaf, torch.Tensor) and leaf.numel() >= self.least_numel
                for leaf in tree_leaves(args)
            ):
                self.noted.append(name)


@recipes.every_recipe
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_scattered_weights_are_not_copied(recipe, kind, monkeypatch):
    """Gradients in main_grads anywhere in memory are not copied either."""
    hidden, ffn, options = (
        64,
        96,
        {"precision": recipe, "weights": "discrete", "accumulate_into_main_grad": True},
    )
    layer = (
        GroupedLinear(2, hidden, ffn, **options)
        if kind == "linear"
        else GroupedMLP(2, hidden, ffn, **options)
    )
    parameters = [parameter for name, parameter in layer.named_parameters() if "weight" in name]
    for parameter in parameters:
        parameter.data = parameter.data.clone()
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    x = torch.randn(8, hidden, requires_grad=True)
    # The mode does not see the twins, which are written with torch's operators.
    calls = CopiesSeen()
    calls.least_numel = hidden * ffn
    for name in twin.__all__:
        monkeypatch.setattr(twin, name, partial(unseen, getattr(twin, name)))
    with calls:
        y = layer(x, [5, 3]) if kind == "linear" else layer(x, [5, 3], torch.ones(8))
        y.sum().backward()
    assert calls.noted == []
    assert all(parameter.main_grad.any() for parameter in parameters)
    with calls:
        torch.stack([parameter.detach() for parameter in parameters[:2]])
    assert calls.noted


def unseen(function, *args, **kwargs):
    """The function, out of sight of dispatch modes."""
    with torch._C._DisableTorchDispatch():
        return function(*args, **kwargs)


@recipes.every_recipe
@pytest.mark.parametrize(
    ("splits", "lead"),
    [
        ((0, 0, 0, 0), (7, 4)),
        ((0, 0, 0, 0), (0, 4)),  # no rows at all
        ((28, 0, 0, 0), (7, 4)),
        ((0, 0, 0, 28), (7, 4)),
        ((1, 1, 1, 1), (7, 4)),
    ],
    ids=str,
)
def test_groups_may_have_any_size(recipe, splits, lead):
    case = cases.Case(dtype=torch.bfloat16, bias=False, buffers=())
    sizes = replace(recipes.SMALL, splits=splits, lead=lead)
    inputs = cases.make_inputs(case, sizes=sizes)
    ran = cases.run_experts("mlp", case, inputs, precision=recipe)
    max_error = recipes.TWO_LAYERS[recipe.row_format.element]
    if not sizes.num_used:
        assert ran.tensors["y"].shape == ran.tensors["d_x"].shape == (sizes.num_rows, sizes.hidden)
        assert not any(tensor.any() for tensor in ran.tensors.values())
        return
    for name, exact in cases.mlp_oracle(inputs, case).items():
        if name != "d_scale" or sizes.num_used > 4:  # of few numbers, which may be small by chance
            assert (
                relative_error(cases.of_groups(name, ran.tensors[name], sizes), exact)
                < 1.25 * max_error
            ), name
    for name in ("d_fc1.weight", "d_fc2.weight"):
        assert [bool(part.any()) for part in ran.tensors[name]] == [count > 0 for count in splits]


@recipes.every_recipe
def test_results_without_gradients_are_the_same(recipe):
    case = cases.Case(dtype=torch.bfloat16, buffers=())
    inputs = cases.make_inputs(case, sizes=recipes.SMALL)
    mlp = GroupedMLP(
        4, recipes.SMALL.hidden, recipes.SMALL.ffn, bias=True, precision=recipe, dtype=case.dtype
    )
    want = mlp(inputs.x, inputs.splits, inputs.scale)
    assert want.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            actual = mlp(inputs.x, inputs.splits, inputs.scale)
            cases.assert_same_bits(
                cases.used(actual, recipes.SMALL), cases.used(want.detach(), recipes.SMALL)
            )
    mlp.requires_grad_(False)
    x = inputs.x.clone().requires_grad_()
    mlp(x, inputs.splits, inputs.scale).backward(inputs.d_y)
    mlp.requires_grad_(True)
    y = x.detach().clone().requires_grad_()
    mlp(y, inputs.splits, inputs.scale).backward(inputs.d_y)
    cases.assert_same_bits(cases.used(x.grad, recipes.SMALL), cases.used(y.grad, recipes.SMALL))


@recipes.every_recipe
def test_parameters_and_state_dicts_are_those_of_any_layer(recipe):
    plain, quantised = (GroupedMLP(2, 64, 32, bias=True, precision=p) for p in (None, recipe))
    assert quantised.precision == quantised.fc1.precision == quantised.fc2.precision == recipe
    assert plain.state_dict().keys() == quantised.state_dict().keys()
    quantised.load_state_dict(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        cases.assert_same_bits(quantised.state_dict()[name], tensor, name)
    assert str(recipe) in repr(quantised)
    assert copy.deepcopy(quantised).precision == recipe


def test_weights_must_not_change_before_backward():
    layer = GroupedLinear(2, 64, 32, precision=Float8Block(), delay_wgrad=True)
    x = torch.randn(4, 64, requires_grad=True)
    y = layer(x, [2, 2])
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_may_change_before_a_delayed_gradient():
    """A delayed gradient reads the quantised operands of backward, not the rows."""
    layer = GroupedLinear(2, 64, 32, precision=Float8Block(), delay_wgrad=True)
    x = torch.randn(4, 64)
    results = []
    for factor in (1, 2):
        rows = x.clone()
        layer(rows, [2, 2]).sum().backward()
        rows.mul_(factor)
        layer.backward_dw()
        results.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*results)


# -- stochastic rounding ----------------------------------------------------------------------------------------------
def test_seeds_come_from_the_gradients_of_the_group_alone():
    generator = torch.Generator().manual_seed(1)
    for dtype in cases.DTYPES:
        rows = torch.randn((40, 32), generator=generator).to(dtype)
        row_range = whole_groups((9, 0, 21))
        seeds = gradient_seeds(NVFP4(), rows, row_range, None)
        assert (seeds.dtype, seeds.shape) == (torch.int64, (3,))
        assert seeds[1] == 0
        assert len(set(seeds.tolist())) == 3
        changed = rows.clone()
        changed[30:] = torch.nan  # a tail
        changed[:9] *= 1.5  # another group
        again = gradient_seeds(NVFP4(), changed, row_range, None)
        assert (again == seeds).tolist() == [False, True, True]
        index = torch.randint(40, (35,), generator=generator, dtype=torch.int32)
        picked = rows[index.long()]
        of_index = gradient_seeds(NVFP4(), rows, row_range, index)
        assert torch.equal(of_index, gradient_seeds(NVFP4(), picked, row_range, None))
        moved = torch.cat([rows[9:30], rows[:9]])
        row_range = whole_groups((21, 9))
        assert gradient_seeds(NVFP4(), moved, row_range, None).tolist() == [
            int(seeds[2]),
            int(seeds[0]),
        ]
    for recipe in (Float8Block(), NVFP4(stochastic_gradients=False)):
        assert gradient_seeds(recipe, rows, row_range, None) is None


def test_stochastic_gradients_are_right_in_the_mean():
    """The mean over almost equal gradients is near the exact gradient; rounded to nearest, it is not. Of
    n independent errors, the mean has the root of 1 / n of one."""
    case = cases.Case(dtype=torch.float32, bias=False, buffers=())
    inputs = cases.make_inputs(
        case, sizes=recipes.SMALL, width=recipes.OUT, out_features=recipes.OUT
    )
    errors = {}
    num_steps = 16
    for stochastic in (False, True):
        recipe = NVFP4(stochastic_gradients=stochastic, hadamard_signs=None)
        layer = cases.make_linear(case, inputs.w1, inputs.b1, precision=recipe)
        layer.requires_grad_(False)
        weight = recipe.quantize_weight(
            inputs.w1
        ).dequantize()  # so that errors are those of gradients
        mean = 0.0
        for step in range(num_steps):
            x = inputs.x.clone().requires_grad_()
            (d_x,) = torch.autograd.grad(layer(x, inputs.splits), x, inputs.d_y * (1 + 1e-6 * step))
            mean = mean + cases.used(d_x, recipes.SMALL) / num_steps
        groups = torch.repeat_interleave(torch.arange(4), torch.tensor(recipes.SMALL.splits))
        expected = torch.einsum("no,noc->nc", cases.used(inputs.d_y, recipes.SMALL), weight[groups])
        errors[stochastic] = relative_error(mean, expected)
    assert errors[False] > 0.08
    assert errors[True] < 0.05
