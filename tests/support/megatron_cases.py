"""What ranks run to compare a GPTModel with symmoe's layers to one with Megatron's own. Everything runs on ranks.

The reference is Megatron's alltoall dispatcher with its SequentialMLP: none of the code that is under test. Models of
both kinds get the same numbers, every parameter from a generator of its own, and every rank has tokens of its own.
"""

import contextlib
import zlib
from collections.abc import Iterator

import megatron_shim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.integrations import megatron as integration

SEQUENCE, BATCH, VOCABULARY, NUM_EXPERTS = 12, 2, 64, 8
HEAP_BYTES = 8 << 20
ROUNDING = 2e-5  # of a tensor's largest value: what sums in another order change at most
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "moe_ffn_hidden_size": 48}
_ACTIVATIONS = {"gelu": F.gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
_UNCHECKED = (
    "fp8",
    "fp8_recipe",
    "delay_wgrad_compute",
)  # Megatron asks for extensions and schedules that CPUs lack


_GROUPS: list[dist.ProcessGroup] = []  # of Megatron, on this rank


def use_groups(
    *, ep: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, num_chunks: int | None = None
) -> None:
    """Megatron's process groups for these sizes, and for so many chunks of a stage. Collective over all ranks."""
    megatron_shim.install()
    torch.compiler.set_stance(
        "force_eager"
    )  # Megatron compiles a dozen small functions, for seconds each
    MoEAuxLossAutoScaler.main_loss_backward_scale = (
        None  # of another shape in schedules than in a loop of one's own
    )
    sizes = (tp, pp, num_chunks, cp, ep, 1)
    # Schedules of a pipeline leave a state behind. The groups of others serve again: to make them takes half a second.
    if pp > 1 or not parallel_state.model_parallel_is_initialized() or sizes != _sizes():
        _make_groups(*sizes)
    model_parallel_cuda_manual_seed(1)


def _sizes() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _make_groups(
    tp: int, pp: int, num_chunks: int | None, cp: int, ep: int, expert_tp: int
) -> None:
    parallel_state.destroy_model_parallel()
    groups = dist.distributed_c10d._world.pg_map
    for group in (
        _GROUPS
    ):  # of which that ends one, and each would keep three threads for as long as the process lives
        if group in groups:
            dist.destroy_process_group(group)
    _GROUPS.clear()
    before = set(groups)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
    )
    _GROUPS.extend(set(groups) - before)


def config_of(**fields):
    """A tiny TransformerConfig, with `fields` changed."""
    unchecked = {name: fields.pop(name) for name in _UNCHECKED if name in fields}
    if "activation_func" in fields:
        fields["activation_func"] = _ACTIVATIONS[fields["activation_func"]]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": 3,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
    }
    config = TransformerConfig(**{**defaults, **fields})
    vars(config).update(unchecked)
    return config


def model_of(config, spec):
    """A GPTModel with numbers that depend on the names of its parameters alone."""
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    return filled(GPTModel(config, spec, VOCABULARY, SEQUENCE, **stage))


def filled(model):
    """The model with numbers that depend on the names of its parameters alone."""
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator)
                    * (0.5 if "router" in name else 0.2)
                )
    return model


def named_parameters(model) -> list[tuple[str, object]]:
    """Parameters under names that are the same for all kinds of experts, with global expert numbers.

    A weight of all of a rank's experts comes as one tensor each, in the same memory, with `grad` and `main_grad`.
    """
    return [
        (part_name, part)
        for name, parameter in model.named_parameters()
        for part_name, part in named_parts(name.removeprefix("module."), parameter)
    ]


def named_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, part) of what belongs to a parameter: one per expert, or the tensor itself."""
    before, marker, after = name.partition("experts.")
    if not marker or "shared_" in before:
        return [(name, tensor)]
    first = (
        parallel_state.get_expert_model_parallel_rank()
        * NUM_EXPERTS
        // parallel_state.get_expert_model_parallel_world_size()
    )
    if after.startswith("local_experts."):  # SequentialMLP: local_experts.{i}.linear_fc1.weight
        _, i, linear, _ = after.split(".")
        return [(f"{before}{marker}{first + int(i)}.{linear}.weight", tensor)]
    linear, _, number = after.partition(".weight")
    if number:  # TEGroupedMLP: linear_fc1.weight{i}
        return [(f"{before}{marker}{first + int(number)}.{linear}.weight", tensor)]
    parts = []
    for i, part in enumerate(tensor.detach().unbind(0)):  # ours: linear_fc1.weight
        part.grad = None if tensor.grad is None else tensor.grad[i]
        if hasattr(tensor, "main_grad"):
            part.main_grad = tensor.main_grad[i]
        parts.append((f"{before}{marker}{first + i}.{after}", part))
    return parts


def steered(model, bias: dict[int, float] | None):
    """The model with these values, by expert, in its routers' expert biases."""
    for layer in model.decoder.layers:
        for expert, value in (bias or {}).items():
            layer.mlp.router.expert_bias[expert] = value
    return model


def reference_spec(config):
    """Megatron's own layers."""
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization
    )


def forms_of(spec, heap, **options) -> dict:
    """Layer specs: Megatron's own; with our dispatcher and Megatron's experts; with both of ours."""
    choice = integration.DispatchOptions(**{"order": "slot", **options})
    forms = {"megatron": spec, "experts": integration.use_symmoe(spec, heap, options=choice)}
    if "capacity" not in options:  # which others' experts cannot have
        forms["dispatcher"] = integration.use_symmoe_dispatcher(spec, heap, options=choice)
    return forms


@contextlib.contextmanager
def opened(
    *,
    fields: dict | None = None,
    options: dict | None = None,
    ranks_per_node: int | None = None,
    **groups: int | None,
) -> Iterator[tuple[object, object, dict]]:
    """A configuration with these fields, a heap over this rank's EP group, and the layer specs of :func:`forms_of`.
    groups: see use_groups."""
    use_groups(**groups)
    config = config_of(**(fields or {}))
    with integration.open_heap(HEAP_BYTES, ranks_per_node=ranks_per_node) as heap:
        yield config, heap, forms_of(reference_spec(config), heap, **(options or {}))


def check_equal(by_form: dict[str, dict[str, torch.Tensor]], *, exact: bool = True) -> None:
    """Ours equals Megatron's, bit for bit with Megatron's experts, within rounding with ours."""
    for form in by_form.keys() - {"megatron"}:
        changes = differences(by_form[form], by_form["megatron"])
        assert max(changes.values(), default=0.0) < ROUNDING, (form, changes)
        assert form != "dispatcher" or not exact or not changes, changes


def num_zeros(tensors: dict[str, torch.Tensor]) -> int:
    """How many tensors are zeros, whose equality says nothing."""
    return sum(not tensor.any() for tensor in tensors.values())


def batch_of(num_sequences: int = BATCH) -> dict[str, torch.Tensor]:
    """Tokens of this data-parallel rank."""
    generator = torch.Generator().manual_seed(11 + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, VOCABULARY, (num_sequences, SEQUENCE + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(SEQUENCE).expand(num_sequences, SEQUENCE),
        "attention_mask": torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None],
        "labels": tokens[:, 1:].contiguous(),
    }


def results_of(model, num_sequences: int = BATCH) -> dict[str, torch.Tensor]:
    """Losses of every token, all gradients and the routers' counts, by name."""
    losses = model(**batch_of(num_sequences))
    losses.mean().backward()
    results = {"losses": losses.detach().clone()}
    results |= gradients_of(model)
    for name, buffer in model.named_buffers():
        if "tokens_per_expert" in name and buffer is not None:
            results[name] = buffer.clone()
    return results


def gradients_of(model) -> dict[str, torch.Tensor]:
    """All gradients by name; no gradient is zeros."""
    params = named_parameters(model)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params}


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Names of tensors that are not equal bit for bit, with the largest difference over the largest wanted value."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    errors = {}
    for name, tensor in want.items():
        if not torch.equal(got[name], tensor):
            scale = tensor.abs().max().clamp(min=1e-12)
            errors[name] = float((got[name] - tensor).abs().max() / scale)
    return errors


def compare(
    rank: int,
    num_ranks: int,
    *,
    ep: int,
    fields: dict,
    bias: dict[int, float] | None = None,
    options: dict | None = None,
    num_sequences: tuple[int, ...] | None = None,
    ranks_per_node: int | None = None,
    exact: bool = True,
) -> dict:
    """One GPTModel in forms of its MoE layers, on the same ranks: Megatron's; our dispatcher and experts; either alone.
    They are equal, see check_equal.

    Args:
        fields: of the configuration.
        bias: expert number to router.expert_bias.
        options: of dispatch; the order is "slot".
        num_sequences: of each rank; None: the same.
        ranks_per_node: of the heap.
        exact: with Megatron's experts, bit for bit.

    Returns:
        figures of the run with our dispatcher and experts.
    """
    kwargs = {"fields": fields, "options": options, "ranks_per_node": ranks_per_node}
    with opened(ep=ep, **kwargs) as (config, heap, forms):
        assert (heap.topology.num_nodes > 1) == (ranks_per_node is not None)
        forms["experts alone"] = integration.use_symmoe_experts(forms["megatron"])
        by_form, received = {}, []
        for form, form_spec in forms.items():
            model = model_of(config, form_spec)
            steered(model, bias)
            if form == "experts":
                note_rows(model, received)
            before = heap.statistics.num_staging_copies
            by_form[form] = results_of(
                model, BATCH if num_sequences is None else num_sequences[rank]
            )
            copies = heap.statistics.num_staging_copies - before
            assert form != "dispatcher" or copies > 0, "these are Megatron's own layers"
            if form == "experts":
                staging_copies = copies
            del model
    check_equal(by_form, exact=exact)
    return {
        "num_zeros": num_zeros(by_form["megatron"]),
        "received": received,
        "staging_copies": staging_copies,
    }


def layer_of(config, spec):
    """The MoE layer of a transformer layer."""
    layer = spec.submodules.mlp(config=config)
    layer.set_layer_number(1)
    return filled(layer)


def differentiated(layer, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output and the gradient of its input, for this gradient of the output."""
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy)
    return y.detach(), x.grad


def note_rows(model, received: list[list[int]]) -> None:
    """Notes the rows of every local expert, each time a layer's experts run."""
    for layer in model.decoder.layers:
        num_local = layer.mlp.experts.num_local_experts
        local = slice(first := layer.mlp.listeners.heap.rank * num_local, first + num_local)
        layer.mlp.listeners.add(
            lambda report, local=local: received.append(report.expert_load[local].tolist())
        )
