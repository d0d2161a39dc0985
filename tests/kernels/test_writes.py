"""The contract declares the arguments that every kernel writes: the twins write these, and no other ones."""

import inspect
from itertools import product
from typing import Any

import torch
from program_cases import make_calls, make_layer, step
from worker import open_heap
from written_arguments import WRITTEN, Writes

import symmoe
from symmoe import kernels
from symmoe.kernels import Kernels
from symmoe.precision import MXFP8, NVFP4, Float8Block, unswizzle_scales

CPU = torch.device("cpu")
NEVER_CHANGED = {
    **dict.fromkeys(
        (
            "barrier.nan_on_failure",
            "barrier.status",
            "lay_out.status",
            "wait_for_signal.peers",
            "wait_for_signal.status",
            "wait_for_signal.nan_on_failure",
            "receive_fault_flags.fault",
        ),
        "no call fails",
    ),
    "dact_quantize.workspace": "twins need none",
}
LARGE = {"hidden": 256, "ffn": 128, "dtype": torch.bfloat16}
LAYERS: list[tuple[int | None, dict[str, Any]]] = [  # ranks of a node, and options
    (None, {}),
    (None, {"layout": "expert-major", "schedule": "always-overlapped", "stash": "none"}),
    (None, {"order": "slot", "bias": True, "overwrites": (False, False)}),
    (None, {"balance": "replicas", "replica_slack": 0.0, "aux_loss_coef": 0.1}),
    (None, {"z_loss_coef": 0.1}),
    (None, {"capacity": 300, "max_tokens": 200, "overflow": "drop"}),
    (None, {"precision": Float8Block(), "quantized_wire": "both", **LARGE}),
    (None, {"precision": Float8Block(), "quantized_wire": "both", "bias": True, **LARGE}),
    (1, {}),
    (1, {"capacity": 600, "max_tokens": 200, "overflow": "drop", "rail_capacity": 90}),
]


def test_every_kernel_declares_the_parameters_that_it_writes():
    methods = dict(inspect.getmembers(Kernels, inspect.isfunction))
    assert WRITTEN.keys() == {name for name in methods if name[0] != "_"}
    for name, written in WRITTEN.items():
        assert {part.split(".")[0] for part in written} <= {
            *inspect.signature(methods[name]).parameters
        }


def writes_of_layers(rank: int, num_ranks: int) -> tuple[set[str], set[str], set[str]]:
    spy = Writes(is_alone=num_ranks == 1)
    for ranks_per_node, options in LAYERS if num_ranks > 1 else LAYERS[:3]:
        num_bytes = (4 if options.get("dtype") else 1) << 20  # of which the spy looks at every one
        with open_heap("cpu", num_bytes=num_bytes, ranks_per_node=ranks_per_node) as heap:
            layer = make_layer(heap, **options)
            dtype, hidden = options.get("dtype", torch.float32), options.get("hidden", 16)
            ((x, dy),) = make_calls(rank, 1, dtype, hidden=hidden)
            with kernels.hooked(CPU, spy):
                step(layer, x, dy, "")
    return spy.launched, spy.changed, spy.undeclared


def writes_of_modules() -> tuple[set[str], set[str], set[str]]:
    spy = Writes(is_alone=True)
    x = torch.randn(60, 256)
    splits = torch.tensor([20, 0, 31])
    scale = torch.rand(60)
    with kernels.hooked(CPU, spy):
        for recipe, bias in product((None, Float8Block(), MXFP8(), NVFP4()), (False, True)):
            options = {"bias": bias, "weights": "discrete" if bias else "packed"}
            layer = symmoe.GroupedMLP(3, 256, 128, precision=recipe, **options)
            for dtype in (torch.float32, torch.bfloat16):
                inputs = (
                    x.to(dtype, copy=True).requires_grad_(),
                    splits,
                    scale.clone().requires_grad_(),
                )
                layer.to(dtype)(*inputs).sum().backward()
        with torch.no_grad():
            symmoe.GroupedMLP(3, 256, 128, precision=Float8Block())(x, splits, scale)
        symmoe.pointers.copy_data_ptrs_to_device([x, scale], CPU)
        symmoe.pointers.copy_host_to_device(b"abcd", torch.zeros(1))
        unswizzle_scales(
            torch.ones(2, 1, 512).byte(), torch.tensor([0, 20, 51]).int(), num_rows=60, num_blocks=4
        )
        with symmoe.SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
            symmoe.make_plan(torch.tensor([[0, 1]]), num_experts=2, heap=heap)
        kernels.for_device(CPU).count_exchange(*torch.zeros(2, 2, dtype=torch.int64), which=1)
    return spy.launched, spy.changed, spy.undeclared


def test_kernels_write_the_declared_parameters_only(cluster):
    ranks = [result for size in (1, 2) for result in cluster(size).run(writes_of_layers)]
    sets = zip(writes_of_modules(), *ranks, strict=True)
    called, changed, undeclared = (set.union(*part_sets) for part_sets in sets)
    declared = {f"{name}.{result}" for name, written in WRITTEN.items() for result in written}
    assert (WRITTEN.keys() - called, undeclared) == (set(), set())
    assert declared - changed <= NEVER_CHANGED.keys()


def test_a_write_that_is_not_declared_is_found():
    """Negative control."""
    spy = Writes(is_alone=True)
    x = torch.ones(3, 2)
    spy("router_gemm", lambda x, weight, logits: x.fill_(2), x, torch.ones(4, 2), torch.zeros(3, 4))
    assert (spy.changed, spy.undeclared) == (set(), {"router_gemm.x"})
