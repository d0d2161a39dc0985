"""Launches past the JIT, without a GPU: a fake JIT counts what reaches it, fake compiled kernels keep arguments."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from simulated_ranks import Case, run_case  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel, make_backend  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from symmoe.kernels import control, gpu  # noqa: E402
from symmoe.kernels.control import ControlLayout, Peers  # noqa: E402
from symmoe.kernels.gpu import plan, sync, tokens  # noqa: E402
from symmoe.kernels.gpu.launch import FastLaunch, fast_launch  # noqa: E402

FIRST_GLOBAL = tl.constexpr(3)
SECOND_GLOBAL = tl.constexpr(4)
CPU = -1  # what Tensor.get_device says of a CPU tensor
STREAM = 77


@triton.jit(do_not_specialize=["count", "plain"], do_not_specialize_on_alignment=["index"])
def example_kernel(
    desc,
    x,
    index,
    number,
    count: tl.int32,
    typed: tl.int64,
    fraction: tl.float32,
    plain,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr = "some",
):
    tl.store(x, FIRST_GLOBAL + SECOND_GLOBAL + WIDTH)


class FakeDriver:
    """What launches ask a driver for; its device is where CPU tensors say they are."""

    def __init__(self):
        self.device = CPU

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        assert device == self.device
        return STREAM

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class FakeCompiled(CompiledKernel):
    """A compiled kernel that keeps the arguments of its launches."""

    def __init__(self):
        self.function, self.packed_metadata, self.launches = 5, ("metadata",), []

    def run(self, *args):
        self.launches.append(args)


class FakeJIT:
    """Stands in for a JITFunction's `run`: keeps the launches' arguments and "compiles" every launch."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __call__(self, *args, grid, warmup, **kwargs):
        assert not warmup
        self.calls.append((args, grid, kwargs))
        assert self.kernel.cache_key  # as compiling does, this notes which globals the kernel uses
        for (name, _), (value, module) in self.kernel.used_global_vals.items():
            if module.get(name) != value:
                raise RuntimeError(f"{name} has changed")
        return FakeCompiled()


@pytest.fixture
def fake_driver(monkeypatch):
    result = FakeDriver()
    monkeypatch.setattr(driver, "_active", result)
    return result


@pytest.fixture
def launch(fake_driver, monkeypatch):
    """A fresh wrapper of the example, and its JIT."""
    jit = FakeJIT(example_kernel)
    monkeypatch.setattr(example_kernel, "run", jit, raising=False)
    return fast_launch(example_kernel), jit


def unaligned(tensor):
    """The same numbers at an address that is a multiple of 4 and not of 16."""
    memory = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    first = next(i for i in range(8) if memory[i:].data_ptr() % 16 == 4)
    return memory[first:][: tensor.numel()].view(tensor.shape).copy_(tensor)


def arguments(**changes):
    """(args, kwargs) of a call of the example."""
    x = torch.zeros(8, 8)
    assert x.data_ptr() % 16 == 0
    values = {
        "desc": TensorDescriptor.from_tensor(x, [4, 8]),
        "x": x,
        "index": torch.zeros(8, dtype=torch.int32),
        "number": 7,
        "count": 7,
        "typed": 7,
        "fraction": 0.5,
        "plain": 7,
    }
    kwargs = {"WIDTH": 64, "num_warps": 4}
    for name, value in changes.items():
        (values if name in values else kwargs)[name] = value
    return list(values.values()), kwargs


F32, F16 = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.float16)
INTEGERS = [7, 8, 0, 1, 16, 2**31, 2**31 - 1, -(2**31), -(2**31) - 16, 2**62, 2**63, 2**63 + 5]
CHOICES = {
    "desc": [
        TensorDescriptor.from_tensor(F32, [4, 8]),
        TensorDescriptor.from_tensor(F32, [8, 4]),
        TensorDescriptor.from_tensor(F32[0], [4]),
        TensorDescriptor.from_tensor(F16, [4, 8]),
        None,
        F32,
    ],
    "x": [F32, F16, F16.bfloat16(), unaligned(F32), torch.nn.Parameter(F32), None, 7, 1.0, True],
    "index": [F32, unaligned(F32), F16, None],
    "number": [*INTEGERS, True, False, 1.0, 2.5, None],
    "count": [*INTEGERS[:5], 2**40, True],
    "typed": [*INTEGERS, True],
    "fraction": [0.5, 1.0, 1, 16],
    "plain": [*INTEGERS, None, 0.5],
    "WIDTH": [64, 65, 1, 64.0, "64", None, (1, 2), (1, 3), tl.float32, tl.float16],
    "KIND": ["some", "other", None],
    "num_warps": [4, 8],
    "num_stages": [2, 3],
    "maxnreg": [None, 128],
    "enable_fp_fusion": [True, False],
}


def test_a_known_call_goes_straight_to_the_compiled_kernel(launch):
    kernel, jit = launch
    args, kwargs = arguments()
    compiled = kernel[(3, 2)](*args, **kwargs)
    assert jit.calls == [(tuple(args), (3, 2), kwargs)]
    assert not compiled.launches  # the JIT has launched it

    other, _ = arguments()
    assert kernel[(5,)](*other, **kwargs) is compiled
    assert len(jit.calls) == 1
    desc, x, index, *numbers = other
    expected = [desc, x.data_ptr(), index.data_ptr(), *numbers, 64, "some"]
    assert compiled.launches == [(5, 1, 1, STREAM, 5, ("metadata",), None, None, None, *expected)]


def test_keywords_may_come_in_any_order_and_for_any_parameter(launch):
    kernel, jit = launch
    args, kwargs = arguments()
    names = [*kernel.arg_names[: len(args)]]
    for split in range(len(args) + 1):
        keywords = dict(reversed([*zip(names[split:], args[split:], strict=True), *kwargs.items()]))
        compiled = kernel[(1,)](*args[:split], **keywords)
        assert kernel[(1,)](*args[:split], **keywords) is compiled
        assert compiled.launches[0][9:] == (args[0], args[1].data_ptr(), args[2].data_ptr(), *args[3:], 64, "some")
    assert len(jit.calls) == len(args) + 1
    by_position = kernel[(1,)](*args, 64, "other", num_warps=4)
    assert kernel[(1,)](*args, 64, "other", num_warps=4) is by_position
    assert kernel[(1,)](*args, 65, "other", num_warps=4) is not by_position


@pytest.mark.parametrize("name", CHOICES)
def test_everything_that_changes_code_changes_the_key(launch, name):
    """Two calls that the JIT would compile differently never share a variant; the JIT itself says which those are."""
    kernel, _ = launch
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def jit_key(args, kwargs):
        _, specialization, options = bind(*args, **kwargs)
        return repr(specialization), repr(options)

    calls = [arguments(**{name: value}) for value in CHOICES[name]]
    variants = [kernel[(1,)](*args, **kwargs) for args, kwargs in calls]
    for (a, first), (b, second) in itertools.combinations(zip(calls, variants, strict=True), 2):
        assert first is not second or jit_key(*a) == jit_key(*b), (a, b)


def test_numbers_of_a_fixed_type_and_addresses_are_not_in_the_key(launch):
    kernel, jit = launch
    for count, fraction in ((7, 0.5), (1, 1.0), (16, 2.0), (2**40, 0.25)):
        args, kwargs = arguments(count=count, fraction=fraction, index=torch.zeros(4, dtype=torch.int32))
        kernel[(count % 5,)](*args, **kwargs)
    for number in (7, 9, 10, 2**30 + 1):
        args, kwargs = arguments(number=number, typed=number, plain=number, index=unaligned(torch.zeros(4).int()))
        kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == 1


def test_the_device_is_in_the_key(launch, fake_driver):
    kernel, jit = launch
    args, kwargs = arguments(desc=None, x=None, index=None)
    for device in (0, 1, 0, 1):
        fake_driver.device = device
        kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == 2


NOT_UNDERSTOOD = {
    "tuple": {"number": (1, 2)},
    "tensor for a number": {"count": torch.zeros(1, dtype=torch.int32)},
    "none for a number": {"count": None},
    "something like a tensor": {"x": triton.runtime.jit.MockTensor(torch.float32)},
    "string": {"number": "7"},
    "function as a constant": {"WIDTH": example_kernel},
    "constant in a constant": {"WIDTH": (1, tl.constexpr(2))},
    "list as a constant": {"WIDTH": [1, 2]},
    "dict as an option": {"extern_libs": {"a": "b"}},
}


@pytest.mark.parametrize("what", NOT_UNDERSTOOD)
def test_what_is_not_understood_takes_the_ordinary_way(launch, what):
    kernel, jit = launch
    kernel[(1,)](*arguments()[0], **arguments()[1])
    args, kwargs = arguments(**NOT_UNDERSTOOD[what])
    for count in (2, 3, 4):
        kernel[(1,)](*args, **kwargs)
        assert len(jit.calls) == count
    got, _, options = jit.calls[-1]
    assert all(a is b for a, b in zip(got, args, strict=True))
    assert options == kwargs


@pytest.mark.parametrize("others", [{"desc": None, "index": None}, {"x": None, "index": None}])
def test_tensors_of_another_device_take_the_ordinary_way(launch, fake_driver, others):
    """The JIT's launcher refuses a CPU tensor, which an address alone does not show."""
    kernel, jit = launch
    fake_driver.device = 0
    args, kwargs = arguments(**others)
    for count in (1, 2, 3):
        kernel[(1,)](*args, **kwargs)
        assert len(jit.calls) == count


def test_a_callable_grid_takes_the_ordinary_way(launch):
    kernel, jit = launch
    args, kwargs = arguments()
    for _ in range(3):
        kernel[lambda meta: (1,)](*args, **kwargs)
        kernel[[1]](*args, **kwargs)
    assert len(jit.calls) == 6


def test_wrong_calls_are_refused_by_the_jit(fake_driver):
    kernel = fast_launch(example_kernel)
    args, kwargs = arguments()
    for wrong_args, wrong_kwargs in (
        (args[:3], kwargs),
        (args, {"num_warps": 4}),
        ([*args, 64, "some", 1], {}),
        (args, {**kwargs, "x": args[1]}),
        (args, {**kwargs, "grid": (1,)}),
    ):
        with pytest.raises(TypeError):
            kernel[(1,)](*wrong_args, **wrong_kwargs)


def no_hook(*args, **kwargs):
    pass


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (knobs.runtime, "launch_enter_hook", no_hook),
        (knobs.runtime, "launch_exit_hook", no_hook),
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", no_hook),
        (knobs.compilation, "instrumentation_mode", "consan"),
        (example_kernel, "debug", True),
        (example_kernel, "pre_run_hooks", [no_hook]),
    ],
)
def test_watched_launches_take_the_ordinary_way(launch, monkeypatch, where, name, value):
    kernel, jit = launch
    args, kwargs = arguments()
    kernel[(1,)](*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, value)
        kernel[(1,)](*args, **kwargs)
        assert len(jit.calls) == 2
    kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == 2


def test_hooks_in_tritons_chains_are_seen(launch):
    kernel, jit = launch
    args, kwargs = arguments()
    kernel[(1,)](*args, **kwargs)
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(no_hook)
        try:
            before = len(jit.calls)
            kernel[(1,)](*args, **kwargs)
            assert len(jit.calls) == before + 1
        finally:
            chain.remove(no_hook)
    before = len(jit.calls)
    kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == before


def test_changed_globals_take_the_ordinary_way(launch, monkeypatch):
    """The JIT raises when a global that was compiled in has changed; it gets to see every such launch."""
    kernel, jit = launch
    args, kwargs = arguments()
    kernel[(1,)](*args, **kwargs)
    kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == 1
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SECOND_GLOBAL", tl.constexpr(5))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="SECOND_GLOBAL has changed"):
                kernel[(1,)](*args, **kwargs)
        patch.delitem(globals(), "SECOND_GLOBAL")
        with pytest.raises(RuntimeError, match="SECOND_GLOBAL has changed"):
            kernel[(1,)](*args, **kwargs)
        patch.setitem(globals(), "SECOND_GLOBAL", tl.constexpr(4))  # an equal one
        compiled = kernel[(1,)](*args, **kwargs)
        assert len(jit.calls) == 5
        assert kernel[(1,)](*args, **kwargs) is compiled


def test_a_launch_that_compiles_nothing_is_not_remembered(launch, monkeypatch):
    """A cache hook may keep the JIT from compiling; an asynchronous compilation returns no kernel yet."""
    kernel, jit = launch
    args, kwargs = arguments()
    monkeypatch.setattr(example_kernel, "run", lambda *args, **kwargs: None)
    assert kernel[(1,)](*args, **kwargs) is None
    monkeypatch.setattr(example_kernel, "run", jit)
    kernel[(1,)](*args, **kwargs)
    assert len(jit.calls) == 1


def test_the_wrapper_shows_the_kernel():
    kernel = fast_launch(example_kernel)
    assert kernel.kernel is kernel.fn is example_kernel
    assert kernel.arg_names == example_kernel.arg_names
    assert kernel.params is example_kernel.params
    assert kernel.__name__ == "example_kernel"
    assert kernel.cache_key == example_kernel.cache_key
    assert copy.copy(kernel).kernel is example_kernel
    with pytest.raises(AttributeError):
        _ = kernel.no_such_attribute


def test_what_is_no_jit_function_stays_as_it_is():
    """The interpreter's kernels, for one."""
    anything = object()
    assert fast_launch(anything) is anything


def entry_kernels():
    """(name, wrapper) of all kernels of the communication."""
    return [
        (name, getattr(module, name))
        for module in (sync, plan, tokens)
        for name in dir(module)
        if name.endswith("_kernel")
    ]


def test_every_launcher_makes_calls_that_are_understood(fake_driver, monkeypatch):
    """All launches of a step after the first one are fast, whatever changes from step to step."""
    jits = {}
    for name, kernel in entry_kernels():
        assert isinstance(kernel, FastLaunch), name
        jits[name] = FakeJIT(kernel.kernel)
        monkeypatch.setattr(kernel.kernel, "run", jits[name], raising=False)
        monkeypatch.setattr(kernel, "_variants", {})

    def step(case, number):
        run_case(gpu, case)
        status, received = torch.zeros(control.STATUS_WORDS, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
        bases = torch.zeros(2, dtype=torch.int64)
        peers = Peers(rank=1, num_ranks=2, bases=bases, views=(), layout=ControlLayout(2))
        words = (number, 2**40 * number, 16)
        sync.barrier(peers, words, received, status, call=number, fault=number == 1, timeout_ns=number)

    case = Case(tokens=(64, 32), num_experts=24, top_k=3, hidden=320, dtype=torch.bfloat16, capacity=1600)
    step(case, 0)
    before = {name: len(jit.calls) for name, jit in jits.items()}
    assert all(before.values()), before
    step(replace(case, tokens=(1, 35), capacity=1), 1)
    step(replace(case, tokens=(7, 100), capacity=3000), 2)
    assert {name: len(jit.calls) for name, jit in jits.items()} == before
