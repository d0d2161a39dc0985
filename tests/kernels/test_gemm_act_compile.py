"""Compiles the activation kernels, alone and fused with GEMMs, for sm_90 without a GPU. See test_gemm_compile.py."""

import math

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from combinations import every_combination
from compiled_launches import atomics, catch_launches, meta

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import SUM_COLUMNS, Activation
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.triton import activation as gpu_activation
from symmoe.kernels.triton import bias as gpu_bias
from symmoe.kernels.triton import gemm_act

SHAPES = {  # G, H, I, N
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "odd": (3, 1032, 712, 999),  # widths that no tile divides, contractions that no step divides
    "narrow": (65, 136, 72, 999),
}
GEMMS = ["grouped_gemm_act_kernel", "grouped_gemm_dact_kernel"]
ELEMENTWISE = ["scaled_activation_kernel", "scaled_activation_grad_kernel"]
ACTIVATIONS = {
    "swiglu": Activation(),
    "gpt-oss": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "interleave": Activation(interleave=32),
    "srelu": Activation(function="relu2", is_gated=False),
    "gelu": Activation(function="gelu", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh geglu": Activation(function="gelu_tanh"),
}
# Bytes, of dact with limits or sums of dbias, which need more registers than there are beside an epilogue in eight
# parts; and with addresses of rows or weights for every thread.
MAX_SPILLED, MAX_SPILLED_BY_ADDRESSES = 256, 64
# Of dact with contiguous rows: Triton 3.7 has no register left for interleaved features of mixtral-8x7b.
CONTIGUOUS_SPILLED = since(("3.6", 0), ("3.7", 8))
LAYOUTS = ("gather", "contiguous", "table", "biased")


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, gemm_act, gpu_activation, gpu_bias)


def launch(shape, activation, dtype=torch.bfloat16, layout="gather", config=None):
    """Calls all functions on one shape the way the layer does."""
    G, H, I, N = SHAPES[shape]
    W = activation.hidden_width(I)
    gather = layout != "contiguous"
    index = meta(N, dtype=torch.int32) if gather else None
    x = meta(N // 2 if gather else N, H, dtype=dtype)
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    h, a = meta(N, W, dtype=dtype), meta(N, I, dtype=dtype)
    bias = meta(G, W, dtype=dtype) if layout == "biased" else None

    def weight(*shape):
        return TensorTable(meta(G, dtype=torch.int64), shape, dtype) if layout == "table" else meta(*shape, dtype=dtype)

    gemm_act.grouped_gemm_act(
        x, weight(G, W, H), row_range, scale, h, a, activation, row_index=index, bias=bias, num_sms=132
    )
    workspace = meta(gemm_act.dact_workspace_numel(N, G, I, activation), dtype=torch.float32)
    gemm_act.grouped_gemm_dact(
        x,
        weight(G, H, I),
        row_range,
        h,
        scale,
        h,
        a,
        scale,
        workspace,
        activation,
        row_index=index,
        dbias=bias,
        num_sms=132,
        config=config,
    )
    gpu_activation.scaled_activation(h, scale, a, activation)
    gpu_activation.scaled_activation_grad(a, h, scale, h, scale, activation)


@every_combination(
    kernel=GEMMS,
    activation=ACTIVATIONS,
    layout=LAYOUTS,
    shape=["qwen3-30b", "mixtral-8x7b"],
)
def test_bf16_uses_wgmma_and_wide_accesses_and_does_not_spill(launches, kernel, activation, layout, shape):
    launch(shape, activation, layout=layout)
    code = launches.compile(kernel)
    assert "wgmma.mma_async" in code.ptx
    assert ("cp.async.bulk.tensor" in code.ptx) == (layout != "table")
    assert ("cp.async.cg" in code.ptx) == (layout != "contiguous")
    assert "st.global.v4.b32" in code.ptx
    if kernel == "grouped_gemm_dact_kernel":
        assert "ld.global.v4.b32" in code.ptx
    if kernel == "grouped_gemm_dact_kernel" and (layout == "biased" or activation.limit < math.inf):
        assert code.spilled <= MAX_SPILLED
    elif kernel == "grouped_gemm_dact_kernel" and layout != "contiguous":
        assert code.spilled <= MAX_SPILLED_BY_ADDRESSES
    else:
        assert code.spilled <= (CONTIGUOUS_SPILLED if kernel == "grouped_gemm_dact_kernel" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gather", "contiguous"])
@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["interleave"]], ids=["halves", "blocks"])
@pytest.mark.parametrize("kernel", GEMMS)
def test_usual_products_do_not_spill(launches, kernel, activation, layout):
    launch("qwen3-30b", activation, layout=layout)
    assert launches.of(kernel).grid == (132,)
    code = launches.compile(kernel)
    assert "wgmma.mma_async" in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx
    assert "st.global.v4.b32" in code.ptx
    assert code.spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["srelu"]], ids=["swiglu", "srelu"])
def test_other_dtypes(launches, kernel, activation, dtype):
    launch("qwen3-30b", activation, dtype)
    code = launches.compile(kernel)
    # FP32 must not be rounded to TF32 on the way.
    assert ("wgmma.mma_async" in code.ptx) == (dtype == torch.float16)
    assert "tf32" not in code.ptx
    assert code.spilled == 0


@pytest.mark.parametrize("kernel", ELEMENTWISE)
@pytest.mark.parametrize("interleave", [None, 32, 8, 4, 1])
def test_elementwise_kernels_access_16_bytes(launches, kernel, interleave):
    launch("qwen3-30b", Activation(interleave=interleave))
    code = launches.compile(kernel)
    assert "ld.global.v4.b32" in code.ptx
    assert "st.global.v4.b32" in code.ptx
    assert code.spilled == 0


@every_combination(
    kernel=[*GEMMS, "sum_dscale_kernel", "sum_dbias_kernel", *ELEMENTWISE],
    shape=["odd", "narrow"],
    interleave=[None, 4, 8],
)
def test_widths_that_no_tile_divides(launches, kernel, shape, interleave):
    launch(shape, Activation(interleave=interleave, limit=7.0), layout="biased")
    code = launches.compile(kernel)
    assert not atomics(code.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["interleave"]], ids=["halves", "blocks"])
def test_switches_of_the_epilogue(launches, activation):
    """What a sweep may switch on is in the code."""
    wide = gemm_act.dact_config(768, torch.bfloat16)
    options = {"prefetch": True, "load_policy": "evict_first", "store_policy": "evict_last"}
    config = gemm_act.DactConfig(**{name: getattr(wide, name) for name in ("block_m", "block_n", "block_k")},
                                 num_stages=3, num_warps=8, parts=8, flatten=True, **options)  # fmt: skip
    launch("qwen3-30b", activation, config=config)
    code = launches.compile("grouped_gemm_dact_kernel")
    assert "prefetch.global.L2" in code.ptx
    assert "evict_first" in code.ptx
    assert "evict_last" in code.ptx


@pytest.mark.parametrize("interleave", [3, 64])
def test_interleave_has_to_be_a_small_power_of_two(interleave):
    activation = Activation(interleave=interleave)
    with pytest.raises(ArgumentError, match=rf"interleave \({interleave}\) must be a power of two up to 32"):
        gpu_activation.activation_fields(activation, 192)


def test_interleave_has_to_divide_the_width():
    with pytest.raises(ArgumentError, match=r"interleave \(32\) must divide the FFN width \(40\)"):
        gpu_activation.activation_fields(Activation(interleave=32), 40)


def test_the_workspace_is_enough_for_every_choice_of_tiles():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for ffn in (16, 128, 256, 14336):
            config = gemm_act.dact_config(ffn, dtype)
            assert config.block_m >= gemm_act.MIN_BLOCK_M
            assert config.block_n % SUM_COLUMNS == 0
