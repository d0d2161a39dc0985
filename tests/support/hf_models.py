"""Tiny random models of every module of transformers whose experts go through its experts interface."""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import torch
import transformers

VOCABULARY = 61
# By the names that fields of configurations have in many models; the values fit together.
_SIZES = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "mamba_n_heads",
        ),
        8,
    ),
    **dict.fromkeys(
        (
            "num_experts_per_tok",
            "moe_k",
            "moe_topk",
            "top_k_experts",
            "num_hidden_layers",
            "n_group",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "topk_group",
            "n_shared_experts",
            "first_k_dense_replace",
            "num_dense_layers",
            "ngram_size",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "sliding_window",
            "mamba_chunk_size",
            "d_rel",
        ),
        4,
    ),
    **dict.fromkeys(
        ("swa_num_attention_heads", "swa_num_key_value_heads", "linear_num_heads", "index_topk"), 4
    ),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "swa_head_dim"), 8
    ),
    **dict.fromkeys(
        ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state"), 8
    ),
    **dict.fromkeys(
        ("router_hidden_size", "hidden_size_per_layer_input", "mamba_head_dim", "ssm_state_size"), 8
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "index_head_dim", "rel_extent", "o_lora_rank"), 16
    ),
    **dict.fromkeys(
        ("index_n_heads", "index_kpool", "linear_num_key_heads", "linear_num_value_heads"), 2
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "unpadded_vocab_size": VOCABULARY - 1,
    "swiglu_limit": 0.5,  # low enough to clamp
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
_OF_IMAGES = {
    **dict.fromkeys(("hidden_size", "out_hidden_size", "embed_dim", "text_hidden_size"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "patch_size"), 4),
    **dict.fromkeys(("image_size", "num_position_embeddings"), 16),
    "intermediate_size": 24,
    "deepstack_visual_indexes": [0],
    "head_dim": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_CHANGES = {
    "beam": _SPARSE,
    "deepseek_ocr2": _SPARSE,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "ernie4_5_vl_moe": {**_MROPE, "moe_intermediate_size": [24, 16]},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": _MROPE,
    "glm5_next": {**_SPARSE, "qk_rope_head_dim": 0, "head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": _MROPE,
    "inkling2_loop": {
        "num_hidden_layers": 3,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    }
    | {"n_layers_per_attn_res_block": 1, "loop_gate_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


@cache
def experts_code() -> dict[str, str]:
    """By module: the class of its experts, without names of classes."""
    code = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        _, marker, after = path.read_text().partition("@use_experts_implementation")
        if marker:
            body, _, _ = after.partition("\n\n\n")
            code[path.parent.name] = re.sub(r"\b[A-Z]\w*", "", body)
    return code


def module_names() -> list[str]:
    return list(experts_code())


def model_class(name: str, *ends: str) -> type:
    """The first model class of a module whose name has one of these ends, the first of them if it can be."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = [
        member
        for member in vars(module).values()
        if inspect.isclass(member) and member.__module__ == module.__name__
    ]
    models = [cls for cls in classes if issubclass(cls, transformers.PreTrainedModel)]
    return next(model for end in ends for model in models if model.__name__.endswith(end))


@torch.no_grad()
def tiny_model(
    name: str,
    *,
    with_images: bool = False,
    seed: int = 0,
    scale: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> transformers.PreTrainedModel:
    """A language model or else a text model, or one that has it and one for images, in evaluation mode, with random
    parameters and persistent buffers; the same on every rank. changes: of the configuration."""
    if with_images:
        cls = model_class(name, "ForConditionalGeneration")
        parts = {
            part: config
            for part, config in cls.config_class.sub_configs.items()
            if part != "audio_config"
        }
        changes = {
            part: _sizes_of(name, config, is_text="text" in part) for part, config in parts.items()
        }
    else:
        cls = model_class(name, "ForCausalLM", "TextModel", "ForTokenClassification")
        changes = _sizes_of(name, cls.config_class) | changes
    model = cls._from_config(cls.config_class(**changes), attn_implementation="eager", dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict(keep_vars=True).values():
        values = torch.randn(tensor.shape, generator=generator)
        # Integers are ids of the experts of a token.
        tensor.copy_(values * scale if tensor.is_floating_point() else values.argsort())
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6, name
    return model.eval()


def _sizes_of(name: str, config: type, *, is_text: bool = True) -> dict:
    fields = {field for base in config.__mro__ for field in vars(base).get("__annotations__", {})}
    all_sizes = _SIZES if is_text else _OF_IMAGES
    sizes = {field: value for field, value in all_sizes.items() if field in fields}
    return sizes | (_CHANGES.get(name, {}) if is_text else {})
