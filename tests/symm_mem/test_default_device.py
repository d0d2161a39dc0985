"""Nothing depends on torch's default device, which a user may have set for the process or in a context."""

import ast
import re
from pathlib import Path

import pytest
import torch
from heap_calls import outcome, round_trip
from layers import layer_config

import symmoe
from symmoe.precision import NVFP4, Float8Block, draw_signs

PACKAGE = Path(symmoe.__file__).resolve().parent
CONSTRUCTORS = {
    *(
        "arange",
        "as_tensor",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
    ),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}
MAKES_TENSORS = re.compile(rf"torch\.({'|'.join(CONSTRUCTORS)})\(")
# Commands in a separate process, which has no other default device.
OWN_PROCESS = ("tools", "timeline")


def calls_without_device(source: str) -> list[str]:
    """Calls of a module that make tensors on the default device."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if (
            is_torch
            and node.func.attr in CONSTRUCTORS
            and not {"device", None} & {k.arg for k in node.keywords}
        ):
            results.append(f"{node.lineno}: {ast.unparse(node)}")
    return results


def test_every_tensor_names_its_device():
    assert calls_without_device("import torch\ntorch.zeros(3)\ntorch.ones(3, device='cpu')") == [
        "2: torch.zeros(3)"
    ]
    actual = {
        str(path.relative_to(PACKAGE)): calls
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in OWN_PROCESS
        and MAKES_TENSORS.search(text := path.read_text())
        and (calls := calls_without_device(text))
    }
    assert actual == {}


FEATURES = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "expert_bias": True, "aux_loss": "global"}
OPTIONS = (
    {"schedule": "serial"},
    {"schedule": "overlapped", "capacity": 64, "max_tokens": 8, "stash": "none"},
    {"precision": Float8Block(), "quantized_wire": "both", "ffn": 32},
    {"precision": NVFP4(hadamard_signs=5), "hidden": 64, "ffn": 32},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_under_another_default_device(options: dict):
    """Heap, layer and calls with torch.device("meta") as default: bits, errors and counts as without."""

    def step(
        layer: symmoe.MoELayer, heap: symmoe.SymmetricHeap, x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y, metrics = layer(x, torch.ones(len(x), dtype=torch.bool, device="cpu"))
        (y.square().sum() + metrics.aux_loss).backward()
        plan = symmoe.make_plan(metrics.topk_idx, num_experts=4, heap=heap)
        rows, probs, handle = symmoe.dispatch_tokens(
            x.detach(), plan, probs=x.new_ones(metrics.topk_idx.shape)
        )
        combined = symmoe.combine_tokens(rows * probs[:, None], handle)
        return y, x.grad, *(p.grad for p in layer.parameters()), metrics.expert_load, combined

    torch.manual_seed(0)
    config = layer_config(
        **{"hidden": 16, "ffn": 8, "num_experts": 4, "top_k": 2, **FEATURES, **options}
    )
    x = torch.randn(7, config.hidden)
    ids = torch.zeros(8, 1, dtype=torch.int64)
    with symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap:
        layer = symmoe.MoELayer(config, heap)
        want = step(layer, heap, x)
    state = layer.state_dict()
    with torch.device("meta"):
        heap = symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host")
        with torch.device("cpu"):
            layer = symmoe.MoELayer(config, heap)
            layer.load_state_dict(state)
        got = step(layer, heap, x)
        assert {tensor.device.type for tensor in (heap.status, heap.peers.bases, *got)} == {"cpu"}
        assert 0 <= draw_signs() < 1 << 16
        assert (
            outcome(symmoe.make_plan, ids, num_experts=1, heap=heap, capacity=4)[0]
            == "CapacityError"
        )
        heap.close()
    assert all(map(torch.equal, got, want))
    with symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap:
        assert round_trip(heap)
