"""A decoder-only language model over bytes with a mixture of experts in every block.

B sequences on this rank, S bytes a sequence, H hidden size, A attention heads of size D, V = 256 byte values.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import symmoe
from lm.data import VOCABULARY
from lm.presets import Preset

_ROPE_BASE = 10_000.0
_PADDED_TO = 64  # bytes; divides every context


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """Logits [B, S, V], the sum of the balance losses [] (scaled), and the metrics of every MoE layer."""

    logits: torch.Tensor
    aux_loss: torch.Tensor
    moe_metrics: list[symmoe.MoEMetrics]


class LanguageModel(nn.Module):
    """Byte embedding, blocks, norm, head. Calls are collective: tokens visit the experts of every rank."""

    def __init__(self, preset: Preset, heap: symmoe.SymmetricHeap, *, device: torch.device) -> None:
        super().__init__()
        hidden = preset.moe.hidden
        self.autocast = preset.autocast
        self.embedding = nn.Embedding(VOCABULARY, hidden, device=device)
        self.blocks = nn.ModuleList(
            Block(preset, heap, device=device) for _ in range(preset.layers)
        )
        self.norm = nn.LayerNorm(hidden, bias=False, device=device)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, device=device)

    def forward(self, tokens: torch.Tensor) -> ModelOutput:
        """Next-byte logits for tokens [B, S] int64."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            x = self.embedding(tokens)
            rotation = rope_rotation(
                tokens.shape[1], self.blocks[0].attention.head_dim, tokens.device
            )
            metrics = []
            for block in self.blocks:
                x, block_metrics = block(x, rotation)
                metrics.append(block_metrics)
            logits = self.head(self.norm(x))
        aux_loss = torch.stack([m.aux_loss for m in metrics]).sum()
        return ModelOutput(logits=logits, aux_loss=aux_loss, moe_metrics=metrics)

    @torch.no_grad()
    def lend_experts(self, num_calls: int) -> None:
        """Takes part in this number of forward passes of other ranks, without tokens. Collective.

        If every rank passed the same text instead, its experts would compute it once for each of them.
        """
        nothing = self.embedding.weight.new_zeros(0, self.embedding.embedding_dim)
        with torch.autocast(nothing.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            for _ in range(num_calls):
                for block in self.blocks:
                    block.moe(nothing)


class Block(nn.Module):
    """Attention, then experts, each on a normalised copy of the residual stream [B, S, H]."""

    def __init__(self, preset: Preset, heap: symmoe.SymmetricHeap, *, device: torch.device) -> None:
        super().__init__()
        hidden = preset.moe.hidden
        self.attention_norm = nn.LayerNorm(hidden, bias=False, device=device)
        self.attention = Attention(hidden, preset.heads, device=device)
        self.moe_norm = nn.LayerNorm(hidden, bias=False, device=device)
        experts = None
        if preset.muon:
            sizes = preset.moe.experts_per_rank(heap.num_ranks), hidden, preset.moe.ffn
            experts = symmoe.GroupedMLP(
                *sizes, weights="discrete", precision=preset.moe.precision, device=device
            )
        self.moe = symmoe.MoELayer(preset.moe, heap, experts=experts, device=device)

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, symmoe.MoEMetrics]:
        x = x + self.attention(self.attention_norm(x), rotation)
        y, metrics = self.moe(self.moe_norm(x))
        return x + y, metrics


class Attention(nn.Module):
    """Causal self-attention with rotary positions; queries and keys are normalised over all heads, as OLMoE's are."""

    def __init__(self, hidden: int, heads: int, *, device: torch.device) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device=device)
        self.output = nn.Linear(hidden, hidden, bias=False, device=device)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        hidden, head = x.shape[-1], (self.heads, self.head_dim)
        qk, v = self.qkv(x).split((2 * hidden, hidden), dim=-1)
        qk = F.layer_norm(
            qk.unflatten(-1, (2, *head)), head
        )  # [B, S, 2, A, D], of autocast fp32, of FSDP bf16
        q, k = rotate(qk.float(), rotation).to(v.dtype).permute(2, 0, 3, 1, 4)  # [B, A, S, D]
        y = F.scaled_dot_product_attention(
            q, k, v.unflatten(-1, head).transpose(1, 2), is_causal=True
        )
        return self.output(y.transpose(1, 2).flatten(2))


def rope_rotation(length: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Rotary positions: the factors of pairs of a head's features, [S, 1, 1, D / 2] complex64."""
    frequencies = _ROPE_BASE ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)[:, None, None]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turns neighbouring features of x [B, S, 2, A, D] fp32 against each other by position, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)


@torch.no_grad()
def init_parameters(model: LanguageModel, *, seed: int, ep_rank: int) -> None:
    """The same initial model on any number of ranks: every matrix has its own generator, seeded by its name.

    An expert's name contains its global number, so expert g starts with the same weights on any rank.
    Matrices start at deviation fan_in^-0.5; those that write to the residual stream are smaller, to
    keep its variance constant over the depth; the head starts at zero (a uniform guess, 8 bits per byte).
    """
    num_writes, num_local = 2 * len(model.blocks), model.blocks[0].moe.experts.num_groups
    for full_name, parameter in model.named_parameters():
        name = full_name.rstrip(
            "0123456789"
        )  # of matrices of experts that are parameters of their own
        std = 1 / math.sqrt(parameter.shape[-1])
        if name.endswith(("attention.output.weight", "experts.fc2.weight")):
            std /= math.sqrt(num_writes)
        if name == "head.weight":
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        elif ".experts." in name:
            first = ep_rank * num_local + int(full_name.removeprefix(name) or 0)
            for i, expert in enumerate(parameter if parameter.dim() > 2 else [parameter]):
                _normal_(expert, std, f"{seed}/{name}/{first + i}")
        else:
            _normal_(parameter, std, f"{seed}/{name}")


def _normal_(tensor: torch.Tensor, std: float, key: str) -> None:
    generator = torch.Generator(tensor.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "little"))
    tensor.normal_(0.0, std, generator=generator)


def heap_bytes(preset: Preset, *, num_ranks: int) -> int:
    """Bytes of symmetric memory a training step can need on one rank of an EP group of that size, for any routing.

    A quarter more than the leases of one step, for gaps: their sizes change from step to step.
    """
    plan = symmoe.plan_memory(
        preset.moe,
        num_ranks=num_ranks,
        num_tokens=preset.sequences * preset.context // num_ranks,
        num_layers=preset.layers,
        dtype=torch.bfloat16 if preset.autocast else torch.float32,
        routing="worst",
    )
    return plan.heap_bytes * 5 // 4


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: bytes, *, num_bytes: int, context: int, seed: int
) -> bytes:
    """Continues `prompt` by sampling at temperature 0.8; the other ranks call `model.lend_experts` num_bytes times.

    The text is padded to a few lengths, which repeat: a byte does not attend to later ones.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        visible = tokens[:, -context:]
        length = visible.shape[1]
        logits = model(F.pad(visible, (0, -length % _PADDED_TO))).logits[:, length - 1].float()
        # Drawn on the CPU: the same stream of random numbers on every kind of device.
        drawn = torch.multinomial((logits / 0.8).softmax(-1).cpu(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)], dim=1)
    return bytes(tokens[0].tolist())
