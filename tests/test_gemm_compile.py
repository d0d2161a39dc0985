"""Compiles every GEMM kernel for sm_90 without a GPU, with the arguments its launcher would pass.

What is checked is what the generated code must have to be fast: WGMMA, TMA, wide stores, and registers that do not
spill. The tensors are meta tensors, so the shapes can be real ones.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from symmoe.kernels.gpu import gemm, gemm_swiglu  # noqa: E402

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
MAX_SHARED = 227 * 1024  # bytes that one program can have on Hopper
SHAPES = {"qwen3-30b": (32, 2048, 768, 65536), "mixtral-8x7b": (4, 4096, 14336, 16384)}  # G, H, I, N
KERNELS = {
    "grouped_gemm_kernel": gemm,
    "grouped_gemm_wgrad_kernel": gemm,
    "grouped_gemm_swiglu_kernel": gemm_swiglu,
    "grouped_gemm_dswiglu_kernel": gemm_swiglu,
    "sum_partials_kernel": gemm_swiglu,
}


class Recorder:
    """Stands in for a kernel: keeps the arguments of its launch."""

    def __init__(self, kernel):
        self.kernel, self.args, self.kwargs = kernel, None, None

    def __getitem__(self, grid):
        assert grid[0] > 0
        return self.launch

    def launch(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def compile(self):
        """The recorded launch, compiled for Hopper with the specialisations that the JIT would choose."""
        names = self.kernel.arg_names
        values = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values.pop(parameter.name)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{TYPE_NAMES[value.base.dtype]}{list(value.block_shape)}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[i,] = [["tt.divisibility", 16]]
            else:
                assert parameter.do_not_specialize
                signature[parameter.name] = "i32"
        options = {name: value for name, value in values.items() if value is not None}
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture
def recorders(monkeypatch):
    """Every kernel replaced by a recorder."""
    result = {name: Recorder(getattr(module, name)) for name, module in KERNELS.items()}
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, result[name])
    return result


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    """Compile for real: a cached kernel would hide that the compiler has changed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(function, shape, dtype, gather):
    """Calls one of the five functions the way the layer does."""
    G, H, I, N = SHAPES[shape]
    rows_N = N // 2 if gather else N
    row_start = meta(G + 1, dtype=torch.int32)
    index = meta(N, dtype=torch.int32) if gather else None
    probs, dprob = meta(N, dtype=torch.float32), meta(N, dtype=torch.float32)
    x, weight1, weight2 = (
        meta(rows_N, H, dtype=dtype),
        meta(G, 2 * I, H, dtype=dtype),
        meta(G, H, I, dtype=dtype),
    )
    h, dh, a, out = (meta(N, width, dtype=dtype) for width in (2 * I, 2 * I, I, H))
    options = {"num_sms": 132}
    if function == "fc1":
        gemm_swiglu.grouped_gemm_swiglu(x, weight1, row_start, probs, h, a, row_index=index, **options)
    elif function == "fc2":
        gemm.grouped_gemm(a, weight2, row_start, out, **options)
    elif function == "gemm":
        gemm.grouped_gemm(x, weight1, row_start, h, row_index=index, **options)
    elif function == "dfc2":
        partials = meta(*gemm_swiglu.dswiglu_partials_shape(N, I), dtype=torch.float32)
        gemm_swiglu.grouped_gemm_dswiglu(
            x, weight2, row_start, h, probs, dh, a, dprob, partials, row_index=index, **options
        )
    elif function == "dfc1":
        gemm.grouped_gemm_dgrad(dh, weight1, row_start, out, **options)
    elif function == "wgrad2":
        gemm.grouped_gemm_wgrad(x, a, row_start, weight2, dout_index=index, **options)
    elif function == "wgrad1":
        gemm.grouped_gemm_wgrad(dh, x, row_start, weight1, rows_index=index, **options)


def assemble(ptx, directory):
    """(registers per thread, bytes spilled), by the ptxas that Triton brings."""
    source = directory / "kernel.ptx"
    source.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", directory / "kernel.cubin"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return (
        int(re.search(r"Used (\d+) registers", log)[1]),
        int(re.search(r"(\d+) bytes spill stores", log)[1]),
    )


MAIN = [
    ("fc1", "grouped_gemm_swiglu_kernel", True),
    ("fc1", "grouped_gemm_swiglu_kernel", False),
    ("gemm", "grouped_gemm_kernel", True),
    ("fc2", "grouped_gemm_kernel", False),
    ("dfc2", "grouped_gemm_dswiglu_kernel", True),
    ("dfc2", "grouped_gemm_dswiglu_kernel", False),
    ("dfc1", "grouped_gemm_kernel", False),
    ("wgrad2", "grouped_gemm_wgrad_kernel", True),
    ("wgrad2", "grouped_gemm_wgrad_kernel", False),
    ("wgrad1", "grouped_gemm_wgrad_kernel", True),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("function", "kernel", "gather"), MAIN)
def test_bf16_uses_wgmma_and_tma_and_does_not_spill(recorders, tmp_path, function, kernel, gather, shape):
    launch(function, shape, torch.bfloat16, gather)
    compiled = recorders[kernel].compile()
    ptx = compiled.asm["ptx"]
    registers, spilled = assemble(ptx, tmp_path)
    print(f"{function} {kernel} gather={gather} {shape}: {registers} registers, {spilled} bytes spilled, "
          f"{compiled.metadata.shared} bytes shared")  # fmt: skip
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("cp.async.cg" in ptx) == gather
    assert "st.global.v4.b32" in ptx
    assert compiled.metadata.shared <= MAX_SHARED
    assert spilled == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("function", "kernel", "gather"),
    [case for case in MAIN if case[0] in ("fc1", "fc2", "dfc2", "dfc1", "wgrad1")],
)
def test_other_dtypes_compile(recorders, tmp_path, function, kernel, gather, dtype):
    launch(function, "qwen3-30b", dtype, gather)
    compiled = recorders[kernel].compile()
    registers, spilled = assemble(compiled.asm["ptx"], tmp_path)
    print(f"{function} {kernel} gather={gather} {dtype}: {registers} registers, {spilled} bytes spilled")
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    # FP32 must not be rounded to TF32 on the way.
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (dtype == torch.float16)
    assert "tf32" not in compiled.asm["ptx"]
    assert compiled.metadata.shared <= MAX_SHARED
    assert spilled == 0


def test_partials_kernel_compiles(recorders):
    launch("dfc2", "qwen3-30b", torch.bfloat16, True)
    assert "atom" not in recorders["sum_partials_kernel"].compile().asm["ptx"]


@pytest.mark.parametrize(("function", "kernel", "gather"), MAIN[:2] + MAIN[4:6])
def test_odd_widths_compile(recorders, monkeypatch, function, kernel, gather):
    """Widths that no tile divides, and contractions that no step divides."""
    monkeypatch.setitem(SHAPES, "odd", (3, 1032, 712, 999))
    launch(function, "odd", torch.bfloat16, gather)
    assert "wgmma.mma_async" in recorders[kernel].compile().asm["ptx"]
