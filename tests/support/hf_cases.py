"""Tiny random models of every transformers family that symmoe knows, and batches for them."""

import math
import re
from collections.abc import Mapping

import torch
import transformers

# In a rank's process the lock of a progress bar is a semaphore in /dev/shm, which is not to be left there.
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_warning()

VOCABULARY = 61
BOUND = 5e-6  # measured: up to 1.9e-6
WRONG = 1e-2  # what a negative control exceeds
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "use_cache": False,
}
_QWEN3 = {**_COMMON, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

# The first layer of the Qwen3-MoE and the DeepSeek-V3 model is dense; gpt-oss' limit is low enough to clamp.
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_QWEN3, **_BALANCED, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, **_BALANCED, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_COMMON, **_BALANCED, intermediate_size=24, num_experts=8, num_experts_per_tok=3
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_COMMON, "num_hidden_layers": 3, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        **_BALANCED,
        head_dim=8,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
FAMILIES = sorted(CONFIGS)


@torch.no_grad()
def random_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object):
    """The model of a family with every parameter and persistent buffer random; the same on every rank."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    for module in model.modules():
        if hasattr(module, "alpha") and hasattr(module, "limit"):
            module.limit = 0.5  # versions before 5.23 do not read it from the config
    return model


def batch_of(rank: int, *, num_tokens: int | None = None) -> torch.Tensor:
    """int64 [2, S] of a rank: other tokens, and another S, on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, VOCABULARY, (2, num_tokens or 9 + 2 * rank), generator=generator)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest wanted entry; infinite for a wrong shape or a zero that is none."""
    if got.shape != want.shape:
        return math.inf
    worst, scale = (got - want).abs().max().item(), want.abs().max().item()
    return worst / scale if scale else (0.0 if worst == 0 else math.inf)


def mean_gradients(model: torch.nn.Module, batches: list[torch.Tensor]) -> tuple[dict, list]:
    """Gradients of the mean loss by name, and (loss, logits, aux loss) of every batch; of an unmodified model."""
    outputs = [model(batch, labels=batch) for batch in batches]
    (sum(output.loss for output in outputs) / len(batches)).backward()
    seen = [(o.loss.detach(), o.logits.detach(), getattr(o, "aux_loss", None)) for o in outputs]
    return {name: p.grad for name, p in model.named_parameters()}, seen


def share_of(whole: Mapping[str, torch.Tensor], rank: int, num_ranks: int, model_type: str) -> dict[str, torch.Tensor]:
    """Tensors of a plain model, by the names and in the parts that a rank has of them when the model is swapped."""
    share = {}
    for name, tensor in whole.items():
        own, part = name, tensor
        if match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name):
            kind = "bias" if match[3] else "weight"
            own = f"{match[1]}.mlp.{'fc1' if match[2] == 'gate_up' else 'fc2'}.{kind}"
            part = tensor.chunk(num_ranks)[rank]
            part = part.transpose(1, 2) if model_type == "gpt_oss" and kind == "weight" else part
        share[own] = part
    return share
