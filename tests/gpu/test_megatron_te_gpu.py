"""Megatron's GPTModel with Transformer Engine's modules around symmoe's layer, on one GPU.

Attention, norms and linear layers are TE's in all models. The reference is Megatron's alltoall with TEGroupedMLP.
"""

from typing import Any

import pytest
import torch
from cluster import run_on

pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")

from megatron_cases import (
    HEAP_BYTES,
    batch_of,
    config_of,
    filled,
    forms_of,
    gradients_of,
    integration,
    use_groups,
)

BOUND = 0.05  # of bf16, root mean square, relative


@run_on(1, device="cuda")
def test_layers_between_transformer_engines_modules(rank: int, num_ranks: int) -> None:
    """Relative errors of losses and all gradients of our dispatcher around TEGroupedMLP, and of both of ours."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    use_groups()
    wide = {"hidden_size": 64, "moe_ffn_hidden_size": 64}
    config = config_of(
        **wide,
        bf16=True,
        params_dtype=torch.bfloat16,
        moe_grouped_gemm=True,
        use_cpu_initialization=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True
    )
    batch = {name: tensor.cuda() for name, tensor in batch_of().items()}
    by_form: dict[str, dict[str, torch.Tensor]] = {}
    with integration.open_heap(HEAP_BYTES) as heap:
        for form, form_spec in forms_of(spec, heap).items():
            model: Any = filled(GPTModel(config, form_spec, 64, batch["input_ids"].shape[1])).cuda()
            losses = model(**batch)
            losses.float().mean().backward()
            by_form[form] = {"losses": losses.detach().clone(), **gradients_of(model)}
    want = {name: tensor.float() for name, tensor in by_form.pop("megatron").items()}
    errors = {
        form: {
            name: float((got[name].float() - want[name]).norm() / want[name].norm())
            for name in want
        }
        for form, got in by_form.items()
    }
    assert errors.keys() == {"experts", "dispatcher"}
    for form, by_name in errors.items():
        assert (
            sum(".mlp.experts." in name for name in by_name) == 2 * 2 * 8
        )  # layers, linears, experts
        assert max(by_name.values()) < BOUND, form
