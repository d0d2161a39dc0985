"""AdamW, or Muon for the matrices of experts and AdamW for the rest."""

from __future__ import annotations

from functools import partial

import torch

from lm.model import LanguageModel
from lm.presets import Preset

_WEIGHT_DECAY = 0.01


def make_optimizer(model: LanguageModel, preset: Preset) -> torch.optim.Optimizer:
    """The optimizer of all of the model's parameters."""
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True)
    if not preset.muon:
        return adamw(model.parameters())
    named = list(model.named_parameters())
    experts = [parameter for name, parameter in named if ".experts." in name]
    # Updates of the size of AdamW's: one rate for both.
    muon = torch.optim.Muon(experts, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return Together(
        muon, adamw([parameter for name, parameter in named if ".experts." not in name])
    )


class Together(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with one state, as a checkpoint has it."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self._parts, self.param_groups = parts, groups
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        for part in self._parts:
            part.step()
