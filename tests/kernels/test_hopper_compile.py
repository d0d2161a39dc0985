"""Compiles the kernels for Hopper without a GPU, with the arguments of their launchers. See test_gemm_compile.py."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from combinations import every_combination  # noqa: E402
from compiled_launches import catch_launches, meta  # noqa: E402

from symmoe.kernels import architectures, hopper_choice  # noqa: E402
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
GEGLU, TANH_GELU = Activation(function="gelu"), Activation(function="gelu_tanh", is_gated=False)
VARIANTS = {"separate": act.SEPARATE, "two": act.TWO_WARPS, "alternate": act.ALTERNATE, "gathered": act.GATHERED}
MAX_SPILLED = 64  # bytes, of a separate epilogue with limits or with masks of columns

FIRST = {"forward": False, "dgrad": True}  # k_first


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, act, gemm)


def compiled(launches):
    """The code of the one launch: products, and registers for each role."""
    code = launches.compile()
    assert "setmaxnreg" in code.ptx
    assert "wgmma.mma_async" in code.ptx
    return code


@every_combination(k_first=FIRST, dtype=DTYPES, shape=list(SHAPES))
def test_products(launches, k_first, dtype, shape):
    G, H, I, N = SHAPES[shape]
    narrow, wide = meta(N, I, dtype=dtype), meta(N, H, dtype=dtype)
    rows, out = (wide, narrow) if k_first else (narrow, wide)
    weight, row_range = meta(G, H, I, dtype=dtype), meta(2, G, dtype=torch.int32)
    gemm.launch_gemm(rows, weight, row_range, out, weight_k_first=k_first, zero_tail=True, num_sms=132)
    assert compiled(launches).spilled == 0


@every_combination(
    numbers={
        "bf16": (SWIGLU, torch.bfloat16),
        "fp16": (SWIGLU, torch.float16),
        "limits": (LIMITED, torch.bfloat16),
        "geglu": (GEGLU, torch.bfloat16),
        "tanh gelu": (TANH_GELU, torch.bfloat16),
    },
    variant=list(VARIANTS),
    shape=list(SHAPES),
)
def test_dact(launches, numbers, variant, shape):
    activation, dtype = numbers
    G, H, I, N = SHAPES[shape]
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a = meta(N, activation.hidden_width(I), dtype=dtype), meta(N, I, dtype=dtype)
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
    code = compiled(launches)
    assert ("cp.async.cg" in code.ptx) == gathered
    assert "ld.global.v4.b32" in code.ptx
    assert "st.global.v4.b32" in code.ptx
    assert code.spilled <= (0 if shape != "odd" and activation is SWIGLU else MAX_SPILLED)


@every_combination(
    dtype=DTYPES,
    variant=["separate", "alternate"],
    shape=["qwen3-30b", "mixtral-8x7b", "deepseek-like"],
    activation={"swiglu": SWIGLU, "geglu": GEGLU},
)
def test_act(launches, dtype, variant, shape, activation):
    G, H, I, N = SHAPES[shape]
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a = meta(N, 2 * I, dtype=dtype), meta(N, I, dtype=dtype)
    rows, weight = meta(N, H, dtype=dtype), meta(G, 2 * I, H, dtype=dtype)
    act.launch_act(rows, weight, row_range, scale, h, a, activation, variant=VARIANTS[variant], num_sms=132)
    assert compiled(launches).spilled == 0


def test_the_limit_of_sms_reaches_the_kernels(monkeypatch):
    """From the public functions, as on a Hopper GPU."""
    launches = catch_launches(monkeypatch, act, gemm, wgrad, gpu_gemm, gpu_gemm_act)
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda device, dtype, columns: launchers)
    G, H, I, N = SHAPES["qwen3-30b"]
    bf16 = torch.bfloat16
    row_range = meta(2, G, dtype=torch.int32)
    scale, sums = meta(N, dtype=torch.float32), meta(12 * N, dtype=torch.float32)
    h, a, rows = meta(N, 2 * I, dtype=bf16), meta(N, I, dtype=bf16), meta(N, H, dtype=bf16)
    w1, w2 = meta(G, 2 * I, H, dtype=bf16), meta(G, H, I, dtype=bf16)
    index = meta(N, dtype=torch.int32)

    def launched_by(function, *args, **options):
        function(*args, num_sms=5, **options)
        first, *rest = launches
        launches.clear()
        assert first.grid == (5,)
        return first.kwargs["PIPE"], [launch.name for launch in rest]

    calls = [
        launched_by(gpu_gemm.grouped_gemm, a, w2, row_range, rows),
        launched_by(gpu_gemm.grouped_gemm_dgrad, rows, w2, row_range, a),
    ]
    assert [(pipe.num_n_tiles, pipe.weight_k_first) for pipe, _ in calls] == [(H // 256, False), (I // 256, True)]
    launched_by(gpu_gemm_act.grouped_gemm_act, rows, w1, row_range, scale, h, a, SWIGLU)
    for i, dscale in itertools.product((None, index), (None, scale)):
        arguments = (rows, w2, row_range, h, scale, h, a, dscale, sums, SWIGLU)
        _, rest = launched_by(gpu_gemm_act.grouped_gemm_dact, *arguments, row_index=i)
        assert rest == ([] if dscale is None else ["sum_dscale_kernel"])
    pipe, rest = launched_by(gpu_gemm.grouped_gemm_wgrad, h, rows, row_range, w1)
    assert (pipe.num_groups, pipe.out_rows, pipe.columns, rest) == (G, 2 * I, H, [])
    for others in ({"dout_index": index}, {"rows_index": index}, {"accumulate": True}):
        gpu_gemm.grouped_gemm_wgrad(h, rows, row_range, w1, num_sms=5, **others)
    gpu_gemm.grouped_gemm_wgrad(h, rows, row_range, w1.float(), num_sms=5)
    assert [launch.name for launch in launches] == ["grouped_gemm_wgrad_kernel"] * 4


def test_devices_and_calls_that_they_do_not_take():
    for device in ("cpu", "meta"):
        assert hopper_choice.hopper_kernels(torch.device(device), torch.bfloat16, 1024) is None
    assert act.takes_act(1000, 768, SWIGLU)
    assert not act.takes_act(1000, 712, SWIGLU)
    assert not act.takes_act(2**30 + 1, 768, SWIGLU)
    assert not act.takes_act(1000, 768, Activation(interleave=8))
    assert not act.takes_act(1000, 768, Activation(function="relu2", is_gated=False))


@pytest.mark.parametrize(
    ("capability", "dtype", "columns", "version", "taken"),
    [
        ((9, 0), torch.bfloat16, 256, "3.6.0", True),
        ((9, 0), torch.float16, 256, "3.7.1", True),
        ((9, 0), torch.float32, 256, "3.6.0", False),
        ((9, 0), torch.bfloat16, 248, "3.6.0", False),
        ((10, 0), torch.bfloat16, 256, "3.6.0", False),
        ((8, 0), torch.bfloat16, 256, "3.6.0", False),
        ((9, 0), torch.bfloat16, 256, "3.9.0", True),
        ((9, 0), torch.bfloat16, 256, "3.10.0", False),
    ],
)
def test_which_gpus_have_them(monkeypatch, capability, dtype, columns, version, taken):
    monkeypatch.setattr(architectures, "capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    kernels = hopper_choice.hopper_kernels.__wrapped__(torch.device("cuda", 0), dtype, columns)
    assert kernels is (launchers if taken else None)
