"""The parts of the Megatron integration that need no other ranks: slots, specs, refused fields, imports."""

import copy

import pytest
import torch
import torch.nn.functional as F
from programs import printed_by

pytest.importorskip("megatron.core")

from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe import SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.integrations import megatron
from symmoe.integrations.megatron.compat import experts_problem, layer_problem
from symmoe.integrations.megatron.experts import activation_of
from symmoe.integrations.megatron.layer import select_slots


@pytest.fixture
def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=24,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(17, 8, 3), (5, 4, 4), (9, 2, 5), (0, 8, 2)]
)
def test_slots_are_the_experts_in_ascending_order(num_tokens: int, num_experts: int, top_k: int):
    generator = torch.Generator().manual_seed(num_tokens)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator) < 0.4
    routing_map &= routing_map.cumsum(1) <= top_k
    probs = torch.rand(
        num_tokens, num_experts, generator=generator, dtype=torch.float64, requires_grad=True
    )
    topk_idx, topk_probs = select_slots(routing_map, probs, top_k=top_k)

    width = min(top_k, num_experts)
    expected = [[e for e in range(num_experts) if row[e]] for row in routing_map.tolist()]
    assert topk_idx.tolist() == [chosen + [-1] * (width - len(chosen)) for chosen in expected]
    assert topk_idx.dtype == torch.int32
    assert topk_probs.dtype == torch.float32
    # The gradient of a slot without an expert is 0: it has no row.
    slot_grads = torch.rand(topk_probs.shape, generator=generator) * (topk_idx >= 0)
    topk_probs.backward(slot_grads)
    grads = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for t, chosen in enumerate(expected):
        assert topk_probs[t, : len(chosen)].equal(probs[t, chosen].float())
        grads[t, chosen] = slot_grads[t, : len(chosen)].double()
    assert probs.grad.equal(grads)


# -- specs ------------------------------------------------------------------------------------------------------------


def parts_of(mlp) -> tuple[type, object, dict]:
    """Module, submodules and the other arguments of an mlp spec of any version."""
    if isinstance(mlp, ModuleSpec):
        return mlp.module, mlp.submodules, mlp.params
    keywords = dict(mlp.keywords)
    return mlp.func, keywords.pop("submodules", None), keywords


def test_layer_spec_is_replaced_in_a_copy(heap: SymmetricHeap):
    spec = get_gpt_layer_local_spec(num_experts=8)
    module, submodules, _ = parts_of(spec.submodules.mlp)
    assert module is MoELayer
    for replaced, experts in (
        (megatron.use_symmoe(spec, heap), megatron.SymmExperts),
        (megatron.use_symmoe_dispatcher(spec, heap), submodules.experts),
    ):
        new_module, new_submodules, arguments = parts_of(replaced.submodules.mlp)
        assert new_module is megatron.SymmMoELayer
        assert new_submodules.experts is experts
        assert new_submodules.router is submodules.router
        assert new_submodules.shared_experts is submodules.shared_experts
        assert arguments["heap"] is heap
        assert parts_of(copy.deepcopy(replaced).submodules.mlp)[2]["heap"] is heap
        assert replaced.submodules.self_attention is spec.submodules.self_attention
    assert "pg_collection" not in arguments
    groups = object()
    assert (
        parts_of(megatron.use_symmoe(spec, heap, pg_collection=groups).submodules.mlp)[2][
            "pg_collection"
        ]
        is groups
    )
    new_module, new_submodules, arguments = parts_of(
        megatron.use_symmoe_experts(spec).submodules.mlp
    )
    assert (new_module, new_submodules.experts, arguments) == (MoELayer, megatron.SymmExperts, {})


def test_block_spec_keeps_dense_layers(heap: SymmetricHeap):
    dense = get_gpt_layer_local_spec()
    moe = get_gpt_layer_local_spec(num_experts=8)
    block = TransformerBlockSubmodules(layer_specs=[dense, moe, moe], layer_norm=torch.nn.LayerNorm)
    for spec in (block, ModuleSpec(module=torch.nn.Module, submodules=block)):
        replaced = megatron.use_symmoe(spec, heap)
        layers = (replaced.submodules if isinstance(replaced, ModuleSpec) else replaced).layer_specs
        assert layers[0] is dense or layers[0].submodules.mlp is dense.submodules.mlp
        parts = [parts_of(layer.submodules.mlp) for layer in layers[1:]]
        assert [module for module, _, _ in parts] == [megatron.SymmMoELayer] * 2
        assert parts[0][2]["heap"] is parts[1][2]["heap"] is heap
    assert parts_of(block.layer_specs[1].submodules.mlp)[0] is MoELayer


def test_spec_without_moe_is_refused(heap: SymmetricHeap):
    with pytest.raises(
        ArgumentError, match=r"spec \(ModuleSpec\) has no MoE layer; make it with num_experts"
    ):
        megatron.use_symmoe(get_gpt_layer_local_spec(), heap)


# -- refused fields ---------------------------------------------------------------------------------------------------


def fp8_problem(config: TransformerConfig) -> ArgumentError | None:
    """The error of a configuration that requests FP8, with a supported recipe unless the field is the recipe."""
    config.fp8 = "hybrid"
    config.fp8_recipe = "blockwise" if config.fp8_recipe == "delayed" else config.fp8_recipe
    config.moe_ffn_hidden_size = 2 * config.moe_ffn_hidden_size
    return experts_problem(config)


REFUSED = [
    ("moe_token_dispatcher_type", "flex", layer_problem),
    ("expert_tensor_parallel_size", 2, layer_problem),
    ("moe_router_padding_for_quantization", True, layer_problem),
    ("overlap_moe_expert_parallel_comm", True, layer_problem),
    ("overlap_dispatch_backward_with_experts_wgrad", True, layer_problem),
    ("moe_expert_rank_capacity_factor", 1.5, layer_problem),
    ("moe_paged_stash", True, layer_problem),
    ("transformer_impl", "inference_optimized", layer_problem),
    ("moe_router_topk", 33, layer_problem),
    ("cuda_graph_impl", "local", layer_problem),
    ("add_bias_linear", True, experts_problem),
    ("moe_apply_probs_on_input", True, experts_problem),
    ("fp4", "e2m1", experts_problem),
    ("activation_func_fp8_input_store", True, experts_problem),
    ("moe_mlp_glu_interleave_size", 32, experts_problem),
    ("init_model_with_meta_device", True, experts_problem),
    ("fp8_recipe", "mxfp8", fp8_problem),
    ("fp8_param", True, fp8_problem),
    ("fp8_wgrad", False, fp8_problem),
    ("first_last_layers_bf16", True, fp8_problem),
    ("hidden_size", 40, fp8_problem),
    ("moe_latent_size", 24, fp8_problem),
]


def test_the_tests_configuration_is_accepted(config: TransformerConfig):
    assert layer_problem(config) is None
    assert experts_problem(config) is None
    assert fp8_problem(config) is None


@pytest.mark.parametrize(("field", "value", "problem"), REFUSED)
def test_field_is_refused_by_name(config: TransformerConfig, field: str, value: object, problem):
    setattr(config, field, value)  # Megatron's own checks ask for extensions that are not here
    error = problem(config)
    assert isinstance(error, ArgumentError)
    assert str(error).startswith(f"{field} ({value!r}) m")
    if problem is experts_problem:
        assert layer_problem(config) is None


def test_captured_attention_is_accepted(config: TransformerConfig):
    field = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    config.cuda_graph_impl = "transformer_engine"
    for scope, accepted in ((["attn"], True), (["attn", "moe_router"], False), ([], False)):
        setattr(config, field, scope)
        assert (layer_problem(config) is None) == accepted


def test_offloaded_experts_are_refused(config: TransformerConfig):
    config.fine_grained_activation_offloading, config.offload_modules = (
        True,
        ["core_attn", "moe_act"],
    )
    assert "offload_modules (['moe_act'])" in str(experts_problem(config))
    config.offload_modules = ["core_attn"]
    assert experts_problem(config) is None


def test_padded_capacity_of_many_experts_is_refused(config: TransformerConfig):
    config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity = 1.0, True
    assert layer_problem(config) is None
    config.num_moe_experts = 64
    assert "num_moe_experts (64) must be at most 32" in str(layer_problem(config))


@pytest.mark.parametrize("gated", [False, True])
def test_activation_without_a_kernel_is_refused(config: TransformerConfig, gated: bool):
    config.activation_func, config.gated_linear_unit = F.relu, gated
    with pytest.raises(
        ArgumentError, match=r"activation_func \(relu\) must be one of silu, quick_gelu, gelu"
    ):
        activation_of(config)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", [F.silu, quick_gelu, F.gelu, fast_gelu, squared_relu])
def test_activations_are_megatrons(config: TransformerConfig, function, gated: bool):
    config.activation_func, config.gated_linear_unit = function, gated
    h = torch.randn(5, 12)
    scale = torch.rand(5)
    gate, up = h.chunk(2, dim=-1) if gated else (h, 1.0)
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles them
        want = function(gate) * up * scale[:, None]
    torch.testing.assert_close(activation_of(config)(h, scale), want, rtol=1e-5, atol=1e-6)


# -- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_its_integration_imports_megatron():
    code = (
        "import sys, symmoe, symmoe.integrations; assert 'megatron' not in sys.modules; "
        "import symmoe.integrations.megatron; assert 'megatron.core' in sys.modules"
    )
    printed_by("-W", "ignore", "-c", code)
