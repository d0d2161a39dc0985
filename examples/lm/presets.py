"""Sizes and training settings: a run without its seed and its number of steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from symmoe import MoEConfig, RouterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One size of language model with its training; the defaults are those of the preset "cpu".

    The batch is global: `sequences` are divided over all ranks, so that a run at 1, 2 or 4 ranks is the
    same training.
    """

    moe: MoEConfig
    layers: int = 3
    heads: int = 6
    context: int = 256  # bytes a sequence
    sequences: int = 8  # sequences a step, over all ranks
    steps: int = 500
    learning_rate: float = 6e-3
    warmup_steps: int = 40
    eval_every: int = 100
    save_every: int = 200
    eval_sequences: int = 64  # held-out sequences an evaluation, over all ranks
    sample_bytes: int = 200
    device: str = "cpu"
    autocast: bool = False  # bf16 products with fp32 parameters
    takes: str = field(default="some minutes", repr=False)  # a checkpoint's settings do not have it
    muon: bool = False  # the matrices of experts are parameters of their own, which Muon trains

    def with_moe(self, **changes: Any) -> Preset:
        """This preset with other fields of its MoEConfig."""
        return dataclasses.replace(self, moe=dataclasses.replace(self.moe, **changes))


_ROUTER = RouterConfig(aux_loss_coef=0.01, z_loss_coef=1e-4)

PRESETS = {
    # Two processes of one thread each: some three minutes on idle cores.
    "cpu": Preset(
        moe=MoEConfig(hidden=192, ffn=128, num_experts=8, top_k=2, router=_ROUTER),
        takes="about 4 minutes on 2 cores",
    ),
    # About 2 billion parameters: 32 GB of weights, gradients and Adam moments in fp32 on a single GPU.
    "gpu": Preset(
        # Packed: an eighth of the rows that 12 layers keep for backward.
        moe=MoEConfig(
            hidden=2048, ffn=768, num_experts=32, top_k=8, layout="packed", router=_ROUTER
        ),
        layers=12,
        heads=16,
        context=2048,
        sequences=32,
        steps=300,
        learning_rate=4e-4,
        warmup_steps=30,
        eval_every=50,
        save_every=300,  # 24 GB over all ranks
        sample_bytes=600,
        device="cuda",
        autocast=True,
        takes="about 3 minutes on 2 H200s",
    ),
    # Some ten million parameters, two minutes on a GPU that six such runs share: to compare ways to train.
    "gpu-small": Preset(
        moe=MoEConfig(hidden=512, ffn=256, num_experts=16, top_k=4, router=_ROUTER),
        layers=6,
        heads=8,
        context=512,
        sequences=64,
        steps=600,
        learning_rate=3e-3,
        warmup_steps=60,
        save_every=600,
        eval_sequences=128,
        device="cuda",
        autocast=True,
    ),
    # For tests: seconds, and too small to learn much.
    "tiny": Preset(
        moe=MoEConfig(hidden=32, ffn=64, num_experts=4, top_k=2, router=_ROUTER),
        layers=2,
        heads=2,
        context=64,
        steps=20,
        learning_rate=3e-3,
        warmup_steps=4,
        eval_every=10,
        save_every=10,
        eval_sequences=8,
        sample_bytes=16,
        takes="seconds",
    ),
}
