"""Checkpoints that are either whole or absent: one directory per step, one file per rank.

    checkpoints/step-000100/rank-0.pt   rank-1.pt ...
    checkpoints/latest                  the name of the newest whole directory

The directory gets its name only when every rank has written its file, and `latest` is replaced after that,
so a kill at any moment leaves the previous checkpoint in force.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import nn

from lm.ranks import Ranks


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
    name = f"step-{step:06d}"
    unfinished = folder / f"{name}.unfinished"
    if ranks.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    ranks.barrier()
    state = {
        "step": step,
        "settings": settings,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, unfinished / f"rank-{ranks.rank}.pt")
    ranks.barrier()
    if ranks.is_main:
        shutil.rmtree(folder / name, ignore_errors=True)
        unfinished.rename(folder / name)
        _point_to(folder, name)
    ranks.barrier()


def load(
    folder: Path,
    *,
    settings: dict[str, str | int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> int:
    """Restores the newest checkpoint into `model` and `optimizer`; returns the number of steps done.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it belongs to a run with other settings; the text names the setting and both values.
    """
    pointer = folder / "latest"
    if not pointer.exists():
        raise FileNotFoundError(f"--resume: no checkpoint in {folder}")
    # Rank 0's file exists for any number of ranks, so a wrong number is reported as that and not as a
    # missing file.
    checkpoint = folder / pointer.read_text()
    _check_settings(torch.load(checkpoint / "rank-0.pt", weights_only=True, mmap=True)["settings"], settings)
    state = torch.load(checkpoint / f"rank-{ranks.rank}.pt", weights_only=True, map_location=ranks.device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _point_to(folder: Path, name: str) -> None:
    """Makes `name` the newest checkpoint; keeps the one before it and deletes the others."""
    pointer = folder / "latest"
    kept = {name, pointer.read_text() if pointer.exists() else name}
    unfinished = folder / "latest.unfinished"
    unfinished.write_text(name)
    os.replace(unfinished, pointer)
    for old in folder.glob("step-??????"):
        if old.name not in kept:
            shutil.rmtree(old)


def _check_settings(saved: dict[str, str | int], current: dict[str, str | int]) -> None:
    for name, value in current.items():
        if saved.get(name) != value:
            raise ValueError(f"--resume: {name} is {value!r}, but the checkpoint was made with {saved.get(name)!r}")
