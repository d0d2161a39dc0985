"""Sequential: where extra inputs and keyword arguments go, what is an error, and when the fused kernels run."""

from dataclasses import dataclass

import pytest
import torch
from grouped_cases import (
    PATHS,
    SENTINEL,
    TINY,
    Case,
    assert_same_bits,
    make_inputs,
    make_linear,
    refused,
    run_experts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worker import assert_refused

from symmoe import GroupedLinear, GroupedMLP
from symmoe.errors import ArgumentError
from symmoe.grouped import ScaledSReLU, ScaledSwiGLU, Sequential, sequential

PLAIN = Case(buffers=())
INPUTS = make_inputs(PLAIN)
SPLITS = INPUTS.splits  # one tensor: equal splits in two tensors keep the modules apart
N, H = TINY.num_rows, TINY.hidden


def linears(**options) -> tuple[GroupedLinear, GroupedLinear]:
    return (
        make_linear(PLAIN, INPUTS.w1, INPUTS.b1, **options),
        make_linear(PLAIN, INPUTS.w2, INPUTS.b2, **options),
    )


def experts(**options) -> Sequential:
    fc1, fc2 = linears(**options)
    return Sequential(fc1, ScaledSwiGLU(), fc2)


def call(model: Sequential, x: torch.Tensor | None = None, **options) -> torch.Tensor:
    return model(INPUTS.x if x is None else x, SPLITS, INPUTS.scale, SPLITS, **options)


@pytest.fixture
def num_fused(monkeypatch) -> list[int]:
    """Grows by one with every call of the fused path."""
    calls: list[int] = []
    fused = sequential.fused_mlp

    def counting(*args, **kwargs):
        calls.append(1)
        return fused(*args, **kwargs)

    monkeypatch.setattr(sequential, "fused_mlp", counting)
    return calls


class Notes(nn.Module):
    """Keeps what it is called with; takes only `note`."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[object] = []

    def forward(self, x: torch.Tensor, *, note: object = None) -> torch.Tensor:
        self.notes.append(note)
        return x


class TakesAnything(nn.Module):
    def forward(self, x: torch.Tensor, **keywords: float) -> torch.Tensor:
        return x * keywords.get("factor", 1.0)


class TakesPositional(nn.Module):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor


# -- container --------------------------------------------------------------------------------------------------------
def test_is_a_container():
    first = nn.Linear(4, 4)
    second = nn.ReLU()
    third = nn.Linear(4, 2)
    model = Sequential(first, second, third)
    assert list(model) == [first, second, third]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    x = torch.randn(3, 4)
    assert_same_bits(model(x), third(second(first(x))))
    with pytest.raises(ArgumentError, match=r"modules\[1\] \(function\) must be an nn.Module"):
        Sequential(first, lambda x: x)


def test_empty():
    x = torch.randn(2)
    assert Sequential()(x) is x
    assert_refused(
        (lambda: Sequential()(x, x), "extra_inputs has 1 elements; 0 are needed"),
        (lambda: Sequential()(x, op_kwargs={0: {}}), "op_kwargs has index 0"),
    )


def nests(modules):
    """The three modules in one Sequential, and in two."""
    first, second, third = modules
    yield Sequential(first, second, third)
    yield Sequential(Sequential(first, second), third)
    yield Sequential(first, Sequential(second, third))


@pytest.mark.parametrize("hooked", [False, True])
def test_tuples_are_passed_on_and_returned(hooked):
    fc1, fc2 = linears(return_bias=True)
    h, _ = fc1(INPUTS.x, SPLITS)
    expected, _ = fc2(ScaledSwiGLU()(h, INPUTS.scale), SPLITS)
    for model in nests((fc1, ScaledSwiGLU(), fc2)):
        for inner in inner_sequentials(model) if hooked else ():
            inner.register_forward_hook(lambda *_: None)
        y, bias1, bias2 = call(model)
        assert_same_bits(y, expected)
        assert bias1 is fc1.bias
        assert bias2 is fc2.bias


def test_grouped_mlp_as_a_module():
    model = GroupedMLP(TINY.num_groups, TINY.hidden, TINY.ffn)
    x = INPUTS.x.nan_to_num()
    out = torch.empty_like(x)
    y = Sequential(nn.Identity(), model)(x, SPLITS, INPUTS.scale, op_kwargs={model: {"out": out}})
    assert y.data_ptr() == out.data_ptr()
    assert_same_bits(y[:9], model(x, SPLITS, INPUTS.scale)[:9])


# -- extra inputs -----------------------------------------------------------------------------------------------------
def wrong_numbers():
    """(model, extra inputs given, parts of the text)."""
    takers = ["1 for 0 (GroupedLinear)", "1 for 1 (ScaledSwiGLU)", "1 for 2 (GroupedLinear)"]
    for count in (0, 1, 4):
        yield (
            experts(),
            count,
            [f"has {count} elements; 3 are needed, or 2 with the splits once", *takers],
        )
    (fc1, fc2), text = linears(), "has 2 elements; 3 are needed: 1 for 0 (GroupedLinear)"
    yield Sequential(fc1, nn.Identity(), ScaledSwiGLU(), fc2), 2, [text]
    for hooked in (False, True):
        nested = Sequential(Sequential(*four()[:3]), four()[3])
        if hooked:
            nested[0].register_forward_hook(lambda *_: None)
        for count in (1, 4):
            text = f"has {count} elements; 3 are needed, or 2 with the splits once"
            yield nested, count, [text, "2 for 0 (Sequential)", "1 for 1 (GroupedLinear)"]


def test_wrong_number_of_extra_inputs():
    ran = []
    for model, count, parts in wrong_numbers():
        next(m for m in model.modules() if isinstance(m, GroupedLinear)).register_forward_hook(
            lambda *_: ran.append(1)
        )
        with refused("extra_inputs", *parts):
            model(INPUTS.x, *[SPLITS] * count)
    assert not ran


# -- op_kwargs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "notes"),
    [
        (lambda m: {0: 7}, [[7], [None]]),
        (lambda m: {-2: 7}, [[7], [None]]),
        (lambda m: {m[1]: 7, 0: 8}, [[8], [7]]),
    ],
)
def test_keywords_go_to_the_module_that_is_addressed(key, notes):
    model = Sequential(Notes(), Notes())
    op_kwargs = {address: {"note": note} for address, note in key(model).items()}
    model(torch.ones(1), op_kwargs=op_kwargs)
    assert [module.notes for module in model] == notes
    model(torch.ones(1))
    assert all(module.notes[1:] == [None] for module in model), (
        "they are not kept for the next call"
    )
    assert op_kwargs == {address: {"note": note} for address, note in key(model).items()}


def test_modules_that_take_any_keyword_or_positional_defaults():
    x = torch.ones(1)
    assert Sequential(TakesAnything())(x, op_kwargs={0: {"factor": 3.0, "whatever": 1}}) == 3
    assert Sequential(TakesPositional())(x, op_kwargs={-1: {"factor": 2.0}}) == 2
    with pytest.raises(ArgumentError, match=r"'note'.*it takes factor"):
        Sequential(TakesPositional())(x, op_kwargs={0: {"note": 2.0}})


KEYWORDS = ("out", "grad_input_out", "bias_scale", "is_first_microbatch")
FLAT_MISTAKES = {  # op_kwargs of a flat model, parts of the text
    "index": (lambda m: {3: {}}, ["index 3", "-3 to 2"]),
    "negative index": (lambda m: {-4: {}}, ["index -4", "-3 to 2"]),
    "stranger": (
        lambda m: {linears()[0]: {}},
        ["a GroupedLinear", "not in this Sequential", "0 (GroupedLinear)", "1 (Sca"],
    ),
    "text": (lambda m: {"0": {}}, ["a str", "not in this Sequential", "2 (GroupedLinear)"]),
    "bool": (lambda m: {True: {}}, ["not in this Sequential", "2 (GroupedLinear)"]),
    "class": (lambda m: {GroupedLinear: {}}, ["not in this Sequential"]),
    "module and index": (
        lambda m: {m[0]: {}, 0: {}},
        ["0 (GroupedLinear) twice", "a GroupedLinear", "by 0"],
    ),
    "two indices": (lambda m: {2: {}, -1: {}}, ["2 (GroupedLinear) twice", "by 2", "by -1"]),
    "keyword": (lambda m: {0: {"dgrad_out": 1}}, ["'dgrad_out'", "0 (GroupedLinear)", *KEYWORDS]),
    "positional": (lambda m: {0: {"splits": 1}}, ["'splits'", "0 (GroupedLinear)", *KEYWORDS]),
    "the row tensor": (lambda m: {-1: {"x": 1}}, ["'x'", "2 (GroupedLinear)", *KEYWORDS]),
    "no keywords": (
        lambda m: {1: {"out": 1}},
        ["'out'", "1 (ScaledSwiGLU)", "takes no keyword arguments"],
    ),
    "no keywords, by module": (
        lambda m: {m[1]: {"scale": 1}},
        ["'scale'", "takes no keyword arguments"],
    ),
    **{
        f"{value} for all": (
            lambda m, v=value: v,
            [f"op_kwargs ({type(value).__name__}) must be a dict"],
        )
        for value in ([], [{"out": 1}], "out", 3)
    },
    **{
        f"{value} for one": (lambda m, v=value: {0: v}, ["op_kwargs"])
        for value in (None, 3, ["out"])
    },
}


NESTED_MISTAKES = {  # the same of [FC1, [activation, FC2]]
    "a module of the inner one": (
        lambda m: {m[1][0]: {}},
        ["not in this Sequential", "0 (GroupedLinear)"],
    ),
    "flat index": (lambda m: {2: {}}, ["index 2", "-2 to 1"]),
    "keyword of a module": (
        lambda m: {1: {"out": 1}},
        ["'out' to 1 (Sequential)", "it takes op_kwargs"],
    ),
    "inner index": (lambda m: {1: {"op_kwargs": {2: {}}}}, ["index 2", "-2 to 1"]),
    "inner keyword": (
        lambda m: {1: {"op_kwargs": {0: {"a": 1}}}},
        ["'a' to 1.0 (ScaledSwiGLU)", "no keyword"],
    ),
    "inner stranger": (
        lambda m: {1: {"op_kwargs": {m[0]: {}}}},
        ["1.0 (ScaledSwiGLU), 1.1 (GroupedLinear)"],
    ),
    "inner twice": (
        lambda m: {1: {"op_kwargs": {1: {}, m[1][1]: {}}}},
        ["1.1 (GroupedLinear) twice"],
    ),
    "no mapping": (lambda m: {1: {"op_kwargs": [1]}}, ["op_kwargs (list) must be a dict"]),
}


@pytest.mark.parametrize(
    ("is_nested", "make", "parts"),
    [
        pytest.param(is_nested, *mistake, id=name)
        for is_nested, mistakes in enumerate((FLAT_MISTAKES, NESTED_MISTAKES))
        for name, mistake in mistakes.items()
    ],
)
def test_wrong_op_kwargs(is_nested, make, parts):
    model, ran = [*nests(experts())][2 * is_nested], []
    for module in model.modules():
        if not isinstance(module, Sequential):
            module.register_forward_pre_hook(lambda *_: ran.append(1))
    with refused(*parts):
        call(model, op_kwargs=make(model))
    assert not ran, "nothing has been computed"
    call(model)


def test_module_that_stands_twice():
    notes = Notes()
    model = Sequential(notes, nn.Identity(), notes)
    assert len(model) == 3
    with pytest.raises(
        ArgumentError, match=r"a Notes, which is at \[0, 2\] here; address it by index"
    ):
        model(torch.ones(1), op_kwargs={notes: {"note": 1}})
    model(torch.ones(1), op_kwargs={0: {"note": 1}, 2: {"note": 2}})
    assert notes.notes == [1, 2]


# -- fusion -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "activation", [ScaledSwiGLU(), ScaledSReLU()], ids=lambda activation: type(activation).__name__
)
@pytest.mark.parametrize("path", PATHS)
def test_paths_do_what_they_are_called(path, activation, num_fused):
    inputs = make_inputs(PLAIN, width=activation.activation.hidden_width(TINY.ffn))
    run_experts(path, PLAIN, inputs, activation=activation)
    assert len(num_fused) == (path == "sequential")


DOUBLED = torch.tensor([3, 0, 0, 2, 2, 2, 4, 4])
SPLITS_TWICE = {
    "one tensor": (SPLITS, SPLITS, True),
    "views of one tensor": (SPLITS, SPLITS[:], True),
    "equal lists": ([3, 0, 2, 4], [3, 0, 2, 4], True),
    "different lists": ([3, 0, 2, 4], [3, 2, 0, 4], False),
    "equal tensors": (SPLITS, SPLITS.clone(), False),
    "tensor and list": (SPLITS, [3, 0, 2, 4], False),
    # At one address, but other numbers: the second has a stride.
    "one address, other strides": (DOUBLED[:4], DOUBLED[::2], False),
}


@pytest.mark.parametrize(
    ("first", "second", "fuses"),
    SPLITS_TWICE.values(),
    ids=SPLITS_TWICE,
)
def test_splits_that_are_the_same(first, second, fuses, num_fused):
    model = experts()
    y = model(INPUTS.x, first, INPUTS.scale, second)
    assert_same_bits(y, model[2](model[1](model[0](INPUTS.x, first), INPUTS.scale), second))
    assert len(num_fused) == fuses


def unfusible():
    """Three modules and op_kwargs, by what keeps the modules apart."""
    fc1, fc2 = linears()

    class Subclass(GroupedLinear):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 2

    class Activation(ScaledSwiGLU):
        def forward(self, h, scale):
            return super().forward(h, scale) * 2

    sub = Subclass(4, 16, 16)
    plain = (fc1, ScaledSwiGLU(), fc2)
    sub.load_state_dict(fc1.state_dict())
    hooked, pre_hooked, patched = (experts() for _ in range(3))
    hooked[1].register_forward_hook(lambda module, args, out: out * 3)
    pre_hooked[2].register_forward_pre_hook(lambda module, args: (args[0] * 3, *args[1:]))
    patched[1].forward = lambda h, scale: ScaledSwiGLU()(h, scale) * 3
    return {
        "subclass": ((sub, ScaledSwiGLU(), fc2), {}),
        "activation of its own": ((fc1, Activation(), fc2), {}),
        "out of FC1": (plain, {0: {"out": torch.empty(12, 16)}}),
        "grad_input_out of FC2": (plain, {2: {"grad_input_out": torch.empty(12, 8)}}),
        "another bias scale": (plain, {2: {"bias_scale": INPUTS.scale.clone()}}),
        "bias scale of FC1": (plain, {0: {"bias_scale": INPUTS.scale}}),
        "forward hook": (hooked, {}),
        "forward pre-hook": (pre_hooked, {}),
        "forward of its own": (patched, {}),
    }


UNFUSIBLE = unfusible()


@pytest.mark.parametrize(("modules", "op_kwargs"), UNFUSIBLE.values(), ids=UNFUSIBLE)
def test_what_keeps_modules_apart(modules, op_kwargs, num_fused):
    model = Sequential(*modules)
    y = call(model, op_kwargs=op_kwargs)
    assert not num_fused
    h = model[0](INPUTS.x, SPLITS, **op_kwargs.get(0, {}))
    assert_same_bits(y[:9], model[2](model[1](h, INPUTS.scale), SPLITS, **op_kwargs.get(2, {}))[:9])


def test_shapes_that_do_not_fit_are_the_modules_errors(num_fused):
    fc1, _ = linears()
    assert_refused(
        (
            lambda: Sequential(fc1, ScaledSwiGLU(), GroupedLinear(4, 24, 16))(
                INPUTS.x, SPLITS, INPUTS.scale, SPLITS
            ),
            r"x has shape \[12, 8\]; it must be \[..., N, 24\]",
        ),
        (
            lambda: Sequential(fc1, ScaledSwiGLU(), GroupedLinear(3, 8, 16))(
                INPUTS.x, SPLITS, INPUTS.scale, SPLITS
            ),
            r"splits has shape \[4\]; it must be \[3\]",
        ),
    )
    assert not num_fused


def test_first_micro_batch_of_one_layer():
    case = Case(main_grad=True, buffers=())
    fc1 = make_linear(case, INPUTS.w1, INPUTS.b1)
    fc2 = make_linear(case, INPUTS.w2, INPUTS.b2)
    call(
        Sequential(fc1, ScaledSwiGLU(), fc2), op_kwargs={0: {"is_first_microbatch": True}}
    ).backward(INPUTS.d_y)
    assert not fc1.weight.main_grad[1].any()
    assert (fc2.weight.main_grad[1] == 0.5).all()


# -- splits once for a pattern ----------------------------------------------------------------------------------------
def trained(model: Sequential, *extra_inputs, op_kwargs=None) -> list[torch.Tensor]:
    """y, and the gradients of x, of the scale (if it is given) and of the parameters in order, of rows that belong to a
    group. The scale stands for each None in `extra_inputs`, and for a `bias_scale` of None in `op_kwargs`."""
    model.zero_grad()
    x = INPUTS.x.nan_to_num().requires_grad_()
    scale = INPUTS.scale.nan_to_num().requires_grad_()

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return scale if value is None else value

    y = model(x, *map(filled, extra_inputs), op_kwargs=filled(op_kwargs or {}))
    y.backward(INPUTS.d_y.nan_to_num())
    rows = [y.detach(), x.grad, *([] if scale.grad is None else [scale.grad])]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [tensor.clone() for tensor in (*(row[: TINY.num_used] for row in rows), *gradients)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for pair in zip(actual, expected, strict=True):
        assert_same_bits(*pair)


@pytest.mark.parametrize("hooked", [None, 0, 1, 2])
@pytest.mark.parametrize(
    "splits", [SPLITS, SPLITS.numpy(), SPLITS.tolist()], ids=lambda splits: type(splits).__name__
)
def test_splits_once(splits, hooked, num_fused):
    model = experts()
    bias_scale = {2: {"bias_scale": None}}
    expected = trained(model, splits, None, splits, op_kwargs=bias_scale)
    num_fused.clear()
    if hooked is not None:
        model[hooked].register_forward_hook(lambda *_: None)
    assert_same(trained(model, splits, None, op_kwargs=bias_scale), expected)
    assert len(num_fused) == (hooked is None)


def test_splits_once_for_each_pattern_or_for_none(num_fused):
    second_splits = torch.tensor([0, 5, 1, 3])
    model = Sequential(*experts(), GroupedMLP(TINY.num_groups, H, TINY.ffn), *experts())
    full = (SPLITS, None, SPLITS, second_splits, None, second_splits, None, second_splits)
    assert_same(
        trained(model, SPLITS, None, second_splits, None, second_splits, None),
        trained(model, *full),
    )
    assert len(num_fused) == 2 * 2
    for count in (5, 7, 9):
        extra_inputs = (*full, SPLITS)[:count]
        with refused(
            f"extra_inputs has {count} elements; 8 are needed, or 6 with", "2 for 3 (GroupedMLP)"
        ):
            trained(model, *extra_inputs)


def test_patterns_do_not_overlap():
    """Linear, activation, linear, activation, linear: the first three are the pattern, whatever runs fused."""
    torch.manual_seed(0)
    widths = ((H, H), (TINY.ffn, H), (TINY.ffn, H))
    first, second, third = (GroupedLinear(TINY.num_groups, *width) for width in widths)
    model = Sequential(first, ScaledSwiGLU(), second, ScaledSwiGLU(), third)
    second_splits = torch.tensor([0, 5, 1, 3])
    assert_same(
        trained(model, SPLITS, None, None, second_splits),
        trained(model, SPLITS, None, SPLITS, None, second_splits),
    )
    with refused("extra_inputs has 3 elements; 5 are needed, or 4 with"):
        trained(model, SPLITS, None, None)


def test_a_layer_that_brings_its_splits_is_in_no_pattern():
    class Fixed(GroupedLinear):
        num_extra_inputs = 0

        def forward(self, x):
            return super().forward(x, SPLITS)

    model = Sequential(
        linears()[0], ScaledSwiGLU(), Fixed(TINY.num_groups, TINY.ffn, H), *experts()
    )
    assert_same(
        trained(model, SPLITS, None, SPLITS, None),
        trained(model, SPLITS, None, SPLITS, None, SPLITS),
    )


# -- Sequential inside Sequential -------------------------------------------------------------------------------------
class Block(Sequential):
    """A subclass that changes nothing about the call."""


# Modules 0 to 3 are Identity, FC1, activation, FC2. Second: where the keywords of FC1 and FC2 go, as paths of indices.
NESTED = {
    "before": (lambda m: Sequential(Sequential(m[0]), *m[1:]), [1], [3]),
    "first layer": (lambda m: Sequential(m[0], Sequential(m[1]), *m[2:]), [1, 0], [3]),
    "border after the activation": (lambda m: Sequential(Sequential(*m[:3]), m[3]), [0, 1], [1]),
    "border before the activation": (lambda m: Sequential(*m[:2], Block(*m[2:])), [-2], [-1, -1]),
    "whole pattern": (lambda m: Sequential(m[0], Sequential(*m[1:])), [1, 0], [1, -1]),
    "twice": (
        lambda m: Sequential(Sequential(m[0], Block(*m[1:3])), Sequential(m[3])),
        [0, 1, 0],
        [-1, 0],
    ),
    "empty": (lambda m: Sequential(*m[:2], Sequential(), *m[2:]), [1], [4]),
}
counts = pytest.mark.parametrize(
    "extra_inputs", [(SPLITS, None, SPLITS), (SPLITS, None)], ids=["twice", "once"]
)


def four() -> list[nn.Module]:
    return [nn.Identity(), *experts()]


def keywords_at(*routes: tuple[list[int], dict]) -> dict:
    """op_kwargs that bring each dict to the module at the path."""
    op_kwargs: dict = {}
    for path, keywords in routes:
        inner = op_kwargs
        for index in path[:-1]:
            inner = inner.setdefault(index, {"op_kwargs": {}})["op_kwargs"]
        inner[path[-1]] = keywords
    return op_kwargs


def inner_sequentials(model: Sequential) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, Sequential) and module is not model
    ]


@pytest.mark.parametrize(("nest", "first", "last"), NESTED.values(), ids=NESTED.keys())
@counts
@pytest.mark.parametrize("hooked", [False, True])
def test_keywords_and_buffers_of_nested(nest, first, last, extra_inputs, hooked, num_fused):
    modules = four()
    expected = trained(
        Sequential(*modules), SPLITS, None, SPLITS, op_kwargs={3: {"bias_scale": None}}
    )
    num_fused.clear()
    model = nest(modules)
    out = buffer()
    d_x = buffer()
    assert model.num_extra_inputs == 3
    hooks = [
        module.register_forward_hook(lambda *_: None)
        for module in inner_sequentials(model)
        if hooked
    ]
    assert not hooked or hooks
    op_kwargs = keywords_at(
        (first, {"grad_input_out": d_x}), (last, {"out": out, "bias_scale": None})
    )
    assert_same(trained(model, *extra_inputs, op_kwargs=op_kwargs), expected)
    assert_same_bits(out[: TINY.num_used], expected[0])
    assert_same_bits(d_x[: TINY.num_used], expected[1])
    for tail in (out[TINY.num_used :], d_x[TINY.num_used :]):
        assert (tail == SENTINEL).all()
    assert hooked or len(num_fused) == 1


@counts
@pytest.mark.parametrize(
    "name", ["first layer", "border after the activation", "border before the activation"]
)
@pytest.mark.parametrize(
    "kind", ["forward", "forward_pre", "full_backward", "full_backward_pre", "patched", "global"]
)
def test_what_sees_the_call_of_a_nested_one_keeps_it_apart(kind, name, extra_inputs, num_fused):
    modules, calls = four(), []
    expected = trained(Sequential(*modules), SPLITS, None, SPLITS)
    num_fused.clear()
    model = NESTED[name][0](modules)
    (inner,) = inner_sequentials(model)
    if kind == "patched":
        forward = inner.forward
        inner.forward = lambda *args, **options: calls.append(inner) or forward(*args, **options)
    elif kind == "global":
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append(module)
        )
    else:
        getattr(inner, f"register_{kind}_hook")(lambda module, *_: calls.append(module))
    try:
        assert_same(trained(model, *extra_inputs), expected)
    finally:
        if kind == "global":
            handle.remove()
    assert calls.count(inner) == 1
    assert not num_fused


def test_a_hook_of_a_nested_one_sees_all_inputs(num_fused):
    modules, calls = four(), []
    model = Sequential(modules[0], Sequential(*modules[1:]))
    model[1].register_forward_pre_hook(lambda module, args: calls.extend(args[1:]))
    call(Sequential(*modules), INPUTS.x)
    model(INPUTS.x, SPLITS, INPUTS.scale)
    assert all(
        actual is expected
        for actual, expected in zip(calls, (SPLITS, INPUTS.scale, SPLITS), strict=True)
    )
    assert len(num_fused) == 2, "its own modules run fused all the same"


def test_a_subclass_says_what_its_own_forward_takes():
    class Own(Sequential):
        num_extra_inputs = 1

        def forward(self, x, scale):
            return super().forward(x, SPLITS, scale)

    modules = four()
    expected = trained(Sequential(*modules), SPLITS, None, SPLITS)
    assert_same(trained(Sequential(modules[0], Own(*modules[1:])), None), expected)


# -- arguments of all modules are looked at before the first one runs -------------------------------------------------


def two_layers() -> Sequential:
    """Linear layers H -> H."""
    torch.manual_seed(0)
    return Sequential(*(GroupedLinear(TINY.num_groups, H, H) for _ in range(2)))


def buffer() -> torch.Tensor:
    return torch.full((N, H), SENTINEL)


@dataclass(frozen=True)
class Chain:
    """Modules H -> H, those from `border` on in a Sequential of their own, and one that has a hook or none."""

    kinds: tuple[str, ...]
    border: int
    hooked: int | None
    delays: bool
    trains: bool

    def build(self) -> tuple[Sequential, list[torch.Tensor]]:
        """The model, the same each time, and its extra inputs."""
        torch.manual_seed(0)
        modules = [
            GroupedLinear(TINY.num_groups, H, H, delay_wgrad=self.delays)
            if kind == "linear"
            else {"identity": nn.Identity, "activation": ScaledSReLU}[kind]()
            for kind in self.kinds
        ]
        if self.hooked is not None:
            modules[self.hooked].register_forward_hook(lambda *_: None)
        splits = SPLITS.clone()
        inputs = {"linear": [splits], "activation": [INPUTS.scale.nan_to_num()], "identity": []}
        extra_inputs = [tensor for kind in self.kinds for tensor in inputs[kind]]
        nested = Sequential(*modules[self.border :])
        return Sequential(*modules[: self.border], nested), extra_inputs

    def path(self, index: int) -> list[int]:
        """Where the module is in the model."""
        return [index] if index < self.border else [self.border, index - self.border]

    def results(
        self,
        model: Sequential,
        x: torch.Tensor,
        extra_inputs: list[torch.Tensor],
        buffers: dict[int, dict[str, torch.Tensor]],
    ) -> list[torch.Tensor]:
        """y, and if it trains dx and the gradients of parameters. buffers: the keywords of modules."""
        op_kwargs = keywords_at(*((self.path(i), keywords) for i, keywords in buffers.items()))
        with torch.set_grad_enabled(self.trains):
            y = model(x, *extra_inputs, op_kwargs=op_kwargs)
        results = [y.detach()[: TINY.num_used].clone()]
        if self.trains:
            y.backward(INPUTS.d_y.nan_to_num())
            for module in model.modules():
                if isinstance(module, GroupedLinear):
                    module.backward_dw()
            results += [x.grad[: TINY.num_used], *(param.grad for param in model.parameters())]
        return results

    def stages(self, buffers: dict[int, dict[str, torch.Tensor]]) -> list[int]:
        """The number of each module's stage: linear, activation, linear are one, if nobody looks between them."""
        numbers: list[int] = []
        while len(numbers) < len(self.kinds):
            first = len(numbers)
            last = first + 2
            number = first  # larger than those before it
            is_pattern = self.kinds[first : last + 1] == ("linear", "activation", "linear")
            is_fused = (
                is_pattern
                and self.hooked not in range(first, last + 1)
                and "out" not in buffers.get(first, ())
                and "grad_input_out" not in buffers.get(last, ())
            )
            numbers += (
                [number] * 3 if is_fused else range(first, last + 1 if is_pattern else last - 1)
            )
        return numbers


@st.composite
def chains(draw) -> Chain:
    kinds = st.lists(st.sampled_from(("linear", "identity", "activation")), max_size=3)
    kinds = ("linear", *draw(kinds), "linear")
    indices = range(len(kinds))
    return Chain(
        kinds,
        border=len(kinds) - draw(st.sampled_from(indices)),
        hooked=draw(st.sampled_from((None, *indices))),
        delays=draw(st.booleans()),
        trains=draw(st.booleans()),
    )


def memory_of(tensor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory as large as the largest tensor of a chain, and a buffer at its start; the tensor is put there, too."""
    memory = torch.full((4 * H * H,), SENTINEL)
    if tensor is not None:
        values = memory.data.view(tensor.dtype)[: tensor.numel()]
        tensor.data = values.view(tensor.shape).copy_(tensor.data)
    return memory, memory[: N * H].view(N, H)


@settings(max_examples=200)
@given(chain=chains(), is_read=st.sampled_from((False, False, True)), data=st.data())
def test_buffers_share_memory(chain: Chain, is_read: bool, data: st.DataObject):
    """A result and a gradient never do, nor either of them and a tensor that any module reads. Two results do, if
    nobody differentiates them and a module between them makes its own; two gradients do, if such a module does not read
    the second one later."""
    linears = [i for i, kind in enumerate(chain.kinds) if kind == "linear"]
    buffers = st.tuples(st.sampled_from(linears), st.sampled_from(("out", "grad_input_out")))
    (i, first), (j, second) = sorted(
        data.draw(st.lists(buffers, min_size=2, max_size=2, unique=True))
    )
    x = INPUTS.x.nan_to_num().requires_grad_(chain.trains)
    model, extra_inputs = chain.build()
    bias_scale = INPUTS.scale.nan_to_num()
    tensors = [x, bias_scale, *extra_inputs, *model.parameters()]
    tensor = data.draw(st.sampled_from(range(len(tensors)))) if is_read else None
    memory, shared = memory_of(tensors[tensor] if is_read else None)
    keywords = {i: {first: shared}}
    if is_read:
        keywords.setdefault(linears[-1], {})["bias_scale"] = bias_scale
    else:
        keywords.setdefault(j, {})[second] = shared
    stages = chain.stages(keywords)
    between = [
        index
        for index, stage in enumerate(stages)
        if stages[i] < stage < stages[j] and chain.kinds[index] != "identity"
    ]
    reads_later = chain.trains
    if first == "grad_input_out":
        reads_later = chain.delays and between[-1:] != [] and chain.kinds[between[-1]] == "linear"
    before = memory.clone()
    if first == second and between and not reads_later and not is_read:
        x_again = INPUTS.x.nan_to_num().requires_grad_(chain.trains)
        expected = chain.results(chain.build()[0], x_again, extra_inputs, {})
        assert_same(chain.results(model, x, extra_inputs, keywords), expected)
        return
    name = f"{first} of module {'.'.join(map(str, chain.path(i)))} (GroupedLinear)"
    shape = list(tensors[tensor].shape if is_read else shared.shape)
    with refused(name if is_read else "out", f"overlaps a tensor of shape {shape}"):
        chain.results(model, x, extra_inputs, keywords)
    assert torch.equal(memory, before), "something has been computed"


LATER_MISTAKES = {  # extra inputs of the last of two linears, its keywords, text
    "splits too large": ([3, 0, 2, 8], {}, r"^splits \(\[3, 0, 2, 8\]\) .* at most 12 rows"),
    "splits too long": ([3, 0, 2, 4, 0], {}, r"^splits has shape \[5\]; it must be \[4\]"),
    "splits on meta": (SPLITS.to("meta"), {}, "^splits is on meta; rows is on cpu"),
    "splits of floats": (SPLITS.float(), {}, r"^splits has dtype torch\.float32"),
    "out": (
        SPLITS,
        {"out": torch.zeros(N + 1, H)},
        r"^out has shape \[13, 16\]; it must be \[12, 16\]",
    ),
    "gradient": (
        SPLITS,
        {"grad_input_out": torch.zeros(N, 8)},
        r"^grad_input_out has shape \[12, 8\]",
    ),
    "strided": (SPLITS, {"out": torch.zeros(N, 2 * H)[:, ::2]}, "^out has strides"),
    "bias_scale": (SPLITS, {"bias_scale": torch.zeros(N - 1)}, r"^bias_scale is .* \[11\]"),
}


@pytest.mark.parametrize(
    ("splits", "keywords", "text"),
    LATER_MISTAKES.values(),
    ids=LATER_MISTAKES,
)
@pytest.mark.parametrize("hooked", [False, True])
def test_mistakes_of_a_later_module_are_found_before_the_first_runs(splits, keywords, text, hooked):
    model = two_layers()
    out = buffer()
    if hooked:
        model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match=text):
        model(INPUTS.x.nan_to_num(), SPLITS, splits, op_kwargs={0: {"out": out}, 1: keywords})
    assert (out == SENTINEL).all()


def test_a_dtype_that_hooks_may_change_is_the_modules_own_affair():
    """As with mixed precision, where hooks cast what goes in and the weights are others by then."""
    model = two_layers()
    x = INPUTS.x.nan_to_num()
    expected = model.bfloat16()(x.bfloat16(), SPLITS, SPLITS)
    out = torch.empty(N, H, dtype=torch.bfloat16)
    model[1].float()
    model[1].register_forward_pre_hook(lambda module, args: module.bfloat16() and None)
    y = model(x.bfloat16(), SPLITS, SPLITS, op_kwargs={1: {"out": out}})
    assert_same_bits(y[: TINY.num_used], expected[: TINY.num_used])
