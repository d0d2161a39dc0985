"""Compiles the GEMMs for Hopper without a GPU, with the arguments of their launchers; and which calls take them."""

import re
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from compiled_launches import Case, code_cases  # noqa: E402
from launch_table import ACTIVATIONS, BF16, FP16, FP32, SWIGLU, Launch, index  # noqa: E402

from symmoe.kernels import architectures, hopper_choice  # noqa: E402
from symmoe.kernels import hopper_launchers as launchers  # noqa: E402
from symmoe.kernels.activation import Activation  # noqa: E402
from symmoe.kernels.hopper import act  # noqa: E402

USUAL = ["qwen3-30b", "mixtral-8x7b", "deepseek-like"]
WITH_ODD = [*USUAL, "odd"]
NUMBERS = [
    ("swiglu", BF16),
    ("swiglu", FP16),
    ("gpt-oss", BF16),
    ("geglu", BF16),
    ("tanh gelu", BF16),
]
VARIANTS = [act.SEPARATE, act.TWO_WARPS, act.ALTERNATE, act.GATHERED]
MAX_SPILLED = 64  # bytes, of a separate epilogue with limits or with masks of columns
OF_ROLES = {"setmaxnreg": True, "wgmma.mma_async": True}


def dact(numbers, variant, sizes):
    name, dtype = numbers
    is_gathered = variant is act.GATHERED
    launch = Launch(
        "launch_dact",
        sizes,
        dtype,
        activation=ACTIVATIONS[name],
        ways="gather" if is_gathered else "",
        changes={"variant": variant},
    )
    of_16_bytes = {"ld.global.v4.b32": True, "st.global.v4.b32": True}
    return Case(
        launch,
        ptx={**OF_ROLES, "cp.async.cg": is_gathered, **of_16_bytes},
        bounds={"spilled": 0 if sizes != "odd" and name == "swiglu" else MAX_SPILLED},
    )


def multiplies_tiles_of_256_features(dtype):
    def check(code):
        kind = "bf16.bf16" if dtype == BF16 else "f16.f16"
        products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) [^;]*;", code.ptx)
        assert products == [f"m64n256k16.f32.{kind}"] * 8  # 4 to a stage, of 2 warpgroups

    return check


def wgrad(ways, dtype, sizes):
    # 2 boxes of dout, 4 of rows
    boxes = {"cp.async.bulk.tensor.4d.shared": 6, "cp.async.bulk.tensor.3d.global": 8}
    return Case(
        Launch("launch_wgrad", sizes, dtype, ways=ways),
        ptx=OF_ROLES | boxes,
        also=(multiplies_tiles_of_256_features(dtype),),
    )


SECTIONS = {
    "products": [
        Case(Launch("launch_gemm", sizes, dtype, ways=ways), ptx=OF_ROLES)
        for ways, dtype, sizes in product(("", "k-first"), (BF16, FP16), WITH_ODD)
    ],
    "dact": [dact(*options) for options in product(NUMBERS, VARIANTS, WITH_ODD)],
    "act": [
        Case(
            Launch(
                "launch_act",
                sizes,
                dtype,
                activation=ACTIVATIONS[name],
                changes={"variant": variant},
            ),
            ptx=OF_ROLES,
        )
        for dtype, variant, sizes, name in product(
            (BF16, FP16), (act.SEPARATE, act.ALTERNATE), USUAL, ("swiglu", "geglu")
        )
    ],
    "wgrad": [wgrad(*options) for options in product(("", "fc2"), (BF16, FP16), WITH_ODD)],
}


@code_cases(SECTIONS)
def test_code(launches, case):
    case.check(launches)


def launched(launches, kernel, **changes):
    """The first kernel that a call launches on 5 SMs of a Hopper GPU, and the names of the others."""
    first, *later = launches.made_by(Launch(kernel, changes={"num_sms": 5, **changes}))
    assert first.grid == (5,)
    return first, [launch.name for launch in later]


def test_the_limit_of_sms_reaches_the_kernels(launches, monkeypatch):
    """From the public functions, as on a Hopper GPU."""
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda device, dtype, columns: launchers)
    of_fc2 = {"weight": "G H I"}
    calls = [
        launched(launches, "grouped_gemm", rows="N I", out="N H", **of_fc2),
        launched(launches, "grouped_gemm_dgrad", dout="N H", out="N I", **of_fc2),
    ]
    pipes = [first.kwargs["PIPE"] for first, _ in calls]
    assert [(pipe.num_n_tiles, pipe.weight_k_first) for pipe in pipes] == [(8, False), (3, True)]
    launched(launches, "grouped_gemm_act")
    for rows, dscale in product(("N H", ("N H", index("N", "N"))), (None, "f32 N")):
        gradients = "N W", "N I", dscale, None
        _, later = launched(launches, "grouped_gemm_dact", dout=rows, gradients=gradients)
        assert later == ([] if dscale is None else ["sum_dscale_kernel"])
    first, later = launched(launches, "grouped_gemm_wgrad")
    pipe = first.kwargs["PIPE"]
    assert (pipe.num_groups, pipe.out_rows, pipe.columns, later) == (32, 1536, 2048, [])
    of_index = index("N", "N")
    for changes in (
        {"dout": ("N W", of_index)},
        {"rows": ("N H", of_index)},
        {"accumulate": True},
        {"out": "f32 G W H"},
    ):
        first, later = launched(launches, "grouped_gemm_wgrad", **changes)
        assert (first.name, later) == ("grouped_gemm_wgrad_kernel", [])


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
    ("capability", "dtype", "columns", "version", "is_taken"),
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
def test_which_gpus_have_them(monkeypatch, capability, dtype, columns, version, is_taken):
    monkeypatch.setattr(architectures, "capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    kernels = hopper_choice.hopper_kernels.__wrapped__(torch.device("cuda", 0), dtype, columns)
    assert kernels is (launchers if is_taken else None)
