"""Checkpoints of a run: symmoe.checkpoint, and whether the newest one is of a run with the same settings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lm.ranks import Ranks
from symmoe.checkpoint import load_checkpoint, read_manifest, save_checkpoint

KEPT = 2  # checkpoints


def save(
    folder: Path,
    *,
    step: int,
    settings: dict[str, str | int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Writes the state after `step` steps. Collective."""
    save_checkpoint(folder, step, model=model, optimizer=optimizer, extra=settings, group=ranks.group, keep_last=KEPT)


def load(
    folder: Path,
    *,
    settings: dict[str, str | int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> int:
    """Restores the newest checkpoint into `model` and `optimizer`; returns the number of steps done. Collective.

    Raises:
        CheckpointError: there is no checkpoint.
        ValueError: it belongs to a run with other settings; the text names the setting and both values.
    """
    saved = read_manifest(folder).extra
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(f"--resume: {name} is {value!r}, but the checkpoint was made with {saved.get(name)!r}")
    return load_checkpoint(folder, model=model, optimizer=optimizer, group=ranks.group).step
