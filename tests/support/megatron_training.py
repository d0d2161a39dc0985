"""What ranks run for the tests of training: Megatron's DDP, memory, precision, metrics, refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    BATCH,
    ROUNDING,
    SEQUENCE,
    batch_of,
    check_equal,
    config_of,
    differences,
    filled,
    forms_of,
    gradients_of,
    model_of,
    named_parameters,
    note_rows,
    opened_heap,
    reference_spec,
    results_of,
    steered,
    use_groups,
)
from small_model import check_metrics
from worker import without_semaphores

import symmoe
from symmoe.errors import ArgumentError, SymmoeError

PACKAGE = Path(symmoe.__file__).parent
NUM_MICRO_BATCHES = 2
SIGMOID_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
ALL_ON_RANK_0 = {0: 50.0, 1: 50.0, 2: 50.0}  # three experts per token: values of expert biases


def main_grads(
    rank: int, num_ranks: int, *, ep: int, overlap: bool, bias: dict[int, float] | None = None, fault: bool = False
) -> list[list[int]]:
    """Gradients in `main_grad` after Megatron's DDP has reduced them are the same for five models.

    Megatron's experts; ours with gradients in `.grad`; ours whose kernels add to main_grad; and those two once more
    with weight gradients that backward leaves for later. `bias` steers the choice of experts, by number; `fault` scales
    what the kernels add, which has to be seen. Returns the rows of the local experts in every call.
    """
    from symmoe.integrations.megatron import DispatchOptions, use_symmoe

    use_groups(ep=ep)
    fields = {} if bias is None else SIGMOID_BIAS
    config = config_of(**fields)
    found: dict[str, dict[str, torch.Tensor]] = {}
    received: list[list[int]] = []
    with opened_heap() as heap:
        spec = reference_spec(config)
        found["megatron"] = _reduced(_ddp(steered(model_of(config, spec), bias), overlap))
        for fused in (False, True):
            for delayed in (False, True):
                config = config_of(**fields)
                # Its own checks ask for extensions (fused) and schedules (delayed) that CPUs do not have.
                config.delay_wgrad_compute = delayed
                ours = use_symmoe(spec, heap, options=DispatchOptions(order="slot"))
                model = steered(model_of(config, _with_fused_gradients(ours) if fused else ours), bias)
                for layer in model.decoder.layers:
                    note_rows(layer.mlp, received)
                if fault:
                    for layer in model.decoder.layers:
                        _scale_wgrad(layer.mlp.experts.linear_fc1)
                name = ("main_grad" if fused else "grad") + (" later" if delayed else "")
                ddp = _ddp(model, overlap)
                num_in_buckets = sum(len(buffer.params) for buffer in ddp.expert_parallel_buffers)
                assert num_in_buckets == (2 * 2 if ep == 2 else 0)  # layers, linears
                found[name] = _reduced(ddp)
    check_equal(found, fault="of the kernels" if fault else None)
    if not fault:
        assert differences(found["main_grad"], found["grad"]) == {}
        assert differences(found["main_grad later"], found["main_grad"]) == {}
    return received


def _with_fused_gradients(spec: Any) -> Any:
    """The spec with experts whose configuration alone has gradient_accumulation_fusion."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from symmoe.integrations.megatron import SymmExperts

    class FusedExperts(SymmExperts):
        def __init__(self, num_local_experts: int, config: Any, **kwargs: Any) -> None:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = True
            super().__init__(num_local_experts, config, **kwargs)

    mlp = spec.submodules.mlp
    submodules = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
    submodules.experts = FusedExperts
    return spec


def _ddp(model: Any, overlap: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    choice = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        bucket_size=20_000,
        delay_wgrad_compute=model.config.delay_wgrad_compute,
    )
    return DistributedDataParallel(model.config, choice, model)


def _reduced(ddp: Any) -> dict[str, torch.Tensor]:
    """main_grad of every parameter after two micro-batches and the reduction."""
    ddp.zero_grad_buffer()
    for step in range(NUM_MICRO_BATCHES):
        # DDP starts to reduce with overlap once it has seen every gradient of the last micro-batch.
        context = ddp.no_sync() if step < NUM_MICRO_BATCHES - 1 else torch.enable_grad()
        with context:
            (ddp(**batch_of()).mean() / NUM_MICRO_BATCHES).backward()
            if ddp.module.config.delay_wgrad_compute:
                for layer in ddp.module.decoder.layers:
                    layer.mlp.backward_dw()
    ddp.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in named_parameters(ddp)}


def _scale_wgrad(linear: Any) -> None:
    gradient_target = linear.gradient_target

    def scaled(*args: Any, **kwargs: Any) -> Any:
        target = gradient_target(*args, **kwargs)
        add = target.add

        def add_more(weights: Any, compute: Any) -> Any:
            def compute_more(out: Any, accumulate: bool) -> None:
                compute(out, accumulate)
                compute(out, True)

            return add(weights, compute_more)

        target.add = add_more
        return target

    linear.gradient_target = scaled


def memory(rank: int, num_ranks: int, *, fields: dict[str, Any], keeps_rows: bool) -> None:
    """A step leaves nothing on the heap; until backward, rows lie there if they are not computed again."""
    from symmoe.integrations.megatron import use_symmoe

    use_groups(ep=2)
    config = config_of(**fields)
    with opened_heap() as heap:
        spec = use_symmoe(reference_spec(config), heap)
        model = model_of(config, spec)
        assert heap.leased_bytes == 0
        with torch.no_grad():
            model(**batch_of())
        assert heap.leased_bytes == 0
        losses = model(**batch_of())
        assert (heap.leased_bytes > 0) == keeps_rows
        losses.mean().backward()
        del losses
        assert heap.leased_bytes == 0


def smallest_heap(rank: int, num_ranks: int, *, fields: dict[str, Any]) -> None:
    """A heap of the planned size is enough for three steps, with all tokens on rank 0 and with ordinary routing, and is
    not wasteful if the routing is as uneven as can be."""
    from symmoe.integrations.megatron import heap_bytes, open_heap, use_symmoe

    use_groups(ep=2)
    config = config_of(**fields)
    num_layers = 1 if config.recompute_granularity else config.num_layers
    used = []
    for values in ({}, ALL_ON_RANK_0):
        num_bytes = heap_bytes(config, num_tokens=24, num_layers=num_layers)
        with open_heap(num_bytes) as heap:
            model = steered(model_of(config, use_symmoe(reference_spec(config), heap)), values)
            for _ in range(3):
                model(**batch_of()).mean().backward()
            used.append(heap.high_water_bytes / num_bytes)
    assert all(0.1 < share < 1 for share in used), used
    assert max(used) > 0.4


def watched(rank: int, num_ranks: int, *, fields: dict[str, Any], form: str) -> None:
    """Records of our layers beside the routing maps of Megatron's own model's routers, on the same tokens."""
    use_groups(ep=2)
    config = config_of(**fields)
    maps: list[torch.Tensor] = []
    spec = reference_spec(config)
    megatrons = model_of(config, spec)
    for layer in megatrons.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda module, args, output: maps.append(output[1].clone()))
    with torch.no_grad():
        megatrons(**batch_of())
    experts = torch.arange(8)
    expected = {}
    for number, routing_map in enumerate(maps):
        remote = routing_map[:, experts // 4 != rank]
        numbers = torch.where(routing_map, experts, -1)
        row_bytes = config.hidden_size * 4
        counts = int(remote.any(1).sum()) * row_bytes, int(remote.sum()) * row_bytes
        expected[f"decoder.layers.{number}.mlp"] = numbers, *counts
    with opened_heap() as heap:
        model = model_of(config, forms_of(spec, heap)[form])
        routing = check_metrics(model, expected, lambda: model(**batch_of()).mean())
        for ids, routing_map in zip(routing.values(), maps, strict=True):
            assert torch.equal((ids[:, :, None] == experts).any(1), routing_map)
        text = r"layer 'decoder.layers.0.mlp' \(SymmMoELayer\) must be a MoELayer.*moe_router_force_load_balancing"
        for context in (symmoe.replay_routing(model, routing), symmoe.balanced_routing(model)):
            with pytest.raises(ArgumentError, match=text), context:
                pass


def compiled(rank: int, num_ranks: int, *, form: str) -> None:
    """A layer in torch.compile, which leaves the trips alone, equals the same layer without it."""
    without_semaphores()
    use_groups(ep=2)
    config = config_of()
    with opened_heap() as heap:
        layer = filled(forms_of(reference_spec(config), heap)[form].submodules.mlp(config=config))
        layer.set_layer_number(1)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(SEQUENCE, BATCH, config.hidden_size, generator=generator, requires_grad=True)

        def results(module: Any) -> dict[str, torch.Tensor]:
            x.grad = None
            layer.zero_grad()
            y, _ = module(x)
            y.square().sum().backward()
            return {"y": y.detach(), "x": x.grad.clone(), **gradients_of(layer)}

        expected = results(layer)
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
        try:
            found = results(torch.compile(layer, backend="aot_eager"))
            torch._dynamo.reset()
            breaks = torch._dynamo.explain(layer)(x).break_reasons
        finally:
            torch._dynamo.reset()
            torch.compiler.set_stance("force_eager")
        damaged = {name: tensor * 1.01 for name, tensor in expected.items()}
    assert max(differences(found, expected).values(), default=0.0) < ROUNDING
    assert min(differences(found, damaged).values()) > 100 * ROUNDING
    left_alone = set()
    for each in breaks:
        match = re.search(r"Skip inlining function <function (\S+) at", str(each.reason))
        left_alone |= {match[1]} if match else set()
        assert match or not any(Path(frame.filename).is_relative_to(PACKAGE) for frame in each.user_stack[-1:]), each
    trips = {"FusedTokenDispatcher.compute", "SymmTokenDispatcher.token_dispatch", "SymmTokenDispatcher.token_combine"}
    assert set() < left_alone <= {*trips, "SymmExperts.forward"}


def half_precision(rank: int, num_ranks: int) -> None:
    """Of all gradients in bf16, the root mean square error against fp32 is as small as that of Megatron's layer."""
    from megatron.core.transformer.module import Float16Module

    from symmoe.integrations.megatron import use_symmoe

    use_groups(ep=2)
    with opened_heap() as heap:
        exact = results_of(model_of(config_of(), reference_spec(config_of())))
        config = config_of(bf16=True, params_dtype=torch.bfloat16)
        spec = reference_spec(config)
        errors = {}
        for form, form_spec in {"megatron": spec, "symmoe": use_symmoe(spec, heap)}.items():
            model = Float16Module(config, model_of(config, form_spec))
            model(**batch_of()).mean().backward()
            squares = [
                float(((parameter.grad - exact[name]).square().sum() / exact[name].square().sum()).sqrt())
                for name, parameter in named_parameters(model)
            ]
            errors[form] = sum(squares) / len(squares)
    assert 0 < errors["symmoe"] < 1.2 * errors["megatron"]


def initial_experts(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """First weights of a new layer's experts, made with Megatron's generators, and their attributes."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from symmoe.integrations.megatron import SymmExperts

    use_groups(ep=2)
    model_parallel_cuda_manual_seed(5)
    config = config_of(use_cpu_initialization=False)
    experts = SymmExperts(4, config)
    experts.load_state_dict({name: value.clone() for name, value in experts.state_dict().items()}, assign=True)
    copied = copy.deepcopy(experts.linear_fc1).to("meta").to_empty(device="cpu")
    for weight in (*experts.parameters(), copied.weight):
        assert weight.allreduce is False
        assert weight.tensor_model_parallel is True
    use_groups(ep=1)
    assert all(weight.allreduce is True for weight in SymmExperts(8, config_of()).parameters())
    return list(experts.linear_fc1.weight.detach().clone())


def other_state(rank: int, num_ranks: int) -> None:
    """A plain state dict of TEGroupedMLP loads into every weight; a flattened one is refused."""
    from symmoe.integrations.megatron import SymmExperts

    use_groups(ep=2)
    experts = SymmExperts(4, config_of())
    linears = (("linear_fc1", experts.linear_fc1), ("linear_fc2", experts.linear_fc2))
    state = {f"{name}.weight{i}": torch.randn(linear.weight.shape[1:]) for name, linear in linears for i in range(4)}
    experts.load_state_dict(dict(state), strict=True)
    for name, linear in linears:
        for i in range(4):
            assert torch.equal(linear.weight[i], state[f"{name}.weight{i}"])
    factory = experts.sharded_state_dict("mlp.experts.")["mlp.experts.linear_fc2.weight"]
    with pytest.raises(ArgumentError, match=r"flattened part slice\(0, 8"):
        factory.build_fn("key", factory.data.flatten()[:8], factory.replica_id, slice(0, 8))


def refused(rank: int, num_ranks: int, *, what: str, error: type[SymmoeError], text: str) -> None:
    """Of building a layer that cannot be; the error must come on every rank."""
    from megatron.core import parallel_state

    from symmoe.integrations.megatron import DispatchOptions, open_heap, use_symmoe, use_symmoe_dispatcher

    use_groups(ep=2)
    num_bytes, use, options = {
        "capacity with others' experts": (1 << 20, use_symmoe_dispatcher, {"capacity": 64}),
        "too small a capacity": (1 << 20, use_symmoe, {"capacity": 8}),
        "too small a heap": (24 << 10, use_symmoe, {}),
    }.get(what, (1 << 20, use_symmoe, {}))
    if what == "expert tensor parallelism":
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, expert_model_parallel_size=1, expert_tensor_parallel_size=2
        )
    with pytest.raises(error, match=re.escape(text)), open_heap(num_bytes) as heap:  # noqa: PT012 - one of several
        if what == "another group's heap":
            use_groups(ep=1)
        # With tensor parallelism the field would be refused first: it and the groups are of different commands.
        config = config_of(num_layers=1, sequence_parallel=False)
        spec = use(reference_spec(config), heap, options=DispatchOptions(**options))
        model_of(config, spec)(**batch_of())
