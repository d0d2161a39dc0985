"""Pointer loading on the CPU: the twins, the argument checks, and what a GPU launch is made of."""

import array
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_ranges import whole_groups

from symmoe import SymmetricHeap, copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs
from symmoe.errors import ArgumentError, StaleLease
from symmoe.kernels import twin
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.pointers import swizzled_scale_bytes

UNTOUCHED = 0x5A


def swizzle_by_formula(scales, num_rows, num_blocks):
    """scales[m][k] in 128x4 tiles, one byte after the other."""
    padded_blocks = (num_blocks + 3) // 4 * 4
    out = [0] * ((num_rows + 127) // 128 * 128 * padded_blocks)
    for m in range(num_rows):
        for k in range(num_blocks):
            offset = (m // 128) * 128 * padded_blocks + (k // 4) * 512
            offset += (m % 32) * 16 + ((m % 128) // 32) * 4 + (k % 4)
            out[offset] = scales[m][k]
    return out


@settings(deadline=None, max_examples=60)
@given(num_bytes=st.integers(0, 10000), offset=st.integers(0, 9), kind=st.sampled_from(["bytes", "array", "tensor"]))
def test_any_byte_count(num_bytes, offset, kind):
    data = os.urandom(num_bytes)
    source = {
        "bytes": data,
        "array": array.array("B", data),
        "tensor": torch.tensor(list(data), dtype=torch.uint8),
    }[kind]
    destination = torch.full((num_bytes + offset + 5,), UNTOUCHED, dtype=torch.uint8)
    copy_host_to_device(source, destination[offset:])
    expected = bytes([UNTOUCHED] * offset) + data + bytes([UNTOUCHED] * 5)
    assert destination.numpy().tobytes() == expected


def test_sources_of_any_type():
    floats = torch.randn(3, 5)
    for source in (floats, floats.numpy(), memoryview(floats.numpy()), bytearray(floats.numpy().tobytes())):
        destination = torch.zeros(15)
        copy_host_to_device(source, destination)
        assert torch.equal(destination, floats.flatten())
    destination = torch.zeros(4, dtype=torch.bfloat16)
    copy_host_to_device(torch.ones(4, dtype=torch.bfloat16), destination)
    assert destination.tolist() == [1.0] * 4


def test_autograd_learns_of_the_write():
    weight, saved = torch.ones(2, requires_grad=True), torch.ones(2)
    y = weight * saved
    copy_host_to_device(np.zeros(2, np.float32), saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def emptied(*shape):
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (bytes(9), torch.zeros(2), r"source has 9 bytes; destination has only 8"),
        (bytes(4), [0], r"destination \(list\) must be a tensor"),
        (bytes(4), torch.zeros(4, 4).t()[:2], r"destination has strides \[1, 4\]; it must be contiguous"),
        (bytes(4), torch.zeros(4, device="meta"), r"destination is on meta; it must be on a CUDA device or the CPU"),
        (bytes(4), torch.zeros(4, requires_grad=True), r"destination \[4\] requires a gradient"),
        (bytes(4), emptied(4), r"destination has a null data pointer \(0\); 4 bytes"),
        (emptied(1), torch.zeros(4), r"source has a null data pointer \(0\); 4 bytes"),
        (torch.zeros(4, device="meta"), torch.zeros(4), r"source is on meta; it must be on the CPU"),
        (torch.zeros(4, 4)[:, :2], torch.zeros(16), r"source has strides \[4, 1\]; it must be contiguous"),
        (np.zeros((4, 4))[:, :2], torch.zeros(64), r"source is a buffer with strides; it must be contiguous"),
        ([1, 2], torch.zeros(4), r"source \(list\) must be bytes, a buffer or a CPU tensor"),
    ],
)
def test_wrong_copies_are_refused(source, destination, message):
    with pytest.raises(ArgumentError, match=message):
        copy_host_to_device(source, destination)


@pytest.fixture
def stale():
    """[4, 4] fp32 in memory of lease 'mine', which somebody else has by now; and what that one's lease shows."""
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        lease = heap.lease((4, 4), torch.float32, name="mine")
        tensor = lease.tensor
        lease.release()
        with heap.lease((4, 4), torch.float32) as other:
            assert other.tensor.data_ptr() == tensor.data_ptr()
            yield tensor, other.tensor.fill_(UNTOUCHED)


def test_the_memory_of_a_released_lease_is_not_written(stale):
    tensor, others = stale
    for destination in (tensor, tensor[1:], tensor.view(torch.uint8)):
        with pytest.raises(StaleLease, match=r"^destination is memory of lease 'mine' \(generation 1\)"):
            copy_host_to_device(b"1234", destination)
    assert (others == UNTOUCHED).all()
    with pytest.raises(StaleLease, match=r"^source is memory of lease 'mine'"):
        copy_host_to_device(tensor, torch.zeros(16))
    copy_host_to_device(b"1234", others)


@pytest.mark.usefixtures("reader")
def test_the_address_of_a_released_lease_is_not_given_out(stale):
    tensor, others = stale
    good = torch.zeros(4, 4)
    with pytest.raises(StaleLease, match=r"^tensors\[2\] is memory of lease 'mine'"):
        copy_data_ptrs_to_device([good, others, tensor[1:]], "cpu")
    with pytest.raises(StaleLease, match=r"^fc2\[1\] is memory of lease 'mine'"):
        pack_weight_ptrs([good, good], [good, tensor])
    compact = {"fc1_scales": [good, good], "fc2_scales": [good, tensor]}
    with pytest.raises(StaleLease, match=r"^fc2_scales\[1\] is memory of lease 'mine'"):
        pack_weight_ptrs([good, good], [good, good], **compact)
    assert copy_data_ptrs_to_device([good, others], "cpu").tolist() == [good.data_ptr(), others.data_ptr()]


def test_sparse_tensors_are_refused():
    sparse = torch.ones(4).to_sparse()
    with pytest.raises(ArgumentError, match=r"^destination \(torch\.sparse_coo\) must be a strided tensor"):
        copy_host_to_device(b"1234", sparse)
    with pytest.raises(ArgumentError, match=r"^source \(torch\.sparse_coo\) must be a strided tensor"):
        copy_host_to_device(sparse, torch.zeros(4))
    with pytest.raises(ArgumentError, match=r"^tensors\[0\] is torch\.sparse_coo on cpu"):
        copy_data_ptrs_to_device([sparse], "cpu")


def test_nothing_to_copy_needs_no_memory():
    copy_host_to_device(b"", emptied(4))
    copy_host_to_device(torch.zeros(0), torch.zeros(0))
    destination = torch.full((3,), 7.0)
    copy_host_to_device(b"", destination)
    assert destination.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("num_tensors", [0, 1, 64, 65, 256, 511, 2000])
@pytest.mark.usefixtures("reader")
def test_addresses_of_any_number_of_tensors(num_tensors):
    tensors = tuple(torch.ones(2, 3) for _ in range(num_tensors))
    for _ in range(2):
        loaded = copy_data_ptrs_to_device(tensors, "cpu")
        assert loaded.dtype == torch.int64
        assert loaded.tolist() == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.usefixtures("reader")
def test_moved_tensors_are_seen():
    """Addresses are read in every call."""
    tensors = [torch.nn.Parameter(torch.ones(4)) for _ in range(5)]
    keep = [copy_data_ptrs_to_device(tensors, "cpu"), [t.data for t in tensors]]
    tensors[3].data = torch.zeros(4)
    assert copy_data_ptrs_to_device(tensors, "cpu").tolist() == [t.data_ptr() for t in tensors]
    assert keep[0][3] != tensors[3].data_ptr()


@pytest.fixture(params=["python", "c"])
def reader(request, monkeypatch):
    """Every test runs with the twin's read_addresses and with the compiled one of GPUs, which knows CPU tensors too."""
    if request.param == "c":
        pytest.importorskip("triton")
        from symmoe.kernels.triton import pointers as gpu_pointers

        assert gpu_pointers._read_in_c() is not None
        monkeypatch.setattr(twin, "read_addresses", gpu_pointers.read_addresses)


def test_the_compiled_reader_does_the_work(monkeypatch):
    pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).t()]
    expected = [tensor.data_ptr() for tensor in tensors]
    monkeypatch.setattr(gpu_pointers.twin, "read_addresses", lambda *_, **__: None)

    def read(tensors, **changes):
        options = {"alignment": 16, "contiguous": False, **changes}
        return gpu_pointers.read_addresses(tensors, torch.device("cpu"), **options)

    assert np.frombuffer(read(tensors), np.int64).tolist() == expected
    assert read(tensors, contiguous=True) is None
    assert read([torch.ones(9)[1:]]) is None
    assert read([torch.ones(9)[1:]], alignment=4) is not None
    for wrong in (3, torch.ones(0), torch.ones(1, device="meta"), torch.ones(2, 2).to_sparse()):
        assert read([tensors[0], wrong]) is None


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([torch.ones(1), 3], {}, r"tensors\[1\] is a int; it must be a tensor on cpu"),
        ([torch.ones(1), torch.ones(1, device="meta")], {}, r"tensors\[1\] is torch.strided on meta"),
        ([torch.ones(2, 2).to_sparse()], {}, r"tensors\[0\] is torch.sparse_coo on cpu; it must be strided on cpu"),
        ([torch.ones(1), torch.ones(0)], {}, r"tensors\[1\] has a null data pointer \(0\); its shape is \[0\]"),
        (
            [torch.ones(9), torch.ones(9)[1:]],
            {"alignment": 16},
            r"tensors\[1\] starts at .* aligned to 16",
        ),
    ],
)
@pytest.mark.usefixtures("reader")
def test_wrong_tensors_are_refused(tensors, options, message):
    with pytest.raises(ArgumentError, match=message):
        copy_data_ptrs_to_device(tensors, "cpu", **options)


def weights_of(num_groups, *shape, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for _ in range(num_groups)]


def test_both_layers_are_packed_in_one_copy(monkeypatch):
    fc1, fc2 = weights_of(70, 16, 8), weights_of(70, 8, 8)
    scales1, scales2 = weights_of(70, 3, 3), weights_of(70, 2, 2)
    copies = []
    copy = twin.copy_host_to_device
    monkeypatch.setattr(twin, "copy_host_to_device", lambda *args: (copies.append(len(args[0])), copy(*args)))
    packed = pack_weight_ptrs(fc1, fc2)
    assert packed.fc1.tolist() == [w.data_ptr() for w in fc1]
    assert packed.fc2.tolist() == [w.data_ptr() for w in fc2]
    assert packed.fc1_scales is packed.fc2_scales is packed.swizzled is None
    packed = pack_weight_ptrs(fc1, fc2, fc1_scales=scales1, fc2_scales=scales2)
    assert packed.fc1_scales.tolist() == [w.data_ptr() for w in scales1]
    assert packed.fc2_scales.tolist() == [w.data_ptr() for w in scales2]
    assert packed.swizzled is None
    assert copies == [140 * 8, 280 * 8]


def up(value, multiple):
    return -(-value // multiple) * multiple


def test_scales_are_swizzled_under_another_default_device():
    weights, compact = weights_of(2, 128, 64), scales(2, 128, 2)
    want = pack_weight_ptrs(weights, weights, fc1_scales=compact, fc2_scales=compact, scale_layout="mxfp8_rowwise")
    with torch.device("meta"):
        found = pack_weight_ptrs(weights, weights, fc1_scales=compact, fc2_scales=compact, scale_layout="mxfp8_rowwise")
    assert torch.equal(found.swizzled, want.swizzled)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("layout", ["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"])
def test_scales_are_swizzled(layout, is_padded, monkeypatch):
    """Against loops over the formula; padding of the compact scales is poison and must not come through."""
    num_groups, shapes, block = 3, ((160, 96), (70, 300)), 16 if layout == "nvfp4" else 32
    copies = []
    copy = twin.copy_host_to_device
    monkeypatch.setattr(twin, "copy_host_to_device", lambda *args: (copies.append(len(args[0])), copy(*args)))
    data, scales, extents = [], [], []
    for M, K in shapes:
        is_columnwise = layout == "mxfp8_columnwise"
        extent = (K, up(M, block) // block) if is_columnwise else (M, up(K, block) // block)
        wanted = extent[::-1] if is_columnwise else extent
        lies_in = wanted
        if is_padded:
            lies_in = (
                (up(wanted[0], 4), up(wanted[1], 128)) if is_columnwise else (up(extent[0], 128), up(extent[1], 4))
            )
        data.append(weights_of(num_groups, M, K // (2 if layout == "nvfp4" else 1), dtype=torch.float16))
        compact = [torch.full(lies_in, 0xFF, dtype=torch.uint8) for _ in range(num_groups)]
        for c in compact:
            c[: wanted[0], : wanted[1]] = torch.randint(1, 250, wanted)
        scales.append(compact)
        extents.append(extent)
    packed = pack_weight_ptrs(*data, fc1_scales=scales[0], fc2_scales=scales[1], scale_layout=layout)
    assert copies == [6 * num_groups * 8]  # one, of data, compact and swizzled scales
    assert packed.fc1.tolist() == [w.data_ptr() for w in data[0]]
    assert packed.fc2.tolist() == [w.data_ptr() for w in data[1]]
    start = packed.swizzled.data_ptr()
    for table, compact, (rows, blocks) in zip((packed.fc1_scales, packed.fc2_scales), scales, extents, strict=True):
        size = swizzled_scale_bytes(rows, blocks)
        assert table.tolist() == list(range(start, start + num_groups * size, size))
        for c in compact:
            matrix = c.t() if layout == "mxfp8_columnwise" else c
            offset = start - packed.swizzled.data_ptr()
            got = packed.swizzled[offset : offset + size].tolist()
            assert got == swizzle_by_formula(matrix.tolist(), rows, blocks)
            start += size
    assert start == packed.swizzled.data_ptr() + packed.swizzled.numel()


def scales(num_groups, *shape, dtype=torch.uint8):
    return [torch.ones(shape).to(dtype) for _ in range(num_groups)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc1": []}, r"fc1 \(0 matrices\) and fc2 \(2 matrices\) must not be empty"),
        ({"scale_layout": "fp8"}, r"scale_layout \('fp8'\) must be None or one of mxfp8_rowwise, "),
        ({"fc2_scales": None}, r"fc1_scales and fc2_scales must both be given .* given: \['fc1_scales'\]"),
        (
            {"fc1_scales": None, "fc2_scales": None},
            r"must both be given \(scale_layout is 'mxfp8_rowwise'\); given: \[\]",
        ),
        ({"fc1_scales": scales(3, 64, 2)}, r"fc1_scales has 3 tensors; fc1 has 2"),
        ({"fc1_scales": scales(2, 64, 1)}, r"fc1_scales has shape \[64, 1\]; mxfp8_rowwise .*\[64, 2\]"),
        ({"fc1_scales": scales(2, 128)}, r"fc1_scales has shapes \[\[128\]\]; .* all must have one, with 2 dims"),
        ({"fc1_scales": scales(2, 64, 2, dtype=torch.float16)}, r"fc1_scales \(torch.float16\) .* one-byte scales"),
        ({"fc1_scales": [s.t() for s in scales(2, 2, 64)]}, r"fc1_scales \(torch.uint8\) must be contiguous"),
        (
            {"fc1": [torch.ones(64, 64), torch.ones(64, 64).t()]},
            r"fc1\[1\] has strides \[1, 64\]; it must be contiguous",
        ),
        ({"fc2": [torch.ones(64, 64), torch.ones(32, 64)]}, r"fc2 has shapes \[\[32, 64\], \[64, 64\]\]"),
        (
            {"fc2": [torch.ones(64, 64), torch.ones(64 * 64 + 1)[1:].view(64, 64)]},
            r"fc2\[1\] starts at address",
        ),
    ],
)
@pytest.mark.usefixtures("reader")
def test_wrong_weights_are_refused(changes, message):
    arguments = {
        "fc1": weights_of(2, 64, 64),
        "fc2": weights_of(2, 64, 64),
        "fc1_scales": scales(2, 64, 2),
        "fc2_scales": scales(2, 64, 2),
        "scale_layout": "mxfp8_rowwise",
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        pack_weight_ptrs(arguments.pop("fc1"), arguments.pop("fc2"), **arguments)


def test_more_than_64_discrete_weights_in_a_grouped_gemm():
    num_groups = 100
    discrete = weights_of(num_groups, 5, 8)
    table = TensorTable(copy_data_ptrs_to_device(discrete, "cpu"), (num_groups, 5, 8), torch.float32)
    row_range = whole_groups([3] * num_groups)
    rows = torch.randn(3 * num_groups, 8)
    packed_out, out = torch.full((2, 3 * num_groups, 5), torch.nan)
    twin.grouped_gemm(rows, torch.stack([w.data for w in discrete]), row_range, packed_out)
    twin.grouped_gemm(rows, table, row_range, out)
    assert torch.equal(out, packed_out)


class FakeLaunches:
    """Stands in for the driver: does what copy_bytes would do with the arguments of each launch."""

    def __init__(self, gpu_pointers):
        self.sizes, self.header = [], gpu_pointers.HEADER

    def __call__(self, arguments, device):
        import ctypes

        memory = ctypes.c_void_p.from_address(arguments).value
        destination, num_bytes = self.header.unpack(ctypes.string_at(memory, self.header.size))
        ctypes.memmove(destination, memory + self.header.size, num_bytes)
        self.sizes.append(num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 2048, 4079, 4080, 4081, 8160, 10000])
def test_launches_carry_all_bytes(monkeypatch, num_bytes):
    pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    launches = FakeLaunches(gpu_pointers)
    monkeypatch.setattr(gpu_pointers, "_launch", launches)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where CPU tensors say they are
    source = os.urandom(num_bytes)
    destination = torch.full((num_bytes + 3,), UNTOUCHED, dtype=torch.uint8)
    gpu_pointers.copy_host_to_device(source, destination)
    assert destination.numpy().tobytes() == source + bytes([UNTOUCHED] * 3)
    full, rest = divmod(num_bytes, 4080)
    assert launches.sizes == [4080] * full + [rest] * bool(rest)
    assert len(gpu_pointers._free_arguments) >= 1


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "sm_100a"])
def test_the_copy_kernel_assembles(tmp_path, arch):
    triton = pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = tools / ("ptxas-blackwell" if arch == "sm_100a" else "ptxas")
    if not ptxas.exists():
        pytest.skip(f"{ptxas} is not there")
    source, binary = tmp_path / "copy.ptx", tmp_path / "copy.cubin"
    source.write_text(gpu_pointers.COPY_PTX)
    command = [ptxas, "-v", f"-arch={arch}", source, "-o", binary]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr
    # The payload is read where it is: no copy of it on the stack.
    assert "0 bytes stack frame, 0 bytes spill stores" in report.stderr
    assert gpu_pointers.HEADER.size + gpu_pointers.PAYLOAD_BYTES == gpu_pointers.PARAM_BYTES == 4096


@pytest.mark.parametrize("strides", [(64, 1), (1, 7168)])
def test_the_swizzle_kernel_compiles(strides):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from symmoe.kernels.triton import pointers as gpu_pointers

    constants = {"NUM_ROWS": 7168, "NUM_BLOCKS": 64, "ROW_STRIDE": strides[0], "BLOCK_STRIDE": strides[1]}
    constants |= {"NUM_TILES": 56 * 16, "TILES": gpu_pointers.TILES_PER_PROGRAM}
    source = ASTSource(
        gpu_pointers.swizzle_scales_kernel.kernel,
        {"pointers": "*i64", "swizzled": "*u8", **dict.fromkeys(constants, "constexpr")},
        constants,
        {(1,): [["tt.divisibility", 16]]},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "st.global.v4.b32" in ptx  # tiles are written 16 bytes at a time
    assert ".local" not in ptx
