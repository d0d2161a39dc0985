"""Tiny random models of every transformers family that symmoe knows, and batches for them."""

import math
import re
from collections.abc import Mapping

import torch
import transformers
from hf_models import VOCABULARY, tiny_model

# In a rank's process the lock of a progress bar is a semaphore in /dev/shm, which is not to be left there.
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_warning()

BOUND = 5e-6  # measured: up to 1.9e-6
WRONG = 1e-2  # what a negative control exceeds
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

# The first layer of the Qwen3-MoE and the DeepSeek-V3 model is dense.
CHANGES = {
    "qwen3_moe": {
        **_BALANCED,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "mixtral": _BALANCED,
    "olmoe": {**_BALANCED, "num_experts_per_tok": 3},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    },
    "gpt_oss": _BALANCED,
}
FAMILIES = sorted(CHANGES)
TRANSPOSED = ("aria", "gpt_oss", "openai_privacy_filter")


def random_model(family: str, **options) -> transformers.PreTrainedModel:
    """The model of a family in training mode. options: of tiny_model."""
    model = tiny_model(
        family, **{"scale": 0.3, "use_cache": False, **CHANGES[family], **options}
    ).train()
    for module in model.modules():
        if hasattr(module, "alpha") and hasattr(module, "limit"):
            module.limit = 0.5  # versions before 5.23 do not read it from the config
    return model


def batch_of(rank: int) -> torch.Tensor:
    """int64 [2, S] of a rank: other tokens, and another S, on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, VOCABULARY, (2, 9 + 2 * rank), generator=generator)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest wanted entry; infinite for a wrong shape or a zero that is none."""
    if got.shape != want.shape:
        return math.inf
    worst = (got - want).abs().max().item()
    scale = want.abs().max().item()
    return worst / scale if scale else (0.0 if worst == 0 else math.inf)


def mean_gradients(model: torch.nn.Module, batches: list[torch.Tensor]) -> tuple[dict, list]:
    """Gradients of the mean loss by name, and (loss, logits, aux loss) of every batch; of an unmodified model."""
    outputs = [model(batch, labels=batch) for batch in batches]
    (sum(output.loss for output in outputs) / len(batches)).backward()
    results = [(o.loss.detach(), o.logits.detach(), getattr(o, "aux_loss", None)) for o in outputs]
    return {name: p.grad for name, p in model.named_parameters()}, results


def share_of(
    tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int, model_type: str
) -> dict[str, torch.Tensor]:
    """Tensors of a plain model, by the names and in the parts that a rank has of them when the model is swapped."""
    share = {}
    for name, tensor in tensors.items():
        swapped_name, part = name, tensor
        if match := re.fullmatch(r"(.*\.experts)\.(gate_up|up|down)_proj(_bias)?", name):
            kind = "bias" if match[3] else "weight"
            swapped_name = f"{match[1]}.mlp.{'fc2' if match[2] == 'down' else 'fc1'}.{kind}"
            part = tensor.chunk(num_ranks)[rank]
            part = part.transpose(1, 2) if model_type in TRANSPOSED and kind == "weight" else part
        share[swapped_name] = part
    return share
