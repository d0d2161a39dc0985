"""Pointer loading on a GPU: every byte, graphs, streams, devices and threads."""

import os
import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from graphs import captured as in_a_graph

from symmoe.errors import ArgumentError
from symmoe.pointers import copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs

UNTOUCHED = 0x5A


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7, 8])
@pytest.mark.parametrize(
    "num_bytes", [0, 1, 3, 7, 8, 9, 63, 2048, 4079, 4080, 4081, 8160, 8163, 10000]
)
def test_every_byte_arrives_and_no_other(num_bytes, offset):
    """The host's bytes are overwritten at once, before the GPU can have run."""
    destination = torch.full((num_bytes + offset + 9,), UNTOUCHED, dtype=torch.uint8, device="cuda")
    data = os.urandom(num_bytes)
    source = bytearray(data)
    torch.cuda._sleep(10**6)
    copy_host_to_device(source, destination[offset:])
    source[:] = bytes(num_bytes)
    expected = bytes([UNTOUCHED] * offset) + data + bytes([UNTOUCHED] * 9)
    assert destination.cpu().numpy().tobytes() == expected


@pytest.mark.parametrize("num_tensors", [1, 64, 65, 256, 511, 2000])
def test_addresses_of_any_number_of_tensors(num_tensors):
    tensors = [torch.ones(8, device="cuda") for _ in range(num_tensors)]
    for _ in range(2):
        assert copy_data_ptrs_to_device(tensors, "cuda").tolist() == [t.data_ptr() for t in tensors]
    tensors[-1] = torch.ones(8)
    with pytest.raises(
        ArgumentError, match=rf"tensors\[{num_tensors - 1}\] is torch.strided on cpu; .* on cuda:0"
    ):
        copy_data_ptrs_to_device(tensors, "cuda")


def test_a_graph_holds_the_bytes():
    destination = torch.zeros(10000, dtype=torch.uint8, device="cuda")
    data = os.urandom(10000)
    source = bytearray(data)
    tensors = [torch.ones(8, device="cuda") for _ in range(70)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_host_to_device(source, destination)
        loaded = copy_data_ptrs_to_device(tensors, "cuda")
    source[:] = bytes(10000)
    for _ in range(3):
        destination.zero_()
        loaded.zero_()
        graph.replay()
        assert destination.cpu().numpy().tobytes() == data
        assert loaded.tolist() == [t.data_ptr() for t in tensors]


def test_the_first_launch_may_be_in_a_capture():
    pytest.importorskip("symmoe.kernels.triton.pointers")._copy_bytes.cache_clear()
    destination = torch.zeros(8, dtype=torch.uint8, device="cuda")
    graph, _ = in_a_graph(lambda: copy_host_to_device(bytes(range(8)), destination), num_warm_ups=0)
    graph.replay()
    assert destination.tolist() == list(range(8))


def test_the_current_stream_is_used():
    """The copy waits for what its stream does before."""
    destination = torch.zeros(16, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * 10**7)
        destination.fill_(9)
        copy_host_to_device(bytes(16), destination)
    stream.synchronize()
    assert not destination.any()


def test_threads_that_have_not_used_the_gpu():
    destinations = torch.zeros(8, 4000, dtype=torch.uint8, device="cuda")
    errors = []

    def work(row):
        try:
            for value in range(200):
                copy_host_to_device(bytes([value]) * 4000, destinations[row])
            copy_host_to_device(bytes([row + 1]) * 4000, destinations[row])
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = torch.arange(1, 9, dtype=torch.uint8)[:, None].expand(8, 4000)
    assert torch.equal(destinations.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_destination_is_used():
    tensors = [torch.ones(8, device="cuda:1") for _ in range(70)]
    assert torch.cuda.current_device() == 0
    assert copy_data_ptrs_to_device(tensors, "cuda:1").tolist() == [t.data_ptr() for t in tensors]
    with pytest.raises(
        ArgumentError,
        match=r"tensors\[0\] is torch.strided on cuda:1; it must be strided on cuda:0",
    ):
        copy_data_ptrs_to_device(tensors, "cuda:0")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("swizzle", ["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"])
def test_scales_are_swizzled_as_by_the_twin(swizzle, captured):
    """Shapes that differ within a list; more bytes than a launch carries; memory that held something else."""
    block, num_groups = (16 if swizzle == "nvfp4" else 32), 70
    data, scales = [], []
    for shapes in (((160, 96), (1, 32), (300, 7168)), ((70, 320),)):
        data.append([])
        scales.append([])
        for i in range(num_groups):
            M, K = shapes[i % len(shapes)]
            scale_shape = (
                (-(-M // block), K) if swizzle == "mxfp8_columnwise" else (M, -(-K // block))
            )
            data[-1].append(torch.zeros(M, K // 2 if swizzle == "nvfp4" else K, dtype=torch.uint8))
            scales[-1].append(torch.randint(0, 256, scale_shape, dtype=torch.uint8))

    def pack(device, **lists):
        lists = {name: [t.to(device) for t in ts] for name, ts in lists.items()}
        if device == "cuda" and captured:
            graph, packed = in_a_graph(lambda: pack_weight_ptrs(**lists, swizzle=swizzle))
            packed.swizzled.fill_(UNTOUCHED)
            graph.replay()
        else:
            torch.full((1 << 22,), UNTOUCHED, dtype=torch.uint8, device=device)
            packed = pack_weight_ptrs(**lists, swizzle=swizzle)
        starts = [
            s - packed.swizzled.data_ptr()
            for s in (packed.fc1_scales, packed.fc2_scales)
            if s is not None
        ]
        assert packed.fc2.tolist() == [t.data_ptr() for t in lists.get("fc2", ())]
        return packed.swizzled.cpu(), torch.cat(starts).cpu()

    both = {"fc1": data[0], "fc2": data[1], "fc1_scales": scales[0], "fc2_scales": scales[1]}
    for lists in (both, {"fc1_scales": scales[0]}):
        for got, expected in zip(pack("cuda", **lists), pack("cpu", **lists), strict=True):
            assert torch.equal(got, expected)
