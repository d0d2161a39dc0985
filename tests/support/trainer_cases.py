"""What trainers are given in tests: a small transformers model, and data that can be learnt."""

from __future__ import annotations

from typing import Any

import torch
from hf_cases import VOCABULARY, random_model
from torch import nn
from torch.utils.data import Dataset

STEPS = 20
GLOBAL_BATCH = 4  # sequences of an optimizer step
LENGTH = 12
LEARNING_RATE = 1e-2
MAX_NORM = 0.3  # below all norms of these models, so that clipping counts


class Sequences(Dataset):
    """Sequences of LENGTH tokens, some of which are not predicted: another number in each."""

    def __init__(self, number: int, *, seed: int, all_labels: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
        self._ids = (
            self._ids[:, :1] + torch.arange(LENGTH) * (1 + self._ids[:, 1:2] % 3)
        ) % VOCABULARY  # can be learnt
        self._labels = self._ids.clone()
        for row, labels in enumerate(self._labels):
            labels[: 0 if all_labels else row % 5] = -100

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def train_data() -> Sequences:
    return Sequences(STEPS * GLOBAL_BATCH // 2, seed=1)  # two epochs


def eval_data() -> Sequences:
    return Sequences(8, seed=2)


def small_model(**changes: Any) -> nn.Module:
    """The same on every rank."""
    return random_model("qwen3_moe", output_router_logits=False, **changes)


def share_of(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """The state of a plain model, by the names and in the parts that rank `rank` of two has of it."""
    share = {}
    for name, tensor in model.state_dict().items():
        own, part = name, tensor
        for theirs, ours in (("gate_up_proj", "mlp.fc1.weight"), ("down_proj", "mlp.fc2.weight")):
            if name.endswith(f"experts.{theirs}"):
                own, part = name.replace(theirs, ours), tensor.chunk(2)[rank]
        share[own] = part
    return share
