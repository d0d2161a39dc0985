"""Compiles the kernels for Hopper without a GPU, with the arguments of their launchers. See test_gemm_compile.py."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from ahead_of_time import compile_for  # noqa: E402
from combinations import every_combination  # noqa: E402
from test_gemm_compile import MAX_SHARED, TYPE_NAMES, meta  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from symmoe.kernels import select  # noqa: E402
from symmoe.kernels.activation import Activation  # noqa: E402
from symmoe.kernels.hopper import act, gemm, launchers, wgrad  # noqa: E402
from symmoe.kernels.triton import gemm as gpu_gemm  # noqa: E402
from symmoe.kernels.triton import gemm_act as gpu_gemm_act  # noqa: E402

SHAPES = {  # G, H, I, N
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
    "odd": (3, 1032, 712, 999),  # widths that no tile divides, contractions that no step divides
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SWIGLU, LIMITED = Activation(), Activation(alpha=1.702, limit=7.0, offset=1.0)
VARIANTS = {"separate": act.SEPARATE, "two": act.TWO_WARPS, "alternate": act.ALTERNATE, "gathered": act.GATHERED}
MAX_SPILLED = 64  # bytes, of a separate epilogue with limits or with masks of columns

FIRST = {"forward": False, "dgrad": True}  # k_first


@pytest.fixture
def launched(monkeypatch):
    """The (kernel, constants, arguments) of launches, which do not happen."""
    calls = []
    for module in (act, gemm):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *rest: calls.append((kernel.kernel, *rest)))
    return calls


def compiled(launched):
    """PTX of the launch, and the bytes that ptxas spills; its WGMMAs must run asynchronously."""
    code = compiled_source(launched)
    assert "wgmma.mma_async" in code.ptx
    return code.ptx, code.spilled


def compiled_source(launched):
    """What became of the launch; it must fit."""
    ((kernel, constants, *args),) = launched
    named = dict(constants.named)
    signature, constexprs, attributes = {}, {}, {}
    values = [*constants.described(tuple(args)), *[None] * (len(kernel.params) - len(args))]
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", named.pop(parameter.name, value)
        elif isinstance(value, TensorDescriptor):
            block = f"{TYPE_NAMES[value.base.dtype]}{list(value.block_shape)}"
            signature[parameter.name] = f"tensordesc<{block},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
            if not parameter.do_not_specialize:
                assert value % 16 == 0  # always: the JIT makes one variant
                attributes[i,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    code = compile_for(90, source, named)
    assert code.shared <= MAX_SHARED
    assert "C75" not in code.log  # "Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert "setmaxnreg" in code.ptx
    return code


@every_combination(k_first=FIRST, dtype=DTYPES, shape=list(SHAPES))
def test_products(launched, k_first, dtype, shape):
    G, H, I, N = SHAPES[shape]
    narrow, wide = meta(N, I, dtype=dtype), meta(N, H, dtype=dtype)
    rows, out = (wide, narrow) if k_first else (narrow, wide)
    weight, row_range = meta(G, H, I, dtype=dtype), meta(2, G, dtype=torch.int32)
    gemm.launch_gemm(rows, weight, row_range, out, weight_k_first=k_first, zero_tail=True, num_sms=132)
    _, spilled = compiled(launched)
    assert spilled == 0


@every_combination(
    numbers={
        "bf16": (SWIGLU, torch.bfloat16),
        "fp16": (SWIGLU, torch.float16),
        "limits": (LIMITED, torch.bfloat16),
    },
    variant=list(VARIANTS),
    shape=list(SHAPES),
)
def test_dact(launched, numbers, variant, shape):
    activation, dtype = numbers
    G, H, I, N = SHAPES[shape]
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a = meta(N, 2 * I, dtype=dtype), meta(N, I, dtype=dtype)
    gathered = variant == "gathered"
    act.launch_dact(
        meta(N // 2 if gathered else N, H, dtype=dtype),
        meta(G, H, I, dtype=dtype),
        row_range,
        h,
        scale,
        h,
        a,
        scale,
        activation,
        row_index=meta(N, dtype=torch.int32) if gathered else None,
        num_sms=132,
        variant=VARIANTS[variant],
    )
    ptx, spilled = compiled(launched)
    assert ("cp.async.cg" in ptx) == gathered
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert spilled <= (0 if shape != "odd" and activation is SWIGLU else MAX_SPILLED)


@every_combination(
    dtype=DTYPES, variant=["separate", "alternate"], shape=["qwen3-30b", "mixtral-8x7b", "deepseek-like"]
)
def test_act(launched, dtype, variant, shape):
    G, H, I, N = SHAPES[shape]
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a = meta(N, 2 * I, dtype=dtype), meta(N, I, dtype=dtype)
    rows, weight = meta(N, H, dtype=dtype), meta(G, 2 * I, H, dtype=dtype)
    act.launch_act(rows, weight, row_range, scale, h, a, SWIGLU, variant=VARIANTS[variant], num_sms=132)
    _, spilled = compiled(launched)
    assert spilled == 0


@every_combination(
    part={
        "all columns": (None, False),
        "first panel": ((0, 256), False),
        "panel": ((256, 512), True),
        "last panel": ((512, 712), True),
    },
    k_first=FIRST,
    dtype=DTYPES,
)
def test_parts_of_products(launched, part, k_first, dtype):
    columns, zero_tail = part
    G, K, O, N = 3, 1032, 712, 999
    rows, out = meta(N, K, dtype=dtype), meta(N, O, dtype=dtype)
    weight = meta(G, K, O, dtype=dtype) if k_first else meta(G, O, K, dtype=dtype)
    row_range = meta(2, G, dtype=torch.int32)
    gemm.launch_gemm(
        rows, weight, row_range, out, weight_k_first=k_first, columns=columns, zero_tail=zero_tail, num_sms=132
    )
    _, spilled = compiled(launched)
    assert spilled == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranges_of_the_fused_kernels(launched, variant):
    G, H, I, N = SHAPES["qwen3-30b"]
    dtype = torch.bfloat16
    ranges, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a, rows = meta(N, 2 * I, dtype=dtype), meta(N, I, dtype=dtype), meta(N, H, dtype=dtype)
    w1, w2 = meta(G, 2 * I, H, dtype=dtype), meta(G, H, I, dtype=dtype)
    options = {"num_sms": 132, "variant": VARIANTS[variant]}
    index = meta(N, dtype=torch.int32) if variant == "gathered" else None
    act.launch_dact(rows, w2, ranges, h, scale, h, a, scale, SWIGLU, row_index=index, **options)
    assert compiled(launched)[1] == 0
    if variant in ("separate", "alternate"):
        launched.clear()
        act.launch_act(rows, w1, ranges, scale, h, a, SWIGLU, **options)
        assert compiled(launched)[1] == 0


def test_parts_and_the_limit_of_sms_reach_the_kernels(monkeypatch):
    """From the public functions, as on a Hopper GPU."""
    launches = []
    for module in (act, gemm, wgrad):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *rest: launches.append((grid, *rest)))
    for module in (gpu_gemm, gpu_gemm_act):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: launches.append(kernel.kernel.__name__))
    monkeypatch.setattr(select, "hopper_kernels", lambda device, dtype, columns: launchers)
    G, H, I, N = SHAPES["qwen3-30b"]
    bf16 = torch.bfloat16
    row_range = meta(2, G, dtype=torch.int32)
    scale, sums = meta(N, dtype=torch.float32), meta(12 * N, dtype=torch.float32)
    h, a, rows = meta(N, 2 * I, dtype=bf16), meta(N, I, dtype=bf16), meta(N, H, dtype=bf16)
    w1, w2 = meta(G, 2 * I, H, dtype=bf16), meta(G, H, I, dtype=bf16)
    index = meta(N, dtype=torch.int32)

    def launched_by(function, *args, **options):
        function(*args, num_sms=5, **options)
        (grid, constants, *given), *rest = launches
        launches.clear()
        assert grid == (5,)
        return constants.named["PIPE"], given, rest

    panel = {"columns": (256, 768)}
    calls = [
        launched_by(gpu_gemm.grouped_gemm, a, w2, row_range, rows),
        launched_by(gpu_gemm.grouped_gemm, a, w2, row_range, rows, **panel),
        launched_by(gpu_gemm.grouped_gemm_dgrad, rows, w2, row_range, a, **panel),
    ]
    assert [(given[5], pipe.num_n_tiles) for pipe, given, _ in calls] == [(None, H // 256), (256, 2), (256, 2)]
    launched_by(gpu_gemm_act.grouped_gemm_act, rows, w1, row_range, scale, h, a, SWIGLU)
    for i, dscale in itertools.product((None, index), (None, scale)):
        arguments = (rows, w2, row_range, h, scale, h, a, dscale, sums, SWIGLU)
        *_, rest = launched_by(gpu_gemm_act.grouped_gemm_dact, *arguments, row_index=i)
        assert rest == ([] if dscale is None else ["sum_dscale_kernel"])
    pipe, _, rest = launched_by(gpu_gemm.grouped_gemm_wgrad, h, rows, row_range, w1)
    assert (pipe.num_groups, pipe.out_rows, pipe.columns, rest) == (G, 2 * I, H, [])
    for others in ({"dout_index": index}, {"rows_index": index}, {"accumulate": True}):
        gpu_gemm.grouped_gemm_wgrad(h, rows, row_range, w1, num_sms=5, **others)
    gpu_gemm.grouped_gemm_wgrad(h, rows, row_range, w1.float(), num_sms=5)
    assert launches == ["grouped_gemm_wgrad_kernel"] * 4


def test_devices_and_calls_that_they_do_not_take():
    for device in ("cpu", "meta"):
        assert select.hopper_kernels(torch.device(device), torch.bfloat16, 1024) is None
    assert select.takes_act(1000, 768, SWIGLU)
    assert not select.takes_act(1000, 712, SWIGLU)
    assert not select.takes_act(2**30 + 1, 768, SWIGLU)
    assert not select.takes_act(1000, 768, Activation(interleave=8))
    assert not select.takes_act(1000, 768, Activation(kind="srelu"))


@pytest.mark.parametrize(
    ("capability", "dtype", "columns", "version", "taken"),
    [
        ((9, 0), torch.bfloat16, 256, "3.6.0", True),
        ((9, 0), torch.float16, 256, "3.7.1", True),
        ((9, 0), torch.float32, 256, "3.6.0", False),
        ((9, 0), torch.bfloat16, 248, "3.6.0", False),
        ((10, 0), torch.bfloat16, 256, "3.6.0", False),
        ((8, 0), torch.bfloat16, 256, "3.6.0", False),
        ((9, 0), torch.bfloat16, 256, "3.8.0", False),
    ],
)
def test_which_gpus_have_them(monkeypatch, capability, dtype, columns, version, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    kernels = select.hopper_kernels.__wrapped__(torch.device("cuda", 0), dtype, columns)
    assert kernels is (launchers if taken else None)
