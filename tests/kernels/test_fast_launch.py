"""Launches past the JIT, without a GPU: see tests/support/fake_cuda.py."""

import ast
import importlib
import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from compiled_launches import GENERAL_MODULES, HOPPER_MODULES  # noqa: E402
from fake_cuda import (  # noqa: E402
    STREAM,
    FakeCompiled,
    FakeJIT,
    Launched,
    assert_only_the_first_compiles,
    fake_jits,
)
from launch_table import TABLE, WAYS, Launch  # noqa: E402
from programs import printed_by  # noqa: E402
from simulated_ranks import Case, run_case  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from symmoe import kernels  # noqa: E402
from symmoe.errors import SymmoeError  # noqa: E402
from symmoe.kernels import gpu  # noqa: E402
from symmoe.kernels.launch import driver, player, triton_internals  # noqa: E402
from symmoe.kernels.launch import launch as launches  # noqa: E402
from symmoe.kernels.launch.launch import Constants, FastLaunch  # noqa: E402
from symmoe.kernels.triton import plan, tiles, tokens  # noqa: E402

FIRST_GLOBAL = tl.constexpr(3)
SECOND_GLOBAL = tl.constexpr(4)


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


class CountingJIT(FakeJIT):
    """A JIT that also counts calls with and without a launch."""

    def __init__(self, kernel, cuda):
        super().__init__(kernel, cuda)
        self.warmups = Counter()

    def __call__(self, *args, grid, warmup, **kwargs):
        self.warmups[warmup] += 1
        return super().__call__(*args, grid=grid, warmup=warmup, **kwargs)


class Example:
    """A fresh wrapper of the example, its JIT, and the driver."""

    def __init__(self, fake_cuda, monkeypatch):
        self.cuda = fake_cuda
        self.jit = CountingJIT(example_kernel, fake_cuda)
        monkeypatch.setattr(example_kernel, "run", self.jit, raising=False)
        self.kernel = FastLaunch(example_kernel)
        self.constants = {}

    def call(self, grid=(1,), **changes):
        return self.launch(grid, *arguments(**changes))

    def launch(self, grid, args, kwargs):
        return self.kernel.launch(
            grid, self.constants.setdefault(repr(kwargs), Constants(kwargs)), tuple(args)
        )

    def described(self, desc, x=None, index=None):
        """The driver's launches of a call whose first argument becomes a descriptor."""
        options = {"WIDTH": 64, "num_warps": 4}, {0: tiles.describe([4, 8])}
        constants = self.constants.setdefault("described", Constants(*options))
        before = len(self.cuda.launches)
        launches.launch(
            self.kernel, (3, 2), constants, desc, F32 if x is None else x, index, 7, 7, 7, 0.5, 7
        )
        return self.cuda.launches[before:]

    @property
    def counts(self):
        """The numbers of the JIT's compilations without a launch, of its launches, and of the driver's launches."""
        return self.jit.warmups[True], self.jit.warmups[False], len(self.cuda.launches)


@pytest.fixture
def example(fake_cuda, monkeypatch):
    return Example(fake_cuda, monkeypatch)


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
        "desc": x,
        "x": x,
        "index": x.int(),
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


F32 = torch.zeros(8, 8)
F16 = torch.zeros(8, 8, dtype=torch.float16)
INTEGERS = [7, 8, 0, 1, 16, 2**31, 2**31 - 1, -(2**31), -(2**31) - 16, 2**62, 2**63, 2**63 + 5]
CHOICES = {
    "desc": [F32, F16, unaligned(F32), None],
    "x": [F32, F16, F16.bfloat16(), unaligned(F32), torch.nn.Parameter(F32), None, 7, 1.0, True],
    "index": [F32, unaligned(F32), F16, None],
    "number": [*INTEGERS, True, False, 1.0, 2.5, None],
    "count": [*INTEGERS[:5], 2**40, True],
    "typed": [*INTEGERS, True],
    "fraction": [0.5, 1.0, 1, 16],
    "plain": [*INTEGERS, None, 0.5],
    "WIDTH": [64, 65],
    "num_warps": [4, 8],
}


def words(args):
    """The words of the example's arguments in a launch: their bits, then two pointers to scratch memory."""
    values = [
        arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args if arg is not None
    ]
    return (
        *[torch.tensor(v).view(torch.int32).item() if type(v) is float else int(v) for v in values],
        0,
        0,
    )


def test_a_known_call_goes_straight_to_the_compiled_kernel(example):
    """Also the first call, as soon as the kernel is compiled."""
    jit = example.jit
    num_compiled = kernels.compiled_counter(torch.device("cuda"))
    before = num_compiled()
    args, kwargs = arguments()
    compiled = example.launch((3, 2), args, kwargs)
    assert jit.calls == [(tuple(args), (1,), kwargs)]
    assert jit.compiled == [compiled]
    assert example.counts == (1, 0, 1)
    assert num_compiled() == before + 1

    other_args, _ = arguments(number=-5, plain=2**63 + 5, fraction=-0.25)
    other_args[5] = -(2**62)
    second = example.call(plain=2**63)
    assert second is not compiled
    third = example.launch((5,), other_args, kwargs)
    assert example.launch((5, 1, 2), other_args, kwargs) is third
    assert jit.compiled == [compiled, second, third]
    assert example.counts == (3, 0, 4)
    assert num_compiled() == before + 3
    bits = tuple([word - 2**64 if word >= 2**63 else word for word in words(other_args)])
    first_launch, _, *launches_of_third = example.cuda.launches
    assert first_launch == Launched(
        compiled.function, (3, 2, 1), 128, 1000, STREAM, tuple(words(args))
    )
    assert launches_of_third == [
        Launched(third.function, grid, 128, 1000, STREAM, bits) for grid in ((5, 1, 1), (5, 1, 2))
    ]


def test_nothing_is_launched_in_an_empty_grid(example):
    """Neither by the driver nor by the JIT, in a first call or a later one. Nothing is compiled either."""
    args, kwargs = arguments()
    constants = Constants(kwargs)
    for grid in ((0,), (3, 0), (1, 2, 0)):
        launches.launch(example.kernel, grid, constants, *args)
        assert example.counts == (0, 0, 0)
    for grid in ((1,), (0,)):
        launches.launch(example.kernel, grid, constants, *args)
        assert example.counts == (1, 0, 1)


def test_an_error_of_the_driver_is_raised(example, monkeypatch):
    """The error of a first launch and of a later one; the next call does not compile again."""
    example.cuda.fails = 700
    monkeypatch.setattr(
        driver, "check", lambda error, text: (_ for _ in ()).throw(SymmoeError(f"{text}: {error}"))
    )
    for count in (1, 2):
        with pytest.raises(SymmoeError, match="the launch of example_kernel: 700"):
            example.call()
        assert example.counts == (1, 0, count)


@pytest.mark.parametrize("name", CHOICES)
def test_everything_that_changes_code_changes_the_key(example, name):
    """Two calls never share a variant if the JIT would compile them differently, by its own key."""
    kernel = example.kernel
    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )

    def jit_key(args, kwargs):
        _, specialization, options = bind(*args, **kwargs)
        return repr(specialization), repr(options)

    calls = [arguments(**{name: value}) for value in CHOICES[name]]
    variants = [example.launch((1,), *call) for call in calls]
    for (a, first), (b, second) in itertools.combinations(zip(calls, variants, strict=True), 2):
        assert first is not second or jit_key(*a) == jit_key(*b), (a, b)


def test_numbers_of_a_fixed_type_and_addresses_are_not_in_the_key(example):
    for count, fraction in ((7, 0.5), (1, 1.0), (16, 2.0), (2**40, 0.25)):
        example.call(
            (count % 5,), count=count, fraction=fraction, index=torch.zeros(4, dtype=torch.int32)
        )
    for number in (7, 9, 10, 2**30 + 1):
        example.call(
            number=number, typed=number, plain=number, index=unaligned(torch.zeros(4).int())
        )
    assert example.counts == (1, 0, 8)


def test_the_device_is_in_the_key(example):
    for device in (0, 1, 0, 1):
        example.cuda.device = device
        example.call(desc=None, x=None, index=None)
    assert example.counts == (2, 0, 4)
    first, second = (compiled.function for compiled in example.jit.compiled)
    assert [launched.function for launched in example.cuda.launches] == [first, second] * 2


NOT_UNDERSTOOD = {
    "descriptor": {"desc": TensorDescriptor.from_tensor(F32, [4, 8])},
    "tuple": {"number": (1, 2)},
    "tensor for a number": {"count": torch.zeros(1, dtype=torch.int32)},
    "none for a number": {"count": None},
    "something like a tensor": {"x": triton.runtime.jit.MockTensor(torch.float32)},
    "string": {"number": "7"},
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_unsupported_arguments_are_launched_by_the_jit(example, name):
    example.call()
    args, kwargs = arguments(**NOT_UNDERSTOOD[name])
    for count in (1, 2, 3):
        example.launch((count, 2), args, kwargs)
        assert example.counts == (1, count, 1)
        got, grid, options = example.jit.calls[-1]
        assert all(a is b for a, b in zip(got, args, strict=True))
        assert (grid, options) == ((count, 2), kwargs)


@pytest.mark.parametrize("changes", [{"desc": None, "index": None}, {"x": None, "index": None}, {}])
def test_tensors_of_another_device_are_launched_by_the_jit(example, changes):
    """The JIT's launcher refuses a CPU tensor, which an address alone does not show."""
    example.cuda.device = 0
    for count in (1, 2, 3):
        example.call((count, 2), **changes)
        assert example.counts == (0, count, 0)
        assert example.jit.calls[-1][1] == (count, 2)


class Refused(FakeCompiled):
    """A kernel that needs more than the GPU has. Triton's own code notices this when it loads the kernel, on the first
    access to the launcher; from then on the launcher raises the error."""

    run = CompiledKernel.run


@pytest.fixture
def refuse(fake_cuda, monkeypatch):
    """A function that makes Triton refuse a compiled kernel for the lack of something."""
    compiler = importlib.import_module(CompiledKernel.__module__)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 100)
    fake_cuda.launcher_cls = Mock()
    fake_cuda.utils = Mock(load_binary=lambda *args: (None, 1, 0, 0, 128))

    def function(compiled, resource):
        compiled.__class__ = Refused
        compiled._run = None
        compiled.name = compiled.hash = "example"
        compiled.kernel = b""
        compiled.metadata_group = {}
        compiled.metadata.shared = 200 if resource == "shared memory" else 0
        compiled.metadata.num_warps = 8 if resource == "threads" else 4
        compiled.metadata.warp_size = 32  # Triton 3.9 reads it

    return function


@pytest.mark.parametrize(
    ("resource", "max_stages", "tried"),
    [("shared memory", 2, [4, 3, 2]), ("shared memory", 0, [4, 3, 2, 1]), ("threads", 2, [4])],
)
def test_kernels_that_do_not_fit_get_fewer_stages(
    example, monkeypatch, refuse, resource, max_stages, tried
):
    """The number of stages is the largest that fits, and known calls attempt no other. An error that fewer stages do
    not avoid is Triton's."""

    def run(*args, num_stages, **options):
        compiled = example.jit(*args, num_stages=num_stages, **options)
        if num_stages > max_stages:
            refuse(compiled, resource)
        return compiled

    monkeypatch.setattr(example_kernel, "run", run)
    before = launches.num_compiled()
    fits = tried[-1] <= max_stages
    for _ in range(2):
        with nullcontext() if fits else pytest.raises(triton.OutOfResources, match=resource):
            example.call(num_stages=4)
    assert [options["num_stages"] for _, _, options in example.jit.calls] == (
        tried if fits else tried * 2
    )
    # Only a kernel that fits is launched, by the driver.
    assert example.counts == (len(example.jit.calls), 0, 2 if fits else 0)
    assert {launched.function for launched in example.cuda.launches} == (
        {example.jit.compiled[-1].function} if fits else set()
    )
    assert launches.num_compiled() == before + fits


def test_kernels_that_did_not_fit_get_fewer_stages_in_other_calls(example, monkeypatch, refuse):
    """The JIT distinguishes fewer kinds of calls, so it has the refused kernel already."""
    compiled = {}

    def run(*args, num_stages, warmup, **options):
        assert warmup  # the driver launches
        if num_stages not in compiled:
            compiled[num_stages] = example.jit(
                *args, num_stages=num_stages, warmup=warmup, **options
            )
            if num_stages > 2:
                refuse(compiled[num_stages], "shared memory")
        return compiled[num_stages]

    monkeypatch.setattr(example_kernel, "run", run)
    for x in (F32, torch.nn.Parameter(F32)):
        assert example.call(num_stages=4, x=x) is compiled[2]
    assert [launched.function for launched in example.cuda.launches] == [compiled[2].function] * 2


def test_callable_grids_are_launched_by_the_jit(example):
    for grid in (lambda meta: (1,), [1]):
        for _ in range(3):
            example.call(grid)
            assert example.jit.calls[-1][1] is grid
    assert example.counts == (0, 6, 0)


def test_wrong_calls_are_refused_by_the_jit(fake_cuda):
    kernel = FastLaunch(example_kernel)
    args, kwargs = arguments()
    for wrong_args, wrong_kwargs in (
        (args[:3], kwargs),
        (args, {"num_warps": 4}),
        (args, {**kwargs, "x": args[1]}),
        (args, {**kwargs, "grid": (1,)}),
    ):
        with pytest.raises(TypeError):
            kernel.launch((1,), Constants(wrong_kwargs), tuple(wrong_args))


no_hook = Mock()


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
def test_watched_launches_are_made_by_the_jit(example, monkeypatch, where, name, value):
    """Launches of a known kind, and launches of a new kind."""
    example.call((3, 2))
    with monkeypatch.context() as patch:
        patch.setattr(where, name, value)
        for count, width in enumerate((64, 65, 65), 1):
            example.call((3, count), WIDTH=width)
            assert example.counts == (1, count, 1)
            assert example.jit.calls[-1][1] == (3, count)
    example.call((3, 2))
    assert example.counts == (1, 3, 2)


def test_hooks_in_tritons_chains_are_seen(example):
    example.call()
    for count, chain in enumerate(
        (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook), 1
    ):
        chain.add(no_hook)
        try:
            example.call()
            assert example.counts == (1, count, 1)
        finally:
            chain.remove(no_hook)
    example.call()
    assert example.counts == (1, 2, 2)


def test_a_launch_that_compiles_nothing_is_not_remembered(example, monkeypatch):
    """A cache hook may keep the JIT from compiling; an asynchronous compilation returns no kernel yet."""
    before = launches.num_compiled()
    grids = []

    def run(*args, grid, warmup, **options):
        if not warmup:
            grids.append(grid)

    with monkeypatch.context() as patch:
        patch.setattr(example_kernel, "run", run)
        for _ in range(2):
            assert example.call((3, 2)) is None
    assert grids == [(3, 2)] * 2  # the JIT launches, if it can
    assert launches.num_compiled() == before
    for count in (1, 2):
        assert [example.call((3, 2))] == example.jit.compiled
        assert example.counts == (1, 0, count)
    assert launches.num_compiled() == before + 1


def test_every_kernel_is_compiled_with_the_options_of_all():
    """Every launched kernel is a FastLaunch, whose JIT gets the options, as FakeJIT checks."""
    launched_kernels = []
    for path in sorted(Path(kernels.__file__).parent.glob("*/[!_]*.py")):
        module = vars(importlib.import_module(f"symmoe.kernels.{path.parent.name}.{path.stem}"))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        launched = [
            *(call.func.value for call in calls if isinstance(call.func, ast.Subscript)),
            *(call.args[0] for call in calls if ast.unparse(call.func) == "launch" and call.args),
        ]
        names = {name for name in module if name.endswith("_kernel")} | {
            ast.unparse(kernel_node) for kernel_node in launched
        }
        launched_kernels += [
            module[name]
            for name in names
            if isinstance(module.get(name), (FastLaunch, triton.JITFunction))
        ]
    assert len(launched_kernels) > 60
    assert [kernel for kernel in launched_kernels if not isinstance(kernel, FastLaunch)] == []
    assert launches.OPTIONS == {"enable_fp_fusion": True}


# Numbers of a launch that change from step to step.
CHANGING = (
    "call",
    "capacity",
    "home",
    "num_rows",
    "phase",
    "source",
    "timeout_ns",
    "which",
)
FORMATS_OF = {
    "grouped_gemm_quantized": ("float8_block", "mxfp8", "nvfp4"),
    "grouped_gemm_wgrad_quantized": ("float8_block", "mxfp8", "nvfp4"),
    "quantize_rows": ("float8_block", "nvfp4"),
}


def launch_all_ways(kernel, num_rows):
    """Launches a kernel with so many rows and tokens, in all formats and ways of the table, at new addresses."""
    sizes = {"G": 4, "H": 160, "I": 256, "N": num_rows}
    sizes |= {"T": num_rows, "E": 24, "K": 3, "R": 4}
    if kernel.startswith("launch_") and "quant" not in kernel and "fp8" not in kernel:
        sizes["H"] = 256
    named = {name: num_rows % 2 for name in CHANGING if isinstance(TABLE[kernel].get(name), int)}
    if "num_ctas" in TABLE[kernel]:
        named["num_ctas"] = 1 + num_rows % 7
    if kernel == "barrier":
        named |= {"words": (num_rows, 2**40 * num_rows, 16, 0), "fault": num_rows == 1}
    if kernel == "post_report":
        named["plan"] = 2**33 * num_rows
    for ways, name in itertools.product(
        ("", *WAYS.get(kernel, ())), FORMATS_OF.get(kernel, ("float8_block",))
    ):
        Launch(kernel, sizes, format=name, ways=ways, changes=named)(device="cpu")


@pytest.mark.parametrize("kernel", TABLE)
def test_only_the_first_launch_of_a_kernel_is_compiled(fake_cuda, monkeypatch, kernel):
    """Tensors' addresses and the number of rows and tokens have no effect: peers wait for a rank that compiles."""
    jits = fake_jits(monkeypatch, fake_cuda, *GENERAL_MODULES, *HOPPER_MODULES)
    assert_only_the_first_compiles(
        jits, lambda num_rows: launch_all_ways(kernel, num_rows), (64, 1, 64, 65, 4096)
    )


def test_launchers_of_a_call_compile_only_their_first_launch(fake_cuda, monkeypatch):
    """The launchers of all ranks, one rank after the other: with parts of the rows, and some of the ranks."""
    jits = fake_jits(monkeypatch, fake_cuda, plan, tokens)
    case = Case(
        tokens=(64, 32), num_experts=24, top_k=3, hidden=320, dtype=torch.bfloat16, capacity=1600
    )
    further_cases = (
        replace(case, tokens=(1, 35), capacity=1),
        replace(case, tokens=(7, 100), capacity=3000),
    )

    def step(case):
        run_case(gpu, case)
        run_case(gpu, replace(case, drop=True))

    assert_only_the_first_compiles(jits, step, (case, *further_cases))


def test_tensor_maps_are_encoded_once_for_each_shape(example):
    first = torch.zeros(8, 8)
    long = torch.zeros(16, 8)
    further_words = F32.data_ptr(), 7, 7, 7, words([0.5])[0], 7, 0, 0
    for tensor in (first, first, torch.zeros(8, 8), long, long[:12], long[8:], long[:12], first):
        (launched,) = example.described(tensor)
        assert launched.grid == (3, 2, 1)
        assert launched.words == (tensor.data_ptr(), len(tensor), 8, 8, 1, *further_words)
    assert [encoded.shape[0] for encoded in example.cuda.encoded] == [8, 16, 12]
    assert example.counts == (1, 0, 8)
    for _ in range(2):
        (launched,) = example.described(None)
        assert (launched.grid, launched.words) == ((3, 2, 1), further_words)
    assert example.counts == (2, 0, 10)
    assert len(example.cuda.encoded) == 3


def test_remembered_tensor_maps_are_bounded(example, monkeypatch):
    monkeypatch.setattr(player, "MAX_TENSOR_MAPS", 3)
    tensors = [torch.zeros(8 + n, 8) for n in range(4)]
    for tensor in (tensors[0], *tensors[:3], *tensors[:3]):
        example.described(tensor)
    assert len(example.cuda.encoded) == 3
    example.described(tensors[3])  # drops the others
    for tensor in (tensors[3], tensors[0], tensors[3]):
        (launched,) = example.described(tensor)
        assert launched.words[:2] == (tensor.data_ptr(), len(tensor))
    assert len(example.cuda.encoded) == 5


def test_descriptors_of_gpus_without_tensor_maps_become_addresses_sizes_and_strides(example):
    example.jit.change = lambda compiled: setattr(compiled.metadata, "tensordesc_meta", None)
    for tensor in (F32, F32, torch.zeros(16, 8)):
        (launched,) = example.described(tensor)
        assert launched.words[:5] == (tensor.data_ptr(), len(tensor), 8, 8, 1)
    assert example.counts == (1, 0, 3)


UNKNOWN = {
    "scratch": lambda compiled: setattr(compiled.run, "global_scratch_size", 1),
    "profile": lambda compiled: setattr(compiled.run, "profile_scratch_size", 1),
    "sanitiser": lambda compiled: setattr(compiled.run, "gsan_enabled", True),
    "no flag": lambda compiled: delattr(compiled.run, "launch_pdl"),
    "cooperative": lambda compiled: setattr(compiled.run, "launch_cooperative_grid", True),
    "clusters": lambda compiled: setattr(compiled, "packed_metadata", (4, 2, 1000)),
    "much shared memory": lambda compiled: setattr(compiled, "packed_metadata", (4, 1, 228 << 10)),
    "another launcher": lambda compiled: setattr(compiled, "run", Mock()),
    "another type": lambda compiled: compiled.src.signature.update({3: "fp16"}),
    "a tuple": lambda compiled: compiled.src.signature.update({3: ("i32", "i32")}),
    "a constant that is passed": lambda compiled: compiled.src.signature.update({8: "i32"}),
    "another place of the descriptor": lambda compiled: compiled.src.signature.update(
        {2: "tensordesc<fp32[4, 8]>"}
    ),
    "another object for a map": lambda compiled: setattr(
        triton_internals, "make_tensordesc_arg", lambda *_: [object(), 8, 8, 8, 1]
    ),
    "another number of parameters": lambda compiled: setattr(
        compiled, "num_parameters", lambda: 12
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_kernels_of_another_kind_are_launched_by_the_jit(example, name):
    example.jit.change = UNKNOWN[name]
    assert_compiled_once_and_launched_by_the_jit(example)


def test_with_an_old_driver_the_jit_launches(example, monkeypatch):
    monkeypatch.setattr(driver, "can_launch", lambda: False)
    assert_compiled_once_and_launched_by_the_jit(example)


def assert_compiled_once_and_launched_by_the_jit(example):
    """Every call with its own arguments and grid, none by the driver."""
    before = launches.num_compiled()
    for count, tensor in enumerate((F32, F32, torch.ones(8, 8)), 1):
        assert example.described(tensor) == []
        assert example.counts == (1, count, 0)
        (descriptor, *_), grid, options = example.jit.calls[-1]
        assert descriptor.base is tensor
        assert (grid, options) == ((3, 2), {"WIDTH": 64, "num_warps": 4})
    assert [grid for _, grid, _ in example.jit.calls] == [(1,), *[(3, 2)] * 3]
    assert launches.num_compiled() == before + 1


def test_an_unknown_triton_launches_by_itself(example, monkeypatch):
    """The JIT launches every call, and its compilations are counted: peers wait longer for a rank that compiles."""
    kernel, jit = example.kernel, example.jit
    monkeypatch.setattr(triton_internals, "IS_KNOWN", False)
    num_compiled = kernels.compiled_counter(torch.device("cuda"))
    before = launches.num_compiled()
    compiled = FakeCompiled()
    monkeypatch.setattr(
        example_kernel, "run", lambda *args, **kwargs: jit(*args, **kwargs) and compiled
    )
    args, kwargs = arguments()
    for _ in range(3):
        assert example.launch((3, 2), args, kwargs) is compiled
    launches.launch(kernel, (3, 2), Constants(kwargs, {0: tiles.describe([4, 8])}), *args)
    assert [call[0][1:] for call in jit.calls] == [tuple(args[1:])] * 4
    assert [call[1] for call in jit.calls] == [(3, 2)] * 4
    assert example.counts == (0, 4, 0)
    assert isinstance(jit.calls[3][0][0], TensorDescriptor)
    assert num_compiled() == before + 1
    assert not kernels.may_run_programs(torch.device("cuda"))()


UNKNOWN_TRITON = """
import sys, triton
triton.__version__ = "99.0.0"
sys.modules |= dict.fromkeys(["triton.backends.nvidia.driver", "triton.knobs", "triton.runtime.build"])
del triton.knobs
import torch
from symmoe.kernels import gpu, hopper_choice
from symmoe.kernels.launch import driver, launch, triton_internals
from symmoe.kernels.triton import plan
torch.cuda.get_device_capability = lambda device: (9, 0)
assert not triton_internals.IS_KNOWN
assert hopper_choice.hopper_kernels(torch.device("cuda", 0), torch.bfloat16, 1024) is None
calls = []
for kernel in (value for value in vars(plan).values() if isinstance(value, launch.FastLaunch)):
    kernel.kernel.run = lambda *args, **kwargs: calls.append(kwargs)
launch.driver.ensure_context, launch.current_device = lambda: None, lambda: -1
gpu.splits_to_row_range(torch.ones(4, dtype=torch.int64), torch.empty(2, 4, dtype=torch.int32), 4)
assert calls and calls[0]["enable_fp_fusion"], calls
"""


def test_kernels_run_with_a_triton_of_unknown_internals():
    printed_by("-c", UNKNOWN_TRITON)


def test_launches_happen_on_the_device_of_the_first_tensor(example, fake_cuda, monkeypatch):
    """Only a call of a kind that is new on the current device switches the device, and switches back afterwards."""
    devices = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            devices.append(self.device)
            self.before, fake_cuda.device = fake_cuda.device, self.device

        def __exit__(self, *args):
            fake_cuda.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    monkeypatch.setattr(launches, "_DEVICE", lambda tensor: 1)
    for device in (0, 1, 0, 1):
        fake_cuda.device = device
        example.described(F32)
        assert fake_cuda.device == device
    assert (devices, example.counts) == ([1, 1], (1, 0, 4))
    fake_cuda.device = 0
    monkeypatch.setattr(knobs.runtime, "debug", True)
    example.described(F32)
    assert (devices, example.counts) == ([1, 1, 1], (1, 1, 4))


def test_a_context_is_current_before_anything_is_encoded_or_launched(
    example, fake_cuda, monkeypatch
):
    """Also before the kernel is compiled, and so loaded."""
    order = []

    def noted(name, function):
        return lambda *args, **kwargs: order.append(name) or function(*args, **kwargs)

    monkeypatch.setattr(driver, "ensure_context", lambda: order.append("context"))
    monkeypatch.setattr(example_kernel, "run", noted("compile", example.jit))
    monkeypatch.setattr(triton_internals, "make_tensordesc_arg", noted("encode", fake_cuda.encode))
    monkeypatch.setattr(fake_cuda, "cuLaunchKernel", noted("launch", fake_cuda.cuLaunchKernel))
    example.described(F32)
    assert order == ["context", "compile", "context", "encode", "context", "launch"]
    example.described(F32)
    assert order[6:] == ["context", "launch"]
