"""Compiles the GEMMs for Hopper without a GPU, with the arguments of their launchers; and which calls take them."""

import itertools
import re

import pytest
import torch

triton = pytest.importorskip("triton")

import kernel_launches as layer  # noqa: E402
from combinations import every_combination  # noqa: E402
from compiled_launches import meta  # noqa: E402
from kernel_launches import ACTIVATIONS, BF16, FP16, FP32, SHAPES  # noqa: E402

from symmoe.kernels import architectures, hopper_choice  # noqa: E402
from symmoe.kernels import hopper_launchers as launchers  # noqa: E402
from symmoe.kernels.activation import SWIGLU, Activation  # noqa: E402
from symmoe.kernels.hopper import act, gemm, wgrad  # noqa: E402
from symmoe.kernels.triton import gemm as gpu_gemm  # noqa: E402
from symmoe.kernels.triton import gemm_act as gpu_gemm_act  # noqa: E402

USUAL = ["qwen3-30b", "mixtral-8x7b", "deepseek-like"]
WITH_ODD = [*USUAL, "odd"]
DTYPES = {"bf16": BF16, "fp16": FP16}
NUMBERS = {
    "bf16": (SWIGLU, BF16),
    "fp16": (SWIGLU, FP16),
    "limits": (ACTIVATIONS["gpt-oss"], BF16),
    "geglu": (ACTIVATIONS["geglu"], BF16),
    "tanh gelu": (Activation(function="gelu_tanh", is_gated=False), BF16),
}
VARIANTS = {
    "separate": act.SEPARATE,
    "two": act.TWO_WARPS,
    "alternate": act.ALTERNATE,
    "gathered": act.GATHERED,
}
MAX_SPILLED = 64  # bytes, of a separate epilogue with limits or with masks of columns
MODULES = act, gemm, wgrad, gpu_gemm, gpu_gemm_act


@every_combination(k_first={"forward": False, "dgrad": True}, dtype=DTYPES, shape=WITH_ODD)
def test_products_do_not_spill(launches, k_first, dtype, shape):
    layer.launch_hopper_gemm(shape, dtype, k_first)
    assert "wgmma.mma_async" in launches.compile_roles().ptx


@every_combination(numbers=NUMBERS, variant=list(VARIANTS), shape=WITH_ODD)
def test_dact_accesses_16_bytes_and_spills_little(launches, numbers, variant, shape):
    activation, dtype = numbers
    layer.launch_hopper_dact(
        shape, activation, dtype, VARIANTS[variant], gather=variant == "gathered"
    )
    code = launches.compile_roles(0 if shape != "odd" and activation is SWIGLU else MAX_SPILLED)
    assert "wgmma.mma_async" in code.ptx
    assert ("cp.async.cg" in code.ptx) == (variant == "gathered")
    assert "ld.global.v4.b32" in code.ptx
    assert "st.global.v4.b32" in code.ptx


@every_combination(
    dtype=DTYPES,
    variant=["separate", "alternate"],
    shape=USUAL,
    activation={"swiglu": SWIGLU, "geglu": ACTIVATIONS["geglu"]},
)
def test_act_does_not_spill(launches, dtype, variant, shape, activation):
    layer.launch_hopper_act(shape, activation, dtype, VARIANTS[variant])
    assert "wgmma.mma_async" in launches.compile_roles().ptx


@every_combination(fc=[1, 2], dtype=DTYPES, shape=WITH_ODD)
def test_wgrad_multiplies_tiles_of_256_features_and_moves_boxes_of_tma(launches, fc, dtype, shape):
    layer.launch_hopper_wgrad(shape, dtype, fc)
    ptx = launches.compile_roles().ptx
    kind = "bf16.bf16" if dtype == BF16 else "f16.f16"
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) [^;]*;", ptx)
    assert products == [f"m64n256k16.f32.{kind}"] * 8  # 4 to a stage, of 2 warpgroups
    assert ptx.count("cp.async.bulk.tensor.4d.shared") == 6  # 2 boxes of dout, 4 of rows
    assert ptx.count("cp.async.bulk.tensor.3d.global") == 8


def test_the_limit_of_sms_reaches_the_kernels(launches, monkeypatch):
    """From the public functions, as on a Hopper GPU."""
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda device, dtype, columns: launchers)
    G, H, I, N = SHAPES["qwen3-30b"]
    row_range, index = meta(2, G), meta(N)
    scale, sums = meta(N, dtype=FP32), meta(12 * N, dtype=FP32)
    h, a, rows = meta(N, 2 * I, dtype=BF16), meta(N, I, dtype=BF16), meta(N, H, dtype=BF16)
    w1, w2 = meta(G, 2 * I, H, dtype=BF16), meta(G, H, I, dtype=BF16)

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
    assert [(pipe.num_n_tiles, pipe.weight_k_first) for pipe, _ in calls] == [
        (H // 256, False),
        (I // 256, True),
    ]
    launched_by(gpu_gemm_act.grouped_gemm_act, rows, w1, row_range, scale, (h, a), SWIGLU)
    for i, dscale in itertools.product((None, index), (None, scale)):
        arguments = (rows, i), w2, row_range, (h, scale), (h, a, dscale, None), sums, SWIGLU
        _, rest = launched_by(gpu_gemm_act.grouped_gemm_dact, *arguments)
        assert rest == ([] if dscale is None else ["sum_dscale_kernel"])
    pipe, rest = launched_by(gpu_gemm.grouped_gemm_wgrad, h, rows, row_range, w1)
    assert (pipe.num_groups, pipe.out_rows, pipe.columns, rest) == (G, 2 * I, H, [])
    for left, right, accumulate in (
        ((h, index), rows, False),
        (h, (rows, index), False),
        (h, rows, True),
    ):
        gpu_gemm.grouped_gemm_wgrad(left, right, row_range, w1, accumulate=accumulate, num_sms=5)
    gpu_gemm.grouped_gemm_wgrad(h, rows, row_range, w1.float(), num_sms=5)
    assert [launch.name for launch in launches] == ["grouped_gemm_wgrad_kernel"] * 4


def test_devices_and_calls_that_they_do_not_take():
    for device in ("cpu", "meta"):
        assert hopper_choice.hopper_kernels(torch.device(device), BF16, 1024) is None
    for num_rows, ffn, activation, is_taken in (
        (1000, 768, SWIGLU, True),
        (1000, 712, SWIGLU, False),
        (2**30 + 1, 768, SWIGLU, False),
        (1000, 768, Activation(interleave=8), False),
        (1000, 768, ACTIVATIONS["srelu"], False),
    ):
        assert act.takes_act(num_rows, ffn, activation) == is_taken


@pytest.mark.parametrize(
    ("capability", "dtype", "columns", "version", "taken"),
    [
        ((9, 0), BF16, 256, "3.6.0", True),
        ((9, 0), FP16, 256, "3.7.1", True),
        ((9, 0), FP32, 256, "3.6.0", False),
        ((9, 0), BF16, 248, "3.6.0", False),
        ((10, 0), BF16, 256, "3.6.0", False),
        ((8, 0), BF16, 256, "3.6.0", False),
        ((9, 0), BF16, 256, "3.9.0", True),
        ((9, 0), BF16, 256, "3.10.0", False),
    ],
)
def test_which_gpus_have_them(monkeypatch, capability, dtype, columns, version, taken):
    monkeypatch.setattr(architectures, "capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    kernels = hopper_choice.hopper_kernels.__wrapped__(torch.device("cuda", 0), dtype, columns)
    assert kernels is (launchers if taken else None)
