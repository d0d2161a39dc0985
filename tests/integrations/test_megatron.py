"""Megatron-Core's GPTModel with symmoe's layer against the same model with Megatron's alltoall layer, on CPUs over
gloo.

With Megatron's experts all losses, gradients and router counts have the same bits. With SymmExperts they are equal
within fp32 rounding: SymmExperts compute the sigmoid as 1 / (1 + exp(-x)) and have an explicit derivative, where
Megatron has torch's silu and its gradient; the largest difference of a tensor stays below ROUNDING of its largest
value."""

import copy
import itertools
import multiprocessing as mp
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("psutil", reason="megatron's checkpoint writer hangs without it")

import low_precision_oracle as oracle
import megatron_cases as cases
import megatron_shim
import small_model as small
import torch
from cluster import run_on
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec

import symmoe
from symmoe.integrations import megatron
from symmoe.symm_mem.memory import ALIGNMENT_BYTES
from symmoe.symm_mem.row_budget import with_margin

PACKAGE = Path(symmoe.__file__).parent
NUM_ACCUMULATED = 2
SIGMOID_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
ALL_ON_RANK_0 = {0: 50.0, 1: 50.0, 2: 50.0}  # three experts per token: values of expert biases


def main_grads(
    rank: int,
    num_ranks: int,
    *,
    ep: int,
    overlap: bool,
    bias: dict[int, float] | None = None,
    **fields,
) -> list[list[int]]:
    """Checks that gradients in `main_grad`, after Megatron's DDP has reduced them, are the same for five models.

    The models have Megatron's experts; SymmExperts with gradients in `.grad`; SymmExperts whose kernels add to
    main_grad; and the latter two again with delayed weight gradients. `bias` steers the choice of experts, by number.
    Returns the rows of the local experts in every call."""
    fields = fields if bias is None else SIGMOID_BIAS
    by_case: dict[str, dict[str, torch.Tensor]] = {}
    received: list[list[int]] = []
    with cases.opened(ep=ep, fields=fields) as (config, heap, forms):
        spec = forms["megatron"]
        by_case["megatron"] = _reduced(
            _ddp(cases.steered(cases.model_of(config, spec), bias), overlap)
        )
        for fused in (False, True):
            for delayed in (False, True):
                config = cases.config_of(**fields, delay_wgrad_compute=delayed)
                symm_experts = cases.forms_of(spec, heap)["experts"]
                model = cases.steered(
                    cases.model_of(
                        config, _with_fused_gradients(symm_experts) if fused else symm_experts
                    ),
                    bias,
                )
                cases.note_rows(model, received)
                name = ("main_grad" if fused else "grad") + (" later" if delayed else "")
                ddp = _ddp(model, overlap)
                num_in_buckets = sum(len(buffer.params) for buffer in ddp.expert_parallel_buffers)
                assert num_in_buckets == (2 * 2 if ep == 2 else 0)  # layers, linears
                by_case[name] = _reduced(ddp)
    if "fp8" not in fields:  # which Megatron's own experts cannot do on CPUs
        cases.check_equal(by_case)
    assert cases.differences(by_case["main_grad"], by_case["grad"]) == {}
    assert cases.differences(by_case["main_grad later"], by_case["main_grad"]) == {}
    return received


def _with_fused_gradients(spec):
    """The spec with gradient_accumulation_fusion in the configuration of its experts only."""

    class FusedExperts(megatron.SymmExperts):
        def __init__(self, num_local_experts: int, config, **kwargs) -> None:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = True
            super().__init__(num_local_experts, config, **kwargs)

    mlp = spec.submodules.mlp
    submodules = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
    submodules.experts = FusedExperts
    return spec


def _ddp(model, overlap: bool):
    choice = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        bucket_size=20_000,
        delay_wgrad_compute=model.config.delay_wgrad_compute,
    )
    return DistributedDataParallel(model.config, choice, model)


def _reduced(ddp) -> dict[str, torch.Tensor]:
    """main_grad of every parameter after two micro-batches and the reduction."""
    ddp.zero_grad_buffer()
    for step in range(NUM_ACCUMULATED):
        # DDP starts to reduce with overlap once it has seen every gradient of the last micro-batch.
        context = ddp.no_sync() if step < NUM_ACCUMULATED - 1 else torch.enable_grad()
        with context:
            (ddp(**cases.batch_of()).mean() / NUM_ACCUMULATED).backward()
            if ddp.module.config.delay_wgrad_compute:
                for layer in ddp.module.decoder.layers:
                    layer.mlp.backward_dw()
    ddp.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in cases.named_parameters(ddp)}


def initial_experts(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Initial weights of a new layer's experts, by Megatron's generators, and the weights' attributes."""
    cases.use_groups(ep=2)
    model_parallel_cuda_manual_seed(5)
    experts = megatron.SymmExperts(4, cases.config_of(use_cpu_initialization=False))
    experts.load_state_dict(
        {name: value.clone() for name, value in experts.state_dict().items()}, assign=True
    )
    copied = copy.deepcopy(experts.linear_fc1).to("meta").to_empty(device="cpu")
    for weight in (*experts.parameters(), copied.weight):
        assert weight.allreduce is False
        assert weight.tensor_model_parallel is True
    cases.use_groups(ep=1)
    assert all(
        weight.allreduce is True
        for weight in megatron.SymmExperts(8, cases.config_of()).parameters()
    )
    return list(experts.linear_fc1.weight.detach().clone())


# -- pipeline --------------------------------------------------------------------------------------------------------


NUM_MICRO_BATCHES = 4
NUM_CHUNKS = 2


def _pipeline(num_stages: int, num_chunks: int | None, layers_per_chunk: int = 2) -> dict:
    """Fields of the configuration for a pipeline."""
    return {
        "num_layers": num_stages * (num_chunks or 1) * layers_per_chunk,
        "pipeline_model_parallel_size": num_stages,
        "virtual_pipeline_model_parallel_size": num_chunks,
        "pipeline_dtype": torch.float32,
        "deallocate_pipeline_outputs": num_stages > 1,
    }


def _chunks(config, spec, stage: int, num_stages: int) -> list:
    """The chunks of a GPTModel on a stage; parameters have values that depend only on their names."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    chunks = torch.nn.ModuleList(
        GPTModel(
            config,
            spec,
            cases.VOCABULARY,
            cases.SEQUENCE,
            pre_process=stage == number == 0,
            post_process=stage == num_stages - 1 and number == (num_chunks or 1) - 1,
            vp_stage=None if num_chunks is None else number,
        )
        for number in range(num_chunks or 1)
    )
    return list(cases.filled(chunks))


def _forward_step(steps: Iterator[int], model) -> tuple[torch.Tensor, object]:
    losses = model(**_changed_batch(next(steps)))
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().clone()})


def _run_stage(config, chunks: list, stage: int, num_stages: int) -> None:
    """Runs Megatron's interleaved schedule on one stage without neighbour stages."""

    class NoNeighbours(P2PCommunicator):
        """Receives random numbers, and drops sent tensors."""

        def __init__(self) -> None:
            self.config = config
            self.virtual_pipeline_model_parallel_size = NUM_CHUNKS
            self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: num_stages)

        def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape, **kwargs):
            received = (
                torch.randn(tensor_shape, requires_grad=True) if receives else None
                for receives in (recv_prev, recv_next)
            )
            return (*received, None)

    groups = get_default_pg_collection()
    groups.embd = groups.pos_embd = None
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with megatron_shim.CudaIsCpu():
        forward_backward_pipelining_with_interleaving(
            **_micro_batches_of(chunks), p2p_communicator=NoNeighbours(), pg_collection=groups
        )


def _scheduled(chunks: list, step=_forward_step) -> dict[str, torch.Tensor]:
    """Gradients and, on the last stage, losses of a step by Megatron's schedule for these groups."""
    model = torch.nn.ModuleList(chunks)
    model.zero_grad()
    with megatron_shim.CudaIsCpu():
        reports = get_forward_backward_func()(**_micro_batches_of(chunks, step), forward_only=False)
    gradients = {name: parameter.grad for name, parameter in cases.named_parameters(model)}
    return gradients | {f"losses {i}": report["loss"] for i, report in enumerate(reports)}


def _micro_batches_of(chunks: list, step=_forward_step) -> dict:
    """Arguments of Megatron's schedules: the model chunks, the batches and their sizes."""
    return {
        "forward_step_func": step,
        "data_iterator": [iter(range(NUM_MICRO_BATCHES)) for _ in chunks],
        "model": chunks,
        "num_microbatches": NUM_MICRO_BATCHES,
        "seq_length": cases.SEQUENCE,
        "micro_batch_size": cases.BATCH,
    }


def _changed_batch(step: int) -> dict[str, torch.Tensor]:
    batch = cases.batch_of()
    for name in ("input_ids", "labels"):
        batch[name] = (batch[name] * (2 * step + 3) + step) % cases.VOCABULARY
    return batch


# -- checkpoints -----------------------------------------------------------------------------------------------------


MOMENT = 3.0  # exp_avg of the saved optimizer is this times the parameter


def save(
    rank: int, num_ranks: int, *, path: str, ep: int, form: str, per_expert_keys: bool
) -> None:
    """Saves a model and its Adam with Megatron's distributed checkpoint."""
    # Megatron writes from processes of its own, which daemons may not have.
    mp.current_process()._config["daemon"] = False
    with cases.opened(ep=ep) as (config, _, forms):
        model = cases.model_of(config, forms[form])
        for parameter in model.parameters():
            parameter.data += 1
        moments = [MOMENT * parameter.detach() for parameter in model.parameters()]
        state = _state(model, per_expert_keys, moments)
        try:
            dist_checkpointing.save(
                state, path, content_metadata={"singleton_local_shards": per_expert_keys}
            )
        finally:
            _end_writers()


def load(rank: int, num_ranks: int, *, path: str, ep: int, form: str, per_expert_keys: bool) -> int:
    """Loads the checkpoint into a model of another layout or kind, and checks all values. Returns the number of
    experts' weights.

    The expected values follow from names only, as those of the saved model do: the checkpoint is not its own oracle."""
    with cases.opened(ep=ep) as (config, _, forms):
        model = cases.model_of(config, forms[form])
        want = {name: param.detach() + 1 for name, param in cases.named_parameters(model)}
        state = _state(model, per_expert_keys, list(map(torch.zeros_like, model.parameters())))
        loaded = dist_checkpointing.load(state, path)
        model.load_state_dict(loaded["model"], strict=True)
        moments = dict(
            part
            for i, (name, _) in enumerate(model.named_parameters())
            for part in cases.named_parts(name, loaded["optimizer"]["state"][i]["exp_avg"])
        )
        assert cases.differences(dict(cases.named_parameters(model)), want) == {}
        assert (
            cases.differences(moments, {name: MOMENT * param for name, param in want.items()}) == {}
        )
        return sum(".mlp.experts." in name for name in want)


def _end_writers() -> None:
    """Ends the process of the queue that Megatron's writers share. That process would outlive this one, which exits
    without cleanup."""
    filesystem_async._results_queue = None  # the next save makes another
    for child in mp.active_children():
        child.terminate()
        child.join()


def _state(model, per_expert_keys: bool, moments: list[torch.Tensor]) -> dict:
    """Sharded state of the model and of an Adam over its parameters, by Megatron's own functions for optimizers."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": per_expert_keys, "dp_cp_group": group}
    sharded = model.sharded_state_dict(metadata=metadata)
    parameters = list(model.parameters())
    by_id = get_param_id_to_sharded_param_map(sharded, parameters)
    assert len(by_id) == len(parameters), "an optimizer finds the sharded tensor of every parameter"
    state = {i: {"exp_avg": moment} for i, moment in enumerate(moments)}
    optimizer = {"state": state, "param_groups": [{"params": list(range(len(parameters)))}]}
    optim_state_to_sharding_state(optimizer, by_id)
    return {"model": sharded, "optimizer": optimizer}


# -- the distributed optimizer ---------------------------------------------------------------------------------------


def _trained(config, spec, distributed: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after three steps of Adam in Megatron's DDP, and the number of optimizer state elements on this
    rank."""
    choice = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    model = DistributedDataParallel(config, choice, cases.model_of(config, spec))
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        clip_grad=0.5,
        use_distributed_optimizer=distributed,
        params_dtype=config.params_dtype,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(**cases.batch_of()).mean().backward()
        finalize_model_grads([model])
        is_done, norm, _ = optimizer.step()
        assert is_done
        assert norm > 0.5, "the gradients are clipped"
    states = [
        state["exp_avg"].numel()
        for part in optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return {name: param.detach() for name, param in cases.named_parameters(model)}, sum(states)


# -- the tests -------------------------------------------------------------------------------------------------------

_SLOW = pytest.mark.slow
SHARED = {"moe_shared_expert_intermediate_size": 40}
FIELDS = {
    "plain": {},
    "aux loss, z loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 1e-3,
    },
    "sequence and global aux loss": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02],
    },
    "sigmoid, expert bias, groups": {
        **SIGMOID_BIAS,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "one expert per token": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sinkhorn": {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
    "capacity, by prob": {"moe_expert_capacity_factor": 0.6},
    "capacity, by position": {
        "moe_expert_capacity_factor": 0.6,
        "moe_token_drop_policy": "position",
    },
    "capacity, padded": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "shared expert with gate": {**SHARED, "moe_shared_expert_gate": True},
    "overlapped shared expert": {**SHARED, "moe_shared_expert_overlap": True},
    "overlapped shared expert with gate": {
        **SHARED,
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_gate": True,
    },
    "recomputed MoE layers": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recomputed layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "recomputed shared experts": {
        **SHARED,
        "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts"],
    },
    "recomputed activations": {
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "clamped, gpt-oss": {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "gelu": {"activation_func": "gelu", "gated_linear_unit": False},
    "squared relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
}


def _slow(*case):
    return pytest.param(*case, marks=_SLOW)


# Kind of case, ranks, how many of them are an EP group and a (virtual) node, fields, and options of dispatch.
_LAYOUTS = ("plain", "sigmoid, expert bias, groups", "overlapped shared expert")
_OPTIONS = ({"order": "rank"}, {"capacity": 150}, {"capacity": 150, "order": "rank"})
_COMPARED = [
    *(("two ranks", 2, 2, None, name, {}) for name in FIELDS),
    *(("options", 2, 2, None, "plain", options) for options in _OPTIONS),
    *(("layouts", 2, 1, None, name, {}) for name in _LAYOUTS),
    *(_slow("layouts", 4, ep, None, name, {}) for ep in (4, 2) for name in _LAYOUTS),
    ("nodes", 2, 2, 1, "overlapped shared expert", {}),
    _slow("nodes", 2, 2, 1, "plain", {"order": "rank"}),
    _slow("nodes", 2, 2, 1, "recomputed MoE layers", {}),
    _slow("nodes", 2, 2, 1, "aux loss, z loss", {"capacity": 150}),
    _slow("nodes", 4, 4, 2, "shared expert with gate", {}),
    _slow("nodes", 4, 4, 2, "sigmoid, expert bias, groups", {}),
]


@pytest.mark.parametrize(
    ("function", "num_ranks", "ep", "ranks_per_node", "name", "options"), _COMPARED, ids=str
)
def test_equals_alltoall(
    ranks,
    function: str,
    num_ranks: int,
    ep: int,
    ranks_per_node: int | None,
    name: str,
    options: dict,
):
    """On several nodes, too, the order "slot" has the same bits."""
    kwargs = {"options": options, "ranks_per_node": ranks_per_node, "exact": "order" not in options}
    for result in ranks(num_ranks).run(cases.compare, ep=ep, fields=FIELDS[name], **kwargs):
        assert result["num_zeros"] <= 4
        assert any(map(sum, result["received"]))
        assert result["staging_copies"] == 0 or function == "nodes"
        # Both ranks send each expert ceil(24 tokens * 3 / 8 experts * 1.0) rows.
        is_padded = name == "capacity, padded"
        assert not is_padded or all(rows == [2 * 9] * 4 for rows in result["received"])


@pytest.mark.slow
@run_on(4, fixture="ranks")
def test_tensor_and_sequence_parallel(rank: int, num_ranks: int) -> None:
    """Tests a layer and not a GPTModel: Megatron's LayerNorm for CPUs has no sequence parallelism."""
    generator, by_form = torch.Generator().manual_seed(rank), {}
    with cases.opened(ep=4, tp=2, fields=SHARED) as (config, _, forms):
        sizes = cases.SEQUENCE // 2, cases.BATCH, config.hidden_size
        x, dy = torch.randn(2, *sizes, generator=generator)
        for form, form_spec in forms.items():
            layer = cases.layer_of(config, form_spec)
            y, dx = cases.differentiated(layer, x, dy)
            by_form[form] = {**cases.gradients_of(layer), "y": y, "x": dx}
    assert (parallel_state.get_tensor_model_parallel_world_size(), config.sequence_parallel) == (
        2,
        True,
    )
    cases.check_equal(by_form)


@pytest.mark.parametrize(
    ("num_ranks", "ep"), [(2, 2), pytest.param(4, 2, marks=_SLOW), pytest.param(4, 4, marks=_SLOW)]
)
@run_on(fixture="ranks")
def test_context_parallel(rank: int, num_ranks: int, ep: int) -> None:
    """Two ranks share each sequence. Their parts of the outputs and of the input's gradient, and after Megatron's DDP
    all parameters' gradients, are those of Megatron's layer on one rank with all sequences.

    Tests a layer and not a GPTModel: only Transformer Engine's attention has context parallelism. On four ranks there
    are two sequences, and with EP 2 two replicas of every expert."""
    fields = {**FIELDS["aux loss, z loss"], **SHARED}
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, num_ranks // 2, cases.SEQUENCE, cases.BATCH, 32, generator=generator)
    cases.use_groups()
    config = cases.config_of(**fields)
    layer = cases.layer_of(config, cases.reference_spec(config))
    want = [cases.differentiated(layer, *pair) for pair in zip(x, dy, strict=True)]
    gradients = {name: gradient / num_ranks for name, gradient in cases.gradients_of(layer).items()}
    with cases.opened(ep=ep, cp=2, fields=fields) as (config, _, forms):
        sequence = parallel_state.get_data_parallel_rank()
        first = parallel_state.get_context_parallel_rank()
        # As Megatron's batches have it.
        parts = torch.arange(cases.SEQUENCE).view(4, -1)[[first, 3 - first]].flatten()
        for form, form_spec in forms.items():
            ddp = _ddp(cases.layer_of(config, form_spec), overlap=False)
            actual = cases.differentiated(ddp, x[sequence, parts], dy[sequence, parts])
            ddp.finish_grad_sync()
            full_sequence = tuple(tensor[parts] for tensor in want[sequence])
            torch.testing.assert_close(actual, full_sequence, rtol=1e-4, atol=1e-4)
            got = {name: parameter.main_grad for name, parameter in cases.named_parameters(ddp)}
            assert (
                sum("experts." in name for name in got) == 2 * cases.NUM_EXPERTS // ep + 2
            )  # and two shared
            changes = cases.differences(got, {name: gradients[name] for name in got})
            assert max(changes.values(), default=0.0) < cases.ROUNDING, (form, changes)


def test_ranks_with_different_numbers_of_tokens(ranks):
    results = ranks(2).run(
        cases.compare, ep=2, fields=FIELDS["overlapped shared expert"], num_sequences=(3, 1)
    )
    totals = [sum(result["received"][0]) for result in results]
    assert sum(totals) == (3 + 1) * 12 * 3


@pytest.mark.parametrize("recompute", ["plain", "recomputed MoE layers"])
def test_rank_and_expert_without_tokens(ranks, recompute: str):
    fields = {**SIGMOID_BIAS, **FIELDS[recompute]}
    results = ranks(2).run(cases.compare, ep=2, fields=fields, bias=ALL_ON_RANK_0)
    assert all(min(rows) == 0 < max(rows) for rows in results[0]["received"])
    assert all(max(rows) == 0 for rows in results[1]["received"])


@pytest.mark.parametrize(
    ("overlap", "fields"), [(False, {}), (True, {}), pytest.param(True, cases.FP8, id="FP8")]
)
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), pytest.param(4, 2, marks=_SLOW), (2, 2)])
def test_main_grad_equals_megatrons_gradients(
    ranks, num_ranks: int, ep: int, overlap: bool, fields: dict
):
    """Under Megatron's DDP, with two micro-batches: fused, delayed, both. Four ranks: experts have two replicas."""
    ranks(num_ranks).run(main_grads, ep=ep, overlap=overlap, **fields)


def test_main_grad_of_a_rank_without_tokens(ranks):
    """The rank's hooks must run, or a reduction that overlaps with backward would wait forever."""
    first, second = ranks(2).run(main_grads, ep=2, overlap=True, bias=ALL_ON_RANK_0)
    assert all(max(rows) > 0 for rows in first)
    assert all(max(rows) == 0 for rows in second)


@pytest.mark.parametrize("num_chunks", [2, pytest.param(None, marks=_SLOW)])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), pytest.param(4, 2, marks=_SLOW)])
@pytest.mark.parametrize(
    "name", ["plain", "recomputed MoE layers", "recomputed layers", "overlapped shared expert"]
)
@run_on(fixture="ranks")
def test_pipeline_of_two_stages(
    rank: int, num_ranks: int, ep: int, num_chunks: int | None, name: str
) -> None:
    """Megatron's 1F1B, and its interleaved schedule (chunks of the model), with four micro-batches."""
    fields = {**_pipeline(2, num_chunks, layers_per_chunk=1), **FIELDS[name]}
    by_form = {}
    with cases.opened(ep=ep, pp=2, num_chunks=num_chunks, fields=fields) as (config, heap, forms):
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for form, form_spec in forms.items():
            by_form[form] = _scheduled(_chunks(config, form_spec, stage, num_stages=2))
            assert heap.leased_bytes == 0
            num_losses = sum(name.startswith("losses ") for name in by_form[form])
            assert num_losses == (NUM_MICRO_BATCHES if stage == 1 else 0)
    cases.check_equal(by_form)
    assert cases.num_zeros(by_form["megatron"]) <= 4


@pytest.mark.parametrize(
    ("stage", "num_stages", "layers_per_chunk", "group_size", "recompute"),
    [
        pytest.param(0, 2, 2, 2, False, id="first of 2"),
        pytest.param(1, 2, 1, 4, False, id="last of 2"),
        pytest.param(1, 3, 1, 4, True, id="second of 3, recomputed"),
    ],
)
@run_on(2, fixture="ranks")
def test_heap_of_an_interleaved_stage_is_exact(
    rank: int,
    num_ranks: int,
    stage: int,
    num_stages: int,
    layers_per_chunk: int,
    group_size: int,
    recompute: bool,
) -> None:
    """A heap of heap_bytes(num_layers = layers of a chunk * micro-batches in flight) suffices for one stage of an
    interleaved pipeline in Megatron's schedule, and a smaller heap does not.

    All ranks belong to that stage. Random numbers replace the tensors of other stages: every lease has the same size
    for all values."""
    cases.use_groups(ep=num_ranks)
    config = cases.config_of(
        **_pipeline(num_stages, NUM_CHUNKS, layers_per_chunk),
        **(FIELDS["recomputed layers"] if recompute else {}),
        microbatch_group_size_per_vp_stage=group_size,
        moe_ffn_hidden_size=512,  # wide enough for rows in the layout that heap_bytes counts with
    )
    in_flight = min(
        2 * (num_stages - 1 - stage) + (NUM_CHUNKS - 1) * group_size + 1,
        NUM_CHUNKS * NUM_MICRO_BATCHES,
    )
    num_layers = 1 if recompute else in_flight * layers_per_chunk
    num_tokens = cases.SEQUENCE * cases.BATCH
    planned = megatron.heap_bytes(config, num_tokens=num_tokens, num_layers=num_layers)
    too_small = pytest.raises(symmoe.errors.HeapExhausted, match="lease '")
    for num_bytes, outcome in ((planned, nullcontext()), (planned - ALIGNMENT_BYTES, too_small)):
        with megatron.open_heap(num_bytes) as heap:
            options = megatron.DispatchOptions(
                capacity=with_margin(num_tokens * num_ranks * config.moe_router_topk)
            )
            spec = megatron.use_symmoe(cases.reference_spec(config), heap, options=options)
            chunks = _chunks(config, spec, stage, num_stages)
            with outcome:
                _run_stage(config, chunks, stage, num_stages)


@pytest.mark.parametrize("name", ["plain", "recomputed MoE layers"])
@run_on(2, fixture="ranks")
def test_heap_of_the_planned_size_is_enough(rank: int, num_ranks: int, name: str) -> None:
    """A heap of the planned size suffices for three steps, with all tokens on rank 0 and with ordinary routing; the
    most uneven routing uses more than a third of it."""
    fields = {**SIGMOID_BIAS, **FIELDS[name]}
    cases.use_groups(ep=2)
    config = cases.config_of(**fields)
    num_layers = 1 if config.recompute_granularity else config.num_layers
    used = []
    for values in ({}, ALL_ON_RANK_0):
        num_bytes = megatron.heap_bytes(config, num_tokens=24, num_layers=num_layers)
        with megatron.open_heap(num_bytes) as heap:
            model = cases.steered(
                cases.model_of(config, megatron.use_symmoe(cases.reference_spec(config), heap)),
                values,
            )
            for _ in range(3):
                model(**cases.batch_of()).mean().backward()
            used.append(heap.high_water_bytes / num_bytes)
    assert all(0.1 < share < 1 for share in used), used
    assert max(used) > 0.35, used


@pytest.mark.parametrize("name", ["plain", "capacity, by prob", "recomputed layers"])
@pytest.mark.parametrize("form", ["experts", "dispatcher"])
@run_on(2, fixture="ranks")
def test_metrics_and_recorded_routing_are_those_of_megatron(
    rank: int, num_ranks: int, form: str, name: str
) -> None:
    """Records of symmoe's layers equal the routing maps of Megatron's routers for the same tokens."""
    maps: list[torch.Tensor] = []

    def keep_maps(model) -> None:
        for layer in model.decoder.layers:
            layer.mlp.router.register_forward_hook(
                lambda module, args, output: maps.append(output[1].clone())
            )

    with cases.opened(ep=2, fields=FIELDS[name]) as (config, _, forms):
        megatrons = cases.model_of(config, forms["megatron"])
        keep_maps(megatrons)
        with torch.no_grad():
            megatrons(**cases.batch_of())
        experts, expected = torch.arange(8), {}
        for number, routing_map in enumerate(maps):
            remote = routing_map[:, experts // 4 != rank]
            numbers = torch.where(routing_map, experts, -1)
            row_bytes = config.hidden_size * 4
            counts = int(remote.any(1).sum()) * row_bytes, int(remote.sum()) * row_bytes
            expected[f"decoder.layers.{number}.mlp"] = numbers, *counts
        model = cases.model_of(config, forms[form])
        routing = small.check_metrics(model, expected, lambda: model(**cases.batch_of()).mean())
        for ids, routing_map in zip(routing.values(), maps, strict=True):
            chosen = (ids[:, :, None] == experts).any(1)
            assert chosen.sum() == ids.numel()
            assert torch.equal(
                chosen & routing_map, routing_map
            )  # the router's, before its capacity factor's drops
        keep_maps(model)
        with symmoe.routing.replay_routing(model, routing), torch.no_grad():
            model(**cases.batch_of())
        assert all(map(torch.equal, maps[:2], maps[2:]))  # with the same drops
        for layer in model.decoder.layers:  # Megatron's own recording is off, with what it has kept
            layer.mlp.router.router_replay.clear_router_replay_action()
        flipped = cases.batch_of() | {"input_ids": cases.batch_of()["input_ids"].flip(1)}
        with symmoe.routing.record_routing(model) as routing, torch.no_grad():
            model(**flipped)
        for ids, routing_map in zip(routing.values(), maps[4:], strict=True):
            assert torch.equal((ids[:, :, None] == experts).any(1), routing_map)


def _route_by_hand(router, choices: list[torch.Tensor]) -> None:
    """Makes a router of Megatron weigh these experts, call by call; -1 has no weight."""
    calls = iter(choices)

    def routing(logits: torch.Tensor, **_) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.view(-1, cases.NUM_EXPERTS)
        scale = 2.5 if router.score_function == "sigmoid" else 1.0
        weights, ids = small.weigh(logits, next(calls), router.score_function, scale=scale)
        probs = torch.zeros_like(logits).scatter(1, ids, weights)
        return probs, probs > 0

    router.routing = routing


@pytest.mark.parametrize("score", ["plain", "sigmoid, expert bias, groups"])
@pytest.mark.parametrize(
    ("ep", "num_chunks"), [(2, None), (1, 2), pytest.param(1, None, marks=_SLOW)]
)
@run_on(2, fixture="ranks")
def test_each_micro_batch_uses_its_replayed_experts(
    rank: int, num_ranks: int, ep: int, num_chunks: int | None, score: str
) -> None:
    """Four micro-batches in Megatron's schedules, with all layers recomputed: a replay of the recorded experts has the
    same bits; other experts give the results of Megatron's layers without recomputation and with the routing of
    _route_by_hand."""
    pp = num_ranks // ep
    fields = {**_pipeline(pp, num_chunks), **FIELDS[score]}
    recomputed = {**fields, **FIELDS["recomputed layers"]}

    def record(steps: Iterator[int], model) -> tuple[torch.Tensor, object]:
        with symmoe.routing.record_routing(model) as routing:
            output = _forward_step(steps, model)
        recorded[chunks.index(model)].append(routing)
        return output

    def results(
        chunks: list, routing: Sequence = (), step=_forward_step
    ) -> dict[str, torch.Tensor]:
        with ExitStack() as replayed:
            for chunk, choices in zip(chunks, routing, strict=bool(routing)):
                replayed.enter_context(symmoe.routing.replay_routing(chunk, choices))
            return _scheduled(chunks, step)

    groups = {"ep": ep, "pp": pp, "num_chunks": num_chunks}
    with cases.opened(fields=recomputed, **groups) as (config, _, forms):
        stage = parallel_state.get_pipeline_model_parallel_rank()
        chunks = _chunks(config, forms["experts"], stage, pp)
        recorded = [[] for _ in chunks]
        want = results(chunks, step=record)
        assert [len(batches) for batches in recorded] == [NUM_MICRO_BATCHES] * len(chunks)
        assert cases.differences(results(chunks, recorded), want) == {}

        # Megatron counts rows only if experts have a capacity: some tokens have no expert, and none is dropped here.
        config = cases.config_of(**fields, moe_expert_capacity_factor=8.0)
        seeds = itertools.count(100 * rank)
        stock = _chunks(config, cases.reference_spec(config), stage, pp)
        different = [
            [small.other_routing(routing, next(seeds)) for routing in routings]
            for routings in recorded
        ]
        for chunk, routings in zip(stock, different, strict=True):
            for name in routings[0]:
                _route_by_hand(
                    chunk.get_submodule(name).router, [routing[name] for routing in routings]
                )
        actual = results(chunks, different)
        expected = results(stock)
    cases.check_equal({"experts": actual, "megatron": expected})
    assert max(cases.differences(actual, want).values()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["experts", "dispatcher"])
@run_on(2, fixture="ranks")
def test_torch_compile_does_not_trace_the_trips(rank: int, num_ranks: int, form: str) -> None:
    """A layer in torch.compile equals the same layer without it, and each trip breaks the graph."""
    with cases.opened(ep=2) as (config, _, forms):
        layer = cases.layer_of(config, forms[form])
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(
            cases.SEQUENCE, cases.BATCH, config.hidden_size, generator=generator, requires_grad=True
        )
        expected = small.step(layer, x)
        with torch.compiler.set_stance("default"):
            actual = small.step(torch.compile(layer, backend="aot_eager"), x)
            torch._dynamo.reset()
            breaks = torch._dynamo.explain(layer)(x).break_reasons
        damaged = {name: tensor * 1.01 for name, tensor in expected.items()}
    assert max(cases.differences(actual, expected).values(), default=0.0) < cases.ROUNDING
    assert min(cases.differences(actual, damaged).values()) > 100 * cases.ROUNDING
    left_alone = set()
    for graph_break in breaks:
        match = re.search(r"Skip inlining function <function (\S+) at", str(graph_break.reason))
        left_alone |= {match[1]} if match else set()
        assert match or not any(
            Path(frame.filename).is_relative_to(PACKAGE) for frame in graph_break.user_stack[-1:]
        ), graph_break
    trips = {
        "FusedTokenDispatcher.compute",
        "SymmTokenDispatcher.token_dispatch",
        "SymmTokenDispatcher.token_combine",
    }
    assert set() < left_alone <= {*trips, "SymmExperts.forward"}


@run_on(2, fixture="ranks")
def test_half_precision_error_is_at_most_megatrons(rank: int, num_ranks: int) -> None:
    """The root mean square error of all bf16 gradients against fp32 is as small as that of Megatron's layer."""
    errors = {}
    with cases.opened(ep=2) as (config, heap, forms):
        exact = cases.results_of(cases.model_of(config, forms["megatron"]))
        config = cases.config_of(bf16=True, params_dtype=torch.bfloat16)
        forms = cases.forms_of(forms["megatron"], heap, order="rank")
        for form in ("megatron", "experts"):
            model = Float16Module(config, cases.model_of(config, forms[form]))
            model(**cases.batch_of()).mean().backward()
            squares = [
                float(
                    (
                        (parameter.grad - exact[name]).square().sum() / exact[name].square().sum()
                    ).sqrt()
                )
                for name, parameter in cases.named_parameters(model)
            ]
            errors[form] = sum(squares) / len(squares)
    assert 0 < errors["experts"] < 1.2 * errors["megatron"]


@run_on(2, fixture="ranks")
def test_fp8_experts_multiply_the_recipes_numbers(rank: int, num_ranks: int) -> None:
    """SymmExperts with `fp8` against an oracle in float64 of Transformer Engine's blockwise recipe. A layer with these
    experts over the heap equals Megatron's dispatcher with them."""
    cases.use_groups(ep=2)
    config = cases.config_of(**cases.FP8)
    numbers = oracle.Numbers(*oracle.E4M3_POWERS)
    experts = cases.filled(megatron.SymmExperts(4, config))
    splits = (130, 0, 1, 25)
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(sum(splits), config.hidden_size, generator=generator) for _ in range(2))
    probs = torch.rand(sum(splits), generator=generator).requires_grad_()
    y, _ = experts(x.requires_grad_(), torch.tensor(splits), probs)
    y.backward(dy)
    w1, w2 = experts.linear_fc1.weight, experts.linear_fc2.weight
    want = oracle.mlp(numbers, x, probs, (w1, w2), dy, splits)
    for got, numbers in zip((y, x.grad, probs.grad, w1.grad, w2.grad), want.values(), strict=True):
        assert oracle.relative_error(got, numbers) < 2e-3
    with cases.opened(ep=2, fields=cases.FP8) as (config, _, forms):
        forms["megatron"] = megatron.use_symmoe_experts(forms["megatron"])
        actual = {
            form: cases.results_of(cases.model_of(config, forms[form]))
            for form in ("megatron", "experts")
        }
    cases.check_equal(actual)


def test_experts_start_from_megatrons_generators(ranks):
    first, second = ranks(2).run(initial_experts)
    weights = [*first, *second]
    for i, weight in enumerate(weights):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)  # init_method_std
        assert all(not weight.equal(earlier) for earlier in weights[:i])


@run_on(2, fixture="ranks")
def test_state_of_other_forms(rank: int, num_ranks: int) -> None:
    """A plain state dict of TEGroupedMLP loads into every weight; a flattened one is refused."""
    cases.use_groups(ep=2)
    experts = megatron.SymmExperts(4, cases.config_of())
    linears = (("linear_fc1", experts.linear_fc1), ("linear_fc2", experts.linear_fc2))
    state = {
        f"{name}.weight{i}": torch.randn(linear.weight.shape[1:])
        for name, linear in linears
        for i in range(4)
    }
    experts.load_state_dict(dict(state), strict=True)
    for name, linear in linears:
        for i in range(4):
            assert torch.equal(linear.weight[i], state[f"{name}.weight{i}"])
    factory = experts.sharded_state_dict("mlp.experts.")["mlp.experts.linear_fc2.weight"]
    with pytest.raises(symmoe.errors.ArgumentError, match=r"flattened part slice\(0, 8"):
        factory.build_fn("key", factory.data.flatten()[:8], factory.replica_id, slice(0, 8))


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (
            "expert tensor parallelism",
            symmoe.errors.ArgumentError,
            "expert_tensor_parallel_size (2) must be 1",
        ),
        ("another group's heap", symmoe.errors.ArgumentError, "open the heap over that group"),
        (
            "capacity with others' experts",
            symmoe.errors.ArgumentError,
            "capacity (64) needs SymmExperts",
        ),
        (
            "a choice without scores",
            symmoe.errors.ArgumentError,
            "moe_router_load_balancing_type ('sinkhorn') and moe_router_fusion (F",
        ),
        ("too small a capacity", symmoe.errors.CapacityError, "more than capacity (8)"),
        ("too small a heap", symmoe.errors.HeapExhausted, "lease 'received rows'"),
    ],
)
@run_on(2, fixture="ranks")
def test_unsupported_layers_are_refused_on_every_rank(
    rank: int, num_ranks: int, case: str, error: type, text: str
) -> None:
    """The constructor of an unsupported layer raises on every rank."""
    cases.use_groups(ep=2)
    num_bytes, use, options = {
        "capacity with others' experts": (
            1 << 20,
            megatron.use_symmoe_dispatcher,
            {"capacity": 64},
        ),
        "too small a capacity": (1 << 20, megatron.use_symmoe, {"capacity": 8}),
        "too small a heap": (24 << 10, megatron.use_symmoe, {}),
    }.get(case, (1 << 20, megatron.use_symmoe, {}))
    if case == "expert tensor parallelism":
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=2,
        )
    with pytest.raises(error, match=re.escape(text)), megatron.open_heap(num_bytes) as heap:  # noqa: PT012 - one of several
        if case == "another group's heap":
            cases.use_groups(ep=1)
        # With tensor parallelism the field would be refused first: it and the groups are of different commands.
        fields = FIELDS["sinkhorn"] if case == "a choice without scores" else {}
        config = cases.config_of(num_layers=1, sequence_parallel=False, **fields)
        spec = use(cases.reference_spec(config), heap, options=megatron.DispatchOptions(**options))
        model = cases.model_of(config, spec)
        with symmoe.routing.balanced_routing(model) if fields else nullcontext():
            model(**cases.batch_of())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "per_expert_keys"),
    [
        ("experts", False),
        pytest.param("experts", True, marks=pytest.mark.slow),
        pytest.param("megatron", False, marks=pytest.mark.slow),
        ("megatron", True),
    ],
)
def test_checkpoints_move_between_layouts_and_kinds_of_layers(
    ranks, tmp_path: Path, saved_by: str, per_expert_keys: bool
):
    """Saved at EP 2; loaded at EP 2, EP 1 x 2 replicas, EP 4 and EP 2 x 2 replicas, by both kinds of layers."""
    layouts = ((2, 1), (4, 4)) if per_expert_keys else ((2, 2), (2, 1), (4, 4), (4, 2))
    kwargs = {"path": str(tmp_path), "per_expert_keys": per_expert_keys}
    ranks(2).run(save, ep=2, form=saved_by, **kwargs)
    for num_ranks, ep in layouts:
        for loaded_by in ("experts", "megatron"):
            if loaded_by == saved_by == "megatron":
                continue
            num_loaded = ranks(num_ranks).run(load, ep=ep, form=loaded_by, **kwargs)
            # All experts of both layers and both linears, on the ranks of each replica.
            assert sum(num_loaded) == 2 * 2 * 8 * num_ranks // ep


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
@run_on(2, fixture="ranks")
def test_distributed_optimizer(rank: int, num_ranks: int, ep: int) -> None:
    """The optimizer shards parameters over the data-parallel ranks: all of them at EP 1, the dense ones at EP 2."""
    with cases.opened(ep=ep) as (config, _, forms), megatron_shim.CudaIsCpu():
        before = dict(cases.named_parameters(cases.model_of(config, forms["experts"])))
        plain, plain_size = _trained(config, forms["experts"], False)
        sharded, sharded_size = _trained(config, forms["experts"], True)
        megatrons, _ = _trained(config, forms["megatron"], True)
        assert len(cases.differences(sharded, before)) == len(before)
        assert max(cases.differences(sharded, plain).values(), default=0.0) < cases.ROUNDING
        # Adam divides by small numbers.
        assert max(cases.differences(sharded, megatrons).values()) < 100 * cases.ROUNDING
        assert sharded_size < 0.7 * plain_size if ep == 1 else sharded_size < plain_size
