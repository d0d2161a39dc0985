"""Pointer loading on the CPU: the twins, the argument checks, and the content of a GPU launch."""

import array
import ctypes
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from heap_calls import outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from symmoe import SymmetricHeap
from symmoe.errors import ArgumentError, StaleLease, SymmoeError
from symmoe.kernels import twin
from symmoe.pointers import copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs
from symmoe.symm_mem import memory

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


SOURCES = [
    bytes,
    bytearray,
    lambda data: memoryview(bytearray(data)),
    lambda data: array.array("B", data),
    lambda data: np.frombuffer(data, np.uint8),
    lambda data: torch.tensor([*data], dtype=torch.uint8),
    lambda data: torch.tensor([*data], dtype=torch.uint8).view(-1, 1).view(torch.int8),
]


@settings(max_examples=60)
@given(
    num_bytes=st.integers(0, 10000),
    offset=st.integers(0, 9),
    kind=st.sampled_from(SOURCES),
)
def test_copies_of_any_byte_count(num_bytes, offset, kind):
    data = os.urandom(num_bytes)
    source = kind(data)
    destination = torch.full((num_bytes + offset + 5,), UNTOUCHED, dtype=torch.uint8)
    copy_host_to_device(source, destination[offset:])
    expected = bytes([UNTOUCHED] * offset) + data + bytes([UNTOUCHED] * 5)
    assert destination.numpy().tobytes() == expected


def test_autograd_detects_the_write():
    weight = torch.ones(2, requires_grad=True)
    saved = torch.ones(2)
    y = weight * saved
    copy_host_to_device(np.zeros(2, np.float32), saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def emptied(*shape):
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_nothing_to_copy_needs_no_memory():
    assert outcome(copy_host_to_device, b"", emptied(4)) == ("", "")


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (bytes(9), torch.zeros(2), r"source has 9 bytes; destination has only 8"),
        (bytes(4), [0], r"destination \(list\) must be a tensor"),
        (
            bytes(4),
            torch.zeros(4, 4).t()[:2],
            r"destination has strides \[1, 4\]; it must be contiguous",
        ),
        (
            bytes(4),
            torch.zeros(4, device="meta"),
            r"destination is on meta; it must be on a CUDA device or the CPU",
        ),
        (bytes(4), torch.zeros(4, requires_grad=True), r"destination \[4\] requires a gradient"),
        (bytes(4), emptied(4), r"destination has a null data pointer \(0\); 4 bytes"),
        (emptied(1), torch.zeros(4), r"source has a null data pointer \(0\); 4 bytes"),
        (
            torch.zeros(4, device="meta"),
            torch.zeros(4),
            r"source is on meta; it must be on the CPU",
        ),
        (
            torch.zeros(4, 4)[:, :2],
            torch.zeros(16),
            r"source has strides \[4, 1\]; it must be contiguous",
        ),
        (
            np.zeros((4, 4))[:, :2],
            torch.zeros(64),
            r"source is a buffer with strides; it must be contiguous",
        ),
        ([1, 2], torch.zeros(4), r"source \(list\) must be bytes, a buffer or a CPU tensor"),
        (
            bytes(4),
            torch.ones(4).to_sparse(),
            r"^destination \(torch\.sparse_coo\) must be a strided tensor",
        ),
        (
            torch.ones(4).to_sparse(),
            torch.zeros(4),
            r"^source \(torch\.sparse_coo\) must be a strided tensor",
        ),
    ],
)
def test_wrong_copies_are_refused(source, destination, message):
    with pytest.raises(ArgumentError, match=message):
        copy_host_to_device(source, destination)


@pytest.fixture
def stale():
    """[4, 4] fp32 in memory of the released lease 'mine', which a new lease has taken; and the new lease's tensor."""
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        lease = heap.lease((4, 4), torch.float32, name="mine")
        tensor = lease.tensor
        lease.release()
        with heap.lease((4, 4), torch.float32) as new_lease:
            assert new_lease.tensor.data_ptr() == tensor.data_ptr()
            yield tensor, new_lease.tensor.fill_(UNTOUCHED)


def test_the_memory_of_a_released_lease_is_not_written(stale):
    tensor, new_tensor = stale
    for destination in (tensor, tensor[1:], tensor.view(torch.uint8)):
        with pytest.raises(
            StaleLease, match=r"^destination is memory of lease 'mine' \(generation 1\)"
        ):
            copy_host_to_device(b"1234", destination)
    assert (new_tensor == UNTOUCHED).all()
    with pytest.raises(StaleLease, match=r"^source is memory of lease 'mine'"):
        copy_host_to_device(tensor, torch.zeros(16))
    copy_host_to_device(b"1234", new_tensor)


@pytest.mark.usefixtures("reader")
def test_addresses_of_a_released_lease_are_refused(stale):
    tensor, new_tensor = stale
    good = torch.zeros(4, 4)
    both = {"fc1": [good, good], "fc2": [good, good], "fc1_scales": [good, good]}
    with pytest.raises(StaleLease, match=r"^tensors\[2\] is memory of lease 'mine'"):
        copy_data_ptrs_to_device([good, new_tensor, tensor[1:]], "cpu")
    for label, lists in (
        (r"fc2\[1\]", {"fc1": [good, good], "fc2": [good, tensor]}),
        (r"fc2_scales\[1\]", {**both, "fc2_scales": [good, tensor]}),
        (r"fc1_scales\[0\]", {"fc1_scales": [tensor.view(torch.uint8)], "swizzle": "nvfp4"}),
    ):
        with pytest.raises(StaleLease, match=rf"^{label} is memory of lease 'mine'"):
            pack_weight_ptrs(**lists)
    assert copy_data_ptrs_to_device([good, new_tensor], "cpu").tolist() == [
        good.data_ptr(),
        new_tensor.data_ptr(),
    ]


@pytest.mark.usefixtures("reader")
def test_addresses_of_a_closed_heap_are_refused():
    good = torch.zeros(4)
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        released, active = (
            heap.lease((4,), torch.float32, name=name) for name in ("released", "kept")
        )
        tensors = released.tensor, active.tensor
        released.release()
        copy_data_ptrs_to_device([good, tensors[1]], "cpu")
    for tensor, text in zip(
        tensors, ("'released' .* was released", "'kept' .* heap was closed"), strict=True
    ):
        with pytest.raises(StaleLease, match=rf"^tensors\[1\] is memory of lease {text}$"):
            copy_data_ptrs_to_device([good, tensor], "cpu")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=12))
def test_ranges_of_arenas_equal_sets_of_addresses(arenas):
    """Adjacent ranges are merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_bounds", np.empty(0, np.int64))
        covered = set()
        for start, size in arenas:
            memory.add_range(start, size)
            covered |= {*range(start, start + size)}
        addresses = [*range(60), 5]
        inside = memory.positions_inside(np.array(addresses).tobytes())
        assert inside == [i for i, address in enumerate(addresses) if address in covered]
        assert len(memory._bounds) == 2 * sum(address - 1 not in covered for address in covered)
        assert memory.positions_inside(b"") == []


@pytest.mark.parametrize("num_tensors", [0, 1, 64, 65, 256, 511, 2000])
@pytest.mark.usefixtures("reader")
def test_addresses_of_any_number_of_tensors(num_tensors):
    tensors = tuple(torch.ones(2, 3) for _ in range(num_tensors))
    for _ in range(2):
        loaded = copy_data_ptrs_to_device(tensors, "cpu")
        assert loaded.dtype == torch.int64
        assert loaded.tolist() == [tensor.data_ptr() for tensor in tensors]


@pytest.fixture(params=["python", "c"])
def reader(request, monkeypatch):
    """Runs every test with the twin's read_addresses and with the compiled one of GPUs, which accepts CPU tensors,
    too."""
    if request.param == "c":
        pytest.importorskip("triton")
        from symmoe.kernels.triton import pointers as gpu_pointers

        assert gpu_pointers._readers() is not None
        monkeypatch.setattr(twin, "read_addresses", gpu_pointers.read_addresses)


def test_the_compiled_reader_is_called(monkeypatch):
    pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).t()]
    expected = [tensor.data_ptr() for tensor in tensors]
    monkeypatch.setattr(gpu_pointers.PointerKernels, "read_addresses", lambda *_, **__: None)

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
        (
            [torch.ones(1), torch.ones(1, device="meta")],
            {},
            r"tensors\[1\] is torch.strided on meta",
        ),
        (
            [torch.ones(2, 2).to_sparse()],
            {},
            r"tensors\[0\] is torch.sparse_coo on cpu; it must be strided on cpu",
        ),
        (
            [torch.ones(1), torch.ones(0)],
            {},
            r"tensors\[1\] has a null data pointer \(0\); its shape is \[0\]",
        ),
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


def up(value, multiple):
    return -(-value // multiple) * multiple


SWIZZLES = ("mxfp8_rowwise", "mxfp8_columnwise", "nvfp4")


def compact_scales(swizzle, shape, is_padded):
    """A weight, its compact scales with values from 1 to 249, and (scales [row][block], rows, blocks) for the formula.
    Padding of the scales is 255, and must not be copied."""
    M, K = shape
    block = 16 if swizzle == "nvfp4" else 32
    is_columnwise = swizzle == "mxfp8_columnwise"
    rows, blocks = (K, up(M, block) // block) if is_columnwise else (M, up(K, block) // block)
    compact = torch.full(
        (up(rows, 128), up(blocks, 4)) if is_padded else (rows, blocks), 0xFF, dtype=torch.uint8
    )
    compact[:rows, :blocks] = torch.randint(1, 250, (rows, blocks))
    weight = torch.zeros(M, K // (2 if swizzle == "nvfp4" else 1), dtype=torch.uint8)
    return (
        weight,
        compact.t().contiguous() if is_columnwise else compact,
        (compact.tolist(), rows, blocks),
    )


def assert_swizzled(packed, tables, formulas):
    """Asserts that packed.swizzled has the matrices of these tables one after the other, as the formula swizzles
    them."""
    memory = packed.swizzled.tolist()
    start = packed.swizzled.data_ptr()
    expected, addresses = [], []
    for formula in formulas:
        addresses.append(start + len(expected))
        expected += swizzle_by_formula(*formula)
    assert (torch.cat(tables).tolist(), memory) == (addresses, expected)


@pytest.fixture
def launched(monkeypatch):
    """(name, bytes or matrices) of every launch on a GPU: copies of 4080 bytes, and swizzles."""
    launches = []
    copy, swizzle = twin.copy_host_to_device, twin.swizzle_scales

    def copied(data, destination):
        launches.extend(
            ("copy", min(4080, len(data) - start)) for start in range(0, len(data), 4080)
        )
        copy(data, destination)

    def swizzled(table, row_range, destination):
        launches.append(("swizzle", len(table.sources)))
        swizzle(table, row_range, destination)

    monkeypatch.setattr(twin, "copy_host_to_device", copied)
    monkeypatch.setattr(twin, "swizzle_scales", swizzled)
    return launches


ONE_LAYER = [(64, 32), (64, 160)]
MANY = [(32, 32 * (1 + i % 7)) for i in range(600)]  # more addresses than a launch carries
THREE = [(160, 96), (8, 2048), (160, 96)]
# Shapes of fc1, of fc2, of fc1_scales and of fc2_scales. Scales without weights are taken as a whole.
LISTS = {
    "two layers": ([(160, 96), (70, 300), (160, 96)], [(33, 64), (160, 96)]) * 2,
    "fc1": (ONE_LAYER, [], ONE_LAYER, []),
    "fc2": ([], ONE_LAYER, [], ONE_LAYER),
    "scales of fc1": ([], [], ONE_LAYER, []),
    "scales of fc2": ([], [], [], THREE),
    "scales of both": ([], [], THREE[:1], THREE[1:]),
    "many": (MANY, [], [], MANY),
    "weights alone": (ONE_LAYER, THREE, [], []),
}


@pytest.mark.parametrize(
    ("shapes", "is_padded", "swizzle"),
    [
        (shapes, is_padded, swizzle)
        for shapes, is_padded in [
            (LISTS["two layers"], True),
            *((s, False) for s in LISTS.values()),
        ]
        for swizzle in (None, *SWIZZLES)
        if swizzle is None or any(shapes[2:])
    ],
)
@pytest.mark.usefixtures("reader")
def test_lists_are_packed_in_few_launches(shapes, is_padded, swizzle, launched):
    """With one copy of all data, cut into launches, and one swizzle of all scales."""
    scale_cases = [
        [compact_scales(swizzle or "mxfp8_rowwise", shape, is_padded) for shape in of_list]
        for of_list in shapes
    ]
    weights = [[weight for weight, _, _ in of_list] for of_list in scale_cases[:2]]
    compact = [[scale for _, scale, _ in of_list] for of_list in scale_cases[2:]]
    packed = pack_weight_ptrs(
        *weights, fc1_scales=compact[0] or None, fc2_scales=compact[1] or None, swizzle=swizzle
    )
    for table, of_list in zip((packed.fc1, packed.fc2), weights, strict=True):
        assert table.tolist() == [weight.data_ptr() for weight in of_list]
    tables = [packed.fc1_scales, packed.fc2_scales]
    assert [table is not None for table in tables] == [bool(of_list) for of_list in compact]
    scale_tables = [table for table in tables if table is not None]
    num_weights, num_scales = (sum(map(len, lists)) for lists in (weights, compact))
    num_bytes = 8 * (num_weights + num_scales)
    if swizzle is None:
        addresses = [scale.data_ptr() for of_list in compact for scale in of_list]
        assert [at for table in scale_tables for at in table.tolist()] == addresses
        assert packed.swizzled is None
    else:
        assert_swizzled(
            packed, scale_tables, [formula for case in scale_cases[2:] for *_, formula in case]
        )
        # Where a matrix is and goes, its number, and the extents of each shape of a list.
        num_bytes += 12 * num_scales + 16 * sum(len(set(of_list)) for of_list in shapes[2:])
    copies = [("copy", min(4080, num_bytes - first)) for first in range(0, num_bytes, 4080)]
    assert launched == copies + [("swizzle", num_scales)] * (swizzle is not None)


def scales(num_groups, *shape, dtype=torch.uint8):
    return [torch.ones(shape).to(dtype) for _ in range(num_groups)]


NONE_GIVEN = dict.fromkeys(("fc1_scales", "fc2_scales"))
NVFP4 = {"swizzle": "nvfp4", "fc2_scales": None}
PACKED = r"\(two elements in a byte of data\)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"swizzle": "fp8"},
            r"swizzle \('fp8'\) must be None or one of mxfp8_rowwise, mxfp8_columnwise, nvfp4",
        ),
        (
            NONE_GIVEN,
            r"swizzle is 'mxfp8_rowwise'; fc1_scales or fc2_scales must have tensors, both have 0",
        ),
        (
            {**NONE_GIVEN, "swizzle": None, "fc1": [], "fc2": []},
            r"fc1, fc2, fc1_scales or .* all have 0",
        ),
        ({"fc1_scales": scales(3, 64, 2)}, r"fc1_scales has 3 tensors; fc1 has 2"),
        ({"fc2_scales": []}, r"fc2_scales has 0 tensors; fc2 has 2"),
        ({"fc1": [3, torch.ones(2)]}, r"fc1\[0\] is a int; it must be a tensor"),
        (
            {"fc1_scales": [*scales(1, 64, 2), 3]},
            r"fc1_scales\[1\] is a int; it must be a tensor on cpu",
        ),
        (
            {"fc2_scales": [*scales(1, 64, 2), *scales(1, 64, 1)]},
            r"fc2_scales\[1\] has shape \[64, 1\]; mxfp8_rowwise scales of fc2\[1\] \[64, 64\] need at least \[64, 2\]",
        ),
        (
            {"fc1_scales": scales(2, 2, 63), "swizzle": "mxfp8_columnwise"},
            r"fc1_scales\[0\] has shape \[2, 63\]; mxfp8_columnwise .* need at least \[2, 64\]",
        ),
        (
            {**NVFP4, "fc1_scales": scales(2, 64, 7)},
            rf"fc1_scales\[0\] .*64, 7.* fc1\[0\] \[64, 64\] {PACKED}.*64, 8",
        ),
        (
            {"fc1_scales": [*scales(1, 64, 2), *scales(1, 128)]},
            r"fc1_scales\[1\] .*128.* 2 dims for mxfp8_rowwise$",
        ),
        (
            {**NVFP4, "fc1": weights_of(2, 64), "fc1_scales": scales(2, 64, 8)},
            rf"fc1\[0\] has shape \[64\]; it must have 2 dims for nvfp4 {PACKED}",
        ),
        (
            {"fc1_scales": [*scales(1, 64, 2), *scales(1, 64, 2, dtype=torch.float16)]},
            r"fc1_scales\[1\] has dtype torch.float16 of 2 bytes; mxfp8_rowwise scales have 1 byte",
        ),
        (
            {"fc1_scales": [s.t() for s in scales(2, 2, 64)]},
            r"fc1_scales\[0\] has strides \[1, 64\]; .*contiguous",
        ),
        (
            {"fc1": [torch.ones(64, 64), torch.ones(64, 64).t()]},
            r"fc1\[1\] has strides \[1, 64\]; .*contiguous",
        ),
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
        "swizzle": "mxfp8_rowwise",
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        pack_weight_ptrs(arguments.pop("fc1"), arguments.pop("fc2"), **arguments)


class FakeLaunches:
    """A stand-in for the driver: writes the bytes that copy_bytes would write for the arguments of each launch."""

    HEADER = struct.Struct("<QQ")

    def __init__(self):
        self.sizes, self.results = [], []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
        )
        self._function = kind(self._launch)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _launch(
        self,
        function,
        x,
        y,
        z,
        threads,
        threads_y,
        threads_z,
        shared_bytes,
        stream,
        parameters,
        extra,
    ):
        assert (function, stream) == (7, 8)
        assert (x, y, z, threads, threads_y, threads_z, shared_bytes, extra) == (
            1,
            1,
            1,
            512,
            1,
            1,
            0,
            None,
        )
        if self.results and (result := self.results.pop(0)):
            return result
        memory = ctypes.c_void_p.from_address(parameters).value
        destination, num_bytes = self.HEADER.unpack(ctypes.string_at(memory, self.HEADER.size))
        ctypes.memmove(destination, memory + self.HEADER.size, num_bytes)
        self.sizes.append(num_bytes)
        return 0


@pytest.fixture
def launches(monkeypatch):
    pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    fake = FakeLaunches()
    monkeypatch.setattr(gpu_pointers, "_launch_kernel", lambda: fake.address)
    monkeypatch.setattr(gpu_pointers, "_copy_bytes", lambda device: 7)
    monkeypatch.setattr(gpu_pointers, "current_stream", lambda device: 8)
    monkeypatch.setattr(
        gpu_pointers, "current_device", lambda: -1
    )  # where CPU tensors say they are
    return fake


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 2048, 4079, 4080, 4081, 8160, 10000])
def test_launches_carry_all_bytes(launches, num_bytes):
    from symmoe.kernels.triton import pointers as gpu_pointers

    for buffer in (
        bytes,
        bytearray,
        lambda data: torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)[:num_bytes],
    ):
        launches.sizes.clear()
        source = os.urandom(num_bytes)
        destination = torch.full((num_bytes + 3,), UNTOUCHED, dtype=torch.uint8)
        gpu_pointers.copy_host_to_device(buffer(source), destination)
        assert destination.numpy().tobytes() == source + bytes([UNTOUCHED] * 3)
        full, remainder = divmod(num_bytes, 4080)
        assert launches.sizes == [4080] * full + [remainder] * bool(remainder)


def test_a_failed_launch_raises(launches, monkeypatch):
    from symmoe.kernels.triton import pointers as gpu_pointers

    def check(result, call):
        raise SymmoeError(f"{call} returned {result}")

    contexts = []
    monkeypatch.setattr(gpu_pointers.driver, "check", check)
    monkeypatch.setattr(gpu_pointers.driver, "primary_context", lambda device: 9)
    monkeypatch.setattr(gpu_pointers.driver, "set_context", contexts.append)
    source = os.urandom(5000)
    destination = torch.zeros(5000, dtype=torch.uint8)
    launches.results = [0, 700]
    with pytest.raises(SymmoeError, match="cuLaunchKernel returned 700"):
        gpu_pointers.copy_host_to_device(source, destination)
    assert (launches.sizes, contexts) == ([4080], [])
    launches.results = [201]  # no context yet
    gpu_pointers.copy_host_to_device(source, destination)
    assert (contexts, destination.numpy().tobytes()) == ([9], source)


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "sm_100a"])
def test_the_copy_kernel_assembles(tmp_path, arch):
    triton = pytest.importorskip("triton")
    from symmoe.kernels.triton import pointers as gpu_pointers

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = tools / ("ptxas-blackwell" if arch == "sm_100a" else "ptxas")
    if not ptxas.exists():
        pytest.skip(f"{ptxas} is not there")
    source = tmp_path / "copy.ptx"
    source.write_text(gpu_pointers.COPY_PTX)
    command = [ptxas, "-v", f"-arch={arch}", source, "-o", tmp_path / "copy.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr
    # The payload is read where it is: no copy of it on the stack.
    assert "0 bytes stack frame, 0 bytes spill stores" in report.stderr
    assert (
        gpu_pointers.HEADER_BYTES + gpu_pointers.PAYLOAD_BYTES == gpu_pointers.PARAM_BYTES == 4096
    )
